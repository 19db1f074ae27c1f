"""flexc and its peers, side by side in one process: medians of interleaved measurements, as a table and as JSON lines.

    python benchmarks/attention.py                                                # bf16, B2 H16 S8192 D128, every pattern
    python benchmarks/attention.py --shape 1,64,8,32768,32768,128 --out results/h200.jsonl
    python benchmarks/attention.py --suite shapes,weak_spots --side-by-side       # other lengths and head dimensions; where peers are weak
    python benchmarks/attention.py --side-by-side --out results/h200.jsonl        # compile all patterns at once, measure one at a time
    python benchmarks/attention.py --compare results/h200.jsonl                   # the table of measurements taken before

The first system that answers is the one that the others' outputs are compared with: a system that computes something else is named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tables
import torch
from measure import FIELDS, append, circumstances, describe, flops, interleaved
from patterns import NAMES, pattern
from systems import DEFAULT, SYSTEMS, Case, Missing, Prepared, Shape
from turns import in_turns, wait_for_turn

# By name: shapes, and the patterns of each.
PATTERNS = tuple(name for name in NAMES if name != "sliding_128")
SUITES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "patterns": (("2,16,16,8192,8192,128", PATTERNS),),
    "shapes": tuple(
        (shape, ("full", "causal"))
        for shape in ("8,16,16,2048,2048,128", "1,64,8,32768,32768,128", "2,16,16,8192,8192,64", "2,16,16,8192,8192,256")
    ),
    # What is short beside its beginning and end, or leaves SMs idle, or fills shared memory.
    "weak_spots": (
        ("2,128,128,8192,8192,64", ("sliding_128",)),
        ("1,9,9,2048,62208,128", ("full",)),
        ("2,128,128,8192,8192,192,128", ("full", "causal")),
        ("1,32,2,8192,8192,256", ("causal",)),
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_case(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Case:
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(shape.B, heads, length, width, generator=generator, device=device, dtype=dtype)

    q, k, v = normal(shape.Hq, shape.Sq, shape.D), normal(shape.Hkv, shape.Skv, shape.D), normal(shape.Hkv, shape.Skv, shape.Dv)
    dout = normal(shape.Hq, shape.Sq, shape.Dv)
    inputs = (x.requires_grad_() for x in (q, k, v))
    return Case(shape, pattern(name, shape.Sq, shape.Skv, device, shape.Hq), *inputs, dout)


def prepare(case: Case, names: Sequence[str], report: Callable[[str], None]) -> dict[str, Prepared]:
    """The systems that can do the case, each called once."""
    ready: dict[str, Prepared] = {}
    first: tuple[str, torch.Tensor] | None = None
    for name in names:
        try:
            prepared = SYSTEMS[name](case)
            with torch.no_grad():
                out = prepared.forward()
            out = out.transpose(1, 2) if prepared.is_bshd else out
            if first is None:
                first = name, out
            else:
                difference = (out.float() - first[1].float()).abs().max().item()
                if not difference < 0.05:
                    report(f"{name}: output differs from {first[0]}'s by {difference:.3f}")
            ready[name] = prepared
        except Missing as error:
            report(f"{name}: skipped, {error}")
        except Exception as error:
            report(f"{name}: {describe(error)}")
    return ready


def forward_call(prepared: Prepared) -> Callable[[], object]:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return prepared.forward()

    return call


def backward_call(prepared: Prepared) -> Callable[[], object]:
    out = prepared.forward()
    return lambda: torch.autograd.grad(out, prepared.inputs, prepared.dout, retain_graph=True)


def calls_of(ready: dict[str, Prepared], direction: str, report: Callable[[str], None]) -> dict[str, Callable[[], object]]:
    make, calls = {"fwd": forward_call, "bwd": backward_call}[direction], {}
    for name, prepared in ready.items():
        try:
            calls[name] = make(prepared)
        except Exception as error:
            report(f"{name} {direction}: {describe(error)}")
    return calls


def warmed(calls: dict[str, Callable[[], object]], report: Callable[[str], None]) -> dict[str, Callable[[], object]]:
    """The calls that work, each made once: what it compiles is compiled."""
    working = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            report(f"{name}: {describe(error)}")
        else:
            working[name] = call
    return working


def measure(
    shape: Shape,
    name: str,
    systems: Sequence[str],
    directions: Sequence[str],
    dtype: str,
    rounds: int,
    device: torch.device,
    report: Callable[[str], None],
    commit: str | None = None,
    turn: Callable[[], None] = lambda: None,
) -> list[tables.Record]:
    """Records, with exactly the fields FIELDS, of every system that can do the case. `turn` is called when all is compiled."""
    if device.type == "cuda":
        torch._dynamo.reset()  # past eight variants of one function, torch.compile falls back to eager
    records, about = [], circumstances(device, commit)
    case = make_case(name, shape, DTYPES[dtype], device)
    ready = prepare(case, systems, report)
    calls = {direction: warmed(calls_of(ready, direction, report), report) for direction in directions}
    turn()
    for direction in directions:
        times = interleaved(calls[direction], rounds, device, report)
        work = flops(shape, case.pattern.pairs, direction)
        for system, ms in times.items():
            values = {"system": system, "pattern": name, "dtype": dtype, **vars(shape), "direction": direction}
            values |= {"ms": round(ms, 5), "tflops": round(work / ms / 1e9, 2), **about}
            records.append({field: values[field] for field in FIELDS})
    return records


def read(paths: Sequence[Path]) -> list[tables.Record]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            names = text.split(",")
            unknown = sorted(set(names) - set(known))
            if unknown:
                raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
            return names

        return parse

    def shape(text: str) -> Shape:
        try:
            return Shape.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser = argparse.ArgumentParser(description="Measure flexc and its peers side by side.")
    parser.add_argument("--shape", type=shape, action="append", metavar="B,Hq,Hkv,Sq,Skv,D[,Dv]", help="repeatable (2,16,16,8192,8192,128)")
    parser.add_argument("--patterns", type=listed(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--suite", type=listed(list(SUITES)), help=f"in place of --shape: cases of {','.join(SUITES)}")
    parser.add_argument("--systems", type=listed(list(SYSTEMS)), default=list(DEFAULT), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--directions", type=listed(["fwd", "bwd"]), default=["fwd", "bwd"], help="of fwd,bwd")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each system (10)")
    parser.add_argument("--side-by-side", action="store_true", help="prepare all patterns and shapes at once, in processes of their own")
    parser.add_argument("--prepare-s", type=float, default=300.0, help="with --side-by-side: stop what is not compiled by then (300)")
    parser.add_argument("--measure-s", type=float, default=120.0, help="with --side-by-side: stop what takes longer to measure (120)")
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append the measurements to this file as they come")
    parser.add_argument("--commit", help="recorded where the checkout cannot tell")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE.jsonl", help="measure nothing, show these measurements")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[tables.Record]:
    options = arguments(argv)
    if options.compare:
        records = read(options.compare)
        tables.show(records)
        return records
    skipped: set[str] = set()

    def report(line: str) -> None:
        """A skipped system is named once; an error, each time."""
        if line in skipped:
            return
        if "skipped, " in line:
            skipped.add(line)
        print(f"  {line}", flush=True)

    cases = chosen(options)
    if options.side_by_side:
        return side_by_side(options, cases)
    device = torch.device(options.device)
    records: list[tables.Record] = []
    for shape, name in cases:
        print(f"{name}, {shape} {options.dtype}", flush=True)
        try:
            asked = (options.systems, options.directions, options.dtype, options.rounds)
            found = measure(shape, name, *asked, device, report, options.commit, *([wait_for_turn] if options.in_turn else []))
        except Exception as error:
            report(f"{name}, {shape}: {describe(error)}")
            continue
        records += found
        append(found, options.out)
    if records and not options.in_turn:
        tables.show(records)
    return records


def chosen(options: argparse.Namespace) -> list[tuple[Shape, str]]:
    """The cases: of the suites, or each shape with each pattern."""
    if options.suite:
        rows = [(Shape.parse(shape), name) for suite in options.suite for shape, names in SUITES[suite] for name in names]
        return [(shape, name) for shape, name in rows if name in (options.patterns or NAMES)]
    shapes = options.shape or [Shape.parse(shape) for shape, _ in SUITES["patterns"]]
    return [(shape, name) for shape in shapes for name in options.patterns or PATTERNS]


def side_by_side(options: argparse.Namespace, wanted: Sequence[tuple[Shape, str]]) -> list[tables.Record]:
    """Every case in a process of its own; see `turns`."""
    with tempfile.TemporaryDirectory() as folder:
        files, cases = [], []
        for shape, name in wanted:
            files.append(options.out or Path(folder) / f"{len(files)}.jsonl")
            sizes = (shape.B, shape.Hq, shape.Hkv, shape.Sq, shape.Skv, shape.D, shape.Dv)
            given = {
                "--shape": ",".join(map(str, sizes)), "--patterns": name, "--systems": ",".join(options.systems),
                "--directions": ",".join(options.directions), "--dtype": options.dtype, "--rounds": str(options.rounds),
                "--device": options.device, "--out": str(files[-1]), **({"--commit": options.commit} if options.commit else {}),
            }  # fmt: skip
            cases.append([word for pair in given.items() for word in pair] + ["--in-turn"])
        before = len(read([options.out])) if options.out and options.out.is_file() else 0
        in_turns(Path(__file__), cases, options.prepare_s, options.measure_s, lambda line: print(line, flush=True))
        records = read([file for file in dict.fromkeys(files) if file.is_file()])[before:]
    if records:
        tables.show(records)
    return records


if __name__ == "__main__":
    main()
