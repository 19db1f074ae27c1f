"""Gradients of captured tensors: which kernel adds up which term, in what form, and the buffers they go to.

    sum         reduced in registers over the tile's loop, then one addition for each tile, row or key
    diagonal    reduced inside each tile, then one addition for each diagonal of it
    store       no two pairs meet: written (or, where batch elements or heads share the elements, added to) by the one block that owns them
    scatter     one addition for each pair

Additions are atomic. In a deterministic plan they are made in integers, whose sum does not depend on their order: see `deposit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured
from flexc.codegen.triton.body import Body
from flexc.codegen.triton.plan import Plan, Tile
from flexc.ir.collisions import DIAGONAL, UNIQUE, GradientTerm, gradient_terms
from flexc.ir.graph import Graph, Node, input_node, is_const

_LANES = 32  # of a warp: a row of that length is turned round by one shuffle
BINS = 32  # int64 for each element of a gradient that is added up in integers
_ELEMENT_BYTES = {"bins": 8 * BINS, "float32": 4, "float16": 2, "bfloat16": 2}

HELPERS = {
    "deposit": '''@triton.jit
def deposit(pointer, step, value, mask):
    """Add float32 values to sums of integers, one for each 8 exponents, so that the order of additions does not matter.

    The sums of an element are `step` apart: neighbours are often of one size, and their sums lie together. 2^32 values fit whatever they
    are. Values below 2^-119 count as 0, infinities and NaN are counted in the place of those.
    """
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 255
    units = ((bits & 0x7FFFFF) | 0x800000) << (exponent & 7)
    units = tl.where(exponent == 255, 1, tl.where(bits < 0, -units, units))
    place = tl.where(exponent == 255, 0, exponent >> 3)
    tl.atomic_add(pointer + place.to(tl.int64) * step, units.to(tl.int64), mask=mask & (exponent > 7), sem="relaxed")''',
    "at_one_place": '''@triton.jit
def at_one_place(offset, value, inside):
    """Where all values go if they go to one place, their sum, and whether they do: additions to one address wait for each other."""
    lowest = tl.min(tl.where(inside, offset, 0x7FFFFFFFFFFFFFFF), 0)
    highest = tl.max(tl.where(inside, offset, -1), 0)
    return lowest, tl.sum(tl.where(inside, value, 0.0), 0), lowest == highest''',
    "diagonal_sums": '''@triton.jit
def diagonal_sums(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr):
    """Sums over the diagonals of each square part of a tile; the places of the first ones, and of others SIDE less, as row - column."""
    parts = tile.reshape(ROWS // SIDE, SIDE, COLUMNS // SIDE, SIDE)
    row, place = tl.arange(0, SIDE)[None, :, None, None], tl.arange(0, SIDE)[None, None, None, :]
    # Each row turned round by its number and read backwards, so that elements of a diagonal stand below each other.
    turned = tl.gather(parts, tl.broadcast_to((row - place) & (SIDE - 1), parts.shape), 3)
    upper = tl.sum(tl.where(row >= place, turned, 0.0), 1).reshape(ROWS * COLUMNS // SIDE)
    lower = tl.sum(tl.where(row < place, turned, 0.0), 1).reshape(ROWS * COLUMNS // SIDE)
    number = tl.arange(0, ROWS * COLUMNS // SIDE)
    return upper, lower, number % SIDE + (number // COLUMNS - number // SIDE % (COLUMNS // SIDE)) * SIDE''',
}


@dataclass(frozen=True)
class Buffer:
    """What terms of one tensor are added to, or what one term is stored in; of the tensor's shape.

    Attributes:
        name: of its variable on the host; arguments: of its pointer and strides in kernels.
        slot: of the tensor.
        dtype: of its elements, as PyTorch calls it; "bins" for sums of integers.
    """

    name: str
    arguments: str
    slot: int
    rank: int
    dtype: str


@dataclass(frozen=True)
class Term:
    """One term, as a kernel computes it.

    Attributes:
        kind: "sum", "diagonal", "store" or "scatter", see the module.
        name: of the accumulator.
        contribution: name of what one block adds.
        times: "" or " * factor".
        guard: the factor can be infinite or NaN where the mask forbids.
        pointer, total: where it goes, and of a sum what.
        offset: of a diagonal term whose diagonals may meet, from the start of the buffer, which `pointer` is then; "" for others.
        inside: guard of the address, or "True".
        step: of a sum in integers, the distance between those of one element.
        is_added: a store adds to what is there.
        cast: of what is stored, "" for float32.
        side: of a diagonal term, of the square parts of a tile whose diagonals are added up at once.
        statements: of a diagonal term, what the address needs; they read diagonal_q and diagonal_kv.
    """

    kind: str
    name: str
    contribution: str
    times: str
    guard: bool
    pointer: str
    total: str = ""
    offset: str = ""
    inside: str = "True"
    step: str = ""
    is_added: bool = False
    cast: str = ""
    side: int = 0
    statements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gradients:
    """All terms of one kernel.

    Attributes:
        roots: nodes that its statements need.
        buffers: in the order of the kernel's arguments.
        shared: inputs among "batch" and "head" whose entries one block of threads works on in turn, because they add to the same elements.
    """

    terms: tuple[Term, ...]
    roots: tuple[Node, ...]
    buffers: tuple[Buffer, ...]
    shared: frozenset[str]


def is_stored(term: GradientTerm, deterministic: bool) -> bool:
    """Whether one block of threads owns each element that the term adds to.

    It works on all entries that share elements in turn. There are too few blocks for that where heads do, unless determinism is worth it,
    and in small launches, which the host finds out.
    """
    return term.collisions == UNIQUE and (deterministic or "head" not in term.shared)


def gradient_bytes(graph: Graph, deterministic: bool, elements: Sequence[int]) -> dict[str, int]:
    """Bytes of each buffer that a module allocates for gradients of captured tensors, by the tensor's name.

    Args:
        graph: differentiated.
        elements: of each captured tensor.
    """
    total: dict[str, int] = {}
    for buffer in gradient_buffers(graph, deterministic):
        name = graph.tensors[buffer.slot].name
        total[name] = total.get(name, 0) + elements[buffer.slot] * _ELEMENT_BYTES[buffer.dtype]
    return total


def gradient_buffers(graph: Graph, deterministic: bool) -> tuple[Buffer, ...]:
    """What a module allocates for gradients of captured tensors; the graph is differentiated."""
    terms = gradient_terms(graph)
    return tuple(dict.fromkeys(_buffer(graph, deterministic, term, terms) for term in terms))


def print_gradients(graph: Graph, plan: Plan, kind: str, body: Body, is_finite: Callable[[Node], bool]) -> Gradients:
    """Print the terms that the kernel "dq" or "dkv" adds up: those by key in dkv, all others in dq."""
    everything = gradient_terms(graph)
    terms: list[Term] = []
    roots: list[Node] = []
    buffers: dict[str, Buffer] = {}
    shared: frozenset[str] = frozenset()
    for term in everything:
        level = body.levels[term.gather]
        if (level == COLUMN) != (kind == "dkv"):
            continue
        stored = is_stored(term, plan.deterministic)
        buffer = _buffer(graph, plan.deterministic, term, everything)
        buffers[buffer.name] = buffer
        shared |= term.shared if stored else frozenset()
        body.add(term.factor)
        roots.append(term.factor)
        given = captured(graph, graph.tensors[term.slot].name)
        name = f"{given}_grad{term.number}"
        times = "" if is_const(term.factor, 1.0) else f" * {body.at(term.factor, ELEMENT)}"
        made = {"name": name, "contribution": f"{name}_part", "times": times, "guard": not is_finite(term.factor)}
        made["step"] = f"{buffer.arguments}_step" if buffer.dtype == "bins" else ""
        if level == ELEMENT and term.collisions == DIAGONAL:
            terms.append(_diagonal(graph, body, term, plan.dq, name, buffer.arguments, made))
            continue
        for index in term.gather.args:
            body.add(index)
        roots += term.gather.args
        pointer, inside = body.address(term.gather, f"{buffer.arguments}_ptr", f"{buffer.arguments}_stride", name)
        if level == ELEMENT:
            cast = f".to(tl.{buffer.dtype})" if stored and buffer.dtype != "float32" else ""
            how = {"kind": "store" if stored else "scatter", "is_added": bool(term.shared), "cast": cast}
            terms.append(Term(**made, **how, pointer=pointer, inside=inside or "True"))
        else:
            conditions = {ROW: ["stored"], COLUMN: ["(columns < kv_len)"]}.get(level, []) + ([inside] if inside else [])
            total = name if level != TILE else f"tl.sum({name}, 0)"
            terms.append(Term(**made, kind="sum", pointer=pointer, total=total, inside=" & ".join(conditions) or "True"))
    helpers = {"diagonal_sums"} if any(t.kind == "diagonal" for t in terms) else set()
    helpers |= {"at_one_place"} if any(t.offset for t in terms) else set()
    if plan.deterministic and any(t.kind != "store" for t in terms):
        helpers.add("deposit")
    for helper in helpers:
        body.need(helper)
    return Gradients(tuple(terms), tuple(roots), tuple(buffers.values()), shared)


def _buffer(graph: Graph, deterministic: bool, term: GradientTerm, everything: Sequence[GradientTerm]) -> Buffer:
    """A term that is stored has its own. One that is written once, and alone, is rounded as it is written."""
    tensor = graph.tensors[term.slot]
    given = captured(graph, tensor.name)
    if not is_stored(term, deterministic):
        return Buffer(f"{given}_grad", f"{given}_grad", term.slot, tensor.rank, "bins" if deterministic else "float32")
    is_alone = sum(other.slot == term.slot for other in everything) == 1
    narrow = tensor.dtype in ("float16", "bfloat16") and is_alone and not term.shared
    name = f"{given}_grad{term.number}"
    return Buffer(name, name, term.slot, tensor.rank, tensor.dtype if narrow else "float32")


def _diagonal(graph: Graph, body: Body, term: GradientTerm, tile: Tile, name: str, arguments: str, made: dict) -> Term:
    """The index depends on q_idx - kv_idx alone: it is printed for vectors of positions, one pair on each diagonal."""
    along = Body(graph, body.known, body.tanh, body.interpreted, uses=body.uses, mark=f"d{term.number}_", is_flat=True)
    along.names |= {input_node("q_idx"): "diagonal_q", input_node("kv_idx"): "diagonal_kv"}
    for index in term.gather.args:
        along.add(index)
    pointer, inside = along.address(term.gather, "0" if term.repeats else f"{arguments}_ptr", f"{arguments}_stride", name)
    lines = along.take()
    return Term(
        **made,
        kind="diagonal",
        pointer=f"{arguments}_ptr" if term.repeats else pointer,
        offset=pointer if term.repeats else "",
        inside=inside or "True",
        side=min(tile.rows, tile.columns, _LANES),
        statements=(*lines[TILE], *lines[ROW]),
    )
