"""`math.*` on tensors, for as long as a user's function runs: the names are the user's, the gradient is kept."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _floored(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """math.floor and its like give an integer, which may index."""
    return lambda x: operation(x).long()


def _log(x: Any, base: Any = None) -> Tensor:
    top = torch.log(torch.as_tensor(x))
    return top if base is None else top / torch.log(torch.as_tensor(base))


_MATH: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name)
    for name in (
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1"),
        *("fmod", "gcd", "hypot", "isfinite", "isinf", "isnan", "lcm", "lgamma", "log10", "log1p", "log2", "pow", "sin", "sinh", "sqrt"),
        *("tan", "tanh"),
    )
}
_MATH |= {"log": _log, "fabs": torch.abs, "floor": _floored(torch.floor), "ceil": _floored(torch.ceil), "trunc": _floored(torch.trunc)}


def _accepting_tensors(original: Callable[..., Any], operation: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any) -> Any:
        if not any(isinstance(a, Tensor) for a in args):
            return original(*args)
        return operation(*(torch.as_tensor(a) for a in args))

    return function


_ORIGINALS = {name: getattr(math, name) for name in _MATH if hasattr(math, name)}
_PATCHED = {id(original): _accepting_tensors(original, _MATH[name]) for name, original in _ORIGINALS.items()}


@contextmanager
def math_on_tensors(function: Callable[..., Any]) -> Iterator[None]:
    """Let `math.*` compute with tensors and keep their gradients, also where the function holds it under a name of its own."""
    undo: list[Callable[[], None]] = []
    try:
        for name, original in _ORIGINALS.items():
            setattr(math, name, _PATCHED[id(original)])
            undo.append(functools.partial(setattr, math, name, original))
        for inner in _functions_behind(function):
            for name in _names_in(inner.__code__):
                value = inner.__globals__.get(name)
                if id(value) in _PATCHED:
                    inner.__globals__[name] = _PATCHED[id(value)]
                    undo.append(functools.partial(inner.__globals__.__setitem__, name, value))
            for cell in inner.__closure__ or ():
                value = _content(cell)
                if id(value) in _PATCHED:
                    cell.cell_contents = _PATCHED[id(value)]
                    undo.append(functools.partial(setattr, cell, "cell_contents", value))
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _functions_behind(root: Any) -> Iterator[types.FunctionType]:
    """The Python functions that calling `root` may reach: itself, nested ones, helpers in globals, closures and attributes."""
    waiting, seen = [root], set()
    while waiting:
        x = waiting.pop()
        if id(x) in seen or isinstance(x, type | types.ModuleType | Tensor) or not callable(x):
            continue
        seen.add(id(x))
        if isinstance(x, types.FunctionType):
            if x.__module__ is not None and x.__module__.partition(".")[0] == "torch":
                continue
            yield x
            waiting += [x.__globals__.get(name) for name in _names_in(x.__code__)]
            waiting += [_content(cell) for cell in x.__closure__ or ()]
        elif isinstance(x, types.MethodType):
            waiting += [x.__func__, x.__self__]
        elif isinstance(x, functools.partial):
            waiting += [x.func, *x.args]
        else:
            waiting += [getattr(type(x), "forward", None), type(x).__call__, *getattr(x, "__dict__", {}).values()]


def _names_in(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_in(const)]
    return [*code.co_names, *inner]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
