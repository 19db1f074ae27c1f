"""The plumbing of benchmarks/decode.py on the CPU: fields, bytes, and that systems which compute something else are named."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from tests.benchmark_modules import benchmark_modules

MODULES = ("decode", "ahead", "measure", "patterns", "systems")
SMALL = ["--device", "cpu", "--shape", "2,4,2,1,320,16", "--dtype", "fp32", "--rounds", "1", "--layers", "1"]


@pytest.fixture
def bench(monkeypatch):
    with benchmark_modules(monkeypatch, *MODULES) as modules:
        yield modules["decode"]


def test_every_system_that_can_is_measured_and_agrees(bench, tmp_path, capsys):
    file = tmp_path / "decode.jsonl"
    bench.main([*SMALL, "--patterns", "full,softcap,positions", "--out", str(file)])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(tuple(record) == bench.FIELDS for record in records)
    found = {(r["pattern"], r["system"]) for r in records}
    assert {(p, s) for p in ("full", "positions") for s in ("flexc", "paged16", "paged64", "sdpa")} <= found
    assert ("softcap", "sdpa") not in found and ("softcap", "flexc") in found
    assert "differs" not in capsys.readouterr().out


def test_bytes_are_those_that_the_pattern_needs(bench):
    shape = bench.Shape.parse("2,8,4,1,8192,64,32")
    for pattern, tokens in (("full", 8192), ("window", bench.WINDOW), ("softcap_window", bench.WINDOW), ("positions", 8192)):
        step = bench.make_step(pattern, shape, 1, torch.float16, torch.device("cpu"))
        assert step.bytes == 2 * 4 * tokens * (64 + 32) * 2


def test_a_window_holds_as_many_keys_as_are_counted(bench):
    step = bench.make_step("window", bench.Shape.parse("1,1,1,1,8192,16"), 1, torch.float32, torch.device("cpu"))
    assert int(step.mask_mod(0, 0, step.offset, torch.arange(8192)).sum()) == step.tokens


def test_an_output_that_differs_is_reported(bench, monkeypatch, capsys):
    monkeypatch.setitem(bench.SYSTEMS, "sdpa", lambda step: lambda k, v: step.q * 0 + 9)
    bench.main([*SMALL, "--patterns", "full", "--systems", "flexc,sdpa"])
    assert "sdpa: output differs from flexc's by" in capsys.readouterr().out


def test_eight_bits_count_as_one_byte(bench):
    step = bench.make_step("full", bench.Shape.parse("2,4,2,1,320,16"), 1, torch.bfloat16, torch.device("cpu"))
    assert bench.bytes_of(step, "fp8") == step.bytes // 2 == bench.bytes_of(step, "flexc") // 2


def test_processes_ahead_make_the_calls_that_are_measured(bench, monkeypatch):
    jobs = []
    monkeypatch.setattr(bench, "run_ahead", lambda function, given, processes: jobs.extend(given))
    bench.main([*SMALL, "--shape", "3,4,2,1,400,16", "--shape", "1,4,2,4,320,16", "--patterns", "full", "--systems", "flexc,sdpa"])
    assert [(sizes["B"], sizes["Sq"], system) for sizes, _, system, *_ in jobs] == [
        (2, 1, "flexc"),
        (2, 1, "sdpa"),
        (1, 4, "flexc"),
        (1, 4, "sdpa"),
    ]
    for job in jobs:
        bench._call_once(*job)


@pytest.mark.gpu
@pytest.mark.parametrize("system", ["fp8", "paged16"])
def test_what_a_graph_reads_stays_alive(bench, system):
    """A system has caches of its own, which only its layer holds."""
    step = bench.make_step("full", bench.Shape.parse("2,4,2,1,320,16"), 1, torch.bfloat16, torch.device("cuda"))
    layer = bench.SYSTEMS[system](step)
    alive, replay = weakref.ref(layer), bench.whole_step(step, layer)
    del layer
    gc.collect()
    assert alive() is not None
    replay()
    torch.cuda.synchronize()


def test_unknown_names_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--patterns", "fall"])
    assert "unknown: fall; known: full" in capsys.readouterr().err
