"""What functions of numbers mean: torch functions, tensor methods, `math` functions and NumPy ufuncs, all by their name.

Names that are one op come from the op table's `spelled` column; the rest are written here in terms of ops. Where PyTorch defines the
gradient at a corner (relu at 0, clamp at its ends), the choice of `where` or `maximum` follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexc.frontend.powers import power
from flexc.frontend.session import refuse
from flexc.frontend.symbol import Symbol, call, cast, node_of
from flexc.ir.graph import BOOL, FLOAT32
from flexc.ir.ops import TABLE

NAMED: dict[str, Callable[..., Any]] = {}


def named(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of numbers under these names; arrays are handled element by element."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        NAMED.update(dict.fromkeys(names, function))
        return function

    return register


# --- one op each ------------------------------------------------------------------------------------------------------------------------

_OPERAND_NAMES = ("input", "other", "exponent")


def _one_op(op: str, arity: int) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        operands = [*args, *(kwargs.pop(name) for name in _OPERAND_NAMES if name in kwargs)]
        if kwargs.pop("out", None) is not None:
            refuse(f"out= of {op}", why="a traced value cannot be written to", instead="the value that the function returns")
        if len(operands) != arity or kwargs:
            refuse(
                f"{op} with {len(operands)} operands and options {sorted(kwargs)}", why=f"it takes {arity} operands", instead="operators"
            )
        return call(op, *operands)

    return function


def _spelled_names(spelled: Any) -> list[str]:
    name = spelled if isinstance(spelled, str) else spelled.__name__
    return [] if name.startswith("__") else [name.removeprefix("special_")]


for _op in TABLE.values():
    for _spelling in _op.spelled:
        for _name in _spelled_names(_spelling):
            NAMED[_name] = _one_op(_op.name, _op.arity)


# --- arithmetic -------------------------------------------------------------------------------------------------------------------------


@named("add")
def _add(input: Any, other: Any, *, alpha: Any = 1, out: None = None) -> Any:
    return call("add", input, other if alpha == 1 else call("mul", other, alpha))


@named("sub", "subtract")
def _sub(input: Any, other: Any, *, alpha: Any = 1, out: None = None) -> Any:
    return call("sub", input, other if alpha == 1 else call("mul", other, alpha))


@named("rsub")
def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _sub(other, input, alpha=alpha)


@named("div", "divide", "true_divide")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None, out: None = None) -> Any:
    if rounding_mode == "floor":
        return call("floordiv", input, other)
    quotient = call("truediv", input, other)
    if rounding_mode == "trunc":
        whole = FLOAT32 not in (node_of(input).dtype, node_of(other).dtype)
        return _truncated_division(input, other) if whole else call("trunc", quotient)
    return quotient


def _truncated_division(a: Any, b: Any) -> Any:
    quotient = call("floordiv", call("abs", a), call("abs", b))
    return call("mul", quotient, call("mul", call("sign", a), call("sign", b)))


@named("fmod")
def _fmod(input: Any, other: Any) -> Any:
    if FLOAT32 in (node_of(input).dtype, node_of(other).dtype):
        return call("sub", input, call("mul", call("trunc", call("truediv", input, other)), other))
    return call("sub", input, call("mul", _truncated_division(input, other), other))


@named("pow", "power", "float_power")
def _pow(input: Any, exponent: Any, out: None = None) -> Any:
    return power(input, exponent)


@named("square")
def _square(input: Any) -> Any:
    return power(input, 2)


@named("reciprocal")
def _reciprocal(input: Any) -> Any:
    return call("truediv", 1.0, input)


@named("divmod")
def _divmod(a: Any, b: Any) -> Any:
    return call("floordiv", a, b), call("floormod", a, b)


@named("lerp")
def _lerp(input: Any, end: Any, weight: Any) -> Any:
    return call("add", input, call("mul", weight, call("sub", end, input)))


@named("addcmul")
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return call("add", input, call("mul", call("mul", tensor1, tensor2), value))


@named("clamp", "clip")
def _clamp(input: Any, min: Any = None, max: Any = None, a_min: Any = None, a_max: Any = None, out: None = None) -> Any:
    low, high = min if a_min is None else a_min, max if a_max is None else a_max
    if low is None and high is None:
        refuse("clamp without min and max", why="there is nothing to clamp to", instead="clamp(x, min=..., max=...)")
    # The upper end wins where the ends cross, as in PyTorch.
    lifted = input if low is None else _limited(input, low, "maximum", "lt")
    return lifted if high is None else _limited(lifted, high, "minimum", "gt")


def _limited(input: Any, limit: Any, op: str, beyond: str) -> Any:
    """At the limit itself the whole gradient goes to the input; `maximum` and `minimum` would give it half."""
    if FLOAT32 not in (node_of(input).dtype, node_of(limit).dtype):
        return call(op, input, limit)
    return call("where", call(beyond, input, limit), limit, input)


@named("clamp_min")
def _clamp_min(input: Any, min: Any) -> Any:
    return _clamp(input, min)


@named("clamp_max")
def _clamp_max(input: Any, max: Any) -> Any:
    return _clamp(input, None, max)


@named("copysign")
def _copysign(input: Any, other: Any) -> Any:
    size = call("abs", input)
    return call("where", call("lt", other, 0), call("neg", size), size)


@named("hypot")
def _hypot(input: Any, other: Any) -> Any:
    return call("sqrt", call("add", power(input, 2), power(other, 2)))


# --- truth and bits -----------------------------------------------------------------------------------------------------------------------


def _logical(op: str) -> Callable[..., Any]:
    return lambda input, other, out=None: call(op, cast(input, BOOL), cast(other, BOOL))


for _name in ("and", "or", "xor"):
    NAMED[f"logical_{_name}"] = _logical(_name)


@named("logical_not")
def _logical_not(input: Any, out: None = None) -> Any:
    return call("not", cast(input, BOOL))


@named("bitwise_not", "invert")
def _bitwise_not(input: Any) -> Any:
    return call("not" if node_of(input).dtype == BOOL else "invert", input)


@named("isnan")
def _isnan(input: Any) -> Any:
    return call("ne", input, input)


@named("isinf")
def _isinf(input: Any) -> Any:
    return call("eq", call("abs", input), math.inf)


@named("isfinite")
def _isfinite(input: Any) -> Any:
    return call("lt", call("abs", input), math.inf)


@named("isposinf")
def _isposinf(input: Any) -> Any:
    return call("eq", input, math.inf)


@named("isneginf")
def _isneginf(input: Any) -> Any:
    return call("eq", input, -math.inf)


@named("nan_to_num")
def _nan_to_num(input: Any, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    limits = torch.finfo(torch.float32)
    finite = _clamp(input, limits.min if neginf is None else None, limits.max if posinf is None else None)
    if posinf is not None:
        finite = call("where", _isposinf(input), posinf, finite)
    if neginf is not None:
        finite = call("where", _isneginf(input), neginf, finite)
    return call("where", _isnan(input), nan, finite)


@named("isclose")
def _isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8) -> Any:
    allowed = call("add", atol, call("mul", rtol, call("abs", other)))
    return call("le", call("abs", call("sub", input, other)), allowed)


def choose(condition: Any, a: Any, b: Any) -> Any:
    """where() on numbers; the condition may be a Python truth value."""
    if isinstance(condition, bool):
        condition = Symbol(node_of(condition))
    return call("where", condition, a, b)


NAMED["where"] = choose


@named("masked_fill")
def _masked_fill(input: Any, mask: Any, value: Any) -> Any:
    return choose(mask, value, input)


@named("heaviside")
def _heaviside(input: Any, values: Any) -> Any:
    return choose(call("eq", input, 0), values, cast(call("gt", input, 0), FLOAT32))


# --- functions of a float -----------------------------------------------------------------------------------------------------------------


@named("relu")
def _relu(input: Any, inplace: bool = False) -> Any:
    return choose(call("gt", input, 0), input, 0)


@named("leaky_relu")
def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return choose(call("gt", input, 0), input, call("mul", input, negative_slope))


@named("elu")
def _elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return choose(call("gt", input, 0), input, call("mul", alpha, call("expm1", choose(call("gt", input, 0), 0, input))))


@named("softplus")
def _softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = call("mul", input, beta)
    # The exponential is kept from overflowing where the result is the input itself.
    curve = call("truediv", call("log1p", call("exp", call("minimum", scaled, threshold))), beta)
    return choose(call("gt", scaled, threshold), input, curve)


@named("logsigmoid", "log_sigmoid")
def _logsigmoid(input: Any) -> Any:
    return call("sub", call("minimum", input, 0), call("log1p", call("exp", call("neg", call("abs", input)))))


@named("silu")
def _silu(input: Any, inplace: bool = False) -> Any:
    return call("mul", input, call("sigmoid", input))


@named("gelu")
def _gelu(input: Any, approximate: str = "none") -> Any:
    half = call("mul", 0.5, input)
    if approximate == "tanh":
        inner = call("mul", math.sqrt(2 / math.pi), call("add", input, call("mul", 0.044715, power(input, 3))))
        return call("mul", half, call("add", 1.0, call("tanh", inner)))
    return call("mul", half, call("add", 1.0, call("erf", call("mul", input, math.sqrt(0.5)))))


@named("hardtanh")
def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    return _clamp(input, min_val, max_val)


@named("tan")
def _tan(input: Any) -> Any:
    return call("truediv", call("sin", input), call("cos", input))


@named("sinh")
def _sinh(input: Any) -> Any:
    rise = call("expm1", input)
    return call("mul", 0.5, call("add", rise, call("truediv", rise, call("add", rise, 1.0))))


@named("cosh")
def _cosh(input: Any) -> Any:
    return call("mul", 0.5, call("add", call("exp", input), call("exp", call("neg", input))))


@named("erfc")
def _erfc(input: Any) -> Any:
    return call("sub", 1.0, call("erf", input))


@named("log10")
def _log10(input: Any) -> Any:
    return call("mul", call("log", input), 1 / math.log(10))


@named("logaddexp")
def _logaddexp(input: Any, other: Any) -> Any:
    distance = call("neg", call("abs", call("sub", input, other)))
    return call("add", call("maximum", input, other), call("log1p", call("exp", distance)))


@named("logit")
def _logit(input: Any, eps: float | None = None) -> Any:
    p = input if eps is None else _clamp(input, eps, 1 - eps)
    return call("log", call("truediv", p, call("sub", 1.0, p)))


@named("deg2rad", "radians")
def _radians(input: Any) -> Any:
    return call("mul", input, math.pi / 180)


@named("round")
def _round(input: Any, *, decimals: int = 0) -> Any:
    if not decimals:
        return call("round", input)
    return call("truediv", call("round", call("mul", input, 10.0**decimals)), 10.0**decimals)
