"""A mask evaluated on tokens: exact, for chosen tiles, in chunks of bounded memory; never all pairs at once.

Positions past the end are never evaluated: they repeat the last token, which changes neither any() nor all().
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import POSITIONS, Graph, Node, inputs_of, topological
from flexc.ir.text import format_graph, parse_graph

Tensor = torch.Tensor

CHUNK_BYTES = 64 * 2**20


@dataclass(eq=False)
class TokenMask:
    """What is needed to evaluate a mask on tokens of a q_len × kv_len grid.

    Attributes:
        mask: boolean node.
        q_len, kv_len: tokens, at least 1 each where anything is evaluated.
        block: tokens per block (Bq, Bkv).
        tensors, scalars: captured values, held by reference.
        device: where positions are made.
        graph: what the mask is part of, for the names and lines that the user gave; None where there are none.
    """

    mask: Node
    q_len: int
    kv_len: int
    block: tuple[int, int]
    tensors: tuple[Tensor, ...]
    scalars: tuple[int | float | Tensor, ...]
    device: torch.device
    graph: Graph | None = None

    def __reduce__(self) -> tuple:
        """The graph as text: its nodes are not made by pickle."""
        if self.graph is None:
            return super().__reduce__()  # pyright: ignore[reportReturnType]
        return _of_text, (format_graph(self.graph), self.q_len, self.kv_len, self.block, self.tensors, self.scalars, self.device)

    def at(self, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The mask at positions (int32, broadcast against each other); as small as the mask allows, to be broadcast."""
        return self._values([self.mask], batch, head, q_idx, kv_idx)[0]

    def _values(self, nodes: Sequence[Node], *positions: Tensor) -> list[Tensor]:
        inputs = dict(zip(POSITIONS, positions))
        read = {name for node in nodes for name in inputs_of(node)}
        environment = Environment({name: inputs[name] for name in POSITIONS if name in read}, self.tensors, self.scalars)
        with torch.no_grad():
            return [value.to(self.device) for value in evaluate(nodes, environment)]

    def sampled(self, tiles: Sequence[Tensor], points: Tensor) -> Tensor:
        """The mask at `points` of each tile: bool [tiles, points].

        Args:
            tiles: batch, head, block row and block column, int64 [tiles] each.
            points: float64 [points, 2] within [0, 1]: where in the tile, rows then columns.
        """
        batch, head, row, column = (t[:, None] for t in tiles)
        q_idx = self._inside(row, self.block[0], self.q_len, points[:, 0])
        kv_idx = self._inside(column, self.block[1], self.kv_len, points[:, 1])
        return self.at(batch.int(), head.int(), q_idx, kv_idx).expand(len(tiles[0]), len(points))

    def of_tiles(self, tiles: Sequence[Tensor]) -> Tensor:
        """The mask on every token of each tile: bool [tiles, Bq, Bkv]. Positions past the end repeat the last token."""
        return self.nodes_of_tiles([self.mask], tiles)[0].expand(len(tiles[0]), *self.block)

    def nodes_of_tiles(self, nodes: Sequence[Node], tiles: Sequence[Tensor]) -> list[Tensor]:
        """Values of nodes below the mask, as `of_tiles`; as small as each node allows, to be broadcast."""
        batch, head, row, column = (t[:, None, None] for t in tiles)
        rows = torch.arange(self.block[0], device=self.device)[:, None]
        columns = torch.arange(self.block[1], device=self.device)
        q_idx = (row * self.block[0] + rows).clamp(max=self.q_len - 1).int()
        kv_idx = (column * self.block[1] + columns).clamp(max=self.kv_len - 1).int()
        return self._values(nodes, batch.int(), head.int(), q_idx, kv_idx)

    def tiles_per_chunk(self, pairs: int) -> int:
        """How many tiles of `pairs` positions each fit into CHUNK_BYTES while they are evaluated."""
        values = sum({"q_idx", "kv_idx"} <= inputs_of(node) for node in topological([self.mask])) + 2
        return max(1, CHUNK_BYTES // (8 * values * max(pairs, 1)))

    def dense(self, batch: int, head: int) -> Iterator[tuple[int, Tensor]]:
        """The token mask of one batch and head in slabs of rows: (first row, bool [rows, kv_len])."""
        step = self.tiles_per_chunk(self.kv_len)
        kv_idx = torch.arange(self.kv_len, device=self.device, dtype=torch.int32)
        b, h = (torch.tensor(n, device=self.device, dtype=torch.int32) for n in (batch, head))
        for first in range(0, self.q_len, step):
            q_idx = torch.arange(first, min(first + step, self.q_len), device=self.device, dtype=torch.int32)[:, None]
            yield first, self.at(b, h, q_idx, kv_idx).expand(len(q_idx), self.kv_len)

    def _inside(self, index: Tensor, block: int, length: int, share: Tensor) -> Tensor:
        first = index * block
        size = (length - first).clamp(max=block)
        return (first + torch.minimum((share * size).long(), size - 1)).int()


def _of_text(text: str, q_len: int, kv_len: int, block: tuple[int, int], tensors: Any, scalars: Any, device: torch.device) -> TokenMask:
    graph = parse_graph(text)
    assert graph.mask is not None
    return TokenMask(graph.mask, q_len, kv_len, block, tensors, scalars, device, graph)
