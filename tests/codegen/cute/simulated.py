"""Runs generated CuTe kernels on the CPU: every warp of a block of threads is a Python thread, every barrier really waits.

Loads finish late, at random, and stores as late as may be: a copy into memory that is still read, a product whose operands change under
it, and a warp that waits for ever all fail here. What is not simulated: proxy fences, swizzles, and the layout of fragments, which is
written down in `position` from the PTX manual.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.codegen.cute import stand_in
from tests.codegen.cute.stand_in import (
    LANES,
    Float32,
    Int32,
    Memory,
    Num,
    Registers,
    captured_memory,
    executed,
    lanes_on,
    tile_library,
)

PATIENCE = 60.0  # seconds that a warp waits before it counts as dead
_here = stand_in._here


class Stuck(AssertionError):
    """A warp waited for something that never came."""


class Barrier:
    """An mbarrier: a phase ends when all arrivals and bytes are there."""

    def __init__(self, block: Block, arrivals: int):
        self.block, self.arrivals = block, arrivals
        self.pending, self.bytes, self.phase = arrivals, 0, 0

    def arrive(self, expected_bytes: int = 0) -> None:
        with self.block.changed:
            self.pending -= 1
            self.bytes += expected_bytes
            assert self.pending >= 0, "more arrivals than the barrier counts"
            self._settle()

    def receive(self, count: int) -> None:
        with self.block.changed:
            self.bytes -= count
            self._settle()

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1
            self.block.changed.notify_all()

    def wait(self, parity: int, what: str) -> None:
        self.block.until(lambda: self.phase % 2 != parity, what)


class State:
    """A place in a ring."""

    def __init__(self, stages: int, phase: int, first: int = 0):
        self.stages, self.index, self.phase = stages, first, phase

    def advance(self, count: int = 1) -> None:
        laps, self.index = divmod(self.index + count, self.stages)
        self.phase ^= laps % 2


class Pipeline:
    """Full and empty barriers of a ring."""

    def __init__(self, block: Block, name: str, stages: int, stage_bytes: int, readers: int):
        self.name, self.stage_bytes = name, stage_bytes
        self.full = [Barrier(block, 1) for _ in range(stages)]
        self.empty = [Barrier(block, readers) for _ in range(stages)]

    def producer_acquire(self, state: State) -> None:
        self.empty[state.index].wait(state.phase, f"an empty stage of {self.name}")
        if self.stage_bytes:
            self.full[state.index].arrive(self.stage_bytes)

    def producer_get_barrier(self, state: State) -> Barrier:
        return self.full[state.index]

    def producer_commit(self, state: State) -> None:
        assert lanes_on().sum() == 1
        self.full[state.index].arrive()

    def consumer_wait(self, state: State) -> None:
        self.full[state.index].wait(state.phase, f"a full stage of {self.name}")

    def consumer_release(self, state: State) -> None:
        self.empty[state.index].arrive()


class Buffer:
    """Shared memory in stages of (rows, columns)."""

    def __init__(self, stages: int, rows: int, columns: int):
        self.data = np.full((stages, rows, columns), np.nan, np.float32)

    def __getitem__(self, index: Any) -> Slot:
        return Slot(self, int(index[-1]))


class Slot:
    """One stage of a buffer, or the first columns of it."""

    def __init__(self, buffer: Buffer, stage: int, columns: int | None = None):
        self.buffer, self.stage, self.columns = buffer, stage, columns

    @property
    def iterator(self) -> Slot:
        return self

    @property
    def data(self) -> np.ndarray:
        return self.buffer.data[self.stage][:, : self.columns]

    def __getitem__(self, index: Any) -> Slot:
        return self if index[-1] == "one" else Slot(self.buffer, int(index[-1]))


class Global:
    """A tensor [batch, heads, tokens, dim] seen as (tokens, dim, heads, batch), or with the first two exchanged."""

    def __init__(self, values: torch.Tensor, transposed: bool = False):
        self.values, self.transposed = values, transposed
        b, h, s, d = values.shape
        self.shape = [Int32(n) for n in ((d, s, h, b) if transposed else (s, d, h, b))]

    def __getitem__(self, index: Any) -> Any:
        return SimpleNamespace(matrix=self.values[int(index[3]), int(index[2])])


class Boxes:
    """Boxes of `rows` tokens; what lies outside reads as 0 and is not written."""

    def __init__(self, matrix: torch.Tensor, rows: int):
        self.matrix, self.rows = matrix, rows

    def __getitem__(self, index: Any) -> Any:
        first = int(index[1]) * self.rows
        assert first >= 0, "a box before the tensor"
        return SimpleNamespace(matrix=self.matrix[first : first + self.rows], first=first)


class Product:
    """A product under way: it reads its operands again when it ends, and they must be what they were."""

    def __init__(
        self, result: Registers, operands: Callable[[], list[np.ndarray]], finish: Callable[[], None], held: Sequence[Registers] = ()
    ):
        self.result, self.operands, self.finish, self.held = result, operands, finish, held
        self.seen = [x.copy() for x in operands()]
        result.busy = "written"
        for registers in held:
            registers.busy = "read"

    def end(self) -> None:
        for before, after in zip(self.seen, self.operands()):
            assert np.array_equal(before, after, equal_nan=True), "a product's operand in shared memory changed under it"
        self.result.busy = ""
        for registers in self.held:
            registers.busy = ""
        self.finish()


def position(register: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, in the 16 rows of a warp, of an accumulator register of each lane (PTX ISA, m64nNk16, fragment of D)."""
    lane = np.arange(LANES)
    return lane // 4 + 8 * ((register // 2) % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2


class Block:
    """A block of threads of one kernel launch."""

    def __init__(self, number: int, grid: int, groups: int, seed: int):
        self.number, self.grid, self.groups = number, grid, groups
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.random = random.Random(seed)
        self.named: dict[int, list[int]] = {}  # id → [arrived, generation]
        self.shared: dict[str, Any] = {}
        self.jobs: list[Callable[[], None]] = []
        self.is_over = False

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Blocks the calling warp."""
        deadline = time.monotonic() + PATIENCE
        with self.changed:
            while not condition():
                if self.failure is not None or time.monotonic() > deadline:
                    raise Stuck(f"warp {_here.warp} of block {self.number} waits for {what}")
                self.changed.wait(0.5)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What all warps share, made by the first that asks."""
        with self.changed:
            if name not in self.shared:
                self.shared[name] = make()
            return self.shared[name]

    def named_barrier(self, number: int, threads: int, waits: bool) -> None:
        with self.changed:
            state = self.named.setdefault(number, [0, 0])
            generation = state[1]
            state[0] += LANES
            assert state[0] <= threads, f"more threads than named barrier {number} counts"
            if state[0] == threads:
                state[0], state[1] = 0, generation + 1
                self.changed.notify_all()
        if waits:
            self.until(lambda: state[1] != generation, f"named barrier {number}")

    # --- copies ---

    def later(self, job: Callable[[], None]) -> None:
        with self.changed:
            self.jobs.append(job)
            self.changed.notify_all()

    def copy_engine(self) -> None:
        """Performs loads in random order, sometimes late."""
        _here.warp = "copies"
        with self.changed:
            while True:
                while not self.jobs and not self.is_over:
                    self.changed.wait(0.2)
                if not self.jobs:
                    return
                job = self.jobs.pop(self.random.randrange(len(self.jobs)))
                self.changed.release()
                try:
                    if self.random.random() < 0.3:
                        time.sleep(self.random.random() * 2e-3)
                    job()
                finally:
                    self.changed.acquire()


class Machine:
    """The hardware parts of `cute_tiles` and of the DSL, for the warp that runs."""

    def __init__(self, plan: Any, rounded: Callable[[np.ndarray], np.ndarray]):
        self.plan, self.rounded = plan, rounded
        tile = plan.forward
        self.rows, self.columns, self.stages, self.groups = 64, tile.columns, tile.stages, tile.groups
        self.d, self.dv = plan.padded_dim, plan.padded_dim_v

    @property
    def block(self) -> Block:
        return _here.block

    # --- set-up ---

    def storage(self) -> Any:
        block, machine = self.block, self

        class Field:
            def __init__(self, name: str):
                self.name = name

            def data_ptr(self) -> str:
                return self.name

            def get_tensor(self, layout: Any, swizzle: Any = None) -> Any:
                return block.once(self.name, lambda: machine.buffer(self.name))

        class Shared:
            def __getattr__(self, name: str) -> Field:
                return Field(name)

        return Shared()

    def buffer(self, name: str) -> Any:
        sizes = {
            "q": (self.groups, 64, self.d),
            "k": (self.stages, self.columns, self.d),
            "v": (self.stages, self.columns, self.dv),
            "out": (self.groups, 64, self.dv),
        }
        if name in sizes:
            return Buffer(*sizes[name])
        if name == "slots":
            return Memory(np.zeros(16, np.int32), (8, 2), (1, 8))
        kind, count = self.staged_types[name]
        return Memory(np.zeros(count * 2 * self.groups, kind.kind), (count, 2 * self.groups), (1, count), kind=kind)

    def stage_bytes(self, dtype: Any, layout: str) -> int:
        return {"q": 64 * self.d, "k": self.columns * self.d, "v": self.columns * self.dv}[layout] * 2

    def load_pipeline(self, name: str, stages: int, stage_bytes: int, readers: int, sharers: int = 1) -> Pipeline:
        """Blocks of a cluster run by themselves here: each loads all."""
        return self.block.once(name, lambda: Pipeline(self.block, name, stages, stage_bytes, readers))

    def queue_pipeline(self, name: str, readers: int, slots: int = 2) -> Pipeline:
        return self.block.once(name, lambda: Pipeline(self.block, name, slots, 0, readers))

    # --- copies ---

    def copy_pair(self, atom: str, shared: Any, tiles: Boxes, sharers: int = 1, rank: Any = 0) -> tuple[Any, Boxes]:
        return shared, tiles

    def local_tile(self, view: Any, box: tuple[int, int], where: Any) -> Boxes:
        return Boxes(view.matrix, box[0] if where[0] is None else box[1])

    def copy(self, atom: Any, source: Any, target: Any, tma_bar_ptr: Barrier | None = None, mcast_mask: Any = None) -> None:
        if atom == "store":
            # As late as may be: when the warp waits for it.
            _here.stores.append(lambda: self._stored(source, target))
        else:
            assert tma_bar_ptr is not None
            self.block.later(lambda: self._loaded(source, target, tma_bar_ptr))

    def _loaded(self, source: Any, target: Slot, barrier: Barrier) -> None:
        found = source.matrix.float().numpy()
        target.data[...] = 0.0
        target.data[: found.shape[0], : found.shape[1]] = found
        barrier.receive(target.data.size * 2)

    def _stored(self, source: Slot, target: Any) -> None:
        rows, columns = target.matrix.shape
        target.matrix[...] = torch.from_numpy(source.data[:rows, :columns].copy()).to(target.matrix.dtype)

    def wait_stores(self, count: int, read: bool) -> None:
        while len(_here.stores) > count:
            _here.stores.pop(0)()

    # --- products ---

    def begin_scores(self, product: Any, scores: Registers, queries: Buffer, keys: Buffer, group: Any, stage: int) -> None:
        first = 16 * (_here.warp % 4)
        left, right = queries.data[int(group)][first : first + 16], keys.data[stage]
        values = left @ right.T

        def finish() -> None:
            for i in range(len(scores.items)):
                scores.items[i] = Float32(values[position(i)])

        _here.products.append(Product(scores, lambda: [left, right], finish))

    def begin_out(self, product: Any, out: Registers, weights: Registers, values: Buffer, stage: int) -> None:
        right = values.data[stage]
        left = np.zeros((16, self.columns), np.float32)
        for i in range(len(weights.items)):
            left[position(i)] = weights.items[i].value
        assert not out.busy, "one product at a time adds to a fragment"
        sums = left @ right

        def finish() -> None:
            for i in range(len(out.items)):
                out.items[i] = Float32(out.items[i].value + sums[position(i)])

        _here.products.append(Product(out, lambda: [right], finish, [weights]))

    def wait_group(self, count: int) -> None:
        while len(_here.products) > count:
            _here.products.pop(0).end()

    def pack(self, source: Registers, target: Registers) -> None:
        for i in range(len(source.items)):
            target[i] = Float32(self.rounded(source[i].value))

    def stage_out(self, product: Any, fragment: Registers, shared: Slot, thread: Any, dtype: Any) -> None:
        first = 16 * (_here.warp % 4)
        for i in range(len(fragment.items)):
            row, column = position(i)
            shared.data[first + row, column] = self.rounded(fragment[i].value)


def simulate(
    text: str,
    plan: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    tensors: Sequence[torch.Tensor] = (),
    scalars: Sequence[int | float] = (),
    walk: Any = None,
    *,
    blocks: int = 3,
    section: int = 2,
    seed: int = 0,
    staged: Sequence[Any] = (),
) -> tuple[torch.Tensor, ...]:
    """Output, lse and perhaps the largest scores of a generated module's kernel, run warp by warp.

    Args:
        blocks: blocks of threads, where the plan does not start one for each tile.
        staged: `Kernel.staged` and `Kernel.diagonals`, for the types of what warpgroups share.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(np.ascontiguousarray(x)).to(q.dtype).float().numpy()

    machine = Machine(plan, rounded)
    columns = plan.forward.columns
    machine.staged_types = {  # type: ignore[attr-defined]
        value.name: (getattr(stand_in, value.type), plan.forward.diagonals if value.by_diagonal else columns) for value in staged
    }
    library = tile_library()
    hardware = {
        name: getattr(machine, name)
        for name in "stage_bytes load_pipeline queue_pipeline copy_pair begin_scores begin_out pack stage_out".split()
    }
    hardware |= {
        "filling": lambda stages: State(stages, 1),
        "reading": lambda stages, first=0: State(stages, 0, int(first)),
        "weights_fragment": lambda scores, dtype: Registers(len(scores.items), Float32),
        "weigh_before": lambda total: None,
        "wait_turn": lambda group: _here.block.named_barrier(2 + int(group), 256, True),
        "pass_turn": lambda group, groups: _here.block.named_barrier(2 + (int(group) + 1) % groups, 256, False),
        "group_barrier": lambda group: _here.block.named_barrier(8 + int(group), 128, True),
    }
    tiles = SimpleNamespace(**{**vars(library), **hardware})
    warpgroup = SimpleNamespace(wait_group=machine.wait_group)

    def make_rmem_tensor(size: Any, kind: type[Num]) -> Registers:
        return Registers(size if isinstance(size, int) else size[0] * size[1] // 128, kind)

    def make_tensor(pointer: Any, layout: Any) -> Any:
        return Slot(pointer.buffer, pointer.stage, plan.padded_dim_v) if isinstance(pointer, Slot) else stand_in.View(pointer)

    def fragment(shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    part = SimpleNamespace(partition_A=lambda x: x, partition_B=lambda x: x)
    product = SimpleNamespace(
        get_slice=lambda i: part, make_fragment_A=lambda x: x, make_fragment_B=lambda x: x, partition_shape_C=fragment
    )
    arch = {
        **vars(stand_in.arch),
        "thread_idx": lambda: (Int32(32 * _here.warp + np.arange(LANES)), 0, 0),
        "block_idx": lambda: (Int32(_here.block.number), 0, 0),
        "grid_dim": lambda: (Int32(_here.block.grid), 0, 0),
        "warp_idx": lambda: Int32(_here.warp),
        "block_idx_in_cluster": lambda: Int32(_here.block.number % plan.forward.cluster),
        "cluster_arrive": lambda: None,
        "cluster_wait": lambda: None,
        "setmaxregister_decrease": lambda n: None,
        "setmaxregister_increase": lambda n: None,
        "cp_async_bulk_commit_group": lambda: None,
        "cp_async_bulk_wait_group": machine.wait_stores,
    }
    cute = {
        **vars(stand_in.cute),
        "arch": SimpleNamespace(**arch),
        "copy": machine.copy,
        "local_tile": machine.local_tile,
        "make_rmem_tensor": make_rmem_tensor,
        "make_tensor": lambda pointer, layout: (
            Slot(pointer.buffer, pointer.stage, plan.padded_dim_v) if isinstance(pointer, Slot) else stand_in.View(pointer)
        ),
        "recast_ptr": lambda pointer, swizzle, dtype: pointer,
        "select": lambda layout, mode: layout,
    }
    names = {
        "cute": SimpleNamespace(**cute),
        "tiles": tiles,
        "warpgroup": warpgroup,
        "pipeline": SimpleNamespace(pipeline_init_arrive=lambda *_: None, pipeline_init_wait=lambda *_: None),
        "cpasync": SimpleNamespace(prefetch_descriptor=lambda atom: None),
        "SmemAllocator": lambda: SimpleNamespace(allocate=lambda Shared: machine.storage()),
        "Launcher": lambda *args, **_: None,
        "tensor": lambda *args, **_: None,
        "number": lambda *args, **_: None,
        "functools": None,
        "torch": torch,
    }
    kernel = executed(text, names)["forward_kernel"]
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    arguments: list[Any] = []
    if walk is not None:
        arguments += [captured_memory(x) for x in (walk.rows, walk.partial, walk.full, walk.order)]
    counter = torch.zeros(1, dtype=torch.int32)
    if plan.forward.scheduler == "dynamic":
        arguments.append(captured_memory(counter))
    arguments += [captured_memory(t if t.numel() else t.new_zeros((1,) * t.dim())) for t in tensors]
    arguments += [Float32(scale), Int32(section)]
    arguments += [Float32(s) if isinstance(s, float) else Int32(s) for s in scalars]
    total = -(-q.shape[2] // plan.forward.rows) * q.shape[0] * q.shape[1]
    grid = total if plan.forward.scheduler == "grid" else min(total, blocks)
    results = [torch.full(q.shape[:3], float("nan")) for _ in range(1 + plan.max_scores)]
    flat = [Memory(result.view(-1).numpy()) for result in results]

    def run_warp(block: Block, warp: int) -> None:
        _here.block, _here.warp, _here.products, _here.stores = block, warp, [], []
        try:
            with np.errstate(all="ignore"):
                kernel(
                    *("load", Global(q), "load", Global(k), "load", Global(v, True), "store", Global(out), *flat),
                    *arguments,
                    *(product, product, *(_Layout(name) for name in "q k v out".split()), None),
                )
            assert not _here.products, "a product was never waited for"
            assert not _here.stores, "shared memory is gone before it was stored"
        except BaseException as error:
            with block.changed:
                if block.failure is None or isinstance(block.failure, Stuck):
                    block.failure = error
                block.changed.notify_all()

    for number in range(grid):
        block = Block(number, grid, plan.forward.groups, seed + number)
        engine = threading.Thread(target=block.copy_engine, daemon=True)
        warps = [threading.Thread(target=run_warp, args=(block, w), daemon=True) for w in range(4 + 4 * plan.forward.groups)]
        for thread in (engine, *warps):
            thread.start()
        for thread in warps:
            thread.join()
        with block.changed:
            block.is_over = True
            block.changed.notify_all()
        engine.join()
        if block.failure is not None:
            raise block.failure
    assert counter.item() == 0, "the next kernel finds no 0 in the counter"
    return out, *results


class _Layout(str):
    """A layout known by the buffer it is for."""

    outer = property(lambda self: self)
    inner = property(lambda self: self)
