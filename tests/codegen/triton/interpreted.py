"""Functions whose kernels run in the interpreter's process; each returns "" or what is wrong."""

from __future__ import annotations

import itertools
import math
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch

import flexc
from flexc.check import compare
from flexc.codegen.triton import Tile
from flexc.reference import reference
from tests.accuracy import normal, qkv


def report_of(score_mod, mask_mod, captured=None, q_len=20, kv_len=33, batch=1, tiles=(), **options) -> str:
    """Forward and backward against plain PyTorch, on lengths that are no multiples of a tile."""
    warnings.simplefilter("ignore")  # NumPy's, of rows past the end
    q, k, v = qkv(batch, 2, 1, q_len, kv_len, 16, grad=True)
    kernel = flexc.attention(score_mod, mask_mod, backend="triton", **options)
    kernel._options = replace(kernel._options, tiles=tiles)
    report = compare(kernel, q, k, v, captured or {})
    return "" if report.ok else f"{options} {tiles}\n{report}"


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


def weights_of_rows_past_the_digits_of_lse() -> str:
    """lse goes to base e and back, which moves a huge one: a weight of 2 to the power of that would be infinite."""
    warnings.simplefilter("ignore")
    q, k, v = qkv(1, 2, 1, 400, 33, 16, grad=True)
    bias = -(10.0 ** (8 + 29 * torch.rand(400, generator=torch.Generator().manual_seed(0))))  # one in forty comes back larger
    out = flexc.attention(lambda s, b, h, i, j: s + bias[i] * 3.0, backend="triton")(q, k, v)
    gradients = torch.autograd.grad(out.square().sum(), [q, k, v])
    return "" if all(g.isfinite().all() and g.abs().max() < 1e3 for g in gradients) else "a gradient is not finite"


def causal(batch, head, q_idx, kv_idx):
    return q_idx + 13 >= kv_idx


def gradients_that_meet_in_every_way() -> str:
    """Blocks that the mask skips for one batch element and not for the other; tensors read twice; half precision; a view."""
    number, slopes, rows = normal(seed=1, grad=True), normal(2, seed=2, grad=True), normal(20, seed=3, grad=True)
    columns, relative = normal(2, 33, seed=4, grad=True), normal(2, 60, seed=5, grad=True)
    pairs, wide, half = normal(33, 33, seed=6, grad=True), normal(2, 2, 20, 33, seed=7, grad=True), normal(2, 20, 33, seed=8, grad=True)
    narrow = normal(2, 2, 20, 33, seed=10).to(torch.float16).requires_grad_()
    table, halved = normal(40, seed=9, grad=True), half.detach().to(torch.float16).transpose(0, 1).contiguous().transpose(0, 1)
    halved.requires_grad_()
    ids = torch.tensor([[0] * 9 + [1] * 24, [0] * 30 + [1] * 3])

    def score(score, batch, head, q_idx, kv_idx):
        by_row = score * number - slopes[head] * (q_idx - kv_idx) * 0.1 + rows[q_idx] * score * 0.1 + columns[batch, kv_idx]
        by_pair = pairs[q_idx, kv_idx] + pairs[kv_idx, q_idx] + wide[batch, head, q_idx, kv_idx] * score + halved[head, q_idx, kv_idx]
        diagonal = relative[head, q_idx - kv_idx + 33] + relative[1, (q_idx - kv_idx) % 7] * score
        return by_row + by_pair + narrow[batch, head, q_idx, kv_idx] + diagonal + table[q_idx + kv_idx // 4] + slopes[0]

    def mask(batch, head, q_idx, kv_idx):
        return (ids[batch, q_idx] == ids[batch, kv_idx]) & (q_idx + 13 >= kv_idx)

    captured = {"number": number, "slopes": slopes, "rows": rows, "columns": columns, "relative": relative, "pairs": pairs, "wide": wide}
    captured |= {"halved": halved, "narrow": narrow, "table": table}
    return "".join(report_of(score, mask, captured, batch=2, deterministic=way) for way in (False, True))


def diagonals_of_tiles_of_any_shape() -> str:
    relative = normal(60, seed=5, grad=True)
    shapes = [(8, 16), (16, 8), (32, 16), (16, 64), (64, 32), (64, 64), (128, 64)]
    tiles = [(("dq", Tile(rows, columns, 4, 1)),) for rows, columns in shapes]
    return "".join(report_of(lambda s, b, h, i, j: s + relative[i - j + 33], causal, {"relative": relative}, tiles=tile) for tile in tiles)


def tables_that_are_not_numbers_where_the_mask_forbids() -> str:
    """In a block that is full for the queries there are, a query past the end would read what no allowed pair does."""
    relative, number = normal(60, seed=5), normal(seed=1, grad=True)
    relative[33 + 10 :] = math.nan
    relative.requires_grad_()
    tiles = tuple((kind, Tile(16, 16, 4, 1)) for kind in ("forward", "dq", "dkv"))
    q, k, v = qkv(1, 2, 1, 20, 33, 16, grad=True)
    kernel = flexc.attention(lambda s, b, h, i, j: s * number + relative[i - j + 33], lambda b, h, i, j: i - j < 10, backend="triton")
    kernel._options = replace(kernel._options, tiles=tiles)
    found = torch.autograd.grad(kernel(q, k, v).square().sum(), [q, k, v, number, relative])
    return "" if all(x.isfinite().all() for x in found) else f"not finite: {[int((~x.isfinite()).sum()) for x in found]} elements"


_PROBE = """


@triton.jit
def probe(values_ptr, bins_ptr, count: tl.constexpr):
    places = tl.arange(0, count)
    deposit(bins_ptr + places * 0, 1, tl.load(values_ptr + places), places >= 0)
"""


def integers_add_up_floats() -> str:
    """Of 60 orders of magnitude, as exactly as float64 holds what comes out, in any order; infinities and NaN are seen."""
    slopes = normal(2, seed=1, grad=True)
    q, k, v = qkv(1, 2, 1, 16, 16, 16)
    kernel = flexc.attention(lambda s, b, h, i, j: s * slopes[h], backend="triton", deterministic=True)
    kernel(q, k, v)
    from flexc.runtime.module import load_module

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.py"
        path.write_text(kernel.source + _PROBE)
        module = load_module(kernel.source + _PROBE, path)

        def total(values):
            bins = torch.zeros(32, 1, dtype=torch.int64)
            module.probe[(1,)](values, bins, len(values))
            return module.summed(bins)

        magnitudes = torch.linspace(-33, 27, 1024, dtype=torch.float64)
        values = (10**magnitudes * torch.randn(1024, generator=torch.Generator().manual_seed(0)).double()).float()
        values[5], values[6] = 0.0, -0.0
        wrong = []
        for part in (values, values[:512], -values[256:512].abs(), values[:16]):
            found, other = total(part), total(part.flip(0).contiguous())
            truth = torch.tensor([math.fsum(part.tolist())]).float()
            if not found.equal(truth) or not other.equal(found):
                wrong.append(f"{found.item()!r} and {other.item()!r} in place of {truth.item()!r}")
        for bad in (math.inf, -math.inf, math.nan):
            values[7] = bad
            wrong += [] if total(values).isnan() else [f"a sum with {bad} is {total(values).item()}"]
    return "\n".join(wrong)


def deterministic_gradients_do_not_depend_on_the_order_of_blocks() -> str:
    """The interpreter runs blocks one after the other: those of a launch that is cut in two the other way round give the same bits."""
    warnings.simplefilter("ignore")
    relative, slopes, table = normal(300, seed=5, grad=True), normal(2, seed=2, grad=True), normal(50, seed=3, grad=True)

    def score(score, batch, head, q_idx, kv_idx):
        return score * slopes[head] + relative[q_idx - kv_idx + 100] + table[q_idx // 4 + kv_idx // 4]

    q, k, v = qkv(2, 2, 1, 100, 100, 16, grad=True)
    found = []
    for heads, deterministic in itertools.product(([0, 1], [1, 0]), (False, True)):
        turned = [x[heads].detach().requires_grad_() for x in (q, k, v)]  # batch elements change places
        out = flexc.attention(score, causal, backend="triton", deterministic=deterministic)(*turned)
        weight = normal(2, 2, 100, 16, seed=9)[heads]
        found.append(torch.autograd.grad((out * weight).sum(), [relative, slopes, table]))
    free, fixed, free_turned, fixed_turned = found
    wrong = [] if all(x.equal(y) for x, y in zip(fixed, fixed_turned)) else ["another order gives other bits"]
    if all(x.equal(y) for x, y in zip(free, free_turned)):
        wrong.append("the order does not matter here at all: this shows nothing")
    return "\n".join(wrong)


CASES = (
    gradients_that_meet_in_every_way,
    diagonals_of_tiles_of_any_shape,
    tables_that_are_not_numbers_where_the_mask_forbids,
    integers_add_up_floats,
    deterministic_gradients_do_not_depend_on_the_order_of_blocks,
    rows_of_the_least_number,
    weights_of_rows_past_the_digits_of_lse,
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
