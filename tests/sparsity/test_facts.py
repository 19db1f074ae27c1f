"""Facts about captured tensors against every element that a range of indices reaches."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from flexc.errors import InputError
from flexc.ir.graph import Node
from flexc.ir.interval import Interval
from flexc.ir.ops import apply
from flexc.sparsity import facts, statements, table_cache
from flexc.sparsity.facts import Facts
from flexc.sparsity.statements import declare_sorted, is_declared_sorted, verify_facts
from flexc.sparsity.table_cache import TableCache
from tests.ir.test_ops import NoHostDecisions
from tests.sparsity.graphs import batch, head, kv_idx, q_idx, read

RANDOM = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def empty_cache():
    facts.TABLES.clear()
    yield
    facts.TABLES.clear()


def tiles(*ranges: tuple[int, int]) -> Interval:
    lo, hi = torch.tensor(ranges, dtype=torch.float64).unbind(1)
    return Interval(lo, hi)


def random_ranges(size: int, count: int, aligned: int = 1) -> list[tuple[int, int]]:
    ends = torch.randint(0, size // aligned, (count, 2), generator=RANDOM).sort(1).values * aligned
    return [(int(a), min(int(b) + aligned, size) - 1) for a, b in ends]


def gathered(tensor: torch.Tensor, indices: list[Node], intervals: list[Interval], granule: int = 1) -> Interval:
    with NoHostDecisions():
        return Facts((tensor,), granule).gather(read(0, tensor, *indices), intervals)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_ranges_of_one_dimension_are_exact(dtype, size):
    tensor = torch.randint(0, 100, (size,), generator=RANDOM).to(dtype) if dtype != torch.bool else torch.rand(size) < 0.9
    ranges = random_ranges(size, 50)
    found = gathered(tensor, [q_idx], [tiles(*ranges)])
    for i, (first, last) in enumerate(ranges):
        part = tensor[first : last + 1].double()
        assert (found.lo[i], found.hi[i]) == (part.min(), part.max())
    assert found.nan is False or not found.nan.any()


@pytest.mark.parametrize("size", [2**13 + 5, 2**20 + 77])
def test_aligned_ranges_of_a_long_tensor_are_exact_and_others_hold(size):
    tensor = torch.randint(0, 10**6, (size,), generator=RANDOM)
    for aligned in (64, 1):
        ranges = random_ranges(size, 30, aligned)
        found = gathered(tensor, [kv_idx], [tiles(*ranges)], granule=64)
        for i, (first, last) in enumerate(ranges):
            part = tensor[first : last + 1]
            assert found.lo[i] <= part.min() and part.max() <= found.hi[i]
            if aligned == 64:
                assert (found.lo[i], found.hi[i]) == (part.min(), part.max())


@pytest.mark.parametrize("shape", [(64, 64), (37, 90), (1, 5), (300, 200)])
def test_aligned_boxes_are_exact_and_others_hold(shape):
    tensor = torch.randint(0, 10**6, shape, generator=RANDOM)
    small = shape[0] * shape[1] <= 2**13
    for aligned in (8, 1) if small else (8,):
        rows, columns = ([(a - a % aligned, min(a - a % aligned + aligned, n) - 1) for a, _ in random_ranges(n, 60)] for n in shape)
        found = gathered(tensor, [q_idx, kv_idx], [tiles(*rows), tiles(*columns)], granule=8)
        for i in range(60):
            part = tensor[rows[i][0] : rows[i][1] + 1, columns[i][0] : columns[i][1] + 1]
            assert (found.lo[i], found.hi[i]) == (part.min(), part.max())
    rows, columns = random_ranges(shape[0], 60), random_ranges(shape[1], 60)
    found = gathered(tensor, [q_idx, kv_idx], [tiles(*rows), tiles(*columns)], granule=8)
    for i in range(60):
        part = tensor[rows[i][0] : rows[i][1] + 1, columns[i][0] : columns[i][1] + 1]
        assert found.lo[i] <= part.min() and part.max() <= found.hi[i]


def test_a_box_that_is_no_box_of_cells_is_answered_for_at_most_twice_its_sides():
    tensor = torch.zeros(64, 64)
    tensor[40, 40] = 1.0
    found = gathered(tensor, [q_idx, kv_idx], [tiles((33, 35), (10, 19)), tiles((33, 35), (10, 19))])
    assert found.hi.tolist() == [0.0, 0.0]


def test_a_layout_by_head_is_read_at_its_own_rate():
    """Indices that do not count tokens: cells of a granule would span many blocks of the layout."""
    layout = torch.randint(0, 9, (4, 64, 64), generator=RANDOM)
    rows = columns = [(i, i) for i in range(64)]
    index = [head, apply("floordiv", q_idx, 128), apply("floordiv", kv_idx, 128)]
    found = gathered(layout, index, [Interval.point(torch.tensor(2.0).double()), tiles(*rows), tiles(*columns)], granule=128)
    assert torch.equal(found.lo, layout[2].diagonal().double()) and torch.equal(found.lo, found.hi)


def test_one_number_for_each_tile_is_read_directly():
    tensor = torch.tensor([5, 2, 9])
    place = torch.tensor([2.0, 0.0], dtype=torch.float64)
    found = gathered(tensor, [batch], [Interval.positions(place, place, 3)])
    assert found.lo.tolist() == found.hi.tolist() == [9.0, 5.0]
    assert not facts.TABLES._kept


def test_an_index_by_batch_that_is_not_known_reads_anything():
    tensor = torch.tensor([5, 2, 9], dtype=torch.int32)
    found = gathered(tensor, [apply("mul", batch, 2**30)], [tiles((-(2**31), 2**31 - 1), (1, 1))])
    assert (found.lo[0], found.hi[0]) == (-(2.0**31), 2.0**31 - 1)
    assert (found.lo[1], found.hi[1]) == (2.0, 2.0)


def test_an_index_that_may_be_outside_may_read_zero():
    tensor = torch.tensor([5, 6, 7])
    found = gathered(tensor, [q_idx], [tiles((0, 1), (1, 3), (-5, -1), (-2, -1), (-1, 0), (7, 9))])
    assert list(zip(found.lo.tolist(), found.hi.tolist())) == [(5, 6), (0, 7), (0, 7), (6, 7), (5, 7), (0, 7)]


def test_nan_is_told_of_each_tile():
    values = torch.arange(64.0)
    values[20] = math.nan
    values[40], values[41] = math.inf, -math.inf
    found = gathered(values, [kv_idx], [tiles((0, 19), (16, 23), (20, 20), (21, 30), (40, 40))])
    assert found.nan.tolist() == [False, True, True, False, False]
    assert (found.lo[4], found.hi[4]) == (math.inf, math.inf)
    table = values.view(8, 8)
    boxes = gathered(table, [q_idx, kv_idx], [tiles((0, 1), (2, 3), (2, 2)), tiles((0, 7), (4, 5), (5, 5))])
    assert boxes.nan.tolist() == [False, True, False]
    direct = gathered(values, [head], [tiles((19, 19), (20, 20))])
    assert direct.nan.tolist() == [False, True]


# --- tables are kept ----------------------------------------------------------------------------------------------------------------


class Table:
    def __init__(self, size: int = 4):
        self.tensors = (torch.zeros(size),)


def test_tables_are_made_once_for_a_tensor_and_what_detach_makes_of_it():
    tensor = torch.randn(100, requires_grad=True)
    cache = TableCache()
    first = cache.get(tensor, ("x",), Table)
    assert cache.get(tensor, ("x",), Table) is first
    assert cache.get(tensor.detach(), ("x",), Table) is first
    assert cache.get(tensor, ("y",), Table) is not first
    assert cache.get(tensor[1:], ("x",), Table) is not first


def test_a_tensor_written_to_gets_a_new_table():
    tensor = torch.arange(100)
    before = gathered(tensor, [q_idx], [tiles((0, 99))])
    tensor[50] = 1000
    after = gathered(tensor, [q_idx], [tiles((0, 99))])
    assert (before.hi, after.hi) == (99.0, 1000.0)
    assert len(facts.TABLES._kept) == 1


def test_a_table_is_written_anew_in_its_own_memory_after_every_write():
    tensor, cache, written = torch.zeros(100), TableCache(), []
    again = lambda table: written.append(table) or True
    first = cache.get(tensor, ("x",), Table, again)
    assert cache.get(tensor, ("x",), Table, again) is first and not written
    tensor.add_(1)
    assert cache.get(tensor, ("x",), Table, again) is first and written == [first]
    assert cache.get(tensor.detach(), ("x",), Table, again) is first and written == [first]
    tensor.resize_(2**20).resize_(100)  # the same storage with other memory
    assert cache.get(tensor, ("x",), Table, again) is first and written == [first] * 2
    for other in (("y",), tensor), (("x",), tensor.clone()), (("x",), tensor[1:]), (("x",), tensor.view(10, 10)):
        assert cache.get(other[1], other[0], Table, again) is not first
    assert written == [first] * 2
    tensor.add_(1)
    second = cache.get(tensor, ("x",), Table, lambda table: False)
    assert second is not first and cache.get(tensor, ("x",), Table, again) is second
    assert cache._bytes == sum(kept.size_bytes for kept in cache._kept.values())


def test_the_table_of_another_tensor_is_never_written(monkeypatch):
    """Not even where a storage has the place in memory that another one had before."""
    monkeypatch.setattr(table_cache, "place_of", lambda tensor: 0)
    cache, first, second = TableCache(), torch.zeros(100), torch.zeros(100)
    table = cache.get(first, ("x",), Table)
    assert cache.get(second, ("x",), Table, lambda table: pytest.fail("written")) is not table


def test_no_table_counts_as_written_before_it_is():
    """Another thread that looks meanwhile, and whoever comes after an error, write it, too."""
    tensor, cache, written = torch.zeros(100), TableCache(), []
    first = cache.get(tensor, ("x",), Table)
    tensor.add_(1)

    def again(table: Table) -> bool:
        written.append(table)
        if len(written) == 1:
            assert cache.get(tensor, ("x",), Table, again) is first
            raise RuntimeError("no launch")
        if len(written) == 3:
            tensor.add_(1)  # too late to be sure that it is seen
        return True

    with pytest.raises(RuntimeError, match="no launch"):
        cache.get(tensor, ("x",), Table, again)
    assert len(written) == 2, "by the one that came between"
    tensor.add_(1)
    for count in (3, 4, 4):
        assert cache.get(tensor, ("x",), Table, again) is first and len(written) == count


def test_tables_go_with_their_tensors():
    cache = TableCache()
    tensor = torch.randn(100)
    cache.get(tensor, ("x",), Table)
    view = tensor.detach()
    del tensor
    gc.collect()
    assert len(cache._kept) == 1  # the memory is still in use
    del view
    gc.collect()
    assert not cache._kept


def test_tables_of_inference_tensors_are_not_kept():
    with torch.inference_mode():
        tensor = torch.arange(100)
    cache = TableCache()
    again = lambda table: True
    assert cache.get(tensor, ("x",), Table, again) is not cache.get(tensor, ("x",), Table, again)


def test_the_oldest_tables_are_dropped():
    tensors = [torch.zeros(3) for _ in range(4)]
    cache = TableCache(most=3)
    tables = [cache.get(tensor, ("x",), Table) for tensor in tensors[:3]]
    cache.get(tensors[0], ("x",), Table)
    cache.get(tensors[3], ("x",), Table)
    assert cache.get(tensors[0], ("x",), Table) is tables[0]
    assert cache.get(tensors[1], ("x",), Table) is not tables[1]
    small = TableCache(most_bytes=40)
    kept = [small.get(tensor, ("x",), Table) for tensor in tensors]
    assert small.get(tensors[3], ("x",), Table) is kept[3]
    assert small.get(tensors[0], ("x",), Table) is not kept[0]


def test_memory_is_counted_through_rewriting_forgetting_and_dropping():
    cache, tensors = TableCache(most=2), [torch.zeros(3) for _ in range(3)]

    def is_true() -> bool:
        return cache._bytes == sum(kept.size_bytes for kept in cache._kept.values())

    cache.get(tensors[0], ("x",), Table)
    tensors[0].add_(1)
    cache.get(tensors[0], ("x",), lambda: Table(100))
    assert cache._bytes == 400 and is_true()
    for tensor in tensors[1:]:
        cache.get(tensor, ("x",), Table)
    assert cache._bytes == 32 and is_true()
    del tensor, tensors
    gc.collect()
    assert cache._bytes == 0 and not cache._kept


# --- what a user states -------------------------------------------------------------------------------------------------------------


def test_the_ends_of_a_sorted_range_are_its_extremes_and_no_table_is_made():
    ids = torch.randint(0, 9, (3, 500), generator=RANDOM).sort(-1).values
    ranges = random_ranges(500, 40)
    place = torch.arange(40, dtype=torch.float64) % 3
    expected = gathered(ids, [batch, q_idx], [Interval.positions(place, place, 3), tiles(*ranges)])
    facts.TABLES.clear()
    assert declare_sorted(ids) is ids
    found = gathered(ids, [batch, q_idx], [Interval.positions(place, place, 3), tiles(*ranges)])
    assert torch.equal(found.lo, expected.lo) and torch.equal(found.hi, expected.hi)
    assert not facts.TABLES._kept


def test_a_statement_holds_for_one_tensor_while_it_lives():
    ids = torch.arange(10)
    declare_sorted(ids)
    assert is_declared_sorted(ids.detach()) and not is_declared_sorted(ids[1:]) and not is_declared_sorted(torch.arange(10))
    ids.add_(1)
    assert is_declared_sorted(ids)
    before = len(statements._sorted)
    del ids
    gc.collect()
    assert len(statements._sorted) == before - 1


def test_a_false_statement_is_found():
    ids = torch.tensor([[0, 1, 1, 2], [0, 3, 2, 4]])
    verify_facts([ids])  # nothing was stated
    declare_sorted(ids)
    with pytest.raises(InputError, match=r"docs was declared sorted, but docs\[1, 2\] = 2 comes after 3"):
        verify_facts([torch.zeros(3), ids], ["x", "docs"])
    ids[1, 1] = 2
    verify_facts([ids])
    values = declare_sorted(torch.tensor([0.0, math.nan, 1.0]))
    with pytest.raises(InputError, match=r"a tensor\[1\] = nan comes after 0.0"):
        verify_facts([values])


@pytest.mark.parametrize("tensor", [torch.tensor(3), torch.zeros(4, dtype=torch.bool)])
def test_only_numbers_along_a_dimension_can_be_sorted(tensor):
    with pytest.raises(InputError, match="expected a tensor of numbers with a dimension to be sorted along"):
        declare_sorted(tensor)
