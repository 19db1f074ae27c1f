"""Facts about captured tensors: the smallest and largest element that an interval of indices can reach.

Computed in O(N) on the tensor's own device, once for each tensor and dimension. Dimensions whose index is one known number for each tile
(batch, head, constants) are read directly. Along one more dimension a sparse table answers any range with two reads. Where more
dimensions are ranges, small boxes are enumerated and larger ones get the extremes of the whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from flexc.ir.graph import Node
from flexc.ir.interval import Interval

Tensor = torch.Tensor

_SMALL_TABLE = 2**16  # elements up to which a sparse table has one cell for each element
_MOST_CELLS = 2**20
_BOX_SIDE = 8  # ranges up to this length are enumerated where several dimensions are ranges


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
        self._loaded: dict[int, Tensor] = {}
        self._tables: dict[tuple[int, int], _SparseTable] = {}
        self._extremes: dict[int, tuple[Tensor, Tensor]] = {}
        self._nan: dict[int, bool] = {}

    def gather(self, node: Node, indices: list[Interval]) -> Interval:
        """Bounds of a gather whose indices lie in the intervals. An index outside the tensor reads as 0."""
        slot = node.attrs[0]
        tensor = self._tensor(slot)
        if tensor.numel() == 0:
            return Interval.point(torch.zeros((), dtype=torch.float64, device=tensor.device))
        ranges = [_Range(index, size, tensor.device) for index, size in zip(indices, tensor.shape, strict=True)]
        wide = [d for d, r in enumerate(ranges) if not r.is_point]
        if not wide:
            value = tensor[tuple(r.first for r in ranges)]
            lo, hi = _ends(value, value)
        elif len(wide) == 1:
            lo, hi = self._table(slot, wide[0]).query(ranges, wide[0])
        else:
            lo, hi = self._box(slot, ranges, wide)
        if ranges:
            outside = ranges[0].outside
            for r in ranges[1:]:
                outside = outside | r.outside
            lo, hi = torch.where(outside, lo.clamp(max=0), lo), torch.where(outside, hi.clamp(min=0), hi)
        # Integers past 2^53 round in float64; `Interval.settled` takes those for unknown.
        return Interval(lo, hi, self._has_nan(slot))

    def _tensor(self, slot: int) -> Tensor:
        if slot not in self._loaded:
            self._loaded[slot] = _as_loaded(self.tensors[slot].detach())
        return self._loaded[slot]

    def _has_nan(self, slot: int) -> bool:
        if slot not in self._nan:
            tensor = self._tensor(slot)
            self._nan[slot] = tensor.is_floating_point() and bool(torch.isnan(tensor).any())
        return self._nan[slot]

    def _table(self, slot: int, dim: int) -> _SparseTable:
        if (slot, dim) not in self._tables:
            self._tables[slot, dim] = _SparseTable(self._tensor(slot), dim, self.granule)
        return self._tables[slot, dim]

    def _box(self, slot: int, ranges: list[_Range], wide: list[int]) -> tuple[Tensor, Tensor]:
        tensor = self._tensor(slot)
        if slot not in self._extremes:
            self._extremes[slot] = _ends(tensor, tensor, reduced=True)
        all_lo, all_hi = self._extremes[slot]
        side = _BOX_SIDE if len(wide) == 2 else 2
        small = torch.ones((), dtype=torch.bool, device=tensor.device)
        for d in wide:
            small = small & (ranges[d].last - ranges[d].first < side)
        if not bool(small.any()):
            return all_lo.expand(small.shape), all_hi.expand(small.shape)
        sides = [int(torch.where(small, ranges[d].last - ranges[d].first, 0).max()) + 1 for d in wide]
        lo, hi = None, None
        for steps in itertools.product(*map(range, sides)):
            index = [r.first for r in ranges]
            for d, step in zip(wide, steps, strict=True):
                index[d] = torch.minimum(ranges[d].first + step, ranges[d].last)
            value_lo, value_hi = _ends(tensor[tuple(index)], tensor[tuple(index)])
            lo = value_lo if lo is None else torch.minimum(lo, value_lo)
            hi = value_hi if hi is None else torch.maximum(hi, value_hi)
        assert lo is not None and hi is not None
        return torch.where(small, lo, all_lo), torch.where(small, hi, all_hi)


class _Range:
    """Whole indices first..last inside [0, size), and whether the index may also lie outside the tensor."""

    def __init__(self, index: Interval, size: int, device: torch.device):
        # Anything further away than this is outside; the clamp keeps infinite ends out of integers.
        lo = torch.ceil(index.lo.to(device)).clamp(-size - 1, size).long()
        hi = torch.floor(index.hi.to(device)).clamp(-size - 1, size).long()
        lo, hi = torch.broadcast_tensors(lo, hi)
        self.outside = (lo < -size) | (hi >= size)
        # Negative indices count from the end; a range across zero reaches both ends of the tensor.
        across = (lo < 0) & (hi >= 0)
        first = torch.where(across, 0, torch.where(lo < 0, lo + size, lo)).clamp(0, size - 1)
        last = torch.where(across, size - 1, torch.where(hi < 0, hi + size, hi)).clamp(0, size - 1)
        self.first, self.last = first, torch.maximum(first, last)
        self.is_point = bool((self.first == self.last).all())


class _SparseTable:
    """Minimum and maximum over ranges of one dimension: level k holds those of 2^k neighbouring cells."""

    def __init__(self, tensor: Tensor, dim: int, granule: int):
        self.cell = _cell_length(tensor.numel(), granule)
        lo, hi = _without_nan(tensor.movedim(dim, -1))
        self.lo = _levels(_cells(lo, self.cell, torch.amin), torch.minimum)
        self.hi = _levels(_cells(hi, self.cell, torch.amax), torch.maximum)

    def query(self, ranges: list[_Range], dim: int) -> tuple[Tensor, Tensor]:
        """Extremes as float64, one for each tile."""
        first, last = ranges[dim].first // self.cell, ranges[dim].last // self.cell
        _, exponent = torch.frexp((last - first + 1).to(torch.float64))
        level = exponent.long() - 1  # floor(log2(number of cells)), exactly
        others = tuple(r.first for d, r in enumerate(ranges) if d != dim)
        left, right = (level, *others, first), (level, *others, last + 1 - (1 << level))
        lo = torch.minimum(self.lo[left], self.lo[right])
        hi = torch.maximum(self.hi[left], self.hi[right])
        return lo.to(torch.float64), hi.to(torch.float64)


def _cell_length(elements: int, granule: int) -> int:
    cell = 1
    if elements > _SMALL_TABLE:
        cell = max(c for c in range(1, 65) if granule % c == 0)
    while elements // cell > _MOST_CELLS:
        cell *= 2
    return cell


def _cells(x: Tensor, cell: int, reduce) -> Tensor:
    if cell == 1:
        return x
    short = -x.shape[-1] % cell
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1)
    return reduce(x.unflatten(-1, (-1, cell)), dim=-1)


def _levels(x: Tensor, merge) -> Tensor:
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


def _as_loaded(tensor: Tensor) -> Tensor:
    """In the dtype that a kernel computes with; bool as uint8, which has a minimum."""
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _without_nan(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper ends of each element: any number where it is NaN."""
    if not x.is_floating_point():
        return x, x
    nan = torch.isnan(x)
    return torch.where(nan, -math.inf, x), torch.where(nan, math.inf, x)


def _ends(lo: Tensor, hi: Tensor, reduced: bool = False) -> tuple[Tensor, Tensor]:
    lo, hi = _without_nan(lo)[0], _without_nan(hi)[1]
    if reduced:
        lo, hi = lo.amin(), hi.amax()
    return lo.to(torch.float64), hi.to(torch.float64)
