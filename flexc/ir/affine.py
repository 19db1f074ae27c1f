"""Integer nodes as a sum: constant + coefficient * term + …, the terms being positions and nodes that are not sums themselves.

Integers wrap around, and so do these sums: a node and its sum agree modulo 2^32 (2^64 for int64), and agree exactly where the sum fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flexc.ir.graph import INT32, INT64, Node, const_value


@dataclass(frozen=True)
class Affine:
    """constant + sum of coefficient * term. Terms with coefficient 0 are left out."""

    constant: int = 0
    terms: dict[Node, int] = field(default_factory=dict)

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """This sum plus `factor` times the other."""
        terms = dict(self.terms)
        for term, coefficient in other.terms.items():
            terms[term] = terms.get(term, 0) + factor * coefficient
        return Affine(self.constant + factor * other.constant, {t: c for t, c in terms.items() if c != 0})

    def times(self, factor: int) -> Affine:
        """`factor` times this sum."""
        return Affine().plus(self, factor)

    def coefficient(self, name: str) -> int:
        """Of one of the inputs batch, head, q_idx, kv_idx; 0 if it does not occur as a term."""
        return sum(c for t, c in self.terms.items() if t.op == "input" and t.attrs[0] == name)

    @property
    def rest(self) -> dict[Node, int]:
        """The terms that are not inputs."""
        return {t: c for t, c in self.terms.items() if t.op != "input"}


def affine_form(node: Node, through_casts: bool = False, known: dict[Node, Affine] | None = None) -> Affine:
    """The integer node as a sum. A node of another kind is a sum of itself.

    Args:
        through_casts: look through casts from int32 to int64, too. The sum is then that of integers that never wrap.
        known: forms of nodes found before, shared between calls with the same `through_casts`.
    """
    known = {} if known is None else known
    pending = [node]
    while pending:
        current = pending[-1]
        if current in known:
            pending.pop()
            continue
        if current.dtype not in (INT32, INT64):
            known[current] = Affine(0, {current: 1})
            continue
        rule = _RULES.get(current.op)
        if current.op == "cast" and through_casts and current.args[0].dtype == INT32:
            rule = _same
        waiting = [a for a in current.args if a not in known] if rule is not None else []
        if waiting:
            pending.extend(waiting)
            continue
        form = rule(current, [known[a] for a in current.args]) if rule is not None else None
        known[current] = Affine(0, {current: 1}) if form is None else form
    return known[node]


def _same(node: Node, operands: list[Affine]) -> Affine:
    return operands[0]


def _product(node: Node, operands: list[Affine]) -> Affine | None:
    for factor, other in (operands, operands[::-1]):
        if not factor.terms:
            return other.times(factor.constant)
    return None


def _shifted(node: Node, operands: list[Affine]) -> Affine | None:
    by = operands[1]
    return operands[0].times(2**by.constant) if not by.terms and 0 <= by.constant < 31 else None


_RULES: dict[str, Callable[[Node, list[Affine]], Affine | None]] = {
    "const": lambda node, operands: Affine(int(const_value(node))),
    "add": lambda node, operands: operands[0].plus(operands[1]),
    "sub": lambda node, operands: operands[0].plus(operands[1], -1),
    "neg": lambda node, operands: operands[0].times(-1),
    "mul": _product,
    "shl": _shifted,
}
