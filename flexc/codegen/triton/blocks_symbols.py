"""Symbols that remember what is done to them: the rules of `ir.bounds`, run once on symbols, become a program.

A symbol stands for a number or a truth value of each tile. Constants are folded, equal symbols are one object, and every number carries the
range that it can have, which decides its type: integers that fit stay integers, because float64 is slow on many GPUs. What the rules
compute in float64 up to 2^53 is the same in int64, without rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from flexc.errors import UnsupportedError
from flexc.ir.graph import INT32
from flexc.ir.interval import INTEGER_ENDS

TRUTH, WHOLE, REAL = "truth", "whole", "real"
_INF = math.inf
INT32_ENDS = INTEGER_ENDS[INT32]
_MEMORY = 2.0**47  # no tensor has more elements
_FAR = 2.0**62  # sums and products of integers up to here are exact in int64


def _operator(op: str, reflected: bool = False) -> Callable[[Any, Any], Symbol]:
    return (lambda self, other: do(op, other, self)) if reflected else (lambda self, other: do(op, self, other))


class Symbol:
    """A value of the program. Made by an operator or a torch function on other symbols; never directly.

    Attributes:
        recorder: where equal symbols are found.
        op: a row of `_RANGES`, or "const", "argument", "load".
        args: symbols.
        attrs: the value of a constant, the name of an argument, the pointer and dtype of a load.
        kind: TRUTH, WHOLE or REAL.
        least, most: of a number, if it is not NaN.
        reads: which of q_idx and kv_idx it depends on.
        bits: of an integer as it is printed: 32 if it and all that it comes from need no more, else 64.
    """

    __slots__ = ("args", "attrs", "bits", "kind", "least", "most", "op", "reads", "recorder")

    def __init__(self, recorder: Recorder, op: str, args: tuple, attrs: tuple, kind: str, least: float, most: float, reads: frozenset):
        self.recorder, self.op, self.args, self.attrs = recorder, op, args, attrs
        self.kind, self.least, self.most, self.reads = kind, least, most, reads
        fits = INT32_ENDS[0] <= least and most <= INT32_ENDS[1] and op not in ("integer", "bit_length", "scaled")
        sources = () if op in ("load", "floor_log2", "sign") else args
        self.bits = 32 if fits and all(a.bits == 32 or a.is_const or a.kind == TRUTH for a in sources) else 64

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__.strip("_")
        handler = _HANDLERS.get(name)
        if handler is None:
            raise UnsupportedError(f"triton: the bounds of this mask need {name}, which a generated block map cannot compute")
        return handler(*args, **(kwargs or {}))

    @property
    def is_const(self) -> bool:
        """Whether it is known while the program is made."""
        return self.op == "const"

    def __bool__(self) -> bool:
        raise TypeError("a symbol of the program has no value yet")

    __hash__ = object.__hash__
    __add__, __radd__ = _operator("add"), _operator("add", reflected=True)
    __sub__, __rsub__ = _operator("sub"), _operator("sub", reflected=True)
    __mul__, __rmul__ = _operator("mul"), _operator("mul", reflected=True)
    __truediv__, __rtruediv__ = _operator("truediv"), _operator("truediv", reflected=True)
    __and__, __rand__ = _operator("and"), _operator("and", reflected=True)
    __or__, __ror__ = _operator("or"), _operator("or", reflected=True)
    __xor__, __rxor__ = _operator("xor"), _operator("xor", reflected=True)
    __lt__, __le__, __gt__, __ge__ = (_operator(name) for name in ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = (_operator(name) for name in ("eq", "ne"))  # pyright: ignore[reportAssignmentType]

    def __neg__(self) -> Symbol:
        return do("neg", self)

    def __invert__(self) -> Symbol:
        return do("not", self)

    def abs(self) -> Symbol:
        """|x|."""
        return do("abs", self)

    def clamp(self, min: Any = None, max: Any = None) -> Symbol:
        """Not below min, not above max."""
        result = self if min is None else do("maximum", self, min)
        return result if max is None else do("minimum", result, max)

    def to(self, dtype: torch.dtype) -> Symbol:
        """Numbers are numbers here; a truth value becomes 0 or 1."""
        if dtype != torch.float64:
            raise UnsupportedError(f"triton: the bounds of this mask need {dtype}, which a generated block map cannot compute")
        return do("where", self, 1.0, 0.0) if self.kind == TRUTH else self

    def double(self) -> Symbol:
        """As `to`."""
        return self.to(torch.float64)

    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Symbol:
        """NaN and infinities replaced; None stands for the largest float64."""
        largest = torch.finfo(torch.float64).max
        result = do("where", do("isnan", self), nan, self)
        for infinity, given, far in ((_INF, posinf, result.most), (-_INF, neginf, result.least)):
            value = math.copysign(largest, infinity) if given is None else given
            if value != infinity and far == infinity:
                result = do("where", do("eq", result, infinity), value, result)
        return result


# --- what is known of results -------------------------------------------------------------------------------------------------------

Range = tuple[float, float]


def _at_corners(f: Callable[[float, float], float]) -> Callable[[Range, Range], Range]:
    def of(x: Range, y: Range) -> Range:
        with_nan = [f(a, b) for a in x for b in y]
        return (-_INF, _INF) if any(math.isnan(v) for v in with_nan) else (min(with_nan), max(with_nan))

    return of


def _floor_quotient_range(x: Range, y: Range) -> Range:
    if y[0] > 0 and max(-x[0], x[1]) < _INF:
        return _at_corners(lambda a, b: float(math.floor(a / b)))(x, y)
    size = max(abs(x[0]), abs(x[1]))
    return (0.0 if x[0] >= 0 and y[0] > 0 else -size, size)


def _shift_range(x: Range, y: Range) -> Range:
    return _at_corners(lambda a, b: a * 2.0**b)(x, y) if y[1] <= 62 else (-_INF, _INF)


def _monotone(f: Callable[[float], float]) -> Callable[[Range], Range]:
    return lambda x: (f(x[0]) if math.isfinite(x[0]) else x[0], f(x[1]) if math.isfinite(x[1]) else x[1])


def _anything(*xs: Range) -> Range:
    return -_INF, _INF


_RANGES: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _at_corners(operator.mul),
    "truediv": _anything,
    "floordiv": _floor_quotient_range,
    "rshift": lambda x, y: (min(x[0], 0.0), max(x[1], 0.0)),
    "lshift": _shift_range,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": lambda x: (0.0 if x[0] <= 0 <= x[1] else min(abs(x[0]), abs(x[1])), max(abs(x[0]), abs(x[1]))),
    "minimum": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "maximum": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "where": lambda c, x, y: (min(x[0], y[0]), max(x[1], y[1])),
    "floor": _monotone(math.floor),
    "ceil": _monotone(math.ceil),
    "trunc": _monotone(math.trunc),
    "round": _monotone(round),
    "sign": lambda x: (-1.0, 1.0),
    "integer": lambda x: x,
    "floor_log2": lambda x: (0.0, 24.0),
    "scaled": lambda x, y: (-_MEMORY, _MEMORY),
    "bit_length": lambda x: (0.0, float(math.frexp(min(max(x[1], 0.0), 2.0**62))[1])),
    **{name: _anything for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "pow")},
}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
_LOGIC = {"and", "or", "not", "isnan", "isinf", *COMPARISONS}
_STAY_WHOLE = {"add", "sub", "mul", "floordiv", "rshift", "lshift", "neg", "abs", "minimum", "maximum", "where"}
_ALWAYS_WHOLE = {"scaled", "integer", "floor_log2", "bit_length", "sign"}
_CHOICES = {"minimum", "maximum", "where"}  # no arithmetic, so that the ends of int64 can take part
_ALREADY_WHOLE = {"floor", "ceil", "trunc", "round", "integer"}
_PYTHON: dict[str, Callable[..., Any]] = {
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.not_,
    "neg": operator.neg,
    "floordiv": operator.floordiv,
    "lshift": lambda x, y: x * 2**y,
    "rshift": lambda x, y: x // 2**y,
    "where": lambda c, x, y: x if c else y,
    "integer": lambda x: x,
    "floor_log2": lambda x: math.frexp(x)[1] - 1,
    "bit_length": lambda x: math.frexp(x)[1],
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", *COMPARISONS)},
}


def do(op: str, *operands: Any) -> Symbol:
    """The symbol for an operation, folded and simplified."""
    recorder = next(o for o in operands if isinstance(o, Symbol)).recorder
    args = tuple(recorder.lifted(o) for o in operands)
    if op == "xor":
        return (args[0] & ~args[1]) | (~args[0] & args[1])
    if all(a.is_const for a in args):
        return recorder.const(_folded(op, [a.attrs[0] for a in args]))
    simpler = _simplified(op, args)
    return recorder.make(op, args) if simpler is None else recorder.lifted(simpler)


def _folded(op: str, values: list[Any]) -> Any:
    if op in _PYTHON:
        return _PYTHON[op](*values)
    wide = [torch.tensor(float(v), dtype=torch.float64) for v in values]
    return getattr(torch, "true_divide" if op == "truediv" else op)(*wide).item()


def _simplified(op: str, args: tuple[Symbol, ...]) -> Any:
    """An equal symbol or constant that takes no operation, or fewer; None if there is none."""
    x = args[0]
    if op in _ALREADY_WHOLE and x.kind == WHOLE:
        return x
    if op in ("isnan", "isinf") and x.kind == WHOLE:
        return False
    if op == "abs" and x.least >= 0:
        return x
    if op == "exp2" and x.kind == WHOLE and x.least >= 0 and x.most < 62:
        return do("lshift", 1, x)
    if op in ("not", "neg") and x.op == op:
        return x.args[0]
    if op == "not" and x.op in COMPARISONS and all(a.kind == WHOLE for a in x.args):
        return do({"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}[x.op], *x.args)
    if len(args) == 2:
        return _simplified_pair(op, *args)
    return _simplified_choice(*args) if op == "where" else None


def _simplified_pair(op: str, x: Symbol, y: Symbol) -> Any:
    if op in ("and", "or"):
        for a, b in ((x, y), (y, x)):
            if a.is_const:
                return b if a.attrs[0] == (op == "and") else a
        return x if x is y else None
    whole = x.kind == y.kind == WHOLE
    if op in COMPARISONS and whole:
        return _compared(op, x, y)
    if op in ("minimum", "maximum"):
        low, high = (x, y) if op == "minimum" else (y, x)
        return x if x is y or (whole and low.most <= high.least) else y if whole and high.most <= low.least else None
    if y.is_const and y.attrs[0] == {"add": 0, "sub": 0, "mul": 1, "floordiv": 1, "truediv": 1, "lshift": 0, "rshift": 0}.get(op):
        return x
    if x.is_const and x.attrs[0] == {"add": 0, "mul": 1}.get(op):
        return y
    if op == "mul" and whole and any(a.is_const and a.attrs[0] == 0 for a in (x, y)):
        return 0
    return 0 if op == "sub" and x is y and whole else None


def _compared(op: str, x: Symbol, y: Symbol) -> bool | None:
    """Decided by the ranges of integers."""
    if op in ("gt", "ge"):
        return _compared({"gt": "lt", "ge": "le"}[op], y, x)
    if op in ("lt", "le"):
        certain = (x is y and op == "le") or getattr(operator, op)(x.most, y.least)
        possible = not (x is y and op == "lt") and getattr(operator, op)(x.least, y.most)
    else:
        certain, possible = x is y, x.least <= y.most and y.least <= x.most
        if op == "ne":
            certain, possible = not possible, not certain
    return True if certain else False if not possible else None


def _simplified_choice(c: Symbol, x: Symbol, y: Symbol) -> Any:
    if c.is_const:
        return x if c.attrs[0] else y
    if x is y:
        return x
    if c.op == "not":
        return do("where", c.args[0], y, x)
    return (c & x) | (~c & y) if x.kind == y.kind == TRUTH else None


class Recorder:
    """Makes symbols and keeps them, each once, operands before their users."""

    def __init__(self) -> None:
        self._made: dict[tuple, Symbol] = {}

    def lifted(self, value: Any) -> Symbol:
        """The symbol, or the constant for a number or a tensor of one number."""
        return value if isinstance(value, Symbol) else self.const(value.item() if isinstance(value, torch.Tensor) else value)

    def const(self, value: bool | float) -> Symbol:
        """A number or truth value that is known."""
        if isinstance(value, bool):
            return self._kept("const", (), (value,), TRUTH, 0.0, 1.0, frozenset())
        whole = math.isfinite(value) and value == math.floor(value) and abs(value) <= 2**63
        number = int(value) if whole else float(value)
        return self._kept("const", (), (number,), WHOLE if whole else REAL, float(value), float(value), frozenset())

    def argument(self, name: str, kind: str, least: float, most: float, reads: frozenset[str] = frozenset()) -> Symbol:
        """A value that the kernel is given, or that its template computes, under this name."""
        return self._kept("argument", (), (name,), kind, least, most, reads)

    def load(self, pointer: str, offset: Symbol, dtype: str) -> Symbol:
        """An element of the tensor at an argument that is a pointer, of a torch dtype. A NaN is loaded as NaN."""
        kind = REAL if dtype in ("float16", "bfloat16", "float32", "float64") else WHOLE
        least, most = (-_INF, _INF) if kind == REAL else (0.0, 1.0) if dtype == "bool" else INTEGER_ENDS.get(dtype, INT32_ENDS)
        return self._kept("load", (offset,), (pointer, dtype), kind, least, most, offset.reads)

    def make(self, op: str, args: tuple[Symbol, ...]) -> Symbol:
        """The symbol for an operation that cannot be simplified."""
        reads = frozenset().union(*(a.reads for a in args))
        if op in _LOGIC or (op == "where" and args[1].kind == TRUTH):
            return self._kept(op, args, (), TRUTH, 0.0, 1.0, reads)
        least, most = _RANGES[op](*((a.least, a.most) for a in args))
        least, most = (-_INF if math.isnan(least) else least), (_INF if math.isnan(most) else most)
        numbers = args[1:] if op == "where" else args
        reach = 2.0**63 if op in _CHOICES else _FAR
        whole = op in _ALWAYS_WHOLE or (op in _STAY_WHOLE and all(a.kind == WHOLE for a in numbers) and max(-least, most) <= reach)
        return self._kept(op, args, (), WHOLE if whole else REAL, least, most, reads)

    def _kept(self, op: str, args: tuple, attrs: tuple, kind: str, least: float, most: float, reads: frozenset) -> Symbol:
        key = (op, tuple(map(id, args)), tuple(map(repr, attrs)), kind)
        if key not in self._made:
            self._made[key] = Symbol(self, op, args, attrs, kind, least, most, reads)
        return self._made[key]


# --- torch functions on symbols ------------------------------------------------------------------------------------------------------


def _quotient(x: Any, y: Any, rounding_mode: str | None = None) -> Symbol:
    return do("floordiv" if rounding_mode == "floor" else "truediv", x, y)


class _BitLength:
    """What `torch.frexp` of a symbol gives, as far as bounds look at it."""

    def __init__(self, x: Symbol):
        self.exponent = do("bit_length", x)


def _filled(x: Symbol, value: Any, dtype: torch.dtype | None = None) -> Symbol:
    return x.recorder.const(bool(value) if dtype == torch.bool or x.kind == TRUTH else value)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **{name: _operator(name) for name in (*_RANGES, "and", "or", "xor", *COMPARISONS)},
    **{f"r{name}": _operator(name, reflected=True) for name in ("add", "sub", "mul", "truediv", "and", "or")},
    **{name: (lambda x, op=name: do(op, x)) for name in ("neg", "abs", "isnan", "isinf", "floor", "ceil", "trunc", "round", "sign")},
    **{
        name: (lambda x, op=name: do(op, x))
        for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf")
    },
    "where": lambda c, x, y: do("where", c, x, y),
    "div": _quotient,
    "invert": lambda x: do("not", x),
    "clamp": Symbol.clamp,
    "frexp": _BitLength,
    "zeros_like": lambda x: _filled(x, 0),
    "ones_like": lambda x: _filled(x, 1),
    "full_like": _filled,
}
