"""Captured numbers that are added to a score, and may be as large as their dtype: the least number stands for -inf in some biases."""

from __future__ import annotations

from flexc.ir.graph import FLOAT32, Graph, Node, topological

_WIDE = ("float64", "float32", "bfloat16")  # they reach past 1e38


def wide_captures(root: Node, graph: Graph) -> set[Node]:
    """Gathers below `root` of numbers that may be that large."""
    return {node for node in topological([root]) if node.op == "gather" and graph.tensors[node.attrs[0]].dtype in _WIDE}


def hands_on(node: Node) -> bool:
    """Whether the node is about as large as an operand is: a sum, a choice, or an operand times a captured or constant number."""
    if node.op == "mul":
        return all(map(_is_captured, node.args)) or any(a.op == "const" for a in node.args)
    return node.op in ("add", "sub", "neg", "minimum", "maximum", "where")


def adds_wide_capture(root: Node, graph: Graph) -> bool:
    """Whether a score is a sum with such a number, so that the score of a pair may be as large.

    A captured value that multiplies the score or a position does not count: there an overflow is the user's own.
    """
    wide = wide_captures(root, graph)
    seen: set[Node] = set()
    stack = [root] if wide else []
    while stack:
        node = stack.pop()
        if node in wide:
            return True
        if node.dtype == FLOAT32 and node not in seen and hands_on(node):
            seen.add(node)
            stack.extend(node.args)
    return False


def _is_captured(node: Node) -> bool:
    return node.op in ("gather", "scalar", "const")
