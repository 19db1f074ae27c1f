"""How long a fresh process takes to its first result: importing flexc, then the first call, with an empty and with a warm disk cache.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --runs 9 --device cuda --backend triton --out results/cold.jsonl

Every run is two processes with one cache folder between them, and on a GPU a third one, whose cache another process filled by
`kernel.warmup`, and which may compile nothing (FLEXC_NO_COMPILE=1). Importing torch comes first and is not
counted. A first call without flexc, the same attention written out in PyTorch, comes before flexc's, so that what PyTorch sets up at its
first products is not counted either. Medians are printed; `--out` appends one JSON line for each process.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from measure import append, circumstances

HEAVY = ("sympy", "jinja2", "triton", "cutlass", "typer", "rich")  # packages that a warm process on the CPU does without
COLUMNS = ("import_torch", "import_flexc", "first_call", "first_result", "second_call")


def child(device: str, backend: str, warms_up: bool = False) -> dict[str, object]:
    """Seconds of each of COLUMNS, and which heavy packages were loaded. torch is there already: its import is timed by the parent.

    Args:
        warms_up: only compile ahead, from a spec.
    """
    place = torch.device(device)
    before = set(sys.modules)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    q, k, v = torch.randn(3, 1, 4, 256, 64, device=place, dtype=dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=place)
    (torch.softmax(q @ k.mT * 0.125, -1) @ v).sum().item()
    start = time.perf_counter()
    import flexc

    imported = time.perf_counter()

    def alibi(score, batch, head, q_idx, kv_idx):
        return score - slopes[head] * (q_idx - kv_idx)

    kernel = flexc.attention(alibi, flexc.masks.causal, backend=backend)
    if warms_up:
        kernel.warmup({"heads": 4, "q_len": 256, "head_dim": 64, "device": device, "backward": False})
        return {"warm_up": time.perf_counter() - imported}
    kernel(q, k, v).sum().item()
    first = time.perf_counter()
    kernel(q, k, v).sum().item()
    second = time.perf_counter()
    loaded = [name for name in HEAVY if name in sys.modules and name not in before]
    times = {"import_flexc": imported - start, "first_call": first - imported, "first_result": first - start, "second_call": second - first}
    return {**times, "compiled": len(flexc.compile_log().compiled), "heavy": loaded}


@cache
def compile_bytecode() -> None:
    """As an installer leaves packages: else each process would compile flexc's Python, 0.15 s, wherever bytecode is not written."""
    for package in ("flexc", "triton"):
        found = importlib.util.find_spec(package)
        for folder in [] if found is None else found.submodule_search_locations or ():
            compileall.compile_dir(folder, quiet=2)


def in_a_process(device: str, backend: str, folder: Path, warms_up: bool = False, no_compile: bool = False) -> dict[str, object]:
    """What a child measures with the caches in a folder."""
    compile_bytecode()
    program = (
        "import time; start = time.perf_counter(); import torch; seconds = time.perf_counter() - start\n"
        f"import json, sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r}); import cold_start\n"
        f"print('cold_start: ' + json.dumps({{'import_torch': seconds, **cold_start.child({device!r}, {backend!r}, {warms_up})}}))"
    )
    environment = {**os.environ, "FLEXC_CACHE_DIR": str(folder / "flexc"), "TRITON_CACHE_DIR": str(folder / "triton")}
    environment |= {"FLEXC_NO_COMPILE": "1"} if no_compile else {}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-500:])
    return json.loads(done.stdout.split("cold_start: ")[-1])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, help="append a JSON line for each process")
    options = parser.parse_args(arguments)
    found: dict[str, list[dict[str, object]]] = {"empty cache": [], "warm cache": []}
    warms_up = options.device.startswith("cuda")
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty cache", "warm cache"):
                found[cache].append(in_a_process(options.device, options.backend, Path(folder)))
        if warms_up:
            with tempfile.TemporaryDirectory() as folder:
                spent = in_a_process(options.device, options.backend, Path(folder), warms_up=True)
                run = in_a_process(options.device, options.backend, Path(folder), no_compile=True)
                found.setdefault("after warm-up", []).append({**run, **spent})
    print(f"{'':14}" + "".join(f"{column:>15}" for column in COLUMNS) + "   compiled  heavy packages loaded")
    for cache, runs in found.items():
        medians = [statistics.median(float(str(run[column])) for run in runs) for column in COLUMNS]
        heavy = ", ".join(runs[-1]["heavy"]) or "none"  # type: ignore[arg-type]
        print(f"{cache:14}" + "".join(f"{seconds * 1e3:12.1f} ms" for seconds in medians) + f"   {runs[-1]['compiled']:>8}  {heavy}")
    if options.out:
        facts = circumstances(torch.device(options.device))
        append([{"cache": cache, **run, **facts} for cache, runs in found.items() for run in runs], options.out)


if __name__ == "__main__":
    main()
