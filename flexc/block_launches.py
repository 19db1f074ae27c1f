"""Launches of the kernels that write walks: on the host, little more than the launches.

All that does not change between two calls on tensors of the same shapes is worked out once: where the parts of a walk lie in one piece of
memory, how many programs there are, and which binary fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from flexc.block_arguments import Arguments, is_wide
from flexc.block_tables import shared, table_of
from flexc.codegen.triton.blocks import COUNTED, BlocksPlan, BlocksText
from flexc.map_making import is_capturing, stream_of
from flexc.runtime.triton_launch import Launcher, OfKind
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
_MOST_ORDERED = 128  # block rows up to which the kernel that writes the walk orders them, too: its last program, alone
_MOST_RANKED = 2**14  # block rows up to which their order is found by counting, which costs their square
_MOST_PREPARED = 256
_ALL = 2**31 - 1
MOST_PAIRS = 2**27  # that are evaluated at most for one map
MOST_IN_VAIN = 16, 8  # blocks that a block row evaluates and that stay partial, before it evaluates no more: in maps of few rows, in others
_FEW_ROWS = 256


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

    @property
    def is_ordered(self) -> bool:
        """Whether the kernel that writes the walk orders the block rows."""
        return self.rows == self.own <= _MOST_ORDERED

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


@dataclass(slots=True)
class WrittenWalk:
    """A walk that a kernel writes, and what it counts for each block row."""

    room: Room
    memory: Tensor
    _walk: Walk | None = None

    @property
    def walk(self) -> Walk:
        """The walk; its tensors are made at first need."""
        if self._walk is None:
            self._walk = self.room.walk(self.memory)
        return self._walk

    @property
    def counts(self) -> Tensor:
        """int32 [rows, numbers of `COUNTED`]."""
        return self.room.counts(self.memory)

    @property
    def size_bytes(self) -> int:
        """Memory of all parts."""
        return 4 * self.room.size


class Prepared(NamedTuple):
    """What stays the same between launches of one kernel on tensors of the same shapes."""

    room: Room
    arguments: Arguments
    launch: OfKind


@dataclass
class Compiled:
    """A loaded module, its text, and which positions the mask reads."""

    plan: BlocksPlan
    module: ModuleType
    text: BlocksText
    reads: frozenset[str]
    _launchers: dict[str, Launcher] = field(default_factory=dict)
    _prepared: dict[tuple, Prepared] = field(default_factory=dict)

    def walk(
        self,
        side: str,
        lengths: tuple[int, int],
        entries: tuple[int, int],
        tensors: Sequence[Tensor],
        scalars: Sequence[int | float],
        device: torch.device,
        capacity: tuple[int | None, int | None],
        exact: Exact,
    ) -> WrittenWalk:
        """The walk along "rows" or "columns".

        Args:
            lengths: of queries and keys.
            capacity: places of a block row for partial blocks and for full runs.
            exact: if "auto", a block row evaluates no more blocks than its share of MOST_PAIRS, and stops after MOST_IN_VAIN in vain.
        """
        stream = stream_of(device)
        tables = [table_of(tensors[table.slot], table, stream) for table in self.text.tables]
        likeness = side, lengths, entries, device, capacity, exact, tuple([(t.shape, t.stride()) for t in tensors])
        if scalars:
            likeness += tuple(map(type, scalars)), tuple(map(is_wide, scalars))
        found = self._prepared.get(likeness)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            found = self._prepared[likeness] = self._prepare(side, lengths, entries, tensors, tables, scalars, device, capacity, exact)
        room, arguments, launch = found
        memory = torch.empty(room.size, dtype=torch.int32, device=device)
        pointers = [_turn(device, stream) if room.is_ordered else memory, *tensors]
        for table in tables:
            pointers += table.tensors
        given = arguments.addresses(memory, pointers, scalars)
        launch((room.rows, 1), device.index, given, partial(arguments.with_tensors, given, memory, pointers))
        written = WrittenWalk(room, memory)
        if not room.is_ordered:
            _write_order(written)
        return written

    def _prepare(
        self,
        side: str,
        lengths: tuple[int, int],
        entries: tuple[int, int],
        tensors: Sequence[Tensor],
        tables: Sequence[Any],
        scalars: Sequence[int | float],
        device: torch.device,
        capacity: tuple[int | None, int | None],
        exact: Exact,
    ) -> Prepared:
        blocks = [-(-length // size) for length, size in zip(lengths, self.plan.block)]
        own, other = blocks if side == "rows" else blocks[::-1]
        room = Room.of(entries, own, other, capacity)
        share = MOST_PAIRS // (math.prod(self.plan.block) * room.rows)
        limits = (share, MOST_IN_VAIN[own > _FEW_ROWS]) if exact == "auto" else (_ALL, _ALL)
        made = Arguments(device, room.starts)
        made.pointer(torch.int32)
        for tensor in tensors:
            made.pointer(tensor.dtype)
            made.numbers(tensor.shape)
            made.numbers(tensor.stride())
        made.scalars(scalars)
        for table, found in zip(self.text.tables, tables, strict=True):
            made.pointer(found.lo.dtype)
            made.pointer(found.hi.dtype)
            made.numbers(found.lo.stride()[:-1] if len(table.dims) == 1 else (*found.lo.stride(), *found.spans))
        made.numbers((*lengths, entries[1], own, other, room.listed, room.runs, *limits, int(room.is_ordered)))
        made.constant(is_coarse(other))
        return Prepared(room, made, self._launcher(f"{side}_kernel").of_kind(made.kind))

    def _launcher(self, name: str) -> Launcher:
        found = self._launchers.get(name)
        if found is None:
            found = self._launchers[name] = Launcher(self.module, name)
        return found


_turns: dict[tuple[torch.device, int], Tensor] = {}


def _turn(device: torch.device, stream: int) -> Tensor:
    """The number by which programs of one launch know which of them ends last: 0 between launches, which follow each other in a stream.

    A graph that is captured has its own, set to 0 at every replay: it may be replayed in any stream.
    """
    if is_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, stream
    found = _turns.get(key)
    if found is None:
        found = _turns[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def _write_order(written: WrittenWalk) -> None:
    """Of the walk's block rows, by their work through batch and heads."""
    room, memory = written.room, written.memory
    counted, order = room.starts[3], room.starts[4]
    is_one = room.rows == room.own
    if room.own > _MOST_RANKED or not is_one:
        counts = written.counts[:, 0]
        work = counts if is_one else counts.view(-1, room.own).sum(0, dtype=torch.int32)
        if room.own > _MOST_RANKED:
            memory[order : order + room.own] = torch.argsort(work, descending=True, stable=True)
            return
        source, begin, stride = work, 0, 1
    else:
        source, begin, stride = memory, counted, len(COUNTED)
    given = [source.data_ptr() + 4 * begin, stride, memory.data_ptr() + 4 * order, room.own]
    index = memory.device.index
    shared().order.of_kind(index)((-(-room.own // 64), 1), index, given, lambda: [source[begin:], stride, memory[order:], room.own])


def is_coarse(blocks: int) -> bool:
    """Whether squares of blocks are decided before their blocks are, in rows of so many."""
    return blocks > _COARSE_BLOCKS


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
