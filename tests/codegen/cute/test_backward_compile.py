"""Machine code of the backward kernels, with no GPU: no product waits for another, and what spills stays out of the loops."""

from __future__ import annotations

import pytest

from flexc.codegen.cute import BackwardTile, emit_backward, make_backward_plan
from flexc.runtime.cute_compile import compile_module
from flexc.runtime.module import load_module
from tests.codegen.cute.texts import HOPPER, VARIANTS, lowered

pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")

# (variant, D, Dv) → bytes that may spill. Up to 24 are numbers of a tile, kept aside while its steps run; tanh in a step takes more.
CONFIGURATIONS = {
    ("plain", 128, 128): 0,
    ("causal", 128, 128): 0,
    ("window", 128, 128): 24,
    ("documents", 128, 128): 24,
    ("alibi", 128, 128): 24,
    ("softcap", 128, 128): 72,
    ("plain", 64, 64): 0,
    ("causal", 64, 64): 0,
    ("causal", 192, 128): 0,
    ("plain", 192, 192): 0,
    ("softcap", 256, 256): 0,
    ("flags", 72, 40): 24,
}


def compiled(folder, name, head_dim, head_dim_v, tile=None, dtype="bfloat16", group=1):
    graph = lowered(*VARIANTS[name])
    plan = make_backward_plan(graph, HOPPER, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, group=group, tile=tile)
    module = load_module(emit_backward(graph, plan, HOPPER), folder / "kernel.py")
    return {kernel.name: kernel for kernel in compile_module(module).kernels}


def assert_clean(kernels, spill_bytes=0) -> None:
    main = kernels["backward_kernel"]
    assert all(".local" not in kernel.ptx and kernel.remarks == () for kernel in kernels.values())
    assert main.spill_bytes <= spill_bytes and not any(kernels[n].spill_bytes for n in ("row_sums_kernel", "convert_kernel"))
    assert main.threads == 384 and main.registers * main.threads <= HOPPER.regs_per_sm
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "cp.reduce.async.bulk", "stmatrix", "setmaxnreg"):
        assert instruction in main.ptx
    for name in ("row_sums_kernel", "convert_kernel"):
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
    ],
)
def test_other_tiles_are_clean(tmp_path, name, head_dim, tile):
    assert_clean(compiled(tmp_path, name, head_dim, head_dim, tile), 24)


@pytest.mark.slow
def test_grouped_heads_and_float16_are_clean(tmp_path):
    assert_clean(compiled(tmp_path, "causal", 128, 128, dtype="float16", group=4), 24)
