"""Bounds of every value of a graph from bounds of its inputs: what block sparsity and guards are proved with.

Soundness first: an interval that is too wide costs time, one that is too narrow costs the answer. Intervals forget that two operands
move together; where sums share terms, the sum with like terms collected (`ir.affine`) is used as well: q_idx - start >= kv_idx - start is
decided as q_idx >= kv_idx, whatever start is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flexc.ir.affine import Affine, affine_form
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node, const_value, topological
from flexc.ir.interval import Interval
from flexc.ir.ops import TABLE, cast_bounds, has_trait

GatherBounds = Callable[[Node, list[Interval]], Interval]


def bounds(
    roots: Sequence[Node],
    inputs: dict[str, Interval],
    scalars: Sequence[Interval] = (),
    gather: GatherBounds | None = None,
) -> dict[Node, Interval]:
    """An interval for every node below the roots that holds each value the node can take.

    Vectorised: ends are float64 tensors that broadcast, for example q_idx [n, 1] and kv_idx [1, m] for n x m tiles.

    Args:
        inputs: intervals of score, batch, head, q_idx, kv_idx; a missing one can be anything.
        scalars: intervals of the run-time numbers, by slot.
        gather: (gather node, intervals of its indices) → interval of the element, for callers that know facts about the tensors. An
            index may be out of range, where the element reads as 0: the interval must hold that too. None: anything of the dtype.
    """
    known: dict[Node, Interval] = {}
    forms: dict[Node, Affine] = {}
    for node in topological(roots):
        found = _interval(node, [known[a] for a in node.args], inputs, scalars, gather).settled(node.dtype)
        if any(a.dtype in _INTEGER_RANGES for a in node.args):
            found = _with_terms_collected(node, found, known, forms)
        known[node] = found
    return known


def anything(dtype: str) -> Interval:
    """Every value of the dtype, NaN included."""
    if dtype == BOOL:
        return Interval.of(0.0, 1.0, dtype=BOOL)
    if dtype in (INT32, INT64):
        bits = 31 if dtype == INT32 else 63
        return Interval.of(-(2.0**bits), 2.0**bits - 1, dtype=dtype)
    return Interval.everything()


def _interval(
    node: Node, operands: list[Interval], inputs: dict[str, Interval], scalars: Sequence[Interval], gather: GatherBounds | None
) -> Interval:
    if node.op == "const":
        return Interval.point(float(const_value(node)))
    if node.op == "input":
        return inputs.get(node.attrs[0], anything(node.dtype))
    if node.op == "scalar":
        return scalars[node.attrs[0]] if node.attrs[0] < len(scalars) else anything(node.dtype)
    if node.op == "gather":
        return anything(node.dtype) if gather is None else gather(node, operands)
    if node.op == "cast":
        return cast_bounds(operands[0], node.args[0].dtype, node.dtype)
    twice = _TWICE.get(node.op)
    if twice is not None and node.args[0] is node.args[1]:
        return twice(operands[0])
    return TABLE[node.op].bounds(*operands)


def _with_terms_collected(node: Node, found: Interval, known: dict[Node, Interval], forms: dict[Node, Affine]) -> Interval:
    """The interval narrowed by the node's sum, or by the difference of what it compares, where like terms were collected."""
    operands = [affine_form(a, known=forms) for a in node.args]
    if node.dtype in _INTEGER_RANGES:
        form = affine_form(node, known=forms)
        if node in form.terms or sum(len(o.terms) for o in operands) <= len(form.terms):
            return found
        total = _sum(form, known)
        least, most = _INTEGER_RANGES[node.dtype]
        fits = (total.lo >= least) & (total.hi <= most)
        lo, hi = torch.where(fits, total.lo.maximum(found.lo), found.lo), torch.where(fits, total.hi.minimum(found.hi), found.hi)
        return Interval(lo, hi, False, node.dtype)
    if has_trait(node, "compare") and node.args[0].dtype in _INTEGER_RANGES:
        x, y = operands
        difference = x.plus(y, -1)
        if len(x.terms) + len(y.terms) <= len(difference.terms):
            return found
        least, most = _INTEGER_RANGES[node.args[0].dtype]
        sides = [_sum(x, known), _sum(y, known)]
        fits = torch.stack(torch.broadcast_tensors(*[(s.lo >= least) & (s.hi <= most) for s in sides])).all(0)
        zero = Interval(torch.zeros_like(found.lo), torch.zeros_like(found.lo), False, node.args[0].dtype)
        decided = TABLE[node.op].bounds(_sum(difference, known), zero)
        lo, hi = torch.where(fits, decided.lo.maximum(found.lo), found.lo), torch.where(fits, decided.hi.minimum(found.hi), found.hi)
        return Interval(lo, hi, False, BOOL)
    return found


# Sums of float64 are exact up to 2^53, so of int64 only that range is relied upon.
_INTEGER_RANGES = {INT32: (-(2.0**31), 2.0**31 - 1), INT64: (-(2.0**53), 2.0**53)}


def _sum(form: Affine, known: dict[Node, Interval]) -> Interval:
    """Bounds of the sum as an integer that never wraps."""
    lo = hi = torch.tensor(float(form.constant), dtype=torch.float64)
    for term, factor in form.terms.items():
        ends = known[term].lo * factor, known[term].hi * factor
        lo, hi = lo + torch.minimum(*ends), hi + torch.maximum(*ends)
    return Interval(lo, hi, False, INT64)


def _zero(x: Interval) -> Interval:
    return Interval(torch.zeros_like(x.lo), torch.zeros_like(x.hi), x.nan or (x.dtype == FLOAT32 and x.is_infinite))


def _square(x: Interval) -> Interval:
    product = TABLE["mul"].bounds(x, x)
    magnitude = TABLE["abs"].bounds(x)
    lo = TABLE["mul"].bounds(magnitude, magnitude).lo
    return Interval(lo.clamp(min=0), product.hi, x.nan)


def _true_unless_nan(x: Interval) -> Interval:
    one = torch.ones_like(x.lo)
    return Interval(torch.zeros_like(x.lo) if x.nan else one, one, False, BOOL)


def _false(x: Interval) -> Interval:
    return Interval(torch.zeros_like(x.lo), torch.zeros_like(x.hi), False, BOOL)


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
