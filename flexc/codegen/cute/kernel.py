"""The user's functions as a kernel prints them: statements by place, and which values of a column are worked out once for all rows."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flexc.codegen.cute.body import BLOCK, BLOCK_ROW, Body, literal
from flexc.codegen.cute.diagonals import Along
from flexc.codegen.cute.matches import Columns, Match
from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, position_bounds
from flexc.errors import InternalError
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Graph, Node, is_const

MAX_TOKENS = 2**24  # positions are exact in float32 below it
_TYPES = {BOOL: "Boolean", INT32: "Int32", INT64: "Int64", FLOAT32: "Float32"}
_STAGED_TYPES = _TYPES | {BOOL: "Int32"}
_STAGED_BYTES = {"Int32": 4, "Int64": 8, "Float32": 4}


@dataclass(frozen=True)
class Staged:
    """A value of a column or diagonal that comes from memory: each thread of a warpgroup works out one of them and shares it.

    Attributes:
        name: of the value; type: in shared memory; is_truth: a truth value, kept as a number; masked: only partial blocks need it.
        by_diagonal: there is one for each diagonal of the warpgroup's block.
    """

    name: str
    type: str
    is_truth: bool
    masked: bool
    by_diagonal: bool = False


@dataclass
class Kernel:
    """Everything that the template prints of the user's functions: statements by place, those of the mask apart, and expressions.

    Attributes:
        tile, row: before the blocks; block, block_row, column, element: of the score in each block; mask_…: of the mask in partial blocks.
        quick, mask_quick: those column statements that need no memory; the others' results are in `staged`.
        along, mask_along: of a diagonal of a block; their results are in `diagonals`.
        matches: conditions of the mask that a warp decides by vote; match_column: the statements for a column, shared_match: what these
            take from outside.
        rows: register tensors of row values, (name, type).
        bases: register tensors that a block fills, (name, type).
        shared, shared_along: what a block's statements take from outside, and those of a diagonal.
        logit, outer: the score in base 2 is logit * outer.
        factor: the derivative of the score by the raw score, where it was asked for.
        first, stop: what the first column that a row may see is at least, and the first one after them at most: limits that the mask sets
            for each row, less the position `key`.
        allowed: the rest of an element's mask; empty without one.
        shifts: the score lacks what `shifts[half]` adds to a whole row.
        modifies: the score function changes the product at all; has_outer: there is a factor besides.
        reads_rows, reads_columns, mask_reads_columns: whether statements name q_idx, kv_idx.
    """

    tile: list[str] = field(default_factory=list)
    row: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    block_row: list[str] = field(default_factory=list)
    column: list[str] = field(default_factory=list)
    quick: list[str] = field(default_factory=list)
    element: list[str] = field(default_factory=list)
    mask_block: list[str] = field(default_factory=list)
    mask_block_row: list[str] = field(default_factory=list)
    mask_column: list[str] = field(default_factory=list)
    mask_quick: list[str] = field(default_factory=list)
    mask_element: list[str] = field(default_factory=list)
    along: list[str] = field(default_factory=list)
    mask_along: list[str] = field(default_factory=list)
    staged: list[Staged] = field(default_factory=list)
    diagonals: list[Staged] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    match_column: list[str] = field(default_factory=list)
    shared_match: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    bases: list[tuple[str, str]] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    shared_along: list[str] = field(default_factory=list)
    logit: str = "raw"
    outer: str = "1.0"
    factor: str = ""
    first: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    allowed: str = ""
    shifts: bool = False
    modifies: bool = False
    has_outer: bool = False
    reads_rows: bool = False
    reads_columns: bool = False
    mask_reads_columns: bool = False

    @property
    def stages_scores(self) -> bool:
        """Some staged value is needed in every block."""
        return any(not value.masked for value in (*self.staged, *self.diagonals))

    @property
    def loads_elements(self) -> bool:
        """Some captured value is another one for each element."""
        return any("tiles.element(" in line for line in (*self.element, *self.mask_element))

    @property
    def statements(self) -> int:
        """What each element of a partial block takes."""
        return len(self.element) + len(self.mask_element)

    @property
    def staged_for_mask(self) -> bool:
        """Some staged value is needed in partial blocks only."""
        return any(value.masked for value in self.staged)

    @property
    def column_bytes(self) -> int:
        """Shared memory that a column's staged values take."""
        return sum(_STAGED_BYTES[value.type] for value in self.staged)

    @property
    def diagonal_bytes(self) -> int:
        """Shared memory that a diagonal's values take."""
        return sum(_STAGED_BYTES[value.type] for value in self.diagonals)


def print_kernel(
    graph: Graph,
    *,
    approximate: bool,
    exact: bool,
    shifts: bool = True,
    derivative: bool = False,
    diagonals: bool = False,
    votes: bool = False,
    body: Body | None = None,
) -> Kernel:
    """The statements of a graph that is lowered to base 2 (outputs logit2, outer and perhaps mask).

    Args:
        approximate: the hardware approximation of tanh is allowed; exact: no approximation is.
        shifts: a part of the score that a row's elements of a block share may be left to the softmax, see `Body.peel`.
        derivative: print the output dscore, too.
        diagonals: values of diagonals are worked out once for each.
        votes: conditions that a warp can decide by vote go into `matches`.
        body: prints the statements, and more of the graph afterwards.
    """
    known = position_bounds(graph, MAX_TOKENS)
    body = body or Body(graph, known, approximate, exact)
    along = body.along = Along(graph, known, approximate, exact) if diagonals else None
    kernel = Kernel()
    logit, outer = _output(graph, "logit2"), _output(graph, "outer")
    body.add(outer)
    kernel.outer = body.at(outer, TILE)
    kernel.has_outer = not is_const(outer, 1.0)
    peeled = body.peel(logit) if shifts else None
    kernel.shifts = peeled is not None
    if peeled is None:
        body.add(logit)
    kernel.modifies = not (logit.op == "input" and logit.attrs[0] == "raw")
    kernel.logit = peeled or body.at(logit, ELEMENT)
    if kernel.modifies and body.level(logit) != ELEMENT:
        kernel.logit = f"Float32({kernel.logit})"
    if derivative:
        factor = _output(graph, "dscore")
        body.add(factor)
        kernel.factor = body.at(factor, ELEMENT)
    lines = body.take()
    kernel.tile, kernel.row = lines[TILE], lines[ROW]
    kernel.diagonals = _take_diagonals(along, kernel, kernel.along, False)
    kernel.block, kernel.block_row, kernel.column, kernel.element = (lines[place] for place in (BLOCK, BLOCK_ROW, COLUMN, ELEMENT))
    kernel.quick, slow = _without_memory(kernel.column)
    kernel.staged = [_staged(name, dtype, False) for name, dtype in body.exported.items() if name in slow]
    kernel.reads_columns = body.reads_columns and _names("kv_idx", [*kernel.quick, *kernel.element, kernel.logit, kernel.factor])
    mask = graph.mask
    if mask is not None:
        before = dict(body.exported)
        others = _split_interval(body, kernel, mask)
        if votes:
            columns = Columns(graph, known, approximate, exact)
            others = _split_matches(columns, body, kernel, others)
        for node in others:
            body.add(node)
        kernel.allowed = " & ".join(f"Boolean({literal(n)})" if n.op == "const" else body.at(n, ELEMENT) for n in others)
        lines = body.take()
        # What a row needs stands before the blocks, where both kinds of block share it.
        kernel.tile, kernel.row = kernel.tile + lines[TILE], kernel.row + lines[ROW]
        kernel.diagonals += _take_diagonals(along, kernel, kernel.mask_along, True)
        kernel.mask_block, kernel.mask_block_row = lines[BLOCK], lines[BLOCK_ROW]
        kernel.mask_column, kernel.mask_element = lines[COLUMN], lines[ELEMENT]
        kernel.mask_quick, slow = _without_memory(kernel.mask_column, slow)
        kernel.staged += [_staged(name, dtype, True) for name, dtype in body.exported.items() if name in slow and name not in before]
        kernel.mask_reads_columns = _names("kv_idx", [*kernel.mask_quick, *kernel.mask_element, kernel.allowed])
    take_rows(body, kernel)
    kernel.bases = bases_of(body)
    kernel.shared = list(body.shared)
    kernel.shared_along = list(along.shared) if along is not None else []
    return kernel


def take_rows(body: Body, kernel: Kernel) -> None:
    """What the body has printed for rows, so far, into the kernel."""
    kernel.reads_rows = "q_idx" in body.names.values()
    rows = ({"q_idx": INT32} if kernel.reads_rows else {}) | body.row_dtypes
    kernel.rows = [(name, _TYPES[dtype]) for name, dtype in rows.items()]


def bases_of(body: Body) -> list[tuple[str, str]]:
    """Register tensors that a block of the function being printed fills."""
    return [(name, _TYPES[dtype]) for name, dtype in body.row_bases.items()]


def _take_diagonals(along: Along | None, kernel: Kernel, lines: list[str], masked: bool) -> list[Staged]:
    """The values of diagonals that have come up; their statements go into `lines`, and what they need of the tile into the kernel."""
    if along is None:
        return []
    taken = along.take()
    kernel.tile = kernel.tile + taken[TILE]
    lines += taken[COLUMN]
    wanted, along.wanted = along.wanted, {}
    known = {value.name for value in kernel.diagonals}
    return [replace(_staged(name, dtype, masked), by_diagonal=True) for name, dtype in wanted.items() if name not in known]


def _split_interval(body: Body, kernel: Kernel, mask: Node) -> list[Node]:
    """The conditions that all must hold, without those that bound the columns of a row from one side, which go into the kernel's limits.

    Of several such bounds from the same side, any one of which is enough, the furthest is the limit.
    """
    if mask.op == "and" and mask.dtype == BOOL:
        return [node for part in mask.args for node in _split_interval(body, kernel, part)]
    parts = _alternatives(mask)
    sides = {body.limited_side(part) for part in parts}
    if sides not in ({"stop"}, {"first"}):
        return [mask]
    limits = []
    for part in parts:
        op, name = body.row_limit(part)
        limits.append(f"{name} - key{' + 1' if op in ('le', 'gt') else ''}")
    furthest = "max" if sides == {"stop"} else "min"
    limit = functools.reduce(lambda one, other: f"cutlass.{furthest}({one}, {other})", limits)
    (kernel.stop if sides == {"stop"} else kernel.first).append(limit)
    return []


def _split_matches(columns: Columns, body: Body, kernel: Kernel, conditions: list[Node]) -> list[Node]:
    """The conditions without those that a warp decides by vote, which go into the kernel."""
    found = [(node, columns.match(node, body)) for node in conditions]
    lines = columns.take()
    kernel.tile = kernel.tile + lines[TILE]
    kernel.match_column = lines[COLUMN]
    kernel.matches = [match for _, match in found if match is not None]
    kernel.shared_match = list(columns.shared)
    return [node for node, match in found if match is None]


def _alternatives(mask: Node) -> list[Node]:
    """The conditions one of which must hold."""
    if mask.op == "or" and mask.dtype == BOOL:
        return [node for part in mask.args for node in _alternatives(part)]
    return [mask]


def _staged(name: str, dtype: str, masked: bool) -> Staged:
    return Staged(name, _STAGED_TYPES[dtype], dtype == BOOL, masked)


def _without_memory(lines: Sequence[str], known: frozenset[str] = frozenset()) -> tuple[list[str], frozenset[str]]:
    """The statements that neither load nor use what was loaded, and the names that the others define, with those `known` before."""
    quick, slow = [], set(known)
    for line in lines:
        name, expression = line.split(" = ", 1)
        if "tiles.element(" in expression or slow & set(re.findall(r"\w+", expression)):
            slow.add(name)
        else:
            quick.append(line)
    return quick, frozenset(slow)


def _names(name: str, texts: Sequence[str]) -> bool:
    return any(re.search(rf"\b{name}\b", text.split("  # ")[0]) for text in texts)


def _output(graph: Graph, name: str) -> Node:
    node = graph.get(name)
    if node is None:
        raise InternalError(f"the graph has no output {name}:\n{graph}")
    return node
