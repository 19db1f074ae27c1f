"""Sinks: a logit of each head in the softmax, against a softmax with one more column and against a key with value 0."""

import math

import pytest
import torch

import flexc
from flexc.errors import InputError, ShapeError
from flexc.sinks import with_sink
from tests.accuracy import qkv


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return 0 <= q - k < 5


def no_first_rows(b, h, q, k):
    return (q > 6) & (k <= q)


SINK = torch.tensor([0.5, -3.0, 2.0, 8.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", [None, causal, window, no_first_rows])
def test_output_lse_and_all_gradients_are_those_of_the_reference(backend, device, mask, dtype):
    if dtype == torch.float64 and backend != "cpu":
        pytest.skip("float64 is for the CPU")
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device, requires_grad=True)
    kernel = flexc.attention(lambda s, b, h, q, k: s - slopes[h] * (q - k), mask, backend=backend)
    q, k, v = (x.to(device, dtype) for x in qkv(2, 4, 2, 33, 40, 16))
    flexc.check(kernel, q, k, v, sink=SINK.to(device, torch.float32), quiet=True).raise_if_bad()


def test_the_reference_counts_a_sink_as_a_key_of_value_0():
    q, k, v = (x.double() for x in qkv(2, 4, 4, 9, 12, 8))
    out, lse = flexc.reference(None, None, q, k, v, sink=SINK)
    wider_k, wider_v = (torch.cat([x, torch.zeros(2, 4, 1, 8, dtype=torch.float64)], 2) for x in (k, v))
    expected, expected_lse = flexc.reference(lambda s, b, h, i, j: torch.where(j == 12, SINK[h], s), None, q, wider_k, wider_v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_row_without_keys_sees_the_sink_alone():
    q, k, v = qkv(1, 4, 4, 9, 12, 8)
    out, aux = flexc.attention(mask_mod=no_first_rows)(q, k, v, return_lse=True, sink=SINK)
    assert not out[:, :, :7].any() and torch.equal(aux.lse[0, :, :7], SINK[:, None].expand(4, 7))


def test_no_keys_and_an_infinite_sink_give_nothing_and_no_nan():
    out, lse = torch.zeros(1, 2, 1, 3, requires_grad=True), torch.tensor([[[-math.inf], [1.0]]], requires_grad=True)
    sink = torch.tensor([-math.inf, -math.inf], requires_grad=True)
    sunk, total = with_sink(out, lse, sink)
    assert total.flatten().tolist() == [-math.inf, 1.0] and not sunk.any()
    gradients = torch.autograd.grad(sunk.sum() + total[0, 1].sum(), (out, lse, sink))
    assert all(g.isfinite().all() for g in gradients)


def test_a_sink_inside_a_compiled_region():
    kernel = flexc.attention(mask_mod=causal)
    q, k, v = qkv(1, 4, 4, 9, 9, 8)
    sink = SINK.clone().requires_grad_()

    def layer(q, k, v, sink):
        return kernel(q, k, v, sink=sink)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (layer, compiled):
        out = call(q, k, v, sink)
        out.square().sum().backward()
    truth = flexc.reference(None, causal, q, k, v, sink=sink)[0]
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    (expected,) = torch.autograd.grad(truth.square().sum(), sink)
    torch.testing.assert_close(sink.grad, 2 * expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sink", "error", "message"),
    [
        (0.0, InputError, "expected sink to be a float tensor of one logit for each query head, got float"),
        (torch.zeros(4, dtype=torch.int64), InputError, "got torch.int64"),
        (torch.zeros(2), ShapeError, r"expected sink of shape \(4,\), one logit for each query head, got \(2,\)"),
        (torch.zeros(4, 1), ShapeError, r"got \(4, 1\)"),
        (torch.zeros(4, device="meta"), InputError, "sink is on meta, q on cpu: move it"),
    ],
)
def test_a_sink_that_does_not_fit_is_refused(sink, error, message):
    q, k, v = qkv(1, 4, 2, 9, 9, 8)
    with pytest.raises(error, match=message):
        flexc.attention(mask_mod=causal)(q, k, v, sink=sink)
