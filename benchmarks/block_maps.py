"""How long the blocks of a mask take to find, how much memory, and what decides them; beside compiled create_block_mask on a GPU.

    python benchmarks/block_maps.py --side-by-side --out results/h200-block-maps.jsonl   # compile all masks at once, measure one at a time
    python benchmarks/block_maps.py --device cpu --only causal,documents --lengths 8192
    python benchmarks/block_maps.py --compare results/h200-block-maps.jsonl              # the tables of measurements taken before

Columns of times, all medians in milliseconds. `map`: what the forward kernel walks, with captured tensors whose contents are new each time.
`walks`: the map with all that the forward and the backward kernel read, as much as create_block_mask makes. `again`: `map` with contents
unchanged. `host`: until the call of `map` returns, on a device that has nothing to do; `in a row`: the same where calls follow each other.

On a CPU one thread works. On a GPU, `map` and `walks` are the time of the device alone: the calls are captured in a CUDA graph, several in
a row, and its replay is divided by their number, so that the device never waits for the host to launch. `stream` and `again` are the time
between two events around one call, which contains such waits; so is that of create_block_mask, whose host takes longer than its device for
short sequences. Peak memory is that of one call that is not captured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from block_map_systems import BLOCK, SYSTEMS, Record
from block_map_tables import line_of, show
from mask_patterns import LONG_DOCUMENTS, NAMES, mask_pattern
from measure import append, circumstances, describe
from turns import in_turns, wait_for_turn

FIELDS = tuple(
    "system mask B Sq Skv block ms again_ms walks_ms stream_ms host_ms row_ms peak_mib size_mib empty partial full by_bounds by_period "
    "by_samples evaluated undecided overflowed goal_ms goal_mib goal_host_ms device torch triton cutlass commit date".split()
)
LENGTHS = (2**20, 131072, 32768, 8192)
FLEX_MASKS = ("causal", "window", "prefix_lm", "documents_8", "documents_causal_window", "neighborhood_2d")  # each takes seconds to compile
FLEX_LONGEST = 131072  # a million tokens need a terabyte

pattern_of = cache(mask_pattern)
"""The same function each time: torch.compile knows it again."""


def goals(name: str, length: int, device: torch.device) -> Record:
    """What is asked for: milliseconds, MiB of peak memory, milliseconds of the host; None where nothing is."""
    is_gpu = device.type == "cuda"
    if name == "documents_32" and length == LONG_DOCUMENTS:
        return {"goal_ms": 5.3}  # a thousandth of what create_block_mask was reported to take
    if length == 2**20:
        return {"goal_ms": 1.0 if is_gpu else 50.0, "goal_mib": 16.0 if is_gpu else None}
    if length == 8192 and is_gpu:
        return {"goal_ms": 0.06, "goal_host_ms": 0.1}
    return {}


def measure(
    name: str,
    length: int,
    systems: Sequence[str],
    device: torch.device,
    seconds: float,
    report: Callable[[str], None],
    batch: int = 1,
    commit: str | None = None,
) -> Iterator[Record]:
    """A record, with exactly the fields FIELDS, of every system that can do the case, as soon as it is measured."""
    about = circumstances(device, commit)
    pattern = pattern_of(name, length, device, batch)
    for system in systems:
        try:
            found = SYSTEMS[system](pattern, device, seconds)
        except Exception as error:
            report(f"{system}, {name}, N = {length}: {describe(error)}")
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        where = {"system": system, "mask": name, "B": pattern.batch, "Sq": pattern.length, "Skv": pattern.length, "block": BLOCK}
        values = {**where, **found, **(goals(name, length, device) if system == "flexc" else {}), **about}
        rounded = {key: round(value, 5) if isinstance(value, float) else value for key, value in values.items()}
        yield {field: rounded.get(field) for field in FIELDS}


# --- command ------------------------------------------------------------------------------------------------------------------------


def masks_named(text: str) -> list[str]:
    """Names of masks from a list of names or of their beginnings: "causal,documents"."""
    found = []
    for part in text.split(","):
        matching = [part] if part in NAMES else [name for name in NAMES if name.startswith(part) and part]
        if not matching:
            raise argparse.ArgumentTypeError(f"unknown: {part}; known: {', '.join(NAMES)}")
        found += matching
    return list(dict.fromkeys(found))


def cases(names: Sequence[str], lengths: Sequence[int] | None) -> Iterator[tuple[str, int]]:
    """(mask, N), length by length; the 32 documents have a length of their own unless one is asked for."""
    if not lengths and "documents_32" in names:
        yield "documents_32", LONG_DOCUMENTS
    for length in lengths or LENGTHS:
        yield from ((name, length) for name in names if lengths or name != "documents_32")


def systems_of(name: str, length: int, options: argparse.Namespace) -> list[str]:
    """The systems that are asked for and can do the case."""
    has_flex = options.device.type == "cuda" and name in options.flex and length <= FLEX_LONGEST
    return [system for system in options.systems if system != "flex-compiled" or has_flex]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _report(line: str) -> None:
    print(f"  {line}", flush=True)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure how long the blocks of a mask take to find.")
    parser.add_argument(
        "--only", type=masks_named, default=list(NAMES), metavar="MASKS", help=f"names or their beginnings, of {','.join(NAMES)}"
    )
    parser.add_argument("--lengths", type=_numbers, help=f"N, in tokens ({','.join(map(str, LENGTHS))})")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    parser.add_argument("--batch", type=int, default=1, help="of the masks that read the batch number (1)")
    parser.add_argument("--seconds", type=float, default=0.5, help="to repeat each measurement for (0.5)")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument(
        "--flex",
        type=lambda text: masks_named(text) if text else [],
        default=list(FLEX_MASKS),
        metavar="MASKS",
        help=f"on a GPU, measure create_block_mask for these, up to {FLEX_LONGEST} tokens ({','.join(FLEX_MASKS)}); each costs seconds",
    )
    parser.add_argument("--side-by-side", action="store_true", help="prepare all masks at once, in processes of their own")
    parser.add_argument("--prepare-s", type=float, default=120.0, help="with --side-by-side: stop what is not compiled by then (120)")
    parser.add_argument("--measure-s", type=float, default=60.0, help="with --side-by-side: stop what takes longer to measure (60)")
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append the measurements to this file as they come")
    parser.add_argument("--commit", help="recorded where the checkout cannot tell")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE.jsonl", help="measure nothing, show these measurements")
    return parser.parse_args(argv)


def read(path: Path) -> list[Record]:
    """Measurements taken before."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def main(argv: Sequence[str] | None = None) -> list[Record]:
    options = parsed(argv)
    if options.compare:
        records = [record for path in options.compare for record in read(path)]
        show(records)
        return records
    if options.side_by_side:
        return side_by_side(options)
    threads = torch.get_num_threads()
    if options.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        records = in_order(options)
    finally:
        torch.set_num_threads(threads)
    if records and not options.in_turn:
        show(records)
    return records


def in_order(options: argparse.Namespace) -> list[Record]:
    """One case after the other, in this process; each is printed and written down when it is measured."""
    asked = [(name, length, systems_of(name, length, options)) for name, length in cases(options.only, options.lengths)]
    if options.in_turn:
        for case in asked:
            list(measure(*case, options.device, 0.0, lambda _: None, options.batch, options.commit))  # what fails fails again, and says so
        wait_for_turn()
    records: list[Record] = []
    for case in asked:
        for record in measure(*case, options.device, options.seconds, _report, options.batch, options.commit):
            records.append(record)
            print(line_of(record), flush=True)
            append([record], options.out)
    return records


def side_by_side(options: argparse.Namespace) -> list[Record]:
    """Every mask of every system in a process of its own; see `turns`."""
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "measured.jsonl"
        before = len(read(out)) if out.exists() else 0
        common = {"--device": str(options.device), "--batch": options.batch, "--seconds": options.seconds, "--out": out}
        if options.lengths:
            common["--lengths"] = ",".join(map(str, options.lengths))
        if options.commit:
            common["--commit"] = options.commit
        works = []
        for system in options.systems:
            for name in options.only:
                if any(system in systems_of(*case, options) for case in cases([name], options.lengths)):
                    given = {**common, "--systems": system, "--only": name, "--flex": name}
                    works.append([str(word) for pair in given.items() for word in pair] + ["--in-turn"])
        in_turns(Path(__file__), works, options.prepare_s, options.measure_s, lambda line: print(line, flush=True))
        records = read(out)[before:] if out.exists() else []
    if records:
        show(records)
    return records


if __name__ == "__main__":
    main()
