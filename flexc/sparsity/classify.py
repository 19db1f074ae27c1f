"""Sort the tiles of a mask into empty, full and partial: by bounds from coarse to fine, then exactly where bounds cannot tell.

1. Bounds: the mask is evaluated on intervals, first for large squares of blocks; only squares that stay unknown are split (8 × 8).
2. Samples: a block that shows both an allowed and a forbidden pair is proved partial by two witnesses, and needs no more work.
3. Exact: what is left is evaluated on all its pairs, a few blocks at a time.

`empty` and `full` are proofs in every stage.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from flexc.errors import InputError, InternalError, ShapeError
from flexc.ir.bounds import bounds
from flexc.ir.graph import Graph, inputs_of
from flexc.ir.interval import Interval
from flexc.sparsity.blockmap import EMPTY, FULL, PARTIAL, BlockMap
from flexc.sparsity.facts import Facts
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor

_SPLIT = 8  # a square of blocks is split into _SPLIT × _SPLIT smaller ones
_FIRST_TILES = 8192  # the coarsest level has at most this many squares
_TILES_AT_ONCE = 2**18  # intervals evaluated together
_SCANNED_AT_ONCE = 2**22  # entries of `kind` searched together, so that indices stay small
_SAMPLES = 16
_AUTO_PAIRS = {"cpu": 2**27, "cuda": 2**33}  # pairs that exact="auto" evaluates at most; blocks past that stay partial
_NO_LIMIT = 2**62


def classify(
    graph: Graph,
    q_len: int,
    kv_len: int,
    *,
    batch: int,
    heads: int,
    block: tuple[int, int] = (128, 128),
    tensors: Sequence[Tensor] = (),
    scalars: Sequence[int | float | Tensor] = (),
    device: torch.device | str = "cpu",
    exact: Literal["auto"] | bool = "auto",
) -> BlockMap:
    """Sort every (query block, key block) into empty, full or partial.

    Args:
        graph: its output "mask" decides; without one everything is allowed.
        q_len, kv_len: tokens. Keys past the end count as masked, so a ragged last block column is never full; query rows past the end
            count neither way.
        batch, heads: sizes that the map covers; it has one entry for all where the mask does not read them.
        block: tokens per block, (Bq, Bkv).
        tensors, scalars: captured values, in the order of the graph. They are read; the map keeps references for its token views.
        device: where tensors are and the map is made.
        exact: whether blocks that bounds leave unknown are evaluated on tokens: all of them, none, or ("auto") up to a limit.

    Returns:
        BlockMap; `kind` is uint8 [B or 1, Hq or 1, ceil(q_len / Bq), ceil(kv_len / Bkv)] on `device`.

    Raises:
        InputError: a captured tensor is on another device.
        ShapeError: a negative length or a block without tokens.
    """
    device = torch.device(device)
    _refuse_bad_sizes(q_len, kv_len, batch, heads, block)
    tensors = tuple(_on_device(graph, slot, tensor, device) for slot, tensor in enumerate(tensors))
    mask = graph.mask
    reads = inputs_of(mask) if mask is not None else frozenset()
    if "score" in reads:
        raise InternalError(f"the mask reads the score, which blocks cannot know\n{graph}")
    entries = (batch if "batch" in reads else 1, heads if "head" in reads else 1)
    grid = (math.ceil(q_len / block[0]), math.ceil(kv_len / block[1]))
    tokens = TokenMask(mask, q_len, kv_len, block, tensors, tuple(scalars), device) if mask is not None else None
    unknown = evaluated = sampled = 0
    if tokens is None or 0 in grid:
        kind = torch.full((*entries, *grid), FULL, dtype=torch.uint8, device=device)
    else:
        kind, parents = _by_bounds(tokens, entries, grid)
        limit = {True: _NO_LIMIT, False: 0, "auto": _AUTO_PAIRS.get(device.type, 2**27)}[exact]
        unknown, sampled, evaluated = _by_evaluation(tokens, kind, parents, limit)
    if kv_len % block[1] and grid[1]:
        last = kind[..., -1]
        last[last == FULL] = PARTIAL
    return BlockMap(kind, q_len, kv_len, block, batch, heads, tokens, kind.numel() - unknown, sampled, evaluated)


# --- by bounds ----------------------------------------------------------------------------------------------------------------------


def _by_bounds(tokens: TokenMask, entries: tuple[int, int], grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """`kind` of every block where bounds decide, PARTIAL where they do not; and the level above it, or `kind` again if there is none."""
    facts = Facts(tokens.tensors, math.gcd(*tokens.block))
    scalars = [_scalar_interval(value, tokens.device) for value in tokens.scalars]

    def decide(tiles: Sequence[Tensor], span: int) -> Tensor:
        inputs = {"batch": Interval.point(tiles[0].double()), "head": Interval.point(tiles[1].double())}
        for name, index, size, length in (
            ("q_idx", tiles[2], tokens.block[0], tokens.q_len),
            ("kv_idx", tiles[3], tokens.block[1], tokens.kv_len),
        ):
            first = index * (span * size)
            inputs[name] = Interval(first.double(), (first + (span * size - 1)).clamp(max=length - 1).double())
        truth = bounds([tokens.mask], inputs, scalars, facts.gather)[tokens.mask]
        full, empty = truth.is_true.expand(tiles[0].shape), truth.is_false.expand(tiles[0].shape)
        return (PARTIAL + full.to(torch.uint8) - empty.to(torch.uint8)).to(tokens.device)

    span = _coarsest_span(entries, grid)
    shape = (*entries, *(math.ceil(n / span) for n in grid))
    every = torch.unravel_index(torch.arange(math.prod(shape), device=tokens.device), shape)
    parents = kind = decide(every, span).view(shape)
    while span > 1:
        span //= _SPLIT
        parents, kind = kind, _split(kind, [math.ceil(n / span) for n in grid])
        _decide_below(parents, kind, functools.partial(decide, span=span))
    return kind, parents


def _coarsest_span(entries: tuple[int, int], grid: tuple[int, int]) -> int:
    """Blocks along the side of the squares to begin with, a power of _SPLIT."""
    span = 1
    while math.prod(entries) * math.prod(math.ceil(n / span) for n in grid) > _FIRST_TILES and span < max(grid):
        span *= _SPLIT
    return span


def _split(kind: Tensor, grid: Sequence[int]) -> Tensor:
    """Every entry repeated for the blocks it covers."""
    b, h, rows, columns = kind.shape
    repeated = kind[:, :, :, None, :, None].expand(b, h, rows, _SPLIT, columns, _SPLIT).reshape(b, h, rows * _SPLIT, columns * _SPLIT)
    return repeated[..., : grid[0], : grid[1]].contiguous()


def _decide_below(parents: Tensor, kind: Tensor, decide: Callable[[Sequence[Tensor]], Tensor]) -> None:
    """Write decide(tiles) into the entries of `kind` below every partial one of `parents`."""
    for found in _partial_entries(parents, _TILES_AT_ONCE // _SPLIT**2):
        b, h, row, column = _below(found, parents, kind)
        # Those past the border repeat the last one: decided twice, alike.
        tiles = b, h, row.clamp(max=kind.shape[2] - 1), column.clamp(max=kind.shape[3] - 1)
        kind[tiles] = decide(tiles)


def _partial_below(parents: Tensor, kind: Tensor, at_once: int) -> Iterator[Tensor]:
    """Flat indices of the partial entries of `kind`, found below those of `parents`, a bounded number at a time."""
    if parents is kind:
        yield from _partial_entries(kind, at_once)
        return
    for found in _partial_entries(parents, max(1, at_once // _SPLIT**2)):
        b, h, row, column = _below(found, parents, kind)
        exists = (row < kind.shape[2]) & (column < kind.shape[3])
        index = (((b * kind.shape[1] + h) * kind.shape[2] + row) * kind.shape[3] + column)[exists]
        yield index[kind.view(-1)[index] == PARTIAL]


def _below(found: Tensor, parents: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coordinates of the _SPLIT × _SPLIT entries below each of the flat indices into `parents`; some may lie past the border of `kind`."""
    b, h, row, column = torch.unravel_index(found, parents.shape)
    steps = torch.arange(_SPLIT**2, device=kind.device)
    row, column = row[:, None] * _SPLIT + steps // _SPLIT, column[:, None] * _SPLIT + steps % _SPLIT
    return b.repeat_interleave(_SPLIT**2), h.repeat_interleave(_SPLIT**2), row.flatten(), column.flatten()


def _partial_entries(kind: Tensor, at_once: int) -> Iterator[Tensor]:
    """Flat indices of the partial entries, in order, a bounded number at a time."""
    flat = kind.view(-1)
    for start in range(0, flat.numel(), _SCANNED_AT_ONCE):
        found = (flat[start : start + _SCANNED_AT_ONCE] == PARTIAL).nonzero().squeeze(1)
        if len(found):
            yield from (found + start).split(at_once)


def _scalar_interval(value: int | float | Tensor, device: torch.device) -> Interval:
    """A scalar enters the mask as int32, int64 or float32."""
    as_tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if as_tensor.is_floating_point():
        number = as_tensor.to(device, torch.float32)
        nan = torch.isnan(number)
        lo, hi = torch.where(nan, -math.inf, number).double(), torch.where(nan, math.inf, number).double()
        return Interval(lo, hi, bool(nan))
    return Interval.point(as_tensor.to(device).double())


# --- by evaluation ------------------------------------------------------------------------------------------------------------------


def _by_evaluation(tokens: TokenMask, kind: Tensor, parents: Tensor, limit: int) -> tuple[int, int, int]:
    """Upgrade partial blocks of `kind` that are in truth empty or full; at most `limit` pairs are evaluated.

    Returns:
        how many blocks were partial, were proved so by samples, and were evaluated on all their pairs.
    """
    pairs = tokens.block[0] * tokens.block[1]
    samples = _SAMPLES if pairs > 4 * _SAMPLES else 0
    points = _sample_points(samples, tokens.device)
    at_once = min(tokens.tiles_per_chunk(max(samples, 1)), 2**20 // max(samples, 1))
    left = limit
    unknown = mixed = evaluated = 0
    for found in _partial_below(parents, kind, at_once):
        unknown += len(found)
        if left < len(found) * max(samples, 1):
            continue
        if samples:
            seen = tokens.sampled(torch.unravel_index(found, kind.shape), points)
            uniform = seen.all(-1) | ~seen.any(-1)
            left -= len(found) * samples
            mixed += len(found)
            found = found[uniform]
            mixed -= len(found)
        found = found[: left // pairs]
        for part in found.split(tokens.tiles_per_chunk(pairs)) if len(found) else ():
            tiles = torch.unravel_index(part, kind.shape)
            allowed = tokens.of_tiles(tiles)
            full, some = allowed.all(-1).all(-1), allowed.any(-1).any(-1)
            kind[tiles] = torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.uint8)
            left -= len(part) * pairs
            evaluated += len(part)
    return unknown, mixed, evaluated


def _sample_points(count: int, device: torch.device) -> Tensor:
    """The four corners, then points spread evenly by the golden ratio of the plane; [count, 2] within [0, 1]."""
    corners = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    spread = [((0.5 + i * 0.7548776662466927) % 1.0, (0.5 + i * 0.5698402909980532) % 1.0) for i in range(max(count - 4, 0))]
    return torch.tensor([*corners, *spread], dtype=torch.float64, device=device)[:count]


# --- arguments ----------------------------------------------------------------------------------------------------------------------


def _refuse_bad_sizes(q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int]) -> None:
    if q_len < 0 or kv_len < 0:
        raise ShapeError(f"expected lengths >= 0, got q_len {q_len} and kv_len {kv_len}")
    if batch < 1 or heads < 1:
        raise ShapeError(f"expected batch >= 1 and heads >= 1, got {batch} and {heads}")
    if len(block) != 2 or min(block) < 1:
        raise ShapeError(f"expected a block of at least 1 × 1 tokens, got {block}")


def _on_device(graph: Graph, slot: int, tensor: Tensor, device: torch.device) -> Tensor:
    same = tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)
    if same:
        return tensor
    if tensor.dim() == 0:
        return tensor.to(device)
    name = graph.tensors[slot].name if slot < len(graph.tensors) else f"number {slot}"
    raise InputError(f"captured tensor {name} is on {tensor.device}, but the block map is made on {device}")
