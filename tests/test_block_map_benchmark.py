"""The plumbing of benchmarks/block_maps.py on the CPU: fields, goals, tables, and that one failure stops nothing."""

from __future__ import annotations

import io
import json
import time

import pytest
import torch

from tests.benchmark_modules import benchmark_modules

MODULES = ("block_maps", "block_map_systems", "block_map_tables", "mask_patterns", "measure", "patterns", "systems", "turns")
CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--seconds", "0", "--commit", "abc"]


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules by name, found as a script finds them, and forgotten afterwards."""
    with benchmark_modules(monkeypatch, *MODULES) as modules:
        yield modules


def test_out_and_compare_give_the_same_records(bench, tmp_path, capsys):
    out = tmp_path / "new" / "results.jsonl"
    written = bench["block_maps"].main([*QUICK, "--only", "causal,padding", "--lengths", "512,1024", "--batch", "3", "--out", str(out)])
    assert [(r["mask"], r["Sq"], r["B"]) for r in written] == [
        ("causal", 512, 1),
        ("padding", 512, 3),
        ("causal", 1024, 1),
        ("padding", 1024, 3),
    ]
    assert bench["block_maps"].main(["--compare", str(out)]) == written
    for record in written:
        assert tuple(record) == bench["block_maps"].FIELDS and json.dumps(record)
        assert all(record[field] > 0 for field in ("ms", "again_ms", "walks_ms", "host_ms", "size_mib"))
    causal = written[2]
    assert (causal["empty"], causal["partial"], causal["full"]) == (28, 8, 28)
    assert sum(causal[way] for way in ("by_bounds", "by_period", "by_samples", "evaluated", "undecided")) == 64
    assert "causal" in capsys.readouterr().out


def test_threads_are_given_back(bench):
    before = torch.get_num_threads()
    bench["block_maps"].main([*QUICK, "--only", "causal", "--lengths", "256"])
    assert torch.get_num_threads() == before


def test_one_failure_stops_nothing(bench, monkeypatch, capsys):
    def fault(*_):
        raise RuntimeError("kernel fault")

    monkeypatch.setitem(bench["block_map_systems"].SYSTEMS, "failing", fault)
    found = list(bench["block_maps"].measure("causal", 256, ["failing", "flexc"], CPU, 0.0, lambda line: print(line)))
    assert [r["system"] for r in found] == ["flexc"]
    assert capsys.readouterr().out == "failing, causal, N = 256: RuntimeError: kernel fault\n"


def test_names_and_beginnings_of_names(bench, capsys):
    named = bench["block_maps"].masks_named
    assert named("causal,documents_8,causal") == ["causal", "documents_8"]
    assert named("documents") == [name for name in bench["mask_patterns"].NAMES if name.startswith("documents")]
    assert named("window") == ["window"]
    with pytest.raises(SystemExit):
        bench["block_maps"].main(["--only", "casual"])
    assert "unknown: casual; known: causal, window" in capsys.readouterr().err


def test_cases_of_all_lengths_begin_with_the_longest(bench):
    every = list(bench["block_maps"].cases(bench["mask_patterns"].NAMES, None))
    assert every[:2] == [("documents_32", 819_200), ("causal", 2**20)] and len(every) == 4 * 15 + 1
    assert list(bench["block_maps"].cases(["documents_32"], [256])) == [("documents_32", 256)]


def test_goals_are_those_of_the_issue(bench):
    goals, gpu = bench["block_maps"].goals, torch.device("cuda")
    assert goals("causal", 2**20, gpu) == {"goal_ms": 1.0, "goal_mib": 16.0}
    assert goals("causal", 2**20, CPU)["goal_ms"] == 50
    assert goals("causal", 8192, gpu) == {"goal_ms": 0.06, "goal_host_ms": 0.1} and goals("causal", 8192, CPU) == {}
    assert goals("documents_32", 819_200, CPU) == {"goal_ms": 5.3} and goals("documents_32", 1024, CPU) == {}


def test_masks_are_prepared_side_by_side_and_printed_in_their_turn(bench, tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    out.write_text(json.dumps({"system": "before"}) + "\n")
    asked = [*QUICK, "--only", "padding,causal", "--lengths", "512,256", "--batch", "2", "--out", str(out)]
    written = bench["block_maps"].main([*asked, "--side-by-side"])
    assert [(r["mask"], r["Sq"], r["B"], r["commit"]) for r in written] == [
        (mask, length, batch, "abc") for mask, batch in (("padding", 2), ("causal", 1)) for length in (512, 256)
    ]
    assert bench["block_maps"].read(out)[1:] == written
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [f"{r['mask']} {r['Sq']} flexc" for r in written]


def test_create_block_mask_is_measured_where_it_is_asked_for_and_fits(bench):
    systems_of, parsed = bench["block_maps"].systems_of, bench["block_maps"].parsed
    gpu = parsed(["--device", "cuda", "--flex", "causal"])
    assert systems_of("causal", 131072, gpu) == ["flexc", "flex-compiled"]
    assert systems_of("causal", 2**20, gpu) == systems_of("window", 8192, gpu) == ["flexc"]
    assert systems_of("causal", 8192, parsed(["--device", "cpu"])) == ["flexc"]
    assert systems_of("causal", 8192, parsed(["--device", "cuda", "--systems", "flex-compiled"])) == ["flex-compiled"]


def test_tables_show_goals_and_the_peer(bench):
    from rich.console import Console

    ours = dict.fromkeys(bench["block_maps"].FIELDS) | {"system": "flexc", "mask": "causal", "Sq": 2**20, "ms": 0.5, "again_ms": 0.4}
    ours |= {
        "walks_ms": 2.0,
        "stream_ms": 0.7,
        "host_ms": 0.3,
        "row_ms": 0.1,
        "peak_mib": 20.0,
        "empty": 5,
        "partial": 4,
        "full": 3,
        "goal_ms": 1.0,
        "goal_mib": 16.0,
    }
    ours |= {"by_period": 0, "by_samples": 7, "evaluated": 0, "undecided": 0, "device": "H200"}
    flex = ours | {"system": "flex-compiled", "ms": 50.0, "partial": 1, "peak_mib": 100.0}
    console = Console(file=io.StringIO(), width=220)
    bench["block_map_tables"].show([ours, flex], console)
    row = next(line for line in console.file.getvalue().splitlines() if "causal" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[:8] == ["causal", "1048576", "0.500", "1 ✓", "0.400", "2.000", "0.700", "0.300"]
    assert cells[8:12] == ["0.100", "", "20.0", "16 ✗"] and cells[15:] == ["7 samples", "50.000", "25.0×", "100.0", "3"]


def test_a_call_that_takes_too_long_is_stopped(bench):
    with pytest.raises(TimeoutError, match="more than 1 s"), bench["block_map_systems"].time_limit(1):
        time.sleep(5)
    with bench["block_map_systems"].time_limit(1):
        pass
    time.sleep(1.1)


def test_new_contents_are_measured_each_time(bench, monkeypatch):
    """Facts are kept with a tensor's version: `map` gives it another one before each call, `again` does not."""
    versions = []
    block_map = bench["block_map_systems"].flexc.block_map
    pattern = bench["mask_patterns"].mask_pattern("documents_8", 512, CPU)

    def counted(*args, **kwargs):
        versions.append(pattern.tensors[0]._version)
        return block_map(*args, **kwargs)

    monkeypatch.setattr(bench["block_map_systems"].flexc, "block_map", counted)
    bench["block_map_systems"].measure_flexc(pattern, CPU, 0.0)
    assert torch.tensor(versions).diff().tolist() == [0] + [1] * 5 + [0] * 5 + [1] * 5


def test_peak_memory_of_a_call(bench):
    grown = bench["block_map_systems"].peak_mib(lambda: torch.ones(64 * 2**20, dtype=torch.uint8), CPU)
    assert grown is None or 60 < grown < 80


@pytest.mark.gpu
def test_create_block_mask_finds_the_same_blocks(bench):
    device = torch.device("cuda")
    found = list(bench["block_maps"].measure("documents_causal_window", 4096, ["flexc", "flex-compiled"], device, 0.0, print))
    assert [r["system"] for r in found] == ["flexc", "flex-compiled"]
    assert all(found[0][kind] == found[1][kind] for kind in ("empty", "partial", "full"))
