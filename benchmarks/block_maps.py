"""How long the blocks of a mask take to find, how much memory, and what decides them; beside compiled create_block_mask on a GPU.

    python benchmarks/block_maps.py --out results/h200-block-maps.jsonl
    python benchmarks/block_maps.py --device cpu --only causal,documents --lengths 8192
    python benchmarks/block_maps.py --compare results/h200-block-maps.jsonl             # the tables of measurements taken before

Columns of times, all medians in milliseconds. `map`: what the forward kernel walks, with captured tensors whose contents are new each time.
`walks`: the map with all that the forward and the backward kernel read, as much as create_block_mask makes. `again`: `map` with contents
unchanged. `host`: until the call of `map` returns.

On a CPU one thread works. On a GPU, `map` and `walks` are the time of the device alone: the calls are captured in a CUDA graph, several in
a row, and its replay is divided by their number, so that the device never waits for the host to launch. `stream` and `again` are the time
between two events around one call, which contains such waits; so is that of create_block_mask, whose host takes longer than its device for
short sequences. Peak memory is that of one call that is not captured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
    "system mask B Sq Skv block ms again_ms walks_ms stream_ms host_ms peak_mib size_mib empty partial full by_bounds by_period by_samples "
    "evaluated undecided overflowed goal_ms goal_mib goal_host_ms device torch triton cutlass commit date".split()
)
LENGTHS = (2**20, 131072, 32768, 8192)
BLOCK = 128
FLEX_LIMIT_S = 120
FLEX_MASKS = ("causal", "window", "documents_8", "documents_causal_window")  # each takes seconds to compile for each length
FLEX_LONGEST = 131072  # a million tokens need a terabyte
CAPTURED_CALLS = 10


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


def device_ms(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Milliseconds of the device for a call: the replay of a CUDA graph of CAPTURED_CALLS of them, divided.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CAPTURED_CALLS):
            call()
    ms, _ = medians(graph.replay, lambda: None, device, seconds)
    return ms / CAPTURED_CALLS


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
    times = {"ms": ms, "again_ms": again_ms, "host_ms": host_ms}
    if device.type == "cuda":
        times |= {"ms": device_ms(block_map, device, seconds), "walks_ms": device_ms(with_walks, device, seconds), "stream_ms": ms}
    else:
        times["walks_ms"], _ = medians(with_walks, new_contents, device, seconds)
    proof = blocks.proof
    decided = {"by_bounds": proof.bounds, "by_period": proof.mixed, "by_samples": proof.sampled}
    decided |= {"evaluated": proof.evaluated, "undecided": proof.undecided, "overflowed": blocks.overflowed}
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
    return {"ms": ms, "walks_ms": ms, "stream_ms": ms, "host_ms": host_ms, "peak_mib": peak, "size_mib": size, **kinds}


SYSTEMS = {"flexc": measure_flexc, "flex-compiled": measure_flex}


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


# --- compilation --------------------------------------------------------------------------------------------------------------------


def compile_ahead(names: Sequence[str], flex: Sequence[str], lengths: Sequence[int], device: torch.device, processes: int) -> None:
    """Fill the caches on the disk from several processes, so that measurements find what they need there."""
    jobs: list[tuple[Callable[..., None], tuple]] = [(_compile_flexc, (name, tuple(lengths), str(device))) for name in names]
    jobs += [(_compile_flex, (name, length, str(device))) for length in lengths if length <= FLEX_LONGEST for name in flex]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(function, *arguments) for function, arguments in jobs]:
            if job.exception() is not None:
                print(f"  ahead: {describe(job.exception())}", flush=True)


def _compile_flexc(name: str, lengths: Sequence[int], device: str) -> None:
    # In the order in which they are measured: numbers that change with the length become arguments at the second.
    for length in lengths:
        pattern = mask_pattern(name, length, device)
        blocks = flexc.block_map(pattern.mask, pattern.length, pattern.length, block=BLOCK, device=device)
        blocks.row_walk(), blocks.column_walk()


def _compile_flex(name: str, length: int, device: str) -> None:
    measure_flex(mask_pattern(name, length, device), torch.device(device), 0.0)


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
        "stream",
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
            row += [""] * 13
        else:
            row += [_number(mine["ms"]), _against(mine["ms"], mine["goal_ms"]), _number(mine["again_ms"]), _number(mine["walks_ms"])]
            row += [_number(mine.get("stream_ms")), _number(mine["host_ms"]), _against(mine["host_ms"], mine["goal_host_ms"])]
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
    if not lengths and "documents_32" in names:
        yield "documents_32", LONG_DOCUMENTS
    for length in lengths or LENGTHS:
        yield from ((name, length) for name in names if lengths or name != "documents_32")


def line_of(record: Record) -> str:
    """A measurement on one line."""
    figures = [
        f"{key.removesuffix('_ms')} {record[key]:.3f}" for key in ("ms", "walks_ms", "again_ms", "stream_ms", "host_ms") if record[key]
    ]
    blocks = " ".join(f"{record[kind]:,} {kind}" for kind in ("empty", "partial", "full"))
    return f"{record['mask']} {record['Sq']} {record['system']}: {', '.join(figures)} ms; {_number(record['peak_mib'], 1)} MiB; {blocks}"


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
    parser.add_argument(
        "--flex",
        type=lambda text: masks_named(text) if text else [],
        default=list(FLEX_MASKS),
        metavar="MASKS",
        help=f"on a GPU, measure create_block_mask for these, up to {FLEX_LONGEST} tokens ({','.join(FLEX_MASKS)}); each costs seconds",
    )
    parser.add_argument(
        "--processes", type=int, default=0, metavar="N", help="on a GPU, compile in N processes before anything is measured"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append the measurements to this file as they come")
    parser.add_argument("--commit", help="recorded where the checkout cannot tell")
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE.jsonl", help="measure nothing, show these measurements")
    options = parser.parse_args(argv)
    if options.compare:
        records = [json.loads(line) for path in options.compare for line in path.read_text().splitlines() if line.strip()]
        show(records)
        return records
    device = torch.device(options.device)
    flex = [] if device.type == "cpu" else options.flex
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    if device.type == "cuda" and options.processes:
        lengths = options.lengths or LENGTHS
        compile_ahead(options.only, [name for name in flex if name in options.only], lengths, device, options.processes)
    records: list[Record] = []
    try:
        for name, length in cases(options.only, options.lengths):
            systems = ["flexc", "flex-compiled"] if name in flex and length <= FLEX_LONGEST else ["flexc"]
            found = measure(
                name, length, systems, device, options.seconds, lambda line: print(f"  {line}", flush=True), options.batch, options.commit
            )
            records += found
            for record in found:
                print(line_of(record), flush=True)
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
