"""The derivative of the score function, added to the graph.

Guarantees: everything is linear in the upstream gradient, so the outputs are factors of it:

    dscore          d score / d raw score
    gather:<k>      a gather, anywhere in the score, of a captured tensor that needs a gradient; k counts from 0
    dgather:<k>     d score / d that element

A gather that the score does not depend on differentiably is left out. Leaves alone: score and mask.
"""

from __future__ import annotations

from flexc.ir.grad import gradient
from flexc.ir.graph import FLOAT32, Graph, Node, const, input_node, topological
from flexc.passes.fold import fold_constants


def differentiate(graph: Graph) -> Graph:
    """The graph with the factors as outputs; the same object if it has no score."""
    if graph.score is None:
        return graph
    gathers = [
        node
        for node in topological([graph.score])
        if node.op == "gather" and graph.tensors[node.attrs[0]].needs_grad and node.dtype == FLOAT32
    ]
    factor, *factors = gradient(graph.score, [input_node("score"), *gathers])
    outputs: dict[str, Node | None] = {"dscore": const(0.0) if factor is None else factor}
    reached = [(gather, d) for gather, d in zip(gathers, factors, strict=True) if d is not None]
    for k, (gather, d) in enumerate(reached):
        outputs[f"gather:{k}"] = gather
        outputs[f"dgather:{k}"] = d
    return fold_constants(graph.with_outputs(**outputs))
