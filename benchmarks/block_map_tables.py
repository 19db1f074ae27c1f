"""Measurements of block maps as tables, one for each device, commit and length."""

from __future__ import annotations

from collections.abc import Sequence

from block_map_systems import Record
from rich.console import Console
from rich.table import Table

_COLUMNS = "mask,tokens,map,goal,again,walks,stream,host,in a row,goal,peak MiB,goal,empty,partial,full,undecided by bounds".split(",")
_OF_FLEX = "flex ms", "ratio", "flex MiB", "more partial"


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
    for column in (*_COLUMNS, *(_OF_FLEX if has_flex else ())):
        table.add_column(column, justify="left" if column in (_COLUMNS[0], _COLUMNS[-1]) else "right")
    for name in dict.fromkeys(r["mask"] for r in records):
        mine, flex = cells.get((name, "flexc")), cells.get((name, "flex-compiled"))
        row = [name, str((mine or flex or first)["Sq"])]
        if mine is None:
            row += [""] * (len(_COLUMNS) - 2)
        else:
            row += [_number(mine["ms"]), _against(mine["ms"], mine["goal_ms"]), _number(mine["again_ms"]), _number(mine["walks_ms"])]
            row += [_number(mine.get("stream_ms")), _number(mine["host_ms"]), _number(mine.get("row_ms"))]
            row += [_against(mine["host_ms"], mine["goal_host_ms"])]
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


def line_of(record: Record) -> str:
    """A measurement on one line."""
    times = [key for key in ("ms", "walks_ms", "again_ms", "stream_ms", "host_ms", "row_ms") if record[key]]
    figures = ", ".join(f"{key.removesuffix('_ms')} {record[key]:.3f}" for key in times)
    blocks = " ".join(f"{record[kind]:,} {kind}" for kind in ("empty", "partial", "full"))
    return f"{record['mask']} {record['Sq']} {record['system']}: {figures} ms; {_number(record['peak_mib'], 1)} MiB; {blocks}"
