"""Launches of the kernels that all masks share: those that make tables of facts, and the one that orders many block rows by their work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from flexc.block_arguments import Arguments
from flexc.codegen.triton.blocks_program import Table
from flexc.runtime.triton_launch import Launcher
from flexc.sparsity.facts import Cells, SparseTable
from flexc.sparsity.table_cache import TABLES

Tensor = torch.Tensor

_MOST_GRID_ROWS = 2**16 - 1
_AT_ONCE = 2**14  # elements of a row up to which one program makes its whole table: it works through them in a few steps
_LANES = 2**13  # elements, or cells, that a program of LONG_WARPS works on at once
LONG_WARPS, FEW_WARPS = 32, 4


@dataclass(frozen=True)
class Shared:
    """The kernels."""

    module: ModuleType

    @cached_property
    def table(self) -> Launcher:
        """Makes the table of one row."""
        return Launcher(self.module, "table_kernel")

    @cached_property
    def cells(self) -> Launcher:
        """Makes the first level of a table."""
        return Launcher(self.module, "cells_kernel")

    @cached_property
    def levels(self) -> Launcher:
        """Makes the other levels of one row."""
        return Launcher(self.module, "levels_kernel")

    @cached_property
    def few_levels(self) -> Launcher:
        """The same for few cells."""
        return Launcher(self.module, "levels_kernel", num_warps=FEW_WARPS)

    @cached_property
    def order(self) -> Launcher:
        """Orders block rows."""
        return Launcher(self.module, "order_kernel")


_loaded: list[Shared] = []


def shared() -> Shared:
    """The kernels, loaded once."""
    if not _loaded:
        from flexc.block_kernels import load_shared

        _loaded.append(Shared(load_shared()))
    return _loaded[0]


ORDER_LAUNCH = "order_kernel", (["int32"], 1, ["int32"], 1), {"num_warps": 4, "num_stages": 1}
"""That of every map of many block rows, as `runtime.triton_ahead.KernelsJob` has it."""


def table_of(tensor: Tensor, table: Table, stream: int) -> Any:
    """Kept, and written anew in its place once the tensor has changed.

    Args:
        stream: the current one. Other streams do not wait for it and have tables of their own.
    """
    dims, cell = table.dims, table.cell
    if len(dims) != 1:
        return TABLES.get(tensor, (Cells, *dims, cell, stream), lambda: Cells.of(tensor, dims, cell))
    kind = SparseTable, dims[0], cell, stream
    return TABLES.get(tensor, kind, lambda: sparse_table(tensor, dims[0], cell), partial(_written_anew, tensor))


def _written_anew(tensor: Tensor, made: KernelTable | SparseTable) -> bool:
    if isinstance(made, SparseTable):
        return False
    made.write(tensor)
    return True


class _Launch(NamedTuple):
    """One of the launches that make a table.

    Attributes:
        kernel: of `Shared`.
        grid: programs along x and y.
        reads: whether it takes the tensor, before the two ends of the table.
    """

    kernel: str
    grid: tuple[int, int]
    arguments: Arguments
    reads: bool


class _Shape(NamedTuple):
    """What is known of the table of tensors of one shape.

    Attributes:
        size: least and most, levels, the tensor's other dimensions, cells.
        is_plain: whether the kernels read the tensor as it is; else as `_as_rows` makes it.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    is_plain: bool
    launches: tuple[_Launch, ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(
        shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, dim: int, cell: int, device: torch.device
    ) -> _Shape | None:
        """For ranges along `dim`; None if there are more rows than a launch takes."""
        others, length = (*shape[:dim], *shape[dim + 1 :]), shape[dim]
        rows, cells, made = math.prod(others), -(-length // cell), _Widths.of(length, cell)
        if rows > _MOST_GRID_ROWS:
            return None
        levels = cells.bit_length()
        is_plain = dtype != torch.bool and len(shape) <= 2
        row_stride, stride = (strides[1 - dim] if len(shape) == 2 else 0, strides[dim]) if len(shape) <= 2 else (length, 1)
        dtype = torch.uint8 if dtype == torch.bool else dtype
        end = torch.float32 if dtype.is_floating_point else dtype

        def arguments(reads: bool, numbers: tuple[int, ...], constants: tuple[int, ...]) -> Arguments:
            given = Arguments(device)
            if reads:
                given.pointer(dtype)
                given.numbers((row_stride, stride, length))
            given.pointer(end)
            given.pointer(end)
            given.numbers(numbers)
            for constant in constants:
                given.constant(constant)
            return given

        if made.is_at_once:
            launches = [_Launch("table", (rows, 1), arguments(True, (rows, cells, levels, cell), (made.width, made.lanes)), True)]
        else:
            launches = [_Launch("cells", (-(-cells // made.lanes), rows), arguments(True, (cells, cell), (made.width, made.lanes)), True)]
            above = "levels" if made.is_long else "few_levels"
            launches.append(_Launch(above, (rows, 1), arguments(False, (rows, cells, levels), (made.level_lanes,)), False))
        return _Shape((2, levels, *others, cells), end, is_plain, tuple(launches))


class _Widths(NamedTuple):
    """Constants of the kernels that make one table.

    One program a row makes the levels, as every level waits for the one below: of all its cells at once, if they are no more than _LANES.

    Attributes:
        width, lanes: elements of a cell, and cells, that a program reads at once.
        is_long: whether the levels take more than a few warps.
    """

    is_at_once: bool
    width: int
    lanes: int
    is_long: bool

    @staticmethod
    def of(length: int, cell: int) -> _Widths:
        width = 1 << (cell - 1).bit_length()
        is_at_once = -(-length // cell) * width <= _AT_ONCE
        return _Widths(is_at_once, width, max(1, (_LANES if is_at_once else 2048) // width), -(-length // cell) > 512)

    @property
    def level_lanes(self) -> int:
        """Cells of a level that its program works on at once."""
        return _LANES if self.is_long else 512


def table_launches(tensor: Tensor, table: Table) -> list[tuple[str, tuple, dict[str, int]]]:
    """The launches of `sparse_table` as `runtime.triton_ahead.KernelsJob` has them."""
    element = "uint8" if tensor.dtype == torch.bool else str(tensor.dtype).removeprefix("torch.")
    made = _Widths.of(tensor.shape[table.dims[0]], table.cell)
    ends, launches = ([table.dtype], [table.dtype]), shared().module.LAUNCH
    if made.is_at_once:
        arguments = ([element], 1, 1, 1, *ends, 1, 1, 1, 1, made.width, made.lanes)
        return [("table_kernel", arguments, {"num_warps": launches["table_kernel"][0], "num_stages": 1})]
    cells = ([element], 1, 1, 1, *ends, 1, 1, made.width, made.lanes)
    warps = LONG_WARPS if made.is_long else FEW_WARPS
    return [
        ("cells_kernel", cells, {"num_warps": launches["cells_kernel"][0], "num_stages": 1}),
        ("levels_kernel", (*ends, 1, 1, 1, made.level_lanes), {"num_warps": warps, "num_stages": 1}),
    ]


class KernelTable:
    """What `SparseTable` holds, for tensors of one shape, written by kernels as often as the contents change.

    Attributes:
        lo, hi: as those of a `SparseTable`.
    """

    def __init__(self, known: _Shape, dim: int, device: torch.device):
        self.lo, self.hi = self.tensors = torch.empty(known.size, dtype=known.dtype, device=device).unbind(0)
        self._dim, self._index, self._is_plain = dim, device.index, known.is_plain
        self._launches = []
        for name, grid, arguments, reads in known.launches:
            given = arguments.addresses(None, (self.lo, *self.tensors) if reads else self.tensors)
            self._launches.append((getattr(shared(), name).of_kind(arguments.kind), grid, arguments, given[1:] if reads else given, reads))

    def write(self, tensor: Tensor) -> None:
        """Launch what fills the table with the extremes of a tensor."""
        x = tensor if self._is_plain else _as_rows(tensor, self._dim)
        for launch, grid, arguments, others, reads in self._launches:
            given = [x.data_ptr(), *others] if reads else others
            launch(grid, self._index, given, partial(self._with_tensors, arguments, given, x if reads else None))

    def _with_tensors(self, arguments: Arguments, given: list[Any], read: Tensor | None) -> list[Any]:
        return arguments.with_tensors(given, None, self.tensors if read is None else (read, *self.tensors))


def sparse_table(tensor: Tensor, dim: int, cell: int) -> KernelTable | SparseTable:
    """`SparseTable.of` by one kernel, by two for long tensors, whatever the number of levels."""
    device = tensor.device
    known = _Shape.of(tensor.shape, tensor.stride(), tensor.dtype, dim, cell, device)
    if known is None:
        return SparseTable.of(tensor, [dim], cell)
    made = KernelTable(known, dim, device)
    made.write(tensor)
    return made


def _as_rows(tensor: Tensor, dim: int) -> Tensor:
    """Numbers that have a minimum, and rows along `dim` that lie one behind the other if there are more than two dimensions."""
    x = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return x if x.dim() <= 2 else x.movedim(dim, -1).reshape(-1, x.shape[dim]).contiguous()
