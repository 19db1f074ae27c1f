"""The plumbing of the benchmarks, with systems that only pretend: counts, fields, tables, and that one failure stops nothing."""

from __future__ import annotations

import argparse
import collections
import io
import itertools
import json
import subprocess

import pytest
import torch

from tests.benchmark_modules import FOLDER, benchmark_modules

MODULES = ("attention", "compile_time", "measure", "patterns", "systems", "tables", "turns")


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules by name, found as a script finds them, and forgotten afterwards."""
    with benchmark_modules(monkeypatch, *MODULES) as modules:
        yield modules


def dense_mask(variant, q_len: int, kv_len: int) -> torch.Tensor:
    if variant.mask_mod is None:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    return variant.mask_mod(0, 0, torch.arange(q_len)[:, None], torch.arange(kv_len))


@pytest.mark.parametrize("name", ["full", "causal", "sliding", "sliding_128", "document", "prefix", "alibi_causal", "softcap_causal"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (2500, 2500), (1, 1), (2300, 700), (700, 2300)])
def test_pairs_are_those_of_the_dense_mask(bench, name, q_len, kv_len):
    variant = bench["patterns"].pattern(name, q_len, kv_len, "cpu")
    assert variant.pairs == int(dense_mask(variant, q_len, kv_len).sum())


def test_suites_name_shapes_and_patterns_that_are_there(bench):
    attention = bench["attention"]

    def chosen(*words):
        return [(str(shape), name) for shape, name in attention.chosen(attention.arguments(words))]

    assert chosen() == chosen("--suite", "patterns") and len(chosen()) == 8
    shapes = chosen("--suite", "shapes,weak_spots")
    assert ("B1 H64:8 S32768 D128", "causal") in shapes and ("B2 H128 S8192 D192 Dv128", "full") in shapes
    assert chosen("--suite", "weak_spots", "--patterns", "sliding_128") == [("B2 H128 S8192 D64", "sliding_128")]
    assert chosen("--shape", "1,1,1,8,8,16", "--patterns", "full") == [("B1 H1 S8 D16", "full")]


def test_documents_are_eight_and_the_same_each_time(bench):
    ids = bench["patterns"].document_ids(500)
    assert ids.dtype == torch.int32 and ids.unique().tolist() == list(range(8)) and bool((ids.diff() >= 0).all())
    assert torch.equal(ids, bench["patterns"].document_ids(500))


def test_alibi_is_the_published_formula(bench):
    got = bench["patterns"].alibi(torch.tensor(2.0), 0, torch.tensor(1), torch.tensor(3), torch.tensor(8))
    assert got.item() == pytest.approx(2.0 - 0.5 * 5)


def test_flops_count_two_products_forward_and_five_backward(bench):
    shape = bench["systems"].Shape(2, 16, 16, 8192, 8192, 128, 128)
    assert bench["measure"].flops(shape, 1000, "fwd") == 4 * 2 * 16 * 1000 * 128
    assert bench["measure"].flops(shape, 1000, "bwd") == 10 * 2 * 16 * 1000 * 128
    wide = bench["systems"].Shape(1, 1, 1, 8, 8, 16, 32)
    assert bench["measure"].flops(wide, 1, "fwd") == 2 * (16 + 32)
    assert bench["measure"].flops(wide, 1, "bwd") == 2 * (3 * 16 + 2 * 32)


def test_shape_is_read_with_and_without_a_value_dim(bench):
    parse = bench["systems"].Shape.parse
    assert vars(parse("1,8,2,64,96,32")) == dict(B=1, Hq=8, Hkv=2, Sq=64, Skv=96, D=32, Dv=32)
    assert parse("1,8,2,64,96,32,16").Dv == 16 and str(parse("1,8,2,64,96,32,16")) == "B1 H8:2 S64x96 D32 Dv16"
    with pytest.raises(ValueError, match="expected B,Hq,Hkv,Sq,Skv,D"):
        parse("1,2,3")


@pytest.fixture
def fakes(bench, monkeypatch):
    """flexc-good and a peer that answer, one that raises, one that is missing, one whose numbers are wrong, one without a backward."""
    systems = bench["systems"]

    def missing(case):
        raise systems.Missing("not installed")

    def failing(case):
        raise RuntimeError("kernel\nfault")

    def wrong(case):
        good = systems._eager(case)
        return systems.Prepared(lambda: good.forward() + 1, good.inputs, good.dout)

    def forward_only(case):
        good = systems._eager(case)
        return systems.Prepared(lambda: good.forward().detach(), good.inputs, good.dout)

    table = {"flexc-good": systems._eager, "peer": systems._eager, "failing": failing, "missing": missing, "wrong": wrong}
    table["forward-only"] = forward_only
    monkeypatch.setattr(bench["attention"], "SYSTEMS", table)
    return list(table)


def run(bench, fakes, **changes):
    lines = []
    options = dict(name="causal", systems=fakes, directions=["fwd", "bwd"], dtype="fp32", rounds=2) | changes
    shape = bench["systems"].Shape(1, 4, 2, 40, 40, 8, 8)
    records = bench["attention"].measure(shape, device=torch.device("cpu"), report=lines.append, commit="abc", **options)
    return records, lines


def test_records_have_exactly_the_fields(bench, fakes):
    records, _ = run(bench, fakes)
    fields = "system pattern dtype B Hq Hkv Sq Skv D Dv direction ms tflops device torch triton cutlass commit date".split()
    assert records and all(list(record) == fields for record in records)
    first = json.loads(json.dumps(records[0]))
    assert (first["system"], first["direction"], first["Hkv"], first["commit"]) == ("flexc-good", "fwd", 2, "abc")
    assert first["ms"] > 0 and first["tflops"] >= 0


def test_tflops_are_on_unmasked_pairs(bench, fakes, monkeypatch):
    monkeypatch.setattr(bench["attention"], "interleaved", lambda calls, *rest: dict.fromkeys(calls, 1e-6))
    records, _ = run(bench, ["flexc-good"], directions=["fwd"])
    assert records[0]["tflops"] == pytest.approx(4 * 4 * (40 * 41 // 2) * 8 / 1e-6 / 1e9, rel=1e-3)


def test_one_failing_system_stops_no_other(bench, fakes):
    records, lines = run(bench, fakes)
    measured = {(record["system"], record["direction"]) for record in records}
    assert {("flexc-good", "fwd"), ("flexc-good", "bwd"), ("peer", "fwd"), ("peer", "bwd"), ("forward-only", "fwd")} <= measured
    assert not {system for system, _ in measured} & {"failing", "missing"} and ("forward-only", "bwd") not in measured
    assert "failing: RuntimeError: kernel fault" in lines and "missing: skipped, not installed" in lines
    assert any(line.startswith("forward-only: ") for line in lines)


def test_a_system_that_computes_something_else_is_named(bench, fakes):
    _, lines = run(bench, fakes)
    assert [line for line in lines if "differs" in line] == ["wrong: output differs from flexc-good's by 1.000"]


def test_systems_take_turns(bench):
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    bench["measure"].interleaved(calls, 2, torch.device("cpu"), print, turn_ms=0.0)
    # Four calls each to find how long one takes; then turns of one call that is not counted and one that is.
    assert "".join(order) == "aaaa" + "bbbb" + "aabb" + "bbaa"


@pytest.mark.parametrize("count", range(1, 9))
def test_each_system_follows_each_other_equally_often(bench, count):
    rounds = [bench["measure"].order(count, index) for index in range(2 * count)]
    assert all(sorted(each) == list(range(count)) for each in rounds)
    followers = collections.Counter(pair for each in rounds for pair in itertools.pairwise(each))
    assert len(followers) == count * (count - 1) and len(set(followers.values())) <= 1


def test_a_call_that_starts_to_fail_is_left_out(bench):
    count, lines = iter(range(6)), []
    times = bench["measure"].interleaved({"tired": lambda: next(count), "well": lambda: None}, 3, torch.device("cpu"), lines.append)
    assert list(times) == ["well"] and lines == ["tired: StopIteration: "]


def record(system: str, ms: float, **changes) -> dict:
    values = dict(system=system, pattern="causal", dtype="bf16", B=2, Hq=16, Hkv=16, Sq=8192, Skv=8192, D=128, Dv=128, direction="fwd")
    values |= dict(ms=ms, tflops=500 / ms, device="GPU", torch="2", triton="3", cutlass="4", commit="abc", date="2000-01-01")
    return values | changes


def printed(bench, records) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    bench["tables"].show(records, console)
    return console.export_text()


def test_table_shows_the_ratio_to_each_peer(bench):
    text = printed(bench, [record("flexc-triton", 1.0), record("flex-triton", 1.5), record("fa4", 0.5)])
    row = next(line for line in text.splitlines() if "causal" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["causal", "fwd", "1.000", "500.0", "333.3", "1.50×", "1000.0", "0.50×"]


def test_table_keeps_commits_apart_and_the_last_of_a_kind(bench):
    records = [record("flexc-triton", 1.0), record("flexc-triton", 2.0), record("flexc-triton", 4.0, commit="def")]
    text = printed(bench, records)
    assert text.count("TFLOP/s on unmasked pairs") == 2 and "2.000" in text and "4.000" in text and "1.000" not in text


def test_out_and_compare_give_the_same_records(bench, fakes, monkeypatch, tmp_path, capsys):
    out = tmp_path / "new" / "results.jsonl"
    common = ["--device", "cpu", "--dtype", "fp32", "--rounds", "1", "--shape", "1,2,2,24,24,8"]
    written = bench["attention"].main([*common, "--patterns", "causal,full", "--systems", "flexc-good,failing", "--out", str(out)])
    assert bench["attention"].main(["--compare", str(out)]) == written and len(written) == 4
    assert capsys.readouterr().out.count("failing: RuntimeError: kernel fault") == 2


def test_unknown_names_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench["attention"].main(["--patterns", "casual"])
    assert "unknown: casual; known: full, causal" in capsys.readouterr().err


# --- compile_time.py -------------------------------------------------------------------------------------------------------------------


def compile_times(bench, monkeypatch, capsys, process, *arguments):
    """What the program prints when its processes are replaced."""
    program = bench["compile_time"]
    monkeypatch.setattr(program, "in_fresh_process", process)
    program.main(["--device", "cpu", "--backend", "cpu", *arguments])
    return capsys.readouterr().out


def test_compile_times_are_medians_of_cold_and_second_processes(bench, monkeypatch, capsys):
    seen = []

    def process(name, options, cache, timeout):
        seen.append((name, cache.name))
        return dict.fromkeys(bench["compile_time"].COLUMNS, float(10 ** len(seen)))

    text = compile_times(bench, monkeypatch, capsys, process, "--patterns", "causal", "--runs", "3")
    assert seen == [("causal", "causal-0"), ("causal", "causal-1"), ("causal", "causal-2")] * 2  # the second finds the caches of the first
    rows = [line for line in text.splitlines() if line.startswith("│ causal")]
    assert ["100.0" in row for row in rows] == [True, False] and ["100000.0" in row for row in rows] == [False, True]


def test_a_process_that_fails_or_hangs_leaves_the_others(bench, monkeypatch, capsys):
    def process(name, options, cache, timeout):
        if name == "full":
            raise RuntimeError("exit status 1: no compiler")
        if name == "sliding":
            raise subprocess.TimeoutExpired("python", timeout)
        return dict.fromkeys(bench["compile_time"].COLUMNS, 7.0)

    text = compile_times(bench, monkeypatch, capsys, process, "--patterns", "full,sliding,causal")
    assert "full, cold: RuntimeError: exit status 1: no compiler" in text and "sliding, second process: TimeoutExpired" in text
    assert "causal, cold: " in text and "│ causal" in text and "│ full" not in text


def test_no_process_starts_when_the_time_is_over(bench, monkeypatch, capsys):
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(bench["compile_time"].time, "monotonic", lambda: next(clock))
    limits = []

    def process(name, options, cache, timeout):
        limits.append(timeout)
        return dict.fromkeys(bench["compile_time"].COLUMNS, 7.0)

    text = compile_times(bench, monkeypatch, capsys, process, "--patterns", "full,causal,sliding", "--seconds", "80")
    assert limits == [55.0, 25.0]  # the rest of 80 seconds, and five
    assert "sliding, cold: not measured, 80 seconds are over" in text


def test_what_a_failing_process_printed_is_told(bench, tmp_path):
    program = bench["compile_time"]
    options = argparse.Namespace(backend="nonsense", shape="1,1,1,16,16,8", device="cpu")
    with pytest.raises(RuntimeError, match="exit status 1: .*unknown backend 'nonsense'"):
        program.in_fresh_process("causal", options, tmp_path, 60.0)


def test_compile_times_of_a_fresh_process(bench, tmp_path):
    program = bench["compile_time"]
    options = argparse.Namespace(backend="cpu", shape="1,1,1,16,16,8", device="cpu")
    found = program.in_fresh_process("softcap_causal", options, tmp_path, 60.0)
    assert set(found) == set(program.COLUMNS) and 0 < found["trace"] < found["forward"] and found["backward"] > 0
    assert any((tmp_path / "flexc").rglob("*.py"))  # the caches that it was given


# --- turns.py -------------------------------------------------------------------------------------------------------------------------


def test_cases_are_prepared_at_once_and_measured_in_turn(bench, tmp_path):
    script = tmp_path / "case.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(FOLDER)!r})\n"
        "from turns import wait_for_turn\n"
        "if sys.argv[1] == 'stuck': time.sleep(60)\n"
        "if sys.argv[1] == 'broken': sys.exit('no')\n"
        "print('prepared', sys.argv[1], time.time()); wait_for_turn(); print('measured', sys.argv[1], time.time())\n"
        "if sys.argv[1] == 'slow': time.sleep(60)\n"
    )
    lines: list[str] = []
    bench["turns"].in_turns(script, [["a"], ["broken"], ["stuck"], ["slow"], ["b"]], 5.0, 1.0, lines.append)
    assert [" ".join(line.split()[:2]) for line in lines if line.split()[0] in ("prepared", "measured")] == [
        "prepared a", "measured a", "prepared slow", "measured slow", "prepared b", "measured b"
    ]  # fmt: skip
    when = {tuple(line.split()[:2]): float(line.split()[2]) for line in lines if len(line.split()) == 3 and line[0] in "pm"}
    assert max(when["prepared", name] for name in ("a", "slow", "b")) < when["measured", "a"] < when["measured", "b"]
    assert "stuck: not ready after 5 s" in lines and "slow: not measured within 1 s" in lines
