"""`flexc.check` finds what is wrong, names it, and lets right kernels pass; with kernels made by hand, so no backend is needed."""

import math
from types import SimpleNamespace

import pytest
import torch

from flexc.check import check, compare
from flexc.errors import InputError, InternalError
from flexc.reference import eager
from tests.accuracy import assert_as_accurate_as_eager, qkv


class HandMade:
    """A kernel that is eager PyTorch, with a fault put in by `spoil`: (out, lse) → (out, lse)."""

    backend = "by hand"

    def __init__(self, score_mod=None, mask_mod=None, spoil=None, **captured):
        self.score_mod, self.mask_mod, self.tensors = score_mod, mask_mod, captured
        self.spoil = spoil or (lambda out, lse: (out, lse))

    def captured(self, q, k, v):
        return self.tensors

    def __call__(self, q, k, v, *, scale=None, return_lse=False):
        out, lse = self.spoil(*eager(self.score_mod, self.mask_mod, q, k, v, scale=scale))
        return (out, SimpleNamespace(lse=lse)) if return_lse else out


class WrongGradient(torch.autograd.Function):
    """x forward; `factor` times the gradient backward."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)


def alibi(score, batch, head, q_idx, kv_idx):
    return score - slopes[head] * (q_idx - kv_idx)


def late_rows(batch, head, q_idx, kv_idx):
    return q_idx > kv_idx


def bad_rows(report):
    return {row.name for row in report.rows if not row.ok}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_kernel_passes(dtype):
    report = compare(HandMade(alibi, late_rows), *qkv(q_len=33, dtype=dtype), {"slopes": slopes})
    assert report.ok, str(report)
    assert [row.name for row in report.rows] == ["out", "lse", "out (no grad)", "lse (no grad)", "dq", "dk", "dv", "d slopes"]
    assert all(row.size > 0 for row in report.rows)
    report.raise_if_bad()


FAULTS = {
    "lse in base 2": (lambda out, lse: (out, lse / math.log(2)), {"lse", "lse (no grad)"}),
    "lse without gradient": (lambda out, lse: (out, lse.detach()), {"dq", "dk", "d slopes"}),
    "out one part in a hundred too large": (lambda out, lse: (out * 1.01, lse), {"out", "out (no grad)"}),
    "gradients one part in a hundred too large": (lambda out, lse: (WrongGradient.apply(out, 1.01), lse), {"dq", "dk", "dv", "d slopes"}),
    "one NaN": (lambda out, lse: (torch.where(torch.arange(out.numel()).view_as(out) == 7, math.nan, out), lse), {"out", "out (no grad)"}),
    "lse zero without gradient": (lambda out, lse: (out, lse if lse.requires_grad else lse * 0), {"lse (no grad)"}),
    "row without keys not zero": (lambda out, lse: (torch.where(lse[..., None] == -math.inf, 1e-30, out), lse), {"out", "out (no grad)"}),
    "wrong shape": (lambda out, lse: (out[:, :, :-1], lse), {"out (no grad)", "dv"}),
    "lse of a row without keys finite": (lambda out, lse: (out, lse.clamp(min=-1e4)), {"lse", "lse (no grad)"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_named(fault):
    spoil, expected = FAULTS[fault]
    report = compare(HandMade(alibi, late_rows, spoil), *qkv(q_len=33), {"slopes": slopes})
    assert not report.ok and expected <= bad_rows(report), str(report)
    assert fault == "wrong shape" or "out" in expected or "out" not in bad_rows(report)
    with pytest.raises(InternalError, match="the kernel differs from the reference"):
        report.raise_if_bad()


def test_dropped_gradient_of_a_captured_tensor_is_found():
    detached = slopes.detach()
    kernel = HandMade(alibi, late_rows)
    kernel_without = HandMade(lambda s, b, h, i, j: s - detached[h] * (i - j), late_rows)

    class Mixed(HandMade):
        def __call__(self, *args, **options):
            return kernel_without(*args, **options)

    report = compare(Mixed(alibi, late_rows), *qkv(q_len=33), {"slopes": slopes})
    assert bad_rows(report) == {"d slopes"}
    assert compare(kernel, *qkv(q_len=33), {"slopes": slopes}).ok


def test_reduced_precision_of_float32_is_found():
    """TF32 keeps 10 bits: that is not float32."""

    class Half(HandMade):
        def __call__(self, q, k, v, *, scale=None, return_lse=False):
            out, lse = eager(self.score_mod, self.mask_mod, q.half(), k.half(), v.half(), scale=scale)
            return out.float(), SimpleNamespace(lse=lse)

    assert {"out", "lse", "dq", "dk", "dv"} <= bad_rows(compare(Half(), *qkv(q_len=33), {}))


def test_one_key_in_a_row_allows_the_noise_of_row_sums():
    """The gradient of q is exactly 0 there, and a backward pass from a rounded output cannot give that."""
    q, k, v = qkv(q_len=1, kv_len=1, dtype=torch.bfloat16)

    class FromOutput(HandMade):
        def __call__(self, q, k, v, *, scale=None, return_lse=False):
            out, lse = eager(self.score_mod, self.mask_mod, q, k, v, scale=scale)
            noisy = q + WrongGradient.apply(lse, 0.0).sum() * 0
            return out + (noisy - noisy.detach()).sum() * 1e-3, SimpleNamespace(lse=lse)

    assert compare(FromOutput(), q, k, v, {}).ok


def test_one_tensor_three_times_and_inputs_left_alone():
    x, _, _ = qkv(heads=2, q_len=20, grad=True)
    report = compare(HandMade(), x, x, x, {})
    assert report.ok, str(report)
    assert x.grad is None


def test_nan_of_the_users_function_is_named_with_what_it_captured():
    depth, ok = -1.0, torch.tensor([1.0, math.nan, 1.0, 1.0])

    def root(score, batch, head, q_idx, kv_idx):
        return torch.where(q_idx == 3, torch.sqrt(depth - score * score), score) + ok[0]

    report = compare(HandMade(root), *qkv(q_len=5, grad=True), {})
    assert not report.ok
    expected = r"root gives NaN at batch 0, head 0, q_idx 3, kv_idx 0 for the score .* \(40 times at this q_idx\)"
    with pytest.raises(InputError, match=expected):
        report.raise_if_bad()
    assert "depth = -1.0" in str(report) and "ok = tensor [4], 1 of them NaN" in str(report)


def test_nan_of_the_inputs_is_not_blamed_on_the_function():
    q, k, v = qkv(q_len=5)
    q[0, 0, 0, 0] = math.nan
    assert "the scores are NaN before the function" in str(compare(HandMade(alibi), q, k, v, {}))


def test_check_prints_a_table(capsys):
    report = check(HandMade(alibi, late_rows, slopes=slopes), *qkv(q_len=20))
    printed = capsys.readouterr().out
    assert "d slopes" in printed and "by hand" in printed and "ok" in printed
    check(HandMade(), *qkv(q_len=20), quiet=True)
    assert capsys.readouterr().out == ""
    assert "d slopes" in str(report) and len(str(report).splitlines()) == len(report.rows) + 5


def test_rule_for_single_tensors():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_as_accurate_as_eager((truth + 1.9e-3).half(), (truth + 1e-3).half(), truth)
    with pytest.raises(AssertionError, match="error 3"):
        assert_as_accurate_as_eager(truth + 3e-3, truth + 1e-3, truth)
    with pytest.raises(AssertionError, match="error nan"):
        assert_as_accurate_as_eager(truth * math.nan, truth + 1e-3, truth)
