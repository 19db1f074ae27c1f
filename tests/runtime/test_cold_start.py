"""What a fresh process does not load: seconds that nobody asked for. benchmarks/cold_start.py measures how long it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("sympy", "jinja2", "triton", "cutlass", "typer", "rich", "filelock", "torch._dynamo", "torch._inductor")

PROGRAM = """
import json, sys
import torch
heavy = sys.argv[1].split(",")
before = set(sys.modules)

def loaded():
    return [name for name in heavy if name in sys.modules and name not in before]

import flexc
imported = loaded()
slopes = torch.ones(2, requires_grad=True)

def alibi(score, batch, head, q_idx, kv_idx):
    return torch.tanh(score - slopes[head] * (q_idx - kv_idx))

kernel = flexc.attention(alibi, flexc.masks.causal & flexc.masks.document(torch.arange(50) // 20))
q, k, v = (torch.randn(1, 2, 50, 16, requires_grad=True) for _ in range(3))
kernel(q, k, v).sum().backward()
print(json.dumps([imported, loaded(), len(flexc.compile_log().compiled)]))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What a process with an empty cache loads, and what a second one loads: after the import, after a call; and how much it compiled."""
    environment = {**os.environ, "FLEXC_CACHE_DIR": str(tmp_path_factory.mktemp("cold") / "cache")}
    command = [sys.executable, "-c", PROGRAM, ",".join(HEAVY)]
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


def test_import_loads_no_heavy_package(processes):
    assert processes[0][0] == processes[1][0] == []


COMPILER = ("flexc.codegen.cpu", "flexc.codegen.cute", "flexc.codegen.triton", "flexc.passes.base2", "flexc.explain", "flexc.warmup")


def test_import_loads_nothing_of_the_compiler():
    program = "import sys, flexc; print([name for name in sys.argv[1].split(',') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program, ",".join(COMPILER)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_loads_later_is_there():
    import flexc

    assert flexc.Spec.__module__ == "flexc.warmup" and callable(flexc.integrations.transformers.register)
    for place in (flexc, flexc.integrations):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            getattr(place, "nothing")  # noqa: B009


def test_warm_call_loads_no_heavy_package(processes):
    """Forward and backward, with a disk cache that has the kernel."""
    assert processes[1][1:] == [[], 0]


def test_the_test_sees_what_is_loaded(processes):
    """The process that compiles needs the templates and a lock."""
    assert processes[0][1:] == [["jinja2", "filelock"], 1]


BLOCKS_PROGRAM = """
import sys
import torch, flexc
from flexc import frontend, passes
from flexc.block_kernels import compiled_for, load_shared
mask = flexc.masks.causal & flexc.masks.document(torch.arange(50) // 20)
trace, binding = frontend.trace(None, mask)
compiled = compiled_for(passes.run(trace.graph), (64, 64), binding.tensors, "documents")
load_shared()
print("jinja2" in sys.modules, len(flexc.compile_log().compiled), *(table.name for table in compiled.text.tables))
"""


def test_warm_block_maps_need_no_templates(tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "FLEXC_CACHE_DIR": str(tmp_path / "cache")}
    printed = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", BLOCKS_PROGRAM], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split())
    assert printed[0][:2] == ["True", "2"] and printed[1][:2] == ["False", "0"] and printed[0][2:] == printed[1][2:] != []
