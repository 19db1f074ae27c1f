"""Runs and walks of block rows, and the runs of block columns made from them, against matrices of kinds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexc.sparsity import EMPTY, FULL, PARTIAL, Runs, Walk, walk_of

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 6, 1), (3, 1, 1, 9), (1, 1, 4, 0), (1, 1, 0, 4), (2, 2, 17, 13)]


def runs_of(kind: torch.Tensor) -> Runs:
    """Every block as a piece of its own, in a random order."""
    b, h, n, m = kind.shape
    index = torch.randperm(kind.numel(), generator=torch.Generator().manual_seed(kind.numel()))
    index = index[kind.flatten()[index] != EMPTY]
    row, start = index // max(m, 1), index % max(m, 1)
    return Runs.assembled((b, h, n, m), row, start, start + 1, kind.flatten()[index] == FULL)


def kinds_from_runs(runs: Runs) -> torch.Tensor:
    kind = torch.zeros(runs.shape, dtype=torch.uint8)
    lines = kind.flatten(0, 2)
    for row in range(len(lines)):
        last, before = 0, None
        for i in range(runs.offsets[row], runs.offsets[row + 1]):
            start, stop, full = int(runs.start[i]), int(runs.stop[i]), bool(runs.full[i])
            assert last <= start < stop and not (last == start and before is full), "runs ascend, and neighbours of one kind are one"
            lines[row, start:stop] = FULL if full else PARTIAL
            last, before = stop, full
    return kind


def kinds_from_walk(walk: Walk, columns: int) -> torch.Tensor:
    """Two loops, as a kernel makes them."""
    kind = torch.zeros((*walk.rows.shape[:3], columns), dtype=torch.uint8)
    for index in range(kind[..., 0].numel()) if columns else ():
        line = kind.view(-1, columns)[index]
        first, count, run, run_count = walk.rows.view(-1, 4)[index].tolist()
        for place in range(first, first + count):
            block = int(walk.partial[place])
            assert line[block] == EMPTY
            line[block] = PARTIAL
        for start, stop in walk.full[run : run + run_count].tolist():
            assert start < stop and not line[start:stop].any()
            line[start:stop] = FULL
    return kind


@st.composite
def kinds(draw) -> torch.Tensor:
    """Random kinds, some of them in long runs."""
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = torch.randint(0, 3, shape, generator=generator, dtype=torch.uint8)
    if draw(st.booleans()) and kind.numel():
        kind = kind.flatten()[torch.randint(0, 2, (kind.numel(),), generator=generator).cumsum(0) * 5 % kind.numel()].view(shape)
    return kind


@given(kinds())
@settings(max_examples=150, deadline=None)
def test_runs_walks_and_columns_hold_the_kinds(kind):
    runs = runs_of(kind)
    assert torch.equal(kinds_from_runs(runs), kind)
    assert torch.equal(kinds_from_walk(walk_of(runs), kind.shape[3]), kind)
    columns = runs.transposed()
    assert torch.equal(kinds_from_runs(columns), kind.transpose(-1, -2))
    assert torch.equal(kinds_from_runs(columns.transposed()), kind)
    for x in (runs.start, runs.stop):
        assert x.dtype == torch.int32 and x.is_contiguous()


def test_runs_are_in_order_and_merged():
    kind = torch.tensor([[[[1, 1, 0, 2, 2, 2, 1], [0, 0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2, 2]]]], dtype=torch.uint8)
    runs = runs_of(kind)
    assert runs.offsets.tolist() == [0, 3, 3, 4]
    found = list(zip(runs.start.tolist(), runs.stop.tolist(), runs.full.tolist()))
    assert found == [(0, 2, False), (3, 6, True), (6, 7, False), (0, 7, True)]
    assert runs.order().tolist() == [2, 0, 1] and runs.order().dtype == torch.int32


def test_a_run_ends_with_its_row():
    """The last block of a row and the first of the next are of one kind, and next to each other where pieces are counted through."""
    runs = runs_of(torch.full((1, 1, 3, 4), FULL, dtype=torch.uint8))
    assert runs.start.tolist() == [0, 0, 0] and runs.stop.tolist() == [4, 4, 4]


def test_neighbouring_partial_blocks_need_no_list():
    kind = torch.tensor([[[[0, 1, 1, 1], [1, 0, 0, 1], [2, 1, 1, 2], [0, 0, 0, 0]]]], dtype=torch.uint8)
    walk = walk_of(runs_of(kind))
    assert walk.partial.tolist() == [0, 1, 2, 3, 0, 3]
    assert walk.rows[0, 0, :, :2].tolist() == [[1, 3], [4, 2], [1, 2], [0, 0]]
    assert walk.full.tolist() == [[0, 1], [3, 4]] and walk.rows[0, 0, 2, 2:].tolist() == [0, 2]


def test_a_walk_without_full_blocks_still_has_a_table():
    walk = walk_of(runs_of(torch.zeros((1, 1, 2, 0), dtype=torch.uint8)))
    assert walk.full.shape == (1, 2) and walk.partial.shape == (0,) and walk.rows.shape == (1, 1, 2, 4)


def test_work_is_summed_over_batch_and_heads():
    runs = runs_of(torch.tensor([[[[0, 1], [0, 0]], [[0, 0], [2, 1]]]], dtype=torch.uint8))
    assert runs.work().tolist() == [1, 2] and runs.order().tolist() == [1, 0]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_partial_blocks_one_by_one(at_once, step):
    kind = torch.tensor([[[[1, 1, 0, 1], [2, 2, 0, 2]], [[0, 0, 0, 0], [1, 2, 1, 1]]]], dtype=torch.uint8)
    found = [(int(r), int(c)) for row, column in runs_of(kind).blocks(at_once, step) for r, c in zip(row, column)]
    every = [(0, 0), (0, 1), (0, 3), (3, 0), (3, 2), (3, 3)]
    assert len(found) == 6 // step and all(block in every[i * step : (i + 1) * step] for i, block in enumerate(found))


def test_some_partial_blocks_of_equal_rows_are_at_every_place():
    """Three partial blocks in each row: a step of three must not see the first of each row alone."""
    kind = torch.tensor([1, 1, 1, 0], dtype=torch.uint8).expand(1, 1, 60, 4)
    columns = torch.cat([column for _, column in runs_of(kind).blocks(at_once=7, step=3)])
    assert len(columns) == 60 and columns.bincount().tolist() == pytest.approx([20, 20, 20], abs=2)


@pytest.mark.parametrize("ragged", [False, True])
def test_everything(ragged):
    kind = kinds_from_runs(Runs.of_everything((2, 1, 3, 4), ragged))
    expected = torch.full((2, 1, 3, 4), FULL, dtype=torch.uint8)
    expected[..., -1] = PARTIAL if ragged else FULL
    assert torch.equal(kind, expected)
    assert not len(Runs.of_everything((1, 1, 3, 0), ragged).start)
    assert kinds_from_runs(Runs.of_everything((1, 1, 2, 1), True)).tolist() == [[[[PARTIAL], [PARTIAL]]]]
