"""benchmarks/recompilations.py counts what it says."""

from __future__ import annotations

import json

import pytest

from tests.benchmark_modules import benchmark_modules


@pytest.fixture
def program(monkeypatch):
    with benchmark_modules(monkeypatch, "recompilations", "measure") as modules:
        yield modules["recompilations"]


def test_flexc_compiles_twice(program, tmp_path, monkeypatch, capsys):
    from flexc import pipeline

    pipeline.clear_cache()
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))
    program.main(["--steps", "12", "--longest", "300", "--systems", "flexc-cpu", "--device", "cpu", "--out", str(tmp_path / "out.jsonl")])
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert (record["system"], record["steps"], record["compilations"], record["most_of_a_kind"], record["dense_steps"]) == (
        "flexc-cpu",
        12,
        2,
        2,
        0,
    )
    assert "flexc-cpu" in capsys.readouterr().out


def test_a_system_that_fails_is_said(program, capsys):
    program.main(["--steps", "1", "--systems", "flexc-cute", "--device", "cpu"])
    assert "flexc-cute failed at 1 of 1 steps; step 0: UnsupportedError" in capsys.readouterr().out


def test_time_that_is_up_ends_the_run_and_is_said(program, capsys):
    program.main(["--steps", "9", "--longest", "80", "--seconds", "0", "--systems", "flexc-cpu", "--device", "cpu"])
    assert "steps 1 " in capsys.readouterr().out


def test_steps_change_everything(program):
    steps = list(program.steps_of(200, 300))
    assert [len(set(column)) for column in zip(*steps)][2] == 3
    assert all(len(set(column)) > 20 for column in list(zip(*steps))[:2]) and all(64 <= length <= 300 for *_, length in steps)
