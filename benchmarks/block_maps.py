"""How long the blocks of a mask take to find, how much memory, and what decides them; beside compiled create_block_mask on a GPU.

    python benchmarks/block_maps.py --out results/h200-block-maps.jsonl
    python benchmarks/block_maps.py --device cpu --only causal,documents --lengths 8192
    python benchmarks/block_maps.py --compare results/h200-block-maps.jsonl             # the tables of measurements taken before

Columns of times, all medians in milliseconds. `map`: the runs of all query blocks, with captured tensors whose contents are new each time.
`again`: the same with their contents unchanged. `walks`: the map with all that the forward and the backward kernel read, as much as
create_block_mask makes. `host`: until the call of `map` returns. On a CPU one thread works; on a GPU the times are between two events.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mask_patterns
import torch
from mask_patterns import LONG_DOCUMENTS, NAMES, MaskPattern, mask_pattern
from measure import circumstances, describe
from rich.console import Console
from rich.table import Table

import flexc

Record = dict[str, Any]
FIELDS = tuple(
    "system mask B Sq Skv block ms again_ms walks_ms host_ms peak_mib size_mib empty partial full by_bounds by_period by_samples evaluated "
    "undecided goal_ms goal_mib goal_host_ms device torch triton cutlass commit date".split()
)
LENGTHS = (8192, 32768, 131072, 2**20)
BLOCK = 128
FLEX_LIMIT_S = 120


# --- time and memory ----------------------------------------------------------------------------------------------------------------


def medians(call: Callable[[], object], prepare: Callable[[], None], device: torch.device, seconds: float) -> tuple[float, float]:
    """Milliseconds of a call, and of the host until it returns, after two calls that are not counted: for `seconds`, and 3 calls at least.

    Args:
        prepare: runs before each call, outside of the measured time.
    """
    times, host = [], []
    is_gpu = device.type == "cuda"
    begin = time.perf_counter()
    for nth in range(502):
        prepare()
        if is_gpu:
            torch.cuda.synchronize(device)
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
        start = time.perf_counter()
        call()
        returned = (time.perf_counter() - start) * 1e3
        if is_gpu:
            last.record()
            torch.cuda.synchronize(device)
        if nth >= 2:
            host.append(returned)
            times.append(first.elapsed_time(last) if is_gpu else returned)
        if len(times) >= 3 and time.perf_counter() - begin > seconds:
            break
    return statistics.median(times), statistics.median(host)


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """MiB by which memory grows at most during a call; None where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory begins anew: proc(5)
        before = _resident_peak_kib()
        call()
        return max(0, _resident_peak_kib() - before) / 1024
    except (OSError, StopIteration):
        call()
        return None


def _resident_peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds, or when the call into a library that lasts until then returns."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- systems ------------------------------------------------------------------------------------------------------------------------


def measure_flexc(pattern: MaskPattern, device: torch.device, seconds: float) -> Record:
    def block_map() -> flexc.BlockMap:
        return flexc.block_map(pattern.mask, pattern.length, pattern.length, batch=pattern.batch, block=BLOCK, device=device)

    def with_walks() -> flexc.BlockMap:
        blocks = block_map()
        blocks.row_walk(), blocks.column_walk()
        return blocks

    def new_contents() -> None:
        for tensor in pattern.tensors:
            tensor.add_(0)  # another version: nothing that was found out about it holds

    new_contents()
    peak = peak_mib(with_walks, device)
    blocks = with_walks()
    ms, host_ms = medians(block_map, new_contents, device, seconds)
    again_ms, _ = medians(block_map, lambda: None, device, seconds)
    walks_ms, _ = medians(with_walks, new_contents, device, seconds)
    proof = blocks.proof
    decided = {"by_bounds": proof.bounds, "by_period": proof.mixed, "by_samples": proof.sampled}
    decided |= {"evaluated": proof.evaluated, "undecided": proof.undecided}
    times = {"ms": ms, "again_ms": again_ms, "walks_ms": walks_ms, "host_ms": host_ms}
    return {**times, "peak_mib": peak, "size_mib": blocks.size_bytes / 2**20, **blocks.counts(), **decided}


def measure_flex(pattern: MaskPattern, device: torch.device, seconds: float) -> Record:
    """torch.compile(create_block_mask), which makes both directions, and says how many blocks are partial and full."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.reset()  # past eight variants of one function, torch.compile falls back to eager
    compiled = torch.compile(create_block_mask, dynamic=False)
    batch = pattern.batch if pattern.name in mask_patterns.READS_BATCH else None

    def call() -> Any:
        return compiled(pattern.mask, batch, None, pattern.length, pattern.length, device=device, BLOCK_SIZE=BLOCK)

    with time_limit(FLEX_LIMIT_S):
        made = call()
        partial = int(made.kv_num_blocks.sum())
        full = int(made.full_kv_num_blocks.sum()) if made.full_kv_num_blocks is not None else 0
        size = sum(x.numel() * x.element_size() for x in made.as_tuple() if isinstance(x, torch.Tensor)) / 2**20
        total = made.kv_num_blocks.numel() * -(-pattern.length // BLOCK)
        del made
        peak = peak_mib(call, device)
        ms, host_ms = medians(call, lambda: None, device, seconds)
    kinds = {"empty": total - partial - full, "partial": partial, "full": full}
    return {"ms": ms, "walks_ms": ms, "host_ms": host_ms, "peak_mib": peak, "size_mib": size, **kinds}


SYSTEMS = {"flexc": measure_flexc, "flex-compiled": measure_flex}


def goals(name: str, length: int, device: torch.device) -> Record:
    """What is asked for: milliseconds, MiB of peak memory, milliseconds of the host; None where nothing is.

    At 8K the goal is for the device, whose events also see it wait for the host.
    """
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
) -> list[Record]:
    """Records, with exactly the fields FIELDS, of every system that can do the case."""
    about, records = circumstances(device, commit), []
    pattern = mask_pattern(name, length, device, batch)
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
        records.append({field: rounded.get(field) for field in FIELDS})
    return records


# --- tables -------------------------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _against(value: float | None, goal: float | None) -> str:
    return "" if goal is None or value is None else f"{goal:g} {'✓' if value <= goal else '✗'}"


def table_of(records: Sequence[Record]) -> Table:
    """One length on one device; the last record of a kind counts."""
    first = records[0]
    cells = {(r["mask"], r["system"]): r for r in records}
    has_flex = any(r["system"] == "flex-compiled" for r in records)
    versions = f"torch {first['torch']}, triton {first['triton'] or 'none'}, commit {first['commit']}; blocks of {first['block']}"
    table = Table(title=f"Block maps on {first['device']}: milliseconds and MiB", caption=versions)
    for column in (
        "mask",
        "tokens",
        "map",
        "goal",
        "again",
        "walks",
        "host",
        "goal",
        "peak MiB",
        "goal",
        "empty",
        "partial",
        "full",
        "undecided by bounds",
    ):
        table.add_column(column, justify="left" if column in ("mask", "undecided by bounds") else "right")
    for column in ("flex ms", "ratio", "flex MiB", "more partial") if has_flex else ():
        table.add_column(column, justify="right")
    for name in dict.fromkeys(r["mask"] for r in records):
        mine, flex = cells.get((name, "flexc")), cells.get((name, "flex-compiled"))
        row = [name, str((mine or flex or first)["Sq"])]
        if mine is None:
            row += [""] * 12
        else:
            row += [_number(mine["ms"]), _against(mine["ms"], mine["goal_ms"]), _number(mine["again_ms"]), _number(mine["walks_ms"])]
            row += [_number(mine["host_ms"]), _against(mine["host_ms"], mine["goal_host_ms"])]
            row += [_number(mine["peak_mib"], 1), _against(mine["peak_mib"], mine["goal_mib"])]
            row += [f"{mine[kind]:,}" for kind in ("empty", "partial", "full")]
            ways = ("by_period", "by_samples", "evaluated", "undecided")
            row.append(", ".join(f"{mine[way]:,} {way.removeprefix('by_')}" for way in ways if mine[way]))
        if has_flex:
            both = mine is not None and flex is not None
            row += [_number(flex["ms"]), f"{flex['ms'] / mine['walks_ms']:.1f}×" if both else ""] if flex else ["–", ""]
            row += [_number(flex["peak_mib"], 1) if flex else "–", f"{mine['partial'] - flex['partial']:,}" if both else ""]
        table.add_row(*row)
    return table


def show(records: Sequence[Record], console: Console | None = None) -> None:
    """A table for each device, commit and N."""
    console = console or Console(width=220)
    places: dict[tuple, list[Record]] = {}
    for record in records:
        tokens = record["Sq"] // 2 if record["mask"] == "block_diffusion" else record["Sq"]
        places.setdefault((record["device"], record["torch"], record["commit"], tokens), []).append(record)
    for group in places.values():
        console.print(table_of(group))


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
    for length in lengths or LENGTHS:
        yield from ((name, length) for name in names if lengths or name != "documents_32")
    if not lengths and "documents_32" in names:
        yield "documents_32", LONG_DOCUMENTS


def main(argv: Sequence[str] | None = None) -> list[Record]:
    parser = argparse.ArgumentParser(description="Measure how long the blocks of a mask take to find.")
    parser.add_argument(
        "--only", type=masks_named, default=list(NAMES), metavar="MASKS", help=f"names or their beginnings, of {','.join(NAMES)}"
    )
    parser.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], help=f"N, in tokens ({','.join(map(str, LENGTHS))})"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=1, help="of the masks that read the batch number (1)")
    parser.add_argument("--seconds", type=float, default=0.5, help="to repeat each measurement for (0.5)")
    parser.add_argument("--without-flex", action="store_true", help="on a GPU, do not measure create_block_mask")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append the measurements to this file as they come")
    parser.add_argument("--commit", help="recorded where the checkout cannot tell")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE.jsonl", help="measure nothing, show these measurements")
    options = parser.parse_args(argv)
    if options.compare:
        records = [json.loads(line) for path in options.compare for line in path.read_text().splitlines() if line.strip()]
        show(records)
        return records
    device = torch.device(options.device)
    systems = ["flexc"] if device.type == "cpu" or options.without_flex else list(SYSTEMS)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    records: list[Record] = []
    try:
        for name, length in cases(options.only, options.lengths):
            print(f"{name}, N = {length}", flush=True)
            found = measure(
                name, length, systems, device, options.seconds, lambda line: print(f"  {line}", flush=True), options.batch, options.commit
            )
            records += found
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in found)
    finally:
        torch.set_num_threads(threads)
    if records:
        show(records)
    return records


if __name__ == "__main__":
    main()
