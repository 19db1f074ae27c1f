"""What classification found: runs of blocks for each block row, figures and pictures of them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from flexc.errors import InputError, ShapeError
from flexc.ir.graph import Graph
from flexc.sparsity import certificate, liveness, picture
from flexc.sparsity.certificate import Certificate
from flexc.sparsity.picture import EMPTY, FULL, PARTIAL
from flexc.sparsity.proof import Proof
from flexc.sparsity.runs import Runs, ranks
from flexc.sparsity.tokens import TokenMask
from flexc.sparsity.walk import MadeWalks, Walk, runs_of, walk_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EMPTY", "FULL", "PARTIAL", "BlockMap", "Proof"]

Tensor = torch.Tensor

_PICTURE_COLUMNS, _PICTURE_ROWS = 96, 48
_DENSE_LIMIT = 2**28
_INSET_SIDE = 256


@dataclass(eq=False, repr=False)
class BlockMap:
    """Which blocks of a mask are empty, partial or full. Made by `flexc.block_map`, or by a kernel for its own mask.

    Attributes:
        q_len, kv_len: tokens.
        block: tokens per block, (Bq, Bkv).
        batch, heads: what the map covers, also where it has one entry for all because the mask does not read them.
        tokens: the mask itself for views by token, None where everything is allowed. It refers to the captured tensors: views show
            their present values, runs those of the time of classification.
        waited: on a GPU, why PyTorch operators made the map and the host waited for them; empty where kernels made it.
    """

    _rows: Runs | None
    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int
    tokens: TokenMask | None = None
    _proof: Proof | None = None
    _columns: Runs | None = None
    _walks: dict[str, Walk] = field(default_factory=dict)
    _made: MadeWalks | None = None
    waited: str = ""

    @staticmethod
    def of_walks(made: MadeWalks, batch: int, heads: int, tokens: TokenMask) -> BlockMap:
        """The map of which walks are made, and nothing else yet: runs follow from them, and looking at runs waits for the device."""
        return BlockMap(None, tokens.q_len, tokens.kv_len, tokens.block, batch, heads, tokens, _made=made)

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has runs; what makes walks stays here."""
        return {**vars(self), "_rows": self.rows(), "_proof": self.proof, "_walks": {}, "_made": None}

    @property
    def _source(self) -> Runs | MadeWalks:
        """What the map was made from."""
        source = self._rows if self._made is None else self._made
        assert source is not None
        return source

    @property
    def device(self) -> torch.device:
        """Where the map is."""
        return self._source.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B or 1, Hq or 1, ceil(q_len / Bq), ceil(kv_len / Bkv)): blocks."""
        return self._source.shape

    @property
    def proof(self) -> Proof:
        """How the blocks were decided. Where kernels on a GPU made the map, this and every view of it wait for the device."""
        if self._proof is None:
            self._proof = Proof() if self._made is None else self._made.proof()
        return self._proof

    @property
    def overflowed(self) -> int:
        """Block rows whose lists and runs did not fit into the memory of a map that kernels made: all their blocks count as partial, from
        the first that is not empty to the last."""
        return 0 if self._made is None else self._made.overflowed()

    @property
    def runs(self) -> Runs:
        """For each query block the runs of key blocks. Keys past the end count as masked, so a ragged last key block is never full; query
        rows past the end count neither way."""
        return self.rows()

    def rows(self) -> Runs:
        """For each query block the runs of key blocks."""
        if self._rows is None:
            assert self._made is not None
            self._rows = runs_of(self._made.row_walk(), self.shape)
        return self._rows

    def columns(self) -> Runs:
        """For each key block the runs of query blocks: shape (B or 1, Hq or 1, ceil(kv_len / Bkv), ceil(q_len / Bq))."""
        if self._columns is None:
            self._columns = self.rows().transposed()
        return self._columns

    def has_walk(self, side: str) -> bool:
        """Whether the walk along "rows" or "columns" is made; if not, asking for it makes it."""
        return side in self._walks or (self._made is not None and self._made.has_walk(side))

    def make_rows(self) -> None:
        """Have the walk along rows made from what captured tensors hold now, without waiting for it."""
        if self._made is not None:
            self._made.make_rows()

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit, as kernels read it."""
        if self._made is not None:
            return self._made.row_walk()
        if "rows" not in self._walks:
            self._walks["rows"] = walk_of(self.rows())
        return self._walks["rows"]

    def column_walk(self) -> Walk:
        """For each key block the query blocks to visit, as kernels read it."""
        made = None if self._made is None else self._made.column_walk()
        if made is not None:
            return made
        if "columns" not in self._walks:
            self._walks["columns"] = walk_of(self.columns())
        return self._walks["columns"]

    @property
    def size_bytes(self) -> int:
        """Memory of the runs and walks made so far."""
        parts = (self._made, self._rows, self._columns, *self._walks.values())
        return sum(part.size_bytes for part in parts if part is not None)

    def with_lengths(self, q_len: int, kv_len: int) -> BlockMap:
        """The map of the same mask for other lengths: derived anew, with the captured tensors' present contents, not cropped.

        Raises:
            ShapeError: a negative length.
        """
        if self._made is not None:
            return self._made.with_lengths(q_len, kv_len)
        from flexc.sparsity.classify import classify

        graph = Graph(()) if self.tokens is None or self.tokens.graph is None else self.tokens.graph
        tensors, scalars = ((), ()) if self.tokens is None else (self.tokens.tensors, self.tokens.scalars)
        sizes = {"batch": self.batch, "heads": self.heads, "block": self.block}
        with torch.no_grad():
            return classify(graph, q_len, kv_len, **sizes, tensors=tensors, scalars=scalars, device=self.device)

    # --- figures ---

    def counts(self) -> dict[str, int]:
        """How many blocks are empty, partial and full."""
        length = self.rows().length
        visited, full = int(length.sum()), int(length[self.rows().full].sum())
        return {"empty": self._blocks - visited, "partial": visited - full, "full": full}

    def sparsity(self) -> float:
        """Share of blocks that are empty: what is skipped."""
        return self.counts()["empty"] / max(self._blocks, 1)

    def visited_share(self) -> float:
        """Blocks that are not empty, as a share of all: what a kernel computes."""
        return 1.0 - self.sparsity()

    def unmasked_pairs(self, most_blocks: int | None = None) -> int:
        """How many (batch, head, query, key) are allowed, over all batch elements and heads.

        Args:
            most_blocks: partial blocks to evaluate at most. Where there are more, so many are evaluated, evenly spread, and stand for all;
                None evaluates every one.
        """
        full = self.rows().full
        tokens = self._rows_in(self.rows().row[full] % max(self.shape[2], 1))
        total = int((self.rows().length[full] * tokens).sum()) * self.block[1]  # a full block has all its columns
        partial = self.counts()["partial"]
        step = 1 if most_blocks is None else max(1, math.ceil(partial / most_blocks))
        at_once = self.tokens.tiles_per_chunk(math.prod(self.block)) if self.tokens is not None else 2**16
        allowed = seen = 0
        for row, column in self.rows().blocks(at_once, step):
            allowed += self._allowed_in(self._tiles(row, column))
            seen += len(row)
        total += allowed if step == 1 else round(allowed * partial / seen)
        return total * (self.batch * self.heads // max(self.shape[0] * self.shape[1], 1))

    def unmasked_share(self, most_blocks: int | None = None) -> float:
        """Allowed pairs as a share of all pairs; `most_blocks` as for `unmasked_pairs`."""
        pairs = self.batch * self.heads * self.q_len * self.kv_len
        return self.unmasked_pairs(most_blocks) / pairs if pairs else 0.0

    def row_work(self) -> Tensor:
        """Blocks that each query block visits, summed over batch and heads: int64 [ceil(q_len / Bq)]."""
        return self.rows().work()

    @property
    def _blocks(self) -> int:
        return math.prod(self.shape)

    def _rows_in(self, row: Tensor) -> Tensor:
        """Query rows that exist in the block rows."""
        return (self.q_len - row * self.block[0]).clamp(max=self.block[0])

    def _tiles(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch, head, block row and block column from block rows counted through batch and heads."""
        entry, within = row // self.shape[2], row % self.shape[2]
        return entry // self.shape[1], entry % self.shape[1], within, column

    def _allowed_in(self, tiles: tuple[Tensor, Tensor, Tensor, Tensor]) -> int:
        rows = self._rows_in(tiles[2])
        columns = (self.kv_len - tiles[3] * self.block[1]).clamp(max=self.block[1])
        if self.tokens is None:
            return int((rows * columns).sum())
        exists = torch.arange(self.block[0], device=self.device)[:, None] < rows[:, None, None]
        exists = exists & (torch.arange(self.block[1], device=self.device) < columns[:, None, None])
        return int((self.tokens.of_tiles(tiles) & exists).sum())

    # --- proof and liveness ---

    def certify(self, tiles: int = 4096, seed: int = 0) -> Certificate:
        """Compare the map with the mask on tokens, and say what stopped the proof of blocks that bounds did not decide.

        Captured tensors are read as they are: one written to since the map was made shows as wrong tiles.

        Args:
            tiles: blocks to compare at most. Where the map has more, equal shares of its empty, partial and full blocks are drawn.
            seed: of the draw.

        Raises:
            InputError: not a positive number of tiles.
        """
        return certificate.certify(self, tiles, seed)

    def last_reader(self) -> Tensor:
        """The last query block that may see each key block: int32 [B or 1, Hq or 1, ceil(kv_len / Bkv)], -1 where none does.

        A cache may free a block of keys once that query block is computed.
        """
        return liveness.readers(self)[1]

    def live(self) -> Tensor:
        """Key blocks that a cache holds while each query block is computed: int32 [B or 1, Hq or 1, ceil(q_len / Bq)].

        Queries and keys are counted alike: token i is query i and key i, and comes at step i. A key block is held from the query block that
        reaches its first token on (from its first reader on, where that comes before: a prefix that is seen in both directions is written
        ahead) up to its last reader, that included. A block that nobody sees is never held.
        """
        return liveness.live(self)

    def most_live(self) -> int:
        """The largest number of `live`, over all query blocks, batch elements and heads: blocks that a cache for one head needs."""
        held = self.live()
        return int(held.max()) if held.numel() else 0

    # --- views ---

    @property
    def kind(self) -> Tensor:
        """Every block as EMPTY, PARTIAL or FULL: uint8, of the map's shape. For looking at and for tests.

        Raises:
            ShapeError: more than 2^28 blocks.
        """
        self._refuse_dense("map", self.shape)
        kind = torch.full((self._blocks,), EMPTY, dtype=torch.uint8, device=self.device)
        runs = self.rows()
        first = runs.row * self.shape[3] + runs.start
        found = torch.where(runs.full, FULL, PARTIAL).byte()
        kind[first.repeat_interleave(runs.length) + ranks(runs.length)] = found.repeat_interleave(runs.length)
        return kind.view(self.shape)

    def to_dense(self) -> Tensor:
        """The mask by token: bool [B or 1, Hq or 1, q_len, kv_len], where true is allowed. For looking at and for tests.

        Raises:
            ShapeError: more than 2^28 entries.
        """
        shape = (*self.shape[:2], self.q_len, self.kv_len)
        self._refuse_dense("mask", shape)
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
        return picture.draw(self.rows(), self._entry(batch, head), columns, rows)

    def plot(self, path: str | Path, batch: int = 0, head: int = 0, title: str = "", inset: tuple[int, int] | None = None) -> None:
        """Draw the blocks of one batch element and head into an image file; axes are in tokens.

        Args:
            inset: (query, key): a second panel shows the 256 x 256 pairs from there on, one by one.

        Raises:
            InputError: no path, or an inset that begins outside.
            ToolchainError: matplotlib is missing.
        """
        if not isinstance(path, str | os.PathLike):
            raise InputError(f"expected the path of an image file, such as 'mask.png', got {path!r}")
        entry = self._entry(batch, head)
        if inset is not None and not (0 <= inset[0] < self.q_len and 0 <= inset[1] < self.kv_len):
            raise InputError(f"expected an inset that begins at query < {self.q_len} and key < {self.kv_len}, got {inset}")
        corner = None if inset is None else (*inset, _INSET_SIDE)
        picture.plot(self, path, entry, title, corner, lambda *place: self._pairs(batch, head, *place))

    def summary(self) -> str:
        """Sizes, counts and how they were found, on two lines."""
        counts, total = self.counts(), max(self._blocks, 1)
        shares = ", ".join(f"{name} {n:,} ({100 * n / total:.1f} %)" for name, n in counts.items())
        b, h, rows, columns = self.shape
        size = f"{self.q_len} queries x {self.kv_len} keys in blocks of {self.block[0]} x {self.block[1]}: {rows} x {columns} blocks"
        return f"{size}, {b} x {h} of batch x heads\n{shares}; decided: {self.proof}"

    def __repr__(self) -> str:
        return f"<BlockMap {self.summary()}>"

    def __str__(self) -> str:
        return f"{self.summary()}\n{self.picture()}" if self._blocks else self.summary()

    def _pairs(self, batch: int, head: int, query: int, key: int, side: int) -> Tensor:
        """The mask of a square of pairs, as far as it exists: bool [queries, keys]."""
        q_idx = torch.arange(query, min(query + side, self.q_len), device=self.device, dtype=torch.int32)[:, None]
        kv_idx = torch.arange(key, min(key + side, self.kv_len), device=self.device, dtype=torch.int32)
        shape = (len(q_idx), len(kv_idx))
        if self.tokens is None:
            return torch.ones(shape, dtype=torch.bool, device=self.device)
        b, h = (torch.tensor(n, device=self.device, dtype=torch.int32) for n in (batch, head))
        return self.tokens.at(b, h, q_idx, kv_idx).expand(shape)

    def _refuse_dense(self, what: str, shape: tuple[int, ...]) -> None:
        if math.prod(shape) > _DENSE_LIMIT:
            raise ShapeError(f"a dense {what} of shape {list(shape)} has {math.prod(shape):,} entries: expected at most {_DENSE_LIMIT:,}")

    def _entry(self, batch: int, head: int) -> int:
        if not (0 <= batch < self.batch and 0 <= head < self.heads):
            raise InputError(f"expected batch < {self.batch} and head < {self.heads}, got {batch} and {head}")
        return (batch if self.shape[0] > 1 else 0) * self.shape[1] + (head if self.shape[1] > 1 else 0)
