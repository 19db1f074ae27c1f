"""BlockMask beside PyTorch's: lists, sizes, views, slices; and what attention makes of them."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings

import numpy as np
import pytest
import torch

import flexc
from flexc import compat, frontend
from flexc.compat.rules import rule_of
from tests.accuracy import qkv
from tests.compat.beside import KNOWS_ORDERS, LISTS, TORCH, assert_right, assert_same_block_mask

DOCUMENT = torch.arange(4).repeat_interleave(torch.tensor([40, 7, 90, 63]))
LENGTHS = torch.tensor([33, 150, 200])


def causal(b, h, q, kv):
    return q >= kv


def window_by_head(b, h, q, kv):
    return (q >= kv) & (q - kv <= 20 * (h + 1))


def documents(b, h, q, kv):
    return DOCUMENT[q] == DOCUMENT[kv]


def padded(b, h, q, kv):
    return kv < LENGTHS[b]


def nothing(b, h, q, kv):
    return q < -1


def everything(b, h, q, kv):
    return q >= 0


def scattered(b, h, q, kv):
    return (q * 7 + kv * 13) % 91 == 5


MASKS = [causal, window_by_head, documents, padded, nothing, everything, scattered]
SIZES = [(3, 2, 200, 200, 128), (3, 2, 128, 200, 64), (3, 2, 200, 96, (32, 16)), (3, 1, 200, 200, (200, 200)), (3, 2, 33, 200, (5, 48))]


def both(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=128, **options):
    sizes = (mask_mod, B, H, Q_LEN, KV_LEN)
    options |= {"device": "cpu", "BLOCK_SIZE": BLOCK_SIZE}
    return compat.create_block_mask(*sizes, **options), TORCH.create_block_mask(*sizes, **options)


# --- create_block_mask, lists and views -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask_mod", MASKS)
def test_lists_and_views_are_those_of_torch(mask_mod, sizes):
    assert_same_block_mask(*both(mask_mod, *sizes))


@pytest.mark.parametrize("separate", [True, False])
def test_separate_full_blocks(separate):
    ours, theirs = both(window_by_head, 1, 2, 200, 200, 32, separate_full_blocks=separate)
    assert_same_block_mask(ours, theirs)
    assert (ours.full_kv_indices is None) == (not separate)


def test_none_counts_as_one():
    assert_same_block_mask(*both(causal, None, None, 100, 200))


def test_device_default_is_the_accelerator_else_the_cpu():
    expected = torch.accelerator.current_accelerator() or torch.device("cpu")
    assert compat.create_block_mask(causal, 1, 1, 64, 64).kv_indices.device.type == expected.type


@KNOWS_ORDERS
def test_repr_and_as_tuple_are_those_of_torch():
    ours, theirs = both(window_by_head, 3, 2, 200, 100, (64, 32))
    assert repr(ours) == repr(theirs)
    for flatten in (True, False):
        for mine, other in zip(ours.as_tuple(flatten), theirs.as_tuple(flatten), strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


@pytest.mark.parametrize("grid", [(20, 20), 7, (3, 50), -1, (1, 1)])
def test_to_string(grid):
    ours, theirs = both(window_by_head, 3, 2, 200, 200, 4)
    assert ours.to_string(grid) == theirs.to_string(grid)
    assert ours.to_string(grid, limit=2) == theirs.to_string(grid, limit=2)
    assert ours.to_string(grid, limit=6) == theirs.to_string(grid, limit=6)


def test_lists_are_made_when_first_read_and_kept():
    ours, _ = both(causal, 1, 1, 2000, 2000)
    assert ours._lists._made is None and ours.shape == (1, 1, 2000, 2000)
    compat.flex_attention(*qkv(1, 2, 2, 2000, dim=8), block_mask=ours)
    assert ours._lists._made is None
    assert ours.kv_indices is ours.kv_indices


def test_a_mask_of_a_million_queries_and_keys_takes_no_matrix():
    """2^40 pairs, in 64 x 64 blocks."""
    mask = compat.create_block_mask(causal, None, None, 2**20, 2**20, device="cpu", BLOCK_SIZE=2**14)
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 64
    assert mask.full_kv_num_blocks[0, 0].tolist() == list(range(64))


@pytest.mark.parametrize("function", [lambda a, b: True, lambda s, b, h, q, kv: s, lambda *any: True, 3])
def test_what_is_no_mask_function_is_refused(function):
    with pytest.raises(AssertionError, match=r"score function|positional arguments|any number of arguments|not a function"):
        compat.create_block_mask(function, 1, 1, 64, 64, device="cpu")


def test_functions_that_cannot_be_traced_are_refused_at_once():
    def unknown(b, h, q, kv):
        return torch.sort(q)[0] > 0

    with pytest.raises(flexc.TraceError, match="sort of a traced value"):
        compat.create_block_mask(unknown, 1, 1, 64, 64, device="cpu")


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ((1, 1, 0, 64), {}, flexc.ShapeError, "expected Q_LEN >= 1, got 0"),
        ((1, 1, 64, 2.5), {}, flexc.InputError, "expected KV_LEN to be an integer, got a float"),
        ((-1, 1, 64, 64), {}, flexc.ShapeError, "expected B >= 1, got -1"),
        ((1, 1, 64, 64), {"BLOCK_SIZE": 0}, flexc.ShapeError, "expected BLOCK_SIZE of at least 1 x 1 tokens, got 0 x 0"),
        ((1, 1, 64, 64), {"BLOCK_SIZE": (1, 2, 3)}, flexc.InputError, r"expected BLOCK_SIZE to be \(queries, keys\)"),
        ((1, 1, 64, 64), {"dq_kv_order": 1}, ValueError, "expected dq_kv_order to be a bool, got a int"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, options, error, message):
    with pytest.raises(error, match=message):
        compat.create_block_mask(causal, *sizes, device="cpu", **options)


def test_write_order_is_refused_with_a_warning():
    with pytest.warns(UserWarning, match="dq_write_order stays None"):
        assert compat.create_block_mask(causal, 1, 1, 64, 64, device="cpu", compute_dq_write_order=True).dq_write_order is None


def test_compile_flag_changes_nothing():
    ours, theirs = both(causal, 1, 1, 100, 100)
    assert_same_block_mask(compat.create_block_mask(causal, 1, 1, 100, 100, "cpu", _compile=True), theirs)
    assert ours.mask_mod is causal


# --- from_kv_blocks ---------------------------------------------------------------------------------------------------------------------


def some_lists():
    """[2, 1, 3, 4]: partial and full blocks, with entries past the counts that name no block."""
    num = torch.tensor([[[1, 2, 0]], [[4, 0, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 9, 9, 9], [0, 3, 9, 9], [9, 9, 9, 9]]], [[[3, 1, 0, 2], [9, 9, 9, 9], [1, 9, 9, 9]]]], dtype=torch.int32)
    full_num = torch.tensor([[[1, 0, 2]], [[0, 1, 0]]], dtype=torch.int32)
    full = torch.tensor([[[[0, 9, 9, 9], [9, 9, 9, 9], [1, 2, 9, 9]]], [[[9, 9, 9, 9], [2, 9, 9, 9], [9, 9, 9, 9]]]], dtype=torch.int32)
    return [torch.where(x == 9, 0, x) for x in (num, indices, full_num, full)]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("options", [{}, {"BLOCK_SIZE": 16}, {"BLOCK_SIZE": (16, 8), "seq_lengths": (45, 30)}, {"compute_q_blocks": False}])
def test_from_kv_blocks(options, count):
    ours = compat.BlockMask.from_kv_blocks(*some_lists()[:count], mask_mod=causal, **options)
    theirs = TORCH.BlockMask.from_kv_blocks(*some_lists()[:count], mask_mod=causal, **options)
    assert_same_block_mask(ours, theirs)
    assert repr(ours) == repr(theirs)


def tokens_of(partial, full, rule, q_side, kv_side):
    """What lists of blocks mean, pair by pair, from dense tables [B, H, rows, columns]."""
    rows, columns = partial.shape[-2:]
    q, kv = torch.arange(rows * q_side)[:, None], torch.arange(columns * kv_side)
    allowed = torch.ones(len(q), len(kv), dtype=torch.bool) if rule is None else rule(0, 0, q, kv)

    def spread(table):
        return table.repeat_interleave(q_side, 2).repeat_interleave(kv_side, 3)

    return spread(partial) & allowed | spread(full)


@pytest.mark.parametrize("rule", [None, causal])
@pytest.mark.parametrize("which", ["partial", "partial and full", "only full"])
@pytest.mark.parametrize("maker", [compat.BlockMask, TORCH.BlockMask])
def test_lists_are_the_mask(maker, which, rule):
    """Without a rule listed blocks are allowed whole; with one, partial blocks as far as it allows, and full blocks whatever it says."""
    torch.manual_seed(1)
    kind = torch.randint(0, 3, (2, 1, 3, 4))
    kind[1, 0, 1] = 0  # rows without a key
    partial, full = (kind == 1) & (which != "only full"), (kind == 2) & (which != "partial")
    pairs = [x for table in (partial, full) for x in compat.lists.ordered(table)]
    block_mask = maker.from_kv_blocks(*(pairs[:2] if which == "partial" else pairs), BLOCK_SIZE=(16, 8), mask_mod=rule)
    tokens = tokens_of(partial, full, rule, 16, 8)

    def by_token(b, h, q, kv):
        return tokens[b, 0, q, kv]

    assert_right(*qkv(2, 2, 1, 48, 32, dim=8), None, by_token, block_mask, enable_gqa=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles for the CPU with g++")
@pytest.mark.parametrize("rule", [None, causal])
def test_lists_mean_what_torchs_compiled_kernel_makes_of_them(rule):
    """PyTorch's eager mathematics ignores the lists; its kernels do not."""
    torch.manual_seed(1)
    kind = torch.randint(0, 3, (2, 1, 3, 4))
    pairs = [x for table in (kind == 1, kind == 2) for x in compat.lists.ordered(table)]
    theirs = TORCH.BlockMask.from_kv_blocks(*pairs, BLOCK_SIZE=128, mask_mod=rule)
    q, k, v = qkv(2, 2, 2, 384, 512, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.compile(TORCH.flex_attention)(q, k, v, block_mask=theirs)
    torch._dynamo.reset()
    torch.testing.assert_close(compat.flex_attention(q, k, v, block_mask=theirs), expected, rtol=1e-5, atol=1e-5)


def test_lists_of_some_batch_elements_and_heads_are_repeated():
    tables = torch.rand(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    q, k, v = qkv(2, 4, 4, 24, dim=8)
    for batch, head in ((0, slice(None)), (slice(None), 1), (1, 2)):
        table = tables[batch, head].reshape(1 if isinstance(batch, int) else 2, 1 if isinstance(head, int) else 4, 3, 3)
        tokens = table.expand(2, 4, 3, 3).repeat_interleave(8, 2).repeat_interleave(8, 3)
        block_mask = compat.BlockMask.from_kv_blocks(*compat.lists.ordered(table), BLOCK_SIZE=8)
        assert_right(q, k, v, None, lambda b, h, q, kv: tokens[b, h, q, kv], block_mask)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_lists_without_batch_or_heads(dimensions):
    table = torch.tensor([[True, False], [True, True]])
    lists = [x[(None,) * (dimensions - 2)] for x in compat.lists.ordered(table)]
    block_mask = compat.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8)
    assert block_mask.shape == (1,) * (dimensions - 2) + (16, 16)
    assert_right(*qkv(2, 4, 4, 16, dim=8), None, lambda b, h, q, kv: q // 8 >= kv // 8, block_mask)


def test_half_a_pair_of_lists_is_refused():
    num, indices, full_num, full = some_lists()
    for given in ((num, indices, full_num, None), (num, indices, None, full)):
        with pytest.raises(AssertionError, match="full_kv_num_blocks and full_kv_indices belong together"):
            compat.BlockMask.from_kv_blocks(*given)
    with pytest.raises(AssertionError, match="full_q_num_blocks and full_q_indices belong together"):
        compat.BlockMask((384, 512), num, indices, None, None, None, None, full_num, None)
    with pytest.raises(AssertionError, match="expected kv_num_blocks and kv_indices, got None"):
        compat.BlockMask((384, 512), None, indices, None, None, None, None, None, None)
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        compat.BlockMask.from_kv_blocks(num[0, 0, :1], indices[0, 0, 0])
    with pytest.raises(ValueError, match="dq_kv_order"):
        compat.BlockMask.from_kv_blocks(num, indices, dq_kv_order=3)
    with pytest.raises(ValueError, match="dq_write_order_full needs dq_write_order"):
        compat.BlockMask.from_kv_blocks(num, indices, dq_write_order_full=num)


def test_a_listed_block_that_does_not_exist_is_refused():
    lists = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 0], [2, 0]]]], dtype=torch.int32)
    block_mask = compat.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8)
    with pytest.raises(flexc.IndexRangeError, match="names block 2: expected 0 to 1"):
        compat.flex_attention(*qkv(1, 1, 1, 16, dim=8), block_mask=block_mask)


def test_lists_narrower_than_the_keys():
    """PyTorch lets lists be only as wide as their longest row."""
    lists = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[3], [1]]]], dtype=torch.int32)
    block_mask = compat.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, seq_lengths=(16, 30))
    assert_right(*qkv(1, 1, 1, 16, 30, dim=8), None, lambda b, h, q, kv: kv // 8 == 3 - 2 * (q // 8), block_mask)


def test_lists_with_fewer_rows_than_queries_are_refused():
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    block_mask = compat.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=8, seq_lengths=(9, 8))
    with pytest.raises(flexc.ShapeError, match="block_mask lists 1 rows of 8 queries: expected enough for 9 queries"):
        compat.flex_attention(*qkv(1, 1, 1, 9, 8, dim=8), block_mask=block_mask)


def test_the_block_size_of_lists_is_compiled_in():
    """A division by a number that is known only at run time would cost each pair one, and the proof of the blocks."""
    q, k, _ = qkv(1, 1, 1, 48, dim=8)
    for side in (8, 16, 24):
        table = torch.ones(1, 1, 48 // side, 48 // side, dtype=torch.bool).tril()
        block_mask = compat.BlockMask.from_kv_blocks(*compat.lists.ordered(table), BLOCK_SIZE=side)
        rule = rule_of(block_mask, q.shape, k.shape, q.device)
        trace, binding = frontend.trace(None, rule)
        assert not binding.scalars and not trace.graph.scalars


# --- indexing ---------------------------------------------------------------------------------------------------------------------------

PICKS = [0, 2, -1, slice(0, 2), slice(1, None), slice(None, None, 2), slice(2, 1), [2, 0], [], torch.tensor([1])]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("pick", PICKS, ids=str)
def test_indexing_gives_the_lists_of_torch(pick, axis):
    ours, theirs = both(window_by_head, 3, 3, 96, 96, 32)
    index = (slice(None),) * axis + (pick,)
    for name in LISTS:
        assert torch.equal(getattr(ours[index], name), getattr(theirs[index], name)), name
    assert ours[index].shape[:2] == theirs[index].shape[:2]


def test_indexing_by_numbers_in_tensors_and_by_truth_values():
    ours, theirs = both(window_by_head, 3, 3, 96, 96, 32)
    for one in (torch.tensor(1), np.int64(1)):
        assert torch.equal(ours[one].kv_indices, theirs[1].kv_indices) and ours[one].shape == (1, 3, 96, 96)
    assert torch.equal(ours[torch.tensor([True, False, True])].kv_indices, theirs[torch.tensor([True, False, True])].kv_indices)
    assert ours[torch.tensor([True, False, True])].shape == (2, 3, 96, 96)


@pytest.mark.parametrize(
    "index",
    [
        1,
        -1,
        (0, 2),
        (slice(1, 3), 2),
        (0, 1, 2),
        (slice(None), slice(None), 1),
        (slice(None), slice(None), slice(0, 4, 2)),
        ([-1, 0],),
        (slice(None, None, 2), slice(1, None)),
        (0, slice(None), [2, 0]),
    ],
    ids=str,
)
def test_attention_with_an_indexed_mask_is_that_part_of_the_whole(index):
    """The token rule goes with the mask: batch, head and query are counted from what was picked."""

    def rule(b, h, q, kv):
        return (kv < LENGTHS[b] // 3 - 3 * b) & (q >= kv - h) & (q % 5 != kv % (h + 2))

    ours, _ = both(rule, 3, 3, 128, 160, 32)
    q, k, v = qkv(3, 3, 3, 128, 160, dim=8)
    whole = flexc.reference(None, rule, q, k, v)[0]
    for mask in (ours[index], pickle.loads(pickle.dumps(both(global_rule, 3, 3, 128, 160, 32)[0]))[index]):
        entries = tuple(slice(i, i + 1 or None) if isinstance(i, int) else i for i in (index if isinstance(index, tuple) else (index,)))
        picked = [x[entries[:2]] for x in (q, k, v)]
        expected = whole[entries[:2]]
        if len(entries) == 3:
            rows = torch.arange(128).view(4, 32)[entries[2]].flatten()
            picked[0], expected = picked[0][:, :, rows], expected[:, :, rows]
        assert mask.shape == (*expected.shape[:3], 160)
        out = compat.flex_attention(*picked, block_mask=mask)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def global_rule(b, h, q, kv):
    return (kv < LENGTHS[b] // 3 - 3 * b) & (q >= kv - h) & (q % 5 != kv % (h + 2))


def test_each_row_of_blocks_gives_its_rows_of_the_whole():
    """Decoding by rows of a causal mask, with a short last row, for several batch elements and heads."""
    ours, _ = both(causal, 4, None, 150, 150, 64)
    q, k, v = qkv(4, 2, 2, 150, dim=8)
    whole = flexc.reference(None, causal, q, k, v)[0]
    for row, rows in enumerate((slice(0, 64), slice(64, 128), slice(128, 150))):
        mask = ours[:, :, row]
        assert mask.seq_lengths == (rows.stop - rows.start, 150)
        out = compat.flex_attention(q[:, :, rows], k, v, block_mask=mask)
        torch.testing.assert_close(out.double(), whole[:, :, rows], rtol=1e-5, atol=1e-5)


def test_a_picked_row_takes_a_rule_for_one_token():
    """Decoding as PyTorch's users do it: the row of the token, its length set to 1, and the rule of the whole mask at an offset."""
    ours, _ = both(causal, 1, 1, 150, 150, 64)
    q, k, v = qkv(1, 2, 2, 150, dim=8)
    whole = flexc.reference(None, causal, q, k, v)[0]
    for step in (0, 63, 64, 149):
        mask = ours[:, :, step // 64]
        mask.mask_mod = lambda b, h, q, kv: ours.mask_mod(b, h, q + step, kv)
        mask.seq_lengths = (1, 150)
        out = compat.flex_attention(q[:, :, step : step + 1], k, v, block_mask=mask)
        torch.testing.assert_close(out.double(), whole[:, :, step : step + 1], rtol=1e-5, atol=1e-5)


def test_one_query_with_a_picked_row_is_refused():
    """Which query of the row it is cannot be known."""
    ours, _ = both(causal, 1, 1, 128, 128, 64)
    q, k, v = qkv(1, 2, 2, 128, dim=8)
    with pytest.raises(flexc.ShapeError, match="created for 64 queries and 128 keys, got 1 and 128"):
        compat.flex_attention(q[:, :, 70:71], k, v, block_mask=ours[:, :, 1])


def test_indexing_lists_without_a_rule():
    table = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = compat.BlockMask.from_kv_blocks(*compat.lists.ordered(table), BLOCK_SIZE=8)[1, :, [2, 0]]
    tokens = table[1:, :, [2, 0]].repeat_interleave(8, 2).repeat_interleave(8, 3)
    assert_right(*qkv(1, 2, 2, 16, 24, dim=8), None, lambda b, h, q, kv: tokens[b, h, q, kv], mask)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "batch 3 of a block mask that has 3"),
        ((0, -4), IndexError, "head -4 of a block mask that has 3"),
        ((0, 0, [0, 5]), IndexError, r"row of blocks \[0, 5\] of a block mask that has 4"),
        ((0, 0, 0, 0), TypeError, r"at most 3 indices \(batch, head, row of blocks\), got 4"),
        (slice(None, None, -1), TypeError, "step of at least 1"),
        (([0], [1]), TypeError, "a list of integers in one dimension at most"),
        (True, TypeError, "an integer, a slice or a list of integers, got True"),
        (1.0, TypeError, "an integer, a slice or a list of integers, got 1.0"),
        ([0.5], TypeError, r"an integer, a slice or a list of integers, got \[0.5\]"),
        (torch.tensor([True]), IndexError, "a table of 1 truth values picks from 3 batch: expected one each"),
        ("a", TypeError, "an integer, a slice or a list of integers, got 'a'"),
        ((0, 0, [3, 1]), ValueError, r"the last row of the block mask has 4 of 32 queries: expected it last in \[3, 1\]"),
    ],
)
def test_indices_that_are_none_are_refused(index, error, message):
    ours, _ = both(causal, 3, 3, 100, 100, 32)
    with pytest.raises(error, match=message):
        ours[index]


def test_torchs_indexed_mask_is_refused_as_by_torch():
    _, theirs = both(causal, 1, 1, 128, 128, 64)
    with pytest.raises(RuntimeError, match="lost its mask function when it was indexed"):
        compat.flex_attention(*qkv(1, 2, 2, 128, dim=8), block_mask=theirs[:, :, 0])


# --- changes ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", [compat, TORCH])
def test_another_rule_keeps_the_lists(maker):
    mask = maker.create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    lists = mask.kv_indices
    mask.mask_mod = lambda b, h, q, kv: (q + kv) % 3 != 0
    assert mask.kv_indices is lists

    def expected(b, h, q, kv):
        return (q // 16 > kv // 16) | ((q // 16 == kv // 16) & ((q + kv) % 3 != 0))

    assert_right(*qkv(2, 2, 2, 64, dim=8), None, expected, mask)


@pytest.mark.parametrize("maker", [compat, TORCH])
def test_lists_that_are_written_to_or_replaced_are_noticed(maker):
    mask = maker.create_block_mask(everything, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    q, k, v = qkv(1, 2, 2, 64, dim=8)
    assert_right(q, k, v, None, everything, mask)
    mask.full_kv_num_blocks = torch.tensor([[[1, 2, 3, 4]]], dtype=torch.int32)
    assert_right(q, k, v, None, lambda b, h, q, kv: q // 16 >= kv // 16, mask)
    mask.full_kv_num_blocks.fill_(2)
    assert_right(q, k, v, None, lambda b, h, q, kv: kv < 32, mask)


def test_adjust_makes_the_mask_anew():
    ours, _ = both(window_by_head, 3, 2, 200, 200, 64)
    for lengths in ((100, 200), (200, 130), (300, 500)):
        assert_same_block_mask(ours._adjust(*lengths), both(window_by_head, 3, 2, *lengths, 64)[1])


@pytest.mark.parametrize("separate", [True, False])
def test_adjust_keeps_full_blocks_apart_or_not(separate):
    ours, _ = both(causal, 1, 1, 200, 200, 64, separate_full_blocks=separate)
    expected = both(causal, 1, 1, 300, 300, 64, separate_full_blocks=separate)[1]
    for mask in (ours, ours[:, :, 0], ours.to("cpu")):
        assert_same_block_mask(mask._adjust(300, 300), expected)


def test_adjust_crops_lists_and_refuses_to_lengthen_them():
    table = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = compat.BlockMask.from_kv_blocks(*compat.lists.ordered(table), BLOCK_SIZE=8)
    shorter = mask._adjust(20, 10)
    assert torch.equal(shorter.to_dense().bool(), table[:, :, :3, :2]) and shorter.shape == (1, 2, 20, 10)
    with pytest.raises(flexc.ShapeError, match="lists of 4 x 4 blocks of 8 x 8 tokens do not cover 33 queries and 32 keys"):
        mask._adjust(33, 32)


def test_to_moves_the_lists():
    ours, theirs = both(causal, 1, 2, 100, 100, 32)
    assert_same_block_mask(ours.to("cpu"), theirs)
    assert ours.q_indices is not None
    moved = ours.to("meta")
    assert moved.kv_indices.device.type == moved.q_indices.device.type == "meta"
    assert ours.kv_indices.device.type == "cpu" and moved.mask_mod is causal


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))])
def test_masks_are_copied_and_pickled(copied):
    ours, theirs = both(window_by_head, 1, 2, 100, 100, 32)
    made = copied(ours)
    assert_same_block_mask(made, theirs)
    assert_right(*qkv(1, 2, 2, 100, dim=8), None, window_by_head, made)
    count, indices = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    lists = compat.BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=(8, 16))
    q, k, v = qkv(1, 2, 2, 16, 32, dim=8)
    out = compat.flex_attention(q, k, v, block_mask=lists)  # keeps a function that cannot be pickled
    assert_right(q, k, v, None, lambda b, h, q, kv: q // 8 >= kv // 16, copied(lists))
    assert torch.equal(compat.flex_attention(q, k, v, block_mask=copied(lists)), out)


def test_captured_tensors_are_read_at_each_call():
    """A block mask of a rule holds for what its tensors hold at the time of the call."""
    lengths = torch.tensor([10, 20])

    def padding(b, h, q, kv):
        return kv < lengths[b]

    mask = compat.create_block_mask(padding, 2, None, 32, 32, device="cpu")
    q, k, v = qkv(2, 2, 2, 32, dim=8)
    assert_right(q, k, v, None, padding, mask)
    lengths.fill_(3)
    assert_right(q, k, v, None, padding, mask)
    assert_right(q, k, v, None, lambda b, h, q, kv: kv < 3, mask)
