"""Default plans fit Hopper's shared memory and registers; what has no kernel is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexc.codegen.cute import Tile, candidates, make_plan, map_blocks
from flexc.codegen.cute.plan import REGISTERS, padded, shift_of, smem_bytes
from flexc.errors import UnsupportedError
from flexc.target import KNOWN, Target
from tests.codegen.cute.texts import HOPPER, VARIANTS, causal, lowered, planned, relative_bias, softcap, window

WIDE = torch.arange(900)
HEAD_DIMS = [(1, 1), (64, 64), (72, 40), (96, 96), (128, 128), (192, 128), (128, 192), (64, 256), (256, 64), (192, 192), (256, 256)]


def capped(limit):
    def score_mod(score, batch, head, q_idx, kv_idx):
        return limit * torch.tanh(score / limit)

    return score_mod


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_the_default_tile_fits(name, head_dims):
    plan = planned(lowered(*VARIANTS[name]), head_dim=head_dims[0], head_dim_v=head_dims[1])
    assert plan.smem_bytes <= HOPPER.smem_bytes
    assert plan.padded_dim >= head_dims[0] and plan.padded_dim_v >= head_dims[1]
    tile = plan.forward
    assert tile.rows % 64 == 0 and tile.columns % 16 == 0, "what wgmma multiplies, and what a k step of the second product takes"
    assert plan.out_buffer == "own" or plan.padded_dim_v <= plan.padded_dim


def test_shared_memory_is_the_sum_of_the_buffers():
    tile = Tile(128, 128, 2)
    buffers = 2 * (128 * 128 + 2 * 128 * (128 + 128))
    assert smem_bytes(tile, 128, 128, "queries") - buffers == smem_bytes(tile, 64, 64, "queries") - 2 * (128 * 64 + 2 * 128 * 128)
    assert smem_bytes(tile, 128, 128, "own") - smem_bytes(tile, 128, 128, "queries") == 2 * 128 * 128
    assert smem_bytes(tile, 128, 128, "own", 4) - smem_bytes(tile, 128, 128, "own") == 2 * 2 * 128 * 4
    assert smem_bytes(tile, 128, 128, "own", 0, 4) - smem_bytes(tile, 128, 128, "own") == 2 * 2 * 256 * 4


@pytest.mark.parametrize("columns, diagonals", [(64, 128), (65, 128), (66, 256), (128, 256), (176, 256)])
def test_each_thread_works_out_as_many_diagonals(columns, diagonals):
    """64 rows and 65 columns meet 128 diagonals."""
    assert Tile(128, columns).diagonals == diagonals


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask", [None, causal, window])
def test_tiles_of_values_of_diagonals_are_narrow(width, mask):
    found = candidates(lowered(relative_bias, mask), HOPPER, width, width)
    assert found and all(tile.rows == 128 and tile.columns <= 128 for tile in found)


@pytest.mark.parametrize("groups", REGISTERS)
def test_registers_of_all_threads_fit_an_sm(groups):
    """A kernel that asks for more waits for them forever."""
    computing, loading = REGISTERS[groups]
    assert computing % 8 == loading % 8 == 0
    assert 128 * (groups * computing + loading) <= HOPPER.regs_per_sm


def test_every_candidate_makes_a_plan():
    for head_dims in HEAD_DIMS:
        wide = tuple(map(padded, head_dims))
        for functions in VARIANTS.values():
            graph = lowered(*functions)
            found = candidates(graph, HOPPER, *wide)
            assert found
            for tile in found:
                assert planned(graph, head_dim=head_dims[0], head_dim_v=head_dims[1], tile=tile).forward == tile


def test_the_map_has_the_tiles_blocks():
    plan = planned(lowered(None, causal))
    assert map_blocks(plan) == {"forward": (plan.forward.rows, plan.forward.columns)}
    assert map_blocks(planned(lowered(None, None))) == {}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "float32"}, "dtype float32 on the cute backend: expected float16 or bfloat16"),
        ({"head_dim": 257}, "head dimension on the cute backend: expected at most 256, got 257"),
        ({"head_dim_v": 512}, "head dimension on the cute backend: expected at most 256, got 512"),
        ({"tile": Tile(128, 256)}, "tile 128x256, .* on the cute backend: it does not fit sm_90a"),
        ({"tile": Tile(256, 64)}, "tile 256x64, .* on the cute backend"),
        ({"tile": Tile(128, 128, scheduler="none")}, "tile .* on the cute backend"),
    ],
)
def test_what_has_no_kernel_is_refused(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        planned(lowered(None, causal), **changes)


def test_values_of_keys_do_not_cost_a_kernel_its_queue():
    """Beside them, the output of 160 columns has no memory of its own; of 144 it has."""
    plan = planned(lowered(*VARIANTS["key bias"]))
    assert plan.out_buffer == "own" and plan.forward.scheduler == "dynamic" and plan.forward.columns == 144


CLUSTER = Tile(128, 160, 2, True, "static", 2)


def test_heads_of_one_key_value_head_share_their_loads():
    """Where tiles side by side are such heads and walk the same blocks; else each loads for itself."""
    plain = lowered(None, None)
    assert planned(plain, head_dim=128, group=8).forward == CLUSTER
    others = (plain, 1), (plain, 3), (lowered(None, causal), 8), (lowered(softcap, None), 8)
    assert all(planned(graph, head_dim=128, group=group).forward.cluster == 1 for graph, group in others)
    assert "clusters of 2" in str(CLUSTER)


@pytest.mark.parametrize(
    "mask, changes",
    [
        (None, {"group": 3, "tile": CLUSTER}),
        (None, {"group": 1, "tile": CLUSTER}),
        (causal, {"group": 8, "tile": CLUSTER}),
        (None, {"group": 8, "tile": Tile(128, 160, 2, True, "dynamic", 2)}),
        (None, {"group": 8, "tile": Tile(128, 160, 2, True, "static", 4)}),
    ],
)
def test_clusters_that_do_not_share_keys_are_refused(mask, changes):
    with pytest.raises(UnsupportedError, match="clusters are of 2, static, and for kernels without a mask"):
        planned(lowered(None, mask), head_dim=128, **changes)


@pytest.mark.parametrize(
    "mask, tile, match",
    [
        (None, Tile(128, 176, 2, True, "static", eager=True), "memory of its own"),
        (causal, Tile(128, 128, eager=True), "from a queue with a mask"),
        (causal, Tile(128, 128, 2, True, "static", eager=True), "from a queue with a mask"),
        (None, Tile(128, 128, 2, True, "dynamic", eager=True), "static without one"),
        (None, replace(CLUSTER, eager=True), "outside clusters"),
    ],
)
def test_a_tile_that_begins_early_has_what_it_needs(mask, tile, match):
    with pytest.raises(UnsupportedError, match=match):
        planned(lowered(None, mask), group=2, tile=tile)


def test_the_next_tile_begins_early_where_it_can():
    """Not where its output takes queries' memory, values of keys or diagonals would be late for it, or wide blocks need registers."""
    plain = lowered(None, None)
    assert planned(plain).forward == Tile(128, 160, 2, True, "static", eager=True)
    assert Tile(128, 176, 2, True, "static") in candidates(plain, HOPPER, 128, 128)
    for name in ("causal", "window", "documents", "prefix", "hole"):
        assert all(planned(lowered(*VARIANTS[name]), head_dim=d, head_dim_v=d).forward.eager for d in (64, 128)), name
    for name in ("softcap", "alibi", "gated"):
        graph = lowered(*VARIANTS[name])
        assert planned(graph, head_dim=64, head_dim_v=64).forward.eager and not planned(graph).forward.eager, name
        assert all(tile.eager == (tile.columns <= 128) for tile in candidates(graph, HOPPER, 128, 128)), name
    for name in ("key bias", "relative bias", "bucketed", "pair bias"):
        assert not any(tile.eager for tile in candidates(lowered(*VARIANTS[name]), HOPPER, 128, 128)), name
    assert not planned(lowered(None, causal), head_dim=256, head_dim_v=256).forward.eager


def test_only_masks_take_votes():
    """Values that are compared by votes take no shared memory, and do not make a mask one of few partial blocks."""
    flags = candidates(lowered(*VARIANTS["flags"]), HOPPER, 64, 64)
    assert {tile.groups: tile.votes for tile in flags} == {3: False, 2: True}, "registers of three warpgroups"
    for name, (_, mask) in VARIANTS.items():
        assert all(tile.votes == (mask is not None) for tile in candidates(lowered(*VARIANTS[name]), HOPPER, 128, 128)), name
    graph = lowered(*VARIANTS["documents"])
    plan = planned(graph)
    assert plan.forward.columns == 128 and planned(graph, tile=replace(plan.forward, votes=False)).smem_bytes == plan.smem_bytes + 2048


def test_a_maximum_is_kept_longer_where_that_pays():
    plain = lowered(None, None)
    assert [planned(plain, head_dim=d, head_dim_v=d).slack for d in (64, 128, 256)] == [8.0, 0.0, 8.0]
    assert planned(plain, head_dim=256, head_dim_v=256, max_scores=True).slack == 0.0, "the largest score itself is asked for"
    assert planned(lowered(softcap, causal), head_dim=64, head_dim_v=64).slack == 0.0, "there is no maximum"
    assert [planned(plain, head_dim=d).code_by_group for d in (64, 128, 192, 256)] == [False, False, True, True]


@pytest.mark.parametrize("target", [t for t in KNOWN.values() if t.arch != "sm_90a"], ids=lambda t: t.arch)
def test_other_architectures_are_refused(target: Target):
    with pytest.raises(UnsupportedError, match=rf"target {target.arch} on the cute backend: expected sm_90a"):
        make_plan(lowered(None, None), target, dtype="bfloat16", head_dim=64, head_dim_v=64, group=1)


def test_captured_values_of_keys_count_as_shared_memory():
    def many(score, batch, head, q_idx, kv_idx):
        for i in range(150):
            score = score + torch.where(WIDE[kv_idx + i] == q_idx, 1.0, 0.0)
        return score

    with pytest.raises(UnsupportedError, match=r"with 1200 bytes of captured values a key on the cute backend: no tile fits"):
        planned(lowered(many, None))


# --- bounded scores ---------------------------------------------------------------------------------------------------------------------


def test_a_soft_cap_needs_no_running_maximum():
    graph = lowered(softcap, causal)
    assert shift_of(graph, "bfloat16") == 0.0
    assert planned(graph).shift == 0.0 and planned(graph).polynomial > 0
    assert planned(graph, precision="exact").shift is None and not planned(graph, precision="exact").approximate


@pytest.mark.parametrize(
    "dtype, limit, is_bounded", [("bfloat16", 55, True), ("bfloat16", 56, False), ("float16", 9.7, True), ("float16", 9.8, False)]
)
def test_the_range_is_what_weights_can_hold(dtype, limit, is_bounded):
    """Scores within the limit are within limit * log2(e) in base 2: 80 for bfloat16, 14 for float16."""
    assert (shift_of(lowered(capped(limit), None), dtype) is not None) == is_bounded


def test_the_middle_of_the_range_is_taken():
    def sigmoid(score, batch, head, q_idx, kv_idx):
        return 8.0 * torch.sigmoid(score)

    middle = shift_of(lowered(sigmoid, None), "bfloat16")
    assert middle is not None and abs(middle - 4 * 1.442695) < 1e-4


@pytest.mark.parametrize("name", ["plain", "causal", "alibi", "key bias", "gated"])
def test_unbounded_scores_keep_the_maximum(name):
    assert planned(lowered(*VARIANTS[name])).shift is None
