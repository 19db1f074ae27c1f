"""How often a training run compiles in which window, soft-cap, batch and length change at every step: flexc beside FlexAttention.

    python benchmarks/recompilations.py                              # 200 steps, forward and backward where the system has one
    python benchmarks/recompilations.py --steps 12 --systems flexc-triton,flex --device cuda

One line a system: how many compilations it made of each kind, how many steps ran dense and uncompiled, seconds in all and for the
slowest step after the tenth. FlexAttention's functions are made anew each step, as a training loop does, with its block mask.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import circumstances, describe

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
            return {kind: len(flexc.compile_log().of(kind).compiled) for kind in ("source", "binary")} | {"dense_steps": 0}

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

    return call, lambda: {"graphs": counters["stats"]["unique_graphs"], "dense_steps": dense_steps}


SYSTEMS = {"flexc-cpu": flexc_steps("cpu"), "flexc-triton": flexc_steps("triton"), "flexc-cute": flexc_steps("cute"), "flex": flex_steps}


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one system did."""
    device = torch.device(options.device)
    call, counts = SYSTEMS[name](options)
    slowest, started = 0.0, time.perf_counter()
    for step, (window, cap, batch, length) in enumerate(steps_of(options.steps, options.longest)):
        begin = time.perf_counter()
        is_trained = device.type == "cuda" or name != "flex"  # FlexAttention has no backward pass on the CPU
        q, k, v = (x.requires_grad_(is_trained) for x in inputs_of(batch, length, device))
        out = call(*functions_of(window, cap), q, k, v)
        if is_trained:
            out.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= 10:
            slowest = max(slowest, time.perf_counter() - begin)
    spent = time.perf_counter() - started
    return {"system": name, "steps": options.steps, **counts(), "s": round(spent, 1), "slowest_s": round(slowest, 3)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--systems", help=f"of {', '.join(SYSTEMS)}; default: those of the device")
    parser.add_argument("--out", type=Path, help="append a JSON line for each system")
    options = parser.parse_args(arguments)
    on_gpu = options.device.startswith("cuda")
    names = options.systems.split(",") if options.systems else ["flexc-triton", "flex"] if on_gpu else ["flexc-cpu", "flex"]
    for name in names:
        try:
            record = run(name, options)
        except Exception as error:
            print(f"{name}: {describe(error)}")
            continue
        print("  ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps({**record, **circumstances(torch.device(options.device))}) + "\n")


if __name__ == "__main__":
    main()
