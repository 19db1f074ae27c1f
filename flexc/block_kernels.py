"""Block maps on the GPU: generated kernels write the walks of a mask, and nothing waits for the host.

One program for each block row: it walks the other side from coarse to fine, proves what bounds can prove, and writes the row's record, list
and runs into places of fixed size. Scalars, lengths and the contents of tensors are arguments: new ones compile nothing, and all launches
can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flexc import settings
from flexc.backends import is_interpreted
from flexc.codegen.templates import template_source
from flexc.codegen.triton.blocks import TABLES_TEMPLATE, TEMPLATE, BlocksPlan, block_signature, emit_blocks, emit_tables, plan_blocks
from flexc.codegen.triton.blocks_program import Table
from flexc.codegen.triton.plan import MAX_TOKENS
from flexc.compile_log import BinaryLog, Compilation, record, refuse_if_forbidden
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph, inputs_of
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of
from flexc.runtime.module import load_module
from flexc.runtime.triton_binaries import watch
from flexc.runtime.triton_compile import CompiledModule, compile_module
from flexc.sparsity.facts import TABLES, Cells, SparseTable, is_declared_sorted
from flexc.sparsity.runs import Runs, ranks
from flexc.sparsity.walk import Walk

Tensor = torch.Tensor

_MOST_LISTED, _MOST_RUNS = 96, 32  # places of a block row; rows that need more are walked from end to end
_MOST_PLACES = 2**26
_COARSE_BLOCKS = 512  # with fewer blocks in a row, squares of blocks are not decided first
_MOST_RANKED = 2**14  # block rows up to which their order is found by counting, which costs their square
_MOST_GRID_ROWS = 2**16 - 1


@dataclass(frozen=True)
class Counts:
    """What the kernel found for all block rows. Read on the host.

    Attributes:
        empty, partial, full: blocks.
        evaluated: blocks evaluated on all their pairs.
        overflowed: block rows whose lists or runs did not fit and that are walked from end to end.
    """

    empty: int
    partial: int
    full: int
    evaluated: int
    overflowed: int


@dataclass
class DeviceMap:
    """Walks of one mask, made on the device that the tensors are on. Made by `build_on_gpu`.

    The walk over columns is made at first need, from what the tensors then contain.

    Attributes:
        shape: (B or 1, Hq or 1, n, m): n block rows of m blocks.
    """

    shape: tuple[int, int, int, int]
    _row_walk: tuple[Walk, Tensor]
    _make_columns: Callable[[], tuple[Walk, Tensor]]
    _columns: tuple[Walk, Tensor] | None = None

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit."""
        return self._row_walk[0]

    def column_walk(self) -> Walk:
        """For each key block the query blocks to visit."""
        if self._columns is None:
            self._columns = self._make_columns()
        return self._columns[0]

    @property
    def size_bytes(self) -> int:
        """Memory of the walks made so far."""
        return sum(walk.size_bytes for walk, _ in (self._row_walk, *([] if self._columns is None else [self._columns])))

    def rows(self) -> Runs:
        """For each query block the runs of key blocks that are not empty. Waits for the device."""
        return runs_of(self.row_walk(), self.shape)

    def columns(self) -> Runs:
        """For each key block the runs of query blocks that are not empty. Waits for the device."""
        b, h, n, m = self.shape
        return runs_of(self.column_walk(), (b, h, m, n))

    def counts(self) -> Counts:
        """How the blocks were decided. Waits for the device."""
        _, partial, full, evaluated, overflowed = self._row_walk[1].sum(0).tolist()
        return Counts(math.prod(self.shape) - partial - full, partial, full, evaluated, overflowed)


def build_on_gpu(
    graph: Graph,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    heads: int,
    block: tuple[int, int],
    tensors: Sequence[Tensor],
    scalars: Sequence[int | float],
    device: torch.device,
    exact: bool = False,
    most_listed: int = _MOST_LISTED,
    most_runs: int = _MOST_RUNS,
    title: str = "",
) -> DeviceMap:
    """The walks of `graph.mask`.

    Args:
        graph: a mask that does not read the score.
        q_len, kv_len: tokens, from 1 to MAX_TOKENS - 1.
        batch, heads: sizes that the map covers.
        block: tokens per block, (Bq, Bkv).
        tensors, scalars: captured values, in the order of the graph, on `device`.
        exact: evaluate blocks that bounds leave open.
        most_listed, most_runs: places for the partial blocks and the full runs of one block row.
        title: what the user calls the mask, for the head of the source.

    Raises:
        UnsupportedError: longer than MAX_TOKENS, a captured tensor without elements, or a mask whose bounds cannot be printed.
    """
    if not 0 < min(q_len, kv_len) <= max(q_len, kv_len) < MAX_TOKENS:
        raise UnsupportedError(f"triton: a generated block map takes from 1 to {MAX_TOKENS - 1} tokens, got {q_len} and {kv_len}")
    if not all(tensor.numel() for tensor in tensors):
        raise UnsupportedError("triton: a generated block map takes captured tensors with elements, got an empty one")
    builder = _builder(graph, block, exact, title)
    compiled = builder.compiled(tensors)
    reads = builder.reads
    shape = (batch if "batch" in reads else 1, heads if "head" in reads else 1)
    capacity = most_listed, most_runs

    def walk(side: str) -> tuple[Walk, Tensor]:
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on_device, torch.no_grad():
            return compiled.walk(side, q_len, kv_len, shape, [t.detach() for t in tensors], scalars, device, capacity)

    blocks = -(-q_len // block[0]), -(-kv_len // block[1])
    return DeviceMap((*shape, *blocks), walk("rows"), lambda: walk("columns"))


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


def compile_for(graph: Graph, block: tuple[int, int], capability: int, elements: Sequence[int] = (), exact: bool = False) -> CompiledModule:
    """Machine code of the walks for a target that need not be in this machine.

    Args:
        capability: for example 90.
        elements: of each captured tensor; default a million.
    """
    sizes = elements or [2**20] * len(graph.tensors)
    plan = plan_blocks(graph, block, math.gcd(*block), sizes, [False] * len(graph.tensors), exact, interpreted=False)
    module, tables = _module(graph, plan, "")
    return compile_module(module, capability, lambda names: block_signature(names, graph, tables))


# --- modules ------------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    """One mask with one block size: the modules for the sizes of tensors met so far. Few, as only orders of magnitude reach the plan."""

    graph: Graph
    block: tuple[int, int]
    exact: bool
    title: str
    reads: frozenset[str]
    _by_sizes: dict[tuple, _Compiled] = field(default_factory=dict)
    _by_plan: dict[BlocksPlan, _Compiled] = field(default_factory=dict)

    def compiled(self, tensors: Sequence[Tensor]) -> _Compiled:
        sizes = tuple((tensor.numel(), is_declared_sorted(tensor)) for tensor in tensors)
        found = self._by_sizes.get(sizes)
        if found is None:
            elements, is_sorted = [size for size, _ in sizes], [stated for _, stated in sizes]
            plan = plan_blocks(self.graph, self.block, math.gcd(*self.block), elements, is_sorted, self.exact, is_interpreted())
            found = self._by_plan.get(plan)
            if found is None:
                found = self._by_plan[plan] = _Compiled(plan, *_module(self.graph, plan, self.title))
            if len(self._by_sizes) >= _MOST_BUILDERS:
                self._by_sizes.clear()
            self._by_sizes[sizes] = found
        return found


_MOST_BUILDERS = 256
_builders: OrderedDict[tuple, _Builder] = OrderedDict()
_lock = threading.RLock()


def _builder(graph: Graph, block: tuple[int, int], exact: bool, title: str) -> _Builder:
    key = (graph, block, exact, title, is_interpreted())
    with _lock:
        found = _builders.get(key)
        if found is None:
            assert graph.mask is not None
            found = _builders[key] = _Builder(graph, block, exact, title, inputs_of(graph.mask))
            if len(_builders) > _MOST_BUILDERS:
                _builders.popitem(last=False)
        return found


def _module(graph: Graph, plan: BlocksPlan, title: str) -> tuple[ModuleType, tuple[Table, ...]]:
    text = emit_blocks(graph, plan, title)
    return _loaded(text.source, title or "a mask", plan=dataclasses.asdict(plan), graph=re.sub(" *  # .*", "", str(graph))), text.tables


@cache
def _tables_module() -> ModuleType:
    return _loaded(emit_tables())


def _loaded(source: str, title: str = "tables of captured tensors", **parts: Any) -> ModuleType:
    """The module from the disk cache, where the toolchain finds the source of what it compiles."""
    store = cache_of(settings.current())
    key = key_of(kind="block map", source=source, generator=_generator_digest(), triton=metadata.version("triton"), **parts)
    started, variant = time.perf_counter(), f"block map: {title}"
    entry, reason = store.get(key), "first block map of this mask"
    if entry is None:
        refuse_if_forbidden(variant, reason, "triton", "any GPU", key)
        with store.lock(key):
            entry = store.get(key) or store.put(key, {"kernel.py": source}, {"backend": "triton"})
        record(Compilation("source", variant, "triton", "any GPU", reason, False, time.perf_counter() - started, key))
    module = load_module(source, entry.path("kernel.py"))
    watch(module, BinaryLog(variant, "triton", "any GPU", reason, key))
    return module


@cache
def _generator_digest() -> str:
    digest = hashlib.sha256()
    for name in (TEMPLATE, TABLES_TEMPLATE):
        digest.update(template_source(name).encode())
    for file in sorted((Path(__file__).parent / "codegen" / "triton").glob("blocks*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# --- launches ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compiled:
    """A loaded module and the tables that its kernels take."""

    plan: BlocksPlan
    module: ModuleType
    tables: tuple[Table, ...]

    def walk(
        self,
        side: str,
        q_len: int,
        kv_len: int,
        entries: tuple[int, int],
        tensors: Sequence[Tensor],
        scalars: Sequence[int | float],
        device: torch.device,
        capacity: tuple[int, int],
    ) -> tuple[Walk, Tensor]:
        """The walk along "rows" or "columns", and for each block row: work, partial, full and evaluated blocks, whether it overflowed."""
        blocks = [-(-length // size) for length, size in zip((q_len, kv_len), self.plan.block)]
        own, other = blocks if side == "rows" else blocks[::-1]
        rows = math.prod(entries) * own
        listed, runs = _places(rows, other, capacity)
        records, listed_blocks, full, counts, order = _allotted(device, rows * 4, other + rows * listed, rows * runs * 2, rows * 5, own)
        kernel = getattr(self.module, f"{side}_kernel")
        warps, stages = self.module.LAUNCH[f"{side}_kernel"]
        kernel[(rows,)](
            records, listed_blocks, full, counts, *_values(tensors), *scalars, *self._table_arguments(tensors),
            q_len, kv_len, entries[1], own, other, listed, runs, other > _COARSE_BLOCKS,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        counts = counts.view(rows, 5)
        self._write_order(counts, math.prod(entries), own, order)
        return Walk(records.view(*entries, own, 4), listed_blocks, full.view(-1, 2), order), counts

    def _table_arguments(self, tensors: Sequence[Tensor]) -> list[Any]:
        arguments: list[Any] = []
        for table in self.tables:
            tensor = tensors[table.slot]
            if len(table.dims) == 1:
                make = partial(sparse_table, tensor, table.dims[0], table.cell)
                found = self._table(tensor, (SparseTable, *table.dims, table.cell), make)
                arguments += [found.lo, found.hi, *found.lo.stride()[:-1]]
            else:
                found = self._table(tensor, (Cells, *table.dims, table.cell), partial(Cells.of, tensor, table.dims, table.cell))
                arguments += [found.lo, found.hi, *found.lo.stride(), *found.spans]
        return arguments

    @staticmethod
    def _table(tensor: Tensor, kind: tuple, make: Callable[[], Any]) -> Any:
        """Kept for as long as the tensor is unchanged; a graph that is being captured makes it anew at each replay."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return make()
        return TABLES.get(tensor, kind, make)

    def _write_order(self, counts: Tensor, entries: int, own: int, order: Tensor) -> None:
        work, stride = (counts, 5) if entries == 1 else (counts.view(entries, own, 5)[..., 0].sum(0), 1)
        if own > _MOST_RANKED:
            work = counts[:, 0] if entries == 1 else work
            order.copy_(torch.argsort(work, descending=True, stable=True))
            return
        warps, stages = self.module.LAUNCH["order_kernel"]
        self.module.order_kernel[(-(-own // 64),)](work, stride, order, own, num_warps=warps, num_stages=stages)


def sparse_table(tensor: Tensor, dim: int, cell: int) -> SparseTable:
    """`SparseTable.of` by two kernels, whatever the number of levels."""
    x = tensor.movedim(dim, -1)
    others, length = x.shape[:-1], x.shape[-1]
    count, cells = math.prod(others), -(-length // cell)
    if count > _MOST_GRID_ROWS:
        return SparseTable.of(tensor, [dim], cell)
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    x = x if x.dim() <= 2 else x.reshape(count, length)
    row_stride = x.stride(0) if x.dim() == 2 else 0
    dtype = torch.float32 if x.is_floating_point() else x.dtype
    levels = cells.bit_length()
    lo, hi = (torch.empty((levels, *others, cells), dtype=dtype, device=x.device) for _ in range(2))
    module = _tables_module()
    width = 1 << (cell - 1).bit_length()
    lanes = max(1, 2048 // width)
    warps, stages = module.LAUNCH["cells_kernel"]
    module.cells_kernel[(-(-cells // lanes), count)](
        x, row_stride, x.stride(-1), length, lo, hi, cells, cell, width, lanes, num_warps=warps, num_stages=stages
    )
    if levels > 1:
        # One program a row, as every level waits for the one below: all its cells at once, if they are no more than 8192.
        lanes, warps = (8192, 32) if cells > 512 else (512, 4)
        module.levels_kernel[(count,)](lo, hi, count, cells, levels, lanes, num_warps=warps, num_stages=1)
    return SparseTable(dim, cell, lo, hi)


def _values(tensors: Sequence[Tensor]) -> list[Any]:
    return [value for tensor in tensors for value in (tensor, *tensor.shape, *tensor.stride())]


def _places(rows: int, blocks: int, capacity: tuple[int, int]) -> tuple[int, int]:
    """Places of a block row for partial blocks and for full runs: as many as there can be, within limits."""
    listed, runs = min(blocks, capacity[0]), min((blocks + 1) // 2, capacity[1])
    while rows * (listed + 2 * runs) > _MOST_PLACES and max(listed, runs) > 1:
        listed, runs = max(listed // 2, 1), max(runs // 2, 1)
    return listed, runs


def _allotted(device: torch.device, *sizes: int) -> list[Tensor]:
    """int32 tensors side by side in one piece of memory, each aligned to 16 bytes."""
    padded = [-(-size // 4) * 4 for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.int32, device=device)
    return [part[:size] for part, size in zip(memory.split(padded), sizes)]
