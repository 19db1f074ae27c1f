"""How often a training run compiles in which window, soft-cap, batch and length change at every step: flexc beside FlexAttention.

    python benchmarks/recompilations.py                              # 200 steps, forward and backward where the system has one
    python benchmarks/recompilations.py --steps 12 --systems flexc-triton,flex --device cuda

One line a system: steps that failed, compilations, and at most of one kind (a module of forward or of backward kernels, one kernel's
machine code), steps that ran dense and uncompiled, seconds in all and of the slowest step after the tenth. Functions are made anew at each
step, as in a training loop, and for FlexAttention its block mask.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import append, circumstances, describe

HEADS, DIM = 4, 64


def steps_of(count: int, longest: int) -> Iterator[tuple[int, float, int, int]]:
    """(window, soft-cap, batch, length) of each step."""
    for step in range(count):
        yield 16 + 7 * step % 97, 5.0 + step % 23, 1 + step % 3, 64 + 37 * step % (longest - 63)


def functions_of(window: int, cap: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The variant of a step, as both systems take it."""

    def capped(score, batch, head, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    def near(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return capped, near


def inputs_of(batch: int, length: int, device: torch.device) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(batch, HEADS, length, DIM, device=device, dtype=dtype) for _ in range(3)]


def flexc_steps(backend: str) -> Callable[[argparse.Namespace], tuple[Callable[..., torch.Tensor], Callable[[], dict[str, int]]]]:
    def prepare(options: argparse.Namespace) -> tuple[Callable[..., torch.Tensor], Callable[[], dict[str, int]]]:
        import flexc

        flexc.compile_log(reset=True)

        def counts() -> dict[str, int]:
            log = flexc.compile_log().compiled
            kinds = Counter((entry.kind, entry.variant, entry.reason.startswith("the backward pass")) for entry in log)
            return {"compilations": len(log), "most_of_a_kind": max(kinds.values(), default=0), "dense_steps": 0}

        return lambda score, mask, q, k, v: flexc.attention(score, mask, backend=backend)(q, k, v), counts

    return prepare


def flex_steps(options: argparse.Namespace) -> tuple[Callable[..., torch.Tensor], Callable[[], dict[str, int]]]:
    import torch._higher_order_ops.flex_attention
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dense: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # the package's attribute of this name is a function
    torch._dynamo.reset()
    counters.clear()
    compiled, mathematics, dense_steps = torch.compile(flex_attention), dense.math_attention, 0

    def counted(query: torch.Tensor, *rest: Any) -> Any:
        nonlocal dense_steps
        dense_steps += type(query) is torch.Tensor  # not while a graph is made
        return mathematics(query, *rest)

    dense.math_attention = counted  # what runs where Dynamo gave up: all pairs of queries and keys, in memory

    def call(score: Any, mask: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        blocks = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device)
        return compiled(q, k, v, score, blocks)

    def counts() -> dict[str, int]:
        graphs = counters["stats"]["unique_graphs"]  # Dynamo compiles one function: all are of a kind
        return {"compilations": graphs, "most_of_a_kind": graphs, "dense_steps": dense_steps}

    return call, counts


SYSTEMS = {"flexc-cpu": flexc_steps("cpu"), "flexc-triton": flexc_steps("triton"), "flexc-cute": flexc_steps("cute"), "flex": flex_steps}


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one system did."""
    device = torch.device(options.device)
    call, counts = SYSTEMS[name](options)
    slowest, made, failures, started = 0.0, 0, [], time.perf_counter()
    for step, (window, cap, batch, length) in enumerate(steps_of(options.steps, options.longest)):
        begin = time.perf_counter()
        is_trained = device.type == "cuda" or name != "flex"  # FlexAttention has no backward pass on the CPU
        q, k, v = (x.requires_grad_(is_trained) for x in inputs_of(batch, length, device))
        try:
            out = call(*functions_of(window, options.cap or cap), q, k, v)
            if is_trained:
                out.sum().backward()
        except Exception as error:
            failures.append(f"step {step}: {describe(error)}")
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= 10:
            slowest = max(slowest, time.perf_counter() - begin)
        made = step + 1
        if time.perf_counter() - started > options.seconds:
            break
    spent = time.perf_counter() - started
    if failures:
        print(f"{name} failed at {len(failures)} of {made} steps; {failures[0]}")
    counted = {"steps": made, "failed": len(failures), "cap": options.cap or "changes"}
    return {"system": name, **counted, **counts(), "s": round(spent, 1), "slowest_s": round(slowest, 3)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="fewer steps where they take longer")
    parser.add_argument("--cap", type=float, help="the same soft-cap at every step")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--systems", help=f"of {', '.join(SYSTEMS)}; default: those of the device")
    parser.add_argument("--out", type=Path, help="append a JSON line for each system")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    names = options.systems.split(",") if options.systems else ["flexc-triton", "flexc-cute", "flex"] if on_gpu else ["flexc-cpu", "flex"]
    for name in names:
        try:
            record = run(name, options)
        except Exception as error:
            print(f"{name}: {describe(error)}")
            continue
        print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        if options.out:
            append([{**record, **circumstances(torch.device(options.device))}], options.out)


if __name__ == "__main__":
    main()
