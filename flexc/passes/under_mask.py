"""The score where the mask allows a pair: what the mask says of positions decides signs, comparisons and limits in the score.

Guarantees: for a pair that the mask allows, the score is what it was, bit for bit. For other pairs it may be anything: they have no weight
and no gradient. Found are masks with a conjunct such as `q_idx >= kv_idx` or `q_idx - kv_idx < 1024`, and in the score abs, sign, minimum,
maximum, comparisons of integers and casts of them: `abs(q_idx - kv_idx)` under a causal mask is `q_idx - kv_idx`. Leaves alone: indices of
captured tensors, which must stay inside for every pair, and everything that reads a tensor or a run-time number.
"""

from __future__ import annotations

from collections.abc import Iterator

from flexc.ir.affine import Affine, affine_form
from flexc.ir.graph import INT32, INT64, Graph, Node, const, make
from flexc.ir.ops import apply, cast

_INTEGERS = (INT32, INT64)
_LARGEST = 2**24  # coefficients and constants up to here: sums of positions do not wrap


def simplify_under_mask(graph: Graph) -> Graph:
    """The graph with the score simplified; the same object if the mask decides nothing in it."""
    if graph.score is None or graph.mask is None:
        return graph
    facts = list(_facts(graph.mask))
    if not facts:
        return graph
    return graph.with_outputs(score=_Simplifier(facts).of(graph.score))


def _facts(mask: Node) -> Iterator[Affine]:
    """Sums of positions that are 0 or more for every pair that the mask allows."""
    if mask.op == "and":
        for part in mask.args:
            yield from _facts(part)
    elif mask.op in ("lt", "le", "gt", "ge", "eq") and all(a.dtype in _INTEGERS for a in mask.args):
        x, y = (affine_form(a) for a in mask.args)
        difference = x.plus(y, -1)
        if not _is_of_positions(difference):
            return
        if mask.op in ("ge", "gt", "eq"):
            yield difference.plus(Affine(int(mask.op == "gt")), -1)
        if mask.op in ("le", "lt", "eq"):
            yield difference.times(-1).plus(Affine(int(mask.op == "lt")), -1)


def _is_of_positions(form: Affine) -> bool:
    small = all(abs(value) < _LARGEST for value in (form.constant, *form.terms.values()))
    return bool(form.terms) and small and all(term.op == "input" for term in form.terms)


class _Simplifier:
    """Rebuilds a score with what is known."""

    def __init__(self, facts: list[Affine]):
        self.facts = facts
        self._done: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """The node where the facts hold."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self._done:
                pending.pop()
                continue
            args = () if current.op == "gather" else current.args
            waiting = [a for a in args if a not in self._done]
            if waiting:
                pending.extend(waiting)
                continue
            new = tuple(self._done[a] for a in args) if args else current.args
            rebuilt = current if new == current.args else make(current.op, new, current.attrs, current.dtype, current.where)
            self._done[current] = self._simplified(rebuilt)
        return self._done[node]

    def _simplified(self, node: Node) -> Node:
        if node.op in ("abs", "sign") and node.args[0].dtype in _INTEGERS:
            (x,) = node.args
            low, high = self._range(affine_form(x))
            if node.op == "sign":
                value = 1 if low is not None and low > 0 else -1 if high is not None and high < 0 else None
                return node if value is None else const(value, node.dtype)
            if low is not None and low >= 0:
                return x
            return apply("neg", x, where=node.where) if high is not None and high <= 0 else node
        if node.op == "abs" and node.args[0].op == "cast" and node.args[0].args[0].dtype in _INTEGERS:
            whole = node.args[0].args[0]
            inner = self._simplified(apply("abs", whole, where=node.where))
            return node if inner.op == "abs" else cast(inner, node.dtype)
        if node.op in ("minimum", "maximum") and node.dtype in _INTEGERS:
            x, y = node.args
            low, high = self._range(affine_form(x).plus(affine_form(y), -1))
            if low is not None and low >= 0:
                return y if node.op == "minimum" else x
            return node if high is None or high > 0 else x if node.op == "minimum" else y
        if node.op in ("lt", "le", "gt", "ge", "eq", "ne") and all(a.dtype in _INTEGERS for a in node.args):
            truth = self._decided(node)
            return node if truth is None else const(truth)
        return node

    def _decided(self, node: Node) -> bool | None:
        x, y = (affine_form(a) for a in node.args)
        low, high = self._range(x.plus(y, -1))
        is_positive, is_negative = low is not None and low > 0, high is not None and high < 0
        is_0_or_more, is_0_or_less = low is not None and low >= 0, high is not None and high <= 0
        yes, no = {
            "gt": (is_positive, is_0_or_less), "ge": (is_0_or_more, is_negative), "lt": (is_negative, is_0_or_more),
            "le": (is_0_or_less, is_positive), "eq": (False, is_positive or is_negative), "ne": (is_positive or is_negative, False),
        }[node.op]  # fmt: skip
        return True if yes else False if no else None

    def _range(self, form: Affine) -> tuple[int | None, int | None]:
        """The least and the largest value of a sum of positions, where a fact tells."""
        if not _is_of_positions(form):
            return None, None
        lows = [form.constant - fact.constant for fact in self.facts if fact.terms == form.terms]
        opposite = form.times(-1)
        highs = [fact.constant - opposite.constant for fact in self.facts if fact.terms == opposite.terms]
        return max(lows, default=None), min(highs, default=None)
