"""A block map compared with its mask on tokens: what is wrong or loose, who sees nobody, and what stopped the proofs of bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexc.errors import InputError
from flexc.sparsity.picture import EMPTY, FULL, PARTIAL
from flexc.sparsity.reach import Tokens, unreached
from flexc.sparsity.runs import Runs
from flexc.sparsity.stoppers import Stopper, Tiles, chunks_of, stopped

if TYPE_CHECKING:
    from flexc.sparsity.blockmap import BlockMap

Tensor = torch.Tensor

_REACH_PAIRS = {"cpu": 2**26, "cuda": 2**32}  # pairs evaluated for queries, and again for keys, to see who sees nobody
_NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}
_SHOWN = 4


class Tile(NamedTuple):
    """A block and what it was found to be: `claimed` by the map, `true` on tokens; "empty", "partial" or "full"."""

    batch: int
    head: int
    row: int
    column: int
    claimed: str
    true: str


@dataclass(frozen=True)
class Certificate:
    """What a comparison of a block map with its mask found; prints as words.

    Attributes:
        blocks: of the map, by kind.
        entries: (B or 1, Hq or 1), as the map has them.
        compared: tiles compared, by the kind that the map claims.
        wrong: tiles that the map calls empty or full, and are not. There must be none.
        loose: tiles that the map calls partial, and are empty or full: slower than need be, but right.
        blind: queries that see no key; `blind_unknown`: queries of which that was not looked at.
        unseen: keys that no query sees; `unseen_unknown`: keys of which that was not looked at.
        unproved: compared tiles that are empty or full on tokens, and that bounds do not decide; the map has evaluated them, or calls
            them partial.
        stoppers: what stopped those proofs, most tiles first. At most 256 tiles are traced.
    """

    blocks: Mapping[str, int]
    entries: tuple[int, int]
    compared: Mapping[str, int]
    wrong: tuple[Tile, ...]
    loose: tuple[Tile, ...]
    blind: tuple[Tokens, ...]
    blind_unknown: tuple[Tokens, ...]
    unseen: tuple[Tokens, ...]
    unseen_unknown: tuple[Tokens, ...]
    unproved: int
    stoppers: tuple[Stopper, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every tile was compared."""
        return sum(self.compared.values()) == sum(self.blocks.values())

    @property
    def loose_share(self) -> float:
        """Blocks that are loose, as a share of all: from the compared tiles, where not all were."""
        loose = self.blocks["partial"] * len(self.loose) / max(self.compared["partial"], 1)
        return loose / max(sum(self.blocks.values()), 1)

    def __str__(self) -> str:
        compared, every = sum(self.compared.values()), sum(self.blocks.values())
        kinds = ", ".join(f"{n:,} of {self.blocks[kind]:,} {kind}" for kind, n in self.compared.items())
        lines = [f"compared    {'all' if self.is_complete else f'{compared:,} of'} {_many(every, 'tile')} with the mask on tokens: {kinds}"]
        lines.append(f"wrong       {_many(len(self.wrong), 'tile') if self.wrong else 'none'}")
        lines += [f"  block {t[:4]} is {t.true}, not {t.claimed}" for t in _few(self.wrong)] + _more(self.wrong)
        about = "" if self.is_complete else "about "
        lines.append(f"loose       {f'{about}{self.loose_share:.2%} of all blocks' if self.loose else 'none'}")
        lines += [f"  block {t[:4]} is {t.true}, not partial" for t in _few(self.loose)] + _more(self.loose)
        lines += self._reach("blind", ("query sees no key", "queries see no key"), "every query sees a key", self.blind, self.blind_unknown)
        lines += self._reach(
            "unseen", ("key is seen by nobody", "keys are seen by nobody"), "every key is seen", self.unseen, self.unseen_unknown
        )
        lines.append(f"unproved    {_many(self.unproved, 'tile') if self.unproved else 'none'}")
        for stopper in self.stoppers:
            lines += [f"  {line}" for line in str(stopper).splitlines()]
        return "\n".join(lines)

    def _reach(self, name: str, verbs: tuple[str, str], none: str, found: tuple[Tokens, ...], unknown: tuple[Tokens, ...]) -> list[str]:
        """Lines on the tokens that were found, and on those not looked at."""
        count, open_ = (sum(t.stop - t.first for t in tokens) for tokens in (found, unknown))
        text = f"{count:,} {verbs[count > 1]}" if count else none if not open_ else "none found"
        lines = [f"{name:<12}{text}{f', {open_:,} not looked at' if open_ else ''}"]
        for t in _few(found):
            entry = f" of batch {t.batch}, head {t.head}" if self.entries != (1, 1) else ""
            lines.append(f"  {t.first}{f' to {t.stop - 1}' if t.stop - t.first > 1 else ''}{entry}")
        return lines + _more(found)


def certify(blocks: BlockMap, tiles: int, seed: int, reach_pairs: int | None = None) -> Certificate:
    """The certificate of a map; see `BlockMap.certify`.

    Args:
        reach_pairs: pairs to evaluate at most for queries that see nothing, and again for keys that nobody sees.
    """
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise InputError(f"expected a number of tiles >= 1, got {tiles!r}")
    if reach_pairs is None:
        reach_pairs = _REACH_PAIRS.get(blocks.device.type, _REACH_PAIRS["cpu"])
    chosen, claimed = _chosen(blocks, tiles, seed)
    all_of, any_of = _on_tokens(blocks, chosen)
    ragged = (chosen[3] + 1) * blocks.block[1] > blocks.kv_len  # keys past the end count as masked
    true = torch.where(all_of & ~ragged, FULL, torch.where(any_of, PARTIAL, EMPTY))
    wrong, loose = (claimed != PARTIAL) & (true != claimed), (claimed == PARTIAL) & (true != PARTIAL)
    uniform = _only(chosen, all_of | ~any_of)
    blind, blind_unknown = unreached(blocks, blocks.rows(), 0, reach_pairs)
    unseen, unseen_unknown = unreached(blocks, blocks.columns(), 1, reach_pairs)
    unproved, stoppers = stopped(blocks.tokens, uniform) if blocks.tokens is not None else (0, ())
    return Certificate(
        blocks=blocks.counts(),
        entries=blocks.shape[:2],
        compared={_NAMES[kind]: int((claimed == kind).sum()) for kind in (EMPTY, PARTIAL, FULL)},
        wrong=_named(_only(chosen, wrong), claimed[wrong], true[wrong]),
        loose=_named(_only(chosen, loose), claimed[loose], true[loose]),
        blind=blind,
        blind_unknown=blind_unknown,
        unseen=unseen,
        unseen_unknown=unseen_unknown,
        unproved=unproved,
        stoppers=stoppers,
    )


def _only(tiles: Tiles, which: Tensor) -> Tiles:
    return [t[which] for t in tiles]


def _named(tiles: Tiles, claimed: Tensor, true: Tensor) -> tuple[Tile, ...]:
    rows = torch.stack([*tiles, claimed, true], dim=1).tolist()
    return tuple(Tile(b, h, i, j, _NAMES[c], _NAMES[t]) for b, h, i, j, c, t in rows)


# --- which tiles, and what they are -------------------------------------------------------------------------------------------------


def _chosen(blocks: BlockMap, most: int, seed: int) -> tuple[Tiles, Tensor]:
    """Tiles to compare, and the kind that the map claims for each: all, or of each kind its share."""
    runs = blocks.rows()
    kinds = {PARTIAL: (runs.row, runs.start.long(), runs.length, ~runs.full), FULL: (runs.row, runs.start.long(), runs.length, runs.full)}
    pieces = {kind: (row[which], start[which], length[which]) for kind, (row, start, length, which) in kinds.items()}
    pieces[EMPTY] = _gaps(runs)
    populations = {kind: int(length.sum()) for kind, (_, _, length) in pieces.items()}
    generator = torch.Generator().manual_seed(seed)
    rows, columns, claimed = [], [], []
    left = most
    for nth, kind in enumerate(sorted(populations, key=lambda kind: populations[kind])):
        share = min(populations[kind], left // (3 - nth))  # what a small kind does not use is for the larger ones
        left -= share
        row, start, length = pieces[kind]
        first = torch.nn.functional.pad(length.cumsum(0), (1, 0))
        place = _spread(populations[kind], share, generator).to(row.device)
        piece = torch.searchsorted(first, place, right=True) - 1
        rows.append(row[piece])
        columns.append(start[piece] + place - first[piece])
        claimed.append(torch.full_like(place, kind))
    row, column = torch.cat(rows), torch.cat(columns)
    entry, within = row // max(blocks.shape[2], 1), row % max(blocks.shape[2], 1)
    return (entry // blocks.shape[1], entry % blocks.shape[1], within, column), torch.cat(claimed)


def _spread(population: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below `population`: one drawn from each of as many equal strips."""
    edges = torch.arange(count + 1, dtype=torch.int64) * population // max(count, 1)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return edges[:-1] + (drawn * edges.diff()).long()


def _gaps(runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """What no run covers: row, first block and number of blocks, int64."""
    rows, columns = len(runs.offsets) - 1, runs.shape[3]
    every = torch.arange(rows, device=runs.device)
    row = torch.cat([runs.row, every])
    # A gap lies before each run, and one after the last run of each row, at the end of which a run of no blocks is thought to be.
    begin = torch.cat([runs.start.long(), torch.full_like(every, columns)])
    end = torch.cat([runs.stop.long(), torch.full_like(every, columns)])
    row, order = torch.sort(row, stable=True)
    begin, end = begin[order], end[order]
    before = torch.nn.functional.pad(end[:-1], (1, 0))[: len(end)]
    is_first = torch.nn.functional.pad(row[1:] != row[:-1], (1, 0), value=True)[: len(row)]
    start = torch.where(is_first, 0, before)
    return row, start, begin - start


def _on_tokens(blocks: BlockMap, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Whether all existing pairs of each tile are allowed, and whether any is."""
    if blocks.tokens is None:
        everything = torch.ones_like(tiles[0], dtype=torch.bool)
        return everything, everything
    parts = [(m.all(-1).all(-1), m.any(-1).any(-1)) for m in map(blocks.tokens.of_tiles, chunks_of(blocks.tokens, tiles))]
    none = torch.zeros(0, dtype=torch.bool, device=blocks.device)
    return torch.cat([none, *(p[0] for p in parts)]), torch.cat([none, *(p[1] for p in parts)])


# --- words --------------------------------------------------------------------------------------------------------------------------


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _few(items: tuple) -> tuple:
    return items[:_SHOWN]


def _more(items: tuple) -> list[str]:
    return [f"  and {len(items) - _SHOWN:,} more"] if len(items) > _SHOWN else []
