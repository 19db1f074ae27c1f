"""Random programs for hypothesis, drawn from the op table's own domains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from flexc.ir.eager import Environment
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, POSITIONS, Graph, Node, ScalarInput, TensorInput, const, input_node, scalar
from flexc.ir.ops import TABLE, Domain, apply, cast, gather

quick = settings(derandomize=True, deadline=None, max_examples=60, database=None)
"""What every test with random programs uses: the same programs in every run, in about a second."""

TENSORS = (
    TensorInput("slopes", "float32", 1, True),
    TensorInput("bias", "float32", 2, True),
    TensorInput("temperature", "float32", 0, True),
    TensorInput("documents", "int64", 1),
    TensorInput("table", "int32", 1),
    TensorInput("flags", "bool", 1),
)
SCALARS = (ScalarInput("width", INT32), ScalarInput("strength", FLOAT32))
GATHER_DTYPES = (FLOAT32, FLOAT32, FLOAT32, INT64, INT32, BOOL)

_TENSOR_SIZES: list[tuple[int, ...]] = [(3,), (3, 9), (), (7,), (6,), (8,)]
_ORDINARY = 4.0  # floats stay within it, so that rounding differences are not blown up from one op to the next


@dataclass
class Pool:
    """Nodes to draw operands from, by kind."""

    float: list[Node]
    int: list[Node]
    bool: list[Node]

    def add(self, node: Node) -> None:
        """Offer a node as an operand."""
        {FLOAT32: self.float, INT32: self.int, INT64: self.int, BOOL: self.bool}[node.dtype].append(node)


def leaves() -> Pool:
    """Every input, scalar and captured tensor once, and a few constants."""
    positions = [input_node(name) for name in POSITIONS]
    batch, head, q_idx, kv_idx = positions
    loads = [
        gather(0, FLOAT32, [head]),
        gather(1, FLOAT32, [head, apply("sub", q_idx, kv_idx)]),
        gather(2, FLOAT32, []),
        gather(3, INT64, [kv_idx]),
        gather(4, INT32, [q_idx]),
        gather(5, BOOL, [apply("add", batch, kv_idx)]),
    ]
    pool = Pool([input_node("score"), scalar(1, FLOAT32)], [*positions, q_idx, kv_idx, scalar(0, INT32)], [apply("ge", q_idx, kv_idx)])
    for node in loads:
        pool.add(node)
    for value in (0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 0, 1, 2, -3, 7, True, False):
        pool.add(const(value))
    return pool


def _operand(draw: st.DrawFn, pool: Pool, domain: Domain, kind: str) -> Node:
    node = draw(st.sampled_from(getattr(pool, kind)))
    if kind == "bool":
        return node
    lo, hi = domain.lo, domain.hi
    if kind == "float":
        lo, hi = max(lo, -_ORDINARY), min(hi, _ORDINARY)
    if domain.kind != kind:
        return node  # a number of either kind will do, as in a + b
    if node.op == "const":
        value = node.attrs[0] if kind == "int" else None
        if value is not None and lo <= value <= hi:
            return node
    low, high = (float(lo), float(hi)) if kind == "float" else (int(lo), int(hi))
    return apply("minimum", apply("maximum", node, low), high)


@st.composite
def nodes(draw: st.DrawFn, pool: Pool | None = None, largest: int = 10) -> Pool:
    """A pool with up to `largest` ops on top of the leaves, the last ones last."""
    pool = leaves() if pool is None else pool
    for _ in range(draw(st.integers(1, largest))):
        row = TABLE[draw(st.sampled_from(sorted(TABLE)))]
        kinds = [d.kind for d in row.domain]
        takes_integers = row.promotes in ("common", "branches", "") and "float" in kinds
        if takes_integers and draw(st.booleans()):
            kinds = ["int" if k == "float" else k for k in kinds]
        elif "stepped" in row.traits and set(kinds) == {"int"} and row.promotes == "common" and draw(st.booleans()):
            kinds = ["float"] * len(kinds)
        if row.promotes == "branches" and draw(st.integers(0, 3)) == 0:
            kinds = ["bool"] * 3
        pool.add(apply(row.name, *[_operand(draw, pool, d, k) for d, k in zip(row.domain, kinds, strict=True)]))
        if draw(st.integers(0, 5)) == 0:
            pool.add(cast(draw(st.sampled_from(pool.int + pool.bool)), draw(st.sampled_from([FLOAT32, INT64, INT32]))))
        if draw(st.integers(0, 7)) == 0:
            slot = draw(st.integers(0, len(TENSORS) - 1))
            indices = [draw(st.sampled_from(pool.int)) for _ in range(TENSORS[slot].rank)]
            pool.add(gather(slot, GATHER_DTYPES[slot], indices))
    return pool


@st.composite
def graphs(draw: st.DrawFn, largest: int = 10) -> Graph:
    """A graph with a score and a mask, often with a mask hidden in the score."""
    pool = draw(nodes(largest=largest))

    def late(kind: list[Node]) -> Node:
        return kind[-draw(st.integers(1, min(3, len(kind))))]

    score = apply("add", late(pool.float), late(pool.float))
    for _ in range(draw(st.integers(0, 2))):
        hidden, infinity = draw(st.sampled_from(pool.bool)), const(-float("inf"))
        form = draw(st.integers(0, 3))
        if form == 0:
            score = apply("where", hidden, score, infinity)
        elif form == 1:
            score = apply("where", hidden, infinity, score)
        elif form == 2:
            score = apply("add", score, apply("where", hidden, 0.0, infinity))
        else:
            score = apply("where", draw(st.sampled_from(pool.bool)), score, apply("where", hidden, late(pool.float), infinity))
    return Graph((("score", score), ("mask", apply("and", late(pool.bool), late(pool.bool)))), TENSORS, SCALARS)


def environment(seed: int, float_dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> Environment:
    """Values for everything `graphs()` reads, the same in either float dtype: 2 sequences, 3 heads, 5 queries, 7 keys."""
    random = torch.Generator().manual_seed(seed)
    score = torch.randn(2, 3, 5, 7, generator=random).to(float_dtype)
    tensors: list[torch.Tensor] = []
    for each, size in zip(TENSORS, _TENSOR_SIZES, strict=True):
        if each.dtype == "float32":
            tensors.append(torch.randn(size, generator=random).to(float_dtype))
        else:
            low = 0 if each.dtype == "bool" else -2
            tensors.append(torch.randint(low, 2 if each.dtype == "bool" else 4, size, generator=random).to(getattr(torch, each.dtype)))
    if requires_grad:
        for tensor in (score, *tensors):
            tensor.requires_grad_(tensor.is_floating_point())
    return Environment(
        {
            "score": score,
            "batch": torch.arange(2).view(2, 1, 1, 1),
            "head": torch.arange(3).view(3, 1, 1),
            "q_idx": torch.arange(5).view(5, 1),
            "kv_idx": torch.arange(7),
        },
        tensors,
        (3, 0.75),
        float_dtype,
        names=[t.name for t in TENSORS],
    )
