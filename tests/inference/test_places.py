"""True positions: what the functions see, that no value compiles anything, and what is refused."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import flexc
from flexc import frontend, pipeline
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.inference.places import MAX_POSITION, packed
from flexc.ir.eager import Environment, evaluate
from flexc.reference import reference
from tests.accuracy import qkv


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def rows_of_all(kernel, q, k, v, rows):
    """What the whole sequence gives for the rows."""
    return kernel(q, k, v)[:, :, rows]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_row_from_the_middle_equals_that_row_of_the_whole(as_tensor):
    kernel = flexc.attention(lambda s, b, h, i, j: s - 0.1 * (i - j), lambda b, h, i, j: (i >= j) & (i - j < 20))
    q, k, v = qkv(q_len=50)
    for start in (0, 17, 45):
        offset = torch.full((2,), start) if as_tensor else start
        out = kernel(q[:, :, start : start + 5], k, v, q_offset=offset)
        torch.testing.assert_close(out, rows_of_all(kernel, q, k, v, slice(start, start + 5)))


def test_each_batch_entry_has_its_own_position_and_length():
    kernel = flexc.attention(mask_mod=causal)
    q, k, v = qkv(q_len=4, kv_len=40)
    offsets, lengths = torch.tensor([30, 3], dtype=torch.int32), torch.tensor([34, 7])
    out = kernel(q, k, v, q_offset=offsets, kv_len=lengths)
    for entry in range(2):
        alone = [x[entry : entry + 1] for x in (q, k[:, :, : lengths[entry]], v[:, :, : lengths[entry]])]
        torch.testing.assert_close(out[entry : entry + 1], kernel(*alone, q_offset=int(offsets[entry])))


@pytest.mark.parametrize("length", [7, torch.tensor([7, 0])])
def test_keys_past_the_length_may_hold_anything(length):
    q, k, v = qkv(q_len=3, kv_len=20, grad=True)
    with torch.no_grad():
        k[:, :, 7:], v[:, :, 7:] = torch.nan, torch.inf
    out, aux = flexc.attention()(q, k, v, kv_len=length, return_lse=True)
    gradients = torch.autograd.grad(out.sum() + aux.lse[0].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert not gradients[1][:, :, 7:].any() and not gradients[2][:, :, 7:].any()
    torch.testing.assert_close(out.double(), reference(None, None, q, k, v, kv_len=length)[0], rtol=1e-5, atol=1e-5)


def test_no_value_compiles_anything(monkeypatch):
    pipeline.clear_cache()
    compiled, compile_attention = [], pipeline.compile_attention
    monkeypatch.setattr(pipeline, "compile_attention", lambda *a, **k: compiled.append(a) or compile_attention(*a, **k))
    kernel = flexc.attention(mask_mod=causal)
    q, k, v = qkv(q_len=2, kv_len=60)
    for step in range(5):
        kernel(q, k, v, q_offset=step, kv_len=torch.tensor([step + 2, 60]))
    assert len(compiled) == 1
    for step in range(5):
        kernel(q, k, v, q_offset=torch.tensor([step, 7]), kv_len=torch.tensor([step + 2, 60]))
    assert len(compiled) == 2


def test_watched_calls_see_positions():
    kernel = flexc.attention(mask_mod=causal)
    q, k, v = qkv(q_len=3, kv_len=20)
    lengths = torch.tensor([12, 20])
    graph = make_fx(lambda q, k, v, n: kernel(q, k, v, q_offset=9, kv_len=n))(q, k, v, lengths)
    torch.testing.assert_close(graph(q, k, v, lengths), kernel(q, k, v, q_offset=9, kv_len=lengths))


def test_eager_setting_sees_positions(monkeypatch):
    kernel = flexc.attention(mask_mod=causal)
    q, k, v = qkv(q_len=3, kv_len=20)
    expected = kernel(q, k, v, q_offset=9, kv_len=torch.tensor([12, 5]))
    monkeypatch.setenv("FLEXC_EAGER", "1")
    torch.testing.assert_close(kernel(q, k, v, q_offset=9, kv_len=torch.tensor([12, 5])), expected)


def test_a_captured_tensor_of_the_same_name_keeps_its_own():
    kv_len = torch.tensor([3.0, 5.0])
    kernel = flexc.attention(lambda s, b, h, i, j: s * kv_len[b])
    q, k, v = qkv(q_len=3, kv_len=20)
    lengths = torch.tensor([12, 20])
    expected, _ = reference(kernel.score_mod, None, q, k, v, kv_len=lengths)
    torch.testing.assert_close(kernel(q, k, v, kv_len=lengths).double(), expected, rtol=1e-5, atol=1e-5)


def test_packed_rows_are_the_heads_of_a_group():
    graph = frontend.trace(lambda s, b, h, i, j: s + 100 * h + i)[0].graph
    group, rows, head = 3, torch.arange(12), torch.tensor(1)
    places = {"score": torch.zeros(12), "batch": head, "q_idx": rows, "kv_idx": head, "head": head}
    root = packed(graph, group).score
    (found,) = evaluate([root], Environment(places))
    expected = [100 * (1 * group + r % group) + r // group for r in range(12)]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("positions", "error", "message"),
    [
        ({"q_offset": 1.5}, InputError, r"q_offset is a float; expected an int, or an int32 or int64 tensor of shape \[2\]"),
        ({"q_offset": True}, InputError, "q_offset is a bool"),
        ({"q_offset": -1}, InputError, "q_offset is -1; expected a number from 0"),
        ({"q_offset": torch.zeros(2)}, InputError, "q_offset has dtype torch.float32"),
        ({"q_offset": torch.zeros(3, dtype=torch.int32)}, ShapeError, r"q_offset has shape \[3\]"),
        ({"kv_len": torch.tensor(5)}, ShapeError, r"kv_len has shape \[\]"),
        ({"kv_len": 21}, InputError, "kv_len is 21 and k has 20 tokens"),
        ({"kv_len": torch.zeros(2, dtype=torch.int32, device="meta")}, InputError, r"kv_len is on meta and q on cpu: move it with"),
        ({"q_offset": MAX_POSITION}, UnsupportedError, "expected positions up to 16777215"),
    ],
)
def test_bad_positions_are_named(positions, error, message):
    q, k, v = qkv(q_len=3, kv_len=20)
    with pytest.raises(error, match=message):
        flexc.attention(mask_mod=causal)(q, k, v, **positions)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"kv_len": torch.tensor([20, 21])}, r"kv_len\[1\] is 21; expected a number from 0 to 20"),
        ({"q_offset": torch.tensor([-3, 0])}, r"q_offset\[0\] is -3; expected"),
    ],
)
def test_check_mode_reads_the_tensors(positions, message, monkeypatch):
    monkeypatch.setenv("FLEXC_CHECK", "1")
    q, k, v = qkv(q_len=3, kv_len=20)
    with pytest.raises(InputError, match=message):
        flexc.attention(mask_mod=causal)(q, k, v, **positions)


def test_compiled_regions_run_positions_outside():
    kernel = flexc.attention(mask_mod=causal)
    q, k, v = qkv(q_len=3, kv_len=20)

    def step(q, k, v):
        return kernel(q, k, v, q_offset=9) * 2

    torch.testing.assert_close(torch.compile(step, backend="eager")(q, k, v), step(q, k, v))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="q_offset and kv_len run outside of compiled regions"):
        torch.compile(step, backend="eager", fullgraph=True)(q, k, v)
