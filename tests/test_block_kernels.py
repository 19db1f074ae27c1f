"""Generated kernels that map the blocks of a mask, on Triton's interpreter and compiled for Hopper."""

from __future__ import annotations

import multiprocessing
import os
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from flexc import block_kernels
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph
from tests import block_map_cases
from tests.block_map_cases import CASES, failure_of
from tests.contract.interpreter import become_interpreter
from tests.sparsity.graphs import batch, causal, graph_of, kv_idx, op, q_idx, read


@pytest.fixture(scope="module")
def failures():
    """(function, arguments) → what failed in a process whose Triton interprets."""
    sharing = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = max(1, (os.cpu_count() or 1) // sharing)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=become_interpreter)
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


PROMISES = ["overflow", "run_time_numbers_compile_nothing", "rows_of_very_many_blocks", "tables", "attention_on_maps_made_by_kernels"]


@pytest.mark.interpret
@pytest.mark.parametrize("function", PROMISES)
def test_promises(function, failures):
    failure = failures(function)
    assert not failure, f"\n{failure}"


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(block_map_cases, "DEVICE", torch.device("cuda"))
    monkeypatch.setenv("FLEXC_DEVICE_MAPS", "1")


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
    return block_kernels.build_on_gpu(
        graph, q_len, kv_len, batch=1, heads=1, block=(8, 8), tensors=tensors, scalars=(), device=torch.device("cpu")
    )


class Launches:
    """Stands in for a generated module: remembers which kernels are launched, and on what."""

    def __init__(self, text: str = ""):
        self.made: list[tuple[str, tuple]] = []
        self.LAUNCH = dict.fromkeys(["rows_kernel", "columns_kernel", "order_kernel", "cells_kernel", "levels_kernel"], (1, 1))

    def __getattr__(self, name: str):
        launches = self

        class Kernel:
            def __getitem__(self, grid):
                return lambda *arguments, **options: launches.made.append((name, grid))

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
    monkeypatch.setattr(block_kernels, "_tables_module", lambda: launches)
    ids, pairs = torch.empty((2, 2**20), dtype=torch.int64, device="meta"), torch.empty((64, 64), dtype=torch.bool, device="meta")
    documents = op("eq", read(0, ids, batch, q_idx), read(0, ids, batch, kv_idx))
    graph = graph_of(op("and", documents, read(1, pairs, op("floordiv", q_idx, 2**14), op("floordiv", kv_idx, 2**14))), (ids, pairs))

    def build() -> block_kernels.DeviceMap:
        return block_kernels.build_on_gpu(
            graph,
            2**20,
            2**20,
            batch=2,
            heads=4,
            block=(128, 128),
            tensors=(ids, pairs),
            scalars=(),
            device=torch.device("meta"),
        )

    found = build()
    assert launches.take() == ["cells_kernel", "levels_kernel", "rows_kernel", "order_kernel"]
    assert found.shape == (2, 1, 8192, 8192)
    walk = found.row_walk()
    assert walk.rows.shape == (2, 1, 8192, 4) and walk.order.shape == (8192,)
    size_bytes = sum(x.numel() * x.element_size() for x in (walk.rows, walk.partial, walk.full, walk.order))
    assert size_bytes < 2 * 6 * 2**20, "6 MiB for a million tokens of one sequence"
    assert found.column_walk() is found.column_walk()
    assert launches.take() == ["columns_kernel", "order_kernel"]
    build()
    assert launches.take() == ["rows_kernel", "order_kernel"]
    ids.add_(1)
    build()
    assert launches.take() == ["cells_kernel", "levels_kernel", "rows_kernel", "order_kernel"]


def test_places_are_as_many_as_there_can_be_within_limits():
    assert block_kernels._places(64, 64, (96, 32)) == (64, 32)
    assert block_kernels._places(8192, 8192, (96, 32)) == (96, 32)
    assert block_kernels._places(1, 1, (96, 32)) == (1, 1)
    listed, runs = block_kernels._places(2**22, 8192, (96, 32))
    assert 2**22 * (listed + 2 * runs) <= 2**26 and listed >= 1 and runs >= 1


@pytest.mark.parametrize("q_len, kv_len", [(0, 8), (8, 0), (2**24, 8)])
def test_lengths_that_are_refused(q_len, kv_len):
    with pytest.raises(UnsupportedError, match="a generated block map takes from 1 to 16777215 tokens"):
        build(graph_of(causal), q_len, kv_len)


def test_an_empty_tensor_is_refused():
    table = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="captured tensors with elements, got an empty one"):
        build(graph_of(op("eq", read(0, table, kv_idx), 0), (table,)), 8, 8, (table,))


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True], ids=["bounds", "exact"])
def test_kernels_compile_for_hopper(exact):
    ids = torch.zeros(8, dtype=torch.int64)
    mask = op("and", op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), op("ge", q_idx, kv_idx))
    compiled = block_kernels.compile_for(graph_of(mask, (ids,)), (128, 128), 90, exact=exact)
    assert [kernel.name for kernel in compiled.kernels] == ["rows_kernel", "columns_kernel", "order_kernel"]
    for kernel in compiled.kernels:
        assert kernel.spill_bytes <= 64 * exact, kernel.name
