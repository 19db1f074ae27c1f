"""Machine code of the standard configurations, with no GPU: nothing spills, nothing is in local memory, no product waits for another."""

from __future__ import annotations

import re

import pytest
import torch

from flexc.codegen.cute import Tile, emit
from flexc.runtime.cute_compile import compile_module
from flexc.runtime.module import load_module
from tests.codegen.cute.texts import HOPPER, VARIANTS, causal, documents, lowered, planned, window

pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")

STANDARD = ["plain", "causal", "window", "documents", "alibi", "softcap"]
CONFIGURATIONS = [(name, d, d) for name in STANDARD for d in (64, 128)] + [("causal", 192, 128), ("causal", 256, 256)]
OTHERS = [
    ("plain", 128, 128, Tile(128, 128, 2, True, "dynamic")),
    ("alibi", 128, 128, Tile(128, 128, 2, True, "dynamic")),
    ("key bias", 128, 128, None),
    ("pair bias", 128, 128, None),
    ("relative bias", 128, 128, None),
    ("relative bias", 128, 128, Tile(128, 144, 2, True, "dynamic")),
    ("bucketed", 64, 64, None),
    ("stepped", 128, 128, None),
    ("relative bias", 192, 128, None),
    ("pair bias", 256, 256, None),
    ("gated", 64, 64, None),
    ("prefix", 192, 192, None),
    ("flags", 72, 40, None),
    ("plain", 128, 128, Tile(128, 176, 2, True, "static")),
    ("documents", 128, 128, Tile(128, 128, 2, True, "dynamic")),
    ("prefix", 128, 128, None),
]


def compiled(folder, functions, head_dim, head_dim_v, tile=None, **changes):
    graph = lowered(*functions)
    plan = planned(graph, head_dim=head_dim, head_dim_v=head_dim_v, tile=tile, **changes)
    module = load_module(emit(graph, plan, HOPPER), folder / "kernel.py")
    (kernel,) = compile_module(module).kernels
    return plan, kernel


def assert_clean(kernel) -> None:
    assert kernel.spill_bytes == 0
    assert ".local" not in kernel.ptx, "a register tensor with an index that is not a constant"
    assert kernel.remarks == (), "serialised products"
    assert "wgmma.mma_async" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx and "setmaxnreg" in kernel.ptx


@pytest.mark.slow
@pytest.mark.parametrize("name, head_dim, head_dim_v", CONFIGURATIONS)
def test_a_standard_configuration_is_clean(tmp_path, name, head_dim, head_dim_v):
    plan, kernel = compiled(tmp_path, VARIANTS[name], head_dim, head_dim_v)
    assert_clean(kernel)
    assert kernel.threads == 128 * (1 + plan.forward.groups)
    assert kernel.registers * kernel.threads <= HOPPER.regs_per_sm


@pytest.mark.slow
@pytest.mark.parametrize("name, head_dim, head_dim_v, tile", OTHERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_others_are_clean(tmp_path, name, head_dim, head_dim_v, tile, dtype):
    assert_clean(compiled(tmp_path, VARIANTS[name], head_dim, head_dim_v, tile, dtype=dtype)[1])


@pytest.mark.slow
def test_what_is_not_clean_is_noticed(tmp_path):
    """256 columns leave the second product no registers: ptxas spills, and runs the products one after another (C7512)."""
    _, kernel = compiled(tmp_path, VARIANTS["plain"], 64, 64, Tile(128, 256))
    assert kernel.spill_bytes > 0 and any("C7512" in remark for remark in kernel.remarks)


@pytest.mark.slow
def test_an_exact_kernel_has_no_approximate_function(tmp_path):
    def softcap(score, batch, head, q_idx, kv_idx):
        return 20 * torch.tanh(score / 20)

    _, fast = compiled(tmp_path, (softcap, causal), 64, 64)
    _, exact = compiled(tmp_path, (softcap, causal), 64, 64, precision="exact")
    assert "tanh.approx" in fast.ptx and "tanh.approx" not in exact.ptx


@pytest.mark.slow
def test_a_mask_of_intervals_costs_one_choice_an_element(tmp_path):
    """Bits of the columns are tested seven at a time; a compare for each would be 128 instructions more."""
    _, kernel = compiled(tmp_path, (None, window), 128, 128)
    from flexc.runtime.machine_code import CompiledModule

    code = CompiledModule((kernel,)).sass()
    assert len(re.findall(r"\bR2P\b", code)) >= 16, "two masked blocks of 64 elements a thread"


@pytest.mark.slow
def test_captured_values_of_keys_are_loaded_once_a_column(tmp_path):
    """By one thread of a warpgroup for each column, not by all eight that share it."""
    _, kernel = compiled(tmp_path, (None, documents), 128, 128)
    loads = len(re.findall(r"ld\.global\.b32|ld\.global\.[su]32", kernel.ptx))
    assert loads < 40, "32 columns a thread, in two masked blocks, would be 64"


@pytest.mark.slow
def test_equal_texts_make_equal_code(tmp_path):
    first, second = (compiled(tmp_path, VARIANTS["causal"], 64, 64)[1] for _ in range(2))
    assert first.ptx == second.ptx
