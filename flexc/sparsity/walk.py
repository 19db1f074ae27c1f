"""Walks: what the two loops of a kernel visit in each block row, in the form that the kernel reads.

Full blocks come in few long runs, partial ones singly: a loop over a list starts up once, a loop over runs as often as it has runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexc.sparsity.runs import Runs, ranks

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


def walk_of(runs: Runs) -> Walk:
    """The walk over each block row of the runs."""
    b, h, n, columns = runs.shape
    count = b * h * n
    row, start, length = runs.row, runs.start.long(), runs.length
    partial = ~runs.full
    partial_runs = torch.bincount(row[partial], minlength=count)
    partial_count = torch.bincount(row, length * partial, minlength=count).long()
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
