"""What a certificate says, against dense masks; and that it finds the sub-expression that stops a proof."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

import flexc
from flexc import masks
from flexc.errors import InputError
from flexc.sparsity import EMPTY, FULL, PARTIAL, BlockMap
from flexc.sparsity.certificate import Certificate, certify
from flexc.sparsity.reach import Tokens
from tests.sparsity.graphs import causal, classified, dense_mask, head, kinds_of, kv_idx, op, q_idx, read


def changed(blocks: BlockMap, **runs: torch.Tensor) -> BlockMap:
    """The map with other runs, as if classification had been wrong."""
    rows = dataclasses.replace(blocks.rows(), **runs)
    return BlockMap(rows, blocks.q_len, blocks.kv_len, blocks.block, blocks.batch, blocks.heads, blocks.tokens)


def spread(ranges: tuple[Tokens, ...], shape: tuple[int, int, int]) -> torch.Tensor:
    """Ranges as bool [B or 1, Hq or 1, tokens]."""
    found = torch.zeros(shape, dtype=torch.bool)
    for b, h, first, stop in ranges:
        assert first < stop and not found[b, h, first:stop].any()
        found[b, h, first:stop] = True
    return found


# --- comparison --------------------------------------------------------------------------------------------------------------------


def test_a_small_map_is_compared_as_a_whole():
    found = classified(causal, 64, 70).certify()
    assert found.is_complete and found.compared == found.blocks == {"empty": 36, "partial": 8, "full": 28}
    assert found.wrong == found.loose == found.stoppers == () and found.unproved == 0 and found.loose_share == 0


@pytest.mark.parametrize("tiles", [1, 3, 30, 300])
def test_a_large_map_gives_each_kind_its_share(tiles):
    found = classified(causal, 8 * 200, 8 * 200).certify(tiles=tiles)
    assert sum(found.compared.values()) == tiles and not found.is_complete
    assert max(found.compared.values()) - min(found.compared.values()) <= 1
    assert not found.wrong and not found.loose


def test_what_a_rare_kind_leaves_is_for_the_others():
    found = classified(op("lt", kv_idx, 12), 800, 800).certify(tiles=900)
    assert found.blocks == {"empty": 9800, "partial": 100, "full": 100}
    assert found.compared == {"empty": 700, "partial": 100, "full": 100}


def test_as_many_tiles_as_the_map_has_are_all_of_them():
    blocks = classified(causal, 64, 64)
    assert blocks.certify(tiles=64).is_complete and not blocks.certify(tiles=63).is_complete
    one_by_one = {t[:4] for t in changed(blocks, full=~blocks.rows().full).certify(tiles=64).wrong}
    assert len(one_by_one) == 8  # every partial block called full, each once


def test_the_seed_chooses_the_tiles():
    blocks = classified(causal, 800, 800)
    wrong = changed(blocks, full=torch.ones_like(blocks.rows().full))
    by_seed = [wrong.certify(tiles=60, seed=seed).wrong for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1]
    loose = changed(blocks, full=torch.zeros_like(blocks.rows().full))
    found = [loose.certify(tiles=60, seed=seed).loose for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_a_full_block_that_is_not_is_wrong():
    blocks = classified(causal, 64, 64)
    found = changed(blocks, full=torch.ones_like(blocks.rows().full)).certify()
    assert found.wrong == tuple((0, 0, i, i, "full", "partial") for i in range(8))
    assert "wrong       8 tiles\n  block (0, 0, 0, 0) is partial, not full" in str(found) and "and 4 more" in str(found)


def test_an_empty_block_that_is_not_is_wrong():
    blocks = classified(causal, 64, 64)
    start = blocks.rows().start.clone()
    start[start == 0] = torch.where(blocks.rows().stop[start == 0] > 1, 1, 0).int()
    found = changed(blocks, start=start).certify()
    assert found.wrong == tuple((0, 0, i, 0, "empty", "full") for i in range(2, 8))


def test_a_partial_block_that_is_not_is_loose():
    blocks = classified(causal, 64, 64)
    found = changed(blocks, full=torch.zeros_like(blocks.rows().full)).certify()
    assert not found.wrong and len(found.loose) == 28 and {t.true for t in found.loose} == {"full"}
    assert found.loose_share == 28 / 64 and "loose       43.75% of all blocks" in str(found)


def test_looseness_of_a_sample_is_an_estimate():
    blocks = classified(causal, 1600, 1600)
    found = changed(blocks, full=torch.zeros_like(blocks.rows().full)).certify(tiles=400)
    assert found.loose_share == pytest.approx(19900 / 40000, abs=0.01) and f"loose       about {found.loose_share:.2%} of all" in str(found)


def test_a_captured_tensor_that_changed_shows_as_wrong():
    ids = torch.arange(256) // 50
    blocks = flexc.block_map(masks.document(ids), 256, 256, block=32)
    assert not blocks.certify().wrong
    ids.fill_(3)
    assert {t.true for t in blocks.certify().wrong} == {"full"}


def test_a_ragged_last_column_is_partial_and_not_loose():
    found = classified(None, 64, 61).certify()
    assert found.compared == {"empty": 0, "partial": 8, "full": 56} and not found.loose and not found.wrong
    found = classified(op("ge", q_idx, 0), 61, 61).certify()
    assert not found.loose and not found.wrong and found.unproved == 0


@pytest.mark.parametrize("q_len, kv_len", [(0, 0), (0, 64), (64, 0), (1, 1)])
def test_short_maps(q_len, kv_len):
    found = classified(causal, q_len, kv_len).certify()
    assert found.is_complete and not found.wrong and str(found)


@pytest.mark.parametrize("tiles", [0, -1, 1.5, True, None])
def test_no_number_of_tiles_is_refused(tiles):
    with pytest.raises(InputError, match="expected a number of tiles >= 1, got"):
        classified(causal, 64, 64).certify(tiles=tiles)


# --- queries that see nothing, keys that nobody sees -------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len, kv_len", [(64, 64), (20, 61), (61, 20), (1, 40)])
@pytest.mark.parametrize("block", [(8, 8), (16, 4), (5, 7)])
@pytest.mark.parametrize("chunk_bytes", [1, 2**13, 2**26])
def test_blind_queries_and_unseen_keys_agree_with_the_dense_mask(q_len, kv_len, block, chunk_bytes, monkeypatch):
    monkeypatch.setattr(sys.modules["flexc.sparsity.tokens"], "CHUNK_BYTES", chunk_bytes)
    for seed, share in enumerate((0.0, 0.01, 0.05, 0.5, 1.0)):
        table = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(seed)) < share
        mask = op("and", read(0, table, head, q_idx, kv_idx), op("lt", kv_idx, 33))
        dense = dense_mask(mask, 1, 2, q_len, kv_len, (table,))
        found = classified(mask, q_len, kv_len, block, h=2, tensors=(table,)).certify()
        assert torch.equal(spread(found.blind, (1, 2, q_len)), ~dense.any(-1))
        assert torch.equal(spread(found.unseen, (1, 2, kv_len)), ~dense.any(-2))
        assert found.blind_unknown == found.unseen_unknown == ()


def test_without_a_mask_nobody_is_blind_or_unseen():
    found = classified(None, 61, 59).certify()
    assert found.blind == found.unseen == found.blind_unknown == found.unseen_unknown == ()


def test_runs_prove_blind_queries_without_a_token():
    """With no pairs to evaluate, whole blocks are still proved; the tokens in partial blocks are not looked at."""
    mask = op("and", op("ge", q_idx, 20), op("lt", kv_idx, 44))
    found = certify(classified(mask, 64, 64), 64, 0, reach_pairs=0)
    assert found.blind == ((0, 0, 0, 16),) and found.blind_unknown == ((0, 0, 16, 24),)
    assert found.unseen == ((0, 0, 48, 64),) and found.unseen_unknown == ((0, 0, 40, 48),)
    diagonal = certify(classified(op("eq", q_idx, kv_idx), 64, 64), 64, 0, reach_pairs=0)
    assert diagonal.blind == () and diagonal.blind_unknown == ((0, 0, 0, 64),)
    assert "none found, 64 not looked at" in str(diagonal)


def test_a_budget_is_spent_on_whole_tiles_and_leaves_the_rest_unknown():
    blocks = classified(op("eq", q_idx, kv_idx), 64, 64)
    for tiles in range(9):
        found = certify(blocks, 64, 0, reach_pairs=64 * tiles + 63)
        looked_at = 64 - sum(t.stop - t.first for t in found.blind_unknown)
        assert looked_at <= 8 * tiles and found.blind == ()
    assert certify(blocks, 64, 0, reach_pairs=64 * 8).blind_unknown == ()


def test_ranges_read_as_words():
    text = str(flexc.block_map(lambda b, h, i, j: (i >= j) & (i > 3) & (j != 5), 200, 200, block=32).certify())
    assert "blind       4 queries see no key\n  0 to 3\n" in text and "unseen      1 key is seen by nobody\n  5\n" in text
    lengths = torch.tensor([200, 130])
    text = str(flexc.block_map(masks.padding(lengths), 200, 200, batch=2, block=32).certify())
    assert "unseen      70 keys are seen by nobody\n  130 to 199 of batch 1, head 0\n" in text


# --- what stops a proof ------------------------------------------------------------------------------------------------------------


def certificate_of(mask) -> Certificate:
    found = flexc.block_map(mask, 512, 512, block=32).certify()
    assert not found.wrong and sum(s.tiles for s in found.stoppers) == found.unproved > 0
    return found


EVEN = torch.arange(1024) % 2 == 0
EVEN_PAIRS = EVEN[:, None] & EVEN
SHUFFLED = torch.randperm(512, generator=torch.Generator().manual_seed(0))
INTERLEAVED = torch.arange(512) // 32 % 2 + 2 * (torch.arange(512) % 2)  # even blocks hold 0 and 2, odd ones 1 and 3


def remainder(b, h, q_idx, kv_idx):
    return (q_idx * 2 + kv_idx * 2) % 2 == 0


def unsorted(b, h, q_idx, kv_idx):
    return INTERLEAVED[q_idx] == INTERLEAVED[kv_idx]


def sorted_tables(b, h, q_idx, kv_idx):
    return STEPS[q_idx] != HALVES[kv_idx]


def jumps(b, h, q_idx, kv_idx):
    return EVEN[q_idx * 2]


def jumps_twice(b, h, q_idx, kv_idx):
    return EVEN_PAIRS[q_idx * 2, kv_idx * 2]


def product(b, h, q_idx, kv_idx):
    return q_idx * kv_idx - kv_idx * q_idx // 2 >= 0


def same_element(b, h, q_idx, kv_idx):
    return SHUFFLED[q_idx * 7 % 512] - SHUFFLED[q_idx * 7 % 512] // 2 >= 0


def parts(b, h, q_idx, kv_idx):
    return q_idx // 100 - kv_idx // 50 > q_idx // 200


def logic(b, h, q_idx, kv_idx):
    return (q_idx % 3 == 0) | (q_idx % 3 == 1) | (q_idx % 3 == 2)


def rounded(b, h, q_idx, kv_idx):
    return q_idx / 4 - kv_idx / 4 + kv_idx / 4 >= 0


STEPS, HALVES = torch.arange(512) // 2 * 4, torch.arange(512) // 2 * 4 + 2  # ascending, without a number in common


@pytest.mark.parametrize(
    "mask, expression, why",
    [
        (remainder, "(q_idx * 2 + kv_idx * 2) % 2", "bounds take x % 2 for any remainder"),
        (unsorted, "INTERLEAVED[q_idx] == INTERLEAVED[kv_idx]", "INTERLEAVED is not sorted"),
        (sorted_tables, "STEPS[q_idx] != HALVES[kv_idx]", "only the least and the largest value in a block are known"),
        (jumps, "EVEN[q_idx * 2]", "the index of EVEN jumps inside a block"),
        (jumps_twice, "EVEN_PAIRS[q_idx * 2, kv_idx * 2]", "EVEN_PAIRS is read at several indices that move"),
        (product, "q_idx * kv_idx - kv_idx * q_idx // 2", "it holds a product of positions"),
        (same_element, "SHUFFLED[q_idx * 7 % 512] - SHUFFLED[q_idx * 7 % 512] // 2", "its parts move together"),
        (parts, "q_idx // 100 - kv_idx // 50 > q_idx // 200", "its parts move together"),
        (logic, "q_idx % 3 == 0 or q_idx % 3 == 1 or q_idx % 3 == 2", "only together they are the same"),
        (rounded, "q_idx * 0.25 - kv_idx * 0.25 + kv_idx * 0.25", "floating point, where bounds leave room for rounding"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_stopper_is_the_smallest_expression_that_stops(mask, expression, why):
    (stopper,) = certificate_of(mask).stoppers
    assert stopper.expression == expression and why in stopper.why
    assert stopper.where.startswith(f"test_certificate.py:{mask.__code__.co_firstlineno + 1}: return ")
    text = str(certificate_of(mask))
    assert f"tiles stopped by `{expression}`\n      at {stopper.where}\n      {stopper.why}" in text


def test_the_way_leads_through_conditions_that_are_proved():
    """`and`, `or`, `not` and `where` are not to blame for an operand that is."""
    for mask in (
        lambda b, h, i, j: (i >= j) & remainder(b, h, i, j),
        lambda b, h, i, j: (i < j) | ~((i >= 0) & ~remainder(b, h, i, j)),
        lambda b, h, i, j: flexc.where(i >= j, remainder(b, h, i, j), False),
    ):
        (stopper,) = certificate_of(mask).stoppers
        assert stopper.expression == "(q_idx * 2 + kv_idx * 2) % 2"


def test_bounds_of_floats_that_are_wider_by_rounding_alone_are_not_to_blame():
    """Block 4 begins at 128 · 0.1, which is the limit, and bounds of the product begin a little below."""
    (stopper,) = certificate_of(lambda b, h, i, j: i * 0.1 >= 12.8).stoppers
    assert stopper.expression == "q_idx * 0.1 >= 12.8" and "floating point" in stopper.why and stopper.example[2] == 4


def test_nan_is_no_value_and_every_value():
    """Bounds of a table that holds NaN are anything; where the block reads none, the read is to blame, else the comparison."""
    odd, even = torch.ones(1024), torch.ones(1024)
    odd[1::2], even[::2] = float("nan"), float("nan")
    (stopper,) = certificate_of(lambda b, h, i, j: odd[i * 2] < 0.5).stoppers
    assert stopper.expression == "odd[q_idx * 2]"
    (stopper,) = certificate_of(lambda b, h, i, j: even[i * 2] < 0.5).stoppers
    assert stopper.expression == "even[q_idx * 2] < 0.5"


def test_two_operands_to_blame_together():
    """Both sides of `and` are true all over a block, and bounds know neither: one of them is named."""
    (stopper,) = certificate_of(lambda b, h, i, j: EVEN[i * 2] & EVEN_PAIRS[j * 2, j * 2]).stoppers
    assert stopper.expression in ("EVEN[q_idx * 2]", "EVEN_PAIRS[kv_idx * 2, kv_idx * 2]")


def test_the_way_leads_through_elements_to_their_index():
    """The index is loose, and so is everything above it."""
    table = torch.tensor([5.0, -5.0])
    (stopper,) = certificate_of(lambda b, h, i, j: table[(i * 2) % 2] > 0.0).stoppers
    assert stopper.expression == "q_idx * 2 % 2"


def test_each_stopper_counts_its_tiles():
    halves = certificate_of(lambda b, h, i, j: flexc.where(i < 128, remainder(b, h, i, j), unsorted(b, h, i, j)))
    expected = {"(q_idx * 2 + kv_idx * 2) % 2": 64, "INTERLEAVED[q_idx] == INTERLEAVED[kv_idx]": 96}
    assert {s.expression: s.tiles for s in halves.stoppers} == expected
    assert [s.tiles for s in halves.stoppers] == [96, 64] and halves.unproved == 160
    for stopper in halves.stoppers:
        row = stopper.example[2]
        assert (row < 4) == ("%" in stopper.expression)


def test_stoppers_of_more_tiles_than_are_traced_stand_for_all():
    found = flexc.block_map(remainder, 512, 512, block=16).certify()
    assert found.unproved == 1024 and [s.tiles for s in found.stoppers] == [1024]


def test_what_bounds_prove_has_no_stopper():
    ids = torch.arange(512) // 50
    for mask in (masks.causal, masks.document(ids), masks.sliding_window(70) | masks.sinks(4), masks.dilated(50, 3), masks.prefix_lm(99)):
        found = flexc.block_map(mask, 512, 512, block=32).certify()
        assert found.unproved == 0 and found.stoppers == () and not found.wrong and not found.loose


def test_a_graph_without_lines_and_names_still_has_words():
    table = torch.arange(400) % 6 == 0
    found = classified(read(0, table, q_idx * 6), 64, 64, tensors=(table,)).certify()
    assert [s.expression for s in found.stoppers] == ["table_0[q_idx * 6]"] and found.stoppers[0].where is None


def test_names_and_kinds_agree_with_those_of_the_map():
    kinds = kinds_of(dense_mask(causal, 1, 1, 64, 64), (8, 8))
    names = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
    blocks = classified(causal, 64, 64)
    wrong = changed(blocks, full=~blocks.rows().full).certify()
    for tile in (*wrong.wrong, *wrong.loose):
        assert names[int(kinds[tile.batch, tile.head, tile.row, tile.column])] == tile.true


def test_the_line_is_that_of_the_function_at_hand():
    """Functions that share a node each have a line of their own."""

    def first(b, h, i, j):
        return EVEN[i * 4]

    def second(b, h, i, j):
        return EVEN[i * 4]

    lines = []
    maps = [flexc.block_map(mask, 256, 256, block=32) for mask in (first, second, first)]
    for mask, blocks in zip((first, second, first), maps):
        (stopper,) = blocks.certify().stoppers
        lines.append(int(stopper.where.split(":")[1]) - mask.__code__.co_firstlineno)
    assert lines == [1, 1, 1]
