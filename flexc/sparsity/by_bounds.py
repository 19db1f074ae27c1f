"""The first stage of classification: bounds of the mask over squares of blocks, from coarse to fine."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flexc.ir.bounds import bounds
from flexc.ir.graph import Node, inputs_of, topological
from flexc.ir.interval import Interval
from flexc.sparsity.facts import Facts
from flexc.sparsity.periodic import Mixed
from flexc.sparsity.squares import Found, Squares
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor

SPLIT = 4  # a square of blocks is split into SPLIT x SPLIT smaller ones
_FIRST_SQUARES = 1024  # the coarsest level has about this many squares at most
_AT_ONCE = 2**17  # squares evaluated together: their intervals stay in a core's cache
_MOST_SQUARES = {"cpu": 2**23, "cuda": 2**26}  # of one level; past that, squares stay partial as a whole


def decide_by_bounds(levels: Levels, shape: tuple[int, int, int, int], found: Found) -> Squares:
    """Add every block that bounds decide to `found`; return the blocks that they do not.

    Only squares that stay undecided are split.
    """
    tokens = levels.tokens
    entries, (n, m) = shape[0] * shape[1], shape[2:]
    most = _MOST_SQUARES.get(tokens.device.type, _MOST_SQUARES["cpu"])
    span = SPLIT * _coarsest_span(entries, n, m)
    squares = Squares.every(entries, math.ceil(n / span), math.ceil(m / span), tokens.device)
    while span > 1 and len(squares):
        if len(squares) * SPLIT**2 > most:
            found.add(squares, span, full=False)
            found.proof.undecided += len(squares) * span * span
            return squares[:0]
        span //= SPLIT
        level = levels.of((span * tokens.block[0], span * tokens.block[1]))
        left = []
        for group in squares.groups(_AT_ONCE // SPLIT**2):
            decided = level.decide(group)
            found.add(group.below(decided.full)[0], span, full=True)
            mixed, _ = group.below(decided.mixed)
            found.add(mixed, span, full=False)
            found.proof.mixed += len(mixed) * span * span
            left.append(group.below(decided.unknown)[0])
        squares = Squares.joined(left)
    return squares


def _coarsest_span(entries: int, rows: int, columns: int) -> int:
    """Blocks along the side of the squares to begin with, a power of SPLIT."""
    span = 1
    while entries * math.ceil(rows / span) * math.ceil(columns / span) > _FIRST_SQUARES and span < max(rows, columns):
        span *= SPLIT
    return span


class Levels:
    """Bounds of one mask over squares of any size.

    Attributes:
        alone: the nodes that depend on no position, or on this one alone.
    """

    def __init__(self, tokens: TokenMask, shape: tuple[int, int, int, int]):
        self.tokens = tokens
        self.entries = shape[:2]
        self.facts = Facts(tokens.tensors, math.gcd(*tokens.block))
        self.scalars = [scalar_interval(value, tokens.device) for value in tokens.scalars]
        self.mixed = Mixed.of(tokens)
        reads = {node: inputs_of(node) for node in topological([tokens.mask])}
        self.alone = {name: [node for node, read in reads.items() if read <= {name}] for name in ("q_idx", "kv_idx")}

    def of(self, size: tuple[int, int]) -> Level:
        """For squares of so many query and key tokens."""
        return Level(self, size)

    def bounds(
        self, nodes: Sequence[Node], inputs: dict[str, Interval], known: Mapping[Node, Interval] | None = None
    ) -> dict[Node, Interval]:
        """Bounds of the nodes, from those of the positions."""
        return bounds(nodes, inputs, self.scalars, self.facts.gather, known=known)


@dataclass(frozen=True)
class Decided:
    """What bounds say of the squares below some others: bool [SPLIT, SPLIT, squares] each, and false where no token exists.

    Attributes:
        full, empty: proved.
        mixed: every block of it is partial.
        unknown: nothing is proved.
    """

    full: Tensor
    empty: Tensor
    mixed: Tensor
    unknown: Tensor


class Level:
    """Bounds over squares of one size.

    Nodes that depend on rows alone are evaluated once for each row of squares, those of columns once for each column, unless there are
    fewer squares than that.
    """

    def __init__(self, levels: Levels, size: tuple[int, int]):
        self.levels = levels
        self.size = size
        tokens = levels.tokens
        self.counts = math.ceil(tokens.q_len / size[0]), math.ceil(tokens.kv_len / size[1])

    def decide(self, parents: Squares) -> Decided:
        """What is proved of the squares below each of `parents`, which are SPLIT times as large on each side."""
        levels, mask = self.levels, self.levels.tokens.mask
        steps = torch.arange(SPLIT, device=levels.tokens.device)[:, None]
        row, column = parents.row * SPLIT + steps, parents.column * SPLIT + steps
        exists = (row < self.counts[0])[:, None] & (column < self.counts[1])
        b, h = levels.entries
        inputs = {"batch": _number(parents.entry // h, b), "head": _number(parents.entry % h, h)}
        if len(parents) * SPLIT < max(self.counts):
            known: Mapping[Node, Interval] = {}
            inputs |= {"q_idx": self._positions(0, row[:, None]), "kv_idx": self._positions(1, column[None])}
        else:
            # An index past the end counts as the last.
            known = _Gathered(self._rows, row.clamp(max=self.counts[0] - 1), self._columns, column.clamp(max=self.counts[1] - 1))
        every = ChainMap(levels.bounds([mask], inputs, known), known)  # pyright: ignore[reportArgumentType]
        truth = every[mask]
        undecided = exists & ~truth.is_true & ~truth.is_false
        mixed = undecided & levels.mixed.everywhere(mask, every)
        if levels.mixed.conditions:
            mixed = mixed & self._is_whole(row, column)
        return Decided(exists & truth.is_true, exists & truth.is_false, mixed, undecided & ~mixed)

    @cached_property
    def _rows(self) -> dict[Node, Interval]:
        return self._alone("q_idx", 0)

    @cached_property
    def _columns(self) -> dict[Node, Interval]:
        return self._alone("kv_idx", 1)

    def _alone(self, name: str, side: int) -> dict[Node, Interval]:
        """Bounds of the nodes that read this input or none, once for each row or column of squares."""
        tokens = self.levels.tokens
        positions = self._positions(side, torch.arange(self.counts[side], device=tokens.device))
        nodes = self.levels.alone[name]
        found = self.levels.bounds(nodes, {name: positions})
        return {node: found[node] for node in nodes}

    def _positions(self, side: int, number: Tensor) -> Interval:
        """The tokens of rows or columns of squares, up to the last token; what lies past the end is that one."""
        length = (self.levels.tokens.q_len, self.levels.tokens.kv_len)[side]
        first = (number * self.size[side]).clamp(max=length - 1)
        return Interval.positions(first.double(), (first + (self.size[side] - 1)).clamp(max=length - 1).double(), length)

    def _is_whole(self, row: Tensor, column: Tensor) -> Tensor:
        """Whether all tokens of a square exist."""
        tokens = self.levels.tokens
        return ((row + 1) * self.size[0] <= tokens.q_len)[:, None] & ((column + 1) * self.size[1] <= tokens.kv_len)


class _Gathered(Mapping[Node, Interval]):
    """Bounds of rows [SPLIT, 1, parents] and of columns [1, SPLIT, parents], gathered when they are asked for."""

    def __init__(self, rows: dict[Node, Interval], row: Tensor, columns: dict[Node, Interval], column: Tensor):
        self._tables = ((rows, row[:, None]), (columns, column[None]))
        self._gathered: dict[Node, Interval] = {}

    def __getitem__(self, node: Node) -> Interval:
        if node not in self._gathered:
            table, index = next(t for t in self._tables if node in t[0])
            self._gathered[node] = _at(table[node], index)
        return self._gathered[node]

    def __contains__(self, node: object) -> bool:
        return any(node in table for table, _ in self._tables)

    def __iter__(self) -> Iterator[Node]:
        return (node for table, _ in self._tables for node in table)

    def __len__(self) -> int:
        return sum(len(table) for table, _ in self._tables)


def _at(interval: Interval, index: Tensor) -> Interval:
    """The intervals of chosen rows or columns; one for all stays one."""

    def chosen(x: Tensor) -> Tensor:
        return x.index_select(0, flat).view(index.shape) if x.dim() and len(x) > 1 else x

    flat = index.flatten()
    lo = chosen(interval.lo)
    hi = lo if interval.is_point else chosen(interval.hi)
    return replace(interval, lo=lo, hi=hi, nan=chosen(interval.nan) if isinstance(interval.nan, Tensor) else interval.nan)


def _number(value: Tensor, count: int) -> Interval:
    """One known number below `count`."""
    as_float = value.double()
    return Interval.positions(as_float, as_float, count)


def scalar_interval(value: int | float | Tensor, device: torch.device) -> Interval:
    """A scalar enters the mask as int32, int64 or float32."""
    if not isinstance(value, Tensor):
        return Interval.point(torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value)
    number = value.to(device)
    if not number.is_floating_point():
        return Interval.point(number.double())
    nan = torch.isnan(number)
    lo, hi = torch.where(nan, -math.inf, number.float()), torch.where(nan, math.inf, number.float())
    return Interval(lo.double(), hi.double(), nan)
