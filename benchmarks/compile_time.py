"""How long a new variant takes to its first launch: cold in a fresh process with empty caches, and again in a second process.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --patterns causal,softcap_causal --runs 5 --seconds 300

The clock runs from the plain functions to the first output (trace, passes, text, compiler, launch), and from there to the first gradients.
Before it starts: imports, waking the device, and a first empty Triton kernel, which builds Triton's own driver module once for each cache;
its time has a column of its own. All cold processes come first, one row printed after each; second processes run while time is left.
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
from pathlib import Path

import torch
from measure import circumstances, describe
from patterns import NAMES, pattern
from rich.console import Console
from rich.table import Table
from systems import Shape

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:

    @triton.jit
    def store_one(pointer):
        """The least that a kernel can do."""
        tl.store(pointer, 1.0)


PATTERNS = "causal,document,alibi_causal,softcap_causal"
COLUMNS = {
    "setup": "Triton's set-up",
    "trace": "first trace",
    "forward": "forward",
    "backward": "backward",
    "retrace": "trace + passes, warm",
}
_LONGEST = 60.0  # seconds for one process, so that one that hangs leaves time for the others
_RESULT = "compile_time: "  # begins the line that a child hands over


def child(name: str, backend: str, shape: Shape, device: torch.device) -> dict[str, float]:
    """Milliseconds of each of COLUMNS; `forward` includes `trace`."""
    import flexc
    from flexc import frontend, passes

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [(shape.Hq, shape.Sq, shape.D), (shape.Hkv, shape.Skv, shape.D), (shape.Hkv, shape.Skv, shape.Dv)]
    q, k, v = (torch.randn(shape.B, *size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
    variant = pattern(name, shape.Sq, shape.Skv, device, shape.Hq)
    small = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    (small @ small).sum().backward()
    wait(device)
    times = [time.perf_counter()]
    if triton is not None and device.type == "cuda":
        store_one[(1,)](torch.zeros(1, device=device))
        wait(device)
    times.append(time.perf_counter())
    frontend.trace(variant.score_mod, variant.mask_mod)
    times.append(time.perf_counter())
    out = flexc.attention(score_mod=variant.score_mod, mask_mod=variant.mask_mod, backend=backend)(q, k, v)
    wait(device)
    times.append(time.perf_counter())
    out.sum().backward()
    wait(device)
    times.append(time.perf_counter())
    start, ready, traced, forward, backward = times
    found = {"setup": ready - start, "trace": traced - ready, "forward": forward - ready, "backward": backward - forward}
    again = []
    for _ in range(20):
        frontend.clear_cache()
        begun = time.perf_counter()
        passes.run(frontend.trace(variant.score_mod, variant.mask_mod)[0].graph)
        again.append(time.perf_counter() - begun)
    return {column: seconds * 1e3 for column, seconds in (found | {"retrace": statistics.median(again)}).items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def in_fresh_process(name: str, options: argparse.Namespace, cache: Path, timeout: float) -> dict[str, float]:
    """What a child measures with these caches.

    Raises:
        RuntimeError: it failed; the last lines that it printed.
        TimeoutExpired: it took longer.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--backend", options.backend]
    command += ["--shape", options.shape, "--device", options.device]
    folders = {"FLEXC_CACHE_DIR": "flexc", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
    environment = {**os.environ, **{variable: str(cache / folder) for variable, folder in folders.items()}}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    results = [line.removeprefix(_RESULT) for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode != 0 or not results:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise RuntimeError(f"exit status {done.returncode}: " + " | ".join(said[-3:]))
    return json.loads(results[-1])


def measured(options: argparse.Namespace, folder: Path) -> dict[tuple[str, str], list[dict[str, float]]]:
    """(pattern, "cold" or "second process") → what each process measured. Prints each as it comes; stops starting them after the budget."""
    deadline = time.monotonic() + options.seconds
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for kind in ("cold", "second process"):
        for run in range(options.runs):
            for name in options.patterns:
                left = deadline - time.monotonic()
                if left < 1:
                    print(f"{name}, {kind}: not measured, {options.seconds:g} seconds are over", flush=True)
                    continue
                try:
                    result = in_fresh_process(name, options, folder / f"{name}-{run}", min(left + 5, _LONGEST))
                except Exception as error:
                    print(f"{name}, {kind}: {describe(error)}", flush=True)
                    continue
                found.setdefault((name, kind), []).append(result)
                print(f"{name}, {kind}: " + ", ".join(f"{COLUMNS[c]} {ms:.1f} ms" for c, ms in result.items()), flush=True)
    return found


def parent(options: argparse.Namespace) -> None:
    about = circumstances(torch.device(options.device))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = measured(options, Path(folder))
    versions = f"torch {about['torch']}, triton {about['triton']}, commit {about['commit']}; medians of {options.runs} processes"
    title = f"Milliseconds to the first launch: {options.backend}, {Shape.parse(options.shape)} on {about['device']}"
    table = Table(title=title, caption=versions)
    table.add_column("pattern")
    table.add_column("process")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    for (name, kind), results in found.items():
        table.add_row(name, kind, *(f"{statistics.median(result[c] for result in results):.1f}" for c in COLUMNS))
    Console(width=max(120, Console().width)).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Measure the time from a function to the first launch of its kernel.")
    parser.add_argument("--patterns", default=PATTERNS, type=lambda text: text.split(","), help="of " + ", ".join(NAMES))
    parser.add_argument("--backend", default="triton" if has_gpu else "cpu")
    parser.add_argument("--shape", default="2,16,16,8192,8192,128" if has_gpu else "1,2,2,512,512,64", help="B,Hq,Hkv,Sq,Skv,D[,Dv]")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--runs", type=int, default=1, help="processes for each figure")
    parser.add_argument("--seconds", type=float, default=80.0, help="no process starts after this time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = [name for name in options.patterns if name not in NAMES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(NAMES)}")
    if options.child:
        print(_RESULT + json.dumps(child(options.child, options.backend, Shape.parse(options.shape), torch.device(options.device))))
    else:
        parent(options)


if __name__ == "__main__":
    main()
