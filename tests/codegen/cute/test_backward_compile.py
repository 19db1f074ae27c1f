"""Machine code of the backward kernels, with no GPU: no product waits for another, and what spills stays out of the loops."""

from __future__ import annotations

import re

import pytest
import torch

from flexc.codegen.cute import BackwardTile, emit_backward, make_backward_plan
from flexc.runtime.cute_compile import compile_module
from flexc.runtime.module import load_module
from tests.codegen.cute.texts import HOPPER, VARIANTS, causal, lowered

pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")

# (variant, D, Dv) → bytes that may spill: numbers of a tile, kept aside while its steps run; tanh in a step takes more.
CONFIGURATIONS = {
    ("plain", 128, 128): 0,
    ("causal", 128, 128): 0,
    ("window", 128, 128): 0,
    ("documents", 128, 128): 0,
    ("alibi", 128, 128): 0,
    ("softcap", 128, 128): 48,
    ("plain", 64, 64): 0,
    ("causal", 64, 64): 0,
    ("plain", 192, 128): 0,
    ("causal", 192, 128): 0,
    ("documents", 192, 128): 0,
    ("softcap", 192, 128): 48,
    ("leaky", 192, 128): 0,
    ("causal", 100, 192): 0,
    ("plain", 192, 192): 0,
    ("documents", 160, 192): 0,
    ("softcap", 256, 256): 0,
    ("flags", 72, 40): 24,
}


SLOPES, KEYS, DEGREE = (torch.ones(size, requires_grad=True) for size in ((4,), (4, 700), ()))


def slopes(score, batch, head, q_idx, kv_idx):
    return score - SLOPES[head] * (q_idx - kv_idx)


def temperature(score, batch, head, q_idx, kv_idx):
    return score * DEGREE + KEYS[head, kv_idx]


LEARNED = {"slopes": (slopes, causal), "slopes, every block": (slopes, None), "temperature": (temperature, causal)}
DENSE = {f"{name}, every block": (VARIANTS[name][0], None) for name in ("alibi", "key bias", "softcap")}


def compiled(folder, name, head_dim, head_dim_v, tile=None, dtype="bfloat16", group=1, **options):
    graph = lowered(*(VARIANTS | LEARNED | DENSE)[name])
    sizes = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "group": group}
    plan = make_backward_plan(graph, HOPPER, **sizes, tile=tile, **options)
    module = load_module(emit_backward(graph, plan, HOPPER), folder / "kernel.py")
    return {kernel.name: kernel for kernel in compile_module(module).kernels}


def assert_clean(kernels, spill_bytes=0) -> None:
    main = kernels["backward_kernel"]
    assert all(".local" not in kernel.ptx and kernel.remarks == () for kernel in kernels.values())
    assert main.spill_bytes <= spill_bytes and not any(kernels[n].spill_bytes for n in ("row_sums_kernel", "convert_kernel"))
    assert main.threads == 384 and main.registers * main.threads <= HOPPER.regs_per_sm
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "stmatrix", "setmaxnreg"):
        assert instruction in main.ptx
    of_heads = "convert_keys_kernel" in kernels
    ways = "cp.reduce.async.bulk" in main.ptx, "red.relaxed.gpu.global.add.v4.f32" in main.ptx
    assert ways[0] != ways[1] or of_heads, "one way to add to the queries' gradient, 16 bytes or more"
    for name in ("row_sums_kernel", "convert_kernel", *(["convert_keys_kernel"] if of_heads else [])):
        assert "ld.global.v4" in kernels[name].ptx, "16 bytes at a time"


@pytest.mark.slow
@pytest.mark.parametrize("name, head_dim, head_dim_v", CONFIGURATIONS)
def test_a_standard_configuration_is_clean(tmp_path, name, head_dim, head_dim_v):
    assert_clean(compiled(tmp_path, name, head_dim, head_dim_v), CONFIGURATIONS[name, head_dim, head_dim_v])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, head_dim, tile",
    [
        ("plain", 128, BackwardTile(64, 128, queue=True)),
        ("window", 128, BackwardTile(64, 128)),
        ("plain", 128, BackwardTile(64, 128)),
        ("plain", 192, BackwardTile(64, 64, "dims", 2)),
        ("causal", 192, BackwardTile(128, 64, "dims", 1, direct=True)),
    ],
)
def test_other_tiles_are_clean(tmp_path, name, head_dim, tile):
    assert_clean(compiled(tmp_path, name, head_dim, head_dim, tile), 24)


@pytest.mark.slow
@pytest.mark.parametrize("name, spilled", [("alibi, every block", 0), ("key bias, every block", 0), ("softcap, every block", 40)])
def test_kernels_without_a_mask_are_clean(tmp_path, name, spilled):
    assert_clean(compiled(tmp_path, name, 128, 128), spilled)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"group": 4}, {"dtype": "float16"}, {"precision": "exact"}, {"group": 4, "deterministic": True}])
def test_80_queries_are_clean(tmp_path, options):
    assert_clean(compiled(tmp_path, "plain", 128, 128, BackwardTile(80, 128), **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, head_dim, spilled", [("slopes", 128, 8), ("slopes, every block", 128, 0), ("temperature", 128, 32), ("slopes", 64, 24)]
)
def test_gradients_of_captured_tensors_are_clean(tmp_path, name, head_dim, spilled):
    kernels = compiled(tmp_path, name, head_dim, head_dim)
    assert_clean(kernels, spilled)
    assert "atom.global" in kernels["backward_kernel"].ptx


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, head_dim, tile, group",
    [
        ("plain", 64, None, 1),
        ("plain", 128, None, 1),
        ("plain", 128, BackwardTile(64, 128, queue=True), 1),
        ("plain", 192, None, 1),
        ("plain", 256, None, 1),
        ("causal", 128, None, 1),
        ("documents", 128, None, 4),
        ("causal", 64, None, 1),
        ("window", 256, None, 1),
    ],
)
def test_deterministic_kernels_are_clean(tmp_path, name, head_dim, tile, group):
    """The next turn begins when what was added is there, not when it has been read."""
    kernels = compiled(tmp_path, name, head_dim, head_dim, tile, group=group, deterministic=True)
    text = kernels["backward_kernel"].ptx
    assert_clean(kernels, 24 if name == "plain" else 0)
    assert "ld.acquire.gpu" in text
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0;\s+.*?atom\.global\.release\.add", text, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(64, "bfloat16"), (128, "float16"), (192, "bfloat16"), (256, "bfloat16")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_of_a_query_head_are_clean(tmp_path, head_dim, dtype, deterministic):
    kernels = compiled(tmp_path, "causal", head_dim, head_dim, dtype=dtype, group=4, deterministic=deterministic)
    assert_clean(kernels, 8)
    main = kernels["backward_kernel"].ptx
    assert "st.global.v4" in main if deterministic else "red.relaxed.gpu.global.add.v4.f32" in main
