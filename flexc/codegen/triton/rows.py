"""One line per op: how it is spelled in Triton. `{0}`, `{1}`, … are the operands, already in the dtype that the op table demands.

A row is a function of (operands, node, facts) where the text depends on more: `facts` tells what bounds prove of an operand and which
forms the plan allows. Triton's `//` and `%` truncate on tensors, so floor forms are spelled out unless both operands are proved
non-negative; on scalars they follow C too once a value is not a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node


class Facts(Protocol):
    """What a row may ask while it is printed."""

    tanh: str  # which form of it: "hardware", "exp2" or "libdevice"
    interpreted: bool  # libdevice is missing

    def need(self, helper: str) -> str:
        """Record that the text uses a helper function, or libdevice; returns its name."""
        ...

    def must_be_exact(self, node: Node) -> bool:
        """Whether a step function (floor, a comparison, a cast to integer) reads the node, so that a last bit could decide."""
        ...

    def is_non_negative(self, node: Node) -> bool:
        """Whether bounds prove the node >= 0."""
        ...


Row = str | Callable[[Sequence[str], Node, Facts], str]

TRITON_DTYPES = {BOOL: "tl.int1", INT32: "tl.int32", INT64: "tl.int64", FLOAT32: "tl.float32"}


def _both_non_negative(node: Node, facts: Facts) -> bool:
    return all(facts.is_non_negative(a) for a in node.args)


def _truediv(x: Sequence[str], node: Node, facts: Facts) -> str:
    """Triton's `/` on float32 is good to two units in the last place; a step function needs the rounded quotient."""
    return f"tl.div_rn({x[0]}, {x[1]})" if facts.must_be_exact(node) else f"{x[0]} / {x[1]}"


def _floordiv(x: Sequence[str], node: Node, facts: Facts) -> str:
    if node.dtype == FLOAT32:
        return f"{facts.need('floor_quotient')}({x[0]}, {x[1]})"
    if _both_non_negative(node, facts):
        return f"{x[0]} // {x[1]}"
    return f"({x[0]} // {x[1]}) - tl.where((({x[0]} % {x[1]}) != 0) & (({x[0]} < 0) ^ ({x[1]} < 0)), 1, 0)"


def _floormod(x: Sequence[str], node: Node, facts: Facts) -> str:
    if node.dtype == FLOAT32:
        return f"{facts.need('floor_rest')}({x[0]}, {x[1]})"
    if _both_non_negative(node, facts):
        return f"{x[0]} % {x[1]}"
    return f"({x[0]} % {x[1]}) + tl.where((({x[0]} % {x[1]}) != 0) & (({x[0]} < 0) ^ ({x[1]} < 0)), {x[1]}, 0)"


def _tanh(x: Sequence[str], node: Node, facts: Facts) -> str:
    if facts.interpreted:
        return f"{facts.need('tanh_interpreted')}({x[0]})"
    if facts.tanh == "libdevice" or facts.must_be_exact(node):
        return f"{facts.need('libdevice')}.tanh({x[0]})"
    return f"{facts.need({'hardware': 'tanh_approx', 'exp2': 'tanh_exp2'}[facts.tanh])}({x[0]})"


def _helper(name: str) -> Row:
    return lambda x, node, facts: f"{facts.need(name)}({x[0]})"


def _libdevice(name: str, interpreted: str) -> Row:
    """A libdevice function, and a form for the interpreter that has none."""

    def row(x: Sequence[str], node: Node, facts: Facts) -> str:
        return interpreted.format(*x) if facts.interpreted else f"{facts.need('libdevice')}.{name}({', '.join(x)})"

    return row


TRITON_ROWS: dict[str, Row] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "truediv": _truediv,
    "floordiv": _floordiv,
    "floormod": _floormod,
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0)).to({dtype})",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
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
    "where": "tl.where({0}, {1}, {2})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": _libdevice("expm1", "tl.exp({0}) - 1.0"),
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": _libdevice("log1p", "tl.log(1.0 + {0})"),
    "sqrt": "tl.sqrt_rn({0})",
    "rsqrt": "tl.rsqrt({0})",
    "tanh": _tanh,
    "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))",  # small values keep their digits, for a logarithm; (1 + tanh.approx(x / 2)) / 2 loses them
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": _helper("round_even"),
    "trunc": _helper("truncate"),
    "pow": _libdevice("pow", "tl.exp2({1} * tl.log2({0}))"),
}


def spell(node: Node, operands: Sequence[str], facts: Facts) -> str:
    """The Triton expression of one op on operands that are names or literals (atoms: no brackets are added)."""
    row = TRITON_ROWS[node.op]
    if callable(row):
        return row(operands, node, facts)
    return row.format(*operands, dtype=TRITON_DTYPES[node.dtype])
