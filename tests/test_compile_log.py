"""What the log says of each compilation, that a call which compiles nothing adds nothing, and FLEXC_NO_COMPILE=1."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

import flexc
from flexc import backends, pipeline
from flexc.backends import Options, Shapes
from flexc.compile_log import Compilation, CompileLog, compile_log
from flexc.reference import reference
from flexc.runtime.cache import MANIFEST
from tests.accuracy import qkv

Q, K, V = qkv(q_len=40)


@pytest.fixture(autouse=True)
def empty_log(monkeypatch, tmp_path):
    """Nothing compiled so far, in memory and on the disk."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))
    pipeline.clear_cache()
    compile_log(reset=True)


def window_of(width, cap=None):
    """A kernel made anew, as in a training loop."""
    score = None if cap is None else (lambda s, b, h, i, j: cap * torch.tanh(s / cap))
    return flexc.attention(score, lambda b, h, i, j: (i - j < width) & (i >= j))


def reasons():
    return [entry.reason for entry in compile_log()]


# --- reasons ---------------------------------------------------------------------------------------------------------------------------


def test_first_call_is_logged_once():
    kernel = window_of(8)
    for _ in range(3):
        kernel(Q, K, V)
    (entry,) = compile_log()
    assert (entry.kind, entry.backend, entry.target, entry.reason, entry.loaded) == ("source", "cpu", "cpu", "first call", False)
    assert entry.key == kernel.key and entry.variant == kernel.__name__ and 0 < entry.seconds < 60


def test_number_that_changes_is_named_with_both_values():
    for width in (128, 256, 64, 32):
        window_of(width)(Q, K, V)
    assert reasons() == ["first call", "width changed from 128 to 256: becomes a run-time number"]


def test_numbers_beside_the_one_that_changed_become_arguments_too():
    for width in (8, 9):
        window_of(width, cap=5.0)(Q, K, V)
    assert reasons()[1] == "cap becomes a run-time number; width changed from 8 to 9: becomes a run-time number"


def test_number_that_python_needs_is_said_to_be_compiled_in():
    for width in (8, 9):
        window_of(flexc.constant(width))(Q, K, V)
    assert reasons()[1].startswith("width changed from 8 to 9, and is compiled in")


def test_another_dtype_is_named():
    kernel = window_of(8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kernel(Q.to(dtype), K.to(dtype), V.to(dtype))
    assert reasons() == ["first call", "another dtype: bfloat16", "another dtype: float16"]


def test_gradient_of_a_captured_tensor_is_named():
    slopes = torch.ones(4)
    kernel = flexc.attention(lambda s, b, h, i, j: s * slopes[h])
    kernel(Q, K, V)
    slopes.requires_grad_()
    kernel(Q, K, V)
    assert reasons()[1] == "slopes was float32, 1 dimensions, cpu; is float32, 1 dimensions, cpu, requires a gradient"


def test_sizes_options_and_targets_that_reach_the_code_are_named():
    def score(score, batch, head, q_idx, kv_idx):
        return score * 2.0

    def compiled(target="sm_90a", options=None, **sizes):
        shapes = Shapes(**{**vars(Shapes(1, 8, 8, 128, 128, 64, 64, torch.bfloat16)), **sizes})
        pipeline.compile_for(score, None, shapes=shapes, target=flexc.Target.parse(target), backend="triton", options=options)
        return reasons()[-1]

    assert compiled() == "first call"
    assert compiled(head_dim=128) == "head_dim 64 → 128"
    assert compiled(heads_kv=2) == "heads_kv 8 → 2"
    assert compiled(bulk=False) == "q, k and v can no longer be read in bulk"
    assert compiled(target="sm_80") == "another target: sm_80"
    assert compiled(options=Options(precision="exact")) == "precision fast → exact"
    assert compiled(q_len=4096, batch=3) == "no longer in memory"  # compile_for keeps nothing there; lengths reach no code


def test_reason_compares_with_the_nearest_of_earlier_compilations():
    float32, half, brain = window_of(8), window_of(8), window_of(9)
    float32(Q, K, V)
    half(Q.half(), K.half(), V.half())
    brain(Q.half(), K.half(), V.half())
    assert reasons()[-1] == "width changed from 8 to 9: becomes a run-time number"


def test_graph_without_functions_is_not_compared():
    """torch.compile and torch.export hand over graphs."""
    graph = flexc.frontend.trace(lambda s, b, h, i, j: s * 2)[0].graph
    trace = flexc.frontend.Trace(graph, True, flexc.frontend.Captures(), lambda *_: None, lambda *_: False, frozenset())
    shapes = Shapes(1, 2, 2, 40, 40, 16, 16, torch.float32)
    for options in (Options(), Options(deterministic=True)):
        pipeline.artifact_for(trace, shapes, flexc.Target.parse("cpu"), backends.CPU, "", options, "a program")
    assert reasons() == ["a compiled or exported program"] * 2


def test_functions_of_other_code_are_first_calls():
    flexc.attention(lambda s, b, h, i, j: s * 2)(Q, K, V)
    flexc.attention(lambda s, b, h, i, j: s * 3)(Q, K, V)
    assert reasons() == ["first call", "first call"]


# --- the disk --------------------------------------------------------------------------------------------------------------------------


def test_what_the_disk_has_is_logged_as_loaded():
    window_of(8)(Q, K, V)
    pipeline.clear_cache()
    window_of(8)(Q, K, V)
    assert [entry.loaded for entry in compile_log()] == [False, True]
    assert len(compile_log().compiled) == 1


def test_damaged_entry_is_the_reason():
    kernel = window_of(8)
    kernel(Q, K, V)
    kernel.artifact.path.with_name(MANIFEST).write_text("{}")
    pipeline.clear_cache()
    window_of(8)(Q, K, V)
    assert [entry.loaded for entry in compile_log()] == [False, False]
    assert reasons()[1] == "first call; the entry in the disk cache is damaged: KeyError: 'body'"


# --- the table -------------------------------------------------------------------------------------------------------------------------


def test_log_prints_as_a_table():
    entries = [
        Compilation("source", "alibi", "triton", "sm_90a", "first call", False, 0.0123, "ab" * 32),
        Compilation("binary", "alibi: forward_kernel", "triton", "sm_90a", "first call", True, 1.5, "ab" * 32),
    ]
    assert str(CompileLog(entries)).splitlines() == [
        "#  kind    variant                backend  target      ms  key       from      reason",
        "1  source  alibi                  triton   sm_90a    12.3  abababab  compiled  first call",
        "2  binary  alibi: forward_kernel  triton   sm_90a  1500.0  abababab  disk      first call",
        "1 compiled in 0.01 s, 1 from the disk",
    ]
    assert str(CompileLog(())) == "nothing compiled"
    assert repr(CompileLog(entries)) == "<2 compilations, 1.51 s>"


def test_log_is_a_sequence_and_can_begin_anew():
    window_of(8)(Q, K, V)
    log = flexc.compile_log(reset=True)
    assert len(log) == 1 and log[0] is next(iter(log)) and log[:1].seconds == log[0].seconds
    assert [len(log.of(kind)) for kind in ("source", "binary")] == [1, 0]
    assert len(flexc.compile_log()) == 0
    window_of(9)(Q, K, V)
    assert reasons() == ["width changed from 8 to 9: becomes a run-time number"]  # reasons remember what the log forgot


# --- FLEXC_NO_COMPILE=1 ----------------------------------------------------------------------------------------------------------------


def test_no_compile_raises_and_says_what_why_and_what_to_do(monkeypatch):
    window_of(8)(Q, K, V)
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    with pytest.raises(flexc.NoCompileError) as raised:
        window_of(9)(Q, K, V)
    what, why, instead = str(raised.value).splitlines()
    assert what == "<lambda> would have to be compiled for cpu by the cpu backend"
    assert why.startswith("  why: width changed from 8 to 9: becomes a run-time number; the disk cache does not have it")
    assert instead.startswith("  instead: compile it ahead with kernel.warmup(specs) under the same FLEXC_CACHE_DIR,")
    assert isinstance(raised.value, RuntimeError) and len(compile_log()) == 1


def test_no_compile_allows_what_memory_or_the_disk_has(monkeypatch):
    kernel = window_of(8)
    out = kernel(Q, K, V)
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    assert kernel(Q, K, V).equal(out)
    pipeline.clear_cache()
    assert window_of(8)(Q, K, V).equal(out)
    assert [entry.loaded for entry in compile_log()] == [False, True]


def test_no_compile_needs_no_cache_that_can_be_written(monkeypatch, tmp_path):
    """The cache of a container image: found entries load, a missing one is refused and not a failed write."""
    window_of(8)(Q, K, V)
    pipeline.clear_cache()
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    root = tmp_path / "cache"
    locks = sorted(root.glob("locks/*"))
    window_of(8)(Q, K, V)
    with pytest.raises(flexc.NoCompileError, match="first call"):
        flexc.attention(lambda s, b, h, i, j: s + 1)(Q, K, V)
    assert sorted(root.glob("locks/*")) == locks


MACHINE_CODE = """
import os, sys
import torch, flexc
from flexc.runtime.triton_ahead import compile_ahead, pretend_to_have
from flexc.warmup import Spec, _artifact, _job, _resolve
from flexc import frontend, settings
from flexc.backends import Options

trace, binding = frontend.trace(lambda s, b, h, i, j: s * 2.0, None)
spec = _resolve(0, Spec(target="sm_90a", head_dim=16, backward=False))
artifact = _artifact(trace, spec, "triton", Options(), "doubled")
pretend_to_have(90)
os.environ["FLEXC_NO_COMPILE"] = sys.argv[1]
try:
    compile_ahead(artifact.module, _job(artifact, spec, binding))
    compile_ahead(artifact.module, _job(artifact, spec, binding))
except flexc.NoCompileError as error:
    print(error)
print([(e.kind, e.variant, e.loaded) for e in flexc.compile_log()])
"""


def machine_code(folder, no_compile):
    environment = {**os.environ, "FLEXC_CACHE_DIR": str(folder / "flexc")}
    done = subprocess.run([sys.executable, "-c", MACHINE_CODE, no_compile], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_machine_code_that_a_launch_compiles_is_logged_or_refused(tmp_path):
    """Triton compiles inside a launch: that counts, and what the cache has is loaded."""
    lines = machine_code(tmp_path, "1")
    assert lines[0] == "machine code of forward_kernel of doubled would have to be compiled for sm_90a by the triton backend"
    assert "there is no binary for these arguments" in lines[1] and "FLEXC_CACHE_DIR" in lines[2]
    assert lines[-1] == "[('source', 'doubled', False)]"
    binary = "('binary', 'doubled: forward_kernel', {})"
    assert machine_code(tmp_path, "0") == [f"[('source', 'doubled', True), {binary.format(False)}]"]
    assert machine_code(tmp_path, "1") == [f"[('source', 'doubled', True), {binary.format(True)}]"]


# --- a run in which everything changes -------------------------------------------------------------------------------------------------


def steps(count, seed=0):
    """Window, soft-cap, batch, q_len and kv_len of each step; no two steps are alike."""
    numbers = random.Random(seed)
    for step in range(count):
        q_len = numbers.randrange(20, 60)
        yield 3 + step, 1.0 + step / 7, numbers.randrange(1, 4), q_len, q_len + numbers.randrange(0, 30)


def run_steps(count, backend, longer=0):
    for width, cap, batch, q_len, kv_len in steps(count):
        q, k, v = qkv(batch, 2, 1, q_len + longer, kv_len + longer, 16, grad=True)
        kernel = flexc.attention(
            lambda s, b, h, i, j, cap=cap: cap * torch.tanh(s / cap),
            lambda b, h, i, j, width=width: (i - j < width) & (i >= j),
            backend=backend,
        )
        out = kernel(q, k, v)
        out.sum().backward()
        yield kernel, out, (q, k, v)


def test_two_hundred_steps_in_which_everything_changes_compile_twice():
    """Once with numbers as constants, once with numbers as arguments."""
    for number, (kernel, out, inputs) in enumerate(run_steps(200, "cpu", longer=60)):
        if number % 20 == 0:
            truth = reference(kernel.score_mod, kernel.mask_mod, *inputs)[0]
            torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-4)
    log = compile_log().compiled
    assert len(log) == 2, f"\n{log}"
    assert log[0].reason == "first call" and log[1].reason.count("becomes a run-time number") == 2


def test_steps_of_all_lengths_compile_twice_a_size_of_blocks():
    """Lengths up to 64 tokens have smaller blocks than longer ones."""
    blocks = set()
    for longer in (0, 60, 0, 60):
        for kernel, _, _ in run_steps(25, "cpu", longer):
            blocks.add(kernel.plan.block)
    log = compile_log().compiled
    assert len(blocks) == 3 and len(log) <= 2 * len(blocks), f"\n{log}"
    assert len([entry for entry in log if "becomes a run-time number" in entry.reason]) == 1


INTERPRETED = """
import warnings
warnings.simplefilter("ignore")  # NumPy's, of rows past the end
from tests.test_compile_log import run_steps
from flexc.compile_log import compile_log
for kernel, out, inputs in run_steps(12, "triton"):
    assert out.isfinite().all()
print(len(compile_log().compiled), len({e.key for e in compile_log()}))
"""


@pytest.mark.interpret
def test_twelve_steps_on_the_interpreter_compile_twice(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "FLEXC_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
