"""What classification found: a kind for each block, runs of blocks for the kernels' loops, figures and pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import InputError, ShapeError, ToolchainError
from flexc.sparsity.tokens import TokenMask

if TYPE_CHECKING:
    from pathlib import Path

Tensor = torch.Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2

_PICTURE_COLUMNS, _PICTURE_ROWS = 96, 48
_SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
_PLOT_SIDE = 512
_DENSE_LIMIT = 2**28


@dataclass(frozen=True)
class Runs:
    """For each block row, the runs of neighbouring blocks to visit. All tensors are contiguous, on the map's device.

    Attributes:
        partial: int32 [B or 1, Hq or 1, n, Rp, 2]: first block and one past the last of each run whose pairs need the mask, in order;
            unused runs are (0, 0). Rp >= 1.
        full: int32 [B or 1, Hq or 1, n, Rf, 2]: the same for runs that need no mask. Rf >= 1. A ragged last block of *keys* is never in
            here, neither in rows() nor in columns(); a ragged last block of queries may be.
        order: int32 [n]: block rows by work, longest first; equal ones keep their order.
    """

    partial: Tensor
    full: Tensor
    order: Tensor


@dataclass(frozen=True)
class Walk:
    """What one kernel's loops visit in each block row: runs of full blocks, then a list of partial ones. Contiguous, on the map's device.

    Full blocks come in few long runs, partial ones singly: a loop over a list of them starts up once, a loop over runs as often as it
    has runs.

    Attributes:
        full: int32 [B or 1, Hq or 1, n, R, 2]: first block and one past the last of each run, in order; unused runs are (0, 0). R >= 1.
        partial: int32 [B or 1, Hq or 1, n, P]: partial blocks in order, then unspecified. P >= 1.
        partial_count: int32 [B or 1, Hq or 1, n].
        order: int32 [n]: block rows by work, longest first; equal ones keep their order.
    """

    full: Tensor
    partial: Tensor
    partial_count: Tensor
    order: Tensor


@dataclass(eq=False, repr=False)
class BlockMap:
    """Which blocks of a mask are empty, partial or full. Made by `classify`.

    Attributes:
        kind: uint8 [B or 1, Hq or 1, ceil(q_len / Bq), ceil(kv_len / Bkv)]: EMPTY, PARTIAL or FULL. Keys past the end count as masked, so
            a ragged last column is never full; query rows past the end count neither way.
        q_len, kv_len: tokens.
        block: tokens per block, (Bq, Bkv).
        batch, heads: what the map covers, also where `kind` has one entry for all.
        tokens: the mask itself for views by token, None where everything is allowed. It refers to the captured tensors: views show
            their present values, `kind` those of the time of classification.
        proved: blocks that bounds decided.
        sampled: blocks proved partial by one allowed and one forbidden pair.
        evaluated: blocks evaluated on all their pairs. What is in none of the three was left partial, undecided.
    """

    kind: Tensor
    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int
    tokens: TokenMask | None = None
    proved: int = 0
    sampled: int = 0
    evaluated: int = 0
    _runs: dict[str, Runs] = field(default_factory=dict)
    _walks: dict[str, Walk] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the map is."""
        return self.kind.device

    @property
    def undecided(self) -> int:
        """Blocks that are partial only because nothing was proved about them."""
        return self.kind.numel() - self.proved - self.sampled - self.evaluated

    def rows(self) -> Runs:
        """For each query block the runs of key blocks."""
        if "rows" not in self._runs:
            self._runs["rows"] = runs_of(self.kind)
        return self._runs["rows"]

    def columns(self) -> Runs:
        """For each key block the runs of query blocks."""
        if "columns" not in self._runs:
            self._runs["columns"] = runs_of(self.kind.transpose(-1, -2).contiguous())
        return self._runs["columns"]

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit."""
        if "row_walk" not in self._walks:
            self._walks["row_walk"] = walk_of(self.kind.contiguous())
        return self._walks["row_walk"]

    def column_walk(self) -> Walk:
        """For each key block the query blocks to visit."""
        if "column_walk" not in self._walks:
            self._walks["column_walk"] = walk_of(self.kind.transpose(-1, -2).contiguous())
        return self._walks["column_walk"]

    # --- figures ---

    def counts(self) -> dict[str, int]:
        """How many blocks of `kind` are empty, partial and full."""
        found = torch.bincount(self.kind.flatten(), minlength=3).tolist()
        return {"empty": found[EMPTY], "partial": found[PARTIAL], "full": found[FULL]}

    def sparsity(self) -> float:
        """Share of blocks that are empty: what is skipped."""
        return self.counts()["empty"] / max(self.kind.numel(), 1)

    def unmasked_pairs(self) -> int:
        """How many (batch, head, query, key) are allowed, over all batch elements and heads. Partial blocks are evaluated for it."""
        full = self.kind == FULL
        rows = torch.full((self.kind.shape[2],), self.block[0], dtype=torch.int64, device=self.device)
        if len(rows):
            rows[-1] = self.q_len - (len(rows) - 1) * self.block[0]
        total = int((full.sum(-1) * rows).sum()) * self.block[1]  # a full block has all its columns
        partial = (self.kind.flatten() == PARTIAL).nonzero().squeeze(1)
        step = self.tokens.tiles_per_chunk(math.prod(self.block)) if self.tokens is not None else 2**16
        for found in partial.split(step):
            total += self._allowed_in(torch.unravel_index(found, self.kind.shape))
        entries = self.kind.shape[0] * self.kind.shape[1]
        return total * (self.batch * self.heads // max(entries, 1))

    def unmasked_share(self) -> float:
        """Allowed pairs as a share of all pairs."""
        pairs = self.batch * self.heads * self.q_len * self.kv_len
        return self.unmasked_pairs() / pairs if pairs else 0.0

    def visited_share(self) -> float:
        """Pairs in blocks that are not empty, as a share of all: what a kernel computes."""
        return 1.0 - self.sparsity()

    def row_work(self) -> Tensor:
        """Blocks that each query block visits, summed over batch and heads: int64 [ceil(q_len / Bq)]."""
        return row_work(self.kind)

    def _allowed_in(self, tiles: Any) -> int:
        rows = (self.q_len - tiles[2] * self.block[0]).clamp(max=self.block[0])
        columns = (self.kv_len - tiles[3] * self.block[1]).clamp(max=self.block[1])
        if self.tokens is None:
            return int((rows * columns).sum())
        exists = torch.arange(self.block[0], device=self.device)[:, None] < rows[:, None, None]
        exists = exists & (torch.arange(self.block[1], device=self.device) < columns[:, None, None])
        return int((self.tokens.of_tiles(tiles) & exists).sum())

    # --- views ---

    def to_dense(self) -> Tensor:
        """The mask by token: bool [B or 1, Hq or 1, q_len, kv_len], where true is allowed. For looking at and for tests.

        Raises:
            ShapeError: more than 2^28 entries.
        """
        shape = (*self.kind.shape[:2], self.q_len, self.kv_len)
        if math.prod(shape) > _DENSE_LIMIT:
            raise ShapeError(f"a dense mask of shape {list(shape)} has {math.prod(shape):,} entries: expected at most {_DENSE_LIMIT:,}")
        dense = torch.ones(shape, dtype=torch.bool, device=self.device)
        if self.tokens is not None and dense.numel():
            for b in range(shape[0]):
                for h in range(shape[1]):
                    for first, slab in self.tokens.dense(b, h):
                        dense[b, h, first : first + len(slab)] = slab
        return dense

    def picture(self, batch: int = 0, head: int = 0, columns: int = _PICTURE_COLUMNS, rows: int = _PICTURE_ROWS) -> str:
        """The blocks of one batch element and head as text: █ full, ▒ partial, · empty.

        One character a block where it fits into `rows` lines of `columns` characters; otherwise one for each square of blocks, ▒ where
        they differ.
        """
        small = _scaled_down(self._entry(batch, head), rows, columns).cpu()
        return "\n".join("".join(_SIGNS[k] for k in line) for line in small.tolist())

    def summary(self) -> str:
        """Sizes, counts and how they were found, on two lines."""
        counts, total = self.counts(), max(self.kind.numel(), 1)
        shares = ", ".join(f"{name} {n:,} ({100 * n / total:.1f} %)" for name, n in counts.items())
        found = f"{self.proved:,} by bounds, {self.sampled:,} by samples, {self.evaluated:,} by evaluation, {self.undecided:,} undecided"
        b, h, rows, columns = self.kind.shape
        size = f"{self.q_len} queries x {self.kv_len} keys in blocks of {self.block[0]} x {self.block[1]}: {rows} x {columns} blocks"
        return f"{size}, {b} x {h} of batch x heads\n{shares}; decided: {found}"

    def __repr__(self) -> str:
        return f"<BlockMap {self.summary()}>"

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.picture()}" if self.kind.numel() else self.summary()

    def plot(self, path: str | Path, batch: int = 0, head: int = 0, title: str = "") -> None:
        """Draw the blocks of one batch element and head into an image file; axes are in tokens.

        Raises:
            ToolchainError: matplotlib is missing.
        """
        figure_class, patch, colours = _matplotlib()
        small = _scaled_down(self._entry(batch, head), _PLOT_SIDE, _PLOT_SIDE).cpu().numpy()
        figure = figure_class(figsize=(5, 5.4), layout="constrained")
        axes = figure.subplots()
        palette = {EMPTY: "#f3f3f3", PARTIAL: "#f2a541", FULL: "#2b6cb0"}
        extent = (0, self.kv_len, self.q_len, 0)
        axes.imshow(small, cmap=colours(list(palette.values())), vmin=0, vmax=2, interpolation="nearest", extent=extent, aspect="auto")
        axes.set_xlabel("keys (tokens)")
        axes.set_ylabel("queries (tokens)")
        axes.set_title(title or f"blocks of {self.block[0]} x {self.block[1]} tokens, {100 * self.sparsity():.1f} % empty")
        handles = [
            patch(facecolor=palette[k], edgecolor="#999999", label=name)
            for name, k in (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=150)

    def _entry(self, batch: int, head: int) -> Tensor:
        if not (0 <= batch < self.batch and 0 <= head < self.heads):
            raise InputError(f"expected batch < {self.batch} and head < {self.heads}, got {batch} and {head}")
        return self.kind[batch if self.kind.shape[0] > 1 else 0, head if self.kind.shape[1] > 1 else 0]


def row_work(kind: Tensor) -> Tensor:
    """Blocks that are not empty in each block row, summed over batch and heads: int64 [n]."""
    return (kind != EMPTY).sum(dim=(0, 1, 3))


def runs_of(kind: Tensor) -> Runs:
    """The runs of partial and of full blocks in each row of `kind`, and the rows by work, longest first."""
    b, h, rows, columns = kind.shape
    changes = torch.ones(kind.shape, dtype=torch.bool, device=kind.device)
    torch.ne(kind[..., 1:], kind[..., :-1], out=changes[..., 1:])
    # Every row begins a segment, so one ends where the next begins. From here on the cost is that of the segments, not of the blocks.
    start = changes.flatten().nonzero().squeeze(1)
    end = torch.cat([start[1:], start.new_full((1,), kind.numel())]) if len(start) else start
    row = start // max(columns, 1)
    what = kind.flatten()[start]
    work = torch.zeros(b * h * rows, dtype=torch.int64, device=kind.device)
    work.index_add_(0, row, (end - start) * (what != EMPTY))
    ends = torch.stack([start - row * columns, end - row * columns], dim=-1).to(torch.int32)
    partial, full = (_table(row[what == k], ends[what == k], (b, h, rows)) for k in (PARTIAL, FULL))
    order = torch.argsort(work.view(b * h, rows).sum(0), descending=True, stable=True)
    return Runs(partial, full, order.to(torch.int32))


def walk_of(kind: Tensor) -> Walk:
    """The walk over each row of `kind`."""
    b, h, rows, columns = kind.shape
    runs = runs_of(kind)
    is_partial = kind == PARTIAL
    count = is_partial.sum(-1, dtype=torch.int32)
    width = max(int(count.max()), 1) if count.numel() else 1
    found = is_partial.flatten().nonzero().squeeze(1)
    row = found // max(columns, 1)
    partial = torch.zeros((b * h * rows, width), dtype=torch.int32, device=kind.device)
    first = count.flatten().cumsum(0) - count.flatten()
    partial[row, torch.arange(len(found), device=kind.device) - first[row]] = (found - row * columns).to(torch.int32)
    return Walk(runs.full, partial.view(b, h, rows, width), count, runs.order)


def _table(row: Tensor, ends: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Runs, sorted by row (ends [runs, 2]), as int32 [*shape, R, 2] with R of the row that has most of them, at least 1."""
    counts = torch.bincount(row, minlength=math.prod(shape))
    most = max(int(counts.max()), 1) if counts.numel() else 1
    runs = torch.zeros((counts.numel(), most, 2), dtype=torch.int32, device=row.device)
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    runs[row, rank] = ends
    return runs.view(*shape, most, 2)


def _scaled_down(kind: Tensor, rows: int, columns: int) -> Tensor:
    """At most rows × columns cells: the kind that all blocks of a cell share, or PARTIAL."""
    step = max(1, math.ceil(kind.shape[0] / rows), math.ceil(kind.shape[1] / columns))
    if step == 1 or not kind.numel():
        return kind
    # ceil_mode: the last cell holds what is left; max_pool2d ignores what lies outside.
    values = kind.float()[None]
    lo = -torch.nn.functional.max_pool2d(-values, step, ceil_mode=True)[0]
    hi = torch.nn.functional.max_pool2d(values, step, ceil_mode=True)[0]
    return torch.where(lo == hi, lo, float(PARTIAL)).to(torch.uint8)


def _matplotlib() -> tuple[Any, Any, Any]:
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ToolchainError("plot needs matplotlib, which is missing: pip install matplotlib") from None
    return Figure, Patch, ListedColormap
