"""Graph to graph. One file a pass; each returns the same object if it changes nothing, and the graph is verified after each."""

from __future__ import annotations

from collections.abc import Callable

from flexc.ir.graph import Graph
from flexc.ir.verify import verify
from flexc.passes.fold import fold_constants
from flexc.passes.split_mask import split_mask_from_score
from flexc.passes.under_mask import simplify_under_mask

PASSES: tuple[Callable[[Graph], Graph], ...] = (fold_constants, split_mask_from_score, simplify_under_mask)

_ROUNDS = 4  # one does nearly always; a pass that undoes another must not hang the compiler


def run(graph: Graph) -> Graph:
    """The passes in order until none changes anything. The same object if none does.

    Raises:
        InternalError: a pass broke the graph.
    """
    verify(graph)
    for _ in range(_ROUNDS):
        before = graph
        for apply_pass in PASSES:
            after = apply_pass(graph)
            if after is not graph:
                verify(after)
            graph = after
        if graph is before:
            break
    return graph
