"""The last stage of classification: blocks that bounds leave undecided are looked at more closely, as far as that pays.

First the bounds of their parts, 1/16 and then 1/256 of a block each: full parts beside empty ones prove the block partial, and parts that
are all alike prove it full or empty. What is left is evaluated on tokens: at a few places, then everywhere.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from flexc.sparsity.by_bounds import SPLIT, Levels
from flexc.sparsity.squares import Found, Squares
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor
Exact = Literal["auto"] | bool

_AT_ONCE = 2**12  # blocks looked at together
_SAMPLES = 16
_FEW_BLOCKS = 2**10  # undecided blocks up to which all are looked at
_MOST_BLOCKS = 2**17  # and at most so many, where it pays
_PILOT_BLOCKS, _PILOT_EXACT = 512, 16
_AUTO_PAIRS = {"cpu": 2**25, "cuda": 2**33}  # pairs that exact="auto" evaluates at most; blocks past that stay partial
_NO_LIMIT = 2**62


def decide_by_evaluation(levels: Levels, undecided: Squares, exact: Exact, found: Found) -> None:
    """Add the blocks that bounds left undecided: full and empty where a closer look says so, partial else."""
    budget = _Budget(undecided, exact, levels.tokens.device.type)
    if exact == "auto" and len(undecided) > _FEW_BLOCKS and not _closer_look_pays(levels, undecided, found.shape):
        budget.blocks = 0
    looked_at = undecided[: budget.blocks]
    found.add(undecided[budget.blocks :], 1, full=False)
    found.proof.undecided += len(undecided) - len(looked_at)
    for group in looked_at.groups(_AT_ONCE):
        full, empty, partial = _by_parts(levels, group)
        found.add(group.where(full), 1, full=True)
        found.add(group.where(partial), 1, full=False)
        _on_tokens(levels.tokens, group.where(~(full | empty | partial)), budget, found)
    found.proof.bounds -= found.proof.sampled + found.proof.evaluated + found.proof.undecided + found.proof.mixed


class _Budget:
    """How many blocks to look at, and how many pairs of theirs to evaluate."""

    def __init__(self, undecided: Squares, exact: Exact, device: str):
        auto = exact == "auto"
        self.blocks = min(len(undecided), _MOST_BLOCKS) if auto else len(undecided) if exact else 0
        self.pairs = _AUTO_PAIRS.get(device, _AUTO_PAIRS["cpu"]) if auto else _NO_LIMIT


def _closer_look_pays(levels: Levels, undecided: Squares, shape: tuple[int, int, int, int]) -> bool:
    """Whether some of a few undecided blocks, spread evenly, are in truth empty or full."""
    few = undecided[:: math.ceil(len(undecided) / _PILOT_BLOCKS)]
    full, empty, partial = _by_parts(levels, few)
    if bool((full | empty).any()):
        return True
    few = few.where(~partial)
    few = few.where(_is_uniform(levels.tokens, few, shape))
    if not len(few):
        return False
    few = few[:: math.ceil(len(few) / _PILOT_EXACT)]
    full, some = _evaluated(levels.tokens, few, shape)
    return bool((full | ~some).any())


# --- by bounds of parts -----------------------------------------------------------------------------------------------------------------


def _by_parts(levels: Levels, blocks: Squares) -> tuple[Tensor, Tensor, Tensor]:
    """Which blocks are full, empty and partial by the bounds of their parts; bool [blocks] each. Where none holds, nothing is proved."""
    some = torch.zeros(len(blocks), dtype=torch.bool, device=levels.tokens.device)  # a part with an allowed pair
    none = some.clone()  # a part with a forbidden pair
    squares, block = blocks, torch.arange(len(blocks), device=some.device)
    size = levels.tokens.block
    for _ in range(2):
        if size[0] % SPLIT or size[1] % SPLIT or not len(squares):
            break
        size = size[0] // SPLIT, size[1] // SPLIT
        decided = levels.of(size).decide(squares)
        some |= _any_of(decided.full | decided.mixed, block, len(blocks))
        none |= _any_of(decided.empty | decided.mixed, block, len(blocks))
        squares, parent = squares.below(decided.unknown)
        block = block.index_select(0, parent)
        open_ = (~(some & none)).index_select(0, block).nonzero().squeeze(1)
        squares, block = squares.at(open_), block.index_select(0, open_)
    closed = torch.ones_like(some)
    closed[block] = False
    return closed & some & ~none, closed & none & ~some, some & none


def _any_of(parts: Tensor, block: Tensor, blocks: int) -> Tensor:
    """Which blocks have such a part: from bool [SPLIT, SPLIT, squares] and the block that each square lies in."""
    counts = torch.zeros(blocks, dtype=torch.int64, device=block.device)
    return counts.index_add_(0, block, parts.flatten(0, 1).sum(0)) > 0


# --- on tokens --------------------------------------------------------------------------------------------------------------------------


def _on_tokens(tokens: TokenMask, blocks: Squares, budget: _Budget, found: Found) -> None:
    """Add the blocks: full and empty where evaluation says so, partial else. Past the budget they stay partial."""
    pairs = math.prod(tokens.block)
    if budget.pairs < len(blocks) * _SAMPLES:
        found.proof.undecided += len(blocks)
        found.add(blocks, 1, full=False)
        return
    uniform = _is_uniform(tokens, blocks, found.shape)
    budget.pairs -= len(blocks) * _SAMPLES
    found.add(blocks.where(~uniform), 1, full=False)
    found.proof.sampled += int((~uniform).sum())
    blocks = blocks.where(uniform)
    most = budget.pairs // pairs
    found.add(blocks[most:], 1, full=False)
    found.proof.undecided += len(blocks[most:])
    for part in blocks[:most].groups(tokens.tiles_per_chunk(pairs)):
        full, some = _evaluated(tokens, part, found.shape)
        found.add(part.where(full), 1, full=True)
        found.add(part.where(some & ~full), 1, full=False)
        found.proof.evaluated += len(part)
        budget.pairs -= len(part) * pairs


def _is_uniform(tokens: TokenMask, blocks: Squares, shape: tuple[int, int, int, int]) -> Tensor:
    """Whether the mask is the same at every sample point of a block; otherwise it is partial, with two witnesses."""
    allowed = tokens.sampled(_tiles(blocks, shape), _sample_points(_SAMPLES, tokens.device))
    return allowed.all(-1) | ~allowed.any(-1)


def _evaluated(tokens: TokenMask, blocks: Squares, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Whether all pairs of each block are allowed, and whether any is."""
    allowed = tokens.of_tiles(_tiles(blocks, shape))
    return allowed.all(-1).all(-1), allowed.any(-1).any(-1)


def _tiles(blocks: Squares, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return blocks.entry // shape[1], blocks.entry % shape[1], blocks.row, blocks.column


def _sample_points(count: int, device: torch.device) -> Tensor:
    """The four corners, then points spread evenly by the golden ratio of the plane; [count, 2] within [0, 1]."""
    corners = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    spread = [((0.5 + i * 0.7548776662466927) % 1.0, (0.5 + i * 0.5698402909980532) % 1.0) for i in range(max(count - 4, 0))]
    return torch.tensor([*corners, *spread], dtype=torch.float64, device=device)[:count]
