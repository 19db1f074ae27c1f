"""Squares of blocks, many at a time, and the pieces of block rows that they leave behind once they are decided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flexc.sparsity.proof import Proof
from flexc.sparsity.runs import Runs, places_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Squares:
    """Squares of equally many blocks: the entry of batch and heads, and the square's row and column; int64 [squares] each."""

    entry: Tensor
    row: Tensor
    column: Tensor

    @staticmethod
    def every(entries: int, rows: int, columns: int, device: torch.device) -> Squares:
        """All squares of entries x rows x columns."""
        every = torch.arange(entries * rows * columns, device=device)
        return Squares(every // (rows * columns), every // columns % rows, every % columns)

    @staticmethod
    def joined(parts: Sequence[Squares]) -> Squares:
        """All parts as one."""
        return Squares(*(torch.cat([getattr(p, name) for p in parts]) for name in ("entry", "row", "column")))

    def __len__(self) -> int:
        return len(self.entry)

    def __getitem__(self, chosen: slice) -> Squares:
        return Squares(self.entry[chosen], self.row[chosen], self.column[chosen])

    def at(self, index: Tensor) -> Squares:
        """Those with these numbers (int64)."""
        return Squares(*(x.index_select(0, index) for x in (self.entry, self.row, self.column)))

    def where(self, chosen: Tensor) -> Squares:
        """Those that are chosen: bool [squares]."""
        return self.at(chosen.nonzero().squeeze(1))

    def groups(self, at_once: int) -> Iterator[Squares]:
        """At most `at_once` at a time."""
        for first in range(0, len(self), at_once):
            yield self[first : first + at_once]

    def below(self, chosen: Tensor) -> tuple[Squares, Tensor]:
        """Those of the smaller squares that are chosen, and which of these squares each lies in.

        Args:
            chosen: bool [split, split, squares], for the rows and columns of each square.
        """
        split = len(chosen)
        place, parent = chosen.flatten(0, 1).nonzero().unbind(1)
        parents = self.at(parent)
        return Squares(parents.entry, parents.row * split + place // split, parents.column * split + place % split), parent


class Found:
    """Pieces of block rows that are decided, and what decided them."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device):
        self.shape = shape
        self.proof = Proof(bounds=math.prod(shape))
        self._places, self._dtype = places_of(shape)
        # Where pieces begin and end, and whether they are full.
        self._begins, self._ends = ([torch.zeros(0, dtype=self._dtype, device=device)] for _ in range(2))
        self._full = [torch.zeros(0, dtype=torch.bool, device=device)]

    def add(self, squares: Squares, span: int, full: bool) -> None:
        """Squares whose blocks are all full, or all partial."""
        if not len(squares.entry):
            return
        n, m = self.shape[2:]
        row, start = squares.row * span, squares.column * span
        begin = ((squares.entry * n + row) * self._places + start).to(self._dtype)
        end = begin + (m - start).clamp(max=span).to(self._dtype)
        if span > 1:
            steps = torch.arange(span, device=row.device)
            begin, end = ((x[:, None] + (steps * self._places).to(self._dtype)).flatten() for x in (begin, end))
            if n % span:
                exists = (row[:, None] + steps < n).flatten()
                begin, end = begin[exists], end[exists]
        self._begins.append(begin)
        self._ends.append(end)
        self._full.append(torch.full_like(begin, full, dtype=torch.bool))

    def runs(self, ragged: bool) -> Runs:
        """All pieces as runs; a `ragged` last block column is never full."""
        begin, end, full = (torch.cat(x) for x in (self._begins, self._ends, self._full))
        if ragged:
            reaching = full & ((end + 1) % self._places == 0)
            end = end - reaching.to(self._dtype)
            tail, kept = end[reaching], end > begin
            begin, end = torch.cat([begin[kept], tail]), torch.cat([end[kept], tail + 1])
            full = torch.cat([full[kept], torch.zeros_like(tail, dtype=torch.bool)])
        return Runs.placed(self.shape, begin, end, full)
