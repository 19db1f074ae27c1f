"""The host function of a generated module: what it hands to the kernel, on CPU tensors and without launching."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flexc.codegen.cute import emit
from flexc.runtime.module import load_module
from tests.codegen.cute.texts import HOPPER, VARIANTS, lowered, planned

pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")

WALK = SimpleNamespace(**{name: torch.zeros(4, dtype=torch.int32) for name in "rows partial full order".split()})


def called(tmp_path, name, tensors=(), head_dim=64, head_dim_v=64, q=None, kv_len=60, **changes):
    """What `forward` returns, and what it passes on."""
    graph = lowered(*VARIANTS[name])
    plan = planned(graph, head_dim=head_dim, head_dim_v=head_dim_v, **changes)
    module = load_module(emit(graph, plan, HOPPER), tmp_path / "kernel.py")
    passed: list[tuple] = []
    arguments = module.FORWARD.arguments
    module.FORWARD = lambda *values: passed.append(values)
    q = torch.randn(2, 4, 50, head_dim).bfloat16() if q is None else q
    k, v = torch.randn(2, 4, kv_len, head_dim).bfloat16(), torch.randn(2, 4, kv_len, head_dim_v).bfloat16()
    result = module.forward(q, k, v, 0.5, tensors, (), WALK if plan.walk == "runs" else None)
    return result, passed, arguments


def test_tensors_go_to_the_kernel_as_they_are(tmp_path):
    q = torch.randn(2, 50, 4, 64, requires_grad=True).bfloat16().transpose(1, 2)
    (out, lse), (values,), arguments = called(tmp_path, "causal", q=q)
    assert values[0].data_ptr() == q.data_ptr() and values[0].stride() == q.stride() and not values[0].requires_grad
    assert len(values) == len(arguments)
    assert out is values[3] and out.shape == (2, 4, 50, 64) and lse is values[4] and lse.dtype == torch.float32
    assert values[9].tolist() == [0], "the counter of tiles"
    assert values[10:] == (0.5, 8), "the scale, and all heads in one section of the L2 cache"


def test_rows_that_bulk_copies_cannot_read_are_padded(tmp_path):
    (out, _), (values,), arguments = called(tmp_path, "causal", head_dim=65, head_dim_v=3)
    assert [tuple(x.shape[2:]) for x in values[:4]] == [(50, 72), (60, 72), (60, 8), (50, 8)]
    assert [a.sizes[3] for a in arguments[:4]] == [72, 72, 8, 8]
    assert float(values[0][..., 65:].abs().max()) == 0.0 and out.shape == (2, 4, 50, 3) and out.is_contiguous()


@pytest.mark.parametrize("name", ["causal", "plain"])
def test_no_keys_and_no_queries_launch_nothing(tmp_path, name):
    (out, lse), passed, _ = called(tmp_path, name, kv_len=0)
    assert not passed and float(out.abs().max()) == 0.0 and bool(torch.isneginf(lse).all())
    (out, lse), passed, _ = called(tmp_path, name, q=torch.zeros(2, 4, 0, 64).bfloat16())
    assert not passed and out.shape == (2, 4, 0, 64) and lse.shape == (2, 4, 0)


def test_captured_tensors_have_something_to_read(tmp_path):
    """Truth values are bytes, a tensor of no dimension has one, an empty one holds the 0 that is read outside of it."""
    _, (values,), arguments = called(tmp_path, "key bias", (torch.ones(7), torch.tensor(2.0)))
    assert [tuple(x.shape) for x in values[10:12]] == [(7,), (1,)] and len(values) == len(arguments)
    flag = torch.tensor([True, False])
    _, (values,), _ = called(tmp_path, "flags", (flag,))
    assert values[10].dtype == torch.uint8 and values[10].tolist() == [1, 0]
    _, (values,), _ = called(tmp_path, "documents", (torch.zeros(0, dtype=torch.int32),))
    assert values[10].tolist() == [0]


def test_heads_that_share_the_cache_are_worked_on_together(tmp_path):
    graph = lowered(*VARIANTS["causal"])
    module = load_module(emit(graph, planned(graph, group=4), HOPPER), tmp_path / "kernel.py")
    many = 8 * HOPPER.sm_count  # row blocks: the tiles of one group of heads are enough for all SMs
    assert module.entries_per_section(64, many, HOPPER.l2_bytes // 2) == 4
    assert module.entries_per_section(64, many, HOPPER.l2_bytes // 8) == 16
    assert module.entries_per_section(64, many, 1) == 64 and module.entries_per_section(64, many, 0) == 64
    assert module.entries_per_section(64, many // 16, HOPPER.l2_bytes) == 8, "tiles of fewer heads could not be shared out evenly"
    assert module.entries_per_section(60, many, HOPPER.l2_bytes // 16) == 32, "two sections of nearly one size, of whole groups"


HOSTS = """
import builtins, dis, sys, types
from pathlib import Path
from flexc.codegen.cute import emit, emit_backward
from flexc.runtime.cute_module import LaterFunction, load_cute_module
from tests.codegen.cute import texts
from tests.codegen.cute.test_backward_emit import planned as planned_backward

def check(text):
    module = load_cute_module(text, Path(sys.argv[1]) / "kernel.py")
    functions = [f for f in vars(module).values() if isinstance(f, types.FunctionType) and f.__module__ == module.__name__]
    names = {i.argval for f in functions for i in dis.get_instructions(f) if i.opname == "LOAD_GLOBAL"}
    missing = sorted(name for name in names if name not in vars(module) and not hasattr(builtins, name))
    assert functions and not missing, missing
    assert all(isinstance(launcher.function, LaterFunction) for launcher in module.LAUNCHERS.values())

for variant in texts.VARIANTS.values():
    for sizes in ({}, {"head_dim": 72, "head_dim_v": 40}, {"group": 2}):
        graph = texts.lowered(*variant)
        check(emit(graph, texts.planned(graph, **sizes), texts.HOPPER))
        try:
            plan = planned_backward(graph, **sizes)
        except Exception as error:
            assert type(error).__name__ == "UnsupportedError", error
        else:
            check(emit_backward(graph, plan, texts.HOPPER))
assert "cutlass" not in sys.modules
print("checked")
"""


def test_hosts_of_all_variants_are_loaded_without_the_dsl(tmp_path):
    """What a host function reads is there before the kernels are."""
    command = [sys.executable, "-c", HOSTS, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=False)
    assert done.stdout == "checked\n", done.stderr
