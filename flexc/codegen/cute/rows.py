"""One line per op: how it is spelled in the CuTe DSL. `{0}`, `{1}`, … are the operands, already in the dtype that the op table demands.

A row is a function of (operands, node, facts) where the text depends on more: `facts` tells what bounds prove of an operand and which
forms the plan allows. The DSL's `//` floors, its `%` truncates, and its `/` on float32 is a division rounded to nearest, which takes some
eight instructions. A choice between two values converts both first: the DSL does not. What is called `tiles.…` is in
`flexc.runtime.cute_tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node, const_value


class Facts(Protocol):
    """What a row may ask while it is printed."""

    approximate: bool  # hardware approximations are allowed
    exact: bool  # none at all, not even of exp and of quotients

    def must_be_exact(self, node: Node) -> bool:
        """Whether a step function (floor, a comparison, a cast to integer) reads the node, so that a last bit could decide."""
        ...

    def is_non_negative(self, node: Node) -> bool:
        """Whether bounds prove the node >= 0."""
        ...


Row = str | Callable[[Sequence[str], Node, Facts], str]

CUTE_DTYPES = {BOOL: "Boolean", INT32: "Int32", INT64: "Int64", FLOAT32: "Float32"}


def _truediv(x: Sequence[str], node: Node, facts: Facts) -> str:
    """By the reciprocal, good to two units in the last place, unless a step function needs the rounded quotient."""
    if facts.exact or facts.must_be_exact(node):
        return f"Float32({x[0]}) / Float32({x[1]})"
    return f"{x[0]} * tiles.reciprocal({x[1]})"


def _floordiv(x: Sequence[str], node: Node, facts: Facts) -> str:
    if node.dtype == FLOAT32:
        return f"tiles.floor_quotient({x[0]}, {x[1]})"
    return f"{x[0]} // {x[1]}"


def _floormod(x: Sequence[str], node: Node, facts: Facts) -> str:
    if node.dtype == FLOAT32:
        return f"tiles.floor_rest({x[0]}, {x[1]})"
    if all(facts.is_non_negative(a) for a in node.args):
        return f"{x[0]} % {x[1]}"
    return f"{x[0]} - ({x[0]} // {x[1]}) * {x[1]}"


def _where(x: Sequence[str], node: Node, facts: Facts) -> str:
    if node.args[0].op == "const":
        return f"{CUTE_DTYPES[node.dtype]}({x[1] if const_value(node.args[0]) else x[2]})"
    dtype = CUTE_DTYPES[node.dtype]
    return f"tiles.choose({x[0]}, {dtype}({x[1]}), {dtype}({x[2]}))"


def _sign(x: Sequence[str], node: Node, facts: Facts) -> str:
    dtype = CUTE_DTYPES[node.dtype]
    return f"{dtype}({x[0]} > 0) - {dtype}({x[0]} < 0)"


def _extreme(name: str) -> Row:
    """Of floats the one that hands NaN on; of integers the DSL's own."""

    def row(x: Sequence[str], node: Node, facts: Facts) -> str:
        if node.dtype == FLOAT32:
            return f"tiles.{name}({x[0]}, {x[1]})"
        dtype = CUTE_DTYPES[node.dtype]
        return f"cutlass.{name[:3]}({dtype}({x[0]}), {dtype}({x[1]}))"

    return row


def _bits(sign: str, word: str) -> Row:
    """Truth values of the DSL know `&`, `|` and `^` among themselves only."""

    def row(x: Sequence[str], node: Node, facts: Facts) -> str:
        return f"Boolean({x[0]}) {sign} Boolean({x[1]})" if node.dtype == BOOL and _has_literal(node) else f"{x[0]} {sign} {x[1]}"

    return row


def _has_literal(node: Node) -> bool:
    return any(a.op == "const" for a in node.args)


def _function(precise: str, fast: str) -> Row:
    """A function of one number: by the special-function unit, or with all its digits where nothing may be approximated."""

    def row(x: Sequence[str], node: Node, facts: Facts) -> str:
        return (precise if facts.exact or facts.must_be_exact(node) else fast).format(f"Float32({x[0]})")

    return row


def _tanh(x: Sequence[str], node: Node, facts: Facts) -> str:
    """tanh.approx.f32: relative error 2^-11, below what rounding scores to bf16 costs eager PyTorch."""
    if facts.approximate and not facts.must_be_exact(node):
        return f"tiles.tanh_approx({x[0]})"
    return f"cute.math.tanh(Float32({x[0]}))"


CUTE_ROWS: dict[str, Row] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "truediv": _truediv,
    "floordiv": _floordiv,
    "floormod": _floormod,
    "neg": "-{0}",
    "abs": "tiles.absolute({0})",
    "sign": _sign,
    "minimum": _extreme("minimum"),
    "maximum": _extreme("maximum"),
    "and": _bits("&", "and"),
    "or": _bits("|", "or"),
    "xor": _bits("^", "xor"),
    "not": "{0} == 0",
    "invert": "~{0}",
    "shl": "{0} << {1}",
    "shr": "{0} >> {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "where": _where,
    "exp": _function("cute.math.exp({0})", "cute.math.exp({0}, fastmath=True)"),
    "exp2": _function("cute.math.exp2({0})", "cute.math.exp2({0}, fastmath=True)"),
    "expm1": "tiles.expm1({0})",
    "log": _function("cute.math.log({0})", "cute.math.log({0}, fastmath=True)"),
    "log2": _function("cute.math.log2({0})", "cute.math.log2({0}, fastmath=True)"),
    "log1p": "tiles.log1p({0})",
    "sqrt": "cute.math.sqrt(Float32({0}))",
    "rsqrt": _function("1.0 / cute.math.sqrt({0})", "cute.math.rsqrt({0}, fastmath=True)"),
    "tanh": _tanh,
    # Small values keep their digits, for a logarithm; (1 + tanh.approx(x / 2)) / 2 loses them.
    "sigmoid": _function("1.0 / (1.0 + cute.math.exp(-{0}))", "tiles.reciprocal(1.0 + cute.math.exp(-{0}, fastmath=True))"),
    "erf": "cute.math.erf(Float32({0}))",
    "sin": "cute.math.sin(Float32({0}))",
    "cos": "cute.math.cos(Float32({0}))",
    "floor": "tiles.floor({0})",
    "ceil": "tiles.ceil({0})",
    "round": "tiles.round_even({0})",
    "trunc": "tiles.truncate({0})",
    "pow": "tiles.power({0}, {1})",
}


def spell(node: Node, operands: Sequence[str], facts: Facts) -> str:
    """The DSL's expression of one op on operands that are names or literals (atoms: no brackets are added)."""
    row = CUTE_ROWS[node.op]
    if callable(row):
        return row(operands, node, facts)
    return row.format(*operands)
