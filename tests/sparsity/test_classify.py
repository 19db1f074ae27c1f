"""Block maps against dense masks by brute force. `truth` is written in plain PyTorch, not read from the graph."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexc.errors import InputError, InternalError, ShapeError
from flexc.ir.graph import Graph, Node, ScalarInput, const, input_node, scalar
from flexc.ir.ops import apply, cast
from flexc.sparsity import EMPTY, FULL, PARTIAL, Proof, by_bounds, by_evaluation, classify
from tests.sparsity.graphs import (
    assert_agrees,
    batch,
    both,
    causal,
    classified,
    dense_mask,
    graph_of,
    head,
    kinds_of,
    kv_idx,
    op,
    q_idx,
    read,
)

GENERATOR = torch.Generator().manual_seed(0)


def random_documents(count: int, length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return (torch.rand(length, generator=GENERATOR) < count / length).cumsum(0).to(dtype)


def grid(q_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(q_len)[:, None], torch.arange(kv_len)[None, :]


LENGTHS = [(64, 64), (20, 33), (15, 143), (143, 15), (1, 64), (64, 1), (7, 7), (128, 40)]


def test_causal_over_eight_by_eight_blocks_is_as_tight_as_it_can_be():
    found = assert_agrees(causal, 64, 64)
    assert found.counts() == {"empty": 28, "partial": 8, "full": 28}
    assert classified(causal, 64, 64, exact=False).counts() == {"empty": 28, "partial": 8, "full": 28}


STRUCTURED = {
    "causal": (causal, lambda q, k: q >= k),
    "anticausal": (op("lt", q_idx, kv_idx), lambda q, k: q < k),
    "window": (both(causal, op("lt", q_idx - kv_idx, 11)), lambda q, k: (q - k >= 0) & (q - k < 11)),
    "negative difference": (op("lt", op("abs", q_idx - kv_idx - 13), 5), lambda q, k: (q - k - 13).abs() < 5),
    "future window": (both(op("lt", q_idx - kv_idx, -3), op("ge", q_idx - kv_idx, -20)), lambda q, k: (q - k < -3) & (q - k >= -20)),
    "prefix": (op("or", causal, op("lt", kv_idx, 13)), lambda q, k: (q >= k) | (k < 13)),
    "dilated": (both(causal, op("eq", op("floormod", q_idx - kv_idx, 3), 0)), lambda q, k: (q >= k) & ((q - k) % 3 == 0)),
    "modulo of a negative": (op("lt", op("floormod", q_idx - kv_idx, 5), 2), lambda q, k: (q - k) % 5 < 2),
    "floor of a negative": (op("eq", op("floordiv", q_idx - kv_idx, 9), -2), lambda q, k: torch.floor_divide(q - k, 9) == -2),
    "block diagonal": (op("eq", op("floordiv", q_idx, 16), op("floordiv", kv_idx, 16)), lambda q, k: q // 16 == k // 16),
    "block diagonal, not aligned": (op("eq", op("floordiv", q_idx, 7), op("floordiv", kv_idx, 7)), lambda q, k: q // 7 == k // 7),
    "shifts": (op("ge", op("shr", q_idx, 3), op("shr", kv_idx, 3)), lambda q, k: q // 8 >= k // 8),
    "neighbourhood": (
        both(
            op("le", op("abs", op("floordiv", q_idx, 8) - op("floordiv", kv_idx, 8)), 1),
            op("le", op("abs", op("floormod", q_idx, 8) - op("floormod", kv_idx, 8)), 1),
        ),
        lambda q, k: ((q // 8 - k // 8).abs() <= 1) & ((q % 8 - k % 8).abs() <= 1),
    ),
    "negation": (op("not", causal), lambda q, k: q < k),
    "exclusive": (op("xor", causal, op("lt", q_idx - kv_idx, 11)), lambda q, k: (q >= k) ^ (q - k < 11)),
    "rows only": (op("lt", q_idx, 9), lambda q, k: (q < 9) & (k >= 0)),
    "columns only": (op("ge", kv_idx, 9), lambda q, k: (k >= 9) & (q >= 0)),
    "always": (const(True), lambda q, k: (q >= 0) & (k >= 0)),
    "never": (const(False), lambda q, k: (q < 0) & (k < 0)),
    "in floats": (
        op("lt", op("sqrt", cast(q_idx, "float32")) - op("sqrt", cast(kv_idx, "float32")), 1.5),
        lambda q, k: q.float().sqrt() - k.float().sqrt() < 1.5,
    ),
    "chosen": (op("where", op("lt", q_idx, 16), op("lt", kv_idx, 16), causal), lambda q, k: torch.where(q < 16, k < 16, q >= k)),
}


@pytest.mark.parametrize("q_len, kv_len", LENGTHS)
@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_masks_agree_with_brute_force(name, q_len, kv_len):
    node, truth = STRUCTURED[name]
    dense = truth(*grid(q_len, kv_len))[None, None]
    for block in [(8, 8), (16, 8), (5, 7)]:
        found = assert_agrees(node, q_len, kv_len, block)
        assert torch.equal(found.kind, kinds_of(dense, block))
        assert torch.equal(found.to_dense(), dense)


@pytest.mark.parametrize("name", ["causal", "window", "prefix", "block diagonal", "shifts", "chosen", "rows only", "always"])
def test_bounds_alone_are_tight_where_blocks_are_aligned(name):
    node, truth = STRUCTURED[name]
    expected = kinds_of(truth(*grid(64, 64))[None, None], (8, 8))
    assert torch.equal(classified(node, 64, 64, exact=False).kind, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize("length", [64, 100, 1000])
def test_documents_agree_with_brute_force(dtype, length):
    ids = random_documents(6, length, dtype)
    mask = op("eq", read(0, ids, q_idx), read(0, ids, kv_idx))
    expected = kinds_of((ids[:, None] == ids)[None, None], (8, 8))
    assert torch.equal(classified(mask, length, length, tensors=(ids,), exact=False).kind, expected)
    assert_agrees(both(mask, causal), length, length, (16, 8), tensors=(ids,))


def test_documents_across_different_lengths():
    q_ids, kv_ids = random_documents(4, 20), random_documents(4, 33)
    mask = op("eq", read(0, q_ids, q_idx), read(1, kv_ids, kv_idx))
    assert_agrees(mask, 20, 33, tensors=(q_ids, kv_ids))


def test_unsorted_documents_are_still_right():
    ids = torch.randint(0, 3, (90,), generator=GENERATOR)
    assert_agrees(op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), 90, 90, tensors=(ids,))


@pytest.mark.parametrize("base", [2**53, 2**60, -(2**53) - 1])
def test_document_ids_beyond_float64_are_told_apart(base):
    """2^53 and 2^53 + 1 are the same float64: bounds must not call them equal."""
    ids = torch.tensor([base] * 32 + [base + 1] * 32)
    found = assert_agrees(op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), 64, 64, tensors=(ids,))
    assert found.counts() == {"empty": 32, "partial": 0, "full": 32}


def test_a_run_time_number_beyond_float64_is_told_apart():
    ids = torch.full((64,), 2**53)
    graph = Graph(
        (("mask", op("eq", read(0, ids, kv_idx), scalar(0, "int64"))),), graph_of(None, (ids,)).tensors, (ScalarInput("n", "int64"),)
    )
    for value, kind in ((2**53, FULL), (2**53 + 1, EMPTY)):
        found = classify(graph, 64, 64, batch=1, heads=1, block=(8, 8), tensors=(ids,), scalars=(value,))
        assert (found.kind == kind).all()


def test_documents_of_each_batch_element():
    ids = torch.stack([random_documents(n, 64) for n in (2, 5, 9)])
    found = assert_agrees(op("eq", read(0, ids, batch, q_idx), read(0, ids, batch, kv_idx)), 64, 64, b=3, h=2, tensors=(ids,))
    assert found.kind.shape == (3, 1, 8, 8)
    assert not torch.equal(found.kind[0], found.kind[2])


def test_a_window_for_each_head():
    widths = torch.tensor([3, 17, 40, 200])
    found = assert_agrees(both(causal, op("lt", q_idx - kv_idx, read(0, widths, head))), 64, 64, b=2, h=4, tensors=(widths,))
    assert found.kind.shape == (1, 4, 8, 8)
    assert (
        found.counts()
        == classified(
            both(causal, op("lt", q_idx - kv_idx, read(0, widths, head))), 64, 64, b=2, h=4, tensors=(widths,), exact=False
        ).counts()
    )


def test_a_length_for_each_batch_element():
    lengths = torch.tensor([5, 9, 3, 64, 0], dtype=torch.int32)
    found = assert_agrees(op("lt", kv_idx, read(0, lengths, batch)), 20, 64, b=5, h=3, tensors=(lengths,))
    assert found.kind.shape == (5, 1, 3, 8)
    assert (found.kind[4] == EMPTY).all() and (found.kind[3] == FULL).all()


def test_the_batch_number_itself():
    found = assert_agrees(op("or", op("eq", op("floormod", batch, 2), 0), causal), 9, 9, b=3, tensors=())
    assert found.kind.shape[:2] == (3, 1)


def test_a_table_for_batch_and_head():
    limits = torch.randint(0, 64, (2, 3), generator=GENERATOR)
    found = assert_agrees(op("lt", kv_idx, read(0, limits, batch, head)), 33, 64, b=2, h=3, tensors=(limits,))
    assert found.kind.shape[:2] == (2, 3)


def test_padding_tables():
    table = torch.rand(2, 64, generator=GENERATOR) < 0.5
    table[0, 16:40], table[1, 24:48] = True, False
    found = assert_agrees(read(0, table, batch, kv_idx), 40, 64, b=2, tensors=(table,))
    assert FULL in found.kind and EMPTY in found.kind and PARTIAL in found.kind
    by_bounds = classified(read(0, table, batch, kv_idx), 40, 64, b=2, tensors=(table,), exact=False)
    assert torch.equal(by_bounds.kind, found.kind)


def test_a_limit_for_each_token():
    end = torch.arange(64) // 10 * 10 + 9
    found = assert_agrees(op("le", kv_idx, read(0, end, q_idx)), 64, 64, tensors=(end,))
    assert found.proof.bounds >= 50


def test_random_tables_of_pairs():
    """Tree masks: bounds cannot help, pairs decide."""
    for share in (0.003, 0.5, 0.997):
        table = torch.rand(33, 41, generator=GENERATOR) < share
        assert_agrees(read(0, table, q_idx, kv_idx), 33, 41, tensors=(table,))


def test_a_layout_of_blocks():
    layout = torch.rand(2, 16, 16, generator=GENERATOR) < 0.3
    mask = read(0, layout, head, op("floordiv", q_idx, 4), op("floordiv", kv_idx, 4))
    assert_agrees(mask, 64, 64, h=2, tensors=(layout,))
    uniform = layout[:, ::2, ::2].repeat_interleave(2, 1).repeat_interleave(2, 2)
    found = classified(mask, 64, 64, h=2, tensors=(uniform,), exact=False)
    assert found.counts()["partial"] == 0


def test_a_table_by_distance():
    table = torch.rand(127, generator=GENERATOR) < 0.1
    assert_agrees(read(0, table, q_idx - kv_idx + 63), 64, 64, tensors=(table,))
    assert_agrees(read(0, table, q_idx - kv_idx), 64, 64, tensors=(table,))  # negative ones count from the end


def test_tables_of_exact_size_are_not_read_out_of_range():
    ids_q, ids_kv = random_documents(3, 15), random_documents(3, 143)
    assert_agrees(op("eq", read(0, ids_q, q_idx), read(1, ids_kv, kv_idx)), 15, 143, (128, 128), tensors=(ids_q, ids_kv))


def test_a_guarded_read_past_the_table_does_not_fault():
    table = random_documents(5, 100)
    mask = op("where", op("lt", kv_idx, 100), op("eq", read(0, table, kv_idx), 2), op("gt", q_idx, 70))
    assert_agrees(mask, 143, 143, (16, 16), tensors=(table,))


def test_an_index_out_of_range_reads_zero_in_bounds_as_in_evaluation():
    table = torch.full((10,), 7)
    found = assert_agrees(op("eq", read(0, table, kv_idx), 7), 32, 32, tensors=(table,))
    assert torch.equal(found.kind[0, 0, 0], torch.tensor([FULL, PARTIAL, EMPTY, EMPTY], dtype=torch.uint8))


def test_an_empty_table_reads_zero():
    table = torch.zeros(0, dtype=torch.int64)
    assert (classified(op("eq", read(0, table, kv_idx), 0), 8, 8, tensors=(table,)).kind == FULL).all()


def test_nan_compares_false():
    values = torch.arange(64).float()
    values[20:28] = float("nan")
    for name in ("lt", "ge", "ne"):
        assert_agrees(op(name, read(0, values, kv_idx), 30.0), 64, 64, tensors=(values,))
    assert_agrees(op("not", op("lt", read(0, values, kv_idx), 30.0)), 64, 64, tensors=(values,))


def test_nan_is_not_below_infinity():
    values = torch.arange(64).float()
    values[20:28] = float("nan")
    found = assert_agrees(op("le", read(0, values, kv_idx), float("inf")), 64, 64, tensors=(values,))
    assert found.kind[0, 0, 0].tolist() == [FULL, FULL, PARTIAL, PARTIAL, FULL, FULL, FULL, FULL]


def test_samples_stay_inside_ragged_blocks():
    """Bounds cannot see that the sum of even numbers is even; the samples must not look at rows and columns that do not exist."""
    even = op("eq", op("floormod", q_idx * 2 + kv_idx * 2, 2), 0)
    found = assert_agrees(both(even, op("lt", q_idx, 20), op("lt", kv_idx, 36)), 20, 36, (16, 16))
    assert found.kind[0, 0].tolist() == [[FULL, FULL, PARTIAL], [FULL, FULL, PARTIAL]]
    assert classified(op("not", even), 20, 36, (16, 16)).counts()["empty"] == 6


def test_a_constant_beyond_float64_is_told_apart():
    ids = torch.full((64,), 2**53)
    found = assert_agrees(op("eq", read(0, ids, kv_idx), 2**53 + 1), 64, 64, tensors=(ids,))
    assert (found.kind == EMPTY).all()


def test_bfloat16_and_float64_tables():
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        values = torch.randn(64, generator=GENERATOR).to(dtype).sort().values
        assert_agrees(op("lt", read(0, values, kv_idx), read(0, values, q_idx)), 64, 64, tensors=(values,))


def test_int32_arithmetic_that_wraps():
    mask = op("gt", q_idx * 100_000_000, kv_idx)
    assert_agrees(mask, 64, 64)


def test_a_zero_dimensional_tensor_and_scalars():
    width = torch.tensor(11)
    assert_agrees(op("lt", op("abs", q_idx - kv_idx), read(0, width)), 64, 64, tensors=(width,))
    graph = Graph((("mask", op("lt", op("abs", q_idx - kv_idx), scalar(0, "int32"))),), (), (ScalarInput("width", "int32"),))
    expected = kinds_of(((torch.arange(64)[:, None] - torch.arange(64)).abs() < 11)[None, None], (8, 8))
    for value in (11, torch.tensor(11)):
        found = classify(graph, 64, 64, batch=1, heads=1, block=(8, 8), scalars=(value,))
        assert torch.equal(found.kind, expected)
        assert torch.equal(classify(graph, 64, 64, batch=1, heads=1, block=(8, 8), scalars=(value,), exact=False).kind, expected)


def test_a_float_scalar_that_is_nan():
    graph = Graph((("mask", op("lt", cast(q_idx, "float32"), scalar(0, "float32"))),), (), (ScalarInput("x", "float32"),))
    assert (classify(graph, 16, 16, batch=1, heads=1, block=(8, 8), scalars=(float("nan"),)).kind == EMPTY).all()


def test_no_mask_is_full_but_for_a_ragged_last_column():
    assert (classified(None, 20, 32).kind == FULL).all()
    ragged = classified(None, 20, 33)
    assert (ragged.kind[..., :-1] == FULL).all() and (ragged.kind[..., -1] == PARTIAL).all()
    assert ragged.kind.shape == (1, 1, 3, 5)


def test_query_rows_past_the_end_count_neither_way():
    found = classified(op("lt", q_idx, 20), 20, 32)
    assert (found.kind == FULL).all()


@pytest.mark.parametrize("q_len, kv_len", [(0, 0), (0, 16), (16, 0), (1, 1)])
def test_lengths_of_zero_and_one(q_len, kv_len):
    for mask in (causal, None):
        found = classified(mask, q_len, kv_len)
        assert found.kind.shape == (1, 1, -(-q_len // 8), -(-kv_len // 8))
        assert found.row_walk().rows.shape == (1, 1, -(-q_len // 8), 4)
        assert found.column_walk().rows.shape == (1, 1, -(-kv_len // 8), 4)
        assert found.unmasked_pairs() == q_len * kv_len


def test_many_levels_agree_with_one():
    """130 × 130 blocks of 2 tokens start three levels up; the ragged border of every level must be right."""
    ids = random_documents(9, 259)
    mask = both(op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), causal)
    assert_agrees(mask, 259, 257, (2, 2), tensors=(ids,))
    widths = torch.tensor([1, 30, 100])
    assert_agrees(both(causal, op("lt", q_idx - kv_idx, read(0, widths, head))), 255, 259, (2, 3), h=3, tensors=(widths,))


def test_large_tables_use_cells():
    """Beyond 2^16 elements facts are kept for each granule: exact where blocks are aligned, sound elsewhere."""
    length = 2**17
    ids = random_documents(40, length, torch.int32)
    mask = op("eq", read(0, ids, q_idx), read(0, ids, kv_idx))
    found = classified(mask, length, length, (1024, 1024), tensors=(ids,), exact=False)
    first, last = ids.view(-1, 1024)[:, 0], ids.view(-1, 1024)[:, -1]
    apart = (first[:, None] > last) | (last[:, None] < first)
    same = (first == last)[:, None] & (first == last) & (first[:, None] == first)
    assert torch.equal(found.kind[0, 0] == EMPTY, apart)
    assert torch.equal(found.kind[0, 0] == FULL, same)
    shifted = op("eq", read(0, ids, op("maximum", q_idx - 1, 0)), read(0, ids, kv_idx))
    classified(shifted, length, length, (1024, 1024), tensors=(ids,), exact=False)


def test_counts_say_how_each_block_was_decided():
    assert classified(causal, 64, 64, exact=False).proof == Proof(bounds=56, undecided=8)
    assert classified(causal, 1024, 1024, (128, 128)).proof == Proof(bounds=64)
    squares = op("lt", op("floormod", q_idx * q_idx + kv_idx * kv_idx, 7), 3)
    assert classified(squares, 1024, 1024, (128, 128)).proof == Proof(sampled=64)
    hidden = op("eq", op("floormod", q_idx * 2 + kv_idx * 2, 2), 1)
    found = classified(hidden, 256, 256, (128, 128))
    assert found.proof == Proof(evaluated=4) and (found.kind == EMPTY).all()


def test_auto_stops_at_its_limit_and_stays_sound(monkeypatch):
    monkeypatch.setitem(by_evaluation._AUTO_PAIRS, "cpu", 64 * 16 + 64 * 5)
    hidden = op("eq", op("floormod", q_idx * 2 + kv_idx * 2, 2), 1)
    found = classified(hidden, 64, 64)
    assert found.counts() == {"empty": 5, "partial": 59, "full": 0}
    assert found.proof == Proof(evaluated=5, undecided=59)


def test_no_more_squares_than_a_limit_are_looked_at(monkeypatch):
    """Past it, squares of many blocks stay partial as a whole."""
    monkeypatch.setitem(by_bounds._MOST_SQUARES, "cpu", 1000)
    table = torch.rand(256, 256, generator=GENERATOR) < 0.5
    found = classified(read(0, table, q_idx, kv_idx), 256, 256, (2, 2), tensors=(table,))
    assert found.counts() == {"empty": 0, "partial": 128 * 128, "full": 0} and found.proof == Proof(undecided=128 * 128)


# --- what is mixed in every block -------------------------------------------------------------------------------------------------------

DILATED = op("eq", op("floormod", q_idx - kv_idx, 4), 0)


@pytest.mark.parametrize(
    "condition",
    [
        DILATED,
        op("eq", op("and", q_idx - kv_idx, 3), 0),
        op("eq", op("floormod", q_idx * 16 - kv_idx * 16, 112), 0),
        op("lt", op("floormod", q_idx * 3 + kv_idx, 10), 5),
        op("eq", op("floormod", q_idx, 2), op("floormod", kv_idx, 2)),
        op("ge", op("floormod", op("floormod", q_idx, 6) + op("floormod", kv_idx, 4), 3), 1),
        op("gt", cast(op("floormod", q_idx + kv_idx, 5), "float32") * 0.5, 1.0),
    ],
)
def test_a_periodic_condition_is_seen_to_be_mixed(condition):
    mask = both(causal, condition)
    found = assert_agrees(mask, 512, 480)
    assert found.proof.mixed > 1700
    long = classified(mask, 2**20, 2**20, (128, 128))
    assert long.proof.mixed > 2**25 - 2**14 and long.proof.undecided <= 2**13  # the diagonal


def test_a_formula_of_rows_and_constants_alone():
    """What is mixed is looked for below nodes that are known for whole rows of squares."""
    assert_agrees(op("where", const(True), op("eq", op("floormod", q_idx, 2), 0), const(False)), 512, 512)
    assert_agrees(both(op("or", op("eq", op("floormod", kv_idx, 3), 1), const(False)), causal), 512, 512)


@pytest.mark.parametrize(
    "combine", [lambda m, d: op("or", op("not", m), d), lambda m, d: op("xor", m, d), lambda m, d: op("where", m, d, False)]
)
def test_what_is_mixed_stays_so_in_formulas(combine):
    found = assert_agrees(combine(causal, DILATED), 512, 512)
    assert found.proof.mixed > 1700


@pytest.mark.parametrize(
    "condition",
    [
        op("lt", op("floormod", q_idx - kv_idx, 64), 30),  # not mixed in every block
        op("eq", op("floormod", q_idx * kv_idx, 3), 0),  # not a sum
        op("eq", op("floormod", q_idx * 2000 - kv_idx, 3), 0),  # may wrap around
        op("eq", op("floormod", q_idx - kv_idx, 4), 9),  # never true
    ],
)
def test_other_conditions_are_not_called_mixed(condition):
    found = assert_agrees(both(causal, condition), 160, 150)
    assert found.proof.mixed == 0


def test_a_ragged_end_is_not_called_mixed():
    """Its only key is even, and it lies in one square with a block that is mixed."""
    assert_agrees(op("eq", op("floormod", kv_idx, 2), 1), 512, 521)
    assert_agrees(op("eq", op("floormod", q_idx, 2), 1), 521, 512)


@pytest.mark.parametrize("divisor, seen", [(5, True), (37, False)])
def test_few_phases_are_looked_at(divisor, seen):
    condition = op("eq", op("floormod", q_idx - kv_idx, divisor), 0)
    assert (classified(condition, 640, 640, (64, 64), exact=False).proof.mixed == 100) is seen


# --- whether to evaluate ----------------------------------------------------------------------------------------------------------------


def test_blocks_that_are_partial_in_truth_are_not_evaluated_one_by_one():
    """A window's border at 2^20 tokens: a few blocks are looked at, and as all of those are partial, the others are left alone."""
    mask = both(causal, op("lt", q_idx - kv_idx, 1000))
    found = classified(mask, 2**20, 2**20, (64, 64))
    assert found.proof.sampled == found.proof.evaluated == 0
    assert found.proof.undecided == found.counts()["partial"] < 2**16


PARTS = {
    "causal": causal,
    "window": both(causal, op("lt", q_idx - kv_idx, 150)),
    "neighbourhood, not aligned": both(
        op("le", op("abs", op("floordiv", q_idx, 37) - op("floordiv", kv_idx, 37)), 2),
        op("le", op("abs", op("floormod", q_idx, 37) - op("floormod", kv_idx, 37)), 2),
    ),
    "rows": op("lt", q_idx, 100),
}


@pytest.mark.parametrize("q_len, kv_len", [(640, 640), (515, 333), (70, 700)])
@pytest.mark.parametrize("name", PARTS)
def test_bounds_of_parts_tell_most_blocks(name, q_len, kv_len):
    found = assert_agrees(PARTS[name], q_len, kv_len, (64, 32))
    assert found.proof.sampled + found.proof.evaluated <= 0.15 * found.kind.numel()
    assert found.proof.bounds > classified(PARTS[name], q_len, kv_len, (64, 32), exact=False).proof.bounds or name == "rows"


def test_blocks_that_cannot_be_split_are_evaluated():
    assert assert_agrees(causal, 100, 100, (10, 8)).proof.sampled > 0


def test_blocks_that_bounds_cannot_see_through_are_evaluated():
    """Bounds forget that the two readings of one element are the same; evaluation does not."""
    table = torch.arange(2048) % 2 == 0
    hidden = op("and", read(0, table, q_idx), op("not", read(0, table, q_idx)))
    found = classified(op("or", causal, hidden), 2048, 2048, (16, 16), tensors=(table,))
    assert found.counts() == {"empty": 128 * 127 // 2, "partial": 128, "full": 128 * 127 // 2}


def test_a_million_tokens_take_little_memory():
    """2^26 blocks of 128 x 128, of which none is listed."""
    found = classified(both(causal, op("lt", q_idx - kv_idx, 4096)), 2**20, 2**20, (128, 128))
    found.row_walk(), found.column_walk()
    assert found.counts()["full"] == sum(min(i, 31) for i in range(2**13))
    assert found.size_bytes < 2 * 2**20


# --- random masks ------------------------------------------------------------------------------------------------------------------

TABLES = (
    torch.randint(-9, 70, (50,), generator=GENERATOR),
    torch.randint(0, 5, (2, 40), generator=GENERATOR, dtype=torch.int32),
    torch.rand(3, generator=GENERATOR) < 0.5,
    torch.randn(60, generator=GENERATOR).cumsum(0),
    torch.rand(12, 12, generator=GENERATOR) < 0.5,
)


def numbers() -> st.SearchStrategy[Node]:
    leaves = st.one_of(st.sampled_from([q_idx, kv_idx, q_idx - kv_idx, batch, head]), st.integers(-70, 70).map(const))

    def larger(inner):
        return st.one_of(
            st.tuples(st.sampled_from(["add", "sub", "minimum", "maximum", "mul"]), inner, inner).map(lambda t: apply(*t)),
            st.tuples(st.sampled_from(["floordiv", "floormod"]), inner, st.integers(-9, 9).filter(bool)).map(lambda t: apply(*t)),
            st.tuples(st.sampled_from(["shr"]), inner, st.integers(0, 5)).map(lambda t: apply(*t)),
            st.tuples(st.sampled_from(["abs", "neg", "sign"]), inner).map(lambda t: apply(*t)),
            inner.map(lambda index: read(0, TABLES[0], index)),
            inner.map(lambda index: read(1, TABLES[1], batch, index)),
            inner.map(lambda index: read(3, TABLES[3], index)).map(lambda x: cast(apply("floor", x), "int32")),
        )

    return st.recursive(leaves, larger, max_leaves=5)


def masks() -> st.SearchStrategy[Node]:
    leaves = st.one_of(
        st.tuples(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), numbers(), numbers()).map(lambda t: apply(*t)),
        numbers().map(lambda index: read(2, TABLES[2], head) if index is head else apply("gt", read(3, TABLES[3], index), 0.5)),
        st.tuples(numbers(), numbers()).map(lambda t: read(4, TABLES[4], *t)),
    )

    def larger(inner):
        return st.one_of(
            st.tuples(st.sampled_from(["and", "or", "xor"]), inner, inner).map(lambda t: apply(*t)),
            inner.map(lambda x: apply("not", x)),
            st.tuples(inner, inner, inner).map(lambda t: apply("where", *t)),
        )

    return st.recursive(leaves, larger, max_leaves=4)


RANDOM = {
    "mask": masks(),
    "q_len": st.integers(1, 70),
    "kv_len": st.integers(1, 70),
    "block": st.sampled_from([(8, 8), (4, 16), (3, 5), (16, 16)]),
}


@given(**RANDOM)
@settings(max_examples=150, deadline=None)
def test_random_masks_agree_with_brute_force(mask, q_len, kv_len, block):
    assert_agrees(mask, q_len, kv_len, block, b=2, h=3, tensors=TABLES)


@pytest.mark.slow
@given(**RANDOM)
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
def test_very_many_random_masks_agree_with_brute_force(mask, q_len, kv_len, block):
    assert_agrees(mask, q_len, kv_len, block, b=2, h=3, tensors=TABLES)


# --- what is refused ---------------------------------------------------------------------------------------------------------------


def test_negative_lengths_are_refused():
    with pytest.raises(ShapeError, match="expected lengths >= 0, got q_len -1 and kv_len 8"):
        classified(causal, -1, 8)


def test_no_batch_is_refused():
    with pytest.raises(ShapeError, match="expected batch >= 1 and heads >= 1, got 0 and 1"):
        classified(causal, 8, 8, b=0)


def test_a_block_without_tokens_is_refused():
    with pytest.raises(ShapeError, match=r"expected a block of at least 1 × 1 tokens, got \(0, 8\)"):
        classified(causal, 8, 8, (0, 8))


def test_a_tensor_on_another_device_is_refused():
    table = torch.zeros(8, device="meta", dtype=torch.int64)
    with pytest.raises(InputError, match="captured tensor table_0 is on meta, but the block map is made on cpu"):
        classified(op("eq", read(0, table, kv_idx), 0), 8, 8, tensors=(table,))


def test_a_mask_of_the_score_is_a_broken_promise():
    with pytest.raises(InternalError, match="the mask reads the score"):
        classified(op("gt", input_node("score"), 0.0), 8, 8)


# --- cost --------------------------------------------------------------------------------------------------------------------------


LONG = 96_000


def long_mask() -> tuple[Node, torch.Tensor]:
    ids = (torch.rand(LONG, generator=torch.Generator().manual_seed(0)) < 40 / LONG).cumsum(0)
    return both(op("eq", read(0, ids, q_idx), read(0, ids, kv_idx)), causal), ids


def print_cost_of_long_mask() -> None:
    """MiB by which the peak of memory grows, and seconds; for a process of its own."""
    mask, ids = long_mask()
    classified(mask, 1024, 1024, (128, 128), tensors=(ids,))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = classified(mask, LONG, LONG, (128, 128), tensors=(ids,))
    found.rows(), found.columns()
    seconds = time.perf_counter() - start
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds)


@pytest.mark.slow
def test_a_long_mask_takes_little_memory_and_time():
    """96,000 tokens of causal documents: the dense mask would take 9.2 GB."""
    script = "from tests.sparsity.test_classify import print_cost_of_long_mask as cost; cost()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    grown_mib, seconds = map(float, done.stdout.split())
    assert grown_mib < 100
    assert seconds < 2


@pytest.mark.slow
def test_a_long_mask_agrees_with_brute_force_on_sampled_tiles():
    mask, ids = long_mask()
    found = classified(mask, LONG, LONG, (128, 128), tensors=(ids,))
    rows, columns = torch.randint(0, 750, (2, 50), generator=GENERATOR)
    for i, j in zip([*rows.tolist(), 5, 6, 749], [*columns.tolist(), 5, 5, 749], strict=True):
        q, k = torch.arange(i * 128, (i + 1) * 128)[:, None], torch.arange(j * 128, (j + 1) * 128)
        tile = (ids[q] == ids[k]) & (q >= k)
        assert int(found.kind[0, 0, i, j]) == (FULL if tile.all() else PARTIAL if tile.any() else EMPTY)


@pytest.mark.slow
def test_dense_and_graph_agree_on_a_medium_length():
    mask = both(causal, op("lt", q_idx - kv_idx, 300))
    expected = kinds_of(dense_mask(mask, 1, 1, 2000, 1900), (128, 64))
    assert torch.equal(classified(mask, 2000, 1900, (128, 64)).kind, expected)
