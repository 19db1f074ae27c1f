"""The forward kernel on the device: random shapes, strides and masks against the float64 reference, and the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexc
from flexc.reference import eager, largest_scores, reference
from tests.accuracy import assert_as_accurate_as_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"),
]


class Values:
    """What random functions capture: another each time, of the same kind."""

    def __init__(self, seed: int, heads: int, q_len: int, kv_len: int, device: str = "cuda"):
        random = torch.Generator().manual_seed(seed)
        longest = max(q_len, kv_len)

        def whole(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(high, shape, generator=random, dtype=torch.int32).to(device)

        def real(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(device)

        self.kv_len = torch.tensor(kv_len, device=device)
        self.first, self.count = whole(kv_len, q_len), whole(kv_len + 1, q_len)
        self.documents = whole(2, longest).mul(whole(3, longest)).cumsum(0).div(4, rounding_mode="floor").int()
        self.width = whole(longest, 1)[0] + 1
        self.shift = whole(2 * longest, 1)[0] - longest
        self.flags = whole(3, longest) > 0
        self.cells = whole(3, q_len // 32 + 1, kv_len // 16 + 1) > 0
        self.near = whole(3, longest) > 0
        self.slopes = real(heads).abs() / 8
        self.keys = real(kv_len)
        self.table = real(heads, q_len + kv_len).half()
        self.pairs = real(q_len, kv_len)


MASKS: list[Callable[[Values], Any]] = [
    lambda x: None,
    lambda x: lambda b, h, i, j: i + x.shift >= j,
    lambda x: lambda b, h, i, j: (i >= j) & (i - j < x.width),
    lambda x: lambda b, h, i, j: (j >= x.first[i]) & (j < x.first[i] + x.count[i]),
    lambda x: lambda b, h, i, j: (x.documents[i] == x.documents[j]) & (i >= j),
    lambda x: lambda b, h, i, j: x.cells[i // 32, j // 16] & x.flags[j],
    lambda x: lambda b, h, i, j: x.near[abs(i - j)] | ((h == b) & (j < 20)),
]
SCORES: list[Callable[[Values], Any]] = [
    lambda x: None,
    lambda x: lambda s, b, h, i, j: s - x.slopes[h] * (i - j),
    lambda x: lambda s, b, h, i, j: s + x.table[h, i - j + x.kv_len],
    lambda x: lambda s, b, h, i, j: 10 * torch.tanh(s / 10) + x.keys[j],
    lambda x: lambda s, b, h, i, j: s * 0.5 + x.pairs[i, j],
]
DIMS = [(64, 64), (128, 128), (72, 40), (192, 128), (128, 128), (256, 256), (96, 96), (65, 33)]
HEADS = [(2, 2), (4, 1), (6, 2)]
KERNELS = 24
LAYOUTS = st.lists(st.sampled_from(["plain", "tokens before heads", "every second token", "one of three"]), min_size=3, max_size=3)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values [B, H, S, D] with other strides."""
    if layout == "tokens before heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every second token":
        return torch.stack([x, x + 1], 3).flatten(2, 3)[:, :, ::2]
    if layout == "one of three":
        return torch.stack([x + 1, x, x + 2], 2)[:, :, 1]
    return x


def differing_of_a_thousand(call: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Elements of the results of 1,000 calls that are not those of the first, while another stream keeps the memory system busy."""
    first, noise, other = call(), torch.empty(2**26, device="cuda"), torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        if turn % 10 == 0:
            with torch.cuda.stream(other):
                noise.add_(1.0)
        for x, y in zip(call(), first, strict=True):
            differing += (x != y).sum()
    return int(differing.item())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KERNELS))
@settings(derandomize=True, deadline=None, max_examples=9, database=None)  # 216 in all
@given(
    batch=st.integers(1, 3),
    q_len=st.integers(1, 420),
    kv_len=st.integers(1, 420),
    layouts=LAYOUTS,
    seed=st.integers(0, 10**6),
)
def test_random_shapes_strides_and_masks(number, batch, q_len, kv_len, layouts, seed):
    """Every kind of mask, score function, head dimension and dtype, a kernel each; all else changes without a compilation."""
    (dim, dim_v), (heads, kv_heads) = DIMS[number % len(DIMS)], HEADS[number % len(HEADS)]
    dtype = torch.float16 if number % 4 == 3 else torch.bfloat16
    values = Values(seed, heads, q_len, kv_len)
    score_mod, mask_mod = SCORES[number % len(SCORES)](values), MASKS[number % len(MASKS)](values)
    random = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        laid_out(torch.randn(batch, n, length, width, generator=random, device="cuda").to(dtype), layout)
        for n, length, width, layout in zip((heads, kv_heads, kv_heads), (q_len, kv_len, kv_len), (dim, dim, dim_v), layouts)
    )
    out, aux = flexc.attention(score_mod, mask_mod, backend="cute")(q, k, v, return_lse=True)
    truth, true_lse = reference(score_mod, mask_mod, q, k, v)
    rounding = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype] * float(truth.abs().max())
    assert_as_accurate_as_eager(out, eager(score_mod, mask_mod, q, k, v)[0], truth, floor=rounding)
    assert torch.equal(torch.isneginf(aux.lse), torch.isneginf(true_lse))
    # In bfloat16 tanh is the hardware's, good to 2^-11: of a cap of 10 that is 5e-3, of few keys all of it.
    torch.testing.assert_close(aux.lse.double(), true_lse, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("score", range(len(SCORES)))
def test_largest_scores(score):
    """Of rows without keys, too; and asking for them changes nothing else but the place where weights are rounded."""
    values = Values(3, 4, 300, 200)
    values.count[[0, 77, 299]] = 0
    functions = SCORES[score](values), MASKS[3](values)
    kernel = flexc.attention(*functions, backend="cute")
    random = torch.Generator("cuda").manual_seed(2)
    q, k, v = (torch.randn(2, n, s, 64, generator=random, device="cuda").bfloat16() for n, s in ((4, 300), (2, 200), (2, 200)))
    out, aux = kernel(q, k, v, return_max_scores=True)
    true = largest_scores(*functions, q, k)
    assert torch.equal(torch.isneginf(aux.max_scores), torch.isneginf(true)) and bool(torch.isneginf(true).any())
    # The hardware's tanh, with a cap of 10: see above.
    torch.testing.assert_close(aux.max_scores.double(), true, rtol=1e-3, atol=0.02)
    plain, other = kernel(q, k, v, return_lse=True)
    # A fixed shift in place of a maximum, or one that is kept for longer, adds up other numbers; weights are bfloat16 beside either.
    torch.testing.assert_close(aux.lse, other.lse, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2)


REPEATED = {
    "a queue of partial and full blocks": (0, 4, (128, 128)),
    "values of diagonals in shared memory": (2, 1, (128, 128)),
    "three warpgroups": (0, 1, (64, 64)),
    "out over queries": (3, 2, (256, 256)),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_thousand_runs_give_the_same_bits(case):
    """While another stream keeps the memory system busy, so that warps meet in ever other orders."""
    score, mask, (dim, dim_v) = REPEATED[case]
    values = Values(1, 8, 900, 900)
    kernel = flexc.attention(SCORES[score](values), MASKS[mask](values), backend="cute")
    random = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(2, n, 900, w, generator=random, device="cuda").bfloat16() for n, w in ((8, dim), (2, dim), (2, dim_v)))

    def call():
        out, aux = kernel(q, k, v, return_lse=True)
        return out, aux.lse

    assert differing_of_a_thousand(call) == 0
