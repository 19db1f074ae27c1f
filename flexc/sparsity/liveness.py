"""How long keys are needed: what a cache that is filled position by position may free, from the runs alone.

A partial block counts as read. In truth it may be empty, and then a block of keys is said to live longer than it must, never shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flexc.sparsity.blockmap import BlockMap

Tensor = torch.Tensor


def readers(blocks: BlockMap) -> tuple[Tensor, Tensor]:
    """The first and the last query block that may see each key block: int32 [B or 1, Hq or 1, key blocks] each, -1 where none does."""
    columns = blocks.columns()
    begin, end = columns.offsets[:-1], columns.offsets[1:]
    start, stop = (torch.nn.functional.pad(x, (0, 1)) for x in (columns.start, columns.stop))  # one more, for columns past the last run
    nobody = begin == end
    first = torch.where(nobody, -1, start[begin])
    last = torch.where(nobody, -1, stop[(end - 1).clamp(min=0)] - 1)
    return first.view(columns.shape[:3]), last.view(columns.shape[:3])


def live(blocks: BlockMap) -> Tensor:
    """How many key blocks are held while each query block is computed: int32 [B or 1, Hq or 1, query blocks]."""
    first, last = readers(blocks)
    rows, size = blocks.shape[2], blocks.block
    written = torch.arange(blocks.shape[3], device=first.device, dtype=torch.int32) * size[1] // size[0]
    # Who is seen by nobody is held by nobody: its two changes cancel.
    begin = torch.where(last < 0, rows, torch.minimum(written, first))
    end = torch.where(last < 0, rows, last + 1)
    changes = torch.zeros((*first.shape[:2], rows + 1), dtype=torch.int32, device=first.device)
    one = torch.ones((), dtype=torch.int32, device=first.device).expand(begin.shape)
    changes.scatter_add_(2, begin.long(), one).scatter_add_(2, end.long(), -one)
    return changes.cumsum(2, dtype=torch.int32)[..., :rows]
