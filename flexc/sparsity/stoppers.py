"""What stops the proof that a tile is empty or full: the smallest sub-expression that bounds cannot follow.

It is found from the mask downward. Over a tile, the bounds of a node are loose if they hold more than the values that the node takes there.
From a loose node the way leads to an operand that is loose itself and whose true range would make the node tight. A loose node without such
an operand is where the proof stops: a read or an op that bounds cannot follow, or operands that move together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flexc.ir.bounds import bounds
from flexc.ir.graph import BOOL, FLOAT32, Node, topological
from flexc.ir.interval import Interval
from flexc.ir.text import format_node
from flexc.sparsity.advice import advice_for
from flexc.sparsity.by_bounds import scalar_interval
from flexc.sparsity.facts import Facts
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor
Tiles = Sequence[Tensor]  # batch, head, block row and block column, int64 each

_MOST_TRACED = 256  # tiles whose proofs are traced to what stopped them
_ROUNDING = 2.0**-12  # bounds of floats are this much wider than their values, relatively, by design


@dataclass(frozen=True)
class Stopper:
    """A sub-expression that stops proofs.

    Attributes:
        expression: as text.
        where: the user's line, None where it is unknown.
        tiles: compared tiles whose proof it stops.
        example: (batch, head, block row, block column) of one of them.
        why: what bounds cannot see, and what to write instead.
    """

    expression: str
    where: str | None
    tiles: int
    example: tuple[int, int, int, int]
    why: str

    def __str__(self) -> str:
        place = "" if self.where is None else f"\n    at {self.where}"
        return f"{self.tiles:,} tile{'' if self.tiles == 1 else 's'} stopped by `{self.expression}`{place}\n    {self.why}"


def chunks_of(tokens: TokenMask, tiles: Tiles) -> Iterator[Tiles]:
    """Groups of tiles whose tokens fit into memory together."""
    at_once = tokens.tiles_per_chunk(math.prod(tokens.block))
    return zip(*(t.split(at_once) for t in tiles)) if len(tiles[0]) else iter(())


def stopped(tokens: TokenMask, uniform: Tiles) -> tuple[int, tuple[Stopper, ...]]:
    """Of tiles that are empty or full on tokens: how many bounds do not decide, and what stopped the proofs of those."""
    prover = _Prover(tokens)
    truth = prover.bounds_of(uniform)[tokens.mask]
    tiles = torch.stack(tuple(uniform))[:, ~(truth.is_true | truth.is_false).expand(uniform[0].shape)]
    count = tiles.shape[1]
    traced = min(count, _MOST_TRACED)
    if not traced:
        return 0, ()
    return count, _grouped(prover, tuple(tiles[:, torch.arange(traced, device=tiles.device) * count // traced]), count)


def _grouped(prover: _Prover, tiles: Tiles, count: int) -> tuple[Stopper, ...]:
    """What stopped the proofs of the tiles, which stand for `count`."""
    found: dict[Node, list[int]] = {}
    for nth, node in enumerate(prover.stoppers(tiles)):
        found.setdefault(node, []).append(nth)
    traced = len(tiles[0])
    rows = torch.stack(tuple(tiles), dim=1).tolist()
    return tuple(
        Stopper(
            prover.text(node), prover.line(node), round(len(which) * count / traced), tuple(rows[which[0]]), advice_for(node, prover.tokens)
        )
        for node, which in sorted(found.items(), key=lambda item: -len(item[1]))
    )


class _Prover:
    """Bounds of a mask over chosen tiles, beside the values that its nodes take there."""

    def __init__(self, tokens: TokenMask):
        self.tokens = tokens
        self.scalars = [scalar_interval(value, tokens.device) for value in tokens.scalars]
        self.facts = Facts(tokens.tensors, math.gcd(*tokens.block))

    def bounds_of(self, tiles: Tiles, roots: tuple[Node, ...] = (), known: Mapping[Node, Interval] | None = None) -> dict[Node, Interval]:
        """Bounds of every node below the mask, or below the roots, for each tile."""
        batch, head, row, column = tiles
        sizes = zip(("q_idx", "kv_idx"), (row, column), self.tokens.block, (self.tokens.q_len, self.tokens.kv_len))
        inputs = {"batch": Interval.point(batch.double()), "head": Interval.point(head.double())}
        for name, index, side, length in sizes:
            first = (index * side).double()
            inputs[name] = Interval.positions(first, (first + (side - 1)).clamp(max=length - 1), length)
        return bounds(roots or (self.tokens.mask,), inputs, self.scalars, self.facts.gather, known=known)

    def stoppers(self, tiles: Tiles) -> list[Node]:
        """What stopped the proof of each tile."""
        nodes = topological([self.tokens.mask])
        found = self.bounds_of(tiles)
        true = self._ranges_of(nodes, tiles)
        loose = {node: ~_is_tight(found[node], true[node], len(tiles[0])) for node in nodes}
        following: dict[Node, list[Node]] = {}  # for each tile, an operand on the way, or the node itself
        at = [self.tokens.mask] * len(tiles[0])
        for node in reversed(nodes):
            here = [nth for nth, current in enumerate(at) if current is node]
            if not here:
                continue
            if node not in following:
                following[node] = self._followed(node, tiles, found, true, loose)
            for nth in here:
                at[nth] = following[node][nth]
        return at

    def _followed(
        self,
        node: Node,
        tiles: Tiles,
        found: Mapping[Node, Interval],
        true: Mapping[Node, Interval],
        loose: Mapping[Node, Tensor],
    ) -> list[Node]:
        """For each tile the operand whose looseness makes the node loose, or the node."""
        others = {other: bound for other, bound in found.items() if other is not node}
        operands = list(dict.fromkeys(node.args))

        def is_settled(replaced: list[Node]) -> list[bool]:
            known = {**others, **{operand: true[operand] for operand in replaced}}
            return _is_tight(self.bounds_of(tiles, (node,), known)[node], true[node], len(tiles[0])).tolist()

        alone = [is_settled([operand]) for operand in operands]
        together = is_settled(operands)
        wide = [loose[operand].tolist() for operand in operands]
        result = []
        for nth in range(len(tiles[0])):
            blamed = [o for o, a, w in zip(operands, alone, wide) if w[nth] and a[nth]]
            if not blamed and together[nth]:
                blamed = [o for o, w in zip(operands, wide) if w[nth]]
            result.append(blamed[0] if blamed else node)
        return result

    def _ranges_of(self, nodes: list[Node], tiles: Tiles) -> dict[Node, Interval]:
        """The least and the largest value that each node takes on the tokens of each tile."""
        parts: dict[Node, list[tuple[Tensor, Tensor, Tensor]]] = {node: [] for node in nodes}
        for chunk in chunks_of(self.tokens, tiles):
            for node, values in zip(nodes, self.tokens.nodes_of_tiles(nodes, chunk)):
                parts[node].append(_extremes(values, len(chunk[0])))
        return {node: _as_interval(node, *(torch.cat(ends) for ends in zip(*found))) for node, found in parts.items()}

    def text(self, node: Node) -> str:
        """The node as the user might write it."""
        graph = self.tokens.graph
        return format_node(node) if graph is None else format_node(node, [t.name for t in graph.tensors], [s.name for s in graph.scalars])

    def line(self, node: Node) -> str | None:
        """The user's line that made the node."""
        found = node.where if self.tokens.graph is None else self.tokens.graph.lines.get(node)
        return None if found is None else str(found)


def _extremes(values: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum, maximum and whether there is a NaN, of each tile."""
    values = values.expand(torch.broadcast_shapes(values.shape, (count, 1, 1)))
    if not values.is_floating_point():
        values = values.byte() if values.dtype == torch.bool else values
        return values.amin((1, 2)).double(), values.amax((1, 2)).double(), torch.zeros(count, dtype=torch.bool, device=values.device)
    nan = torch.isnan(values)
    lo = torch.where(nan, math.inf, values).amin((1, 2)).double()
    return lo, torch.where(nan, -math.inf, values).amax((1, 2)).double(), nan.any(-1).any(-1)


def _as_interval(node: Node, lo: Tensor, hi: Tensor, nan: Tensor) -> Interval:
    return Interval.of(torch.where(nan, -math.inf, lo), torch.where(nan, math.inf, hi), bool(nan.any()), node.dtype)


def _is_tight(found: Interval, true: Interval, count: int) -> Tensor:
    """Whether the bounds hold no more than the values, but for the rounding that bounds of floats allow for: bool [tiles]."""
    if found.dtype == BOOL:
        tight = (found.is_true | ~true.is_true) & (found.is_false | ~true.is_false)
        return tight.expand(count)
    slack = true.lo.abs().maximum(true.hi.abs()).nan_to_num(posinf=0.0) * (_ROUNDING if found.dtype == FLOAT32 else 0.0)
    return ((found.lo >= true.lo - slack) & (found.hi <= true.hi + slack)).expand(count)
