"""Masks that leave each query one range of keys: causal, sliding windows, lengths, and all of them together.

Of such a mask the split kernel needs no block map: the ends of the range are expressions of the row, evaluated on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexc.ir.graph import INT32, INT64, Graph, Node, const, input_node, inputs_of
from flexc.ir.ops import apply, cast

_NEGATED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


@dataclass(frozen=True)
class KeyRange:
    """Ends of the range of keys that a row may see: from `first` on, below `stop`. int64 nodes that do not read kv_idx; None for no end."""

    first: Node | None
    stop: Node | None

    def graph(self, whole: Graph) -> Graph:
        """The ends as the outputs "first" and "stop", with the inputs of `whole`."""
        ends = (("first", self.first), ("stop", self.stop))
        return Graph(tuple((name, node) for name, node in ends if node is not None), whole.tensors, whole.scalars, whole.lines)


def key_range(graph: Graph) -> KeyRange | None:
    """The range outside of which the mask of a graph is false; None if a part of it that reads kv_idx says more than a range does."""
    mask = graph.mask
    if mask is None:
        return None
    first: Node | None = None
    stop: Node | None = None
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node.op == "and":
            waiting += node.args
        elif "kv_idx" in inputs_of(node):
            ends = _ends(node)
            if ends is None:
                return None
            at_least, below = ends
            if at_least is not None:
                first = at_least if first is None else apply("maximum", first, at_least)
            if below is not None:
                stop = below if stop is None else apply("minimum", stop, below)
    return KeyRange(first, stop)


def _ends(comparison: Node) -> tuple[Node | None, Node | None] | None:
    """(at least, below) of kv_idx where a comparison holds."""
    if comparison.op not in _NEGATED:
        return None
    left, right = (_linear(side) for side in comparison.args)
    if left is None or right is None or abs(left[0] - right[0]) != 1:
        return None
    # kv_idx <op> bound, with both sides turned around where kv_idx is subtracted
    op, bound = comparison.op, apply("sub", right[1], left[1])
    if left[0] - right[0] < 0:
        op, bound = _NEGATED[op], apply("neg", bound)
    after = apply("add", bound, const(1, INT64))
    return {"lt": (None, bound), "le": (None, after), "gt": (after, None), "ge": (bound, None), "eq": (bound, after)}[op]


def _linear(node: Node) -> tuple[int, Node] | None:
    """(coefficient of kv_idx, the rest in int64), if the node is such a sum of integers."""
    if node.dtype not in (INT32, INT64):
        return None
    if node == input_node("kv_idx"):
        return 1, const(0, INT64)
    if "kv_idx" not in inputs_of(node):
        return 0, cast(node, INT64)
    if node.op == "cast":
        return _linear(node.args[0])
    if node.op == "neg":
        found = _linear(node.args[0])
        return None if found is None else (-found[0], apply("neg", found[1]))
    if node.op in ("add", "sub"):
        left, right = (_linear(side) for side in node.args)
        if left is not None and right is not None:
            sign = 1 if node.op == "add" else -1
            return left[0] + sign * right[0], apply(node.op, left[1], right[1])
    return None
