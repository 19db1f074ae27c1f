"""Which captured numbers are constants of the kernel and which are given at run time.

On first sight every number is a constant. When the same functions come back with another number, all of theirs become run-time scalars:
at most two traces for any number of values. Numbers that Python itself needs (`range(n)`, `values[n]`) stay constants. `constant(x)` and
`runtime(x)` decide by hand.
"""

from __future__ import annotations

from typing import Any, TypeVar

from flexc.errors import InputError
from flexc.frontend.guards import Source
from flexc.frontend.session import Session
from flexc.frontend.symbol import Symbol

Number = TypeVar("Number", int, float)


class ConstantInt(int):
    """An integer that is always compiled in."""


class ConstantFloat(float):
    """A float that is always compiled in."""


class RuntimeInt(int):
    """An integer that is always a kernel argument."""


class RuntimeFloat(float):
    """A float that is always a kernel argument."""


def constant(value: Number) -> Number:
    """The number, marked to be compiled into the kernel: every new value compiles once more.

    Computing with it gives plain numbers: mark what the function captures, not what it is computed from.
    """
    return _marked(value, ConstantInt, ConstantFloat, "constant")  # pyright: ignore[reportReturnType]


def runtime(value: Number) -> Number:
    """The number, marked to be a kernel argument: no value ever compiles again.

    Computing with it gives plain numbers: mark what the function captures, not what it is computed from.
    """
    return _marked(value, RuntimeInt, RuntimeFloat, "runtime")  # pyright: ignore[reportReturnType]


def _marked(value: Any, whole: type, real: type, name: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"flexc.{name} takes an int or a float, got {type(value).__name__}")
    return whole(value) if isinstance(value, int) else real(value)


def captured_number(session: Session, source: Source, value: int | float) -> int | float | Symbol:
    """What the traced function gets for a captured Python number: the number itself, guarded, or a run-time scalar."""
    session.guards.has_type(source, type(value))
    plain = int(value) if isinstance(value, int) else float(value)
    is_wide = isinstance(plain, int) and not -(2**63) <= plain < 2**63
    is_constant = isinstance(value, ConstantInt | ConstantFloat) or source in session.pinned or is_wide
    if not is_constant and (session.runs_numbers or isinstance(value, RuntimeInt | RuntimeFloat)):
        return Symbol(session.scalar_node(source, plain))
    session.guards.number(source, plain)
    return plain
