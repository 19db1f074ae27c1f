"""The plumbing of benchmarks/overhead.py: nothing stays replaced, boxes of a flame graph add up, one system's failure stops no other."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
MODULES = ("overhead", "measure", "systems", "patterns")


@pytest.fixture
def overhead(monkeypatch):
    """The benchmark, found as a script finds its modules, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("overhead")
    for name in MODULES:
        sys.modules.pop(name, None)


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


def test_flame_graph_shows_who_calls_whom(overhead):
    def short():
        time.sleep(0.001)

    def long():
        short()
        time.sleep(0.004)

    tree = overhead.tree_of(lambda: (long(), short()), count=2)
    (outer,) = tree.below.values()
    inner = {name.split(" (")[0].split(".")[-1]: frame for name, frame in outer.below.items()}
    assert set(inner) == {"long", "short"} and inner["long"].seconds > inner["short"].seconds
    assert any("short" in name for name in inner["long"].below)
    boxes = list(overhead.rectangles(tree, 0.0, 0, 0.0))
    assert all(left >= 0 and left + frame.seconds <= tree.seconds * 1.0001 for left, _, frame in boxes)
    svg = overhead.flame_svg(tree, 2, "a < b")
    assert svg.startswith("<svg ") and "a &lt; b" in svg and svg.count("<rect") == len(boxes)
