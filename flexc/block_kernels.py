"""Block maps on the GPU: generated kernels write the walks of a mask, and nothing waits for the host.

One program for each block row: it walks the other side from coarse to fine, proves what bounds can prove, and writes the row's record, list
and runs into places of fixed size. Scalars, lengths and the contents of tensors are arguments: new ones compile nothing, and all launches
can be captured in a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flexc import settings
from flexc.backends import TRITON, is_interpreted
from flexc.block_launches import MOST_ROWS, Compiled, Exact, WrittenWalk
from flexc.codegen.templates import template_source
from flexc.codegen.triton.blocks import (
    COUNTED,
    ORDER_TEMPLATE,
    TABLES_TEMPLATE,
    TEMPLATE,
    BlocksPlan,
    BlocksText,
    block_signature,
    emit_blocks,
    emit_tables,
    plan_blocks,
)
from flexc.codegen.triton.blocks_program import Table
from flexc.codegen.triton.plan import MAX_TOKENS
from flexc.compile_log import BinaryLog, Compilation, record, refuse_if_forbidden
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph, inputs_of
from flexc.map_making import MapSizes, is_capturing, is_numbered_gpu
from flexc.pipeline import generator_digest, lines_of, text_without_lines
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of
from flexc.runtime.machine_code import CompiledModule
from flexc.runtime.module import load_module
from flexc.runtime.triton_binaries import watch
from flexc.runtime.triton_compile import compile_module
from flexc.sparsity.proof import Proof
from flexc.sparsity.runs import Runs
from flexc.sparsity.statements import is_declared_sorted
from flexc.sparsity.walk import Walk, runs_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Counts:
    """What the kernel found for all block rows. Read on the host.

    Attributes:
        empty, partial, full: blocks.
        proof: how they were decided.
        overflowed: block rows whose lists or runs did not fit and that are walked from end to end.
    """

    empty: int
    partial: int
    full: int
    proof: Proof
    overflowed: int


class DeviceMap:
    """Walks of one mask, made on the device that the tensors are on. Made by `DevicePlan`.

    Each walk is made at first need, from what the tensors then contain.

    Attributes:
        shape: (B or 1, Hq or 1, n, m): n block rows of m blocks.
        device: where the walks are.
    """

    def __init__(self, plan: DevicePlan, device: torch.device, tensors: Sequence[Tensor], scalars: Sequence[int | float]):
        self.shape, self.device = plan.shape, device
        self._plan, self._tensors, self._scalars = plan, tensors, scalars
        self._written: dict[str, WrittenWalk] = {}
        self._is_captured = is_capturing()

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit."""
        return self.written("rows").walk

    def column_walk(self) -> Walk:
        """For each key block the query blocks to visit."""
        return self.written("columns").walk

    def has(self, side: str) -> bool:
        """Whether the walk along "rows" or "columns" is made."""
        return side in self._written

    def written(self, side: str) -> WrittenWalk:
        """The walk along "rows" or "columns": its kernel is launched at first need."""
        found = self._written.get(side)
        if found is None:
            if _is_current(self.device):
                found = self._plan.written(side, self.device, self._tensors, self._scalars)
            else:
                with torch.cuda.device(self.device):
                    found = self._plan.written(side, self.device, self._tensors, self._scalars)
            # What a graph that is being captured will write has not been written yet: others must not find it.
            if self._is_captured or not is_capturing():
                self._written[side] = found
        return found

    @property
    def size_bytes(self) -> int:
        """Memory of the walks made so far."""
        return sum(written.size_bytes for written in self._written.values())

    def rows(self) -> Runs:
        """For each query block the runs of key blocks that are not empty. Waits for the device."""
        return runs_of(self.row_walk(), self.shape)

    def columns(self) -> Runs:
        """For each key block the runs of query blocks that are not empty. Waits for the device."""
        b, h, n, m = self.shape
        return runs_of(self.column_walk(), (b, h, m, n))

    def counts(self) -> Counts:
        """How the blocks were decided. Waits for the device."""
        found = dict(zip(COUNTED, self.written("rows").counts.sum(0).tolist(), strict=True))
        closer = {way: found[way] for way in ("sampled", "evaluated", "undecided")}
        proof = Proof(bounds=math.prod(self.shape) - sum(closer.values()), **closer)
        visited = found["partial"] + found["full"]
        return Counts(math.prod(self.shape) - visited, found["partial"], found["full"], proof, found["overflowed"])


@dataclass(frozen=True)
class DevicePlan:
    """How the walks of one mask are made, for given lengths and tensors of given sizes. Made by `plan_on_gpu`.

    Attributes:
        entries: of batch and heads.
        shape: of the map.
        device: of the maps; without an index, whichever is current.
    """

    compiled: Compiled
    lengths: tuple[int, int]
    entries: tuple[int, int]
    shape: tuple[int, int, int, int]
    device: torch.device
    capacity: tuple[int | None, int | None]
    exact: Exact

    def map(self, tensors: Sequence[Tensor], scalars: Sequence[int | float]) -> DeviceMap:
        """The map of captured values, in the order of the graph."""
        device = self.device
        if device.index is None and device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return DeviceMap(self, device, tensors, scalars)

    def written(self, side: str, device: torch.device, tensors: Sequence[Tensor], scalars: Sequence[int | float]) -> WrittenWalk:
        """The walk along "rows" or "columns"."""
        return self.compiled.walk(side, self.lengths, self.entries, tensors, scalars, device, self.capacity, self.exact)


def plan_on_gpu(
    graph: Graph,
    sizes: MapSizes,
    *,
    tensors: Sequence[Tensor],
    device: torch.device,
    exact: Exact = "auto",
    most_listed: int | None = None,
    most_runs: int | None = None,
    title: str = "",
) -> DevicePlan:
    """The plan of the maps of `graph.mask`.

    Args:
        graph: a mask that does not read the score.
        sizes: from 1 to MAX_TOKENS - 1 tokens.
        tensors: captured tensors, in the order of the graph: how large they are, and whether they are sorted, is looked at.
        exact: whether blocks that bounds leave open and that are alike on samples are evaluated on all their pairs: all of them, none, or
            ("auto") in each block row its share of `MOST_PAIRS`, as long as some turn out to be empty or full.
        most_listed, most_runs: places for the partial blocks and the full runs of one block row, if not as many as memory allows.
        title: what the user calls the mask, for the log of compilations.

    Raises:
        UnsupportedError: longer than MAX_TOKENS, more than MOST_ROWS rows of blocks, a captured tensor without elements, or a mask whose
            bounds cannot be printed.
    """
    lengths = (sizes.q_len, sizes.kv_len)
    if not 0 < min(lengths) <= max(lengths) < MAX_TOKENS:
        raise UnsupportedError(f"triton: a generated block map takes from 1 to {MAX_TOKENS - 1} tokens, got {lengths[0]} and {lengths[1]}")
    compiled = compiled_for(graph, sizes.block, tensors, title, exact is not False)
    entries = (sizes.batch if "batch" in compiled.reads else 1, sizes.heads if "head" in compiled.reads else 1)
    shape = (*entries, -(-sizes.q_len // sizes.block[0]), -(-sizes.kv_len // sizes.block[1]))
    if math.prod(entries) * max(shape[2:]) > MOST_ROWS:
        raise UnsupportedError(f"triton: a generated block map takes at most {MOST_ROWS} rows and columns of blocks, got {shape}")
    return DevicePlan(compiled, lengths, entries, shape, device, (most_listed, most_runs), exact)


def compiled_for(graph: Graph, block: tuple[int, int], tensors: Sequence[Tensor], title: str, exact: bool = True) -> Compiled:
    """The module for a mask with what it captures, from memory, from the disk or printed.

    Raises:
        UnsupportedError: a captured tensor without elements, or a mask whose bounds cannot be printed.
    """
    if not all(tensor.numel() for tensor in tensors):
        raise UnsupportedError("triton: a generated block map takes captured tensors with elements, got an empty one")
    return _builder(graph, block, exact).compiled(tensors, title)


def _is_current(device: torch.device) -> bool:
    """Whether launches go to the device: they go to the current one."""
    return not is_numbered_gpu(device) or torch.cuda.current_device() == device.index


def compile_for(graph: Graph, block: tuple[int, int], capability: int, elements: Sequence[int] = (), exact: bool = False) -> CompiledModule:
    """Machine code of the walks for a target that need not be in this machine.

    Args:
        capability: for example 90.
        elements: of each captured tensor; default a million.
    """
    sizes = elements or [2**20] * len(graph.tensors)
    plan = plan_blocks(graph, block, math.gcd(*block), sizes, [False] * len(graph.tensors), exact, interpreted=False)
    module, text = _module(graph, plan, "")
    return compile_module(module, capability, lambda names: block_signature(names, graph, text.tables))


# --- modules ------------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    """One mask with one block size: the modules for the sizes of tensors met so far. Few, as only orders of magnitude reach the plan."""

    graph: Graph
    block: tuple[int, int]
    exact: bool
    reads: frozenset[str]
    _by_sizes: dict[tuple, Compiled] = field(default_factory=dict)
    _by_plan: dict[BlocksPlan, Compiled] = field(default_factory=dict)
    _refusal: str = ""  # why there can be no module

    def compiled(self, tensors: Sequence[Tensor], title: str) -> Compiled:
        sizes = tuple((tensor.numel(), is_declared_sorted(tensor)) for tensor in tensors)
        found = self._by_sizes.get(sizes)
        if found is None:
            elements, is_sorted = [size for size, _ in sizes], [stated for _, stated in sizes]
            plan = plan_blocks(self.graph, self.block, math.gcd(*self.block), elements, is_sorted, self.exact, is_interpreted())
            found = self._by_plan.get(plan)
            if found is None:
                found = self._by_plan[plan] = Compiled(plan, *self._printed(plan, title), self.reads)
            if len(self._by_sizes) >= _MOST_BUILDERS:
                self._by_sizes.clear()
            self._by_sizes[sizes] = found
        return found

    def _printed(self, plan: BlocksPlan, title: str) -> tuple[ModuleType, BlocksText]:
        if self._refusal:
            raise UnsupportedError(self._refusal)
        try:
            return _module(self.graph, plan, title)
        except UnsupportedError as error:
            self._refusal = str(error)
            raise


_MOST_BUILDERS = 256
_builders: OrderedDict[tuple, _Builder] = OrderedDict()
_lock = threading.RLock()


def _builder(graph: Graph, block: tuple[int, int], exact: bool) -> _Builder:
    key = (graph, block, exact, is_interpreted())
    with _lock:
        found = _builders.get(key)
        if found is None:
            assert graph.mask is not None
            found = _builders[key] = _Builder(graph, block, exact, inputs_of(graph.mask))
            if len(_builders) > _MOST_BUILDERS:
                _builders.popitem(last=False)
        return found


def _module(graph: Graph, plan: BlocksPlan, title: str) -> tuple[ModuleType, BlocksText]:
    parts = {"graph": text_without_lines(graph), "lines": lines_of(graph), "plan": dataclasses.asdict(plan)}
    return _loaded(lambda: emit_blocks(graph, plan), title or "a mask", **parts)


@cache
def load_shared() -> ModuleType:
    """The kernels that all masks share."""
    return _loaded(lambda: BlocksText(emit_tables(), ()), "tables and order")[0]


def _loaded(emit: Callable[[], BlocksText], title: str, **parts: Any) -> tuple[ModuleType, BlocksText]:
    """The module and its text, which is printed from these parts: from the disk cache, where the toolchain finds the source, too."""
    store = cache_of(settings.current())
    key = key_of(kind="block map", generator=_generator_digest(), triton=metadata.version("triton"), **parts)
    started, variant = time.perf_counter(), f"block map: {title}"
    entry, reason = store.get(key), "first block map of this mask"
    is_kept = entry is not None
    if entry is None:
        text = emit()  # first: where it cannot be printed, nothing is to be compiled
        refuse_if_forbidden(variant, reason, "triton", "any GPU", key)
        meta = {"backend": "triton", "tables": [dataclasses.asdict(table) for table in text.tables]}
        with store.lock(key):
            entry = store.get(key) or store.put(key, {"kernel.py": text.source}, meta)
    tables = tuple(Table(**{**table, "dims": tuple(table["dims"])}) for table in entry.meta["tables"])
    text = BlocksText(entry.text("kernel.py"), tables)
    record(Compilation("map", variant, "triton", "any GPU", reason, is_kept, time.perf_counter() - started, key))
    module = load_module(text.source, entry.path("kernel.py"))
    watch(module, BinaryLog(variant, "triton", "any GPU", reason, key))
    return module, text


@cache
def _generator_digest() -> str:
    digest = hashlib.sha256(generator_digest(TRITON).encode())
    for name in (TEMPLATE, TABLES_TEMPLATE, ORDER_TEMPLATE):
        digest.update(template_source(name).encode())
    for file in sorted((Path(__file__).parent / "sparsity").glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
