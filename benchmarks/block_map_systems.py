"""What a block map costs in flexc and in compiled create_block_mask: time of the device and of the host, memory, and what was found."""

from __future__ import annotations

import contextlib
import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mask_patterns
import torch
from mask_patterns import MaskPattern

import flexc

Record = dict[str, Any]
BLOCK = 128
FLEX_LIMIT_S = 120
CAPTURED_CALLS = 10
CALLS_IN_A_ROW = 20


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


def host_ms_in_a_row(call: Callable[[], object], prepare: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Median milliseconds until a call returns where calls follow each other and nothing waits for the device between them."""
    times = []
    begin = time.perf_counter()
    while not times or time.perf_counter() - begin < seconds:
        torch.cuda.synchronize(device)  # the queue of launches is never full
        for _ in range(CALLS_IN_A_ROW):
            prepare()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


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
        times["row_ms"] = host_ms_in_a_row(block_map, new_contents, device, seconds)
    else:
        times["walks_ms"], _ = medians(with_walks, new_contents, device, seconds)
    proof = blocks.proof
    decided = {"by_bounds": proof.bounds, "by_period": proof.mixed, "by_samples": proof.sampled}
    decided |= {"evaluated": proof.evaluated, "undecided": proof.undecided, "overflowed": blocks.overflowed}
    return {**times, "peak_mib": peak, "size_mib": blocks.size_bytes / 2**20, **blocks.counts(), **decided}


def measure_flex(pattern: MaskPattern, device: torch.device, seconds: float) -> Record:
    """torch.compile(create_block_mask), which makes both directions, and says how many blocks are partial and full."""
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.config.recompile_limit = 64  # past it, torch.compile falls back to eager; each mask and each length is a variant
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
