"""Default plans fit their target, with the model and with ptxas; the tiles that were timed stay what they are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flexc.backends import Shapes
from flexc.codegen.triton import Tile, candidates
from flexc.codegen.triton.tiles import MOST_CANDIDATES, chunked, is_asynchronous, smem_bytes
from flexc.errors import UnsupportedError
from flexc.pipeline import compile_for
from flexc.runtime import triton_compile
from flexc.runtime.machine_code import CompiledKernel
from flexc.target import KNOWN, Target
from tests.codegen.triton.texts import HOPPER, lowered, planned

GPUS = [target for target in KNOWN.values() if target.is_gpu]
KINDS = ("forward", "dq", "dkv")
HEAD_DIMS = [(1, 1), (8, 8), (64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (320, 320), (512, 512)]


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def soft_capped(score, batch, head, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


# --- how a head dim is cut into pieces ----------------------------------------------------------------------------------------------


def padding_at_least(head_dim: int) -> int:
    """The least that at most three powers of two from 16 on can cover head_dim with, by trying all of them."""
    powers = [0, *(1 << n for n in range(4, 10))]
    return min(a + b + c for a in powers for b in powers for c in powers if a + b + c >= head_dim)


def test_pieces_cover_the_head_dim_with_the_least_padding():
    for head_dim in range(1, 513):
        pieces = chunked(head_dim)
        assert 1 <= len(pieces) <= 3
        assert all(width >= 16 and width & (width - 1) == 0 for width in pieces)
        assert all(left >= right for left, right in pairwise(pieces))
        assert sum(pieces) == padding_at_least(head_dim), (head_dim, pieces)


@pytest.mark.parametrize(("head_dim", "pieces"), [(1, (16,)), (31, (32,)), (64, (64,)), (80, (64, 16)), (96, (64, 32)), (320, (256, 64))])
def test_pieces_are_as_few_as_can_be(head_dim, pieces):
    assert chunked(head_dim) == pieces


# --- tiles --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.arch)
def test_every_head_dim_has_tiles_that_fit(target, dtype):
    for head_dim, head_dim_v in [*HEAD_DIMS, (512, 448), (448, 512), (16, 512), (512, 1)]:
        plan = planned(lowered(None, causal), target, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
        for kind in KINDS:
            tiles = candidates(kind, target, dtype, head_dim, head_dim_v)
            assert getattr(plan, kind) == tiles[0]
            assert len(set(tiles)) == len(tiles) <= MOST_CANDIDATES
            for tile in tiles:
                assert smem_bytes(kind, tile, target, dtype, head_dim, head_dim_v) <= target.smem_bytes


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128])
def test_tiles_that_were_timed_on_an_h200_are_first(head_dim):
    plan = planned(lowered(None, causal), head_dim=head_dim, head_dim_v=head_dim)
    assert (plan.forward, plan.dq, plan.dkv) == (Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))
    assert plan.tma


def test_dense_attention_takes_a_taller_dq_tile_on_hopper():
    assert planned(lowered(), head_dim=128, head_dim_v=128).dq == Tile(128, 64, 8, 3)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_autotuning_has_a_choice_and_no_hopeless_tile(head_dim, head_dim_v):
    for kind in KINDS:
        tiles = candidates(kind, HOPPER, "bfloat16", head_dim, head_dim_v)
        assert len(tiles) >= 3
        areas = [tile.rows * tile.columns for tile in tiles]
        assert min(areas) > max(areas) / 8


def test_a_tile_that_leaves_schedulers_idle_comes_after_those_that_do_not():
    """Four warps of 73 KiB are alone on an SM with 100 KiB, and in company on one with 164."""
    small, large = (candidates("dq", Target.parse(arch), "bfloat16", 128, 128) for arch in ("sm_89", "sm_80"))
    assert large[0] == Tile(64, 64, 4, 2) and small[0] == Tile(64, 64, 8, 2)


def test_bulk_copies_only_where_products_read_shared_memory():
    graph = lowered(None, causal)
    assert all(planned(graph, Target.parse(arch)).tma for arch in ("sm_90a", "sm_100a"))
    assert not any(planned(graph, Target.parse(arch)).tma for arch in ("sm_80", "sm_86", "sm_89", "sm_120"))
    assert not planned(graph, dtype="float32").tma
    assert not planned(graph, head_dim=512, head_dim_v=512).tma, "dkv_kernel keeps 32 keys, too few for wgmma"
    assert is_asynchronous("dkv", Tile(32, 64, 4, 2), HOPPER, "bfloat16")
    assert not is_asynchronous("dq", Tile(32, 64, 4, 2), HOPPER, "bfloat16")


def test_unsupported_dtype_is_named():
    with pytest.raises(UnsupportedError, match="dtype float64 on the triton backend: expected float16, bfloat16 or float32"):
        planned(lowered(), dtype="float64")


def test_head_dim_past_the_limit_is_named():
    with pytest.raises(UnsupportedError, match="head dimension on the triton backend: expected at most 512, got 513"):
        planned(lowered(), head_dim=64, head_dim_v=513)


def test_no_tile_fits_is_an_error():
    with pytest.raises(UnsupportedError, match=r"\(512, 512\) in float32 .* for sm_89: no tile fits 101376 bytes of shared memory"):
        planned(lowered(), Target.parse("sm_89"), dtype="float32", head_dim=512, head_dim_v=512, precision="tf32")


# --- what ptxas makes of them -------------------------------------------------------------------------------------------------------


def compiled(
    score_mod, mask_mod, target: Target, head_dim: int, head_dim_v: int, dtype: torch.dtype = torch.bfloat16
) -> list[CompiledKernel]:
    """The three main kernels, each checked against the model and the target."""
    shapes = Shapes(1, 8, 8, 4096, 4096, head_dim, head_dim_v, dtype)
    kernels = []
    for direction, kinds in (("fwd", KINDS[:1]), ("bwd", KINDS[1:])):
        artifact = compile_for(score_mod, mask_mod, shapes=shapes, target=target, backend="triton", direction=direction)
        by_name = {kernel.name: kernel for kernel in artifact._compiled().kernels}
        for kind in kinds:
            kernel, tile = by_name[f"{kind}_kernel"], getattr(artifact.plan, kind)
            assert kernel.smem_bytes <= smem_bytes(kind, tile, target, shapes.dtype_name, head_dim, head_dim_v) <= target.smem_bytes
            kernels.append(kernel)
    return kernels


def test_causal_attention_on_hopper_does_not_spill():
    for kernel in compiled(None, causal, HOPPER, 128, 128):
        assert kernel.spill_bytes <= 16, kernel.name
        assert not kernel.remarks, kernel.name


STANDARD = [
    (score, mask, target, *dims)
    for score, mask in ((None, None), (None, causal), (soft_capped, causal))
    for target in ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120")
    for dims in ((64, 64), (128, 128), (192, 128), (256, 256))
] + [(None, causal, target, 512, 512) for target in ("sm_89", "sm_90a", "sm_100a")]


@pytest.mark.slow
@pytest.mark.parametrize(("score_mod", "mask_mod", "arch", "head_dim", "head_dim_v"), STANDARD)
def test_standard_variants_do_not_spill(score_mod, mask_mod, arch, head_dim, head_dim_v):
    for kernel in compiled(score_mod, mask_mod, Target.parse(arch), head_dim, head_dim_v):
        assert kernel.spill_bytes <= 64, kernel.name
        assert not kernel.remarks or arch != "sm_90a", kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_float32_fits(arch, head_dim):
    """Products on FMA units spill whatever the tile, so only shared memory counts."""
    compiled(None, causal, Target.parse(arch), head_dim, head_dim, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_that_are_not_aligned_fit(monkeypatch, arch, head_dim):
    """Strides of no known factor: copies are not asynchronous and shared memory is laid out otherwise."""
    monkeypatch.setattr(triton_compile, "is_aligned", lambda argument, kind: kind.startswith("*"))
    compiled(None, causal, Target.parse(arch), head_dim, head_dim)


def test_kernels_without_bulk_copies_are_compiled_with_asynchronous_ones():
    shapes = Shapes(1, 8, 8, 4096, 4096, 64, 64, torch.bfloat16)
    artifact = compile_for(None, causal, shapes=shapes, target=Target.parse("sm_80"), backend="triton")
    assert "cp.async.cg" in artifact.ptx(), "copies of 16 bytes, which need strides of a known factor"
