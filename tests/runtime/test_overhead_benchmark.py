"""The plumbing of benchmarks/overhead.py and flame.py: nothing stays replaced, boxes add up, one failure stops no other system."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest
import torch

from tests.benchmark_modules import benchmark_modules

MODULES = ("overhead", "flame", "measure", "systems", "patterns")


@pytest.fixture
def overhead(monkeypatch):
    """The benchmark, found as a script finds its modules, and forgotten afterwards."""
    with benchmark_modules(monkeypatch, *MODULES) as modules:
        yield modules["overhead"]


@pytest.fixture
def problem(overhead):
    return overhead.Problem.of(overhead.Shape.parse("1,2,2,20,20,8"), torch.float32, torch.device("cpu"))


def test_time_around_the_module_leaves_the_module_as_it_was(overhead, problem):
    call = overhead.flexc_call(problem)
    before = call()
    assert overhead.around_us(problem, turns=2, count=3) > 0
    assert call().equal(before)


def test_system_that_fails_is_reported_and_left_out(overhead, problem, monkeypatch):
    def fails(problem):
        raise RuntimeError("no such thing")

    monkeypatch.setitem(overhead.SYSTEMS, "flex", fails)
    said = []
    times = overhead.measured(problem, ["flexc", "flex", "flexc-graph", "sdpa"], 2, 2, said.append)
    assert list(times) == ["flexc", "sdpa"] and min(times.values()) > 0
    assert said == ["flex: RuntimeError: no such thing", "flexc-graph: skipped, needs a GPU"]


@pytest.fixture
def flame(overhead):
    return sys.modules["flame"]


def test_flame_graph_shows_who_calls_whom(flame):
    def short():
        time.sleep(0.001)

    def long():
        short()
        time.sleep(0.004)

    profile = flame.sampled(lambda: (long(), short()), 0.3, lambda: None, turn=5)
    assert 5500 < profile.us < 20000
    (outer,) = profile.root.below.values()
    inner = {name.split(" (")[0]: frame for name, frame in outer.below.items() if not frame.is_line}
    assert set(inner) == {"long", "short"} and inner["long"].samples > 2 * inner["short"].samples
    slept = {name.partition(": ")[2]: frame.samples for name, frame in inner["long"].below.items() if frame.is_line}
    assert slept["time.sleep(0.004)"] > 0.6 * inner["long"].samples
    assert any("short" in name for name in inner["long"].below)
    assert 0.3 < profile.us_of(inner["short"]) / 1000 < 4
    boxes = list(flame.rectangles(profile.root, 0, 0, 0.0))
    assert all(left >= 0 and left + frame.samples <= profile.root.samples for left, _, frame in boxes)
    drawn = flame.picture(profile, "a < b")
    assert drawn.startswith("<svg ") and "a &lt; b" in drawn and "time.sleep(0.004)" in drawn
    first = flame.table(profile, "sleep").splitlines()[1]
    assert "long (test_overhead_benchmark.py" in first and first.endswith("time.sleep(0.004)")


def test_sampling_ends(flame):
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ZeroDivisionError):
        flame.sampled(lambda: 1 / 0, 0.1, lambda: None)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_profile_of_each_plain_flexc_system(overhead, tmp_path, capsys):
    shape = ["--shape", "1,2,2,20,20,8", "--device", "cpu", "--turns", "1", "--count", "2"]
    overhead.main(
        [*shape, "--systems", "flexc,sdpa", "--grad", "--profile", str(tmp_path), "--seconds", "0.1", "--out", str(tmp_path / "out")]
    )
    assert {path.name for path in tmp_path.iterdir()} == {"flexc.svg", "flexc.txt", "out"}
    assert "__call__ (api.py" in (tmp_path / "flexc.txt").read_text() + (tmp_path / "flexc.svg").read_text()
    assert [json.loads(line)["grad"] for line in (tmp_path / "out").read_text().splitlines()] == [True, True]
