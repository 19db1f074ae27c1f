"""Bounds of every value of a graph from bounds of its inputs: what block sparsity and guards are proved with.

Soundness first: an interval that is too wide costs time, one that is too narrow costs the answer. Intervals forget that two operands
move together; where sums share terms, the sum with like terms collected (`ir.affine`) is used as well: q_idx - start >= kv_idx - start is
decided as q_idx >= kv_idx, whatever start is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from flexc.ir.affine import Affine, affine_form
from flexc.ir.graph import BOOL, FLOAT32, INT64, Node, const_value, topological
from flexc.ir.interval import INTEGER_ENDS, TRUSTED, Claim, Interval, both, either, unless
from flexc.ir.ops import TABLE, cast_bounds, has_trait

GatherBounds = Callable[[Node, list[Interval]], Interval]


def bounds(
    roots: Sequence[Node],
    inputs: dict[str, Interval],
    scalars: Sequence[Interval] = (),
    gather: GatherBounds | None = None,
    known: Mapping[Node, Interval] | None = None,
) -> dict[Node, Interval]:
    """An interval for every node below the roots that holds each value the node can take.

    Vectorised: ends are float64 tensors that broadcast, for example q_idx [n, 1] and kv_idx [1, m] for n x m tiles. Pure dataflow: no
    decision waits for a tensor's value.

    Args:
        inputs: intervals of score, batch, head, q_idx, kv_idx; a missing one can be anything.
        scalars: intervals of the run-time numbers, by slot.
        gather: (gather node, intervals of its indices) → interval of the element, for callers that know facts about the tensors. An
            index may be out of range, where the element reads as 0: the interval must hold that too. None: anything of the dtype.
        known: intervals found before. What only they need is not evaluated; they are looked up when they are needed, once each.
    """
    evaluation = _Evaluation(inputs, scalars, gather, known or {})
    for root in roots:
        evaluation.of(root)
    return evaluation.found


def anything(dtype: str) -> Interval:
    """Every value of the dtype, NaN included."""
    if dtype == BOOL:
        return Interval.of(False, True, dtype=BOOL)
    return Interval.everything() if dtype == FLOAT32 else Interval.of(*INTEGER_ENDS[dtype], dtype=dtype)


class _Evaluation:
    def __init__(
        self, inputs: dict[str, Interval], scalars: Sequence[Interval], gather: GatherBounds | None, known: Mapping[Node, Interval]
    ):
        self.inputs, self.scalars, self.gather, self.known = inputs, scalars, gather, known
        self.found: dict[Node, Interval] = {}
        self.forms: dict[Node, Affine] = {}

    def of(self, root: Node) -> Interval:
        """The root's interval; those of all nodes that it needs are in `found`."""
        if root in self.found:
            return self.found[root]
        order, needed = _below(root), {root}
        for node in reversed(order):
            if node in needed and node not in self.known:
                needed.update(node.args)
        for node in order:
            if node in needed and node not in self.found:
                self.found[node] = self.known[node] if node in self.known else self._evaluated(node)
        return self.found[root]

    def _evaluated(self, node: Node) -> Interval:
        plain = self._plain(node).settled(node.dtype)
        if not any(a.dtype in TRUSTED for a in node.args):
            return plain
        if node.dtype in TRUSTED:
            return self._narrowed_sum(node, plain)
        return self._narrowed_comparison(node, plain) if has_trait(node, "compare") and node.args[0].dtype in TRUSTED else plain

    def _plain(self, node: Node) -> Interval:
        """By the node's row alone."""
        if node.op == "const":
            return Interval.point(float(const_value(node)))
        if node.op == "input":
            return self.inputs.get(node.attrs[0], anything(node.dtype))
        if node.op == "scalar":
            return self.scalars[node.attrs[0]] if node.attrs[0] < len(self.scalars) else anything(node.dtype)
        operands = [self.found[a] for a in node.args]
        if node.op == "gather":
            return anything(node.dtype) if self.gather is None else self.gather(node, operands)
        if node.op == "cast":
            return cast_bounds(operands[0], node.args[0].dtype, node.dtype)
        twice = _TWICE.get(node.op)
        if twice is not None and node.args[0] is node.args[1]:
            return twice(operands[0])
        return TABLE[node.op].bounds(*operands)

    # --- like terms collected ---

    def _narrowed_sum(self, node: Node, plain: Interval) -> Interval:
        form = self._form(node)
        if node in form.terms or sum(len(self._form(a).terms) for a in node.args) <= len(form.terms):
            return plain
        total, exact = self._sum(form)
        fits = both(exact, _fits(total, node.dtype))
        if fits is True:
            return Interval(total.lo, total.hi, False, node.dtype, total.least, total.most)
        lo = unless(fits, torch.maximum(total.lo, plain.lo), plain.lo)
        hi = unless(fits, torch.minimum(total.hi, plain.hi), plain.hi)
        return Interval(lo, hi, False, node.dtype, plain.least, plain.most)

    def _narrowed_comparison(self, node: Node, plain: Interval) -> Interval:
        """By the difference of the two sides: certain where either way is, possible where both are."""
        x, y = (self._form(a) for a in node.args)
        difference = x.plus(y, -1)
        if len(x.terms) + len(y.terms) <= len(difference.terms):
            return plain
        total, fits = self._sum(difference)
        for side, exact in map(self._sum, (x, y)):
            fits = both(fits, both(exact, _fits(side, node.args[0].dtype)))
        decided = TABLE[node.op].bounds(total, Interval.point(0.0).settled(INT64))
        return Interval.truth(unless(fits, plain.lo | decided.lo, plain.lo), unless(fits, plain.hi & decided.hi, plain.hi))

    def _form(self, node: Node) -> Affine:
        return affine_form(node, known=self.forms)

    def _sum(self, form: Affine) -> tuple[Interval, Claim]:
        """Bounds of the sum as an integer that never wraps, and where float64 did not round them."""
        total = Interval.point(float(form.constant)).settled(INT64)
        exact: Claim = True
        for term, factor in form.terms.items():
            scaled = self.of(term) if abs(factor) == 1 else TABLE["mul"].bounds(self.of(term), Interval.point(float(factor)))
            total = TABLE["sub" if factor == -1 else "add"].bounds(total, scaled)
            total = Interval(total.lo, total.hi, False, INT64, total.least, total.most)
            exact = both(exact, _fits(total, INT64))
        return total, exact


_orders: WeakKeyDictionary[Node, list[Node]] = WeakKeyDictionary()


def _below(root: Node) -> list[Node]:
    """The root and all nodes below it, operands first: squares of every size ask for the same few roots."""
    found = _orders.get(root)
    if found is None:
        found = _orders[root] = topological([root])[:-1]  # the root itself would keep its entry alive
    return [*found, root]


def _fits(x: Interval, dtype: str) -> Claim:
    """Where a sum that does not wrap has the value of the integer of this dtype."""
    least, most = TRUSTED[dtype]
    return True if least <= x.least and x.most <= most else (x.lo >= least) & (x.hi <= most)


def _zero(x: Interval) -> Interval:
    return Interval(torch.zeros_like(x.lo), torch.zeros_like(x.lo), either(x.nan, x.is_infinite), FLOAT32, 0.0, 0.0)


def _square(x: Interval) -> Interval:
    product = TABLE["mul"].bounds(x, x)
    magnitude = TABLE["abs"].bounds(x)
    lo = TABLE["mul"].bounds(magnitude, magnitude).lo
    return Interval(lo.clamp(min=0), product.hi, product.nan).with_range(max(product.least, 0.0), product.most)


def _true_unless_nan(x: Interval) -> Interval:
    possible = torch.full_like(x.lo, True, dtype=torch.bool)
    return Interval.truth(unless(x.nan, False, possible), possible)


def _false(x: Interval) -> Interval:
    never = torch.full_like(x.lo, False, dtype=torch.bool)
    return Interval.truth(never, never)


# Where both operands are one node, intervals alone would forget that they move together.
_TWICE: dict[str, Callable[[Interval], Interval]] = {
    "sub": _zero,
    "mul": _square,
    "eq": _true_unless_nan,
    "le": _true_unless_nan,
    "ge": _true_unless_nan,
    "lt": _false,
    "gt": _false,
}
