"""What the traced function gets in place of Python's builtins and `math`, which would ask a symbol for its value.

On anything but traced values each stand-in does what the original does.
"""

from __future__ import annotations

import builtins
import functools
import math
import os
import random
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from flexc.frontend.functions import call_named, call_torch, is_known, is_random, refuse_random, where
from flexc.frontend.session import is_scalar_only, refuse
from flexc.frontend.symbol import Symbol, Traced, cast, node_of
from flexc.frontend.vector import Elementwise
from flexc.ir.graph import BOOL, FLOAT32, INT32


def _is_traced(*values: Any) -> bool:
    return any(isinstance(v, Traced) for v in values)


# --- builtins ---------------------------------------------------------------------------------------------------------------------------


def _extreme(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def extreme(*args: Any, **options: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        if options.get("key") is not None or not _is_traced(*values):
            return original(values, **options)
        return functools.reduce(lambda a, b: call_named(name, (a, b), {}, original.__name__), values)

    return extreme


def _quantifier(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def quantifier(values: Any) -> Any:
        values = list(values)
        if not _is_traced(*values):
            return original(values)
        return functools.reduce(lambda a, b: call_named(name, (a, b), {}, original.__name__), values, original(()))

    return quantifier


def _pow(base: Any, exponent: Any, modulus: Any = None) -> Any:
    return base**exponent if modulus is None else pow(base, exponent, modulus)


def _range(*args: Any) -> range:
    for a in args:
        if isinstance(a, Symbol) and not is_scalar_only(a.node):
            refuse(
                f"`for` over a traced length ({a})",
                why="the number of rounds is unknown while tracing, so the loop cannot be unrolled",
                instead=f"a loop with a fixed number of rounds and flexc.where(i < {a}, ..., ...)",
            )
    return range(*args)


def _kinds(kinds: Any) -> Any:
    if isinstance(kinds, tuple):
        return tuple(map(_kinds, kinds))
    return getattr(kinds, "__flexc_stands_for__", kinds)


def _isinstance(value: Any, kinds: Any) -> bool:
    kinds = _kinds(kinds)
    if isinstance(value, Symbol):
        # A captured number that is given at run time is still a number to the user; everything else is a 0-d tensor.
        if is_scalar_only(value.node):
            kind = {BOOL: bool, FLOAT32: float}.get(value.node.dtype, int)
            return isinstance(kind(), kinds)
        return _accepts(torch.Tensor, kinds)
    if isinstance(value, Elementwise):
        return _accepts(torch.Tensor, kinds)
    return isinstance(value, kinds)


def _accepts(kind: type, kinds: Any) -> bool:
    return any(_accepts(kind, k) for k in kinds) if isinstance(kinds, tuple) else isinstance(kinds, type) and issubclass(kind, kinds)


class _NumberType(type):
    """Type of the stand-ins for int, float and bool: calling them on a symbol casts it."""

    __flexc_stands_for__: type
    ir_dtype: str

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and _is_traced(args[0]):
            return call_named(
                "type", (args[0], torch.bool if cls.ir_dtype == BOOL else _TORCH[cls.ir_dtype]), {}, cls.__flexc_stands_for__.__name__
            )
        return cls.__flexc_stands_for__(*args)

    def __instancecheck__(cls, value: Any) -> bool:
        return _isinstance(value, cls.__flexc_stands_for__)

    def __eq__(cls, other: Any) -> bool:
        return _kinds(other) is cls.__flexc_stands_for__

    def __hash__(cls) -> int:
        return hash(cls.__flexc_stands_for__)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.__flexc_stands_for__, name)

    def __repr__(cls) -> str:
        return repr(cls.__flexc_stands_for__)


_TORCH = {FLOAT32: torch.float32, INT32: torch.int32}


def _number_type(original: type, dtype: str) -> _NumberType:
    # NumPy takes a class with an attribute `dtype` for that dtype: np.zeros(4, dtype=float).
    parts = {"__flexc_stands_for__": original, "ir_dtype": dtype, "dtype": np.dtype(original)}
    return _NumberType(original.__name__, (), parts)


NUMBER_TYPES: dict[type, _NumberType] = {
    int: _number_type(int, INT32),
    float: _number_type(float, FLOAT32),
    bool: _number_type(bool, BOOL),
}


def _type(*args: Any) -> Any:
    if len(args) != 1:
        return type(*args)
    if isinstance(args[0], Symbol) and is_scalar_only(args[0].node):
        return NUMBER_TYPES[{BOOL: bool, FLOAT32: float}.get(args[0].node.dtype, int)]
    return NUMBER_TYPES.get(type(args[0]), type(args[0]))


# --- math -------------------------------------------------------------------------------------------------------------------------------

_ROUNDED = {"floor": "floor", "ceil": "ceil", "trunc": "trunc"}


def _math_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not _is_traced(*args):
            return original(*args, **kwargs)
        if name == "log" and len(args) == 2:
            return call_named("log", args[:1], {}, "math.log") / call_named("log", (node_value(args[1]),), {}, "math.log")
        result = call_named(name, args, kwargs, f"math.{name}")
        return cast(result, INT32) if name in _ROUNDED and isinstance(result, Symbol) else result

    return function


def node_value(value: Any) -> Symbol:
    """A number as a symbol."""
    return value if isinstance(value, Symbol) else Symbol(node_of(value))


# --- modules ----------------------------------------------------------------------------------------------------------------------------


class StandInModule(types.ModuleType):
    """A module in which some functions are replaced; everything else is the original's."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, Any], refused: Callable[[str], Any] | None = None):
        super().__init__(original.__name__)
        self.__dict__["_flexc_original"] = original
        self.__dict__["_flexc_refused"] = refused
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        refused = self.__dict__["_flexc_refused"]
        if refused is not None and not name.startswith("_"):
            refused(name)
        return stand_in(getattr(self.__dict__["_flexc_original"], name))


def stand_in(value: Any) -> Any:
    """What replaces a value of Python's, torch's or NumPy's; most are replaced by nothing and returned as they are."""
    if id(value) in STAND_INS:
        return STAND_INS[id(value)]
    if isinstance(value, types.BuiltinFunctionType | types.FunctionType) and is_known(value.__name__):
        is_torch = any(getattr(module, value.__name__, None) is value for module in (torch, torch.nn.functional))
        return _direct(value) if is_torch else value
    return value


@functools.lru_cache(maxsize=512)
def _direct(function: Any) -> Callable[..., Any]:
    """A torch function that lets traced values pass where torch itself insists on a tensor or on a number: torch.minimum(x, 3)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_torch(function, args, kwargs) if _is_traced(*args, *kwargs.values()) else function(*args, **kwargs)

    return call


def _refuse_random_module(name: str) -> NoReturn:
    refuse_random(f"random.{name}")


def _refuse_random_torch(name: str) -> None:
    if is_random(name):
        refuse_random(f"torch.{name}")


def _refuse_random_numpy(name: str) -> NoReturn:
    refuse_random(f"numpy.random.{name}")


class _State:
    """Stands for what changes outside of the function without being a captured value: a clock, the environment, a mode."""

    def __init__(self, name: str):
        self.name = name

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Whatever is asked of it."""
        refuse(
            f"{self.name} in a score or mask function",
            why="it runs once, while tracing: what it read there would stay in the kernel",
            instead="a captured value, read before the call",
        )

    __call__ = __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = refuse


_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_STATES = {
    **{f"time.{name}": getattr(time, name) for clock in _CLOCKS for name in (clock, f"{clock}_ns")},
    "os.environ": os.environ,
    "os.getenv": os.getenv,
    **{f"torch.{name}": getattr(torch, name) for name in ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled")},
}

_BUILTINS: dict[Any, Any] = {
    min: _extreme(min, "minimum"),
    max: _extreme(max, "maximum"),
    any: _quantifier(any, "logical_or"),
    all: _quantifier(all, "logical_and"),
    pow: _pow,
    range: _range,
    isinstance: _isinstance,
    type: _type,
    **NUMBER_TYPES,
}
_MATH = {name: _math_function(name, f) for name, f in vars(math).items() if callable(f) and not name.startswith("_")}

BUILTINS = {**vars(builtins), **{original.__name__: stand_in for original, stand_in in _BUILTINS.items()}}

# By identity, so that `from math import sqrt` and `import math as m` are found under any name.
STAND_INS: dict[int, Any] = {id(original): stand_in for original, stand_in in _BUILTINS.items()}
STAND_INS |= {id(getattr(math, name)): stand_in for name, stand_in in _MATH.items()}
STAND_INS |= {
    id(torch.where): where,
    id(torch.nn.functional): StandInModule(torch.nn.functional, {}, _refuse_random_torch),
    id(math): StandInModule(math, _MATH),
    id(builtins): StandInModule(builtins, {original.__name__: stand_in for original, stand_in in _BUILTINS.items()}),
    id(random): StandInModule(random, {}, _refuse_random_module),
    id(np.random): StandInModule(np.random, {}, _refuse_random_numpy),
    id(np): StandInModule(np, {}),
    id(torch): StandInModule(torch, {}, _refuse_random_torch),
    id(os): StandInModule(os, {}),
    id(time): StandInModule(time, {}),
    **{id(state): _State(name) for name, state in _STATES.items()},
}
