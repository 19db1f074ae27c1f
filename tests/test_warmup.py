"""What was compiled ahead is found by the calls it was compiled for, in this process and in another, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch

import flexc
from flexc import pipeline, warmup
from flexc.compile_log import compile_log
from flexc.errors import InputError, NoCompileError, ShapeError, ToolchainError
from flexc.runtime.triton_ahead import Job, StandIn
from tests.accuracy import qkv

slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
width = 64


def alibi(score, batch, head, q_idx, kv_idx):
    return score - slopes[head] * (q_idx - kv_idx)


def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < width


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Caches of the test alone, and nothing in memory."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "flexc"))
    pipeline.clear_cache()
    compile_log(reset=True)
    return tmp_path


def binaries(folder, name):
    """Triton's metadata of each binary of a kernel."""
    return [json.loads(file.read_text()) for file in folder.glob(f"flexc/*/*/{name}.json")]


# --- this process ----------------------------------------------------------------------------------------------------------------------


def test_call_after_a_warm_up_compiles_nothing(folders, monkeypatch):
    kernel = flexc.attention(alibi, window)
    log = kernel.warmup({"heads": 4, "heads_kv": 2, "q_len": 100, "head_dim": 32})
    assert [(e.kind, e.loaded, e.backend) for e in log] == [("source", False, "cpu")]
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    kernel(*qkv())
    assert kernel.key == log[0].key and len(compile_log()) == 1


def test_every_spec_is_compiled(folders):
    kernel = flexc.attention(alibi, window)
    log = kernel.warmup([{"q_len": 40}, flexc.Spec(q_len=400), {"q_len": 40, "dtype": "float16"}, {"q_len": 40, "dtype": torch.bfloat16}])
    assert len({e.key for e in log}) == len(log) == 4


def test_second_warm_up_finds_everything(folders):
    kernel = flexc.attention(alibi, window)
    kernel.warmup({"q_len": 40})
    assert len(kernel.warmup({"q_len": 40})) == 0
    pipeline.clear_cache()
    assert [e.loaded for e in kernel.warmup({"q_len": 40})] == [True]


def test_warm_up_that_would_compile_is_refused_under_no_compile(folders, monkeypatch):
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    with pytest.raises(flexc.NoCompileError, match="alibi with mask window would have to be compiled for cpu"):
        flexc.attention(alibi, window).warmup({})


# --- another process -------------------------------------------------------------------------------------------------------------------

SERVER = """
import torch, flexc
from tests.test_warmup import alibi, window
from tests.accuracy import qkv
kernel = flexc.attention(alibi, window)
q, k, v = qkv(q_len={length}, grad=True)
kernel(q, k, v).sum().backward()
print([(e.loaded, e.kind) for e in flexc.compile_log()])
"""


def server(length, **environment):
    environment = {**os.environ, "FLEXC_NO_COMPILE": "1", "PYTHONPATH": os.getcwd(), **environment}
    command = [sys.executable, "-c", SERVER.format(length=length)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_second_process_runs_under_no_compile(folders):
    flexc.attention(alibi, window).warmup({"heads": 4, "heads_kv": 2, "q_len": 100, "head_dim": 32})
    done = server(100)
    assert done.stdout == "[(True, 'source')]\n", done.stderr
    # The cache may have been moved: a container image ships it.
    (folders / "flexc").rename(folders / "shipped")
    done = server(100, FLEXC_CACHE_DIR=str(folders / "shipped"))
    assert done.stdout == "[(True, 'source')]\n", done.stderr
    done = server(30, FLEXC_CACHE_DIR=str(folders / "shipped"))
    assert "flexc.errors.NoCompileError: alibi with mask window would have to be compiled" in done.stderr


# --- machine code ----------------------------------------------------------------------------------------------------------------------


def test_machine_code_for_a_target_that_is_not_here_is_in_the_cache(folders, monkeypatch):
    """The four kernels, row sums with and without a gradient of lse; a second warm-up finds them, wherever flexc's cache has moved."""
    kernel = flexc.attention(alibi, window, backend="triton")
    spec = {"target": "sm_90", "heads": 4, "head_dim": 16, "q_len": 128, "dtype": "float16"}
    log = kernel.warmup(spec, processes=2)
    names = sorted(e.variant.split(": ")[1] for e in log.of("binary"))
    maps = [name for name in names if name in ("rows_kernel", "columns_kernel", "order_kernel")]
    assert [n for n in names if n not in maps] == ["dkv_kernel", "dq_kernel", "forward_kernel", "row_sums_kernel", "row_sums_kernel"]
    assert set(maps) == {"rows_kernel", "columns_kernel", "order_kernel"}
    assert not any(e.loaded for e in log) and {e.target for e in log.of("binary")} == {"sm_90a"}
    (found,) = binaries(folders, "forward_kernel")
    assert found["target"] == {"backend": "cuda", "arch": 90, "warp_size": 32}
    assert found["num_warps"] == kernel_launch(log[0].key)["forward_kernel"][0]
    assert [len(binaries(folders, name)) for name in ("row_sums_kernel", "dq_kernel", "dkv_kernel")] == [2, 1, 1]
    pipeline.clear_cache()
    (folders / "flexc").rename(folders / "moved")
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(folders / "moved"))
    assert all(e.loaded for e in kernel.warmup(spec, processes=1))


def test_kernels_of_block_maps_are_compiled_for_what_a_call_gives_them(folders):
    """Types of the mask's tensors and numbers; long rows decide squares of blocks first; a table of facts for what is read at q and k."""
    ids, width = torch.arange(2**17), 7.5
    kernel = flexc.attention(None, lambda b, h, i, j: (ids[i] == ids[j]) & (i - j < width), backend="triton")
    kernel.warmup({"target": "sm_90", "head_dim": 16, "q_len": 2**17, "dtype": "float16", "backward": False})
    width = 8.5
    log = kernel.warmup({"target": "sm_90", "head_dim": 16, "q_len": 2**17, "dtype": "float16", "backward": False})
    assert {e.variant.split(": ")[1] for e in log.of("binary")} == {
        "forward_kernel",
        "rows_kernel",
        "cells_kernel",
        "levels_kernel",
        "order_kernel",
    }
    (constants,) = {tuple(found["num_warps"] for found in binaries(folders, "levels_kernel"))}
    assert constants == (32,) and len(binaries(folders, "rows_kernel")) == 2


def kernel_launch(key):
    (artifact,) = (found for found in pipeline._artifacts.values() if found.key == key)
    return artifact.module.LAUNCH


def test_without_a_disk_cache_workers_share_that_of_the_process(folders, monkeypatch):
    monkeypatch.setenv("FLEXC_NO_DISK_CACHE", "1")
    kernel = flexc.attention(None, None, backend="triton")
    spec = {"target": "sm_90", "heads": 4, "head_dim": 16, "q_len": 128, "dtype": "float16", "backward": False}
    assert [entry.loaded for entry in kernel.warmup(spec, processes=1)] == [False, False]
    pipeline.clear_cache()
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    assert all(entry.loaded for entry in kernel.warmup(spec, processes=1))
    assert not (folders / "flexc").exists()


def test_forward_alone_compiles_one_kernel(folders):
    log = flexc.attention(None, None, backend="triton").warmup({"target": "sm_80", "head_dim": 16, "backward": False})
    assert [e.variant for e in log.of("binary")] == ["plain attention: forward_kernel"]


def test_failure_of_a_worker_is_raised_with_its_reason(folders, monkeypatch):
    make = warmup._job
    monkeypatch.setattr(warmup, "_job", lambda *given: dataclasses.replace(make(*given), path=str(folders / "gone.py")))
    message = "machine code of forward_kernel of plain attention cannot be compiled for sm_80: FileNotFoundError: .*gone.py"
    with pytest.raises(ToolchainError, match=message):
        flexc.attention(None, None, backend="triton").warmup({"target": "sm_80", "head_dim": 16, "backward": False})


def test_worker_that_dies_is_named(folders, monkeypatch):
    monkeypatch.setattr(warmup.sys, "executable", "/bin/false")
    with pytest.raises(ToolchainError, match="the process that compiled machine code of forward_kernel of plain attention ended: it said"):
        flexc.attention(None, None, backend="triton").warmup({"target": "sm_80", "head_dim": 16, "backward": False})


@pytest.mark.slow
def test_cute_kernels_are_compiled_ahead_and_a_second_process_compiles_nothing(folders, monkeypatch):
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    spec = {"heads": 2, "head_dim": 64, "target": "sm_90a", "dtype": "bfloat16", "backward": False}
    kernel = flexc.attention(None, flexc.masks.causal, backend="cute")
    log = kernel.warmup(spec)
    binaries = [entry for entry in log.of("binary") if entry.backend == "cute"]
    assert len(binaries) == 1 and "forward_kernel" in binaries[0].variant and not binaries[0].loaded
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    assert all(entry.loaded for entry in kernel.warmup(spec))
    with pytest.raises(NoCompileError, match="would have to be compiled for sm_90a by the cute backend"):
        flexc.attention(None, lambda b, h, i, j: i - j < 7, backend="cute").warmup(spec)


def test_job_survives_json():
    tensor = torch.zeros(5, dtype=torch.int64)[1:]
    job = Job(
        "k.py",
        90,
        ("dq_kernel",),
        (1, 2, 3, 4),
        (1, 1, 5, 4),
        (1, 1, 5, 6),
        "float16",
        (StandIn.of(tensor),),
        (3, 0.5),
        {"dq": (1, 1, 2, 3)},
    )
    assert Job.from_json(job.to_json()) == job
    assert job.tensors[0] == StandIn((4,), (1,), "int64", (tensor.data_ptr() % 16))


def test_shape_of_the_map_follows_what_the_mask_reads(folders):
    """Which of batch and head have maps of their own is an argument of a kernel, and whether it is 1 may be compiled in."""
    limits = torch.ones(3, 4)
    made = flexc.attention(None, lambda b, h, i, j: j < limits[b, h], backend="triton")
    trace, binding = flexc.frontend.trace(None, made.mask_mod)
    spec = warmup._resolve(0, flexc.Spec(target="sm_90a", batch=3, heads=4, q_len=200, kv_len=100))
    artifact = warmup._artifact(trace, spec, "triton", made._options, "limits")
    maps = warmup._job(artifact, spec, binding).maps
    (rows, columns) = artifact.map_blocks["forward"]
    assert maps["forward"] == (3, 4, -(-200 // rows), -(-100 // columns))
    (rows, columns) = artifact.map_blocks["dkv"]
    assert maps["dkv"] == (3, 4, -(-100 // columns), -(-200 // rows))


def test_parts_of_one_architecture_share_what_was_compiled():
    """A warm-up for "sm_90a" is found on a real H200, whose driver tells another name, bandwidth and L2 size; not on a smaller part."""
    published = flexc.Target.parse("sm_90a")
    here = dataclasses.replace(published, name="NVIDIA H200", peak_tflops=1.0, dram_gb_per_s=2.0, l2_bytes=60 * 2**20)
    smaller = dataclasses.replace(published, smem_bytes=99 * 2**10)
    halved = dataclasses.replace(published, l2_bytes=25 * 2**20)
    shapes = flexc.backends.Shapes(1, 4, 4, 128, 128, 64, 64, torch.bfloat16)
    renamed = dataclasses.replace(halved, name="a part of no table", peak_tflops=3.0, dram_gb_per_s=4.0)
    targets = (published, here, smaller, halved, renamed)
    made = [pipeline.compile_for(alibi, window, shapes=shapes, target=target, backend="triton") for target in targets]
    assert made[0].key == made[1].key and made[0].source == made[1].source
    assert made[3].key == made[4].key and len({artifact.key for artifact in made}) == 3
    assert made[1].target is here


# --- specs -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (7, InputError, "expected specs to be a flexc.Spec, a dict, or a list of them, got 7"),
        ("sm_90", InputError, "expected specs to be a flexc.Spec"),
        ([], InputError, "expected at least one spec"),
        ([{}, 7], InputError, "spec 1 is a int; expected a flexc.Spec, or a dict such as"),
        ({"head_dims": 64}, InputError, "spec 0 has no attribute 'head_dims'; did you mean 'head_dim'"),
        ({"zzz": 64}, InputError, "spec 0 has no attribute 'zzz'; known: batch, heads, "),
        ({"heads": 2.0}, InputError, "spec 0: expected heads to be an integer, got 2.0"),
        ([{}, {"kv_len": 0}], ShapeError, "spec 1: expected kv_len >= 1, got 0"),
        ({"heads": 6, "heads_kv": 4}, ShapeError, "expected heads to be a multiple of heads_kv, got 6 and 4"),
        ({"dtype": "int32"}, InputError, "expected dtype to be one of float16, bfloat16, float32, float64, got 'int32'"),
        ({"device": "moon"}, InputError, "expected a device such as 'cuda:0' or 'cpu', got 'moon'"),
        ({"device": "cpu", "target": "sm_90"}, InputError, "spec 0 has a device and a target; expected one"),
    ],
)
def test_spec_that_is_none(spec, error, message):
    with pytest.raises(error, match=message):
        flexc.attention(None, window).warmup(spec)


def test_backend_that_does_not_compile_for_the_target():
    with pytest.raises(InputError, match="the cpu backend does not compile for sm_90a"):
        flexc.attention(None, window, backend="cpu").warmup({"target": "sm_90"})


@pytest.mark.parametrize("processes", [0, 1.5, True])
def test_processes_that_are_no_number(processes):
    with pytest.raises(InputError, match="expected processes to be a number from 1, got"):
        flexc.attention(None, window).warmup({}, processes=processes)


def test_a_decoding_step_is_compiled_as_well(folders):
    """Without a gradient it runs kernels of its own, in a range of keys or on a block map."""
    spec = {"heads": 4, "heads_kv": 2, "q_len": 1, "kv_len": 512, "head_dim": 32, "target": "sm_90a", "backward": False}
    flexc.attention(alibi, window, backend="triton").warmup(spec)
    assert {name: len(binaries(folders, name)) for name in ("forward_kernel", "schedule_kernel", "split_kernel", "combine_kernel")} == {
        "forward_kernel": 1, "schedule_kernel": 0, "split_kernel": 1, "combine_kernel": 1,
    }  # fmt: skip
    flexc.attention(mask_mod=lambda b, h, i, j: (i >= j) | (j < 4), backend="triton").warmup(spec)
    assert len(binaries(folders, "split_kernel")) == 2
