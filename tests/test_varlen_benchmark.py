"""The plumbing of benchmarks/varlen.py on the CPU: fields, pairs, and that both routes of flexc agree."""

from __future__ import annotations

import json

import pytest
import torch

from tests.benchmark_modules import benchmark_modules

MODULES = ("varlen", "ahead", "measure", "patterns", "systems")
SMALL = ["--device", "cpu", "--tokens", "90", "--heads", "2", "--dim", "16", "--sequences", "4", "--dtype", "fp32", "--rounds", "1"]


@pytest.fixture
def bench(monkeypatch):
    with benchmark_modules(monkeypatch, *MODULES) as modules:
        yield modules["varlen"]


def test_both_routes_are_measured_and_agree(bench, tmp_path, capsys):
    file = tmp_path / "varlen.jsonl"
    bench.main([*SMALL, "--systems", "varlen-triton,document-triton,fa4", "--out", str(file)])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(tuple(record) == bench.FIELDS for record in records)
    found = {(r["pattern"], r["direction"], r["system"]) for r in records}
    routes = ("varlen-triton", "document-triton")
    assert found == {(p, d, s) for p in bench.PATTERNS for d in ("fwd", "bwd") for s in routes}
    output = capsys.readouterr().out
    assert "differs" not in output and "fa4: skipped, needs a GPU" in output


def test_pairs_are_those_of_the_sequences(bench):
    batch = bench.make_batch("causal", 5, 60, 1, 8, torch.float32, torch.device("cpu"))
    documents = bench._documents(batch)
    tokens = torch.arange(60)
    allowed = (documents[:, None] == documents) & (tokens[:, None] >= tokens)
    assert len(documents) == 60 and batch.pairs == int(allowed.sum()) and batch.longest == int(batch.cu.diff().max())


def test_processes_ahead_make_the_calls_that_are_measured(bench, monkeypatch):
    jobs = []
    monkeypatch.setattr(bench, "run_ahead", lambda function, given, processes: jobs.extend(given))
    bench.main([*SMALL, "--systems", "varlen-triton,document-triton,fa4", "--patterns", "causal"])
    assert [job[:4] for job in jobs] == [("varlen-triton", "causal", "bwd", 4), ("document-triton", "causal", "bwd", 4)]
    bench._call_once(*jobs[0])
    assert bench.kinds(["flex", "fa4"], ["causal"], "fwd", [8, 64]) == [("flex", "causal", "fwd", 8), ("flex", "causal", "fwd", 64)]
