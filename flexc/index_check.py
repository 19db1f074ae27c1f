"""FLEXC_CHECK=1: every needed index into a captured tensor is looked at before the kernel runs, blockwise, on the tensors' device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from flexc.backends import Shapes
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import Graph

_PAIRS_AT_ONCE = 2**22


def check_indices(
    graph: Graph, shapes: Shapes, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float], device: torch.device
) -> None:
    """Evaluate the graph on every pair, a slab of queries at a time.

    An index counts where its value is needed: allowed pairs only for the score, and through `where` only the branch taken.

    Raises:
        IndexRangeError: an index is out of range; names the expression and the user's line.
    """
    names = [t.name for t in graph.tensors]
    slab = max(1, _PAIRS_AT_ONCE // max(1, shapes.batch * shapes.heads_q * shapes.kv_len))
    position = {"dtype": torch.int32, "device": device}
    with torch.no_grad():
        for first in range(0, shapes.q_len, slab):
            inputs = {
                "batch": torch.arange(shapes.batch, **position)[:, None, None, None],
                "head": torch.arange(shapes.heads_q, **position)[None, :, None, None],
                "q_idx": torch.arange(first, min(first + slab, shapes.q_len), **position)[None, None, :, None],
                "kv_idx": torch.arange(shapes.kv_len, **position)[None, None, None, :],
                "score": torch.zeros((), device=device),
            }
            env = Environment(inputs, [t.detach() for t in tensors], scalars, check=True, names=names, lines=graph.lines)
            allowed = None
            if graph.mask is not None:
                allowed = evaluate([graph.mask], env)[0]
            if graph.score is not None:
                evaluate([graph.score], dataclasses.replace(env, needed=allowed))
