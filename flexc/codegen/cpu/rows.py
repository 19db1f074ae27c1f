"""One row per op: how the CPU backend spells it in PyTorch.

A row is a template over operand texts, or a function of (node, operand texts) where the text depends on dtypes or constants. A template
that starts with an operand or a sign is an operator: the emitter puts compound operands of it in parentheses. Constants arrive as Python
numbers, at least one operand as a tensor expression. `IN_PLACE` holds, for the ops that have one, the spelling that overwrites the first
operand, which the emitter uses on a tile whose old value nobody needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node, const_value, is_const
from flexc.ir.ops import STRUCTURAL, TABLE

Row = str | Callable[[Node, Sequence[str]], str]

FLOAT = "FLOAT"  # the module's name for the dtype it computes in
TORCH_NAMES = {BOOL: "torch.bool", INT32: "torch.int32", INT64: "torch.int64", FLOAT32: FLOAT}


def literal(node: Node) -> str:
    """A constant as Python text: the shortest number that rounds to the same float32."""
    value = const_value(node)
    if not isinstance(value, float):
        return repr(value)
    if math.isnan(value):
        return "math.nan"
    if math.isinf(value):
        return "math.inf" if value > 0 else "-math.inf"
    return repr(float(str(np.float32(value))))


def lifted(node: Node) -> str:
    """A constant as a 0-d tensor, for where PyTorch wants one."""
    return f"torch.tensor({literal(node)}, dtype={TORCH_NAMES[node.dtype]})"


def _bound(name: str, keyword: str, suffix: str = "") -> Callable[[Node, Sequence[str]], str]:
    """torch.minimum and torch.maximum take no Python number; clamp means the same."""

    def row(node: Node, x: Sequence[str]) -> str:
        a, b = node.args
        if b.op == "const":
            return f"{x[0]}.clamp{suffix}({keyword}={x[1]})"
        if a.op == "const" and not suffix:
            return f"{x[1]}.clamp({keyword}={x[0]})"
        return f"torch.{name}({x[0]}, {x[1]})" if not suffix else f"torch.{name}({x[0]}, {x[1]}, out={x[0]})"

    return row


def _divided(operator: str) -> Callable[[Node, Sequence[str]], str]:
    """Python's operators on tensors floor, as the op does. An integer divisor of 0 counts as 1, so that nothing faults."""

    def row(node: Node, x: Sequence[str]) -> str:
        divisor = node.args[1]
        if divisor.dtype == FLOAT32 or (divisor.op == "const" and not is_const(divisor, 0)):
            return f"{x[0]} {operator} {x[1]}"
        if divisor.op == "const":
            return f"{x[0]} {operator} 1"
        return f"{x[0]} {operator} torch.where({x[1]} == 0, 1, {x[1]})"

    return row


def _where(node: Node, x: Sequence[str]) -> str:
    """The condition must be a tensor, and two Python numbers as branches would get PyTorch's default dtype."""
    c, a, b = node.args
    condition = lifted(c) if c.op == "const" else x[0]
    then = lifted(a) if a.op == "const" and b.op == "const" else x[1]
    return f"torch.where({condition}, {then}, {x[2]})"


CPU_ROWS: dict[str, Row] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "truediv": "{0} / {1}",
    "floordiv": _divided("//"),
    "floormod": _divided("%"),
    "neg": "-{0}",
    "abs": "torch.abs({0})",
    "sign": "torch.sign({0})",
    "minimum": _bound("minimum", "max"),
    "maximum": _bound("maximum", "min"),
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
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
    "exp": "torch.exp({0})",
    "exp2": "torch.exp2({0})",
    "expm1": "torch.expm1({0})",
    "log": "torch.log({0})",
    "log2": "torch.log2({0})",
    "log1p": "torch.log1p({0})",
    "sqrt": "torch.sqrt({0})",
    "rsqrt": "torch.rsqrt({0})",
    "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})",
    "erf": "torch.erf({0})",
    "sin": "torch.sin({0})",
    "cos": "torch.cos({0})",
    "floor": "torch.floor({0})",
    "ceil": "torch.ceil({0})",
    "round": "torch.round({0})",
    "trunc": "torch.trunc({0})",
    "pow": "torch.pow({0}, {1})",
    "cast": lambda node, x: f"{x[0]}.to({TORCH_NAMES[node.dtype]})",
    "gather": lambda node, x: f"_load({', '.join(x)})",  # the tensor, then one index for each of its dimensions
}

IN_PLACE: dict[str, Row] = {
    "add": "{0}.add_({1})",
    "sub": "{0}.sub_({1})",
    "mul": "{0}.mul_({1})",
    "truediv": "{0}.div_({1})",
    "neg": "{0}.neg_()",
    "abs": "{0}.abs_()",
    "minimum": _bound("minimum", "max", "_"),
    "maximum": _bound("maximum", "min", "_"),
    "exp": "{0}.exp_()",
    "exp2": "{0}.exp2_()",
    "expm1": "{0}.expm1_()",
    "log": "{0}.log_()",
    "log2": "{0}.log2_()",
    "log1p": "{0}.log1p_()",
    "sqrt": "{0}.sqrt_()",
    "rsqrt": "{0}.rsqrt_()",
    "tanh": "{0}.tanh_()",
    "sigmoid": "{0}.sigmoid_()",
    "erf": "{0}.erf_()",
    "sin": "{0}.sin_()",
    "cos": "{0}.cos_()",
    "floor": "{0}.floor_()",
    "ceil": "{0}.ceil_()",
    "round": "{0}.round_()",
    "trunc": "{0}.trunc_()",
}


def is_operator(text: str) -> bool:
    """Whether a spelled expression needs parentheses inside another operator."""
    depth = 0
    for index, letter in enumerate(text):
        if letter in "([":
            depth += 1
        elif letter in ")]":
            depth -= 1
        elif depth == 0 and (letter == " " or (index == 0 and letter in "-~")):
            return True
    return False


def spell(node: Node, operands: Sequence[str], *, in_place: bool = False) -> str:
    """The op of `node` on operand texts. For `in_place`, the first operand is overwritten."""
    texts = list(operands)
    if node.op in TABLE and node.op != "where" and all(a.op == "const" for a in node.args):
        texts[0] = lifted(node.args[0])
    row = (IN_PLACE if in_place else CPU_ROWS)[node.op]
    wrapped = [f"({text})" if is_operator(text) else text for text in texts]
    if isinstance(row, str):
        call = not row.startswith(("{0}", "-", "~"))
        if call or in_place:  # arguments of a call stand alone
            wrapped = texts if call else [wrapped[0], *texts[1:]]
        return row.format(*wrapped)
    return row(node, wrapped)


assert set(CPU_ROWS) == {*TABLE, *STRUCTURAL}, "every op has a row"
