"""Lists of blocks as PyTorch keeps them: for each row of blocks how many are listed, and which, in order.

`num_blocks` is int32 [..., rows]; `indices` is int32 [..., rows, columns], whose first `num_blocks` entries of a row count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexc.compat.errors import CallableError
from flexc.errors import IndexRangeError
from flexc.sparsity import BlockMap
from flexc.sparsity.picture import EMPTY, FULL, PARTIAL

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Lists:
    """The lists of partial and of full blocks, given or made when they are first read.

    Attributes:
        made: (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices); the last two are None where full blocks are not told apart.
    """

    def __init__(self, make: Callable[[], Four]):
        self._make = make
        self._made: Four | None = None

    @staticmethod
    def given(num_blocks: Tensor, indices: Tensor, full_num_blocks: Tensor | None, full_indices: Tensor | None) -> Lists:
        """Lists that exist.

        Raises:
            CallableError: one of the full lists without the other.
        """
        refuse_half("full_kv_num_blocks", full_num_blocks, "full_kv_indices", full_indices)
        return Lists(lambda: (num_blocks, indices, full_num_blocks, full_indices))

    @property
    def made(self) -> Four:
        if self._made is None:
            self._made = self._make()
        return self._made

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Lists:
        """Each tensor changed, when it is first read."""
        return Lists(lambda: tuple(None if x is None else change(x) for x in self.made))  # pyright: ignore[reportArgumentType]

    def transposed(self) -> Four:
        """The same blocks listed for each column: (q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)."""
        return self._changed(transposed)

    def cropped(self, rows: int, columns: int) -> Lists:
        """The first blocks of the first rows."""
        return Lists(lambda: self._changed(lambda num_blocks, indices: cropped(num_blocks, indices, rows, columns)))

    def _changed(self, change: Callable[[Tensor, Tensor], Pair]) -> Four:
        num_blocks, indices, full_num_blocks, full_indices = self.made
        partial = change(num_blocks, indices)
        if full_num_blocks is None or full_indices is None:
            return partial[0], partial[1], None, None
        full = change(full_num_blocks, full_indices)
        return partial[0], partial[1], full[0], full[1]


def refuse_half(name: str, given: Tensor | None, other_name: str, other: Tensor | None) -> None:
    """Of two lists that belong together, one was left out."""
    if (given is None) != (other is None):
        only = name if other is None else other_name
        raise CallableError(f"{name} and {other_name} belong together: expected both or neither, got only {only}")


def dense(num_blocks: Tensor, indices: Tensor, columns: int | None = None, *, check: bool = True) -> Tensor:
    """Which blocks are listed: bool [..., rows, columns]; as many columns as the lists are wide where none are named.

    Args:
        check: refuse a listed block that does not exist, for which the lists are looked at; else it counts as not listed.

    Raises:
        IndexRangeError: a listed block that does not exist.
    """
    columns = indices.shape[-1] if columns is None else columns
    counts = torch.arange(indices.shape[-1], device=indices.device) < num_blocks.unsqueeze(-1)
    outside = counts & ((indices < 0) | (indices >= columns))
    if check and bool(outside.any()):
        raise IndexRangeError(f"a block list names block {int(indices[outside][0])}: expected 0 to {columns - 1}")
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return listed.scatter_(-1, torch.where(counts & ~outside, indices, columns).long(), True)[..., :columns]


def ordered(listed: Tensor) -> Pair:
    """Lists of the blocks that are true in [..., rows, columns], ascending; the others follow, as in PyTorch."""
    indices = torch.argsort((~listed).to(torch.uint8), dim=-1, stable=True)
    return listed.sum(-1).int(), indices.int()


def transposed(num_blocks: Tensor, indices: Tensor) -> Pair:
    """The same blocks listed for each column."""
    return ordered(dense(num_blocks, indices).mT)


def cropped(num_blocks: Tensor, indices: Tensor, rows: int, columns: int) -> Pair:
    """The same blocks as far as they lie in the first rows and columns."""
    return ordered(dense(num_blocks, indices)[..., :rows, :columns])


def of_block_map(blocks: BlockMap, batch: int, heads: int, separate_full_blocks: bool) -> Four:
    """The lists of a block map, repeated (without a copy) over batch and heads where the mask does not read them."""
    kind = blocks.kind
    if blocks.q_len % blocks.block[0]:
        # PyTorch counts the missing queries of the last row as masked.
        last = kind[..., -1, :]
        last[last == FULL] = PARTIAL

    def listed(chosen: Tensor) -> Pair:
        num_blocks, indices = ordered(chosen)
        return num_blocks.expand(batch, heads, -1), indices.expand(batch, heads, -1, -1)

    if not separate_full_blocks:
        return *listed(kind != EMPTY), None, None
    return *listed(kind == PARTIAL), *listed(kind == FULL)
