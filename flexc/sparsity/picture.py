"""Pictures of block maps, as text and as image files, at any size: what is drawn are cells, each a square of blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import ToolchainError
from flexc.sparsity.runs import Runs

if TYPE_CHECKING:
    from pathlib import Path

    from flexc.sparsity.blockmap import BlockMap

Tensor = torch.Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2
_SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_COLOURS = {EMPTY: "#f3f3f3", PARTIAL: "#f2a541", FULL: "#2b6cb0"}
_NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
_PLOT_SIDE = 512


def draw(runs: Runs, entry: int, columns: int, rows: int) -> str:
    """The blocks of one entry of batch and heads: █ full, ▒ partial, · empty.

    One character a block where it fits into `rows` lines of `columns` characters; otherwise one for each square of blocks, ▒ where they
    differ.
    """
    return "\n".join("".join(_SIGNS[k] for k in line) for line in cells(runs, entry, rows, columns).tolist())


def cells(runs: Runs, entry: int, rows: int, columns: int) -> Tensor:
    """At most rows x columns cells of one entry: the kind that all blocks of a cell share, or PARTIAL; uint8."""
    n, m = runs.shape[2:]
    step = max(1, math.ceil(n / rows), math.ceil(m / columns))
    shape = (math.ceil(n / step), math.ceil(m / step))
    first, last = runs.offsets[entry * n].item(), runs.offsets[(entry + 1) * n].item()
    row = (runs.row[first:last] - entry * n) // step
    start, stop, full = runs.start[first:last].long(), runs.stop[first:last].long(), runs.full[first:last]
    size = _extent(n, step, shape[0])[:, None] * _extent(m, step, shape[1])
    visited = _covered(shape, step, row, start, stop)
    whole = _covered(shape, step, row[full], start[full], stop[full])
    kind = torch.full(shape, PARTIAL, dtype=torch.uint8)
    kind[whole == size] = FULL
    kind[visited == 0] = EMPTY
    return kind


def _extent(blocks: int, step: int, count: int) -> Tensor:
    """Blocks along each cell of one axis."""
    first = torch.arange(count) * step
    return (first + step).clamp(max=blocks) - first


def _covered(shape: tuple[int, int], step: int, row: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """How many blocks of each cell lie in the pieces [start, stop) of the rows of cells; int64, on the CPU."""
    row, start, stop = row.cpu(), start.cpu(), stop.cpu()
    # Of what lies before block e, every cell before that of e holds `step` blocks, its own `part` of them, the later ones none; written as
    # changes along the row of cells. What the start and the stop of a piece have in common cancels.
    changes = torch.zeros(shape[0] * (shape[1] + 2), dtype=torch.int64)
    for end, sign in ((start, -1), (stop, 1)):
        cell = end // step
        part = end - cell * step
        at = row * (shape[1] + 2) + cell
        changes.index_add_(0, at, sign * (part - step))
        changes.index_add_(0, at + 1, -sign * part)
    return changes.view(shape[0], -1).cumsum(1)[:, : shape[1]]


def plot(blocks: BlockMap, path: str | Path, entry: int, title: str, inset: tuple[int, int, int] | None, dense: Any) -> None:
    """Draw one entry of a map into an image file, with axes in tokens.

    Args:
        inset: (first query, first key, tokens along a side) of a part drawn by token in a second panel, or None.
        dense: (first query, first key, tokens) → bool [tokens, tokens], what the inset shows.

    Raises:
        ToolchainError: matplotlib is missing.
    """
    figure_class, patch, colours = _matplotlib()
    figure = figure_class(figsize=(5 if inset is None else 9.6, 5.4), layout="constrained")
    panels = figure.subplots(1, 1 if inset is None else 2, squeeze=False)[0]
    palette = colours([_COLOURS[k] for k in (EMPTY, PARTIAL, FULL)])
    small = cells(blocks.rows(), entry, _PLOT_SIDE, _PLOT_SIDE).numpy()
    extent = (0, blocks.kv_len, blocks.q_len, 0)
    panels[0].imshow(small, cmap=palette, vmin=0, vmax=2, interpolation="nearest", extent=extent, aspect="auto")
    panels[0].set_title(title or f"blocks of {blocks.block[0]} x {blocks.block[1]} tokens, {100 * blocks.sparsity():.1f} % empty")
    if inset is not None:
        query, key, side = inset
        allowed = dense(query, key, side)
        corners = (key, key + allowed.shape[1], query + allowed.shape[0], query)
        panels[1].imshow(allowed.cpu().numpy() * FULL, cmap=palette, vmin=0, vmax=2, interpolation="nearest", extent=corners, aspect="auto")
        panels[1].set_title("by token: allowed pairs are blue")
        panels[0].plot(*zip(*((corners[i], corners[j]) for i, j in ((0, 3), (1, 3), (1, 2), (0, 2), (0, 3)))), color="#c53030", linewidth=1)
    for axes in panels:
        axes.set_xlabel("keys (tokens)")
        axes.set_ylabel("queries (tokens)")
    handles = [patch(facecolor=_COLOURS[k], edgecolor="#999999", label=_NAMES[k]) for k in (EMPTY, PARTIAL, FULL)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def _matplotlib() -> tuple[Any, Any, Any]:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ToolchainError("plot needs matplotlib, which is missing: pip install matplotlib") from None
    return Figure, Patch, ListedColormap
