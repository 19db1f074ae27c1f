"""Functions whose kernels run in the interpreter's process; each returns "" or what is wrong."""

from __future__ import annotations

import warnings

import torch

import flexc
from flexc.check import compare
from flexc.reference import reference
from tests.accuracy import normal, qkv


def report_of(score_mod, mask_mod, captured=None, q_len=20, kv_len=33) -> str:
    """Forward and backward against plain PyTorch, on lengths that are no multiples of a tile."""
    warnings.simplefilter("ignore")  # NumPy's, of rows past the end
    q, k, v = qkv(1, 2, 1, q_len, kv_len, 16, grad=True)
    report = compare(flexc.attention(score_mod, mask_mod, backend="triton"), q, k, v, captured or {})
    return "" if report.ok else str(report)


def tensors_named_like_the_kernels_own() -> str:
    """Names of arguments, of locals, of modules and of printed values."""
    rows, entry, q_len, tl, heads, scale = (normal(33, seed=i, grad=True) for i in range(6))
    raw, logit, p, ds, x1, libdevice = (normal(2, seed=i, grad=True) for i in range(6))

    def score(score, batch, head, q_idx, kv_idx):
        by_row = rows[q_idx] + entry[q_idx] * tl[kv_idx] + q_len[kv_idx]
        return score * heads[q_idx] + scale[kv_idx] + by_row + raw[head] * logit[head] + p[head] - ds[head] * x1[head] + libdevice[head]

    captured = {name: value for name, value in locals().items() if isinstance(value, torch.Tensor)}
    return report_of(score, None, captured)


def numbers_named_like_the_kernels_own() -> str:
    """Run-time scalars."""
    rows, entry, q_len, tl, heads, scale = (flexc.runtime(n) for n in (2, 3, 5, 7, 11, 13))
    columns, block, tiles, section, lse2, delta = (flexc.runtime(n / 8) for n in range(1, 7))

    def score(score, batch, head, q_idx, kv_idx):
        return score * columns + block * (q_idx - kv_idx) * tiles + section * lse2 - delta * ((q_idx * rows + kv_idx * entry) % tl)

    def mask(batch, head, q_idx, kv_idx):
        return (q_idx * heads + q_len >= kv_idx) & ((q_idx + kv_idx) % scale != 1)

    return report_of(score, mask)


def names_that_continue_another() -> str:
    """`w` gathered as the second value would be called as `w_2` is."""
    w, w_grad, w_2 = normal(2, seed=1, grad=True), normal(2, seed=2, grad=True), flexc.runtime(3.0)
    w_1, w_3, w_4, w_5, w_grad0 = (flexc.runtime(n / 4) for n in range(1, 6))

    def score(score, batch, head, q_idx, kv_idx):
        return score * w[head] * w_2 + w_grad[head] * w_1 + w_3 * q_idx - w_4 * kv_idx + w_5 * w_grad0

    return report_of(score, None, {"w": w, "w_grad": w_grad})


def numbers_of_64_bits() -> str:
    """Beside one of 32."""
    ids, wide, small = torch.arange(33), flexc.runtime(2**40 + 5), flexc.runtime(5)

    def score(score, batch, head, q_idx, kv_idx):
        return score + (wide * small + ids[kv_idx] * wide) % 1000 / 500

    return report_of(score, None)


def rows_past_the_end() -> str:
    """The raw product of a query past the end is 0, and 0 * rsqrt(0) is NaN: it must not reach the gradients of keys and values."""
    strength = torch.tensor(0.5, requires_grad=True)

    def score(score, batch, head, q_idx, kv_idx):
        return score * torch.rsqrt(score * score) * strength + 0.1 * score

    return report_of(score, None, {"strength": strength})


def constant_and_negative_indices() -> str:
    """Also through a view that is not contiguous."""
    table = normal(3, 4, 2, seed=1, grad=True)
    turned = table.detach().permute(2, 0, 1).requires_grad_()

    def score(score, batch, head, q_idx, kv_idx):
        return score + table[2, -1, head] * table[-2, 3, kv_idx % 2] - turned[q_idx % 2 - 2, head - 1, 1]

    return report_of(score, None, {"table": table, "turned": turned})


def floats_divided_with_floor() -> str:
    """Quotients on the edge of an integer: 49 / 49, and 1.0 // 0.1 = 9."""
    width = normal(33, seed=3).abs() + 0.5

    def score(score, batch, head, q_idx, kv_idx):
        distance = (q_idx - kv_idx) * 0.1
        return score + distance // 0.1 * 0.01 + torch.floor(q_idx / (kv_idx + 1)) * 0.1 - torch.remainder(distance, width[kv_idx])

    return report_of(score, None)


def steps_of_positions() -> str:
    """Products of positions under a floor keep their order: (49 * (1 / 49)) * 1 is below 1."""
    heat = torch.tensor(7.0)

    def score(score, batch, head, q_idx, kv_idx):
        return score + torch.floor((q_idx - kv_idx) * (1 / 49) * heat) * 0.3

    return report_of(score, None, q_len=100, kv_len=100)


def rows_that_see_only_the_least_number() -> str:
    """The smallest float32 in place of -inf leaves a row its keys, as in PyTorch."""

    def score(score, batch, head, q_idx, kv_idx):
        return torch.where((q_idx >= 4) & (q_idx >= kv_idx), score, torch.finfo(torch.float32).min)

    q, k, v = qkv(1, 2, 1, 20, 33, 16)
    out = flexc.attention(score, backend="triton")(q, k, v)
    expected = v.mean(2, keepdim=True).expand(-1, 2, 4, -1)
    return "" if torch.allclose(out[:, :, :4], expected, atol=1e-5) else f"{out[0, 0, :4]}"


def rows_of_the_least_number() -> str:
    """In units of 1 / log2(e) it would overflow, and the row would be empty in place of a mean of all keys."""
    warnings.simplefilter("ignore")
    least = torch.finfo(torch.float32).min
    q, k, v = qkv(1, 2, 1, 20, 33, 16, grad=True)
    wrong = []
    for values in (torch.tensor([0.0, least] * 10), torch.tensor([0.0, least] * 330).view(20, 33)):
        values[3], values[4] = least, -torch.inf
        by_row = (lambda s, b, h, i, j, t=values: s + t[i]) if values.dim() == 1 else (lambda s, b, h, i, j, t=values: s + t[i, j])
        out = flexc.attention(by_row, backend="triton")(q, k, v)
        if not torch.allclose(out.double(), reference(by_row, None, q, k, v)[0], atol=1e-5):
            wrong.append(f"bias of rank {values.dim()}: another mean")
        if not all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), [q, k, v])):
            wrong.append(f"bias of rank {values.dim()}: a gradient is not finite")
    return "\n".join(wrong)


CASES = (
    rows_of_the_least_number,
    tensors_named_like_the_kernels_own,
    numbers_named_like_the_kernels_own,
    names_that_continue_another,
    numbers_of_64_bits,
    rows_past_the_end,
    constant_and_negative_indices,
    floats_divided_with_floor,
    steps_of_positions,
    rows_that_see_only_the_least_number,
)
