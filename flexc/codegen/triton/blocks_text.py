"""Prints a program of symbols as Triton statements, in integers wherever ranges allow it and in float64 elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexc.codegen.triton.blocks_symbols import COMPARISONS, REAL, TRUTH, WHOLE, Symbol

_INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_INFIX |= {"and": "&", "or": "|", "lshift": "<<", "rshift": ">>"}
_CALLS = {"abs": "tl.abs", "minimum": "tl.minimum", "maximum": "tl.maximum", "floor": "tl.floor", "ceil": "tl.ceil", "exp": "tl.exp"}
_CALLS |= {name: f"tl.{name}" for name in ("exp2", "log", "log2", "sqrt", "rsqrt", "erf")}

HELPERS = {
    "floor_quotient": '''@triton.jit
def end_floor_quotient(x, y):
    """floor(x / y) of integers: Triton's own // truncates."""
    return (x // y) - tl.where(((x % y) != 0) & ((x < 0) ^ (y < 0)), 1, 0)''',
    "floor_log2": '''@triton.jit
def end_floor_log2(x):
    """Of integers from 1 to 2^24, which float32 counts: its exponent."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127''',
    "bit_length": '''@triton.jit
def end_bit_length(x):
    """Bits of an integer that is not negative; one more where float64 rounds it up to the next power of two."""
    return tl.where(x > 0, (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022, 0)''',
    "sign": '''@triton.jit
def end_sign(x):
    """-1, 0 or 1."""
    return tl.where(x > 0, 1, 0) - tl.where(x < 0, 1, 0)''',
    "trunc": '''@triton.jit
def end_trunc(x):
    """Towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))''',
    "round": '''@triton.jit
def end_round(x):
    """To the nearest integer, halves to the even one."""
    down = tl.floor(x)
    rest = x - down
    odd = down - 2 * tl.floor(down / 2)
    return tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1)), down + 1, down)''',
    "expm1": '''@triton.jit
def end_expm1(x):
    """exp(x) - 1 to eight digits, also near 0."""
    return tl.where(tl.abs(x) < 1e-5, x + x * x / 2, tl.exp(x) - 1)''',
    "log1p": '''@triton.jit
def end_log1p(x):
    """log(1 + x) to eight digits, also near 0."""
    return tl.where(tl.abs(x) < 1e-8, x, tl.log(1 + x))''',
    "tanh": '''@triton.jit
def end_tanh(x):
    """To eight digits, also near 0."""
    return tl.where(tl.abs(x) < 1e-4, x - x * x * x / 3, 1 - 2 / (tl.exp(2 * x) + 1))''',
    "sigmoid": '''@triton.jit
def end_sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))''',
    "pow": '''@triton.jit
def end_pow(x, y):
    """x to the power y, for x > 0."""
    return tl.exp2(y * tl.log2(x))''',
}
"""Functions of integers and float64 ends that the printed program calls, by the operation that calls them."""


@dataclass
class Statements:
    """A program as Triton statements.

    Attributes:
        own: what does not read the other side, computed once.
        each: what is computed for each tile of the other side.
        live: names of `own` that `each` or the roots use.
        roots: how the roots are called.
        helpers: keys of HELPERS.
    """

    own: list[str] = field(default_factory=list)
    each: list[str] = field(default_factory=list)
    live: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    helpers: set[str] = field(default_factory=set)


def statements(roots: Sequence[Symbol], own: str, interpreted: bool = False) -> Statements:
    """The program that computes the roots.

    Args:
        own: on which side the kernel stays: "q_idx" or "kv_idx".
        interpreted: for Triton's interpreter.
    """
    printer = _Printer(own, interpreted)
    printer.printed.roots = [printer.name(root) for root in roots]
    for root in roots:
        printer.keep_alive(root)
    return printer.printed


class _Printer:
    def __init__(self, own: str, interpreted: bool):
        self.own, self.interpreted = own, interpreted
        self.printed = Statements()
        self.names: dict[Symbol, str] = {}

    def name(self, root: Symbol) -> str:
        """How the symbol is called; prints what it needs."""
        pending = [root]
        while pending:
            symbol = pending[-1]
            waiting = [a for a in symbol.args if a not in self.names and not a.is_const]
            if waiting:
                pending += waiting
                continue
            pending.pop()
            if symbol not in self.names and not symbol.is_const:
                self._print(symbol)
        return _literal(root) if root.is_const else self.names[root]

    def _print(self, symbol: Symbol) -> None:
        if symbol.op == "argument" and _type(symbol) == "tl.int32":
            self.names[symbol] = symbol.attrs[0]
            return
        name = f"v{len(self.names)}"
        expression = self._expression(symbol)
        if self.interpreted and self._is_own(symbol) and symbol.kind == TRUTH and any(a.kind == REAL for a in symbol.args):
            # The interpreter takes what compares two floats for a float when it spreads a scalar over a vector.
            expression = f"tl.where({expression}, 1, 0) != 0"
        line = f"{name} = {expression}"
        if self._is_own(symbol):
            self.printed.own.append(line)
        else:
            self.printed.each.append(line)
            for operand in symbol.args:
                self.keep_alive(operand)
        self.names[symbol] = name

    def keep_alive(self, symbol: Symbol) -> None:
        """The statements of each tile use this value."""
        name = self.names.get(symbol, "")
        if self._is_own(symbol) and name.startswith("v") and name not in self.printed.live:
            self.printed.live.append(name)

    def _is_own(self, symbol: Symbol) -> bool:
        return symbol.reads <= {self.own}

    def _expression(self, symbol: Symbol) -> str:
        op = symbol.op
        if op == "argument":
            return f"tl.cast({symbol.attrs[0]}, {_type(symbol)})"
        if op == "load":
            return self._load(symbol)
        if op in _INFIX and op not in ("and", "or"):
            x, y = self._operands(symbol, real=any(a.kind == REAL for a in (symbol, *symbol.args)), wide=op not in COMPARISONS)
            return f"{x} {_INFIX[op]} {y}"
        if op == "scaled":
            index, stride = symbol.args
            return f"{self._number(index, real=False, bits=64)} * {self._of(stride)}"
        if op in ("and", "or"):
            return f"{self._of(symbol.args[0])} {_INFIX[op]} {self._of(symbol.args[1])}"
        if op == "not":
            return f"{self._of(symbol.args[0])} == 0"
        if op == "integer":
            return f"{self._of(symbol.args[0])}.to(tl.int64)"
        if op == "isnan":
            x = self._of(symbol.args[0])
            return f"{x} != {x}"
        if op == "isinf":
            return f'tl.abs({self._of(symbol.args[0])}) == float("inf")'
        if op == "neg":
            return f"-{self._operands(symbol, symbol.kind == REAL, wide=True)[0]}"
        if op == "floordiv":
            return self._floor_quotient(symbol)
        if op == "where":
            condition, *branches = symbol.args
            x, y = (self._number(a, symbol.kind == REAL) for a in branches)
            return f"tl.where({self._of(condition)}, {x}, {y})"
        operands = self._operands(symbol, real=symbol.kind == REAL, wide=op == "abs")
        if op in _CALLS:
            return f"{_CALLS[op]}({', '.join(operands)})"
        self.printed.helpers.add(op)
        return f"end_{op}({', '.join(operands)})"

    def _load(self, symbol: Symbol) -> str:
        pointer, dtype = symbol.attrs
        text = f"tl.load({pointer} + {self._of(symbol.args[0])})"
        if symbol.kind == REAL:
            return f"{text}.to(tl.float32).to(tl.float64)"
        return text if dtype in ("int32", "int64") else f"{text}.to(tl.int32)"

    def _floor_quotient(self, symbol: Symbol) -> str:
        x, y = symbol.args
        if symbol.kind == REAL:
            a, b = self._operands(symbol, real=True)
            return f"tl.floor({a} / {b})"
        a, b = self._of(x), self._of(y)
        if y.is_const and y.attrs[0] > 0 and y.attrs[0] & (y.attrs[0] - 1) == 0:
            return f"{a} >> {y.attrs[0].bit_length() - 1}"
        if x.least >= 0 and y.least > 0:
            return f"{a} // {b}"
        self.printed.helpers.add("floor_quotient")
        return f"end_floor_quotient({f'tl.full([], {a}, tl.int64)' if x.is_const else a}, {b})"

    def _operands(self, symbol: Symbol, real: bool, wide: bool = False) -> list[str]:
        """Operands in the type of the operation: float64, or with `wide` in as many bits as the result."""
        return [self._number(a, real, symbol.bits if wide else 32) for a in symbol.args]

    def _number(self, symbol: Symbol, real: bool, bits: int = 32) -> str:
        if symbol.kind == TRUTH:
            return self._of(symbol)
        if real and symbol.is_const:
            return f"tl.full([], {_literal(symbol)}, tl.float64)"  # a Python float may become float32
        if real:
            return self._of(symbol) + ".to(tl.float64)" * (symbol.kind == WHOLE)
        return self._of(symbol) + ".to(tl.int64)" * (symbol.bits < bits and not symbol.is_const)

    def _of(self, symbol: Symbol) -> str:
        return _literal(symbol) if symbol.is_const else self.names[symbol]


def _type(symbol: Symbol) -> str:
    return {TRUTH: "tl.int1", REAL: "tl.float64"}.get(symbol.kind, f"tl.int{symbol.bits}")


def _literal(symbol: Symbol) -> str:
    value = symbol.attrs[0]
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        value = min(value, 2**63 - 1)  # the upper end of an unknown int64
        return str(value) if value >= 0 else f"({value})"
    return f'float("{value}")' if not math.isfinite(value) else f"({value!r})" if value < 0 else repr(value)
