"""Powers: exact where the exponent is a small whole number, and whole where base and exponent are."""

from __future__ import annotations

from typing import Any

from flexc.frontend.session import current, is_scalar_only
from flexc.frontend.symbol import Symbol, call, cast, node_of
from flexc.ir.graph import BOOL, FLOAT32, INT32, Node, const, const_value, is_const


def power(base: Any, exponent: Any) -> Symbol:
    """base ** exponent. Small whole exponents multiply; powers of two of whole numbers shift; both are exact, unlike `pow`."""
    b, e = node_of(base), node_of(exponent)
    session = current()
    if session is not None and e.dtype != FLOAT32 and is_scalar_only(e):
        session.pin(e)  # a whole exponent decides how the power is computed
    if e.op == "const" and e.dtype != BOOL:
        value = const_value(e)
        if abs(value) <= 16 and value == int(value):
            if b.dtype != FLOAT32 and (e.dtype == FLOAT32 or value < 0):
                base = cast(base, FLOAT32)
            product = _repeated(base, abs(int(value)))
            return product if value >= 0 else call("truediv", 1.0, product)
        if value == 0.5:
            return call("sqrt", base)
        if value == -0.5:
            return call("rsqrt", base)
    if b.dtype == FLOAT32 or e.dtype == FLOAT32:
        return call("exp2", exponent) if is_const(b, 2) else call("pow", base, exponent)
    if not is_nonnegative(e):
        return call("exp2", exponent) if is_const(b, 2) else call("pow", base, exponent)
    if is_const(b, 2):
        return call("shl", 1, exponent)
    return cast(call("round", call("pow", base, exponent)), INT32)


def _repeated(base: Any, times: int) -> Symbol:
    if times == 0:
        return Symbol(const(1.0 if node_of(base).dtype == FLOAT32 else 1))
    result: Any = None
    square = base
    while times:
        if times & 1:
            result = square if result is None else call("mul", result, square)
        times >>= 1
        if times:
            square = call("mul", square, square)
    return result if isinstance(result, Symbol) else Symbol(node_of(result))


def is_nonnegative(node: Node) -> bool:
    """Whether the node is certainly not negative, as far as its shape tells: positions are not."""
    if node.op == "const":
        return const_value(node) >= 0
    if node.op == "input":
        return node.attrs[0] != "score"
    if node.op in ("add", "mul", "floordiv", "floormod", "minimum", "maximum", "shr"):
        return all(map(is_nonnegative, node.args))
    return node.op == "abs" or (node.op == "cast" and is_nonnegative(node.args[0]))
