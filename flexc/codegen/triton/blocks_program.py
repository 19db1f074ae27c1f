"""The bounds of a mask as a program over tiles, and the facts about captured tensors that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc.codegen.levels import captured
from flexc.codegen.triton.blocks_symbols import REAL, TRUTH, WHOLE, Recorder, Symbol, do
from flexc.codegen.triton.plan import MAX_TOKENS
from flexc.ir.bounds import anything, bounds
from flexc.ir.graph import FLOAT32, INT32, Graph, Node
from flexc.ir.interval import INTEGER_ENDS, Interval, either, unless
from flexc.sparsity.facts import is_wide, range_of

_INF = float("inf")
_SIZES = (0.0, 2.0**31 - 1)
_STRIDES = (-(2.0**40), 2.0**40)


@dataclass(frozen=True)
class Table:
    """Minimum and maximum of a captured tensor, which the program reads: arguments `{name}_lo_ptr`, `{name}_hi_ptr` and strides.

    Attributes:
        slot: of the tensor.
        dims: along which indices are ranges: one for a sparse table, more for cells of all sizes (`sparsity.facts`).
        cell: elements along a cell.
        name: how the arguments begin.
        dtype: torch dtype of the elements.
    """

    slot: int
    dims: tuple[int, ...]
    cell: int
    name: str
    dtype: str

    def numbers(self, rank: int) -> list[str]:
        """Arguments that are integers: strides of the table, and the spans of its levels."""
        if len(self.dims) == 1:
            return [f"{self.name}_level", *(f"{self.name}_stride{d}" for d in range(rank) if d not in self.dims)]
        return [*(f"{self.name}_stride{d}" for d in range(rank)), *(f"{self.name}_span{d}" for d in self.dims)]


@dataclass(frozen=True)
class Program:
    """When a tile is proved: `certain` is its being full, `possible` its not being empty."""

    certain: Symbol
    possible: Symbol
    tables: tuple[Table, ...]


def bounds_program(graph: Graph, cells: Callable[[int, tuple[int, ...]], int], is_sorted: Sequence[bool]) -> Program:
    """The bounds of `graph.mask` over tiles from q_lo, kv_lo to q_hi, kv_hi of one batch and head.

    Args:
        graph: a mask and what it captures; positions stay below MAX_TOKENS.
        cells: (slot, dimensions whose indices are ranges) → elements along a cell of the table.
        is_sorted: of each tensor, whether it was declared sorted along its last dimension.

    Raises:
        UnsupportedError: the rules need a function that has no row here.
    """
    recorder = Recorder()
    facts = _Facts(graph, recorder, cells, is_sorted)

    def position(name: str) -> Interval:
        ends = [recorder.argument(f"{name}_{end}", WHOLE, 0.0, MAX_TOKENS - 1.0, frozenset([f"{name}_idx"])) for end in ("lo", "hi")]
        return Interval(ends[0], ends[1], False, INT32, 0.0, MAX_TOKENS - 1.0)  # pyright: ignore[reportArgumentType]

    def number(name: str, dtype: str) -> Interval:
        if dtype == FLOAT32:
            value = recorder.argument(name, REAL, -_INF, _INF)
            lo, hi = value.nan_to_num(-_INF, _INF, -_INF), value.nan_to_num(_INF, _INF, -_INF)
            return Interval(lo, hi, do("isnan", value))  # pyright: ignore[reportArgumentType]
        value: Any = recorder.argument(name, WHOLE, *INTEGER_ENDS[dtype])
        return Interval(value, value, False).with_range(*INTEGER_ENDS[dtype])

    inputs = {"q_idx": position("q"), "kv_idx": position("kv")}
    for name in ("batch", "head"):
        value: Any = recorder.argument(name, WHOLE, *_SIZES)
        inputs[name] = Interval(value, value, False, INT32, *_SIZES)
    scalars = [number(captured(graph, s.name), s.dtype) for s in graph.scalars]
    assert graph.mask is not None
    truth = bounds([graph.mask], inputs, scalars, facts.gather)[graph.mask]
    return Program(recorder.lifted(truth.lo), recorder.lifted(truth.hi), tuple(facts.tables.values()))


@dataclass
class _IndexRange:
    first: Symbol
    last: Symbol
    outside: Any


@dataclass
class _Facts:
    """`sparsity.Facts.gather` on symbols."""

    graph: Graph
    recorder: Recorder
    cells: Callable[[int, tuple[int, ...]], int]
    is_sorted: Sequence[bool]
    tables: dict[tuple, Table] = field(default_factory=dict)

    def gather(self, node: Node, indices: list[Interval]) -> Interval:
        slot = node.attrs[0]
        tensor = self.graph.tensors[slot]
        name = captured(self.graph, tensor.name)
        sizes = [self.recorder.argument(f"{name}_size{d}", WHOLE, *_SIZES) for d in range(tensor.rank)]
        ranges = [self._range(index, size) for index, size in zip(indices, sizes, strict=True)]
        wide = tuple(d for d, index in enumerate(node.args) if is_wide(index))
        if not wide:
            lo, hi = self._elements(name, tensor.dtype, ranges, [r.first for r in ranges], [r.first for r in ranges])
        elif wide == (tensor.rank - 1,) and self.is_sorted[slot]:
            before = [r.first for r in ranges[:-1]]
            lo, hi = self._elements(name, tensor.dtype, ranges, [*before, ranges[-1].first], [*before, ranges[-1].last])
        else:
            table = self._table(slot, wide, self.cells(slot, wide))
            lo, hi = self._from_table(table, ranges) if len(wide) == 1 else self._from_cells(table, ranges)
        narrow = [r for d, r in enumerate(ranges) if d not in wide and r.first is not r.last]
        unknown = anything(node.dtype)
        for r in narrow:
            lo, hi = (do("where", do("ne", r.first, r.last), end.double(), e) for end, e in ((unknown.lo, lo), (unknown.hi, hi)))
        outside: Any = either(*(r.outside for r in ranges))
        if outside is not False:
            lo, hi = unless(outside, lo.clamp(max=0), lo), unless(outside, hi.clamp(min=0), hi)  # pyright: ignore[reportArgumentType]
        nan: Any = do("eq", lo, -_INF) & do("eq", hi, _INF) if node.dtype == FLOAT32 else False
        return Interval(lo, hi, nan).with_range(*range_of(getattr(torch, tensor.dtype)))  # pyright: ignore[reportArgumentType]

    def _range(self, index: Interval, size: Symbol) -> _IndexRange:
        """As in `sparsity.facts`: whole indices inside the tensor, and where the index can be outside."""
        end = do("maximum", size - 1, 0)
        lo, hi = (do("where", e, 1.0, 0.0) if e.kind == TRUTH else e for e in map(self.recorder.lifted, (index.lo, index.hi)))
        if index.is_whole and index.least >= 0:
            first, last = (do("integer", do("minimum", e, end)) for e in (lo, hi))
            return _IndexRange(first, last, do("ge", hi, size))
        lo, hi = (do("integer", e.clamp(-size - 1, size)) for e in (lo, hi))
        outside = do("lt", lo, -size) | do("ge", hi, size)
        across = do("lt", lo, 0) & do("ge", hi, 0)
        first = do("where", across, 0, do("where", do("lt", lo, 0), lo + size, lo)).clamp(0, end)
        last = do("where", across, end, do("where", do("lt", hi, 0), hi + size, hi)).clamp(0, end)
        return _IndexRange(first, first if lo is hi else do("maximum", first, last), outside)

    def _table(self, slot: int, wide: tuple[int, ...], cell: int) -> Table:
        tensor = self.graph.tensors[slot]
        if (slot, wide, cell) not in self.tables:
            name = f"{captured(self.graph, tensor.name)}_table{len(self.tables)}"
            # Tables hold what a kernel computes with; truth values as bytes, which have a minimum.
            dtype = "float32" if tensor.dtype in ("float16", "bfloat16", "float64") else "uint8" if tensor.dtype == "bool" else tensor.dtype
            self.tables[slot, wide, cell] = Table(slot, wide, cell, name, dtype)
        return self.tables[slot, wide, cell]

    def _number(self, name: str) -> Symbol:
        return self.recorder.argument(name, WHOLE, *_STRIDES)

    def _elements(
        self, name: str, dtype: str, ranges: list[_IndexRange], at_first: list[Symbol], at_last: list[Symbol]
    ) -> tuple[Symbol, Symbol]:
        """Of a tensor itself, where a NaN is everything."""
        lo, hi = (self.recorder.load(f"{name}_ptr", self._offset(name, at), dtype) for at in (at_first, at_last))
        return (lo, hi) if lo.kind == WHOLE else (lo.nan_to_num(-_INF, _INF, -_INF), hi.nan_to_num(_INF, _INF, -_INF))

    def _offset(self, name: str, at: Sequence[Symbol | None]) -> Symbol:
        total = self.recorder.const(0)
        for d, index in enumerate(at):
            total = total if index is None else total + do("scaled", index, self._number(f"{name}_stride{d}"))
        return total

    def _from_table(self, table: Table, ranges: list[_IndexRange]) -> tuple[Symbol, Symbol]:
        (dim,) = table.dims
        first, last = (do("floordiv", end, table.cell) for end in (ranges[dim].first, ranges[dim].last))
        level = do("floor_log2", last - first + 1) if first is not last else self.recorder.const(0)
        row = self._offset(table.name, [None if d == dim else r.first for d, r in enumerate(ranges)])
        row = row + do("scaled", level, self._number(f"{table.name}_level"))
        right = last + 1 - do("lshift", 1, level)
        return tuple(  # pyright: ignore[reportReturnType]
            do(pick, *(self.recorder.load(f"{table.name}_{end}_ptr", row + at, table.dtype) for at in (first, right)))
            for pick, end in (("minimum", "lo"), ("maximum", "hi"))
        )

    def _from_cells(self, table: Table, ranges: list[_IndexRange]) -> tuple[Symbol, Symbol]:
        offsets = [self._offset(table.name, [None if d in table.dims else r.first for d, r in enumerate(ranges)])]
        for dim in table.dims:
            first, last = (do("floordiv", end, table.cell) for end in (ranges[dim].first, ranges[dim].last))
            level = do("floor_log2", last - first + 1) if first is not last else self.recorder.const(0)
            crosses = do("gt", do("rshift", last, level) - do("rshift", first, level), 1)
            level = do("where", crosses, level + 1, level)
            span = self.recorder.argument(f"{table.name}_span{dim}", WHOLE, *_SIZES)
            begin = span - do("rshift", span, level)
            stride = self._number(f"{table.name}_stride{dim}")
            places = [do("scaled", begin + do("rshift", end, level), stride) for end in (first, last)]
            offsets = [offset + place for offset in offsets for place in dict.fromkeys(places)]
        found = []
        for pick, end in (("minimum", "lo"), ("maximum", "hi")):
            value, *others = (self.recorder.load(f"{table.name}_{end}_ptr", offset, table.dtype) for offset in offsets)
            for other in others:
                value = do(pick, value, other)
            found.append(value)
        return found[0], found[1]
