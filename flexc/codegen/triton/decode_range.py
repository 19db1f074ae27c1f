"""Masks that leave each query one range of keys, maybe with a gap: causal, sliding windows, sinks, lengths, and all of them together.

Of such a mask the split kernel needs no block map: the ends of the range are expressions of the row, evaluated on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from flexc.ir.graph import INT32, INT64, Graph, Node, const, input_node, inputs_of
from flexc.ir.ops import apply, cast

_PAST_ALL_KEYS = 2**31 - 1
_NEGATED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


@dataclass(frozen=True)
class KeyRange:
    """Ends of the range of keys that a row may see: from `first` on, below `stop`; and a gap in it, from `gap_first` on, below `gap_stop`.

    int64 nodes that do not read kv_idx; None for no end. A gap has both or is none.
    """

    first: Node | None = None
    stop: Node | None = None
    gap_first: Node | None = None
    gap_stop: Node | None = None

    def graph(self, whole: Graph) -> Graph:
        """The ends as outputs of their names, with the inputs of `whole`."""
        ends = ((f.name, getattr(self, f.name)) for f in fields(self))
        return Graph(tuple((name, node) for name, node in ends if node is not None), whole.tensors, whole.scalars, whole.lines)


def key_range(graph: Graph, *, partly: bool = False) -> KeyRange | None:
    """The range outside of which the mask of a graph is false; None if a part of it that reads kv_idx says more than a range does.

    Args:
        partly: leave such parts out: the mask is false outside of the range all the same, and maybe inside.
    """
    return None if graph.mask is None else _range(graph.mask, partly)


def _range(condition: Node, partly: bool = False) -> KeyRange | None:
    """Of all parts of a condition together; of several gaps one is as good as another. A row that sees no key has an empty range."""
    found, of_row, waiting = KeyRange(), None, [condition]
    while waiting:
        node = waiting.pop()
        if node.op == "and":
            waiting += node.args
        elif "kv_idx" not in inputs_of(node):
            of_row = _joined("and", of_row, node)
        else:
            part = _either(*node.args) if node.op == "or" else _compared(node)
            if part is not None and not (part.gap_first is not None and found.gap_first is not None):
                gap = found if part.gap_first is None else part
                first, stop = _joined("maximum", found.first, part.first), _joined("minimum", found.stop, part.stop)
                found = KeyRange(first, stop, gap.gap_first, gap.gap_stop)
            elif not partly:
                return None
    if of_row is None:
        return found
    stop = const(_PAST_ALL_KEYS, INT64) if found.stop is None else found.stop
    return replace(found, stop=apply("where", of_row, stop, const(0, INT64)))


def _joined(op: str, left: Node | None, right: Node | None) -> Node | None:
    """Both ends; one alone where the other is none."""
    return right if left is None else left if right is None else apply(op, left, right)


def _either(left: Node, right: Node) -> KeyRange | None:
    """Where one of two conditions holds: both with the same end open, or the keys before a gap and those behind it."""
    sides = [_range(side) for side in (left, right)]
    if any(side is None or side.gap_first is not None for side in sides):
        return None
    one, other = (side for side in sides if side is not None)
    if one.first is None and other.first is None and one.stop is not None and other.stop is not None:
        return KeyRange(None, apply("maximum", one.stop, other.stop))
    if one.first is not None:
        one, other = other, one
    if one.first is not None or one.stop is None or other.first is None:
        return None
    stop = None if other.stop is None else apply("maximum", one.stop, other.stop)
    return KeyRange(None, stop, one.stop, other.first)


def _compared(comparison: Node) -> KeyRange | None:
    """Where a comparison holds."""
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
    return KeyRange(*{"lt": (None, bound), "le": (None, after), "gt": (after, None), "ge": (bound, None), "eq": (bound, after)}[op])


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
