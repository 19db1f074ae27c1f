"""Runs generated CuTe backward kernels on the CPU, in the manner of `simulated`: every warp a thread, every barrier and product real.

Besides what `simulated` notices: shared memory that a product or a bulk copy reads before the warp which wrote it has said so
(`publish_shared`, the proxy fence), whichever barrier lies between. Not simulated: swizzles, instruction descriptors, vector loads.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.codegen.cute import stand_in
from tests.codegen.cute.simulated import Block, Boxes, Buffer, Global, Pipeline, Slot, State, Stuck, position
from tests.codegen.cute.stand_in import (
    LANES,
    Float32,
    Int32,
    Memory,
    Num,
    Pointer,
    Registers,
    captured_memory,
    executed,
    spread,
    tile_library,
)

_here = stand_in._here


class Layout:
    """A shape and a stride; column-major without one."""

    def __init__(self, shape: Any, stride: Any = None):
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        plain = [1]
        for size in self.shape[:-1]:
            plain.append(plain[-1] * int(size))
        self.stride = plain if stride is None else stride if isinstance(stride, tuple) else (stride,)

    def offsets(self) -> list[int]:
        """In the order of a linear index."""
        found = [0]
        for size, step in zip(reversed(self.shape), reversed(self.stride)):
            found = [base + int(step) * i for base in found for i in range(int(size))]
        return found


class Fragment(Registers):
    """Registers that can be seen in other shapes. Those of a rounded fragment round what is stored."""

    def __init__(self, size: int, kind: type[Num], rounded: Callable[[Any], Any] | None = None):
        super().__init__(size, kind)
        self.rounded = rounded

    def __setitem__(self, index: int, value: Any) -> None:
        super().__setitem__(index, Float32(self.rounded(Float32(value).value)) if self.rounded is not None else value)

    @property
    def iterator(self) -> Place:
        return Place(self, 0)

    def load(self) -> list[Num]:
        return [self[i] for i in range(len(self.items))]

    def store(self, values: Sequence[Num]) -> None:
        for i, value in enumerate(values):
            self[i] = value


class Place:
    """A register; adding moves it."""

    def __init__(self, registers: Fragment, index: int):
        self.registers, self.index = registers, index

    def __add__(self, other: int) -> Place:
        assert isinstance(other, int), "a register index that is not a constant"
        return Place(self.registers, self.index + other)


class Values(list):
    """What a vector of registers holds."""

    def to(self, kind: Any) -> Values:
        return self

    def __mul__(self, factor: Any) -> Values:  # type: ignore[override]
        return Values(value * factor for value in self)


class RegisterView:
    """Registers in a row."""

    def __init__(self, place: Place, count: int):
        self.place, self.count = place, count

    def load(self) -> Values:
        return Values(self.place.registers[self.place.index + i] for i in range(self.count))

    def store(self, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            self.place.registers[self.place.index + i] = value


class MemoryView:
    """Elements of memory from a pointer on."""

    def __init__(self, pointer: Pointer, layout: Layout):
        self.pointer, self.places = pointer, layout.offsets()

    def __getitem__(self, index: int) -> Num:
        return self.pointer.memory.load(self.pointer.offset + self.places[index])

    def __setitem__(self, index: int, value: Any) -> None:
        self.pointer.memory.store(self.pointer.offset + self.places[index], value)


def make_tensor(pointer: Any, layout: Any) -> Any:
    layout = layout if isinstance(layout, Layout) else Layout(layout)
    if isinstance(pointer, Place):
        return RegisterView(pointer, int(np.prod([int(n) for n in layout.shape])))
    return MemoryView(pointer, layout)


def autovec_copy(source: Any, target: Any) -> None:
    if isinstance(target, MemoryView):
        for i, value in enumerate(source.load()):
            target[i] = value
        with _here.block.changed:
            _here.block.dirty.add((id(target.pointer.memory), _here.warp // 4 - _here.block.first_group, _here.warp))
    else:
        target.store([source[i] for i in range(target.count)])


class Parts(Memory):
    """A buffer of float32 numbers in a part for each warpgroup, which may hold rows of 16-bit numbers instead."""

    def __init__(self, size: int):
        super().__init__(np.full(2 * size, np.nan, np.float32))
        self.size = size

    def __getitem__(self, index: Any) -> Any:
        return SimpleNamespace(parts=self, number=int(index[1]), iterator=Pointer(self, self.size * index[1]))


class Flipped:
    """A buffer with rows and columns exchanged."""

    def __init__(self, buffer: Buffer):
        self.buffer = buffer


class Columns:
    """Some columns of a buffer, or of its one stage."""

    def __init__(self, whole: Buffer | Slot, first: int, count: int):
        self.buffer, self.part = whole.buffer if isinstance(whole, Slot) else whole, slice(first, first + count)
        self.stage = whole.stage if isinstance(whole, Slot) else None

    @property
    def data(self) -> np.ndarray:
        stages = self.buffer.data[..., self.part]
        return stages if self.stage is None else stages[self.stage]


class TiledProduct:
    """A product of both warpgroups: each has its half of the rows (`by_rows`) or of the columns."""

    def __init__(self, name: str, by_rows: bool, is_own: bool = False):
        self.name, self.by_rows, self.is_own = name, by_rows, is_own

    def get_slice(self, first: Any) -> Any:
        return SimpleNamespace(partition_A=lambda x: x, partition_B=lambda x: x)

    def make_fragment_A(self, x: Any) -> Any:
        return x

    make_fragment_B = make_fragment_A

    def partition_shape_C(self, shape: tuple[int, int]) -> int:
        return shape[0] * shape[1] // (128 if self.is_own else 256)

    def part(self, rows: int, columns: int) -> tuple[int, int, int]:
        """First row and column of the calling warp's part, and how many columns."""
        group, within = _here.warp // 4 - _here.block.first_group, _here.warp % 4
        if self.is_own:
            return 16 * within, 0, columns
        if self.by_rows:
            assert rows == 128
            return 64 * group + 16 * within, 0, columns
        assert rows == 64
        return 16 * within, columns // 2 * group, columns // 2


class Running:
    """A product under way: it reads its operands again when it ends, and they must be what they were."""

    def __init__(self, out: Registers, operands: Callable[[], list[np.ndarray]], finish: Callable[[], None], held: Sequence[Registers]):
        self.out, self.operands, self.finish, self.held = out, operands, finish, held
        self.seen = [x.copy() for x in operands()]
        assert not out.busy, "one product at a time adds to a fragment"
        out.busy = "written"
        for registers in held:
            registers.busy = "read"

    def end(self) -> None:
        for before, after in zip(self.seen, self.operands()):
            assert np.array_equal(before, after, equal_nan=True), "a product's operand in shared memory changed under it"
        self.out.busy = ""
        for registers in self.held:
            registers.busy = ""
        self.finish()


class Machine:
    """The hardware parts of the tile libraries and of the DSL, for the warp that runs."""

    def __init__(self, plan: Any, rounded: Callable[[np.ndarray], np.ndarray], staged: Sequence[Any]):
        self.plan, self.tile, self.rounded = plan, plan.backward, rounded
        self.staged_types = {value.name: getattr(stand_in, value.type) for value in staged}
        self.at_once = 1  # blocks of threads that run side by side,
        self.running: list[Block] = []  # and which
        t = self.tile
        by_keys = t.split != "dims"
        self.products = [
            TiledProduct("scores", by_keys),
            TiledProduct("dv", by_keys),
            TiledProduct("dk", by_keys),
            TiledProduct("dq", t.rows == 128 or t.flips_dq),
        ]
        if t.flips_dq and plan.padded_dim == 192:
            self.products.append(TiledProduct("rest", False))
        if t.queue or plan.by_head:
            self.products += [TiledProduct("dk rows", True, True), TiledProduct("dv rows", True, True)]

    def storage(self) -> Any:
        machine = self

        class Field:
            def __init__(self, name: str):
                self.name = name

            def data_ptr(self) -> Any:
                return machine.memory(self.name).iterator if self.name in ("sums", "first_tile") else self.name

            def get_tensor(self, layout: Any, swizzle: Any = None) -> Any:
                return machine.memory(self.name)

        class Shared:
            def __getattr__(self, name: str) -> Field:
                return Field(name)

        return Shared()

    def memory(self, name: str) -> Any:
        return _here.block.once(name, lambda: self.made(name))

    def made(self, name: str) -> Any:
        t, d, dv = self.tile, self.plan.padded_dim, self.plan.padded_dim_v
        sizes = {
            "q": (t.stages, t.rows, d),
            "dout": (t.stages, t.rows, dv),
            "k": (1, t.columns, d),
            "v": (1, t.columns, dv),
            "scores": (2, t.rows, t.columns) if t.flips_dq else (2, t.columns, t.rows),
            "weights": (2, t.columns, t.rows),
        }
        if name == "dq" and _here.block.kernel == "convert":
            return Buffer(1, t.rows, d)
        if name in sizes:
            return Buffer(*sizes[name])
        if name == "dq":
            return Parts(t.rows * d // 2) if t.queue else Memory(np.full(t.rows * d, np.nan, np.float32))
        if name in ("dk", "dv"):
            return Parts(32 * {"dk": d, "dv": dv}[name])
        if name == "sums":
            return Memory(np.full((2 * t.rows + 4) * t.stages, np.nan, np.float32))
        if name == "first_tile":
            return Memory(np.full(4, -1, np.int32))
        if name in ("slots", "orders"):
            size, count = {"slots": (8, 2), "orders": (4, 4 if t.apart else 2)}[name]
            return Memory(np.zeros(count * size, np.int32), (size, count), (1, size))
        kind = self.staged_types[name]
        return Memory(np.zeros(4 * t.rows, kind.kind), (t.rows, 4), (1, t.rows), kind=kind)

    def stage_bytes(self, dtype: Any, layout: str) -> int:
        t, d, dv = self.tile, self.plan.padded_dim, self.plan.padded_dim_v
        return {"q": t.rows * d, "dout": t.rows * dv, "k": t.columns * d, "v": t.columns * dv}[layout] * 2

    def rows_over(self, where: Any, layout: str, dtype: Any) -> Slot:
        """16-bit rows in the memory of a buffer or of a part; the float32 numbers of the part are lost."""
        if isinstance(where, Buffer):
            return Slot(where, 0)
        width = {"dk": self.plan.padded_dim, "dv": self.plan.padded_dim_v}[layout] // (1 if self.tile.split == "keys" else 2)
        assert 64 * width * 2 <= 4 * where.parts.size
        rows = _here.block.once(f"{layout} {where.number}", lambda: Buffer(1, 64, width))
        where.parts.flat[where.parts.size * where.number :][: where.parts.size] = np.nan
        return Slot(rows, 0)

    def queue_pipeline(self, name: str, readers: int) -> Pipeline:
        return _here.block.once(name, lambda: Pipeline(_here.block, name, 2, 0, readers))

    def load_pipeline(self, name: str, stages: int, stage_bytes: int, readers: int) -> Pipeline:
        return _here.block.once(name, lambda: Pipeline(_here.block, name, stages, stage_bytes, readers))

    # --- copies ---

    def copy(self, atom: str, source: Any, target: Any, tma_bar_ptr: Any = None) -> None:
        if tma_bar_ptr is None:
            self.must_be_public(source.buffer, source.stage)
            rows, columns = target.matrix.shape
            _here.stores.append(lambda: target.matrix.copy_(torch.from_numpy(source.data[:rows, :columns].copy()).to(target.matrix.dtype)))
        else:
            _here.block.later(lambda: self.loaded(source, target, tma_bar_ptr))

    def loaded(self, source: Any, target: Slot, barrier: Any) -> None:
        found = source.matrix.float().numpy()
        target.data[...] = 0.0
        target.data[: found.shape[0], : found.shape[1]] = found
        barrier.receive(target.data.size * 2)

    def load_sums(self, source: Pointer, target: Pointer, count: int, barrier: Any) -> None:
        first, into = int(spread(source.offset)[0]), int(spread(target.offset)[0])

        def job() -> None:
            target.memory.flat[into : into + count] = source.memory.flat[first : first + count]
            barrier.receive(4 * count)

        _here.block.later(job)

    def add_floats(self, source: Pointer, target: Pointer, count: int) -> None:
        first, into = int(spread(source.offset)[0]), int(spread(target.offset)[0])
        self.must_be_public(source.memory, first // count)  # a warpgroup's part
        assert 0 <= into and into + count <= len(target.memory.flat)
        if self.plan.deterministic:
            assert _here.turn == "its own", "an addition without a turn"
            _here.turn = "added"
        target.memory.flat[into : into + count] += source.memory.flat[first : first + count]

    def add_registers(self, target: Pointer, fragment: Registers) -> None:
        assert not self.plan.deterministic, "an addition without a turn"
        assert not fragment.busy, "a product still writes what is added"
        first = spread(target.offset).astype(np.int64)
        for i in range(len(fragment.items)):
            np.add.at(target.memory.flat, first + 512 * (i // 4) + i % 4, spread(fragment.items[i].value).astype(np.float32))

    def clear_floats(self, target: Pointer, count: int, thread: Any) -> None:
        first = int(spread(target.offset)[0])
        assert first + count <= len(target.memory.flat)
        target.memory.flat[first : first + count] = 0.0

    def wait_for_turn(self, turns: Memory, block: Any, part: Any, rank: Any) -> None:
        """Where blocks of threads run one after the other, in the order of their tiles, nobody has to wait."""
        place = 2 * int(block) + int(part)
        if self.at_once > 1:
            time.sleep(_here.block.random.random() * 4e-3)
            _here.block.until(lambda: turns.flat[place] >= int(rank), "its turn")
        assert turns.flat[place] == int(rank), "an addition out of turn"
        _here.turn = "its own"

    def end_turn(self, turns: Memory, block: Any, part: Any) -> None:
        assert _here.turn == "added", "a turn ends before anything was added"
        _here.turn = ""
        turns.flat[2 * int(block) + int(part)] += 1
        for running in list(self.running):
            with running.changed:
                running.changed.notify_all()

    def wait_stores(self, count: int, read: bool) -> None:
        while len(_here.stores) > count:
            _here.stores.pop(0)()

    # --- what generic stores wrote ---

    def written(self, memory: Any, stage: int) -> None:
        with _here.block.changed:
            _here.block.dirty.add((id(memory), stage, _here.warp))

    def publish_shared(self) -> None:
        with _here.block.changed:
            _here.block.dirty = {each for each in _here.block.dirty if each[2] != _here.warp}

    def must_be_public(self, memory: Any, stage: int) -> None:
        with _here.block.changed:
            assert not any(each[:2] == (id(memory), stage) for each in _here.block.dirty), "shared memory is read before its writer's fence"

    # --- products ---

    def side(self, operand: Any, stage: int) -> np.ndarray:
        buffer = operand.buffer if isinstance(operand, Flipped) else operand
        self.must_be_public(buffer.buffer if isinstance(buffer, Columns) else buffer, int(stage))
        data = buffer.data[int(stage)]
        return data.T if isinstance(operand, Flipped) else data

    def begin(
        self, product: TiledProduct, out: Registers, left: Any, left_stage: Any, right: Any, right_stage: Any, is_first: bool
    ) -> None:
        whole, other = self.side(left, left_stage), self.side(right, right_stage)
        row, column, count = product.part(whole.shape[0], other.shape[0])
        a, b = whole[row : row + 16], other[column : column + count]
        self.run(out, lambda: [a, b], a @ b.T, is_first, [])

    def begin_from_registers(self, product: TiledProduct, out: Registers, left: Fragment, right: Any, right_stage: Any) -> None:
        assert product.by_rows, "registers hold a warpgroup's own rows"
        b = self.side(right, right_stage)
        a = np.zeros((16, b.shape[1]), np.float32)
        for i in range(len(left.items)):
            a[position(i)] = left.items[i].value
        self.run(out, lambda: [b], a @ b.T, False, [left])

    def run(self, out: Registers, operands: Any, values: np.ndarray, is_first: bool, held: Sequence[Registers]) -> None:
        assert len(out.items) * LANES == values.size, "a fragment of another size"

        def finish() -> None:
            for i in range(len(out.items)):
                before = 0.0 if is_first else out.items[i].value
                out.items[i] = Float32(before + values[position(i)])

        _here.products.append(Running(out, operands, finish, held))

    def wait_group(self, count: int) -> None:
        while len(_here.products) > count:
            _here.products.pop(0).end()

    def store_scores(
        self, product: TiledProduct, packed: Fragment, fragment: Any, shared: Any, stage: Any, thread: Any, is_flipped: bool = False
    ) -> None:
        assert isinstance(shared, Flipped) == is_flipped
        buffer = shared.buffer if is_flipped else shared
        data = buffer.data[int(stage)]
        self.put(product, [packed[i].value for i in range(len(packed.items))], data.T if is_flipped else data)
        self.written(buffer, int(stage))

    def put(self, product: TiledProduct, values: Sequence[np.ndarray], data: np.ndarray) -> None:
        first_row, first_column, _ = product.part(*data.shape)
        for i, value in enumerate(values):
            row, column = position(i)
            data[first_row + row, first_column + column] = value

    def stage_rows(
        self,
        product: TiledProduct,
        fragment: Registers,
        factor: Any,
        shared: Slot | Columns,
        thread: Any,
        dtype: Any,
        is_flipped: bool = False,
    ) -> None:
        values = [self.rounded((fragment[i] * factor).value) for i in range(len(fragment.items))]
        self.put(product, values, shared.data.T if is_flipped else shared.data)
        self.written(shared.buffer, 0)
        self.publish_shared()

    def pair_of(self, sums: Memory, quad: Any, n: Any, which: int, stage: Any) -> tuple[Num, Num]:
        first = 2 * quad + 8 * n + self.tile.rows * which + (2 * self.tile.rows + 4) * stage
        return sums.load(first), sums.load(first + 1)

    def row_product(self, x: Any, y: Any, batch: Any, head: Any, row: Any, part: Any, parts: int, dim: int) -> Num:
        b, h, rows = int(batch), int(head), spread(row)
        found = [float((x.values[b, h, r].float() * y.values[b, h, r].float()).sum()) for r in rows]
        return Float32(np.array(found))


class _Name(str):
    outer = property(lambda self: self)
    inner = property(lambda self: self)


def simulate_backward(
    text: str,
    plan: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    scale: float,
    tensors: Sequence[torch.Tensor] = (),
    scalars: Sequence[int | float] = (),
    walk: Any = None,
    *,
    section: int = 2,
    blocks_of_threads: int = 2,
    seed: int = 0,
    at_once: int = 1,
    staged: Sequence[Any] = (),
    gradients: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v, and of the captured tensors at the places `gradients`, by a generated module's kernels, warp by warp.

    `staged`: `BackwardKernel.staged`. `at_once`: so many blocks of threads of the main kernel run side by side, and begin in any order;
    otherwise one after the other.
    """

    def rounded(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(np.ascontiguousarray(x)).to(q.dtype).float().numpy()

    machine = Machine(plan, rounded, staged)
    t = plan.backward
    arch = {
        **vars(stand_in.arch),
        "thread_idx": lambda: (Int32(LANES * _here.warp + np.arange(LANES)), 0, 0),
        "block_idx": lambda: (Int32(_here.block.number), 0, 0),
        "grid_dim": lambda: (Int32(_here.block.grid), 0, 0),
        "warp_idx": lambda: Int32(_here.warp),
        "setmaxregister_decrease": lambda n: None,
        "setmaxregister_increase": lambda n: None,
        "cp_async_bulk_commit_group": lambda: None,
        "cp_async_bulk_wait_group": machine.wait_stores,
        "barrier": lambda barrier_id, number_of_threads: _here.block.named_barrier(int(barrier_id), number_of_threads, True),
        "barrier_arrive": lambda barrier_id, number_of_threads: _here.block.named_barrier(int(barrier_id), number_of_threads, False),
        "sync_threads": lambda: _here.block.named_barrier(0, LANES * _here.block.warps, True),
        "elect_one": _elected,
    }

    def make_rmem_tensor(size: int, kind: type[Num]) -> Fragment:
        return Fragment(size, kind)

    cute = SimpleNamespace(
        **{
            **vars(stand_in.cute),
            "arch": SimpleNamespace(**arch),
            "copy": machine.copy,
            "local_tile": lambda view, box, where: Boxes(view.matrix[:, int(where[1]) * box[1] :][:, : box[1]], box[0]),
            "make_rmem_tensor": make_rmem_tensor,
            "make_tensor": make_tensor,
            "make_layout": Layout,
            "autovec_copy": autovec_copy,
        }
    )
    library = tile_library(cute=cute)
    tiles = SimpleNamespace(
        **{
            **vars(library),
            "stage_bytes": machine.stage_bytes,
            "load_pipeline": machine.load_pipeline,
            "queue_pipeline": machine.queue_pipeline,
            "copy_pair": lambda atom, shared, boxes: (shared, boxes),
            "filling": lambda stages: State(stages, 1),
            "reading": lambda stages: State(stages, 0),
            "weights_fragment": lambda scores, dtype: Fragment(len(scores.items), Float32, rounded),
            "group_barrier": lambda group: _here.block.named_barrier(8 + int(group), 128, True),
        }
    )
    hardware = {
        name: getattr(machine, name)
        for name in (
            "load_sums add_floats add_registers clear_floats wait_for_turn end_turn publish_shared begin begin_from_registers "
            "store_scores stage_rows pair_of row_product"
        ).split()
    }
    hardware |= {
        "flipped": Flipped,
        "dims_of": Columns,
        "same_registers": _same_registers,
        "recast_buffer": machine.rows_over,
    }
    of_tiles = {name: getattr(tiles, name) for name in ("choose", "fetch", "record_of")}
    steps = stand_in.library_of("cute_backward_tiles", {"cute": cute, **of_tiles}, hardware)
    names = {
        "cute": cute,
        "tiles": tiles,
        "steps": steps,
        "warpgroup": SimpleNamespace(wait_group=machine.wait_group),
        "pipeline": SimpleNamespace(pipeline_init_arrive=lambda: None, pipeline_init_wait=arch["sync_threads"]),
        "cpasync": SimpleNamespace(prefetch_descriptor=lambda atom: None),
        "SmemAllocator": lambda: SimpleNamespace(allocate=lambda Shared: machine.storage()),
        "Launcher": lambda *args, **_: None,
        "tensor": lambda *args, **_: None,
        "number": lambda *args, **_: None,
        "torch": torch,
    }
    module = executed(text, names)
    batch, heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1:3]
    blocks = -(-q_len // t.rows)
    sums = Memory(np.full(batch * heads * blocks * (2 * t.rows + 4), np.nan, np.float32))
    dq_sums = Memory(np.full(batch * heads * blocks * t.rows * plan.padded_dim, np.nan, np.float32))
    dq, dk, dv = (torch.full(x.shape, float("nan"), dtype=q.dtype) for x in (q, k, v))
    key_blocks = -(-kv_len // t.columns)
    summed = batch * key_blocks * (heads if plan.deterministic else kv_heads)
    of_tile = t.columns * (plan.padded_dim + plan.padded_dim_v)
    key_sums = Memory(np.full(summed * of_tile, np.nan if plan.deterministic else 0.0, np.float32))

    def launch(name: str, count: int, warps: int, first_group: int, *arguments: Any) -> None:
        kernel = module[f"{name}_kernel"]
        machine.at_once = at_once if name == "backward" else 1
        numbers = list(range(count))
        if machine.at_once > 1:
            random.Random(seed).shuffle(numbers)
        with ThreadPoolExecutor(machine.at_once) as pool:
            jobs = [pool.submit(_run, machine, name, kernel, n, count, warps, first_group, seed + n, arguments) for n in numbers]
            try:
                for job in jobs:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def whole(x: torch.Tensor) -> Any:
        return SimpleNamespace(shape=[Int32(n) for n in x.shape], values=x)

    flat = [Memory(x.contiguous().view(-1).float().numpy()) for x in (lse, lse if dlse is None else dlse)]
    launch("row_sums", batch * heads * blocks, 4, 0, whole(out), whole(dout), *flat, Int32(0 if dlse is None else 1), sums, dq_sums)
    assert not np.isnan(sums.flat.reshape(-1, 2 * t.rows + 4)[:, : 2 * t.rows + 1]).any(), "a row has no sums"
    arguments: list[Any] = []
    if walk is not None:
        arguments += [captured_memory(x) for x in (walk.rows, walk.partial, walk.full, walk.order)]
    counter = torch.zeros(1, dtype=torch.int32)
    if plan.counts_tiles:
        arguments.append(captured_memory(counter))
    if plan.deterministic:
        arguments.append(captured_memory(torch.zeros(batch * heads * blocks, 2, dtype=torch.int32)))
        turns = arguments[-1]
    if plan.has_ranks:
        ranks = torch.full((*walk.rows.shape[:3], blocks), -1, dtype=torch.int32)
        launch("ranks", walk.rows.shape[:2].numel() * -(-blocks // 32), 32, 0, *arguments[:4], captured_memory(ranks))
        visits = visits_of(walk, blocks)
        assert torch.equal(ranks, visits.cumsum(2) - visits), "how many come before"
        arguments.append(captured_memory(ranks))
    captured = [torch.zeros(tensors[slot].shape) for slot in gradients]
    arguments += [captured_memory(x) for x in captured]
    arguments += [captured_memory(x if x.numel() else x.new_zeros((1,) * x.dim())) for x in tensors]
    arguments += [Float32(scale), Int32(section)]
    arguments += [Float32(s) if isinstance(s, float) else Int32(s) for s in scalars]
    stored = [each for x in (dk, dv) for each in ("store", Global(x))]
    given = [each for x in (q, k, v, dout) for each in ("load", Global(x))] + ([key_sums] if plan.by_head else stored)
    layouts = [_Name(name) for name in ("q", "dout", "k", "v", "scores")]
    of_stored = [_Name("dk"), _Name("dv")]
    tiles_in_all = batch * (heads if plan.by_head else kv_heads) * key_blocks
    launch(
        "backward",
        tiles_in_all if not t.queue else min(tiles_in_all, blocks_of_threads),
        12,
        1,
        *given,
        sums,
        dq_sums,
        *arguments,
        *(product for product in machine.products if not (plan.by_head and product.is_own)),
        *layouts,
        *(() if plan.by_head else of_stored),
        None,
    )
    if plan.deterministic:
        had = visits.sum(2).expand(batch, heads, blocks) if plan.has_ranks else torch.full((batch, heads, blocks), -(-kv_len // t.columns))
        assert torch.equal(torch.from_numpy(turns.flat).view(batch, heads, blocks, 2), had[..., None].expand(-1, -1, -1, 2).int()), (
            "each block of keys has had its turn"
        )
    assert counter.item() == 0, "the next launch begins with a counter of 0"
    of_queries = [product for product in machine.products if product.name in ("dq", "rest")]
    launch("convert", batch * heads * blocks, 8, 0, "store", Global(dq), dq_sums, Float32(scale), *of_queries, _Name("dq"), None)
    if plan.by_head:
        of_keys = [product for product in machine.products if product.is_own]
        count = batch * kv_heads * key_blocks
        launch("convert_keys", count, 8, 0, *stored, key_sums, Float32(scale), *of_keys, *of_stored, None)
    return dq, dk, dv, *captured


def visits_of(walk: Any, blocks: int) -> torch.Tensor:
    """Whether a block of keys visits a block of queries: int32 [B or 1, Hq or 1, blocks of keys as tiles come, blocks of queries]."""
    visits = torch.zeros((*walk.rows.shape[:3], blocks), dtype=torch.int32)
    for b, h, place in np.ndindex(*walk.rows.shape[:3]):
        partial, partial_count, full, full_count = walk.rows[b, h, walk.order[place]].tolist()
        visits[b, h, place, walk.partial[partial : partial + partial_count].long()] = 1
        for start, stop in walk.full[full : full + full_count].tolist():
            visits[b, h, place, start:stop] = 1
    return visits


@contextmanager
def _elected() -> Iterator[None]:
    """One lane of the warp."""
    before = stand_in.lanes_on()
    _here.mask = before & (np.cumsum(before) == 1)
    try:
        yield
    finally:
        _here.mask = before


def _same_registers(fragment: Fragment, size: int) -> Fragment:
    assert len(fragment.items) == size
    return fragment


def _run(
    machine: Machine, name: str, kernel: Any, number: int, grid: int, warps: int, first_group: int, seed: int, arguments: Sequence[Any]
) -> None:
    block: Any = Block(number, grid, 2, seed)
    block.dirty, block.kernel, block.first_group, block.warps = set(), name, first_group, warps
    machine.running.append(block)

    def run_warp(warp: int) -> None:
        _here.block, _here.warp, _here.products, _here.stores, _here.turn = block, warp, [], [], ""
        try:
            with np.errstate(all="ignore"):
                kernel(*arguments)
            assert not _here.products, "a product was never waited for"
            assert not _here.stores, "shared memory is gone before it was stored"
            assert not _here.turn, "a turn that never ends"
        except BaseException as error:
            for running in list(machine.running):  # those that run beside it need not wait any longer
                with running.changed:
                    if running.failure is None or isinstance(running.failure, Stuck):
                        running.failure = error
                    running.changed.notify_all()

    engine = threading.Thread(target=block.copy_engine, daemon=True)
    threads = [threading.Thread(target=run_warp, args=(w,), daemon=True) for w in range(warps)]
    for thread in (engine, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    with block.changed:
        block.is_over = True
        block.changed.notify_all()
    engine.join()
    machine.running.remove(block)
    if block.failure is not None:
        raise block.failure
