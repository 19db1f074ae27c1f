"""The cases of the contract: variants of attention that every backend computes right, forward, lse and all gradients.

A case says what it is; `build` makes it for a device, a dtype and a size. Sizes are small enough for an interpreter and grow on a GPU,
except where the exact lengths are the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import flexc
from tests.accuracy import normal, qkv


@dataclass
class Problem:
    """One call: the functions, the inputs, the tensors besides q, k, v whose gradients count, and where the rows are."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    captured: dict[str, torch.Tensor] = field(default_factory=dict)
    scale: float | None = None
    positions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Maker:
    """What a case is made for. `tokens(n)` is a length that grows on a GPU."""

    device: str
    dtype: torch.dtype
    large: bool = False

    def tokens(self, n: int) -> int:
        return 4 * n + 3 if self.large else n

    @property
    def length(self) -> int:
        """The usual one: no block divides it."""
        return self.tokens(75)

    def qkv(self, **sizes):
        """Inputs; by default two batches, grouped heads and a length that no block divides."""
        sizes.setdefault("q_len", self.length)
        return qkv(device=self.device, dtype=self.dtype, **sizes)

    def table(self, *shape, seed=50, size=1.0, dtype=torch.float32):
        """A learnable tensor."""
        return normal(*shape, seed=seed, device=self.device, dtype=dtype, size=size, grad=True)

    def ints(self, *shape, below, seed=60, dtype=torch.int64):
        return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(self.device, dtype)


@dataclass(frozen=True)
class Case:
    """A row of the contract.

    Attributes:
        name: what it protects.
        build: Maker → Problem.
        needs: features that a backend may declare unsupported, see UNSUPPORTED.
        every_dtype: run in every dtype of the backend, not in its first alone.
    """

    name: str
    build: Callable[[Maker], Problem]
    needs: frozenset[str]
    every_dtype: bool


# What a backend does not do, by feature; such cases must raise UnsupportedError.
UNSUPPORTED: dict[str, frozenset[str]] = {
    "cpu": frozenset(),
    "triton": frozenset({"head_dim > 512"}),
    "cute": frozenset({"head_dim > 256", "head_dim > 512"}),
}

CASES: list[Case] = []


def case(name: str, *, needs: tuple[str, ...] = (), every_dtype: bool = False):
    """Add a case to the contract."""

    def add(build: Callable[[Maker], Problem]) -> Callable[[Maker], Problem]:
        CASES.append(Case(name, build, frozenset(needs), every_dtype))
        return build

    return add


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


# --- masks ---------------------------------------------------------------------------------------------------------------------------


@case("full attention", every_dtype=True)
def _(m):
    return Problem(None, None, *m.qkv())


@case("causal", every_dtype=True)
def _(m):
    return Problem(None, causal, *m.qkv())


@case("causal from another length: i - L >= j - S")
def _(m):
    q_len, kv_len = m.tokens(70), m.length
    return Problem(None, lambda b, h, i, j: i - q_len >= j - kv_len, *m.qkv(q_len=q_len, kv_len=kv_len))


@case("sliding window", every_dtype=True)
def _(m):
    width = m.tokens(20)

    def window(batch, head, q_idx, kv_idx):
        return (q_idx - kv_idx < width) & (q_idx >= kv_idx)

    return Problem(None, window, *m.qkv())


@case("window in both directions")
def _(m):
    return Problem(None, lambda b, h, i, j: abs(i - j) <= 9, *m.qkv())


@case("window by a chained comparison")
def _(m):
    return Problem(None, lambda b, h, i, j: 0 <= i - j < 17, *m.qkv(q_len=70))


@case("prefix")
def _(m):
    return Problem(None, flexc.masks.prefix_lm(30), *m.qkv())


@case("prefix of each batch element")
def _(m):
    lengths = torch.tensor([5, 60], dtype=torch.int32, device=m.device)
    return Problem(None, lambda b, h, i, j: (i >= j) | (j < lengths[b]), *m.qkv())


def documents(m, dtype):
    ids = m.ints(m.length, below=5, dtype=dtype).sort().values
    return Problem(None, lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), *m.qkv())


@case("documents, int64", every_dtype=True)
def _(m):
    return documents(m, torch.int64)


@case("documents, int32")
def _(m):
    return documents(m, torch.int32)


@case("documents, uint8")
def _(m):
    return documents(m, torch.uint8)


@case("documents of each batch element")
def _(m):
    ids = m.ints(2, m.length, below=4).sort(-1).values
    return Problem(None, flexc.masks.document(ids) & flexc.masks.causal, *m.qkv())


@case("documents in no order")
def _(m):
    ids = m.ints(m.length, below=3)
    return Problem(None, lambda b, h, i, j: ids[i] == ids[j], *m.qkv())


@case("documents of one token")
def _(m):
    return Problem(None, lambda b, h, i, j: i == j, *m.qkv())


@case("dilated")
def _(m):
    return Problem(None, flexc.masks.dilated(8, 5), *m.qkv())


@case("block diagonal")
def _(m):
    return Problem(None, flexc.masks.block_diagonal(24), *m.qkv())


@case("block diffusion")
def _(m):
    n, block = m.tokens(48), 8

    def diffusion(batch, head, q_idx, kv_idx):
        clean_q, clean_k = q_idx >= n, kv_idx >= n
        block_q, block_k = (q_idx - clean_q * n) // block, (kv_idx - clean_k * n) // block
        own_noise = (block_q == block_k) & ~clean_q & ~clean_k
        context = ~clean_q & clean_k & (block_k < block_q)
        return own_noise | context | (clean_q & clean_k & (block_k <= block_q))

    return Problem(None, diffusion, *m.qkv(q_len=2 * n))


@case("neighbourhood in two dimensions")
def _(m):
    return Problem(None, flexc.masks.neighborhood_2d(10, 2), *m.qkv())


@case("negative positions: floor division and modulo below zero")
def _(m):
    return Problem(None, lambda b, h, i, j: ((i - j - 7) // 5 % 3 == 1) | ((j - i) % 4 == 3), *m.qkv())


@case("first block of keys only, for every query block")
def _(m):
    return Problem(None, lambda b, h, i, j: j < 64, *m.qkv(batch=1, heads=2, q_len=m.tokens(200)))


@case("window of each head in a group")
def _(m):
    widths = torch.tensor([1, 5, 9, 17, 33, 65, 99, 200], dtype=torch.int32, device=m.device)
    return Problem(None, lambda b, h, i, j: (i >= j) & (i - j < widths[h]), *m.qkv(heads=8, kv_heads=2))


@case("mask of each batch element: b even, or causal")
def _(m):
    return Problem(None, lambda b, h, i, j: (b % 2 == 0) | (i >= j), *m.qkv(batch=3, q_len=m.tokens(70)))


@case("mask of each batch element and head")
def _(m):
    offsets = m.ints(2, 4, below=60)
    return Problem(None, lambda b, h, i, j: i + 30 >= j + offsets[b, h], *m.qkv())


@case("mask from a table of bits")
def _(m):
    n = m.length
    allowed = m.ints(n, n, below=2, dtype=torch.bool)
    return Problem(None, lambda b, h, i, j: allowed[i, j], *m.qkv())


@case("padding of each batch element")
def _(m):
    used = torch.tensor([37, m.length], device=m.device)
    return Problem(None, flexc.masks.padding(used), *m.qkv())


@case("one batch element is all padding")
def _(m):
    used = torch.tensor([0, 50], device=m.device)
    return Problem(None, flexc.masks.padding(used), *m.qkv())


@case("rows without keys", every_dtype=True)
def _(m):
    return Problem(None, lambda b, h, i, j: (i >= 10) & (i >= j), *m.qkv())


@case("blocks of rows without keys")
def _(m):
    return Problem(None, lambda b, h, i, j: i >= 150, *m.qkv(batch=1, heads=2, q_len=m.tokens(200)))


@case("rows without keys and a learnable bias")
def _(m):
    bias = m.table(4)
    return Problem(lambda s, b, h, i, j: s + bias[h] * j, lambda b, h, i, j: (i >= 10) & (b == 1), *m.qkv(), {"bias": bias})


@case("no row has a key")
def _(m):
    return Problem(None, lambda b, h, i, j: i < 0, *m.qkv())


@case("keys that nobody sees")
def _(m):
    return Problem(None, lambda b, h, i, j: (j < 20) | (j >= 64), *m.qkv())


@case("mask hidden in the score", every_dtype=True)
def _(m):
    return Problem(lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf), None, *m.qkv())


@case("mask hidden in the score, rows without keys")
def _(m):
    return Problem(lambda s, b, h, i, j: torch.where((i >= j) & (i > 20), s * 2, float("-inf")), None, *m.qkv())


@case("mask hidden in the score by an if")
def _(m):
    def score(s, batch, head, q_idx, kv_idx):
        if q_idx >= kv_idx and kv_idx != 3:
            return s * 0.5
        return -math.inf

    return Problem(score, None, *m.qkv(q_len=70))


@case("mask hidden under another mask")
def _(m):
    return Problem(lambda s, b, h, i, j: torch.where(i - j < 30, s, -math.inf), causal, *m.qkv())


@case("mask by a large negative number")
def _(m):
    return Problem(lambda s, b, h, i, j: s + torch.where(i >= j, 0.0, -1e9), None, *m.qkv())


@case("masked pairs for which the score function is not defined")
def _(m):
    w = m.table(4)
    return Problem(lambda s, b, h, i, j: s - w[h] * torch.log(i - j + 1.0), causal, *m.qkv(), {"w": w})


@case("mask algebra")
def _(m):
    mask = (flexc.masks.sliding_window(13) | flexc.masks.sinks(4)) & ~flexc.mask(lambda b, h, i, j: (i + j) % 7 == 3)
    return Problem(None, mask ^ flexc.mask(lambda b, h, i, j: j == 50), *m.qkv())


# --- scores --------------------------------------------------------------------------------------------------------------------------


@case("ALiBi")
def _(m):
    return Problem(flexc.scores.alibi(4, device=m.device), causal, *m.qkv())


@case("ALiBi with learnable slopes", every_dtype=True)
def _(m):
    slopes = m.table(4, size=0.1)
    return Problem(lambda s, b, h, i, j: s - slopes[h] * (i - j), causal, *m.qkv(), {"slopes": slopes})


@case("distance without a table")
def _(m):
    return Problem(lambda s, b, h, i, j: s + (i - j), causal, *m.qkv())


def soft_cap(m, cap):
    q, k, v = m.qkv()
    return Problem(lambda s, b, h, i, j: cap * torch.tanh(s / cap), causal, q * 50, k, v)


for _cap in (15.0, 20.0, 50.0):
    case(f"soft cap {_cap:g}, scores to ±200", every_dtype=_cap == 20)(lambda m, cap=_cap: soft_cap(m, cap))


@case("soft cap by math.tanh")
def _(m):
    return Problem(lambda s, b, h, i, j: 2 * math.tanh(s / 2), causal, *m.qkv())


@case("soft cap, then ALiBi, then a window")
def _(m):
    slopes = m.table(4, size=0.1)
    score = lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - slopes[h] * (i - j)
    return Problem(score, flexc.masks.sliding_window(50), *m.qkv(), {"slopes": slopes})


@case("relative bias, learnable", every_dtype=True)
def _(m):
    n = m.length
    bias = m.table(2 * n)
    return Problem(lambda s, b, h, i, j: s + bias[i - j + n], None, *m.qkv(), {"bias": bias})


@case("relative bias of each head, learnable")
def _(m):
    n = m.length
    bias = m.table(4, 2 * n)
    return Problem(lambda s, b, h, i, j: s + bias[h, i - j + n], causal, *m.qkv(), {"bias": bias})


@case("relative bias with ends shared by far distances")
def _(m):
    bias = m.table(4, 33)
    return Problem(flexc.scores.relative_bias(bias), None, *m.qkv(), {"bias": bias})


@case("T5 buckets, learnable")
def _(m):
    bias = m.table(16, 4)
    return Problem(flexc.scores.bucketed_bias(bias, max_distance=64), None, *m.qkv(), {"bias": bias})


@case("T5 table and a learnable scalar")
def _(m):
    n = m.length
    r, b0 = m.table(2 * n), m.table(seed=51)
    return Problem(lambda s, b, h, i, j: s * b0 + r[i - j + n], causal, *m.qkv(), {"r": r, "b0": b0})


@case("bias of each pair, learnable", every_dtype=True)
def _(m):
    n = m.length
    bias = m.table(4, n, n)
    return Problem(lambda s, b, h, i, j: s + bias[h, i, j], None, *m.qkv(), {"bias": bias})


@case("bias of each pair and batch element, learnable")
def _(m):
    bias = m.table(2, 4, 50, 60)
    return Problem(lambda s, b, h, i, j: s + bias[b, h, i, j], causal, *m.qkv(q_len=50, kv_len=60), {"bias": bias})


@case("bias of each pair by chained indices, learnable")
def _(m):
    bias = m.table(2, 2, 17, 21)
    return Problem(lambda s, b, h, i, j: s + bias[b][h][i][j], None, *m.qkv(heads=2, kv_heads=1, q_len=17, kv_len=21), {"bias": bias})


@case("bias of each pair, in documents of each batch element, learnable", every_dtype=True)
def _(m):
    """Some blocks count for one batch element and not for the other, and both add to the same elements."""
    n = m.length
    bias, ids = m.table(4, n, n), torch.stack([torch.arange(n) * 3 // n, torch.arange(n) * 2 // n]).to(m.device)
    return Problem(lambda s, b, h, i, j: s + bias[h, i, j], lambda b, h, i, j: ids[b, i] == ids[b, j], *m.qkv(), {"bias": bias})


@case("bias of each pair and its mirror image, learnable")
def _(m):
    bias = m.table(m.length, m.length)
    return Problem(lambda s, b, h, i, j: s + bias[i, j] + bias[j, i] * 0.5 + bias[0, j], causal, *m.qkv(), {"bias": bias})


@case("bias of each pair in half precision, learnable")
def _(m):
    bias = m.table(2, 4, m.length, m.length, dtype=torch.float16)
    return Problem(lambda s, b, h, i, j: s + bias[b, h, i, j], causal, *m.qkv(), {"bias": bias})


@case("bias of each pair of permuted queries, learnable")
def _(m):
    bias, order = m.table(m.length, m.length), torch.arange(m.length, device=m.device).flip(0)
    return Problem(lambda s, b, h, i, j: s + bias[order[i], j], causal, *m.qkv(), {"bias": bias})


@case("factor of each distance modulo a period, learnable")
def _(m):
    factor = m.table(4, 7)
    return Problem(lambda s, b, h, i, j: s * factor[h, (j - i) % 7], causal, *m.qkv(q_len=m.tokens(40)), {"factor": factor})


@case("bias of each pair that repeats", every_dtype=False)
def _(m):
    bias = m.table(4, 16, 16)
    return Problem(lambda s, b, h, i, j: s + bias[h, i % 16, j % 16], None, *m.qkv(), {"bias": bias})


@case("bias of a broadcast table, learnable")
def _(m):
    bias = m.table(2, 1, 50, 50)
    return Problem(lambda s, b, h, i, j: s + bias[b, 0, i, j], None, *m.qkv(q_len=50), {"bias": bias})


@case("bias of each key, learnable")
def _(m):
    bias = m.table(m.length)
    return Problem(lambda s, b, h, i, j: s + bias[j], causal, *m.qkv(), {"bias": bias})


@case("factor of each query, learnable")
def _(m):
    factor = m.table(2, m.length)
    return Problem(lambda s, b, h, i, j: s * factor[b, i], None, *m.qkv(), {"factor": factor})


@case("position table of each batch element, by one element")
def _(m):
    start = m.ints(2, 1, below=40)
    return Problem(None, lambda b, h, i, j: i + start[b, 0] >= j, *m.qkv())


@case("bias of each head: its gradient without lse is 0")
def _(m):
    bias = m.table(4)
    return Problem(lambda s, b, h, i, j: s + bias[h], None, *m.qkv(), {"bias": bias})


@case("bias of each batch element and head in groups of 4")
def _(m):
    bias = m.table(2, 16)
    return Problem(lambda s, b, h, i, j: s + bias[b, h], causal, *m.qkv(heads=16, kv_heads=4, q_len=m.tokens(50)), {"bias": bias})


@case("temperature of each head, learnable", every_dtype=True)
def _(m):
    temperature = m.table(4, size=0.2).detach().exp().requires_grad_()
    return Problem(lambda s, b, h, i, j: s / temperature[h], causal, *m.qkv(), {"temperature": temperature})


@case("0-d factor, learnable", every_dtype=True)
def _(m):
    c = m.table()
    return Problem(lambda s, b, h, i, j: s * c, causal, *m.qkv(batch=1, q_len=m.tokens(130)), {"c": c})


@case("bias computed from a parameter")
def _(m):
    w = m.table(4)
    bias = 2 * w
    return Problem(lambda s, b, h, i, j: s + bias[h] * (i - j) * 0.1, causal, *m.qkv(), {"w": w})


@case("bias of each pair from a linear layer")
def _(m):
    generator = torch.Generator().manual_seed(5)
    layer = torch.nn.Linear(64, 4 * 32 * 32).to(m.device)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    bias = layer(normal(2, 64, seed=8, device=m.device)).view(2, 4, 32, 32)
    score = lambda s, b, h, i, j: s + bias[b, h, i, j]
    return Problem(score, None, *m.qkv(q_len=32), {"weight": layer.weight, "offset": layer.bias})


@case("tensor indexed twice, learnable")
def _(m):
    n = m.length
    w, r = m.table(4), m.table(2 * n, seed=51)
    score = lambda s, b, h, i, j: s * w[h] + r[i - j + n] + w[3 - h] * r[j - i + n] + w[0]
    return Problem(score, None, *m.qkv(), {"w": w, "r": r})


@case("tensor used as a factor of itself, learnable")
def _(m):
    w = m.table(4)
    return Problem(lambda s, b, h, i, j: s * w[h] * w[h] + torch.sin(w[h] * j), causal, *m.qkv(), {"w": w})


@case("tables in half precision, learnable")
def _(m):
    w = m.table(4, dtype=torch.float16 if m.dtype != torch.bfloat16 else torch.bfloat16)
    return Problem(lambda s, b, h, i, j: s - w[h] * (i - j) * 0.1, causal, *m.qkv(), {"w": w})


@case("strided table, learnable")
def _(m):
    whole = m.table(m.length, 4, 3)
    w = whole.permute(1, 2, 0)[:, 1]
    return Problem(lambda s, b, h, i, j: s + w[h, j], causal, *m.qkv(), {"whole": whole})


@case("index with a learnable table behind an index table")
def _(m):
    bucket = m.ints(m.length, below=6, dtype=torch.int32)
    w = m.table(6, 4)
    return Problem(lambda s, b, h, i, j: s + w[bucket[j], h] - w[bucket[i], h], None, *m.qkv(), {"w": w})


@case("two functions of the score in two branches")
def _(m):
    w = m.table(4)

    def score(s, batch, head, q_idx, kv_idx):
        if head % 2 == 0:
            return torch.tanh(s) * w[head]
        return s - w[head] * abs(q_idx - kv_idx) if kv_idx > 40 else s * s

    return Problem(score, None, *m.qkv(q_len=70), {"w": w})


@case("every function of a float")
def _(m):
    def score(s, batch, head, q_idx, kv_idx):
        a = torch.sigmoid(s) + torch.erf(s) + torch.exp(-s * s) + torch.log1p(s.abs()) + torch.sqrt(1 + s * s)
        b = torch.sin(s) * torch.cos(s) + torch.exp2(-s.abs()) + torch.rsqrt(2 + s * s) + torch.log2(2 + s * s) + torch.expm1(-s.abs())
        return a + b + (1 + s * s) ** 0.3 + torch.clamp(s, -1, 1) + torch.maximum(s, s * 0.1)

    return Problem(score, causal, *m.qkv(q_len=70))


@case("square root of a distance")
def _(m):
    w = m.table(4)
    return Problem(lambda s, b, h, i, j: s - w[h] * math.sqrt(abs(i - j) + 1), None, *m.qkv(), {"w": w})


@case("score that forgets q and k")
def _(m):
    w = m.table(4)
    return Problem(lambda s, b, h, i, j: w[h] * (i - j) * 0.05, causal, *m.qkv(), {"w": w})


@case("guarded index past the end of a table")
def _(m):
    w = m.table(50)
    return Problem(lambda s, b, h, i, j: torch.where(j < 50, s + w[j], s), None, *m.qkv(q_len=15, kv_len=143), {"w": w})


@case("table of exactly the length")
def _(m):
    t, w = m.ints(143, below=3), m.table(15)
    score = lambda s, b, h, i, j: s * w[i]
    return Problem(score, lambda b, h, i, j: (t[j] != 1) | (t[i] == 0), *m.qkv(q_len=15, kv_len=143), {"w": w})


@case("negative index from the end")
def _(m):
    w = m.table(m.length)
    return Problem(lambda s, b, h, i, j: s + w[-1 - j], causal, *m.qkv(), {"w": w})


for _name in ("rows", "q_len", "tl", "entry"):

    @case(f"captured values that are called {_name}, as a kernel may call its own")
    def _(m, name=_name):
        make = eval(f"lambda {name}: (lambda s, b, h, i, j: s * {name}, lambda b, h, i, j: i + {name} >= j)")
        table = eval(f"lambda {name}, score: lambda s, b, h, i, j: score(s, b, h, i, j) + {name}[h] * j")
        score, mask = make(flexc.runtime(3))
        w = m.table(4)
        return Problem(table(w, score), mask, *m.qkv(q_len=40), {"w": w})


# --- heads, head dims, lengths -------------------------------------------------------------------------------------------------------

for _heads, _kv_heads in ((8, 2), (6, 2), (8, 1), (1, 1), (3, 3)):

    @case(f"{_heads} query heads on {_kv_heads}")
    def _(m, heads=_heads, kv_heads=_kv_heads):
        w = m.table(heads, size=0.1)
        return Problem(
            lambda s, b, h, i, j: s - w[h] * (i - j), causal, *m.qkv(heads=heads, kv_heads=kv_heads, q_len=m.tokens(60)), {"w": w}
        )


@case("40 query heads on 4")
def _(m):
    return Problem(None, causal, *m.qkv(batch=1, heads=40, kv_heads=4, q_len=m.tokens(40), dim=16))


for _dim in (1, 8, 15, 16, 17, 31, 64, 72, 80, 96, 128, 160, 192, 256):

    @case(f"head dim {_dim}", every_dtype=_dim in (31, 64, 128, 256))
    def _(m, dim=_dim):
        return Problem(None, causal, *m.qkv(batch=1, heads=2, kv_heads=1, q_len=m.tokens(70), dim=dim))


for _dim, _v_dim in ((192, 128), (64, 96), (16, 1), (8, 72), (576, 512)):
    _limits = tuple(f"head_dim > {limit}" for limit in (256, 512) if _dim > limit)

    @case(f"head dim {_dim} for scores, {_v_dim} for values", needs=_limits, every_dtype=_dim == 192)
    def _(m, dim=_dim, v_dim=_v_dim):
        return Problem(None, causal, *m.qkv(batch=1, heads=2, kv_heads=1, q_len=m.tokens(40), dim=dim, v_dim=v_dim))


@case("head dim 512", needs=("head_dim > 256",))
def _(m):
    return Problem(None, causal, *m.qkv(batch=1, heads=1, kv_heads=1, q_len=m.tokens(40), dim=512))


@case("head dim 31, four tokens")
def _(m):
    return Problem(None, None, *m.qkv(batch=1, heads=2, kv_heads=2, q_len=4, dim=31))


for _q_len, _kv_len in ((1, 1), (1, 300), (300, 1), (20, 33), (15, 143), (128, 128), (100, 300), (257, 129), (64, 65)):

    @case(f"{_q_len} queries, {_kv_len} keys", every_dtype=_q_len in (1, 257))
    def _(m, q_len=_q_len, kv_len=_kv_len):
        w = m.table(2, size=0.1)
        mask = lambda b, h, i, j: (i + kv_len >= j + q_len) | (j % 3 == 0)
        sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}
        return Problem(lambda s, b, h, i, j: s - w[h] * (i - j), mask, *m.qkv(**sizes), {"w": w})

    @case(f"{_q_len} queries, {_kv_len} keys, no mask")
    def _(m, q_len=_q_len, kv_len=_kv_len):
        return Problem(None, None, *m.qkv(batch=2, heads=2, kv_heads=2, q_len=q_len, kv_len=kv_len))


@case("documents across 20 queries and 33 keys")
def _(m):
    ids = torch.arange(33, device=m.device) // 8
    return Problem(None, lambda b, h, i, j: ids[i] == ids[j], *m.qkv(q_len=20, kv_len=33))


@case("many batch elements")
def _(m):
    return Problem(None, causal, *m.qkv(batch=300 if m.large else 30, heads=2, kv_heads=1, q_len=16, dim=16))


@case("cache of which 100 of 512 positions are filled")
def _(m):
    q, k, v = m.qkv(batch=1, heads=8, kv_heads=2, q_len=1, kv_len=512)
    k[:, :, 100:], v[:, :, 100:] = 0, 0
    return Problem(None, lambda b, h, i, j: j < 100, q, k, v)


# --- memory ------------------------------------------------------------------------------------------------------------------------


@case("strides of [B, S, H, D]", every_dtype=True)
def _(m):
    q, k, v = m.qkv()
    return Problem(None, causal, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))


@case("q, k and v are parts of one tensor")
def _(m):
    n = m.length
    packed = normal(2, n, 3, 4, 32, device=m.device, dtype=m.dtype)
    return Problem(None, causal, *(packed[:, :, part].transpose(1, 2) for part in range(3)))


@case("slices with an offset")
def _(m):
    q, k, v = m.qkv(heads=6, kv_heads=4, dim=48)
    return Problem(None, causal, q[1:, 1:5, 3:, 8:40], k[1:, 1:3, 5:, 8:40], v[1:, 2:, 5:, 16:])


@case("keys and values shared by the batch, stride 0")
def _(m):
    q, k, v = m.qkv()
    return Problem(None, causal, q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))


@case("keys and values shared by the heads, stride 0")
def _(m):
    q, k, v = m.qkv(kv_heads=1)
    return Problem(None, causal, q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1))


@case("last dimension not contiguous")
def _(m):
    return Problem(None, causal, *(x.mT.contiguous().mT for x in m.qkv()))


@case("one tensor as q, k and v", every_dtype=True)
def _(m):
    x, _, _ = m.qkv(heads=2)
    return Problem(None, causal, x, x, x)


@case("one tensor as k and v")
def _(m):
    q, k, _ = m.qkv()
    return Problem(None, causal, q, k, k)


# --- scale and size ------------------------------------------------------------------------------------------------------------------

for _scale in (1.0, 0.05, -0.3, 0.0):

    @case(f"scale {_scale:g}")
    def _(m, scale=_scale):
        return Problem(lambda s, b, h, i, j: s + torch.sin(s), causal, *m.qkv(), scale=scale)


@case("large scores", every_dtype=True)
def _(m):
    q, k, v = m.qkv()
    return Problem(None, causal, q * 30, k, v)


@case("large negative scores in every row")
def _(m):
    return Problem(lambda s, b, h, i, j: s - 500, causal, *m.qkv())


@case("large positive scores in every row")
def _(m):
    return Problem(lambda s, b, h, i, j: s + 500, causal, *m.qkv())


@case("scores that grow along the row")
def _(m):
    return Problem(lambda s, b, h, i, j: s + 2 * j, None, *m.qkv())


@case("scores that fall along the row")
def _(m):
    return Problem(lambda s, b, h, i, j: s - 2 * j, None, *m.qkv())


# --- positions and decoding: what runs without a gradient splits the keys where queries are few -------------------------------------------


def with_garbage(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[B, H, S, D] with NaN past the length of each batch entry, as a cache has it that was never written."""
    x = x.clone()
    for entry, length in zip(x, lengths):
        entry[:, length:] = math.nan
    return x


@case("queries from the middle on: q_offset", every_dtype=True)
def _(m):
    return Problem(lambda s, b, h, i, j: s - 0.05 * (i - j), causal, *m.qkv(q_len=20, kv_len=70), positions={"q_offset": 45})


@case("each batch entry at its own position, with its own keys", every_dtype=True)
def _(m):
    lengths = [m.tokens(60), m.tokens(20)]
    bias = m.table(4, 2 * m.tokens(75))
    q, k, v = m.qkv(q_len=13, kv_len=m.tokens(75))
    positions = {"q_offset": torch.tensor(lengths, device=m.device) - 13, "kv_len": torch.tensor(lengths, device=m.device)}
    k, v = with_garbage(k, lengths), with_garbage(v, lengths)
    return Problem(lambda s, b, h, i, j: s + bias[h, i - j + 70], causal, q, k, v, {"bias": bias}, positions=positions)


@case("a batch entry without keys: kv_len 0")
def _(m):
    q, k, v = m.qkv(q_len=9)
    lengths = torch.tensor([0, m.length - 2], dtype=torch.int32, device=m.device)
    return Problem(None, None, q, k, v, positions={"kv_len": lengths})


@case("one query for a long cache", every_dtype=True)
def _(m):
    return Problem(None, None, *m.qkv(heads=6, q_len=1, kv_len=m.tokens(300)))


@case("decoding in a window with slopes, every entry at its own position", every_dtype=True)
def _(m):
    lengths, slopes = [m.tokens(300), m.tokens(110)], m.table(6)
    q, k, v = m.qkv(heads=6, q_len=1, kv_len=m.tokens(330), dim=40, v_dim=24)
    positions = {"q_offset": torch.tensor(lengths, device=m.device) - 1, "kv_len": torch.tensor(lengths, device=m.device)}
    k, v = with_garbage(k, lengths), with_garbage(v, lengths)
    width = m.tokens(90)
    return Problem(
        lambda s, b, h, i, j: s - slopes[h] * (i - j),
        lambda b, h, i, j: (i >= j) & (i - j < width),
        q, k, v, {"slopes": slopes}, positions=positions,
    )  # fmt: skip


@case("windows of the heads of one group differ")
def _(m):
    widths = m.ints(8, below=m.tokens(300))
    q, k, v = m.qkv(heads=8, kv_heads=1, q_len=3, kv_len=m.tokens(290))
    return Problem(None, lambda b, h, i, j: (i >= j) & (i - j < widths[h]), q, k, v, positions={"q_offset": k.shape[2] - 3})


@case("verifying a tree of drafts against a long cache")
def _(m):
    cached, parent = m.tokens(270), [-1, 0, 0, 1, 1, 2, 3, 6]
    sees = torch.eye(8, dtype=torch.bool)
    for node, above in enumerate(parent):
        if above >= 0:
            sees[node] |= sees[above]
    sees = sees.to(m.device)

    def tree(b, h, i, j):
        return (j < cached) | sees[i - cached, j - cached]

    q, k, v = m.qkv(q_len=8, kv_len=cached + 8)
    return Problem(None, tree, q, k, v, positions={"q_offset": cached})


@case("documents in a cache, and rows that see nothing")
def _(m):
    documents = m.ints(m.tokens(300), below=4).sort().values
    q, k, v = m.qkv(heads=4, kv_heads=4, q_len=5, kv_len=m.tokens(280))
    start = m.tokens(100)
    return Problem(
        lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
        lambda b, h, i, j: (documents[i] == documents[j]) & (i > start + 1) & (j % 3 != 0),
        q, k, v, positions={"q_offset": start},
    )  # fmt: skip


@case("many queries of large groups, split over the keys")
def _(m):
    return Problem(
        None, causal, *m.qkv(heads=12, kv_heads=1, q_len=17, kv_len=m.tokens(260), dim=16), positions={"q_offset": m.tokens(230)}
    )


@case("decoding at head dims of several pieces")
def _(m):
    return Problem(None, None, *m.qkv(batch=1, heads=2, q_len=2, kv_len=m.tokens(270), dim=80, v_dim=96))


BY_NAME = {c.name: c for c in CASES}
assert len(BY_NAME) == len(CASES), "two cases have one name"
