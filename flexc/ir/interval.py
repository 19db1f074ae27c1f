"""Intervals of float64, one or many at a time, rounded outward: the values that bounds are made of.

`lo` and `hi` are tensors of shapes that broadcast, on any device: one interval for each tile of a mask, for example. Numbers have float64
ends, and integers up to 2^53 are exact. Truth values have ends of dtype bool: `lo` says proved true, `hi` says true possible. `nan` says
that NaN cannot be ruled out; a comparison with NaN is false, except `!=`.

What is known before any data (that a number is an integer, that positions are not negative, that NaN cannot come) is held in plain Python
values, `dtype`, `least`, `most` and `nan is False`, and only these decide which operations run. On tensors every rule is pure dataflow:
nothing waits for a GPU, and the rules run on symbols as well as on tensors.

An interval holds the real results as well as the rounded ones, and every result that float32 hardware may produce instead: denormals
flushed to zero, fused multiply-adds, approximate functions, overflow to infinity. `settled` is where a dtype's range is applied.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64

Tensor = torch.Tensor
Claim = Tensor | bool  # of each tile; a Python value where it is known before any data
_INF = math.inf
_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_TINY = torch.finfo(torch.float32).tiny  # the least number that is not a denormal

EXACT = 2.0**53 - 1
"""float64 counts integers up to here; 2^53 may be 2^53 + 1, rounded."""

INTEGER_ENDS = {INT32: (-(2.0**31), 2.0**31 - 1), INT64: (-(2.0**63), 2.0**63)}
"""Ends of an unknown integer, as float64."""

TRUSTED = {INT32: INTEGER_ENDS[INT32], INT64: (-EXACT, EXACT)}
"""Where an end computed in float64 is the integer itself; what passes these ends is unknown."""


def _t(x: float | Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def either(*claims: Claim) -> Claim:
    """Whether one of them holds. What is known before any data stays so."""
    unknown: list[Any] = [claim for claim in claims if not isinstance(claim, bool)]
    if any(claim is True for claim in claims):
        return True
    return functools.reduce(operator.or_, unknown) if unknown else False


@dataclass(frozen=True)
class Interval:
    """All values from lo to hi. See the module for what `nan` means.

    Attributes:
        dtype: says whether the values are integers or truth values.
        least, most: numbers known before any data, below and above all ends.
    """

    lo: Tensor
    hi: Tensor
    nan: Claim = False
    dtype: str = FLOAT32
    least: float = -_INF
    most: float = _INF

    @staticmethod
    def of(lo: float | Tensor, hi: float | Tensor, nan: Claim = False, dtype: str = FLOAT32) -> Interval:
        """The interval [lo, hi] of numbers or tensors."""
        if dtype == BOOL:
            return Interval(torch.as_tensor(lo) != 0, torch.as_tensor(hi) != 0, False, BOOL)
        least = -_INF if isinstance(lo, Tensor) else float(lo)
        most = _INF if isinstance(hi, Tensor) else float(hi)
        return Interval(_t(lo), _t(hi), nan, dtype, least, most)

    @staticmethod
    def point(value: float | Tensor) -> Interval:
        """A single known value; a NaN becomes `everything`."""
        if isinstance(value, Tensor):
            return Interval(value, value)
        if math.isnan(value):
            return Interval.everything()
        end = _t(value)
        return Interval(end, end, False, FLOAT32, value, value)

    @staticmethod
    def positions(first: Tensor, last: Tensor, length: int) -> Interval:
        """Token, batch or head numbers from first to last (float64), all of them below `length`."""
        return Interval(first, last, False, INT32, 0.0, float(max(length - 1, 0)))

    @staticmethod
    def everything(nan: Claim = True) -> Interval:
        """Nothing is known."""
        return Interval.of(-_INF, _INF, nan)

    @staticmethod
    def truth(certain: Tensor, possible: Tensor) -> Interval:
        """The truth value that is true where the first, and can be true where the second tensor says so."""
        return Interval(certain, possible, False, BOOL)

    @property
    def is_true(self) -> Tensor:
        """Proved true (of a truth value)."""
        return self.lo

    @property
    def is_false(self) -> Tensor:
        """Proved false (of a truth value)."""
        return ~self.hi

    def within(self, lo: float, hi: float) -> bool:
        """Whether every interval lies in [lo, hi] and NaN is ruled out. Waits for the device: for use on the host, not in rules."""
        return not bool(torch.as_tensor(self.nan).any()) and bool((self.lo >= lo).all()) and bool((self.hi <= hi).all())

    @property
    def is_whole(self) -> bool:
        """Whether the values are integers or truth values, whose arithmetic is exact."""
        return self.dtype != FLOAT32

    @property
    def is_finite(self) -> bool:
        """Whether every end is known to be finite before any data."""
        return self.is_whole or (self.least > -_INF and self.most < _INF)

    @property
    def is_infinite(self) -> Claim:
        """Where an end is infinite."""
        return False if self.is_finite else torch.isinf(self.lo) | torch.isinf(self.hi)

    @property
    def is_point(self) -> bool:
        """Whether it is known before any data that there is one value."""
        return self.lo is self.hi

    @property
    def ends(self) -> tuple[Tensor, ...]:
        """lo and hi, or the one value of a point."""
        return (self.lo,) if self.is_point else (self.lo, self.hi)

    def with_range(self, least: float, most: float) -> Interval:
        """This interval, of which it is known before any data that it lies in [least, most]. What is no number says nothing."""
        return dataclasses.replace(self, least=-_INF if math.isnan(least) else least, most=_INF if math.isnan(most) else most)

    def settled(self, dtype: str) -> Interval:
        """What values of `dtype` can be when exact arithmetic says this: integers wrap around, floats overflow and flush to zero."""
        if dtype == BOOL:
            return self if self.dtype == BOOL else Interval(self.lo >= 1, self.hi > 0, False, BOOL)
        return self._settled_float() if dtype == FLOAT32 else self._settled_integer(dtype)

    def _settled_integer(self, dtype: str) -> Interval:
        lowest, highest = TRUSTED[dtype]
        if lowest <= self.least and self.most <= highest:
            return Interval(self.lo, self.hi, False, dtype, self.least, self.most)
        least, most = INTEGER_ENDS[dtype]
        fits = (self.lo >= lowest) & (self.hi <= highest)
        lo, hi = torch.where(fits, self.lo, least), torch.where(fits, self.hi, most)
        return Interval(lo, hi, False, dtype, least, most)

    def _settled_float(self) -> Interval:
        lo, hi, nan = self.lo, self.hi, self.nan
        least, most = self.least, self.most
        if not (least >= -_FLOAT32_MAX and most <= _FLOAT32_MAX):
            unknown = torch.isnan(lo) | torch.isnan(hi)
            lo, hi = torch.where(unknown, -_INF, lo), torch.where(unknown, _INF, hi)
            # Past float32's range a finite end is infinite on one side and the largest number on the other; infinite ends stay.
            lo = torch.where(torch.isinf(lo), lo, torch.where(lo < -_FLOAT32_MAX, -_INF, lo.clamp(max=_FLOAT32_MAX)))
            hi = torch.where(torch.isinf(hi), hi, torch.where(hi > _FLOAT32_MAX, _INF, hi.clamp(min=-_FLOAT32_MAX)))
            least, most, nan = -_INF, _INF, either(nan, unknown)
        lo = torch.where(lo.abs() < _FLOAT32_TINY, torch.where(lo < 0, -_FLOAT32_TINY, 0.0), lo)
        hi = torch.where(hi.abs() < _FLOAT32_TINY, torch.where(hi > 0, _FLOAT32_TINY, 0.0), hi)
        # The smallest and the largest end of many may have been flushed too.
        least, most = min(least, -_FLOAT32_TINY if least < 0 else 0.0), max(most, _FLOAT32_TINY if most > 0 else 0.0)
        return Interval(lo, hi, nan, FLOAT32, least, most)

    def widened(self, relative: float = 2.0**-16, absolute: float = 0.0) -> Interval:
        """Grown by a share of the magnitude that covers float32 rounding and the hardware's approximate functions.

        The default covers exp(x) computed as exp2(x * log2(e)): the rounded product is off by up to 128 * 2^-24 there.
        """

        def slack(end: Tensor) -> Tensor:
            size = end.abs() if self.is_finite else end.abs().nan_to_num(posinf=0.0)
            return size * relative + absolute if absolute else size * relative

        return Interval(self.lo - slack(self.lo), self.hi + slack(self.hi), self.nan)

    def rising(self, f: Callable[[Tensor], Tensor], nan: Claim = False) -> Interval:
        """The image under a non-decreasing function, widened for rounding."""
        return Interval(f(self.lo), f(self.hi), either(self.nan, nan)).widened()

    def falling(self, f: Callable[[Tensor], Tensor], nan: Claim = False) -> Interval:
        """The image under a non-increasing function, widened for rounding."""
        return Interval(f(self.hi), f(self.lo), either(self.nan, nan)).widened()

    def clipped(self, lo: float, hi: float) -> Interval:
        """The part inside [lo, hi], for results known to lie there."""
        return Interval(self.lo.clamp(lo, hi), self.hi.clamp(lo, hi), self.nan, FLOAT32, lo, hi)

    def union(self, other: Interval) -> Interval:
        """The smallest interval that holds both."""
        lo, hi = torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi)
        return Interval(lo, hi, either(self.nan, other.nan), self.dtype, min(self.least, other.least), max(self.most, other.most))


def both(x: Claim, y: Claim) -> Claim:
    """Whether both hold."""
    if isinstance(x, bool):
        return y if x else False
    if isinstance(y, bool):
        return x if y else False
    return x & y


def opposite(x: Claim) -> Claim:
    """Whether it does not hold."""
    return not x if isinstance(x, bool) else ~x


def unless(condition: Claim, otherwise: Any, value: Tensor) -> Tensor:
    """`value`, but `otherwise` (a number or a tensor) where the condition holds."""
    if isinstance(condition, bool):
        if not condition:
            return value
        return torch.full_like(value, otherwise) if isinstance(otherwise, bool | int | float) else otherwise
    return torch.where(condition, otherwise, value)


def corners(f: Callable[[Tensor, Tensor], Tensor], x: Interval, y: Interval) -> Interval:
    """The image under a function that is monotone in each operand: its extremes lie at the four corners. 0·∞ counts as 0."""
    values: Iterable[Tensor] = [f(a, b) for a in x.ends for b in y.ends]
    if not (x.is_finite and y.is_finite):
        values = [value.nan_to_num(nan=0.0, posinf=_INF, neginf=-_INF) for value in values]
    return Interval(functools.reduce(torch.minimum, values), functools.reduce(torch.maximum, values), either(x.nan, y.nan))
