"""Machine code of a first call: compiled in threads while the map is found, there when it is launched, and nobody's if it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time

import pytest
import torch

import flexc
from flexc import backends, frontend, pipeline, side_by_side
from flexc.backends import Options, Shapes
from flexc.target import Target
from tests.accuracy import qkv

GPU = torch.device("cuda", 0)
SHAPES = Shapes(2, 4, 2, 300, 300, 64, 64, torch.float16)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A folder that has nothing yet."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))
    pipeline.clear_cache()


def artifact_of(mask=causal, backend=backends.TRITON, shapes=SHAPES):
    trace, _ = frontend.trace(None, mask)
    return pipeline.compile_attention(trace.graph, shapes, Target.parse("sm_90a"), backend, "asked for", Options(), "a test")


@pytest.fixture
def compiled(monkeypatch):
    """Kernels of each job, instead of compiling it."""
    jobs = []
    monkeypatch.setattr(side_by_side, "_compile", lambda module, job, device: jobs.append(job.kernels))
    return jobs


def begin(artifact, direction, device=GPU):
    threads = side_by_side.begin(artifact, direction, SHAPES, (), (), device)
    for thread in threads:
        thread.join()
    return threads


def test_each_kernel_of_a_new_module_once(fresh, compiled):
    artifact = artifact_of()
    begin(artifact, "forward")
    assert compiled == [("forward_kernel",)]
    begin(artifact, "backward")
    assert sorted(compiled[1:]) == [("dkv_kernel",), ("dq_kernel",), ("row_sums_kernel",)]
    assert begin(artifact, "forward") == begin(artifact, "backward") == [] and not artifact.unlaunched


@pytest.mark.parametrize(("heads_kv", "of_groups"), [(4, []), (2, ["convert_keys_kernel"])], ids=["heads", "groups"])
def test_a_module_of_the_cute_backend(heads_kv, of_groups, fresh, compiled):
    shapes = dataclasses.replace(SHAPES, heads_kv=heads_kv)
    artifact = artifact_of(backend=backends.CUTE, shapes=shapes)
    begin(artifact, "forward")
    begin(artifact.for_backward(shapes, Options()), "backward")
    assert [sorted(names) for names in compiled] == [
        ["forward_kernel"],
        sorted(["backward_kernel", "convert_kernel", "row_sums_kernel", *of_groups]),
    ]


def test_nothing_where_there_is_nothing_to_compile_or_to_wait_for(fresh, compiled):
    assert begin(artifact_of(mask=None), "forward") == [], "no map is found meanwhile"
    assert begin(artifact_of(), "forward", torch.device("cpu")) == []
    kept = artifact_of()
    assert kept.unlaunched == set() and begin(kept, "forward") == [], "its source was on the disk"
    assert compiled == []


def test_a_compiler_that_fails_is_left_to_the_launch(monkeypatch):
    monkeypatch.setattr(side_by_side.Job, "compile", lambda job, module: 1 / 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    side_by_side._compile(None, side_by_side.Job("", 90, ("forward_kernel",), (), (), (), "float16"), GPU)


def test_no_kernel_is_launched_before_they_are_ready(fresh, monkeypatch):
    asked, ended = [], []

    def slow(artifact, direction, *_):
        artifact.unlaunched.discard(direction)
        asked.append(direction)
        thread = threading.Thread(target=lambda: (time.sleep(0.2), ended.append(direction)))
        thread.start()
        return [thread]

    monkeypatch.setattr(side_by_side, "begin", slow)
    launched = []
    for name in ("forward", "backward"):
        run = getattr(backends.CPU, name)
        monkeypatch.setitem(vars(backends.CPU), name, lambda *a, run=run, name=name: (launched.append((name, list(ended))), run(*a))[1])
    kernel = flexc.attention(None, causal)
    q, k, v = qkv(q_len=40, grad=True)
    for _ in range(3):
        kernel(q, k, v).sum().backward()
    assert asked == ["forward", "backward"]
    assert launched[:2] == [("forward", ["forward"]), ("backward", ["forward", "backward"])]


CHILD = """
import contextlib, sys, torch
from flexc import backends, frontend, pipeline, side_by_side
from flexc.compile_log import compile_log
from flexc.runtime.triton_ahead import pretend_to_have
from tests.test_side_by_side import GPU, SHAPES, artifact_of

torch.cuda.device = lambda device: contextlib.nullcontext()
pretend_to_have(90)
artifact = artifact_of()
for direction in ("forward", "backward"):
    for thread in side_by_side.begin(artifact, direction, SHAPES, (), (), GPU):
        thread.join()
print(sorted({entry.variant.split()[-1] for entry in compile_log().of("binary").compiled}))
"""


@pytest.mark.slow
def test_threads_compile_what_a_launch_asks_for(tmp_path):
    environment = {"FLEXC_CACHE_DIR": str(tmp_path / "flexc"), "TRITON_CACHE_DIR": str(tmp_path / "triton"), "PATH": "/usr/bin:/bin"}
    done = [subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, timeout=300) for _ in range(2)]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout.strip() == "['dkv_kernel', 'dq_kernel', 'forward_kernel', 'row_sums_kernel']"
    assert done[1].stdout.strip() == "[]", "they are on the disk"
