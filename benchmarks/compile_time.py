"""How long a new variant takes to its first launch: cold in a fresh process with an empty cache, and again in a second process.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --patterns causal,softcap_causal --runs 5

Every figure is the median of fresh processes. Importing torch and flexc and waking the device happen before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from measure import circumstances, describe
from patterns import NAMES, pattern
from rich.console import Console
from rich.table import Table
from systems import Shape


def child_compile(name: str, backend: str, shape: Shape, device: torch.device) -> dict[str, float]:
    """Milliseconds from the function to the first output, and from there to the first gradients."""
    import flexc

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [(shape.Hq, shape.Sq, shape.D), (shape.Hkv, shape.Skv, shape.D), (shape.Hkv, shape.Skv, shape.Dv)]
    q, k, v = (torch.randn(shape.B, *size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
    variant = pattern(name, shape.Sq, shape.Skv, device)
    small = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    (small @ small).sum().backward()
    wait(device)

    start = time.perf_counter()
    out = flexc.attention(score_mod=variant.score_mod, mask_mod=variant.mask_mod, backend=backend)(q, k, v)
    wait(device)
    forward = time.perf_counter()
    out.sum().backward()
    wait(device)
    return {"forward": (forward - start) * 1e3, "backward": (time.perf_counter() - forward) * 1e3}


def child_trace(name: str, shape: Shape, device: torch.device) -> dict[str, float]:
    """Milliseconds of tracing and passes: the first time in the process, and the median of 20 more with nothing remembered."""
    from flexc import frontend, passes

    variant = pattern(name, shape.Sq, shape.Skv, device)
    times = []
    for _ in range(21):
        frontend.clear_cache()
        start = time.perf_counter()
        trace, _ = frontend.trace(variant.score_mod, variant.mask_mod)
        passes.run(trace.graph)
        times.append((time.perf_counter() - start) * 1e3)
    return {"first": times[0], "again": statistics.median(times[1:])}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def in_fresh_process(what: str, name: str, options: argparse.Namespace, cache: str) -> dict[str, float]:
    """What a child prints on its last line."""
    command = [sys.executable, __file__, "--child", what, "--patterns", name, "--backend", options.backend]
    command += ["--shape", options.shape, "--device", options.device]
    environment = {**os.environ, "FLEXC_CACHE_DIR": f"{cache}/flexc", "TRITON_CACHE_DIR": f"{cache}/triton"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def median_of(results: Sequence[dict[str, float]], key: str) -> str:
    return f"{statistics.median(result[key] for result in results):.1f}"


def parent(options: argparse.Namespace) -> None:
    about = circumstances(torch.device(options.device))
    versions = f"torch {about['torch']}, triton {about['triton']}, commit {about['commit']}; medians of {options.runs} processes"
    shape = Shape.parse(options.shape)
    table = Table(title=f"Milliseconds to the first launch: {options.backend}, {shape} on {about['device']}", caption=versions)
    table.add_column("pattern")
    for column in ("cold forward", "cold backward", "second process forward", "backward", "first trace + passes", "again"):
        table.add_column(column, justify="right")
    for name in options.patterns.split(","):
        try:
            cold, second, traced = [], [], []
            for _ in range(options.runs):
                with tempfile.TemporaryDirectory() as cache:
                    cold.append(in_fresh_process("compile", name, options, cache))
                    second.append(in_fresh_process("compile", name, options, cache))
                    traced.append(in_fresh_process("trace", name, options, cache))
            row = [median_of(results, key) for results in (cold, second) for key in ("forward", "backward")]
            table.add_row(name, *row, median_of(traced, "first"), median_of(traced, "again"))
        except Exception as error:
            print(f"{name}: {describe(error)}", flush=True)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the time from a function to the first launch of its kernel.")
    parser.add_argument("--patterns", default=",".join(NAMES))
    parser.add_argument("--backend", default="triton" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="2,16,16,8192,8192,128" if torch.cuda.is_available() else "1,2,2,512,512,64")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", choices=["compile", "trace"], help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    shape, device = Shape.parse(options.shape), torch.device(options.device)
    if options.child == "compile":
        print(json.dumps(child_compile(options.patterns, options.backend, shape, device)))
    elif options.child == "trace":
        print(json.dumps(child_trace(options.patterns, shape, device)))
    else:
        parent(options)


if __name__ == "__main__":
    main()
