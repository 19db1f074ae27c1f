"""Measurements as tables: one for each shape, dtype, device and system of ours, with the ratio to every peer."""

from __future__ import annotations

from typing import Any

from patterns import NAMES
from rich.console import Console
from rich.table import Table
from systems import SYSTEMS, Shape

Record = dict[str, Any]
WHERE = ("dtype", "B", "Hq", "Hkv", "Sq", "Skv", "D", "Dv", "device", "torch", "triton", "cutlass", "commit")


def is_ours(system: str) -> bool:
    return system.startswith("flexc-")


def ratio_table(records: list[Record], ours: str | None) -> Table:
    """TFLOP/s of `ours` and of the peers; beside each peer how many times faster ours is. The last record of a kind counts."""
    cells = {(r["pattern"], r["direction"], r["system"]): r for r in records}
    order = list(SYSTEMS)
    peers = sorted({r["system"] for r in records if not is_ours(r["system"])}, key=lambda s: (order.index(s) if s in order else 99, s))
    rank = {name: index for index, name in enumerate(NAMES)}
    rows = sorted({(r["pattern"], r["direction"]) for r in records}, key=lambda row: (row[1] != "fwd", rank.get(row[0], 99), row[0]))
    first = records[0]
    shape = Shape(*(first[field] for field in ("B", "Hq", "Hkv", "Sq", "Skv", "D", "Dv")))
    versions = f"torch {first['torch']}, triton {first['triton']}, cutlass {first['cutlass'] or 'none'}, commit {first['commit']}"
    table = Table(title=f"{shape} {first['dtype']} on {first['device']}: TFLOP/s on unmasked pairs", caption=versions)
    table.add_column("pattern")
    table.add_column("direction")
    if ours:
        table.add_column(f"{ours} ms", justify="right")
        table.add_column(ours, justify="right", style="bold")
    for peer in peers:
        table.add_column(peer, justify="right")
        if ours:
            table.add_column("ratio", justify="right")
    for name, direction in rows:
        mine = cells.get((name, direction, ours)) if ours else None
        row = [name, direction]
        if ours:
            row += [f"{mine['ms']:.3f}", f"{mine['tflops']:.1f}"] if mine else ["–", "–"]
        for peer in peers:
            other = cells.get((name, direction, peer))
            row.append(f"{other['tflops']:.1f}" if other else "–")
            if ours:
                row.append(f"{other['ms'] / mine['ms']:.2f}×" if other and mine else "–")
        table.add_row(*row)
    return table


def show(records: list[Record], console: Console | None = None) -> None:
    console = console or Console()
    places: dict[tuple, list[Record]] = {}
    for record in records:
        places.setdefault(tuple(record[field] for field in WHERE), []).append(record)
    for group in places.values():
        for ours in sorted({r["system"] for r in group if is_ours(r["system"])}) or [None]:
            console.print(ratio_table(group, ours))
