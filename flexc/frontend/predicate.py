"""Expressions of run-time numbers as Python text, so that a guard can decide an `if` on them at every call."""

from __future__ import annotations

import math

from flexc.ir.graph import BOOL, FLOAT32, Node, const_value, topological

_TEXT = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "truediv": "({0} / {1})",
    "floordiv": "({0} // {1})",
    "floormod": "({0} % {1})",
    "pow": "({0} ** {1})",
    "neg": "(-{0})",
    "abs": "abs({0})",
    "minimum": "min({0}, {1})",
    "maximum": "max({0}, {1})",
    "and": "({0} & {1})",
    "or": "({0} | {1})",
    "xor": "({0} ^ {1})",
    "not": "(not {0})",
    "invert": "(~{0})",
    "shl": "({0} << {1})",
    "shr": "({0} >> {1})",
    "lt": "({0} < {1})",
    "le": "({0} <= {1})",
    "gt": "({0} > {1})",
    "ge": "({0} >= {1})",
    "eq": "({0} == {1})",
    "ne": "({0} != {1})",
    "where": "({1} if {0} else {2})",
    "exp": "math.exp({0})",
    "log": "math.log({0})",
    "log2": "math.log2({0})",
    "sqrt": "math.sqrt({0})",
    "floor": "float(math.floor({0}))",
    "ceil": "float(math.ceil({0}))",
}
_CAST = {BOOL: "bool({0})", FLOAT32: "float({0})"}
_LONGEST = 2000


def as_python(node: Node) -> str | None:
    """Python text over s0, s1, … (slots of scalars) with the node's value, or None where it cannot be said."""
    texts: dict[Node, str] = {}
    for n in topological([node]):
        operands = [texts[a] for a in n.args]
        if n.op == "scalar":
            text = f"s{n.attrs[0]}"
        elif n.op == "const":
            value = const_value(n)
            text = repr(value) if math.isfinite(value) else f"float('{value}')"
            text = f"({text})" if text.startswith("-") else text
        elif n.op == "cast":
            text = _CAST.get(n.dtype, "int({0})").format(*operands)
        elif n.op in _TEXT:
            text = _TEXT[n.op].format(*operands)
        else:
            return None
        if len(text) > _LONGEST:
            return None
        texts[n] = text
    return texts[node]


def evaluate(text: str, scalars: list[int | float]) -> bool | int | float | None:
    """The value of such a text for these numbers; None where Python raises."""
    try:
        return eval(text, {"math": math}, {f"s{slot}": value for slot, value in enumerate(scalars)})
    except (ArithmeticError, ValueError, TypeError):
        return None
