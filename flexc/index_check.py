"""FLEXC_CHECK=1: every needed index into a captured tensor is looked at before the kernel runs, blockwise, on the tensors' device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexc.backends import Shapes
from flexc.errors import UnsupportedError
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import BOOL, Graph, Node, inputs_of, topological
from flexc.ir.ops import has_trait

Tensor = torch.Tensor

_PAIRS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Scores:
    """What the scores of a call are made from: q [B, Hq, Sq, D], k [B, Hkv, Skv, D], and the scale."""

    q: Tensor
    k: Tensor
    scale: float

    def of(self, rows: slice) -> Tensor:
        """The scaled scores of some queries, float32 [B, Hq, rows, Skv]; a kernel's may differ in the last bits."""
        group = self.q.shape[1] // self.k.shape[1]
        return self.q[:, :, rows].float() @ self.k.repeat_interleave(group, 1).float().mT * self.scale


def check_indices(
    graph: Graph,
    shapes: Shapes,
    tensors: Sequence[Tensor],
    scalars: Sequence[int | float],
    device: torch.device,
    scores: Scores | None = None,
) -> None:
    """Evaluate the graph on every pair, a slab of queries at a time.

    An index counts where its value is needed: allowed pairs only for the score, and through `where` only the branch taken. Scores are
    computed only where they decide which element is read, or whether one is.

    Raises:
        IndexRangeError: an index is out of range; names the expression and the user's line.
        UnsupportedError: the scores decide, and were not given.
    """
    deciding = None if graph.score is None else _read_by_score(graph.score)
    if deciding is not None and scores is None:
        where = graph.lines.get(deciding, deciding.where)
        raise UnsupportedError(f"FLEXC_CHECK=1: `{deciding!r}` depends on the score, which this check was not given\n  at {where}")
    names = [t.name for t in graph.tensors]
    slab = max(1, _PAIRS_AT_ONCE // max(1, shapes.batch * shapes.heads_q * shapes.kv_len))
    position = {"dtype": torch.int32, "device": device}
    with torch.no_grad():
        for first in range(0, shapes.q_len, slab):
            rows = slice(first, min(first + slab, shapes.q_len))
            inputs = {
                "batch": torch.arange(shapes.batch, **position)[:, None, None, None],
                "head": torch.arange(shapes.heads_q, **position)[None, :, None, None],
                "q_idx": torch.arange(rows.start, rows.stop, **position)[None, None, :, None],
                "kv_idx": torch.arange(shapes.kv_len, **position)[None, None, None, :],
                "score": torch.zeros((), device=device) if deciding is None or scores is None else scores.of(rows),
            }
            env = Environment(inputs, [t.detach() for t in tensors], scalars, check=True, names=names, lines=graph.lines)
            allowed = None
            if graph.mask is not None:
                allowed = evaluate([graph.mask], env)[0]
            if graph.score is not None:
                evaluate([graph.score], dataclasses.replace(env, needed=allowed))


def _read_by_score(root: Node) -> Node | None:
    """An index, or the condition of a choice with a captured element on one side, that reads the score; None if there is none."""
    for node in topological([root]):
        if node.op == "gather":
            decisions: tuple[Node, ...] = node.args
        elif has_trait(node, "select") or (node.dtype == BOOL and node.op in ("and", "or")):
            decisions = node.args[:1] if any(n.op == "gather" for n in topological(node.args[1:])) else ()
        else:
            continue
        for decision in decisions:
            if "score" in inputs_of(decision):
                return decision
    return None
