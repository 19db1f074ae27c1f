"""A mask hidden in the score function, split off.

Guarantees: where the new mask holds, the score is what it was; where it does not, the score was -inf (or NaN, where a NaN met -inf in a
sum). Found are `where(condition, score, -inf)` and its mirror image, nested ones, branches that differ, and sums, differences, negations
and products with a constant of such things at the root of the score. Leaves alone: conditions that read the score itself (a mask is a
matter of positions) and finite "large negative" numbers, which do not forbid a key when all keys have them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexc.ir.graph import Graph, Node, const, const_value, input_node, inputs_of, is_const, topological
from flexc.ir.ops import apply


def split_mask_from_score(graph: Graph) -> Graph:
    """The graph with the conditions under which the score is -inf moved into the mask; the same object if there are none."""
    if graph.score is None:
        return graph
    nodes = topological([graph.score])
    if not any(node.op == "const" and math.isinf(const_value(node)) for node in nodes):
        return graph
    splits = _Splits()
    for node in nodes:  # operands first, so that nothing nests deeply
        for infinity in (math.inf, -math.inf):
            splits.of(node, infinity)
    split = splits.of(graph.score, -math.inf)
    if split.allowed is None:
        return graph
    mask = split.allowed if graph.mask is None else apply("and", graph.mask, split.allowed)
    return graph.with_outputs(score=input_node("score") if split.value is None else split.value, mask=mask)


@dataclass(frozen=True)
class _Split:
    """`value` where `allowed` holds (None: everywhere), infinite elsewhere. `value` None: infinite everywhere."""

    value: Node | None
    allowed: Node | None


class _Splits:
    """What each node is apart from an infinity, found once for each."""

    def __init__(self) -> None:
        self._known: dict[tuple[Node, float], _Split] = {}

    def of(self, node: Node, infinity: float) -> _Split:
        """The node where it is not this infinity, and where that is."""
        found = self._known.get((node, infinity))
        if found is None:
            found = self._known[node, infinity] = self._found(node, infinity)
        return found

    def _found(self, node: Node, infinity: float) -> _Split:
        if is_const(node, infinity):
            return _Split(None, const(False))
        rule = _RULES.get(node.op)
        return (rule(self, node, infinity) if rule is not None else None) or _Split(node, None)


def _split_where(splits: _Splits, node: Node, infinity: float) -> _Split | None:
    condition, x, y = node.args
    if "score" in inputs_of(condition):
        return _split_on_score(splits, condition, x, y, infinity)
    a, b = splits.of(x, infinity), splits.of(y, infinity)
    if a.allowed is None and b.allowed is None:
        return None
    allowed = apply("where", condition, _or_true(a.allowed), _or_true(b.allowed), where=node.where)
    if a.value is None or b.value is None:
        return _Split(a.value or b.value, allowed)
    return _Split(apply("where", condition, a.value, b.value, where=node.where), allowed)


def _split_on_score(splits: _Splits, condition: Node, x: Node, y: Node, infinity: float) -> _Split | None:
    """The part of the condition that is a matter of positions, and what both branches forbid alike."""
    for op, branch, is_forbidden in (("and", x, is_const(y, infinity)), ("or", y, is_const(x, infinity))):
        parts = _chain(condition, op)
        of_positions = [p for p in parts if "score" not in inputs_of(p)]
        if not is_forbidden or not of_positions:
            continue
        of_score = _joined(op, [p for p in parts if "score" in inputs_of(p)])
        rest = apply("where", of_score, branch, infinity) if op == "and" else apply("where", of_score, infinity, branch)
        inner = splits.of(rest, infinity)
        positions = _joined(op, of_positions)
        return _Split(inner.value, _both(positions if op == "and" else apply("not", positions), inner.allowed))
    a, b = splits.of(x, infinity), splits.of(y, infinity)
    if a.allowed is None or a.allowed is not b.allowed:
        return None
    if a.value is None or b.value is None:
        return a
    return _Split(apply("where", condition, a.value, b.value), a.allowed)


def _split_sum(splits: _Splits, node: Node, infinity: float) -> _Split | None:
    x, y = node.args
    a, b = splits.of(x, infinity), splits.of(y, infinity if node.op == "add" else -infinity)
    if a.allowed is None and b.allowed is None:
        return None
    value = None if a.value is None or b.value is None else apply(node.op, a.value, b.value, where=node.where)
    return _Split(value, _both(a.allowed, b.allowed))


def _split_product(splits: _Splits, node: Node, infinity: float) -> _Split | None:
    x, factor = node.args
    if factor.op != "const" or not math.isfinite(const_value(factor)) or const_value(factor) == 0:
        return None
    a = splits.of(x, infinity if const_value(factor) > 0 else -infinity)
    if a.allowed is None:
        return None
    return _Split(None if a.value is None else apply("mul", a.value, factor, where=node.where), a.allowed)


def _split_negation(splits: _Splits, node: Node, infinity: float) -> _Split | None:
    a = splits.of(node.args[0], -infinity)
    if a.allowed is None:
        return None
    return _Split(None if a.value is None else apply("neg", a.value, where=node.where), a.allowed)


_RULES = {"where": _split_where, "add": _split_sum, "sub": _split_sum, "mul": _split_product, "neg": _split_negation}


def _or_true(condition: Node | None) -> Node:
    return const(True) if condition is None else condition


def _both(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return a if b is None else b
    return a if a is b else apply("and", a, b)


def _chain(node: Node, op: str) -> list[Node]:
    return [part for a in node.args for part in _chain(a, op)] if node.op == op else [node]


def _joined(op: str, parts: list[Node]) -> Node:
    joined = parts[0]
    for part in parts[1:]:
        joined = apply(op, joined, part)
    return joined
