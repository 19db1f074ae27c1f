"""Generated kernels that map the blocks of a mask, on Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

import os
from collections import OrderedDict

import pytest
import torch

import flexc
from flexc import block_kernels, block_launches, block_tables, map_making
from flexc.codegen.triton.blocks import plan_blocks
from flexc.codegen.triton.blocks_program import Table
from flexc.errors import UnsupportedError
from flexc.ir.graph import FLOAT32, INT64, Graph, Node, ScalarInput, scalar
from flexc.ir.ops import cast
from flexc.map_making import MapSizes
from flexc.runtime.triton_launch import OfKind
from tests import block_map_cases
from tests.block_map_cases import CASES, failure_of
from tests.contract.interpreter import interpreting_workers
from tests.sparsity.graphs import batch, both, causal, graph_of, kv_idx, op, q_idx, read


@pytest.fixture(scope="module")
def failures():
    """(function, arguments) → what failed in a process whose Triton interprets."""
    sharing = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = max(1, (os.cpu_count() or 1) // sharing)
    pool = interpreting_workers(workers)
    yield lambda *call: pool.submit(failure_of, *call).result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.interpret
@pytest.mark.parametrize(("exact", "coarse"), [(False, True), (True, False)], ids=["bounds, squares first", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_walks_agree_with_brute_force(name, exact, coarse, failures):
    failure = failures("check", name, exact, coarse)
    assert not failure, f"\n{failure}"


@pytest.mark.interpret
@pytest.mark.slow
def test_walks_of_random_masks_agree_with_brute_force(failures):
    failure = failures("random_masks", 40)
    assert not failure, f"\n{failure}"


PROMISES = """
    overflow run_time_numbers_compile_nothing rows_of_very_many_blocks tables tables_that_are_written_anew attention_on_maps_made_by_kernels
    views_of_maps_made_by_kernels columns_of_rows_that_are_old masks_without_a_kernel closer_looks_are_limited
""".split()


@pytest.mark.interpret
@pytest.mark.parametrize("function", PROMISES)
def test_promises(function, failures):
    failure = failures(function)
    assert not failure, f"\n{failure}"


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(block_map_cases, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(map_making, "KERNEL_DEVICES", map_making.KERNEL_DEVICES)  # the promises set it
    monkeypatch.setattr(block_launches, "_COARSE_BLOCKS", block_launches._COARSE_BLOCKS)


@pytest.mark.gpu
@pytest.mark.parametrize(("exact", "coarse"), [(False, True), (True, False)], ids=["bounds, squares first", "exact"])
@pytest.mark.parametrize("name", CASES)
def test_walks_agree_with_brute_force_on_a_gpu(name, exact, coarse, on_gpu):
    block_map_cases.check(name, exact, coarse)


@pytest.mark.gpu
@pytest.mark.parametrize("function", PROMISES)
def test_promises_on_a_gpu(function, on_gpu):
    getattr(block_map_cases, function)()


def build(graph: Graph, q_len: int, kv_len: int, tensors: tuple[torch.Tensor, ...] = ()) -> block_kernels.DeviceMap:
    plan = block_kernels.plan_on_gpu(graph, MapSizes(q_len, kv_len, 1, 1, (8, 8)), tensors=tensors, device=torch.device("cpu"))
    return plan.map(tensors, ())


class Launches:
    """Stands in for a generated module: remembers which kernels are launched, and on what."""

    def __init__(self, text: str = ""):
        self.made: list[tuple[str, tuple]] = []
        self.LAUNCH = dict.fromkeys(
            ["rows_kernel", "columns_kernel", "order_kernel", "table_kernel", "cells_kernel", "levels_kernel"], (1, 1)
        )

    def __getattr__(self, name: str):
        launches = self

        class Kernel:
            def __getitem__(self, grid):
                return lambda *arguments, **options: launches.made.append((name, arguments))

        return Kernel()

    def take(self) -> list[str]:
        """The kernels launched since the last call."""
        names, self.made = [name for name, _ in self.made], []
        return names


def test_nothing_waits_for_the_device_and_tables_are_made_once(monkeypatch):
    """Tensors without data cannot be looked at. Tables belong to a version of their tensor."""
    launches = Launches()
    monkeypatch.setattr(block_kernels, "load_module", lambda text, path: launches)
    monkeypatch.setattr(block_kernels, "_builders", OrderedDict())
    monkeypatch.setattr(block_tables, "_loaded", [block_tables.Shared(launches)])
    ids, pairs = torch.empty((2, 2**20), dtype=torch.int64, device="meta"), torch.empty((64, 64), dtype=torch.bool, device="meta")
    documents = op("eq", read(0, ids, batch, q_idx), read(0, ids, batch, kv_idx))
    graph = graph_of(op("and", documents, read(1, pairs, op("floordiv", q_idx, 2**14), op("floordiv", kv_idx, 2**14))), (ids, pairs))

    def build() -> block_kernels.DeviceMap:
        sizes = MapSizes(2**20, 2**20, batch=2, heads=4, block=(128, 128))
        plan = block_kernels.plan_on_gpu(graph, sizes, tensors=(ids, pairs), device=torch.device("meta"))
        return plan.map((ids, pairs), ())

    found = build()
    assert launches.take() == []
    assert found.shape == (2, 1, 8192, 8192)
    walk = found.row_walk()
    assert launches.take() == ["cells_kernel", "levels_kernel", "rows_kernel", "order_kernel"]
    assert walk.rows.shape == (2, 1, 8192, 4) and walk.order.shape == (8192,)
    size_bytes = sum(x.numel() * x.element_size() for x in (walk.rows, walk.partial, walk.full, walk.order))
    assert size_bytes < 2 * 6 * 2**20, "6 MiB for a million tokens of one sequence"
    assert found.column_walk() is found.column_walk()
    assert launches.take() == ["columns_kernel", "order_kernel"]
    build().row_walk()
    assert launches.take() == ["rows_kernel", "order_kernel"]
    ids.add_(1)
    build().row_walk()
    assert launches.take() == ["cells_kernel", "levels_kernel", "rows_kernel", "order_kernel"]


def test_few_block_rows_are_ordered_by_the_kernel_that_writes_their_walk(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(block_kernels, "load_module", lambda text, path: launches)
    monkeypatch.setattr(block_kernels, "_builders", OrderedDict())
    monkeypatch.setattr(block_tables, "_loaded", [block_tables.Shared(launches)])
    monkeypatch.setattr(block_launches, "_turns", {})

    def names(mask: Node, q_len: int) -> list[str]:
        sizes = MapSizes(q_len, 64, batch=2, heads=1, block=(8, 8))
        plan = block_kernels.plan_on_gpu(graph_of(mask), sizes, tensors=(), device=torch.device("meta"))
        plan.map((), ()).row_walk()
        return launches.take()

    assert names(causal, 8 * 128) == ["rows_kernel"] and len(block_launches._turns) == 1
    assert names(causal, 8 * 129) == ["rows_kernel", "order_kernel"]
    by_batch = op("le", kv_idx, batch)
    assert names(by_batch, 64) == ["rows_kernel", "order_kernel"], "the work of a row is summed through the batch"
    monkeypatch.setattr(block_launches, "is_capturing", lambda: True)
    block_launches._turns.clear()
    assert names(causal, 64) == ["rows_kernel"] and not block_launches._turns, "a graph has a count of its own"


def test_the_table_of_a_short_tensor_is_made_by_one_launch(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(block_tables, "_loaded", [block_tables.Shared(launches)])
    for length, cell, names in (
        (2**14, 128, ["table_kernel"]),
        (2**14 + 1, 128, ["cells_kernel", "levels_kernel"]),
        (2**13, 1, ["table_kernel"]),
        (2**13, 96, ["table_kernel"]),
        (2**14, 96, ["cells_kernel", "levels_kernel"]),  # cells are read as if they were 128 long
    ):
        tensor = torch.empty((3, length), dtype=torch.int32, device="meta")
        assert block_tables.sparse_table(tensor, 1, cell).lo.shape == ((-(-length // cell)).bit_length(), 3, -(-length // cell))
        assert launches.take() == names, (length, cell)


@pytest.mark.parametrize(
    ("shape", "dtype", "dim", "names"),
    [
        ((300,), torch.int32, 0, ["table_kernel"]),
        ((3, 2**15), torch.float32, 1, ["cells_kernel", "levels_kernel"]),
        ((2, 3, 40), torch.bool, 2, ["table_kernel"]),  # copied into rows for the kernel
    ],
    ids=["short", "long", "copied"],
)
def test_a_table_is_written_anew_where_it_lies(shape, dtype, dim, names, monkeypatch):
    """From where the tensor lies by then. Each stream has its own: what another one launched may not have read it yet."""
    launches, stream = Launches(), 1
    monkeypatch.setattr(block_tables, "_loaded", [block_tables.Shared(launches)])
    tensor, table = torch.zeros(shape, dtype=dtype), Table(0, (dim,), 1, "t", str(dtype).removeprefix("torch."))

    def launched() -> tuple[object, list[str], int, tuple]:
        """The table, what was launched, the address that was read, and those that were written."""
        found, made = block_tables.table_of(tensor, table, stream), launches.made.copy()
        ends = {tuple(x.data_ptr() for x in arguments if isinstance(x, torch.Tensor))[-2:] for _, arguments in made}
        return found, launches.take(), made[0][1][0].data_ptr() if made else 0, *ends

    first, found, address, ends = launched()
    assert found == names and ends == (first.lo.data_ptr(), first.hi.data_ptr())
    assert launched() == (first, [], 0)
    for _ in range(2):
        tensor.add_(1) if dtype != torch.bool else tensor.logical_not_()
        assert launched()[::3] == (first, ends)
    kept = tensor.untyped_storage()
    tensor.resize_(2**22).resize_(shape)
    assert tensor.untyped_storage() is kept
    again = launched()
    assert again[:2] == (first, names) and again[3] == ends and (dim == 2 or again[2] == tensor.data_ptr() != address)
    stream = 2
    second, found, _, others = launched()
    assert second is not first and found == names and not {*ends} & {*others}
    stream = 1
    assert launched() == (first, [], 0)


def test_addresses_are_those_of_the_tensors_that_triton_is_given(monkeypatch):
    """At the first launch and at those that are made again, for tensors and tables that have moved meanwhile."""
    launches, seen = Launches(), []

    def record(self, grid, device, arguments, tensors):
        with_tensors = tensors()
        assert len(with_tensors) == len(arguments)
        for given, expected in zip(arguments, with_tensors):
            is_pointer = isinstance(expected, torch.Tensor)
            assert given == (expected.data_ptr() if is_pointer else expected)
        seen.append(sum(isinstance(each, torch.Tensor) for each in with_tensors))

    monkeypatch.setattr(block_kernels, "load_module", lambda text, path: launches)
    monkeypatch.setattr(block_kernels, "_builders", OrderedDict())
    monkeypatch.setattr(block_tables, "_loaded", [block_tables.Shared(launches)])
    monkeypatch.setattr(OfKind, "__call__", record)
    kept = []
    for number in range(3):
        ids, ends = torch.arange(2**15) // 100, torch.arange(7) * number
        kept += [ids, ends]
        documents = op("eq", read(0, ids, q_idx), read(0, ids, kv_idx))
        graph = graph_of(both(documents, op("lt", kv_idx, read(1, ends, batch))), (ids, ends))
        for _ in range(2):
            build(graph, 2**15, 2**15, (ids, ends)).row_walk()
            ids.add_(1)
        ids.resize_(2**22).resize_(2**15)
        build(graph, 2**15, 2**15, (ids, ends)).row_walk()
    assert seen == [3, 2, 10, 2] * 9  # cells, levels, rows, their order


def test_cells_of_a_table_are_as_long_as_blocks_where_blocks_begin_and_end_with_them():
    """A short table keeps its elements apart only for reads that are shifted."""

    def cells(at):
        ids = torch.zeros(1000, dtype=torch.int64)
        graph = graph_of(op("eq", read(0, ids, at), 0), (ids,))
        return plan_blocks(graph, (128, 64), 64, [1000], [False], True, False).cells

    assert cells(q_idx) == cells(kv_idx) == (((0, (0,)), 64),)
    assert cells(q_idx - 3) == cells(op("floordiv", q_idx, 2)) == (((0, (0,)), 1),)


def test_places_are_as_many_as_there_can_be_within_limits():
    places = block_launches.places
    assert places(1, 1, 1) == (1, 1)
    assert places(64, 64, 64) == (64, 32)
    assert places(724, 724, 724) == (724, 362), "all that can be"
    assert places(1024, 1024, 1024) == (614, 204)
    assert places(8192, 8192, 8192) == (96, 32)
    assert places(16384, 16384, 16384) == (48, 16)
    assert places(32 * 256, 256, 256) == (256, 128), "of each head"
    assert places(2**16, 256, 256) == (153, 51), "of very many heads"
    listed, runs = places(2**22, 8192, 8192)
    assert 2**22 * (listed + 2 * runs) <= 2**26 and listed >= 1 and runs >= 1
    assert places(64, 64, 64, (6, None)) == (6, 32) and places(64, 64, 64, (None, 3)) == (64, 3)


@pytest.mark.parametrize("q_len, kv_len", [(0, 8), (8, 0), (2**24, 8)])
def test_lengths_that_are_refused(q_len, kv_len):
    with pytest.raises(UnsupportedError, match="a generated block map takes from 1 to 16777215 tokens"):
        build(graph_of(causal), q_len, kv_len)


def test_more_rows_of_blocks_than_int32_counts_are_refused():
    with pytest.raises(UnsupportedError, match="at most 268435456 rows and columns of blocks, got \\(70000, 1, 8, 65536\\)"):
        sizes = MapSizes(64, 2**19, batch=70_000, heads=1, block=(8, 8))
        block_kernels.plan_on_gpu(graph_of(op("lt", kv_idx, batch)), sizes, tensors=(), device=torch.device("cpu"))


def test_an_empty_tensor_is_refused():
    table = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="captured tensors with elements, got an empty one"):
        build(graph_of(op("eq", read(0, table, kv_idx), 0), (table,)), 8, 8, (table,))


def test_a_mask_that_cannot_be_printed_is_tried_once(monkeypatch, tmp_path):
    tries = []

    def refuse(*_):
        tries.append(1)
        raise UnsupportedError("triton: no such function")

    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))  # what was printed is not printed again
    monkeypatch.setattr(block_kernels, "emit_blocks", refuse)
    monkeypatch.setattr(block_kernels, "_builders", OrderedDict())
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="no such function"):
            build(graph_of(causal), 8, 8)
    assert len(tries) == 1


def test_the_log_has_modules_of_block_maps_as_a_kind_of_their_own(monkeypatch, tmp_path):
    """Not among the sources of attention; and found on the disk the second time."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path))
    flexc.compile_log(reset=True)
    for _ in range(2):
        monkeypatch.setattr(block_kernels, "_builders", OrderedDict())
        build(graph_of(causal), 8, 8)
    log = flexc.compile_log()
    assert [entry.loaded for entry in log.of("map") if "tables" not in entry.variant] == [False, True] and not log.of("source")


def test_integers_that_need_64_bits_are_arguments_of_another_kind(monkeypatch):
    """Also beside a float, which is of no integer kind at all."""
    launches = Launches()
    monkeypatch.setattr(block_kernels, "load_module", lambda text, path: launches)
    monkeypatch.setattr(block_kernels, "_builders", OrderedDict())
    monkeypatch.setattr(block_tables, "_loaded", [block_tables.Shared(launches)])
    mask = both(op("lt", cast(q_idx, FLOAT32), scalar(0, FLOAT32)), op("lt", cast(kv_idx, INT64), scalar(1, INT64)))
    graph = Graph((("mask", mask),), (), (ScalarInput("x", FLOAT32), ScalarInput("n", INT64)))
    kinds = []
    for number in (5, 6, 2**40):
        plan = block_kernels.plan_on_gpu(graph, MapSizes(64, 64, 1, 1, (8, 8)), tensors=(), device=torch.device("meta"))
        plan.map((), (0.5, number)).row_walk()
        (compiled,) = next(iter(block_kernels._builders.values()))._by_plan.values()
        kinds.append(len(compiled._prepared))
    assert kinds == [1, 1, 2] and len({prepared.arguments.kind for prepared in compiled._prepared.values()}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["bounds", "exact"])
def test_kernels_compile_for_hopper(exact):
    ids = torch.zeros(8, dtype=torch.int64)
    mask = op("and", op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), op("ge", q_idx, kv_idx))
    compiled = block_kernels.compile_for(graph_of(mask, (ids,)), (128, 128), 90, exact=exact)
    assert [kernel.name for kernel in compiled.kernels] == ["rows_kernel", "columns_kernel"]
    for kernel in compiled.kernels:
        assert kernel.spill_bytes <= 64 * exact, kernel.name


@pytest.mark.slow
def test_blocks_of_any_length_are_evaluated_in_as_many_registers():
    ids = torch.zeros(8, dtype=torch.int64)
    graph = graph_of(op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), (ids,))
    long, short = (block_kernels.compile_for(graph, block, 90, exact=True).kernels[0] for block in ((64, 2048), (128, 128)))
    assert long.registers <= short.registers + 8 and long.spill_bytes <= 64
