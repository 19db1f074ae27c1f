"""Sort the blocks of a mask into empty, full and partial: by bounds from coarse to fine, then exactly where that pays.

1. Bounds: the mask is evaluated on intervals, first for large squares of blocks; only squares that stay undecided are split.
2. Everywhere mixed: a periodic condition such as (q - kv) % 2 == 0 is seen to hold and to fail in every block, so that a whole square of
   blocks is partial and none of them is looked at.
3. A closer look: of the blocks left undecided, some are split into parts and evaluated on tokens; if any of those is in truth empty or
   full, all are looked at.

`empty` and `full` are proofs in every stage. The cost grows with the border between them, not with the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flexc.errors import InputError, InternalError, ShapeError
from flexc.ir.graph import Graph, inputs_of
from flexc.sparsity.blockmap import BlockMap
from flexc.sparsity.by_bounds import Levels, decide_by_bounds
from flexc.sparsity.by_evaluation import Exact, decide_by_evaluation
from flexc.sparsity.proof import Proof
from flexc.sparsity.runs import Runs
from flexc.sparsity.squares import Found
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor


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
    exact: Exact = "auto",
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
        exact: whether blocks that bounds leave undecided are evaluated on tokens: all of them, none, or ("auto") as far as some turn out to
            be empty or full.

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
    shape = (*entries, math.ceil(q_len / block[0]), math.ceil(kv_len / block[1]))
    tokens = None if mask is None else TokenMask(mask, q_len, kv_len, block, tensors, tuple(scalars), device, graph)
    if tokens is None or 0 in shape[2:]:
        proof = Proof(bounds=math.prod(shape))
        return BlockMap(Runs.of_everything(shape, bool(kv_len % block[1])).to(device), q_len, kv_len, block, batch, heads, tokens, proof)
    found = Found(shape, device)
    levels = Levels(tokens, shape)
    undecided = decide_by_bounds(levels, shape, found)
    decide_by_evaluation(levels, undecided, exact, found)
    return BlockMap(found.runs(ragged=bool(kv_len % block[1])), q_len, kv_len, block, batch, heads, tokens, found.proof)


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
