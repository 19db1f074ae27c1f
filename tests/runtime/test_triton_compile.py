"""Generated kernels compile for targets that are not in this machine, and what they use can be read."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from types import SimpleNamespace

import pytest
import torch

import flexc
from flexc.backends import Options, Shapes
from flexc.codegen.triton import Tile
from flexc.errors import ToolchainError
from flexc.pipeline import compile_for
from flexc.runtime import machine_code, triton_compile
from flexc.runtime.machine_code import CompiledKernel, CompiledModule
from flexc.target import Target

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64)
KERNELS = ("forward_kernel", "row_sums_kernel", "dq_kernel", "dkv_kernel")
TINY = tuple((kind, Tile(16, 16, 1, 1)) for kind in ("forward", "dq", "dkv"))
SHAPES = Shapes(1, 2, 1, 64, 64, 16, 16, torch.bfloat16)

by_head = {str(dtype).removeprefix("torch."): torch.ones(2, dtype=dtype, requires_grad=dtype.is_floating_point) for dtype in DTYPES}
by_key, pairs = torch.ones(64, dtype=torch.int64), torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
zero_dimensional = torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)
λ, count, large = flexc.runtime(0.5), flexc.runtime(3), flexc.runtime(2**40)


def everything(score, batch, head, q_idx, kv_idx):
    for table in by_head.values():
        score = score + table[head]
    score = score + by_head["float32"][-1] + by_head["float64"][(q_idx - kv_idx) % 2] + by_head["float16"][head - 1]
    bucket = torch.floor((q_idx - kv_idx) / λ) // count
    return score * zero_dimensional + pairs[q_idx, kv_idx] + λ * bucket + (q_idx + large) % 7


def masked(batch, head, q_idx, kv_idx):
    seen = by_head["bool"][head] | (by_key[kv_idx] < large)
    return seen & (q_idx + count >= kv_idx) & (by_head["uint8"][head] > 0) & (by_head["int16"][kv_idx // 32] != 5)


def compiled(arch: str, direction: str = "bwd", score_mod=everything, mask_mod=masked, shapes=SHAPES, **options) -> CompiledModule:
    """The kernels of one direction."""
    given = Options(tiles=TINY, **options)
    artifact = compile_for(
        score_mod, mask_mod, shapes=shapes, target=Target.parse(arch), backend="triton", direction=direction, options=given
    )
    return artifact._compiled()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_captured_values_of_every_kind_compile(arch):
    """Tensors of every dtype and of no dimension, numbers, negative and constant indices, in both directions."""
    module = compiled(arch)
    assert [k.name for k in module.kernels] == list(KERNELS[1:])
    assert [k.name for k in compiled(arch, "fwd").kernels] == [KERNELS[0]]
    for kernel in module.kernels:
        assert kernel.cubin[:4] == b"\x7fELF" and f".target {arch}" in kernel.ptx and kernel.registers > 0
        assert f".entry {kernel.name}" in kernel.ptx


@pytest.mark.parametrize("factor", [None, 0.5], ids=["sum", "scaled sum"])
def test_the_maximum_is_subtracted_from_a_rounded_score(factor):
    """A pair bias of -1e38: an FMA of product and maximum, which is rounded, differs from 0 by 1e31, and the weight would be infinite."""
    score = (lambda s, b, h, i, j: s + pairs[i, j]) if factor is None else (lambda s, b, h, i, j: (s + pairs[i, j]) * factor)
    ptx = compiled("sm_90a", "fwd", score, None).ptx()
    log2e = struct.pack(">f", math.log2(math.e) * (factor or 1.0)).hex().upper()
    added = re.findall(rf"fma\.rn\.f32\s+\S+ \S+ 0f{log2e}, (\S+);", ptx)
    assert added and set(added) == {"0f00000000"}


def test_float32_products_of_a_block_are_a_sum_of_their_own():
    """Triton joins `acc + dot` to one chain of FMAs over all keys, whose error grows with their number: raw, dp, dk and dv begin at 0."""
    shapes = dataclasses.replace(SHAPES, dtype=torch.float32)
    each = 16 * 16 // 32  # elements of a tile in a thread
    begun = {
        name: len(re.findall(r"fma\.rn\.f32.*, 0f00000000;", kernel.ptx))
        for direction in ("fwd", "bwd")
        for kernel in compiled("sm_90a", direction, None, None, shapes).kernels
        for name in [kernel.name]
    }
    assert begun["forward_kernel"] >= 2 * 2 * each  # full blocks and a ragged end
    assert begun["dq_kernel"] >= 2 * 3 * each and begun["dkv_kernel"] >= 4 * each


@pytest.fixture(scope="module")
def plain():
    """Plain attention, backward."""
    return compiled("sm_80", score_mod=None, mask_mod=None)


def test_only_picks_kernels_by_name(plain):
    assert [k.name for k in plain.only(["dq_kernel"]).kernels] == ["dq_kernel"]
    assert plain.only([]).kernels == ()


def test_resources_are_a_line_each_with_remarks_below(plain):
    header, *lines = plain.resources().splitlines()
    assert header.split() == ["kernel", "registers", "spill", "bytes", "smem", "bytes", "warps"]
    assert [line.split()[0] for line in lines] == [k.name for k in plain.kernels]
    dq = plain.only(["dq_kernel"]).kernels[0]
    assert lines[1].split()[1:] == [str(n) for n in (dq.registers, dq.spill_bytes, dq.smem_bytes, dq.warps)]
    assert dq.warps == 1
    serialised = CompiledKernel("k", "", b"", 40, 0, 0, 128, ("(C7510) Potential Performance Loss",))
    assert CompiledModule((serialised,)).resources().splitlines()[-1] == "k: (C7510) Potential Performance Loss"


def test_machine_code_is_disassembled(plain):
    sass = plain.only(["row_sums_kernel"]).sass()
    assert "EXIT" in sass and "row_sums_kernel" in sass
    assert "row_sums_kernel" in plain.ptx() and "dkv_kernel" in plain.ptx()


def test_remarks_of_ptxas_are_kept(monkeypatch):
    """Each once, without the function's mangled name."""

    class Done:
        stderr = (
            "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in the function 'f'\n"
            "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in the function 'f'\n"
            "ptxas info : Used 40 registers\n"
        )

    commands = []
    monkeypatch.setattr(triton_compile.subprocess, "run", lambda command, **_: commands.append(command) or Done())
    found = triton_compile._remarks(".version 8.0", 90)
    assert found == ("(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x",)
    assert "--gpu-name=sm_90a" in commands[0]
    triton_compile._remarks("", 80)
    assert "--gpu-name=sm_80" in commands[1]


def test_a_missing_tool_is_named():
    with pytest.raises(
        ToolchainError, match="no-such-tool is missing from the triton package, where it is expected at .*: reinstall triton"
    ):
        machine_code.tool_path("no-such-tool")


def test_interpreted_kernels_have_no_machine_code():
    class InterpretedFunction:
        arg_names = ()

    module = SimpleNamespace(LAUNCH={"forward_kernel": (1, 1)}, forward_kernel=InterpretedFunction())
    with pytest.raises(ToolchainError, match="machine code cannot be shown under TRITON_INTERPRET=1: unset it"):
        triton_compile.compile_module(module, 80, lambda names: {})  # type: ignore[arg-type]
