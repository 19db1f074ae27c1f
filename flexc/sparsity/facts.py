"""Facts about captured tensors: the smallest and largest element that an interval of indices can reach.

Computed in O(N) on the tensor's own device and kept for as long as the tensor is unchanged. An index that depends on neither q_idx nor
kv_idx (batch, head, constants) is one number for each tile and is read directly. Along one more dimension a sparse table answers any
range with two reads; along two and more, and where that table would be large, cells of every size that is a power of two answer a box
with two reads a dimension. In a tensor that ascends, the ends of a range are its extremes. Nothing here waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from flexc.ir.affine import affine_form
from flexc.ir.bounds import anything
from flexc.ir.graph import Node, inputs_of
from flexc.ir.interval import Claim, Interval, either, unless
from flexc.sparsity.statements import is_declared_sorted
from flexc.sparsity.table_cache import TABLES

Tensor = torch.Tensor

SMALL_TABLE = 2**13  # elements up to which a table has one cell for each element
SPARSE_CELLS = 2**15  # a sparse table has log2(cells) levels of as many cells
_MOST_CELLS = 2**22
_MOST_CELL_LENGTH = 128
_TOKENS = frozenset({"q_idx", "kv_idx"})


class Facts:
    """Minimum and maximum of the tensors over ranges of their indices.

    Args:
        tensors: captured tensors, in the order of `Graph.tensors`.
        granule: a length in tokens that divides the block sizes: ranges that begin and end at its multiples are answered exactly,
            others may be answered for a slightly longer range.
    """

    def __init__(self, tensors: Sequence[Tensor], granule: int = 1):
        self.tensors = tuple(tensors)
        self.granule = granule

    def gather(self, node: Node, indices: list[Interval]) -> Interval:
        """Bounds of a gather whose indices lie in the intervals: of batch and head, one number for each tile.

        An index outside the tensor reads as 0. A NaN that can be read makes the element anything.
        """
        tensor = self.tensors[node.attrs[0]].detach()
        if tensor.numel() == 0:
            return Interval.point(0.0)
        ranges = [_Range(index, size, tensor.device) for index, size in zip(indices, tensor.shape, strict=True)]
        wide = [d for d, index in enumerate(node.args) if is_wide(index)]
        lo, hi = self._extremes(tensor, node, ranges, wide)
        # Nothing is known of an element that an index cannot tell, such as the batch number times something that wraps around.
        blurred = either(*(ranges[d].is_range for d in range(len(ranges)) if d not in wide))
        outside = either(*(r.outside for r in ranges))
        unknown = anything(node.dtype)
        lo, hi = unless(blurred, unknown.lo.double(), lo), unless(blurred, unknown.hi.double(), hi)
        if outside is not False:
            lo, hi = unless(outside, lo.clamp(max=0), lo), unless(outside, hi.clamp(min=0), hi)
        nan = (lo == -math.inf) & (hi == math.inf) if tensor.is_floating_point() else False
        # Integers past 2^53 round in float64; `Interval.settled` takes those for unknown.
        return Interval(lo, hi, nan).with_range(*range_of(tensor.dtype))

    def _extremes(self, tensor: Tensor, node: Node, ranges: list[_Range], wide: list[int]) -> tuple[Tensor, Tensor]:
        if not wide:
            return _ends(as_loaded(tensor[tuple(r.first for r in ranges)]))
        if wide == [tensor.dim() - 1] and is_declared_sorted(tensor):
            before = [r.first for r in ranges[:-1]]
            first, last = (as_loaded(tensor[(*before, at)]) for at in (ranges[-1].first, ranges[-1].last))
            return _ends(first)[0], _ends(last)[1]
        cell = cell_length(tensor.numel(), self.granule if counts_tokens(node, wide) else 1, len(wide))
        kind = SparseTable if len(wide) == 1 and tensor.numel() // cell <= SPARSE_CELLS else Cells
        return TABLES.get(tensor, (kind, *wide, cell), lambda: kind.of(tensor, wide, cell)).query(ranges)


def is_wide(index: Node) -> bool:
    """Whether the index can be a range of numbers in a tile; otherwise it is one number."""
    return bool(inputs_of(index) & _TOKENS)


def counts_tokens(gather: Node, dims: Iterable[int]) -> bool:
    """Whether a tile reaches as many elements along these dimensions as it has tokens, as in table[q_idx - 3]."""
    return all(any(affine_form(gather.args[d]).coefficient(name) for name in _TOKENS) for d in dims)


def range_of(dtype: torch.dtype) -> tuple[float, float]:
    """Of elements, known from the dtype. int64 is left open, as it may be past what float64 counts."""
    if dtype == torch.bool:
        return 0.0, 1.0
    if dtype.is_floating_point or dtype == torch.int64:
        return -math.inf, math.inf
    info = torch.iinfo(dtype)
    return float(min(info.min, 0)), float(info.max)


class _Range:
    """Whole indices first..last inside [0, size).

    Attributes:
        outside: where the index may also lie outside the tensor.
        is_range: where first and last differ.
    """

    def __init__(self, index: Interval, size: int, device: torch.device):
        lo, hi = index.lo.to(device), index.hi.to(device)
        if index.is_whole and index.least >= 0 and index.most < size:
            self.outside: Claim = False
            self.first, self.last = lo.long(), hi.long()
        else:
            # Anything further away than this is outside; the clamp keeps infinite ends out of integers.
            lo, hi = torch.ceil(lo).clamp(-size - 1, size).long(), torch.floor(hi).clamp(-size - 1, size).long()
            self.outside = (lo < -size) | (hi >= size)
            # Negative indices count from the end; a range across zero reaches both ends of the tensor.
            across = (lo < 0) & (hi >= 0)
            first = torch.where(across, 0, torch.where(lo < 0, lo + size, lo)).clamp(0, size - 1)
            last = torch.where(across, size - 1, torch.where(hi < 0, hi + size, hi)).clamp(0, size - 1)
            self.first, self.last = first, torch.maximum(first, last)
        self.is_range: Claim = False if index.is_point and self.outside is False else self.first != self.last


# --- tables ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseTable:
    """Minimum and maximum over ranges of one dimension: level k holds those of 2^k neighbouring cells, from every cell on.

    Attributes:
        dim: the dimension of the ranges.
        cell: elements of a cell.
        lo, hi: [levels, the tensor's other dimensions, cells], in the dtype of `as_loaded`.
    """

    dim: int
    cell: int
    lo: Tensor
    hi: Tensor

    @staticmethod
    def of(tensor: Tensor, dims: Sequence[int], cell: int) -> SparseTable:
        (dim,) = dims
        lo, hi = _least_and_most(tensor.movedim(dim, -1))
        lo, hi = _cells(lo, cell, torch.amin), _cells(hi, cell, torch.amax)
        return SparseTable(dim, cell, _levels(lo, torch.minimum), _levels(hi, torch.maximum))

    def query(self, ranges: list[_Range]) -> tuple[Tensor, Tensor]:
        """Extremes as float64, one for each tile."""
        first, last = ranges[self.dim].first // self.cell, ranges[self.dim].last // self.cell
        level = _floor_log2(last - first + 1)
        others = tuple(r.first for d, r in enumerate(ranges) if d != self.dim)
        left, right = (level, *others, first), (level, *others, last + 1 - (1 << level))
        lo = torch.minimum(self.lo[left], self.lo[right])
        hi = torch.maximum(self.hi[left], self.hi[right])
        return lo.to(torch.float64), hi.to(torch.float64)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What takes memory."""
        return self.lo, self.hi


@dataclass(frozen=True)
class Cells:
    """Minimum and maximum over boxes: along each of several dimensions the cells of every level stand one level after the other.

    A box is covered by two cells of a fitting level in each dimension. It is answered exactly if it begins and ends at the borders of
    cells, as aligned tiles do, else for a box of at most twice the sides.

    Attributes:
        dims: the dimensions of the box.
        cell: elements along the side of a cell of level 0.
        spans: for each of `dims` twice the number of its cells, a power of two: level k begins at span - (span >> k).
        lo, hi: shaped like the tensor, but for `dims`.
    """

    dims: tuple[int, ...]
    cell: int
    spans: tuple[int, ...]
    lo: Tensor
    hi: Tensor

    @staticmethod
    def of(tensor: Tensor, dims: Sequence[int], cell: int) -> Cells:
        lo, hi = _least_and_most(tensor)
        spans = []
        for dim in dims:
            lo = _halved(_cells(lo.movedim(dim, -1), cell, torch.amin), torch.amin).movedim(-1, dim)
            hi = _halved(_cells(hi.movedim(dim, -1), cell, torch.amax), torch.amax).movedim(-1, dim)
            spans.append(lo.shape[dim] + 1)
        return Cells(tuple(dims), cell, tuple(spans), lo.contiguous(), hi.contiguous())

    def query(self, ranges: list[_Range]) -> tuple[Tensor, Tensor]:
        """Extremes as float64, one for each tile."""
        choices: list[tuple[Tensor, ...]] = [(r.first,) for r in ranges]
        for dim, span in zip(self.dims, self.spans, strict=True):
            first, last = ranges[dim].first // self.cell, ranges[dim].last // self.cell
            level = _floor_log2(last - first + 1)
            level = torch.where((last >> level) - (first >> level) > 1, level + 1, level)
            start = span - (span >> level)
            choices[dim] = (start + (first >> level), start + (last >> level))
        places = list(itertools.product(*choices))
        lo, hi = self.lo[places[0]], self.hi[places[0]]
        for place in places[1:]:
            lo, hi = torch.minimum(lo, self.lo[place]), torch.maximum(hi, self.hi[place])
        return lo.to(torch.float64), hi.to(torch.float64)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What takes memory."""
        return self.lo, self.hi


def _floor_log2(x: Tensor) -> Tensor:
    """Of positive integers, exactly."""
    return torch.frexp(x.to(torch.float64)).exponent.long() - 1


def cell_length(elements: int, granule: int, dims: int, most_cells: int = _MOST_CELLS) -> int:
    """Elements along the side of a cell of a table.

    Args:
        elements: of the tensor.
        granule: ranges begin and end at its multiples.
        dims: along how many dimensions cells extend.
        most_cells: cells grow until there are no more of them.
    """
    cell = 1
    if elements > SMALL_TABLE:
        cell = max(c for c in range(1, _MOST_CELL_LENGTH + 1) if granule % c == 0)
    while elements // cell**dims > most_cells:
        cell *= 2
    return cell


def _cells(x: Tensor, cell: int, reduce: Callable[..., Tensor]) -> Tensor:
    """Neighbours along the last dimension reduced, `cell` at a time; the last element stands in for those past the end."""
    if cell == 1:
        return x
    short = -x.shape[-1] % cell
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1)
    return reduce(x.unflatten(-1, (-1, cell)), dim=-1)


def _levels(x: Tensor, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[levels, ..., cells]; entries whose cells would pass the end repeat the level below and are never asked for."""
    levels = [x]
    width = 1
    while 2 * width <= x.shape[-1]:
        below = levels[-1]
        above = below.clone()
        above[..., :-width] = merge(below[..., :-width], below[..., width:])
        levels.append(above)
        width *= 2
    return torch.stack(levels)


def _halved(x: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """The last dimension, then pairs of it, pairs of pairs and so on down to one, in one row. Its length becomes a power of two first."""
    short = (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1]
    levels = [torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1) if short else x]
    while levels[-1].shape[-1] > 1:
        levels.append(_cells(levels[-1], 2, reduce))
    return torch.cat(levels, dim=-1)


def as_loaded(tensor: Tensor) -> Tensor:
    """In the dtype that a kernel computes with; bool as uint8, which has a minimum."""
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _least_and_most(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper end of each element: any number where it is NaN."""
    x = as_loaded(tensor)
    if not x.is_floating_point():
        return x, x
    return x.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), x.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _ends(value: Tensor) -> tuple[Tensor, Tensor]:
    lo, hi = _least_and_most(value)
    wide = lo.to(torch.float64)
    return wide, wide if lo is hi else hi.to(torch.float64)
