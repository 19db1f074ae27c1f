"""Medians of interleaved measurements, and what each one is written down with."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from systems import Shape

FIELDS = tuple("system pattern dtype B Hq Hkv Sq Skv D Dv direction ms tflops device torch triton cutlass commit date".split())


def times_ms(call: Callable[[], object], count: int, flush: torch.Tensor | None) -> list[float]:
    """Milliseconds of `count` calls after one that is not counted: CUDA events with a flushed L2 cache, or the wall clock on a CPU."""
    call()
    if flush is None:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def order(count: int, index: int) -> list[int]:
    """The order of round `index`. Over `count` rounds, or twice as many of an odd count, each follows each other equally often.

    A balanced Latin square: E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.
    """
    first = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    found = [(step + index) % count for step in first]
    return found[::-1] if count % 2 and index // count % 2 else found


def interleaved(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    report: Callable[[str], None],
    turn_ms: float = 20.0,
) -> dict[str, float]:
    """Median milliseconds of each call.

    Every round gives each system one turn of about `turn_ms`, in another order (`order`): a card whose power is the limit lets a call run
    faster after one that takes less of it. A call that raises is reported and left out.
    """
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {}

    def turn(name: str, count: int) -> list[float]:
        try:
            return times_ms(calls[name], count, flush)
        except Exception as error:
            report(f"{name}: {describe(error)}")
            counts.pop(name, None)
            times.pop(name, None)
            return []

    for name in calls:
        first = turn(name, 3)
        if first:
            counts[name] = max(1, min(50, round(turn_ms / max(statistics.median(first), 1e-3))))
            times[name] = []
    for index in range(rounds):
        names = list(counts)
        for place in order(len(names), index):
            name = names[place]
            measured = turn(name, counts[name])
            if name in times:
                times[name] += measured
    return {name: statistics.median(values) for name, values in times.items() if values}


def append(records: Sequence[dict], file: Path | None) -> None:
    """Write the records to the end of the file, a line each; None: nowhere."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def describe(error: BaseException) -> str:
    """One line of at most 300 characters."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def flops(shape: Shape, pairs: int, direction: str) -> int:
    """Floating-point operations on unmasked pairs: two products forward (QKᵀ, PV), five backward (QKᵀ, dOVᵀ, PᵀdO, dSK, dSᵀQ)."""
    widths = shape.D + shape.Dv if direction == "fwd" else 3 * shape.D + 2 * shape.Dv
    return 2 * shape.B * shape.Hq * pairs * widths


def version(*packages: str) -> str:
    """Version of the first of the packages that is installed, or ""."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def commit() -> str:
    """Abbreviated commit of this checkout, "-dirty" where files differ from it, or "unknown"."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def circumstances(device: torch.device, commit_name: str | None = None) -> dict[str, str]:
    """The last fields of every record."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "triton": version("triton"),
        "cutlass": version("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"),
        "commit": commit_name or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
