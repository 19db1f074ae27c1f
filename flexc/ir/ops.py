"""The op table: one row per op, read by the tracer, eager evaluation, bounds, derivatives and the tests.

No column has a default, so none is forgotten. Every other column must agree with `eager`. Backends add one line per op in their own
`rows.py`. A pass that needs to know a kind of op asks for a trait:

    commutative, associative, idempotent      algebra
    compare                                   two numbers in, bool out
    rising                                    non-decreasing in its only operand
    stepped                                   jumps: a rounding error in an operand can change the result by a whole step
    costly                                    runs on the special-function unit
    select                                    picks one of its operands
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexc.ir.graph import BOOL, DTYPES, FLOAT32, INT32, INT64, Location, Node, const, const_value, make, promote, topological
from flexc.ir.interval import INTEGER_ENDS, Claim, Interval, both, corners, either, opposite, unless

Tensor = torch.Tensor
DtypeRule = Callable[..., str]


@dataclass(frozen=True)
class Domain:
    """What tests draw for one operand: `kind` is "float", "int" or "bool"; lo and hi are inclusive."""

    kind: str
    lo: float
    hi: float


def floats(lo: float, hi: float) -> Domain:
    """float32 operands from lo to hi."""
    return Domain("float", lo, hi)


def ints(lo: int, hi: int) -> Domain:
    """int32 operands from lo to hi."""
    return Domain("int", lo, hi)


BOOLS = Domain("bool", 0, 1)


@dataclass(frozen=True)
class Op:
    """A row of the table.

    Attributes:
        name: unique; also what the text form prints.
        spelled: what in a user's function traces to it: torch functions and names of methods, `math` functions or NumPy ufuncs.
        dtype: operand dtypes → result dtype; TypeError if the op does not take them. Operands are cast to `operand_dtypes` first.
        eager: PyTorch tensors → tensor, the meaning. Works in float32 and float64.
        bounds: Intervals → Interval that holds every result, exact or in float32; `ir.bounds` then applies the dtype's range. Operations
            on tensors, chosen by what is known before any data: never by a value in a tensor.
        vjp: (g, y, *operands) → one gradient per operand, in IR terms; None where there is none.
        traits: what passes may rely on; see the module.
        domain: operands that tests draw, one Domain each.
        promotes: operands are cast to their common dtype first ("common"), to float32 ("float"), all but the first to the common dtype of
            the rest ("branches"), or left alone ("").
    """

    name: str
    spelled: tuple[Any, ...]
    dtype: DtypeRule
    eager: Callable[..., Tensor]
    bounds: Callable[..., Interval]
    vjp: Callable[..., Sequence[Node | None]] | None
    traits: frozenset[str]
    domain: tuple[Domain, ...]
    promotes: str

    @property
    def arity(self) -> int:
        """Number of operands."""
        return len(self.domain)


TABLE: dict[str, Op] = {}


def declare(
    name: str,
    *,
    spelled: Sequence[Any],
    dtype: DtypeRule,
    eager: Callable[..., Tensor],
    bounds: Callable[..., Interval],
    vjp: Callable[..., Sequence[Node | None]] | None,
    traits: set[str],
    domain: Sequence[Domain],
    promotes: str,
) -> Op:
    """Add a row. See `Op` for the columns."""
    row = Op(name, tuple(spelled), dtype, eager, bounds, vjp, frozenset(traits), tuple(domain), promotes)
    TABLE[name] = row
    return row


def has_trait(node: Node, trait: str) -> bool:
    """Whether the node's op has the trait. Leaves and gathers have none."""
    row = TABLE.get(node.op)
    return row is not None and trait in row.traits


def feeding_steps(roots: Iterable[Node]) -> set[Node]:
    """Nodes whose rounding decides something: they reach a jump (`floor`, a comparison, a cast to an integer) below the roots.

    Such values must be computed as written: 49 * (1 / 49) is below 1 in float32, and its floor is 0.
    """
    feeding: set[Node] = set()
    for node in reversed(topological(roots)):
        is_jump = has_trait(node, "stepped") or (node.op == "cast" and node.dtype != FLOAT32)
        if is_jump or node in feeding:
            feeding.update(node.args)
    return feeding


# --- dtype rules --------------------------------------------------------------------------------------------------------------------


def _number(*dtypes: str) -> str:
    widest = promote(*dtypes)
    if widest == BOOL:
        raise TypeError("expected numbers, got truth values")
    return widest


def _any(*dtypes: str) -> str:
    return promote(*dtypes)


def _float(*dtypes: str) -> str:
    return FLOAT32


def _integer(*dtypes: str) -> str:
    widest = promote(*dtypes)
    if widest not in (INT32, INT64):
        raise TypeError("expected integers")
    return widest


def _bits(*dtypes: str) -> str:
    widest = promote(*dtypes)
    if widest == FLOAT32:
        raise TypeError("expected integers or truth values, got float32")
    return widest


def _compare(*dtypes: str) -> str:
    promote(*dtypes)
    return BOOL


def _logic(*dtypes: str) -> str:
    if any(d != BOOL for d in dtypes):
        raise TypeError("expected truth values")
    return BOOL


def _select(condition: str, a: str, b: str) -> str:
    if condition != BOOL:
        raise TypeError("expected a truth value as the condition")
    return promote(a, b)


# --- building nodes -----------------------------------------------------------------------------------------------------------------


def lift(value: Any) -> Node:
    """A node, or the constant for a Python number."""
    return value if isinstance(value, Node) else const(value)


def cast(node: Node, dtype: str) -> Node:
    """The node in another dtype: the same node if it has it, a constant if it is one."""
    if node.dtype == dtype:
        return node
    if node.op == "const":
        value = const_value(node)
        if dtype == BOOL:
            return const(value != 0, BOOL, node.where)
        if dtype == FLOAT32:
            return const(float(value), FLOAT32, node.where)
        limit = 2**31 if dtype == INT32 else 2**63
        if math.isfinite(value) and -limit <= int(value) < limit:
            return const(int(value), dtype, node.where)
    return make("cast", (node,), (), dtype, node.where)


def apply(name: str, *operands: Any, where: Location | None = None) -> Node:
    """The node for an op of the table on nodes or Python numbers, operands cast as the row says.

    Raises:
        TypeError: the op does not take operands of these dtypes.
    """
    row = TABLE[name]
    if len(operands) != row.arity:
        raise TypeError(f"{name} takes {row.arity} operands, got {len(operands)}")
    nodes = [lift(o) for o in operands]
    result = row.dtype(*(n.dtype for n in nodes))
    dtypes = operand_dtypes(name, tuple(n.dtype for n in nodes))
    return make(name, tuple(cast(n, d) for n, d in zip(nodes, dtypes, strict=True)), (), result, where)


def operand_dtypes(name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """What the operands of a row are cast to, from the dtypes they have."""
    promotes = TABLE[name].promotes
    if promotes == "common":
        return (promote(*given),) * len(given)
    if promotes == "float":
        return (FLOAT32,) * len(given)
    if promotes == "branches":
        return (given[0], *(promote(*given[1:]),) * 2)
    return given


def gather(slot: int, dtype: str, indices: Sequence[Node], where: Location | None = None) -> Node:
    """One element of captured tensor `slot`; `dtype` is its IR dtype. Negative indices count from the end, as in PyTorch."""
    return make("gather", tuple(indices), (slot,), dtype, where)


# --- arithmetic ---------------------------------------------------------------------------------------------------------------------


def _add_bounds(x: Interval, y: Interval) -> Interval:
    lo = x.lo + y.lo
    hi = lo if x.is_point and y.is_point else x.hi + y.hi
    if x.is_finite and y.is_finite:
        return Interval(lo, hi, either(x.nan, y.nan)).with_range(x.least + y.least, x.most + y.most)
    lo = lo.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    hi = hi.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    return Interval(lo, hi, either(x.nan, y.nan, both(x.is_infinite, y.is_infinite)))


def _negated(x: Interval) -> Interval:
    lo = -x.hi
    return Interval(lo, lo if x.is_point else -x.lo, x.nan, x.dtype, -x.most, -x.least)


def _sub_bounds(x: Interval, y: Interval) -> Interval:
    if not (x.is_finite and y.is_finite):
        return _add_bounds(x, _negated(y))
    lo = x.lo - y.hi
    hi = lo if x.is_point and y.is_point else x.hi - y.lo
    return Interval(lo, hi, either(x.nan, y.nan)).with_range(x.least - y.most, x.most - y.least)


def _mul_bounds(x: Interval, y: Interval) -> Interval:
    if not (x.is_finite and y.is_finite):
        product = corners(torch.mul, x, y)
        return Interval(product.lo, product.hi, either(product.nan, x.is_infinite, y.is_infinite))
    products = [a * b for a in (x.least, x.most) for b in (y.least, y.most)]
    if min(x.least, y.least) >= 0:
        lo = x.lo * y.lo
        product = Interval(lo, lo if x.is_point and y.is_point else x.hi * y.hi, either(x.nan, y.nan))
    else:
        product = corners(torch.mul, x, y)
    return product.with_range(*(-math.inf, math.inf) if math.nan in products else (min(products), max(products)))


def _contains_zero(x: Interval) -> Claim:
    return (x.lo <= 0) & (x.hi >= 0) if x.least <= 0 <= x.most else False


def _without_zero(x: Interval) -> Interval:
    """A divisor in which the ends that are 0 count as 1."""
    if not x.least <= 0 <= x.most:
        return x
    lo = torch.where(x.lo == 0, 1.0, x.lo)
    return Interval(lo, lo if x.is_point else torch.where(x.hi == 0, 1.0, x.hi), x.nan, x.dtype, x.least, x.most)


def _div_bounds(x: Interval, y: Interval) -> Interval:
    zero = _contains_zero(y)
    quotient = corners(torch.div, x, _without_zero(y))
    lo, hi = unless(zero, -math.inf, quotient.lo), unless(zero, math.inf, quotient.hi)
    return Interval(lo, hi, either(x.nan, y.nan, zero, x.is_infinite, y.is_infinite)).widened(2.0**-20)


def _int_safe(divisor: Tensor) -> Tensor:
    """Integer division by zero has no meaning here but must not fault: the divisor 0 counts as 1."""
    return divisor if divisor.is_floating_point() else torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _floordiv_eager(x: Tensor, y: Tensor) -> Tensor:
    return torch.div(x, _int_safe(y), rounding_mode="floor")  # floor_divide has no autograd formula


def _floormod_eager(x: Tensor, y: Tensor) -> Tensor:
    return torch.remainder(x, _int_safe(y))


def _floor_quotient(x: Tensor, y: Tensor) -> Tensor:
    """floor(x / y) of integers below 2^53. Not floor of a quotient: where y is one number, a GPU multiplies by its rounded reciprocal."""
    return torch.div(x, y, rounding_mode="floor")


def _magnitude(x: Interval) -> Tensor:
    return x.hi if x.least >= 0 else torch.maximum(x.lo.abs(), x.hi.abs())


def _floordiv_bounds(x: Interval, y: Interval) -> Interval:
    if not (x.is_whole and y.is_whole):
        # A quotient that rounds up to an integer is floored there by some hardware and one lower by PyTorch.
        quotient = _div_bounds(x, y)
        return Interval(torch.floor(quotient.lo), torch.floor(quotient.hi), quotient.nan)
    zero = _contains_zero(y)
    if y.least > 0 and y.is_point:
        lo = _floor_quotient(x.lo, y.lo)
        exact = Interval(lo, lo if x.is_point else _floor_quotient(x.hi, y.lo))
    else:
        exact = corners(_floor_quotient, x, _without_zero(y))
    if zero is not False:
        wide = _magnitude(x)
        exact = Interval(unless(zero, -wide, exact.lo), unless(zero, wide, exact.hi))
    most = max(abs(x.least), abs(x.most))
    return exact.with_range(0.0 if x.least >= 0 and y.least > 0 else -most, most)


def _floormod_bounds(x: Interval, y: Interval) -> Interval:
    if not (x.is_whole and y.is_whole):
        return _float_floormod_bounds(x, y)
    # The result has the divisor's sign and is nearer to 0 than the divisor.
    if y.least > 0:
        lo, hi = torch.zeros_like(y.lo), y.hi - 1
    else:
        lo = torch.where(y.lo > 0, 0.0, (y.lo + 1).clamp(max=0.0))
        hi = torch.where(y.hi < 0, 0.0, (y.hi - 1).clamp(min=0.0))
    zero, safe = _contains_zero(y), _without_zero(y)
    # One divisor, and no multiple of it is crossed: x minus a constant.
    below = _floor_quotient(x.lo, safe.lo)
    same: Claim = True if x.is_point else below == _floor_quotient(x.hi, safe.lo)
    if not y.is_point:
        # Not negative and below the smallest divisor: x itself.
        identity = (x.lo >= 0) & (x.hi < y.lo)
        same = either(both(y.lo == y.hi, same), identity)
        below = torch.where(identity, 0.0, below)
    if zero is not False:
        wide = _magnitude(x)
        lo, hi = unless(zero, torch.minimum(lo, -wide), lo), unless(zero, torch.maximum(hi, wide), hi)
        same = both(opposite(zero), same)
    start = below * safe.lo
    lo, hi = unless(same, x.lo - start, lo), unless(same, x.hi - start, hi)
    most = max(abs(y.least), abs(y.most)) - 1
    most = most if y.least > 0 else max(most, abs(x.least), abs(x.most))
    return Interval(lo, hi).with_range(0.0 if y.least > 0 else -most, most)


def _float_floormod_bounds(x: Interval, y: Interval) -> Interval:
    zero = _contains_zero(y)
    # The result has the divisor's sign; it can round to the divisor.
    lo, hi = torch.where(y.lo > 0, 0.0, y.lo.clamp(max=0.0)), torch.where(y.hi < 0, 0.0, y.hi.clamp(min=0.0))
    wide = _magnitude(x)
    lo, hi = unless(zero, torch.minimum(lo, -wide), lo), unless(zero, torch.maximum(hi, wide), hi)
    # Hardware may take x - floor(x / y) * y, which is off by the rounding of a number as large as x.
    slack = wide * 2.0**-20
    return Interval(lo - slack, hi + slack, either(x.nan, y.nan, zero, x.is_infinite, y.is_infinite))


def _int_or_wider(rule: Callable[..., Interval]) -> Callable[..., Interval]:
    """Integer arithmetic is exact. In float32 an end that is a small integer is too: rounding is monotone and leaves it in place."""

    def bounds(*xs: Interval) -> Interval:
        result = rule(*xs)
        return result if all(x.is_whole for x in xs) else _widened_unless_small(result)

    return bounds


_SMALL = 2.0**24  # integers up to here are float32 numbers


def _widened_unless_small(x: Interval) -> Interval:
    if x.is_whole and x.least >= -_SMALL and x.most <= _SMALL:
        return Interval(x.lo, x.hi, x.nan, FLOAT32, x.least, x.most)
    wide = x.widened(2.0**-22)
    lo_stays = (x.lo == torch.floor(x.lo)) & (x.lo.abs() <= _SMALL)
    hi_stays = (x.hi == torch.floor(x.hi)) & (x.hi.abs() <= _SMALL)
    if not x.is_finite:
        lo_stays, hi_stays = lo_stays | torch.isinf(x.lo), hi_stays | torch.isinf(x.hi)
    slack = 2.0**-21
    return Interval(torch.where(lo_stays, x.lo, wide.lo), torch.where(hi_stays, x.hi, wide.hi), x.nan).with_range(
        x.least - abs(x.least) * slack, x.most + abs(x.most) * slack
    )


declare(
    "add",
    spelled=[torch.add, "add", "__add__"],
    dtype=_number,
    eager=torch.add,
    bounds=_int_or_wider(_add_bounds),
    vjp=lambda g, y, a, b: [g, g],
    traits={"commutative", "associative"},
    domain=[floats(-20, 20), floats(-20, 20)],
    promotes="common",
)
declare(
    "sub",
    spelled=[torch.sub, torch.subtract, "sub", "subtract", "__sub__"],
    dtype=_number,
    eager=torch.sub,
    bounds=_int_or_wider(_sub_bounds),
    vjp=lambda g, y, a, b: [g, -g],
    traits=set(),
    domain=[floats(-20, 20), floats(-20, 20)],
    promotes="common",
)
declare(
    "mul",
    spelled=[torch.mul, torch.multiply, "mul", "multiply", "__mul__"],
    dtype=_number,
    eager=torch.mul,
    bounds=_int_or_wider(_mul_bounds),
    vjp=lambda g, y, a, b: [g * b, g * a],
    traits={"commutative", "associative"},
    domain=[floats(-20, 20), floats(-20, 20)],
    promotes="common",
)
declare(
    "truediv",
    spelled=[torch.div, torch.true_divide, torch.divide, "div", "true_divide", "divide", "__truediv__"],
    dtype=_float,
    eager=torch.true_divide,
    bounds=_div_bounds,
    vjp=lambda g, y, a, b: [g / b, -(g * y / b)],
    traits=set(),
    domain=[floats(-20, 20), floats(0.5, 20)],
    promotes="float",
)
declare(
    "floordiv",
    spelled=[torch.floor_divide, "floor_divide", "__floordiv__"],
    dtype=_number,
    eager=_floordiv_eager,
    bounds=_floordiv_bounds,
    vjp=lambda g, y, a, b: [None, None],
    traits={"stepped"},
    domain=[ints(-50, 50), ints(1, 20)],
    promotes="common",
)
declare(
    "floormod",
    spelled=[torch.remainder, "remainder", "__mod__", "mod"],
    dtype=_number,
    eager=_floormod_eager,
    bounds=_floormod_bounds,
    vjp=lambda g, y, a, b: [g, -(g * apply("floor", a / b))],
    traits={"stepped"},
    domain=[ints(-50, 50), ints(1, 20)],
    promotes="common",
)
declare(
    "neg",
    spelled=[torch.neg, torch.negative, "neg", "negative", "__neg__"],
    dtype=_number,
    eager=torch.neg,
    bounds=_negated,
    vjp=lambda g, y, a: [-g],
    traits=set(),
    domain=[floats(-20, 20)],
    promotes="",
)


def _abs_bounds(x: Interval) -> Interval:
    if x.least >= 0:
        return x
    lo_size, hi_size = x.lo.abs(), x.hi.abs()
    lo = torch.where((x.lo <= 0) & (x.hi >= 0), 0.0, torch.minimum(lo_size, hi_size))
    return Interval(lo, torch.maximum(lo_size, hi_size), x.nan, x.dtype, 0.0, max(abs(x.least), abs(x.most)))


declare(
    "abs",
    spelled=[torch.abs, torch.absolute, "abs", "absolute", "__abs__", "fabs"],
    dtype=_number,
    eager=torch.abs,
    bounds=_abs_bounds,
    vjp=lambda g, y, a: [g * apply("sign", a)],
    traits={"idempotent"},
    domain=[floats(-20, 20)],
    promotes="",
)


def _sign_bounds(x: Interval) -> Interval:
    """The sign of NaN is 0 in PyTorch and may be NaN elsewhere."""
    lo, hi = torch.sign(x.lo), torch.sign(x.hi)
    return Interval(unless(x.nan, lo.clamp(max=0), lo), unless(x.nan, hi.clamp(min=0), hi), x.nan, FLOAT32, -1.0, 1.0)


def _extreme(pick: Callable[[Tensor, Tensor], Tensor], pick_number: Callable[[float, float], float]) -> Callable[..., Interval]:
    def bounds(x: Interval, y: Interval) -> Interval:
        lo = pick(x.lo, y.lo)
        hi = lo if x.is_point and y.is_point else pick(x.hi, y.hi)
        return Interval(lo, hi, either(x.nan, y.nan), FLOAT32, pick_number(x.least, y.least), pick_number(x.most, y.most))

    return bounds


declare(
    "sign",
    spelled=[torch.sign, "sign", torch.sgn, "sgn"],
    dtype=_number,
    eager=torch.sign,
    bounds=_sign_bounds,
    vjp=lambda g, y, a: [None],
    traits={"idempotent", "rising", "stepped"},
    domain=[floats(-20, 20)],
    promotes="",
)
declare(
    "minimum",
    spelled=[torch.minimum, "minimum", torch.fmin, "fmin"],
    dtype=_number,
    eager=torch.minimum,
    bounds=_extreme(torch.minimum, min),
    vjp=lambda g, y, a, b: _share(g, a, b, "lt"),
    traits={"commutative", "associative", "idempotent"},
    domain=[floats(-20, 20), floats(-20, 20)],
    promotes="common",
)
declare(
    "maximum",
    spelled=[torch.maximum, "maximum", torch.fmax, "fmax"],
    dtype=_number,
    eager=torch.maximum,
    bounds=_extreme(torch.maximum, max),
    vjp=lambda g, y, a, b: _share(g, a, b, "gt"),
    traits={"commutative", "associative", "idempotent"},
    domain=[floats(-20, 20), floats(-20, 20)],
    promotes="common",
)


def _share(g: Node, a: Node, b: Node, wins: str) -> list[Node]:
    """Gradient of a two-sided minimum or maximum: to the winner, half to each on a tie, as PyTorch does."""
    half = apply("where", apply("eq", a, b), g * 0.5, 0.0)
    return [apply("where", apply(wins, a, b), g, half), apply("where", apply(wins, b, a), g, half)]


# --- bits ---------------------------------------------------------------------------------------------------------------------------


def _bits_ceiling(x: Interval, y: Interval) -> Tensor:
    """The largest number with as many bits as the larger operand."""
    top = torch.maximum(x.hi, y.hi).clamp(0, 2.0**62)
    return torch.exp2(torch.frexp(top).exponent.to(torch.float64)) - 1


def _and_bounds(x: Interval, y: Interval) -> Interval:
    if x.dtype == y.dtype == BOOL:
        return Interval.truth(x.lo & y.lo, x.hi & y.hi)
    # An operand that is not negative masks the other one, whatever its sign.
    x_top, y_top = torch.where(x.lo >= 0, x.hi, math.inf), torch.where(y.lo >= 0, y.hi, math.inf)
    known = (x.lo >= 0) | (y.lo >= 0)
    return Interval(torch.where(known, 0.0, -math.inf), torch.minimum(x_top, y_top))


def _or_bounds(x: Interval, y: Interval) -> Interval:
    if x.dtype == y.dtype == BOOL:
        return Interval.truth(x.lo | y.lo, x.hi | y.hi)
    known = (x.lo >= 0) & (y.lo >= 0)
    return Interval(torch.where(known, torch.maximum(x.lo, y.lo), -math.inf), torch.where(known, _bits_ceiling(x, y), math.inf))


def _xor_bounds(x: Interval, y: Interval) -> Interval:
    if x.dtype == y.dtype == BOOL:
        return Interval.truth(x.lo & ~y.hi | ~x.hi & y.lo, x.hi & ~y.lo | ~x.lo & y.hi)
    known = (x.lo >= 0) & (y.lo >= 0)
    return Interval(torch.where(known, 0.0, -math.inf), torch.where(known, _bits_ceiling(x, y), math.inf))


declare(
    "and",
    spelled=[torch.logical_and, torch.bitwise_and, "logical_and", "bitwise_and", "__and__"],
    dtype=_bits,
    eager=torch.bitwise_and,
    bounds=_and_bounds,
    vjp=None,
    traits={"commutative", "associative", "idempotent"},
    domain=[BOOLS, BOOLS],
    promotes="common",
)
declare(
    "or",
    spelled=[torch.logical_or, torch.bitwise_or, "logical_or", "bitwise_or", "__or__"],
    dtype=_bits,
    eager=torch.bitwise_or,
    bounds=_or_bounds,
    vjp=None,
    traits={"commutative", "associative", "idempotent"},
    domain=[BOOLS, BOOLS],
    promotes="common",
)
declare(
    "xor",
    spelled=[torch.logical_xor, torch.bitwise_xor, "logical_xor", "bitwise_xor", "__xor__"],
    dtype=_bits,
    eager=torch.bitwise_xor,
    bounds=_xor_bounds,
    vjp=None,
    traits={"commutative", "associative"},
    domain=[BOOLS, BOOLS],
    promotes="common",
)
declare(
    "not",
    spelled=[torch.logical_not, "logical_not"],
    dtype=_logic,
    eager=torch.logical_not,
    bounds=lambda x: Interval.truth(~x.hi, ~x.lo),
    vjp=None,
    traits=set(),
    domain=[BOOLS],
    promotes="",
)
declare(
    "invert",
    spelled=[],  # `~` and torch.bitwise_not on integers; on truth values they trace to "not"
    dtype=_integer,
    eager=torch.bitwise_not,
    bounds=lambda x: Interval(-1 - x.hi, -1 - x.lo, x.nan, FLOAT32, -1 - x.most, -1 - x.least),
    vjp=None,
    traits=set(),
    domain=[ints(-50, 50)],
    promotes="",
)


def _shift_left(x: Tensor, y: Tensor) -> Tensor:
    return torch.bitwise_left_shift(x, y)


def _shift_right(x: Tensor, y: Tensor) -> Tensor:
    return torch.bitwise_right_shift(x, y)


def _left_bounds(x: Interval, y: Interval) -> Interval:
    shifted = corners(lambda a, b: a * torch.exp2(b), x, Interval(y.lo.clamp(0, 62), y.hi.clamp(0, 62)))
    # Past 31 bits an int32 wraps; nothing is then known.
    known = (y.lo >= 0) & (shifted.hi < 2.0**31) & (shifted.lo >= -(2.0**31))
    return Interval(torch.where(known, shifted.lo, -math.inf), torch.where(known, shifted.hi, math.inf))


def _right_bounds(x: Interval, y: Interval) -> Interval:
    shifted = corners(lambda a, b: torch.floor(a / torch.exp2(b)), x, Interval(y.lo.clamp(0, 62), y.hi.clamp(0, 62)))
    known = y.lo >= 0
    return Interval(torch.where(known, shifted.lo, -math.inf), torch.where(known, shifted.hi, math.inf))


declare(
    "shl",
    spelled=[torch.bitwise_left_shift, "bitwise_left_shift", "__lshift__", "left_shift"],
    dtype=_integer,
    eager=_shift_left,
    bounds=_left_bounds,
    vjp=None,
    traits=set(),
    domain=[ints(-50, 50), ints(0, 12)],
    promotes="common",
)
declare(
    "shr",
    spelled=[torch.bitwise_right_shift, "bitwise_right_shift", "__rshift__", "right_shift"],
    dtype=_integer,
    eager=_shift_right,
    bounds=_right_bounds,
    vjp=None,
    traits=set(),
    domain=[ints(-5000, 5000), ints(0, 12)],
    promotes="common",
)

# --- comparison ---------------------------------------------------------------------------------------------------------------------


def _unless_nan(certain: Tensor, x: Interval, y: Interval) -> Tensor:
    return unless(either(x.nan, y.nan), False, certain)


def _below(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Interval]:
    """Of `<` and `<=`: certain if the largest left one compares to the smallest right one, possible the other way round."""

    def bounds(x: Interval, y: Interval) -> Interval:
        return Interval.truth(_unless_nan(compare(x.hi, y.lo), x, y), compare(x.lo, y.hi))

    return bounds


def _above(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Interval]:
    below = _below(lambda a, b: compare(b, a))
    return lambda x, y: below(y, x)


def _equal_bounds(x: Interval, y: Interval) -> Interval:
    certain = (x.hi == y.lo) & (x.lo == y.hi)  # no end lies between them, so all four are one
    return Interval.truth(_unless_nan(certain, x, y), (x.lo <= y.hi) & (y.lo <= x.hi))


def _unequal_bounds(x: Interval, y: Interval) -> Interval:
    equal = _equal_bounds(x, y)
    return Interval.truth(~equal.hi, ~equal.lo)


_COMPARISONS: list[tuple[str, list[Any], Callable[..., Tensor], Callable[..., Interval], set[str]]] = [
    ("lt", [torch.lt, torch.less, "lt", "less", "__lt__"], torch.lt, _below(operator.lt), set()),
    ("le", [torch.le, torch.less_equal, "le", "less_equal", "__le__"], torch.le, _below(operator.le), set()),
    ("gt", [torch.gt, torch.greater, "gt", "greater", "__gt__"], torch.gt, _above(operator.gt), set()),
    ("ge", [torch.ge, torch.greater_equal, "ge", "greater_equal", "__ge__"], torch.ge, _above(operator.ge), set()),
    ("eq", [torch.eq, "eq", "equal", "__eq__"], torch.eq, _equal_bounds, {"commutative"}),
    ("ne", [torch.ne, torch.not_equal, "ne", "not_equal", "__ne__"], torch.ne, _unequal_bounds, {"commutative"}),
]
for _name, _spelled, _eager, _bounds, _traits in _COMPARISONS:
    declare(
        _name,
        spelled=_spelled,
        dtype=_compare,
        eager=_eager,
        bounds=_bounds,
        vjp=None,
        traits=_traits | {"compare", "stepped"},
        domain=[ints(-5, 5), ints(-5, 5)],
        promotes="common",
    )


def _where_bounds(c: Interval, x: Interval, y: Interval) -> Interval:
    union = x.union(y)
    lo = torch.where(c.lo, x.lo, torch.where(c.hi, union.lo, y.lo))
    hi = torch.where(c.lo, x.hi, torch.where(c.hi, union.hi, y.hi))
    return dataclasses.replace(union, lo=lo, hi=hi, nan=either(both(x.nan, c.hi), both(y.nan, ~c.lo)))


declare(
    "where",
    spelled=[torch.where, "where"],
    dtype=_select,
    eager=torch.where,
    bounds=_where_bounds,
    vjp=lambda g, y, c, a, b: [None, apply("where", c, g, 0.0), apply("where", c, 0.0, g)],
    traits={"select"},
    domain=[BOOLS, floats(-20, 20), floats(-20, 20)],
    promotes="branches",
)

# --- functions of a float -----------------------------------------------------------------------------------------------------------

_LN2 = math.log(2.0)


def _declare_float(
    name: str,
    spelled: Sequence[Any],
    eager: Callable[[Tensor], Tensor],
    bounds: Callable[[Interval], Interval],
    vjp: Callable[[Node, Node, Node], Sequence[Node | None]],
    domain: Domain,
    traits: set[str],
) -> Op:
    return declare(
        name, spelled=spelled, dtype=_float, eager=eager, bounds=bounds, vjp=vjp, traits=traits, domain=[domain], promotes="float"
    )


_declare_float(
    "exp", [torch.exp, "exp"], torch.exp, lambda x: x.rising(torch.exp), lambda g, y, x: [g * y], floats(-20, 20), {"rising", "costly"}
)
_declare_float(
    "exp2",
    [torch.exp2, "exp2"],
    torch.exp2,
    lambda x: x.rising(torch.exp2),
    lambda g, y, x: [g * y * _LN2],
    floats(-20, 20),
    {"rising", "costly"},
)
_declare_float(
    "expm1",
    [torch.expm1, "expm1"],
    torch.expm1,
    lambda x: x.rising(torch.expm1).widened(absolute=2.0**-20),
    lambda g, y, x: [g * (y + 1.0)],
    floats(-20, 20),
    {"rising", "costly"},
)


def _log_like(f: Callable[[Tensor], Tensor], start: float) -> Callable[[Interval], Interval]:
    # Approximate logarithms are off by a share of 1 near their zero, not by a share of the result.
    slack = 0.0 if f is torch.sqrt else 2.0**-20
    return lambda x: (
        Interval(x.lo.clamp(min=start), x.hi.clamp(min=start), x.nan)
        .rising(f, nan=False if x.least >= start else x.lo < start)
        .widened(absolute=slack)
    )


_declare_float(
    "log", [torch.log, "log"], torch.log, _log_like(torch.log, 0.0), lambda g, y, x: [g / x], floats(0.01, 20), {"rising", "costly"}
)
_declare_float(
    "log2",
    [torch.log2, "log2"],
    torch.log2,
    _log_like(torch.log2, 0.0),
    lambda g, y, x: [g / (x * _LN2)],
    floats(0.01, 20),
    {"rising", "costly"},
)
_declare_float(
    "log1p",
    [torch.log1p, "log1p"],
    torch.log1p,
    _log_like(torch.log1p, -1.0),
    lambda g, y, x: [g / (x + 1.0)],
    floats(-0.9, 20),
    {"rising", "costly"},
)
_declare_float(
    "sqrt",
    [torch.sqrt, "sqrt"],
    torch.sqrt,
    _log_like(torch.sqrt, 0.0),
    lambda g, y, x: [g * 0.5 / y],
    floats(0.01, 20),
    {"rising", "costly"},
)


def _rsqrt_bounds(x: Interval) -> Interval:
    """1/sqrt(-0.0) is -inf."""
    root = Interval(x.lo.clamp(min=0), x.hi.clamp(min=0), x.nan).falling(torch.rsqrt, nan=x.lo < 0)
    return Interval(torch.where(x.lo <= 0, -math.inf, root.lo), root.hi, root.nan)


_declare_float(
    "rsqrt",
    [torch.rsqrt, "rsqrt"],
    torch.rsqrt,
    _rsqrt_bounds,
    lambda g, y, x: [g * -0.5 * y * y * y],
    floats(0.01, 20),
    {"costly"},
)
_declare_float(
    "tanh",
    [torch.tanh, "tanh"],
    torch.tanh,
    lambda x: x.rising(torch.tanh).widened(2.0**-10).clipped(-1, 1),
    lambda g, y, x: [g * (1.0 - y * y)],
    floats(-20, 20),
    {"rising", "costly"},
)
_declare_float(
    "sigmoid",
    [torch.sigmoid, "sigmoid", torch.special.expit, "expit"],
    torch.sigmoid,
    lambda x: x.rising(torch.sigmoid).widened(2.0**-10).clipped(0, 1),
    lambda g, y, x: [g * y * (1.0 - y)],
    floats(-20, 20),
    {"rising", "costly"},
)
_declare_float(
    "erf",
    [torch.erf, "erf", torch.special.erf],
    torch.erf,
    lambda x: x.rising(torch.erf).clipped(-1, 1),
    lambda g, y, x: [g * (2.0 / math.sqrt(math.pi)) * apply("exp", -(x * x))],
    floats(-5, 5),
    {"rising", "costly"},
)


def _wave_bounds(x: Interval) -> Interval:
    return Interval(torch.full_like(x.lo, -1.0), torch.full_like(x.hi, 1.0), either(x.nan, x.is_infinite), FLOAT32, -1.0, 1.0)


_declare_float("sin", [torch.sin, "sin"], torch.sin, _wave_bounds, lambda g, y, x: [g * apply("cos", x)], floats(-20, 20), {"costly"})
_declare_float("cos", [torch.cos, "cos"], torch.cos, _wave_bounds, lambda g, y, x: [-(g * apply("sin", x))], floats(-20, 20), {"costly"})


def _step(f: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    def bounds(x: Interval) -> Interval:
        stepped = Interval(f(x.lo), f(x.hi), x.nan)
        return stepped.with_range(math.floor(x.least), math.ceil(x.most)) if x.is_finite else stepped

    return bounds


_declare_float(
    "floor",
    [torch.floor, "floor"],
    torch.floor,
    _step(torch.floor),
    lambda g, y, x: [None],
    floats(-20, 20),
    {"rising", "idempotent", "stepped"},
)
_declare_float(
    "ceil",
    [torch.ceil, "ceil"],
    torch.ceil,
    _step(torch.ceil),
    lambda g, y, x: [None],
    floats(-20, 20),
    {"rising", "idempotent", "stepped"},
)
_declare_float(
    "round",
    [torch.round, "round", "rint"],
    torch.round,
    _step(torch.round),
    lambda g, y, x: [None],
    floats(-20, 20),
    {"rising", "idempotent", "stepped"},
)
_declare_float(
    "trunc",
    [torch.trunc, torch.fix, "trunc", "fix"],
    torch.trunc,
    _step(torch.trunc),
    lambda g, y, x: [None],
    floats(-20, 20),
    {"rising", "idempotent", "stepped"},
)


def _pow_bounds(x: Interval, y: Interval) -> Interval:
    """Monotone in each operand where the base is positive; elsewhere unknown."""
    unknown = x.lo <= 0
    power = corners(torch.pow, Interval(x.lo.clamp(min=1e-300), x.hi.clamp(min=1e-300)), y).widened(2.0**-14)
    return Interval(torch.where(unknown, -math.inf, power.lo), torch.where(unknown, math.inf, power.hi), either(x.nan, y.nan, unknown))


def _pow_vjp(g: Node, y: Node, a: Node, b: Node) -> list[Node]:
    """A base to the power 0 is constant, and 0 to a positive power is 0: neither may become 0 * inf."""
    base = apply("where", apply("eq", b, 0.0), 0.0, g * b * apply("pow", a, b - 1.0))
    logarithm = apply("log", apply("where", apply("eq", a, 0.0), 1.0, a))
    return [base, g * y * logarithm]


declare(
    "pow",
    spelled=[torch.pow, torch.float_power, "pow", "float_power", "__pow__", "power"],
    dtype=_float,
    eager=torch.pow,
    bounds=_pow_bounds,
    vjp=_pow_vjp,
    traits={"costly"},
    domain=[floats(0.1, 5), floats(-3, 3)],
    promotes="float",
)

# --- casts and gathers: their dtype is an attribute, so they are built by `cast` and `gather` --------------------------------------


TORCH_DTYPES = {BOOL: torch.bool, INT32: torch.int32, INT64: torch.int64, FLOAT32: torch.float32}


def cast_eager(x: Tensor, dtype: str, float_dtype: torch.dtype = torch.float32) -> Tensor:
    """The meaning of `cast`: to bool by != 0, to an integer by truncation, to float in the evaluation's float dtype."""
    return x.to(float_dtype if dtype == FLOAT32 else TORCH_DTYPES[dtype])


def cast_bounds(x: Interval, source: str, target: str) -> Interval:
    """Bounds of a cast. Integers above 2^24 round in float32; a float outside an integer's range has no meaning."""
    if target == BOOL:
        return x if source == BOOL else _unequal_bounds(x, Interval.point(0.0))
    if source == BOOL:
        return Interval(x.lo.to(torch.float64), x.hi.to(torch.float64), False, FLOAT32, 0.0, 1.0)
    if target == FLOAT32:
        return _widened_unless_small(x)
    if source == FLOAT32:
        least, most = INTEGER_ENDS[target]
        unknown = either(x.nan, False if least <= x.least and x.most <= most else (x.lo <= least) | (x.hi >= most))
        lo, hi = unless(unknown, least, torch.trunc(x.lo)), unless(unknown, most, torch.trunc(x.hi))
        return Interval(lo, hi, False, FLOAT32, max(least, x.least), min(most, x.most))
    return x


def cast_vjp(g: Node, source: str) -> Node | None:
    """Gradient through a cast: only float32 carries one."""
    return g if source == FLOAT32 else None


def gather_eager(tensor: Tensor, indices: Sequence[Tensor], float_dtype: torch.dtype = torch.float32) -> Tensor:
    """The meaning of `gather`: one element per index tuple; an index outside gives 0 and reads nothing."""
    wrapped, inside = wrap_indices(tensor.shape, indices)
    if indices and not tensor.numel():
        tensor, wrapped = tensor.new_zeros([1] * len(wrapped)), [torch.zeros_like(index) for index in wrapped]
    value = tensor[tuple(wrapped)] if indices else tensor
    dtype = float_dtype if tensor.is_floating_point() else (tensor.dtype if tensor.dtype in (torch.bool, torch.int64) else torch.int32)
    value = value.to(dtype)
    return value if inside is None else torch.where(inside, value, torch.zeros((), dtype=dtype, device=value.device))


def wrap_indices(shape: Sequence[int], indices: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Indices made safe (negative ones counted from the end, others clamped), and where they were inside; None for no index."""
    wrapped: list[Tensor] = []
    inside: Tensor | None = None
    for size, index in zip(shape, indices, strict=True):
        index = index.long()
        index = torch.where(index < 0, index + size, index)
        ok = (index >= 0) & (index < size)
        inside = ok if inside is None else inside & ok
        wrapped.append(index.clamp(0, max(size - 1, 0)))
    return wrapped, inside


STRUCTURAL = ("cast", "gather")  # ops whose rows need more than their operands
assert set(DTYPES) == set(TORCH_DTYPES)
