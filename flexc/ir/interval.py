"""Intervals of float64, one or many at a time, rounded outward: the values that bounds are made of.

`lo` and `hi` are float64 tensors of one broadcastable shape, on any device: one interval for each tile of a mask, for example. Integers up
to 2^53 are exact. A bool is an interval within [0, 1]: proved false is hi == 0, proved true is lo == 1. `nan` says that NaN cannot be
ruled out; a comparison with NaN is false, except `!=`.

An interval holds the real results as well as the rounded ones, and every result that float32 hardware may produce instead: denormals
flushed to zero, fused multiply-adds, approximate functions, overflow to infinity. `settled` is where a dtype's range is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexc.ir.graph import BOOL, FLOAT32, INT32

Tensor = torch.Tensor
_INF = math.inf
_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_TINY = torch.finfo(torch.float32).tiny  # the least number that is not a denormal
_EXACT = 2.0**53 - 1  # float64 counts integers up to here; 2^53 may be 2^53 + 1, rounded


def _t(x: float | Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


@dataclass(frozen=True)
class Interval:
    """All values from lo to hi. See the module for what `nan` means; `dtype` says whether the values are integers or truth values."""

    lo: Tensor
    hi: Tensor
    nan: bool = False
    dtype: str = FLOAT32

    @staticmethod
    def of(lo: float | Tensor, hi: float | Tensor, nan: bool = False, dtype: str = FLOAT32) -> Interval:
        """The interval [lo, hi] of numbers or float64 tensors."""
        return Interval(_t(lo), _t(hi), nan, dtype)

    @staticmethod
    def point(value: float | Tensor) -> Interval:
        """A single known value; a NaN becomes `everything`."""
        if not isinstance(value, Tensor) and math.isnan(value):
            return Interval.everything()
        return Interval(_t(value), _t(value))

    @staticmethod
    def everything(nan: bool = True) -> Interval:
        """Nothing is known."""
        return Interval.of(-_INF, _INF, nan)

    @staticmethod
    def truth(false_possible: Tensor, true_possible: Tensor) -> Interval:
        """The bool that can be false where the first, true where the second tensor says so."""
        one = torch.float64
        return Interval((~false_possible).to(one), true_possible.to(one), False, BOOL)

    @property
    def is_true(self) -> Tensor:
        """Proved true (of a bool)."""
        return self.lo >= 1

    @property
    def is_false(self) -> Tensor:
        """Proved false (of a bool)."""
        return self.hi <= 0

    def within(self, lo: float, hi: float) -> bool:
        """Whether every interval lies in [lo, hi] and NaN is ruled out."""
        return not self.nan and bool((self.lo >= lo).all()) and bool((self.hi <= hi).all())

    @property
    def is_whole(self) -> bool:
        """Whether the values are integers or truth values, whose arithmetic is exact."""
        return self.dtype != FLOAT32

    def settled(self, dtype: str) -> Interval:
        """What values of `dtype` can be when exact arithmetic says this: integers wrap around, floats overflow and flush to zero."""
        lo, hi = self.lo, self.hi
        if dtype == BOOL:
            return self if self.dtype == BOOL else Interval(lo.clamp(0, 1), hi.clamp(0, 1), False, BOOL)
        if dtype != FLOAT32:
            least, most, exact = (-(2.0**31), 2.0**31 - 1, 2.0**31) if dtype == INT32 else (-(2.0**63), 2.0**63, _EXACT)
            fits = (lo >= -exact) & (hi <= min(most, exact))
            if not bool(fits.all()):
                lo, hi = torch.where(fits, lo, least), torch.where(fits, hi, most)
            return Interval(lo, hi, False, dtype)
        unknown = torch.isnan(lo) | torch.isnan(hi)
        lo, hi = torch.where(unknown, -_INF, lo), torch.where(unknown, _INF, hi)
        lo = torch.where(torch.isinf(lo), lo, torch.where(lo < -_FLOAT32_MAX, -_INF, lo.clamp(max=_FLOAT32_MAX)))
        hi = torch.where(torch.isinf(hi), hi, torch.where(hi > _FLOAT32_MAX, _INF, hi.clamp(min=-_FLOAT32_MAX)))
        lo = torch.where(lo.abs() < _FLOAT32_TINY, torch.where(lo < 0, -_FLOAT32_TINY, 0.0), lo)
        hi = torch.where(hi.abs() < _FLOAT32_TINY, torch.where(hi > 0, _FLOAT32_TINY, 0.0), hi)
        return Interval(lo, hi, self.nan or bool(unknown.any()))

    def widened(self, relative: float = 2.0**-16, absolute: float = 0.0) -> Interval:
        """Grown by a share of the magnitude that covers float32 rounding and the hardware's approximate functions.

        The default covers exp(x) computed as exp2(x * log2(e)): the rounded product is off by up to 128 * 2^-24 there.
        """
        lo = self.lo - self.lo.abs().nan_to_num(posinf=0.0) * relative - absolute
        return Interval(lo, self.hi + self.hi.abs().nan_to_num(posinf=0.0) * relative + absolute, self.nan)

    def rising(self, f: Callable[[Tensor], Tensor], nan: bool = False) -> Interval:
        """The image under a non-decreasing function, widened for rounding."""
        return Interval(f(self.lo), f(self.hi), self.nan or nan).widened()

    def falling(self, f: Callable[[Tensor], Tensor], nan: bool = False) -> Interval:
        """The image under a non-increasing function, widened for rounding."""
        return Interval(f(self.hi), f(self.lo), self.nan or nan).widened()

    def clipped(self, lo: float, hi: float) -> Interval:
        """The part inside [lo, hi], for results known to lie there."""
        return Interval(self.lo.clamp(lo, hi), self.hi.clamp(lo, hi), self.nan)

    def union(self, other: Interval) -> Interval:
        """The smallest interval that holds both."""
        return Interval(torch.minimum(self.lo, other.lo), torch.maximum(self.hi, other.hi), self.nan or other.nan)

    @property
    def is_infinite(self) -> bool:
        """Whether any end is infinite."""
        return bool(torch.isinf(self.lo).any() | torch.isinf(self.hi).any())


def corners(f: Callable[[Tensor, Tensor], Tensor], x: Interval, y: Interval) -> Interval:
    """The image under a function that is monotone in each operand: its extremes lie at the four corners. 0·∞ counts as 0."""
    values = [f(a, b).nan_to_num(nan=0.0, posinf=_INF, neginf=-_INF) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    lo, hi = values[0], values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return Interval(lo, hi, x.nan or y.nan)
