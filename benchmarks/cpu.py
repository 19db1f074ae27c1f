"""The CPU backend against dense attention in eager PyTorch, which is given its mask ready made.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --lengths 256,2048 --directions fwd

A ratio above one: flexc is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from attention import measure
from measure import circumstances, describe
from rich.console import Console
from rich.table import Table
from systems import Shape


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the CPU backend against eager dense attention.")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--patterns", default="causal,sliding")
    parser.add_argument("--directions", default="fwd,bwd")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)

    about = circumstances(torch.device("cpu"))
    title = f"B1 H{options.heads} D{options.head_dim} fp32 on {about['device']}, {torch.get_num_threads()} threads"
    table = Table(title=title, caption=f"torch {about['torch']}, commit {about['commit']}")
    for column in ("pattern", "direction", "length", "flexc-cpu ms", "eager ms", "ratio"):
        table.add_column(column, justify="left" if column in ("pattern", "direction") else "right")
    for name in options.patterns.split(","):
        for length in map(int, options.lengths.split(",")):
            shape = Shape(1, options.heads, options.heads, length, length, options.head_dim, options.head_dim)
            directions = options.directions.split(",")
            try:
                records = measure(shape, name, ["flexc-cpu", "eager"], directions, "fp32", options.rounds, torch.device("cpu"), print)
            except Exception as error:
                print(f"{name} {length}: {describe(error)}")
                continue
            for direction in directions:
                ms = {record["system"]: record["ms"] for record in records if record["direction"] == direction}
                ours, eager = ms.get("flexc-cpu"), ms.get("eager")
                ratio = f"{eager / ours:.2f}×" if ours and eager else "–"
                table.add_row(name, direction, str(length), *(f"{x:.2f}" if x else "–" for x in (ours, eager)), ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
