"""A node as mathematics, for people: sums collected, logic simplified. Nothing is compiled from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexc.ir.affine import Affine, affine_form
from flexc.ir.graph import BOOL, FLOAT32, Node, const_value, topological
from flexc.ir.text import format_float, format_node

__all__ = ["Affine", "affine_form", "as_mathematics"]

_LARGEST = 150  # nodes; beyond, sympy takes longer than a reader would wait
_MOST_CONDITIONS = 6  # that logic is simplified over: the work doubles with each

_SYMBOLS = {"<": "<", "<=": "≤", ">": ">", ">=": "≥", "==": "=", "!=": "≠"}


def as_mathematics(node: Node, tensors: Sequence[str] = (), scalars: Sequence[str] = ()) -> str:
    """The node on one line, for example "kv_idx ≤ q_idx ∧ q_idx - kv_idx < width".

    Args:
        tensors, scalars: names of the captured tensors and run-time numbers by slot.
    """
    if len(topological([node])) > _LARGEST:
        return format_node(node, tensors, scalars)
    import sympy  # takes longer to import than a kernel to trace

    expression = _to_sympy(node, tensors, scalars)
    if node.dtype == BOOL and len(expression.atoms(sympy.core.relational.Relational)) <= _MOST_CONDITIONS:
        expression = sympy.logic.boolalg.simplify_logic(expression, deep=False)
    return _printer().doprint(expression)


def _to_sympy(root: Node, tensors: Sequence[str], scalars: Sequence[str]) -> Any:
    import sympy

    done: dict[Node, Any] = {}
    for node in topological([root]):
        args = [done[a] for a in node.args]
        if node.op == "const":
            value = const_value(node)
            if node.dtype == BOOL:
                done[node] = sympy.true if value else sympy.false
            else:
                done[node] = sympy.Float(format_float(value)) if node.dtype == FLOAT32 else sympy.Integer(value)
        elif node.op == "input":
            is_position = node.dtype != FLOAT32
            done[node] = sympy.Symbol(node.attrs[0], real=True, integer=is_position or None, nonnegative=is_position or None)
        elif node.op == "scalar":
            slot = node.attrs[0]
            name = scalars[slot] if slot < len(scalars) else f"s{slot}"
            done[node] = sympy.Symbol(name, real=True, integer=node.dtype != FLOAT32 or None)
        elif node.op == "gather":
            slot = node.attrs[0]
            name = tensors[slot] if slot < len(tensors) else f"t{slot}"
            if node.dtype == BOOL:
                done[node] = sympy.Symbol(f"{name}[{', '.join(map(_printer().doprint, args))}]")
            else:
                base: Any = sympy.IndexedBase(name, real=True)
                done[node] = base[tuple(args)] if args else sympy.Symbol(name, real=True)
        elif node.op == "cast":
            done[node] = _cast(node, args[0])
        else:
            key = node.op if node.dtype != BOOL or node.op not in ("and", "or", "xor", "where") else f"bool {node.op}"
            rule = _sympy_rules().get(key)
            done[node] = sympy.Function(node.op)(*args) if rule is None else rule(*args)
    return done[root]


def _cast(node: Node, operand: Any) -> Any:
    import sympy

    source = node.args[0].dtype
    if source == BOOL:
        return sympy.Piecewise((1, operand), (0, True))
    if node.dtype == BOOL:
        return sympy.Ne(operand, 0)
    return sympy.Function("trunc")(operand) if source == FLOAT32 else operand


def _sympy_rules() -> dict[str, Any]:
    import sympy as sp

    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "truediv": lambda a, b: a / b,
        "floordiv": lambda a, b: sp.floor(a / b),
        "floormod": sp.Mod,
        "neg": lambda a: -a,
        "abs": sp.Abs,
        "sign": sp.sign,
        "minimum": sp.Min,
        "maximum": sp.Max,
        "shl": lambda a, b: a * 2**b,
        "shr": lambda a, b: sp.floor(a / 2**b),
        "not": sp.Not,
        "bool and": sp.And,
        "bool or": sp.Or,
        "bool xor": sp.Xor,
        "bool where": sp.ITE,
        "lt": sp.Lt,
        "le": sp.Le,
        "gt": sp.Gt,
        "ge": sp.Ge,
        "eq": lambda a, b: sp.Equivalent(a, b) if a.is_Boolean or b.is_Boolean else sp.Eq(a, b),
        "ne": lambda a, b: sp.Xor(a, b) if a.is_Boolean or b.is_Boolean else sp.Ne(a, b),
        "where": lambda c, a, b: sp.Piecewise((a, c), (b, True)),
        "exp": sp.exp,
        "log": sp.log,
        "sqrt": sp.sqrt,
        "rsqrt": lambda a: 1 / sp.sqrt(a),
        "tanh": sp.tanh,
        "sin": sp.sin,
        "cos": sp.cos,
        "floor": sp.floor,
        "ceil": sp.ceiling,
        "pow": lambda a, b: a**b,
    }


def _printer() -> Any:
    from sympy.printing.str import StrPrinter

    class Printer(StrPrinter):
        """Positive terms first, logic in symbols."""

        def _print_Add(self, expr: Any, order: Any = None) -> str:
            terms = sorted(self._as_ordered_terms(expr, order=order), key=lambda term: term.could_extract_minus_sign())
            text = self.parenthesize(terms[0], 35)
            for term in terms[1:]:
                negative = term.could_extract_minus_sign()
                text += f" {'-' if negative else '+'} {self.parenthesize(-term if negative else term, 36)}"
            return text

        def _print_Relational(self, expr: Any) -> str:
            return f"{self._print(expr.lhs)} {_SYMBOLS[expr.rel_op]} {self._print(expr.rhs)}"

        def _joined(self, expr: Any, symbol: str) -> str:
            parts = sorted(expr.args, key=str)
            return f" {symbol} ".join(
                f"({self._print(p)})" if p.is_Boolean and (p.func.__name__ in ("And", "Or")) else self._print(p) for p in parts
            )

        def _print_And(self, expr: Any) -> str:
            return self._joined(expr, "∧")

        def _print_Or(self, expr: Any) -> str:
            return self._joined(expr, "∨")

        def _print_Xor(self, expr: Any) -> str:
            return self._joined(expr, "⊕")

        def _print_Not(self, expr: Any) -> str:
            return f"¬({self._print(expr.args[0])})"

        def _print_Piecewise(self, expr: Any) -> str:
            pieces = [self._print(value) + ("" if condition == True else f" if {self._print(condition)}") for value, condition in expr.args]  # noqa: E712
            return f"({' else '.join(pieces)})"

    return Printer({"full_prec": False})
