"""Runs: for each block row, the neighbouring blocks of one kind. What a block map is made of; never a matrix of blocks.

A causal mask over a million tokens has 8,192 x 8,192 blocks of 128 x 128, and two runs in each block row. Everything here costs what the
runs cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Runs:
    """Runs of blocks that are not empty, block row after block row. All tensors are contiguous and on one device.

    Block rows are counted through batch and heads: ((b * H') + h) * n + block row, with B' = B or 1 and H' = Hq or 1.

    Attributes:
        shape: (B', H', n, m): n block rows of m blocks each.
        offsets: int64 [B' * H' * n + 1]: the runs of block row i are offsets[i] to offsets[i + 1].
        start, stop: int32 [runs]: first block and one past the last. They ascend in a row; neighbours of one kind are one run.
        full: bool [runs]: whether the pairs of the blocks are all allowed; otherwise the mask decides pair by pair.
    """

    shape: tuple[int, int, int, int]
    offsets: Tensor
    start: Tensor
    stop: Tensor
    full: Tensor

    @staticmethod
    def assembled(shape: tuple[int, int, int, int], row: Tensor, start: Tensor, stop: Tensor, full: Tensor) -> Runs:
        """Runs from pieces in any order, none of which overlap: pieces of one kind that touch are joined.

        Args:
            row: int64 [pieces], block rows counted through batch and heads; start, stop: int64; full: bool.
        """
        stride, dtype = places_of(shape)
        first = row * stride
        return Runs.placed(shape, (first + start).to(dtype), (first + stop).to(dtype), full)

    @staticmethod
    def placed(shape: tuple[int, int, int, int], begin: Tensor, end: Tensor, full: Tensor) -> Runs:
        """As `assembled`, of pieces that begin and end at places: see `places_of`."""
        begin, order = torch.sort(begin)
        end, full = end.index_select(0, order), full.index_select(0, order)
        if len(begin):
            joins = (begin[1:] == end[:-1]) & (full[1:] == full[:-1])
            first = torch.nn.functional.pad(~joins, (1, 0), value=True).nonzero().squeeze(1)
            last = torch.nn.functional.pad(~joins, (0, 1), value=True).nonzero().squeeze(1)
            begin, full, end = begin.index_select(0, first), full.index_select(0, first), end.index_select(0, last)
        stride, _ = places_of(shape)
        row = begin // stride
        line = row * stride
        return Runs(shape, _offsets(row, math.prod(shape[:3])), (begin - line).int(), (end - line).int(), full)

    @staticmethod
    def of_everything(shape: tuple[int, int, int, int], ragged: bool) -> Runs:
        """Every block is full, but for the last of each row if it is `ragged`."""
        rows, columns = math.prod(shape[:3]), shape[3]
        whole = columns - 1 if ragged else columns
        row = torch.arange(rows)
        pieces = [(row, 0, whole, True)] * (whole > 0) + [(row, whole, columns, False)] * (ragged and columns > 0)
        parts = [(r, torch.full_like(r, a), torch.full_like(r, b), torch.full_like(r, f, dtype=torch.bool)) for r, a, b, f in pieces]
        none = torch.zeros(0, dtype=torch.int64)
        return Runs.assembled(shape, *(torch.cat(x) for x in zip((none, none, none, none.bool()), *parts)))

    def to(self, device: torch.device) -> Runs:
        """The same runs on another device."""
        return Runs(self.shape, self.offsets.to(device), self.start.to(device), self.stop.to(device), self.full.to(device))

    @property
    def device(self) -> torch.device:
        """Where the runs are."""
        return self.start.device

    @property
    def row(self) -> Tensor:
        """The block row of each run, counted through batch and heads: int64 [runs]."""
        counts = self.offsets.diff()
        return torch.arange(len(counts), device=self.device).repeat_interleave(counts)

    @property
    def length(self) -> Tensor:
        """Blocks in each run: int64 [runs]."""
        return (self.stop - self.start).long()

    @property
    def size_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(x.numel() * x.element_size() for x in (self.offsets, self.start, self.stop, self.full))

    def work(self) -> Tensor:
        """Blocks that each block row visits, summed over batch and heads: int64 [n]."""
        rows = torch.zeros(len(self.offsets) - 1, dtype=torch.int64, device=self.device).index_add_(0, self.row, self.length)
        return rows.view(-1, self.shape[2]).sum(0) if self.shape[2] else rows

    def order(self) -> Tensor:
        """Block rows by work, longest first; equal ones keep their order: int32 [n].

        Longest first keeps the end of a launch short: Graham, Bounds on multiprocessing timing anomalies, 1969.
        """
        return torch.argsort(self.work(), descending=True, stable=True).int()

    def blocks(self, at_once: int, step: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """(block row, block) of the partial blocks in order, every one or one of each `step`, at most `at_once` at a time: int64 each."""
        chosen = (~self.full).nonzero().squeeze(1)
        row, start, length = self.row[chosen], self.start[chosen].long(), self.length[chosen]
        first = torch.nn.functional.pad(length.cumsum(0), (1, 0))
        for begin in range(0, int(first[-1]), at_once * step):
            place = torch.arange(begin, min(begin + at_once * step, int(first[-1])), step, device=self.device)
            if step > 1:
                # Rows of blocks repeat: a step of their length would see the same place of each. The golden ratio never falls into step.
                shift = (place // step * 0.6180339887498949 % 1.0 * step).long()
                place = (place + shift).clamp(max=int(first[-1]) - 1)
            run = torch.searchsorted(first, place, right=True) - 1
            yield row[run], start[run] + place - first[run]

    def transposed(self) -> Runs:
        """The runs of each block column, that is with the block columns as rows.

        Only where two neighbouring rows differ does a column's run begin or end, so the cost is that of both sets of runs.
        """
        b, h, n, m = self.shape
        shape = (b, h, m, n)
        if not len(self.start) or not n:
            none = torch.zeros(0, dtype=torch.int64, device=self.device)
            return Runs.assembled(shape, none, none, none, none.bool())
        row, start, stop = self.row, self.start.long(), self.stop.long()
        entry, within = row // n, row % n
        # One line for each entry and border between two rows, 0 to n; the runs above it and those below it, as changes along the columns.
        line = entry * (n + 1) + within
        value = 1 + self.full.long()
        ends = torch.cat([start, stop, start, stop])
        lines = torch.cat([line, line, line + 1, line + 1])
        below = torch.cat([value, -value, torch.zeros_like(value), torch.zeros_like(value)])
        above = torch.cat([torch.zeros_like(value), torch.zeros_like(value), value, -value])
        order = torch.argsort(lines * (m + 1) + ends)
        lines, ends, below, above = (x.index_select(0, order) for x in (lines, ends, below, above))
        below, above = below.cumsum(0), above.cumsum(0)
        # Between one change and the next the two rows have one kind each: 0 empty, 1 partial, 2 full. At the end of a line both are empty.
        length = torch.nn.functional.pad(ends[1:] - ends[:-1], (0, 1))
        changed = (below != above).nonzero().squeeze(1)
        length, lines, ends, below = (x.index_select(0, changed) for x in (length, lines, ends, below))
        piece = torch.arange(len(changed), device=self.device).repeat_interleave(length)
        line = lines.index_select(0, piece)
        entry = line // (n + 1)
        column = entry * m + ends.index_select(0, piece) + ranks(length)
        border = line - entry * (n + 1)
        order = torch.argsort(column * (n + 1) + border)
        column, border, below = (x.index_select(0, order) for x in (column, border, below.index_select(0, piece)))
        # In a column a change that is not to "empty" begins a run, and the next change ends it.
        begins = (below > 0).nonzero().squeeze(1)
        first, last = border.index_select(0, begins), border.index_select(0, begins + 1)
        return Runs(shape, _offsets(column.index_select(0, begins), b * h * m), first.int(), last.int(), below.index_select(0, begins) == 2)


def places_of(shape: tuple[int, int, int, int]) -> tuple[int, torch.dtype]:
    """How many places a block row has, and what holds them all: block c of row r is at r * places + c. One more than blocks, so that what
    ends with a row does not touch what begins with the next."""
    places = shape[3] + 1
    return places, torch.int32 if math.prod(shape[:3]) * places < 2**31 else torch.int64


def _offsets(row: Tensor, rows: int) -> Tensor:
    """Where each row's items begin, from the sorted rows of all items: int64 [rows + 1]."""
    return torch.nn.functional.pad(torch.bincount(row, minlength=rows).cumsum(0), (1, 0))


def ranks(lengths: Tensor) -> Tensor:
    """0, 1, ... within each group of the given lengths, one group after the other."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - before.repeat_interleave(lengths)
