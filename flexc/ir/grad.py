"""Reverse-mode derivative of a graph, in IR terms.

A factor that only counts where a condition holds is kept as (factor, guard) and selected at the end, outside of everything that was
multiplied onto it. So `where(x > 0, sqrt(x), 0)` has derivative 0 where x is 0, not 0 * inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.ir.graph import Node, const, is_const, topological
from flexc.ir.ops import TABLE, apply, cast_vjp, has_trait


@dataclass(frozen=True)
class _Factor:
    """`value` where `guard` holds (None: everywhere), 0 elsewhere."""

    value: Node
    guard: Node | None

    def selected(self) -> Node:
        return self.value if self.guard is None else apply("where", self.guard, self.value, 0.0)


def gradient(output: Node, wrt: Sequence[Node]) -> list[Node | None]:
    """Factors d output / d node for each node of `wrt`, None where the output does not depend on it (or not differentiably).

    Nodes of `wrt` count as independent: nothing is differentiated through them. Indices of gathers have no gradient.

    Args:
        output: a float32 node.
        wrt: float32 nodes, for example the score input and gathers.
    """
    wanted = set(wrt)
    order = topological([output])
    reaching: set[Node] = set()  # nodes through which something of `wrt` reaches the output
    for node in order:
        if node in wanted or (node.op != "gather" and any(a in reaching for a in node.args)):
            reaching.add(node)
    factors: dict[Node, _Factor] = {output: _Factor(const(1.0), None)}
    for node in reversed(order):
        factor = factors.get(node)
        if factor is None or node not in reaching or node in wanted:
            continue
        for operand, given in zip(node.args, _pulled_back(node, factor.value), strict=True):
            if given is None or operand not in reaching:
                continue
            part = _guarded(given, factor.guard)
            factors[operand] = _sum(factors[operand], part) if operand in factors else part
    return [factors[node].selected() if node in factors and node in reaching else None for node in wrt]


def _pulled_back(node: Node, g: Node) -> Sequence[Node | None]:
    if node.op == "cast":
        return [cast_vjp(g, node.args[0].dtype)]
    vjp = TABLE[node.op].vjp
    return [None] * len(node.args) if vjp is None else vjp(g, node, *node.args)


def _guarded(value: Node, guard: Node | None) -> _Factor:
    """The factor with a selection against 0 at its root moved into the guard."""
    if has_trait(value, "select"):
        condition, taken, other = value.args
        if is_const(other, 0.0):
            return _Factor(taken, _both(guard, condition))
        if is_const(taken, 0.0):
            return _Factor(other, _both(guard, apply("not", condition)))
    return _Factor(value, guard)


def _both(a: Node | None, b: Node) -> Node:
    return b if a is None or a is b else apply("and", a, b)


def _sum(a: _Factor, b: _Factor) -> _Factor:
    if a.guard is b.guard:
        return _Factor(apply("add", a.value, b.value), a.guard)
    if a.guard is None or b.guard is None:
        return _Factor(apply("add", a.selected(), b.selected()), None)
    if _negates(b.guard, a.guard):
        return _Factor(apply("where", a.guard, a.value, b.value), None)
    if _negates(a.guard, b.guard):
        return _Factor(apply("where", b.guard, b.value, a.value), None)
    return _Factor(apply("add", a.selected(), b.selected()), apply("or", a.guard, b.guard))


def _negates(a: Node, b: Node) -> bool:
    return a.op == "not" and a.args[0] is b
