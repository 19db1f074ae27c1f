"""Launches of the kernels that write walks, and of those that make tables of facts: on the host, little more than the launches.

All that does not change between two calls on tensors of the same shapes is worked out once: where the parts of a walk lie in one piece of
memory, how many programs there are, and which binary fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from flexc.codegen.triton.blocks import COUNTED, BlocksPlan, BlocksText
from flexc.codegen.triton.blocks_program import Table
from flexc.map_making import stream_of
from flexc.runtime.triton_launch import Launcher
from flexc.sparsity.facts import TABLES, Cells, SparseTable
from flexc.sparsity.walk import Walk

Tensor = torch.Tensor
Exact = Literal["auto"] | bool

# Numbers of int32 for lists and runs. Rows that need more places than they have are walked from end to end.
_PLACES_OF_SEQUENCE = 2**20  # 4 MiB: every row of up to 724 has all it can need
_PLACES_OF_ROW = 160, 80  # in longer sequences, and with _MANY_ROWS, where a walk of two million tokens takes 6 MiB
_MANY_ROWS = 2**14
_PLACES_OF_MAP = 2**24, 2**26  # through batch and heads: shared evenly as far as rows keep as many, and at most
MOST_ROWS = 2**28  # through batch and heads: what is counted for a row has its place in int32
_COARSE_BLOCKS = 512  # with fewer blocks in a row, squares of blocks are not decided first
_MOST_RANKED = 2**14  # block rows up to which their order is found by counting, which costs their square
_MOST_GRID_ROWS = 2**16 - 1
_MOST_PREPARED = 256
_ALL = 2**31 - 1
MOST_PAIRS = 2**27  # that are evaluated at most for one map
MOST_IN_VAIN = 8  # blocks that a block row evaluates and that stay partial, before it evaluates no more


@dataclass(frozen=True)
class Room:
    """Where the parts of one walk lie in one piece of memory of int32, each aligned to 16 bytes.

    Attributes:
        rows: block rows through batch and heads; own: of one of those; other: blocks of a row.
        listed, runs: places of a row.
        starts: of records, lists, runs, counts and order.
        size: of everything.
    """

    entries: tuple[int, int]
    rows: int
    own: int
    other: int
    listed: int
    runs: int
    starts: tuple[int, ...]
    size: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(entries: tuple[int, int], own: int, other: int, capacity: tuple[int | None, int | None]) -> Room:
        """For so many block rows of so many blocks."""
        rows = math.prod(entries) * own
        listed, runs = places(rows, own, other, capacity)
        starts = [0]
        for size in (rows * 4, other + rows * listed, rows * runs * 2, rows * len(COUNTED), own):
            starts.append(starts[-1] + -(-size // 4) * 4)
        return Room(entries, rows, own, other, listed, runs, tuple(starts[:-1]), starts[-1])

    def walk(self, memory: Tensor) -> Walk:
        """The tensors of the walk."""
        records, lists, full, _, order = self.starts
        b, h = self.entries
        return Walk(
            memory.as_strided((b, h, self.own, 4), (h * self.own * 4, self.own * 4, 4, 1), records),
            memory.as_strided((self.other + self.rows * self.listed,), (1,), lists),
            memory.as_strided((self.rows * self.runs, 2), (2, 1), full),
            memory.as_strided((self.own,), (1,), order),
        )

    def counts(self, memory: Tensor) -> Tensor:
        """int32 [rows, numbers of COUNTED]."""
        return memory.as_strided((self.rows, len(COUNTED)), (len(COUNTED), 1), self.starts[3])


@dataclass
class Compiled:
    """A loaded module, its text, and which positions the mask reads."""

    plan: BlocksPlan
    module: ModuleType
    text: BlocksText
    reads: frozenset[str]
    _launchers: dict[str, Launcher] = field(default_factory=dict)
    _prepared: dict[tuple, tuple[Room, Arguments]] = field(default_factory=dict)

    def walk(
        self,
        side: str,
        q_len: int,
        kv_len: int,
        entries: tuple[int, int],
        tensors: Sequence[Tensor],
        scalars: Sequence[int | float],
        device: torch.device,
        capacity: tuple[int | None, int | None],
        exact: Exact,
    ) -> tuple[Walk, Tensor]:
        """The walk along "rows" or "columns", and what is counted for each block row: `COUNTED`.

        Args:
            capacity: places of a block row for partial blocks and for full runs.
            exact: if "auto", a block row evaluates no more blocks than its share of MOST_PAIRS, and stops after MOST_IN_VAIN in vain.
        """
        ends = [end for table in self.text.tables for end in _table_of(tensors[table.slot], table).tensors]
        likeness = side, q_len, kv_len, entries, device, capacity, exact, tuple([(t.shape, t.stride()) for t in tensors])
        if scalars:
            likeness += tuple(map(type, scalars)), tuple(map(_is_wide, scalars))
        found = self._prepared.get(likeness)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            found = self._prepared[likeness] = self._prepare(side, q_len, kv_len, entries, tensors, scalars, device, capacity, exact)
        room, arguments = found
        memory = torch.empty(room.size, dtype=torch.int32, device=device)
        walk, counts = room.walk(memory), room.counts(memory)
        given = arguments.filled(memory, room.starts, [*tensors, *ends], scalars)
        self._launcher(f"{side}_kernel")((room.rows,), arguments.kind, device.index, *given)
        _write_order(room, memory, counts, walk.order)
        return walk, counts

    def _prepare(
        self,
        side: str,
        q_len: int,
        kv_len: int,
        entries: tuple[int, int],
        tensors: Sequence[Tensor],
        scalars: Sequence[int | float],
        device: torch.device,
        capacity: tuple[int | None, int | None],
        exact: Exact,
    ) -> tuple[Room, Arguments]:
        blocks = [-(-length // size) for length, size in zip((q_len, kv_len), self.plan.block)]
        own, other = blocks if side == "rows" else blocks[::-1]
        room = Room.of(entries, own, other, capacity)
        limits = (_ALL, _ALL) if exact != "auto" else (MOST_PAIRS // (math.prod(self.plan.block) * room.rows), MOST_IN_VAIN)
        made = Arguments(device, parts=4)
        for tensor in tensors:
            made.pointer(tensor.dtype)
            made.numbers(tensor.shape)
            made.numbers(tensor.stride())
        made.scalars(scalars)
        for table in self.text.tables:
            found = _table_of(tensors[table.slot], table)
            made.pointer(found.lo.dtype)
            made.pointer(found.hi.dtype)
            made.numbers(found.lo.stride()[:-1] if len(table.dims) == 1 else (*found.lo.stride(), *found.spans))
        made.numbers((q_len, kv_len, entries[1], own, other, room.listed, room.runs, *limits))
        made.constant(is_coarse(other))
        return room, made

    def _launcher(self, name: str) -> Launcher:
        found = self._launchers.get(name)
        if found is None:
            found = self._launchers[name] = Launcher(self.module, name)
        return found


def _write_order(room: Room, memory: Tensor, counts: Tensor, order: Tensor) -> None:
    one = room.rows == room.own
    if room.own > _MOST_RANKED or not one:
        work = counts[:, 0] if one else counts.view(-1, room.own, len(COUNTED))[..., 0].sum(0, dtype=torch.int32)
    if room.own > _MOST_RANKED:
        order.copy_(torch.argsort(work, descending=True, stable=True))
        return
    index = memory.device.index
    source, stride = (counts, len(COUNTED)) if one else (work, 1)
    given = [source.data_ptr(), stride, memory.data_ptr() + 4 * room.starts[4], room.own]
    _shared().order((-(-room.own // 64),), (index, source.dtype), index, given, lambda: [source, stride, order, room.own])


def is_coarse(blocks: int) -> bool:
    """Whether squares of blocks are decided before their blocks are, in rows of so many."""
    return blocks > _COARSE_BLOCKS


def _is_wide(number: int | float) -> bool:
    """Whether Triton takes it as int64, or as no integer."""
    return type(number) is not int or not -(2**31) <= number < 2**31


class Arguments:
    """Arguments of launches on tensors of the same shapes: what stays the same, and where tensors and numbers that change go.

    Args:
        device: that is launched on.
        parts: how many arguments at the beginning are parts of one piece of memory of int32.
    """

    def __init__(self, device: torch.device, parts: int = 0):
        self.parts = parts
        self.given: list[Any] = [0] * parts
        self.kind: tuple = (device.index,)
        self._pointers: list[int] = []
        self._scalars = slice(0, 0)

    def pointer(self, dtype: torch.dtype) -> None:
        """Where a tensor begins."""
        self._pointers.append(len(self.given))
        self.given.append(0)
        self.kind += (dtype,)

    def numbers(self, numbers: Sequence[int | float]) -> None:
        """Numbers, of which Triton looks at the type alone."""
        self.given.extend(numbers)
        self.kind += tuple((nth, type(number)) for nth, number in enumerate(numbers, len(self.given)) if _is_wide(number))

    def scalars(self, scalars: Sequence[int | float]) -> None:
        """Numbers that change."""
        self._scalars = slice(len(self.given), len(self.given) + len(scalars))
        self.numbers(scalars)

    def constant(self, value: Any) -> None:
        """A value that is part of the binary."""
        self.given.append(value)
        self.kind += (value,)

    def filled(
        self, memory: Tensor, starts: Sequence[int], tensors: Sequence[Tensor], scalars: Sequence[int | float] = ()
    ) -> tuple[list[Any], Callable[[], list[Any]]]:
        """The arguments with addresses, and what gives them with tensors.

        Args:
            starts: of the parts of the memory.
            tensors: whose pointers are among the arguments, in order.
        """
        given, base = self.given.copy(), memory.data_ptr()
        for nth in range(self.parts):
            given[nth] = base + 4 * starts[nth]
        for place, tensor in zip(self._pointers, tensors, strict=True):
            given[place] = tensor.data_ptr()
        if scalars:
            given[self._scalars] = scalars

        def with_tensors() -> list[Any]:
            found = given.copy()
            for place, tensor in zip(self._pointers, tensors, strict=True):
                found[place] = tensor
            return [memory[start:] for start in starts[: self.parts]] + found[self.parts :]

        return given, with_tensors


# --- tables of facts ----------------------------------------------------------------------------------------------------------------------


def _table_of(tensor: Tensor, table: Table) -> Any:
    """Kept for as long as the tensor is unchanged. Other streams do not wait for this one and have tables of their own."""
    is_sparse = len(table.dims) == 1
    make: Callable[[], Any] = (
        partial(sparse_table, tensor, table.dims[0], table.cell) if is_sparse else partial(Cells.of, tensor, table.dims, table.cell)
    )
    return TABLES.get(tensor, (SparseTable if is_sparse else Cells, *table.dims, table.cell, stream_of(tensor.device)), make)


@dataclass(frozen=True)
class _TablesModule:
    """The kernels that all masks share."""

    module: ModuleType

    @cached_property
    def cells(self) -> Launcher:
        return Launcher(self.module, "cells_kernel")

    @cached_property
    def order(self) -> Launcher:
        return Launcher(self.module, "order_kernel")

    @cached_property
    def levels(self) -> Launcher:
        return Launcher(self.module, "levels_kernel")

    @cached_property
    def few_levels(self) -> Launcher:
        return Launcher(self.module, "levels_kernel", num_warps=FEW_WARPS)


LONG_WARPS, FEW_WARPS = 32, 4
_tables: list[_TablesModule] = []


def _shared() -> _TablesModule:
    if not _tables:
        from flexc.block_kernels import load_shared

        _tables.append(_TablesModule(load_shared()))
    return _tables[0]


class _TableKernels(NamedTuple):
    """Constants of the kernels that make one table.

    One program a row makes the levels, as every level waits for the one below: of all its cells at once, if they are no more than 8192.
    """

    width: int
    lanes: int
    level_lanes: int
    level_warps: int

    @staticmethod
    def of(cells: int, cell: int) -> _TableKernels:
        width = 1 << (cell - 1).bit_length()
        return _TableKernels(width, max(1, 2048 // width), *((8192, LONG_WARPS) if cells > 512 else (512, FEW_WARPS)))


ORDER_LAUNCH = "order_kernel", (["int32"], 1, ["int32"], 1), {"num_warps": 4, "num_stages": 1}
"""That of every map, as `runtime.triton_ahead.KernelsJob` has it."""


def table_launches(tensor: Tensor, table: Table) -> list[tuple[str, tuple, dict[str, int]]]:
    """The launches of `sparse_table` as `runtime.triton_ahead.KernelsJob` has them."""
    element = "uint8" if tensor.dtype == torch.bool else str(tensor.dtype).removeprefix("torch.")
    made = _TableKernels.of(-(-tensor.shape[table.dims[0]] // table.cell), table.cell)
    ends = [table.dtype], [table.dtype]
    module = _shared().module
    warps = module.LAUNCH["cells_kernel"][0]
    cells = ("cells_kernel", ([element], 1, 1, 1, *ends, 1, 1, made.width, made.lanes), {"num_warps": warps, "num_stages": 1})
    return [cells, ("levels_kernel", (*ends, 1, 1, 1, made.level_lanes), {"num_warps": made.level_warps, "num_stages": 1})]


class _TableShape(NamedTuple):
    """What is known of the launches for tensors of one shape."""

    size: tuple[int, ...]
    dtype: torch.dtype
    cells: Arguments
    levels: Arguments | None
    grid: tuple[int, int]
    made: _TableKernels

    @staticmethod
    @lru_cache(maxsize=256)
    def of(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, cell: int, device: torch.device) -> _TableShape:
        """For a tensor of so many rows, along the last dimension."""
        others, length = shape[:-1], shape[-1]
        count, cells = math.prod(others), -(-length // cell)
        levels, made = cells.bit_length(), _TableKernels.of(cells, cell)
        end = torch.float32 if dtype.is_floating_point else dtype
        given = Arguments(device)
        given.pointer(dtype)
        given.numbers((strides[0] if len(shape) > 1 else 0, strides[-1], length))
        given.pointer(end)
        given.pointer(end)
        given.numbers((cells, cell))
        given.constant(made.width)
        given.constant(made.lanes)
        above = Arguments(device) if levels > 1 else None
        if above is not None:
            above.pointer(end)
            above.pointer(end)
            above.numbers((count, cells, levels))
            above.constant(made.level_lanes)
        return _TableShape((2, levels, *others, cells), end, given, above, (-(-cells // made.lanes), count), made)


def sparse_table(tensor: Tensor, dim: int, cell: int) -> SparseTable:
    """`SparseTable.of` by two kernels, whatever the number of levels."""
    x = tensor.movedim(dim, -1) if dim != tensor.dim() - 1 else tensor
    if math.prod(x.shape[:-1]) > _MOST_GRID_ROWS:
        return SparseTable.of(tensor, [dim], cell)
    others = x.shape[:-1]
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    x = x if x.dim() <= 2 else x.reshape(-1, x.shape[-1])
    device, shared = x.device, _shared()
    known = _TableShape.of(x.shape, x.stride(), x.dtype, cell, device)
    lo, hi = torch.empty(known.size, dtype=known.dtype, device=device).unbind(0)
    shared.cells(known.grid, known.cells.kind, device.index, *known.cells.filled(lo, (), (x, lo, hi)))
    if known.levels is not None:
        launch = shared.levels if known.made.level_warps == LONG_WARPS else shared.few_levels
        launch((known.grid[1],), known.levels.kind, device.index, *known.levels.filled(lo, (), (lo, hi)))
    if len(others) > 1:
        lo, hi = (end.view(end.shape[0], *others, end.shape[-1]) for end in (lo, hi))
    return SparseTable(dim, cell, lo, hi)


def places(rows: int, own: int, other: int, capacity: tuple[int | None, int | None] = (None, None)) -> tuple[int, int]:
    """Places of a block row for partial blocks and for full runs: as many as there can be, within limits.

    Args:
        rows: block rows through batch and heads; own: of one of those; other: blocks of a row.
        capacity: limits that replace the computed ones.
    """
    most = other, (other + 1) // 2
    at_least = _PLACES_OF_ROW[own >= _MANY_ROWS]
    numbers = max(at_least, min(_PLACES_OF_SEQUENCE // own, _PLACES_OF_MAP[0] // rows))
    # A run takes two numbers. Rows of many partial blocks are commoner than rows of many runs.
    found = most if most[0] + 2 * most[1] <= numbers else (numbers * 3 // 5, numbers // 5)
    listed, runs = (min(limit if given is None else given, can) for limit, given, can in zip(found, capacity, most))
    while rows * (listed + 2 * runs) > _PLACES_OF_MAP[1] and max(listed, runs) > 1:
        listed, runs = max(listed // 2, 1), max(runs // 2, 1)
    return listed, runs
