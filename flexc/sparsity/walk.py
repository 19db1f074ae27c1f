"""Walks: what the two loops of a kernel visit in each block row, in the form that the kernel reads.

Full blocks come in few long runs, partial ones singly: a loop over a list starts up once, a loop over runs as often as it has runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from flexc.sparsity.runs import Runs, ranks

if TYPE_CHECKING:
    from flexc.sparsity.blockmap import BlockMap
    from flexc.sparsity.proof import Proof

Tensor = torch.Tensor


@dataclass(frozen=True)
class Walk:
    """A list of partial blocks and runs of full ones for each block row. All tensors are contiguous and on one device.

    Attributes:
        rows: int32 [B or 1, Hq or 1, n, 4]: where the row's partial blocks begin in `partial`, how many there are, where its full runs
            begin in `full`, how many there are.
        partial: int32 [m or more]: 0, 1, ..., m - 1, for rows whose partial blocks are neighbours; after that the lists of the others.
        full: int32 [1 or more, 2]: first block and one past the last of each run.
        order: int32 [n]: block rows by work, longest first; equal ones keep their order.
    """

    rows: Tensor
    partial: Tensor
    full: Tensor
    order: Tensor

    @property
    def size_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(x.numel() * x.element_size() for x in (self.rows, self.partial, self.full, self.order))


class MadeWalks(Protocol):
    """Walks that were not made from runs, such as those that kernels write on a GPU."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, Hq or 1, n, m): n block rows of m blocks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the walks are."""
        ...

    def has_walk(self, side: str) -> bool:
        """Whether the walk along "rows" or "columns" is made."""
        ...

    def make_rows(self) -> None:
        """Begins to make the walk along rows from what captured tensors hold now, if it is not made."""
        ...

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit."""
        ...

    def column_walk(self) -> Walk | None:
        """For each key block the query blocks to visit; None if that can only be told from the rows, because tensors have changed."""
        ...

    def proof(self) -> Proof:
        """How the blocks were decided. May wait for the device."""
        ...

    def overflowed(self) -> int:
        """Block rows with more lists and runs than a walk has room for: it visits them from end to end. May wait for the device."""
        ...

    def with_lengths(self, q_len: int, kv_len: int) -> BlockMap:
        """The map of the same mask for other lengths."""
        ...

    @property
    def size_bytes(self) -> int:
        """Memory of the walks made so far."""
        ...


def walk_of(runs: Runs) -> Walk:
    """The walk over each block row of the runs."""
    b, h, n, columns = runs.shape
    count = b * h * n
    row, start, length = runs.row, runs.start.long(), runs.length
    partial = ~runs.full
    partial_runs = torch.bincount(row[partial], minlength=count)
    partial_count = torch.zeros(count, dtype=torch.int64, device=row.device).index_add_(0, row, length * partial)
    full_count = torch.bincount(row[runs.full], minlength=count)
    # A row with one partial run points at its first block in 0, 1, ..., m - 1; one with several has a list of its own.
    listed = partial & (partial_runs > 1)[row]
    first = torch.where(partial_runs > 1, partial_count, 0).cumsum(0) - partial_count + columns
    first = torch.where(partial_runs > 1, first, 0).index_add_(0, row, torch.where(partial & ~listed, start, 0))
    blocks = start[listed].repeat_interleave(length[listed]) + ranks(length[listed])
    pool = torch.cat([torch.arange(columns, device=row.device), blocks]).int()
    full = torch.stack([runs.start, runs.stop], dim=1)[runs.full]
    if not len(full):
        full = torch.zeros((1, 2), dtype=torch.int32, device=row.device)
    records = torch.stack([first, partial_count, full_count.cumsum(0) - full_count, full_count], dim=1)
    return Walk(records.int().view(b, h, n, 4), pool, full.contiguous(), runs.order())


def runs_of(walk: Walk, shape: tuple[int, int, int, int]) -> Runs:
    """What a walk visits, as runs; neighbours of one kind are one run. Waits for the device."""
    start, count, run, runs = walk.rows.view(-1, 4).long().unbind(1)
    row = torch.arange(len(start), device=start.device)
    listed = row.repeat_interleave(count)
    block = walk.partial[start.repeat_interleave(count) + ranks(count)].long()
    filled = row.repeat_interleave(runs)
    first, stop = walk.full[run.repeat_interleave(runs) + ranks(runs)].long().unbind(1)
    full = torch.cat([torch.zeros_like(listed, dtype=torch.bool), torch.ones_like(filled, dtype=torch.bool)])
    return Runs.assembled(shape, torch.cat([listed, filled]), torch.cat([block, first]), torch.cat([block + 1, stop]), full)
