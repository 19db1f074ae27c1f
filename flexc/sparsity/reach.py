"""Queries that see no key, and keys that no query sees: from the runs where they tell, from tokens in partial blocks else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from flexc.sparsity.runs import Runs

if TYPE_CHECKING:
    from flexc.sparsity.blockmap import BlockMap

Tensor = torch.Tensor


class Tokens(NamedTuple):
    """Tokens first to stop - 1 of a batch element and head; 0 stands for all where the mask does not read them."""

    batch: int
    head: int
    first: int
    stop: int


def unreached(blocks: BlockMap, runs: Runs, axis: int, pairs: int) -> tuple[tuple[Tokens, ...], tuple[Tokens, ...]]:
    """Tokens along the axis (0 queries, 1 keys) without an allowed pair, and those of which that was not found out.

    Args:
        runs: of the map, with the blocks along the axis as rows.
        pairs: to evaluate at most.

    A block row without a run has none, one with a full run no such token; in the others the partial blocks are evaluated, from the last one
    on, until every token has an allowed pair or all are done.
    """
    side, length = blocks.block[axis], (blocks.q_len, blocks.kv_len)[axis]
    entries, n = runs.shape[0] * runs.shape[1], runs.shape[2]
    rows = entries * n
    if not n or not length:
        return (), ()
    some_full = torch.zeros(rows, dtype=torch.bool, device=runs.device)
    some_full[runs.row[runs.full]] = True
    # Of rows with partial runs alone, how many blocks there are and where they begin among the partial blocks of all rows.
    open_runs = (~some_full[runs.row]).nonzero().squeeze(1)
    row_of, start, size = runs.row[open_runs], runs.start[open_runs].long(), runs.length[open_runs]
    first = torch.nn.functional.pad(size.cumsum(0), (1, 0))
    count = torch.zeros(rows, dtype=torch.int64, device=runs.device).index_add_(0, row_of, size)
    begin = count.cumsum(0) - count
    seen = some_full[:, None].expand(rows, side).clone()  # with tokens past the end, which repeat the last one
    if blocks.tokens is None:
        seen |= (count > 0)[:, None]
        return _ranges(blocks, ~seen.view(entries, -1)[:, :length]), ()
    done = torch.zeros_like(count)  # blocks evaluated, from the last one on
    left = (count > 0).nonzero().squeeze(1)
    cost, at_once = math.prod(blocks.block), blocks.tokens.tiles_per_chunk(math.prod(blocks.block))
    while len(left) and pairs >= cost:
        steps = max(1, min(at_once // len(left), int((count[left] - done[left]).max())))
        for group in left.split(max(1, at_once // steps)):
            group = group[: pairs // (cost * steps)]
            if not len(group):
                pairs = 0
                break
            pairs -= cost * len(group) * steps
            rank = (count[group] - 1 - done[group])[:, None] - torch.arange(steps, device=runs.device)
            place = (begin[group][:, None] + rank.clamp(min=0)).flatten()
            run = torch.searchsorted(first, place, right=True) - 1
            other = start[run] + place - first[run]
            row = group.repeat_interleave(steps)
            entry, within = row // n, row % n
            place_of = (within, other) if axis == 0 else (other, within)
            allowed = blocks.tokens.of_tiles((entry // runs.shape[1], entry % runs.shape[1], *place_of)).any(2 - axis)
            seen[group] |= allowed.view(len(group), steps, side).any(1)
            done[group] = torch.minimum(done[group] + steps, count[group])
        left = left[(done[left] < count[left]) & ~seen[left].all(-1)]
    unknown = torch.zeros_like(seen)
    unknown[left] = ~seen[left]
    blind = ~seen & ~unknown
    return _ranges(blocks, blind.view(entries, -1)[:, :length]), _ranges(blocks, unknown.view(entries, -1)[:, :length])


def _ranges(blocks: BlockMap, tokens: Tensor) -> tuple[Tokens, ...]:
    """The true entries of bool [entries, tokens]."""
    padded = torch.nn.functional.pad(tokens, (1, 1)).int()
    change = padded.diff(dim=1)
    (entry, first), (_, stop) = (change == 1).nonzero(as_tuple=True), (change == -1).nonzero(as_tuple=True)
    heads = blocks.shape[1]
    return tuple(Tokens(*place) for place in torch.stack([entry // heads, entry % heads, first, stop], dim=1).tolist())
