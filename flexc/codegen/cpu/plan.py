"""Every choice of the CPU backend, as plain data: block sizes, which parts a kernel has, and the rate of every node.

A node's rate says how often its value changes, and so where the emitted module computes it: "uniform", "head", "row", "column" and
"diagonal" values once a call, for all rows, columns or diagonals at a time, and only "element" values once a tile. A diagonal value reads
q_idx and kv_idx only through their difference, so a vector of Sq + Skv - 1 numbers holds it; a tile is a strided view of that vector
where the rows are kept in descending order (row r, column c of the tile at entry r + c), which is what `is_descending` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flexc.errors import UnsupportedError
from flexc.ir.graph import FLOAT32, INT64, Graph, Node, const_value, inputs_of, is_const, topological
from flexc.ir.ops import has_trait

RATES = ("uniform", "head", "row", "column", "diagonal", "element")
COMPUTE_DTYPES = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


@dataclass(frozen=True)
class Plan:
    """What the emitter needs to know besides the graph.

    Attributes:
        block_q, block_kv: tokens per block of the block map.
        tile_scores: scores that one thread holds at a time; heads are taken together, and keys apart, to stay near it.
        dtype: of q, k, v and out ("float16", "bfloat16", "float32", "float64").
        compute_dtype: of scores, sums and lse: float32, or float64 for float64 inputs.
        has_score, has_mask: whether there is a score function, a mask.
        has_backward: whether gradients are wanted.
        has_captured_gradients: whether a captured tensor needs one.
        is_base2: log2(e) is folded into the scale, because nothing stands between the product and the exponential.
        mask_adds: the mask is added as 0 or -inf, which is faster; only where a masked score is known to be finite.
        derivative: of the modified by the raw score: "one", "zero" or "computed".
        is_descending: rows are kept in descending order so that diagonal values are views.
        rates: the rates that occur, in the order of RATES.
        max_scores: the forward pass also returns the largest score of each row.
    """

    block_q: int
    block_kv: int
    tile_scores: int
    dtype: str
    compute_dtype: str
    has_score: bool
    has_mask: bool
    has_backward: bool
    has_captured_gradients: bool
    is_base2: bool
    mask_adds: bool
    derivative: str
    is_descending: bool
    rates: tuple[str, ...]
    max_scores: bool = False

    @property
    def block(self) -> tuple[int, int]:
        """(block_q, block_kv), as `sparsity.classify` takes it."""
        return (self.block_q, self.block_kv)

    def __str__(self) -> str:
        return "\n".join(f"{field.name:23} {_text(getattr(self, field.name))}" for field in fields(self))


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def plan(
    graph: Graph,
    *,
    q_len: int,
    kv_len: int,
    head_dim: int,
    head_dim_v: int,
    dtype: str | torch.dtype,
    backward: bool = True,
    max_scores: bool = False,
) -> Plan:
    """Choose everything for a graph (differentiated, if `backward`) and sizes in tokens.

    Raises:
        UnsupportedError: a dtype that the CPU backend does not compute.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        raise UnsupportedError(f"the cpu backend takes {', '.join(COMPUTE_DTYPES)}; expected one of these, got {name}")
    rates = Rates(graph)
    diagonals = wants_diagonals(graph, rates)
    present = {rates.rate(node, diagonals) for node in graph.nodes() if node.op != "const"}
    block_q, block_kv = block_sizes(q_len, kv_len)
    return Plan(
        block_q=block_q,
        block_kv=block_kv,
        tile_scores=1 << 18,
        dtype=name,
        compute_dtype=COMPUTE_DTYPES[name],
        has_score=graph.score is not None,
        has_mask=graph.mask is not None,
        has_backward=backward,
        has_captured_gradients=backward and any(key.startswith("dgather:") for key, _ in graph.outputs),
        is_base2=graph.score is None,
        mask_adds=graph.mask is not None and (graph.score is None or _is_finite(graph.score)),
        derivative=_derivative(graph),
        is_descending=diagonals,
        rates=tuple(rate for rate in RATES if rate in present),
        max_scores=max_scores,
    )


def block_sizes(q_len: int, kv_len: int) -> tuple[int, int]:
    """(block_q, block_kv): all that a plan takes from the lengths.

    Few different sizes, so that growing lengths do not mean new kernels; small problems in few blocks, where calls cost most.
    """
    return (64 if q_len <= 64 else 128, 64 if kv_len <= 64 else 128)


def _derivative(graph: Graph) -> str:
    if graph.score is None:
        return "one"
    factor = graph.get("dscore")
    if factor is None or is_const(factor, 0):
        return "zero"
    return "one" if is_const(factor, 1) else "computed"


# Ops whose result is finite where their operands are, short of overflow.
_FINITE = frozenset(
    "add sub mul neg abs sign minimum maximum and or xor not invert lt le gt ge eq ne where "
    "tanh sigmoid erf sin cos floor ceil round trunc cast floordiv floormod".split()
)


def _is_finite(score: Node) -> bool:
    """Whether the score is finite at masked positions too: only ops that keep it so, and captured values that no position selects."""
    for node in topological([score]):
        if node.op == "gather":
            if inputs_of(node) & {"q_idx", "kv_idx"}:
                return False
        elif node.op == "const":
            value = const_value(node)
            if value != value or value in (float("inf"), float("-inf")):
                return False
        elif node.op == "truediv":
            if not (node.args[1].op == "const" and const_value(node.args[1]) != 0):
                return False
        elif node.op not in _FINITE and node.op not in ("input", "scalar"):
            return False
    return True


# --- rates --------------------------------------------------------------------------------------------------------------------------


def score_outputs(graph: Graph) -> list[Node]:
    """What the score part computes for each tile: the score, its derivative, and the factors of the captured tensors."""
    return [node for key, node in graph.outputs if key in ("score", "dscore") or key.startswith(("gather:", "dgather:"))]


def wants_diagonals(graph: Graph, rates: Rates) -> bool:
    """Whether keeping rows in descending order pays: the score has diagonal values, or the mask has costly ones (tables)."""
    if any(rates.is_diagonal(node) for node in topological(score_outputs(graph))):
        return True
    if graph.mask is None:
        return False
    return any(rates.is_diagonal(node) and (node.op == "gather" or has_trait(node, "costly")) for node in topological([graph.mask]))


class Rates:
    """What every node of a graph reads, and so how often its value changes. One pass over the graph."""

    def __init__(self, graph: Graph):
        self.reads: dict[Node, frozenset[str]] = {}
        self._slopes: dict[Node, tuple[int, int] | None] = {}
        self._through_difference: dict[Node, bool] = {}
        for node in graph.nodes():
            own = frozenset(node.attrs) if node.op == "input" else frozenset[str]()
            self.reads[node] = own.union(*(self.reads[a] for a in node.args))
            self._slopes[node] = self._slopes_of(node)
            self._through_difference[node] = self._reads_difference(node)

    def rate(self, node: Node, diagonals: bool) -> str:
        """One of RATES. Without `diagonals`, diagonal values count as element values."""
        reads = self.reads[node]
        if "score" in reads:
            return "element"
        if {"q_idx", "kv_idx"} <= reads:
            return "diagonal" if diagonals and self.is_diagonal(node) else "element"
        if "q_idx" in reads:
            return "row"
        if "kv_idx" in reads:
            return "column"
        return "head" if reads else "uniform"

    def is_diagonal(self, node: Node) -> bool:
        """Whether the node reads both q_idx and kv_idx, only through their difference, and no score."""
        reads = self.reads[node]
        return "score" not in reads and {"q_idx", "kv_idx"} <= reads and self._through_difference[node]

    def _reads_difference(self, node: Node) -> bool:
        if not self.reads[node] & {"q_idx", "kv_idx"}:
            return True
        slopes = self._slopes[node]
        if slopes is not None:
            return slopes[0] == -slopes[1]
        if has_trait(node, "compare"):
            a, b = (self._slopes[operand] for operand in node.args)
            if a is not None and b is not None:
                return a[0] - b[0] == b[1] - a[1]
        return node.op != "input" and all(self._through_difference[operand] for operand in node.args)

    def _slopes_of(self, node: Node) -> tuple[int, int] | None:
        """(a, b) if the node is a * q_idx + b * kv_idx + something that reads neither, for integers a and b."""
        if not self.reads[node] & {"q_idx", "kv_idx", "score"}:
            return (0, 0)
        if node.op == "input":
            return {"q_idx": (1, 0), "kv_idx": (0, 1)}.get(node.attrs[0])
        known = [slopes for slopes in (self._slopes[operand] for operand in node.args) if slopes is not None]
        if len(known) < len(node.args):
            return None
        if node.op == "add":
            return (known[0][0] + known[1][0], known[0][1] + known[1][1])
        if node.op == "sub":
            return (known[0][0] - known[1][0], known[0][1] - known[1][1])
        if node.op == "neg":
            return (-known[0][0], -known[0][1])
        if node.op == "cast" and node.dtype in (FLOAT32, INT64):
            return known[0]
        if node.op == "mul" and node.dtype != FLOAT32:
            for constant, other in ((node.args[0], known[1]), (node.args[1], known[0])):
                if constant.op == "const" and float(const_value(constant)).is_integer():
                    factor = int(const_value(constant))
                    return (factor * other[0], factor * other[1])
        return None
