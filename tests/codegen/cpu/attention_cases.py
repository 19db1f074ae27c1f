"""Attention cases as hand-built graphs beside plain PyTorch functions of the same meaning, and a dense float64 computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flexc.ir.graph import BOOL, FLOAT32, INT32, Graph, Node, ScalarInput, TensorInput, const, input_node, scalar
from flexc.ir.ops import apply, cast, gather

Tensor = torch.Tensor
S, B, H, Q, K = (input_node(name) for name in ("score", "batch", "head", "q_idx", "kv_idx"))


@dataclass(frozen=True)
class Sizes:
    """Of q [batch, heads, q_len, dim], k [batch, kv_heads, kv_len, dim] and v [batch, kv_heads, kv_len, dim_v]."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    q_len: int = 70
    kv_len: int = 70
    dim: int = 16
    dim_v: int = 16


@dataclass(frozen=True)
class Case:
    """A graph, and what it means: `score` and `mask` take (score, batch, head, q_idx, kv_idx, *tensors) and (batch, …, *tensors)."""

    name: str
    sizes: Sizes = Sizes()
    score_node: Node | None = None
    mask_node: Node | None = None
    score: Callable[..., Tensor] | None = None
    mask: Callable[..., Tensor] | None = None
    tensors: Sequence[tuple[str, Callable[[torch.Generator], Tensor], bool]] = ()
    scalars: Sequence[tuple[str, str, int | float]] = field(default=())

    @property
    def graph(self) -> Graph:
        """Not yet differentiated."""
        inputs = [
            TensorInput(name, str(make(_seeded()).dtype).removeprefix("torch."), make(_seeded()).dim(), g) for name, make, g in self.tensors
        ]
        outputs = [(key, node) for key, node in (("score", self.score_node), ("mask", self.mask_node)) if node is not None]
        return Graph(tuple(outputs), tuple(inputs), tuple(ScalarInput(name, dtype) for name, dtype, _ in self.scalars))

    def captured(self) -> list[Tensor]:
        """The captured tensors; equal in every call."""
        generator = _seeded()
        return [make(generator) for _, make, _ in self.tensors]

    def scalar_values(self) -> tuple[int | float, ...]:
        """The run-time numbers."""
        return tuple(value for _, _, value in self.scalars)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], Tensor]:
    """Makes unit normal numbers."""
    return lambda generator: torch.randn(shape, generator=generator).to(dtype)


def whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Callable[[torch.Generator], Tensor]:
    """Makes integers from low to high - 1."""
    return lambda generator: torch.randint(low, high, shape, generator=generator).to(dtype)


def sorted_documents(count: int, length: int) -> Callable[[torch.Generator], Tensor]:
    """Makes document numbers in rising order."""
    return lambda generator: torch.randint(0, count, (length,), generator=generator).sort().values


def inputs(sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    s = sizes
    shapes = (s.batch, s.heads, s.q_len, s.dim), (s.batch, s.kv_heads, s.kv_len, s.dim), (s.batch, s.kv_heads, s.kv_len, s.dim_v)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor, scale: float, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in the dtype of q; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    batch = torch.arange(q.shape[0]).view(-1, 1, 1, 1)
    head = torch.arange(q.shape[1]).view(1, -1, 1, 1)
    q_idx, kv_idx = torch.arange(q.shape[2]).view(1, 1, -1, 1), torch.arange(k.shape[2]).view(1, 1, 1, -1)
    score = q @ k.mT * scale
    numbers = case.scalar_values()
    if case.score is not None:
        score = case.score(score, batch, head, q_idx, kv_idx, *tensors, *numbers).expand(score.shape)
    allowed = torch.ones((), dtype=torch.bool)
    if case.mask is not None:
        allowed = case.mask(batch, head, q_idx, kv_idx, *tensors, *numbers)
    allowed = allowed.expand(score.shape)
    has_keys = allowed.any(3, keepdim=True)
    score = torch.where(allowed, score, -math.inf)
    score = torch.where(has_keys, score, 0.0)
    weight = torch.where(has_keys, score.softmax(3), 0.0)
    lse = torch.where(has_keys[..., 0], score.logsumexp(3), -math.inf)
    return weight @ v, lse


def f32(node: Node) -> Node:
    """A node as a float."""
    return cast(node, FLOAT32)


def both(a: Node, b: Node) -> Node:
    """Logical and."""
    return apply("and", a, b)


CAUSAL = apply("ge", Q, K)
WINDOW = both(apply("le", const(0), Q - K), apply("lt", Q - K, const(9)))


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *_: object) -> Tensor:
    return q >= k


def _window(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *_: object) -> Tensor:
    return (q - k >= 0) & (q - k < 9)


_SLOPES = ("slopes", normal(4), True)
_ALIBI = S - gather(0, FLOAT32, [H]) * f32(Q - K)
_DOCUMENTS = ("documents", sorted_documents(5, 70), False)

CASES = [
    Case("plain"),
    Case("causal", mask_node=CAUSAL, mask=_causal),
    Case("window", mask_node=WINDOW, mask=_window),
    Case(
        "window whose width is a run-time number",
        mask_node=both(CAUSAL, apply("lt", Q - K, scalar(0, INT32))),
        mask=lambda b, h, q, k, width: (q >= k) & (q - k < width),
        scalars=[("width", INT32, 13)],
    ),
    Case(
        "alibi with learnable slopes",
        score_node=_ALIBI,
        score=lambda s, b, h, q, k, slopes: s - slopes[h] * (q - k),
        mask_node=CAUSAL,
        mask=_causal,
        tensors=[_SLOPES],
    ),
    Case(
        "softcap",
        score_node=apply("tanh", S / 2.0) * 2.0,
        score=lambda s, b, h, q, k: torch.tanh(s / 2) * 2,
        mask_node=CAUSAL,
        mask=_causal,
    ),
    Case(
        "documents",
        mask_node=apply("eq", gather(0, "int64", [Q]), gather(0, "int64", [K])),
        mask=lambda b, h, q, k, doc: doc[q] == doc[k],
        tensors=[_DOCUMENTS],
    ),
    Case(
        "relative bias table, learnable, causal",
        score_node=S + gather(0, FLOAT32, [H, Q - K + const(69)]),
        score=lambda s, b, h, q, k, table: s + table[h, q - k + 69],
        mask_node=CAUSAL,
        mask=_causal,
        tensors=[("table", normal(4, 139), True)],
    ),
    Case(
        "relative bias shared by heads, in both directions",
        score_node=S + gather(0, FLOAT32, [apply("minimum", apply("maximum", K - Q, const(-20)), const(20)) + const(20)]),
        score=lambda s, b, h, q, k, table: s + table[(k - q).clamp(-20, 20) + 20],
        tensors=[("table", normal(41), True)],
    ),
    Case(
        "pair bias, learnable",
        score_node=S + gather(0, FLOAT32, [H, Q, K]),
        score=lambda s, b, h, q, k, bias: s + bias[h, q, k],
        mask_node=CAUSAL,
        mask=_causal,
        tensors=[("bias", normal(4, 70, 70), True)],
    ),
    Case(
        "pair bias with axes in another order and a relative table",
        score_node=S + gather(0, FLOAT32, [K, B, Q]) + gather(1, FLOAT32, [Q - K + const(69)]),
        score=lambda s, b, h, q, k, bias, table: s + bias[k, b, q] + table[q - k + 69],
        tensors=[("bias", normal(70, 2, 70), True), ("table", normal(139), True)],
    ),
    Case(
        "pair bias that is smaller than the lengths",
        score_node=apply("where", both(apply("lt", Q, const(50)), apply("lt", K, const(40))), S + gather(0, FLOAT32, [Q, K]), S),
        score=lambda s, b, h, q, k, bias: torch.where((q < 50) & (k < 40), s + bias[q.clamp(max=49), k.clamp(max=39)], s),
        tensors=[("bias", normal(50, 40), True)],
    ),
    Case(
        "learnable scalar of rank 0",
        score_node=S * gather(0, FLOAT32, []),
        score=lambda s, b, h, q, k, strength: s * strength,
        tensors=[("strength", lambda generator: torch.tensor(0.7), True)],
    ),
    Case(
        "per batch and head, indexed by batch too",
        score_node=S * gather(0, FLOAT32, [B, H]),
        score=lambda s, b, h, q, k, heat: s * heat[b, h],
        tensors=[("heat", normal(2, 4), True)],
    ),
    Case(
        "tensor indexed twice",
        score_node=S + gather(0, FLOAT32, [Q]) * gather(0, FLOAT32, [K]),
        score=lambda s, b, h, q, k, table: s + table[q] * table[k],
        tensors=[("table", normal(70), True)],
    ),
    Case(
        "learnable bias by columns of a batch",
        score_node=S + gather(0, FLOAT32, [B, K]),
        score=lambda s, b, h, q, k, bias: s + bias[b, k],
        tensors=[("bias", normal(2, 70), True)],
    ),
    Case(
        "learnable table by document pair",
        score_node=S + gather(1, FLOAT32, [gather(0, "int64", [Q]), gather(0, "int64", [K])]),
        score=lambda s, b, h, q, k, doc, table: s + table[doc[q], doc[k]],
        tensors=[_DOCUMENTS, ("table", normal(5, 5), True)],
    ),
    Case(
        "learnable table by the score itself",
        score_node=S + gather(0, FLOAT32, [cast(apply("minimum", apply("abs", S), 3.0), INT32)]),
        score=lambda s, b, h, q, k, table: s + table[s.detach().abs().clamp(max=3).int()],
        tensors=[("table", normal(4), True)],
    ),
    Case(
        "negative index, and one outside that counts as 0",
        score_node=S + gather(0, FLOAT32, [Q - K]),
        score=lambda s, b, h, q, k, table: s + torch.where(q - k >= -50, table[(q - k).clamp(-50, 49)], 0) * (q - k < 50),
        tensors=[("table", normal(50), True)],
    ),
    Case(
        "score that does not read the raw score",
        score_node=gather(0, FLOAT32, [Q - K + const(69)]),
        score=lambda s, b, h, q, k, table: table[q - k + 69] + 0 * s,
        mask_node=CAUSAL,
        mask=_causal,
        tensors=[("table", normal(139), True)],
    ),
    Case("constant score", score_node=const(2.0), score=lambda s, b, h, q, k: s * 0 + 2.0, mask_node=WINDOW, mask=_window),
    Case("exponential score: value and derivative are one node", score_node=apply("exp", S), score=lambda s, b, h, q, k: s.exp()),
    Case("square: the derivative needs the raw score", score_node=S * S * 0.5, score=lambda s, b, h, q, k: s * s * 0.5),
    Case(
        "derivative undefined where masked",
        score_node=S + apply("sqrt", f32(Q - K)) * apply("log", f32(Q - K) + gather(0, FLOAT32, [])),
        score=lambda s, b, h, q, k, one: s + (q - k).clamp(min=0).to(s.dtype).sqrt() * ((q - k).clamp(min=0) + one).log(),
        mask_node=apply("gt", Q, K),
        mask=lambda b, h, q, k, *_: q > k,
        tensors=[("one", lambda generator: torch.tensor(1.5), True)],
    ),
    Case(
        "score undefined where masked, from the score itself",
        score_node=apply("sqrt", apply("abs", S) + f32(Q - K)),
        score=lambda s, b, h, q, k: (s.abs() + (q - k).clamp(min=0)).sqrt(),
        mask_node=CAUSAL,
        mask=_causal,
    ),
    Case(
        "captured value undefined where masked",
        score_node=S + gather(0, FLOAT32, [K]),
        score=lambda s, b, h, q, k, bias: s + bias[k],
        mask_node=apply("lt", K, const(60)),
        mask=lambda b, h, q, k, *_: k < 60,
        tensors=[("bias", lambda generator: torch.cat([torch.randn(60, generator=generator), torch.full((10,), math.nan)]), True)],
    ),
    Case(
        "mask by batch",
        mask_node=apply("or", apply("eq", apply("floormod", B, const(2)), const(0)), CAUSAL),
        mask=lambda b, h, q, k: (b % 2 == 0) | (q >= k),
    ),
    Case(
        "window by head",
        mask_node=both(CAUSAL, apply("lt", Q - K, gather(0, INT32, [H]))),
        mask=lambda b, h, q, k, width: (q >= k) & (q - k < width[h]),
        tensors=[("width", lambda generator: torch.tensor([3, 20, 70, 1], dtype=torch.int32), False)],
    ),
    Case(
        "padding by batch, one batch without keys",
        mask_node=apply("lt", K, gather(0, INT32, [B])),
        mask=lambda b, h, q, k, length: k < length[b],
        tensors=[("length", lambda generator: torch.tensor([37, 0], dtype=torch.int32), False)],
    ),
    Case(
        "rows without keys, in a score with a derivative",
        score_node=apply("tanh", S) * gather(0, FLOAT32, [H]),
        score=lambda s, b, h, q, k, slopes: s.tanh() * slopes[h],
        mask_node=both(CAUSAL, apply("ge", Q, const(10))),
        mask=lambda b, h, q, k, *_: (q >= k) & (q >= 10),
        tensors=[_SLOPES],
    ),
    Case("no key for anybody", mask_node=const(False, BOOL), mask=lambda b, h, q, k: torch.tensor(False)),
    Case("a column that nobody sees", mask_node=apply("ne", K, const(5)), mask=lambda b, h, q, k: k != 5),
    Case("row-only mask", mask_node=apply("lt", Q, const(33)), mask=lambda b, h, q, k: q < 33),
    Case(
        "mask table over pairs",
        mask_node=gather(0, BOOL, [Q, K]),
        mask=lambda b, h, q, k, t: t[q, k],
        tensors=[("seen", whole(0, 2, 70, 70, dtype=torch.bool), False)],
    ),
]

SHAPES = {
    "grouped heads 8:2": Sizes(heads=8, kv_heads=2),
    "grouped heads 6:2": Sizes(heads=6, kv_heads=2),
    "one key head": Sizes(heads=4, kv_heads=1),
    "wider values": Sizes(dim=8, dim_v=24),
    "narrow values, odd sizes": Sizes(dim=17, dim_v=5),
    "lengths 20 and 33": Sizes(q_len=20, kv_len=33),
    "lengths 143 and 15": Sizes(q_len=143, kv_len=15),
    "one query": Sizes(q_len=1, kv_len=70),
}
