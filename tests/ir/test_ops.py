"""Each row of the op table by itself: complete, typed, bounded, differentiable, and floored as Python does."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flexc.ir import ops
from flexc.ir.bounds import bounds
from flexc.ir.eager import Environment, evaluate
from flexc.ir.grad import gradient
from flexc.ir.graph import BOOL, DTYPES, FLOAT32, INT32, INT64, Node, const, const_value, input_node, promote, scalar
from flexc.ir.interval import Interval
from flexc.ir.ops import TABLE, Op, apply, cast, feeding_steps

ROWS = sorted(TABLE.values(), key=lambda row: row.name)
KIND_DTYPES = {"float": FLOAT32, "int": INT32, "bool": BOOL}
TRAITS = {"commutative", "associative", "idempotent", "compare", "rising", "stepped", "costly", "select"}


def operand_kinds(row: Op) -> list[list[str]]:
    """The combinations of kinds to test: the domain's own, and the other kind of number where the row takes it."""
    own = [d.kind for d in row.domain]
    found = [own]
    for kind in ("int", "float", "bool"):
        other = [kind if k != "bool" or kind == "bool" else k for k in own]
        if other in found:
            continue
        try:
            row.dtype(*[KIND_DTYPES[k] for k in other])
        except TypeError:
            continue
        if row.promotes != "float" or kind == "float":
            found.append(other)
    return found


CASES = [pytest.param(row, kinds, id=f"{row.name}-{'-'.join(kinds)}") for row in ROWS for kinds in operand_kinds(row)]


def leaves(kinds: list[str]) -> list[Node]:
    return [scalar(slot, KIND_DTYPES[kind]) for slot, kind in enumerate(kinds)]


def random_intervals(kind: str, lo: float, hi: float, count: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Intervals of widths from 0 to everything, within the domain, across its ends and far outside."""
    if kind == "bool":
        pairs = torch.randint(0, 2, (2, count, 1), generator=random).double()
        return pairs.amin(0), pairs.amax(0)
    scale = torch.rand(count, 1, generator=random, dtype=torch.float64).pow(3) * 3 * (hi - lo)
    centre = lo + (hi - lo) * (1.5 * torch.rand(count, 1, generator=random, dtype=torch.float64) - 0.25)
    scale[::4] = 0.0
    low, high = centre - scale / 2, centre + scale / 2
    if kind == "int":
        low, high = low.round(), high.round()
    else:
        low, high = low.float().double(), high.float().double()
        low[::7], high[::7] = low[::7].round(), high[::7].round()
    return torch.minimum(low, high), torch.maximum(low, high)


def samples(kind: str, lo: torch.Tensor, hi: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    share = torch.rand(lo.shape[0], count, generator=random, dtype=torch.float64)
    share[:, 0], share[:, 1] = 0.0, 1.0
    value = lo + share * (hi - lo)
    if kind == "float":
        return value.float().double().clamp(lo, hi)
    return value.round()


@pytest.mark.parametrize("foreknown", [False, True], ids=["ends in tensors", "ends known before any data"])
@pytest.mark.parametrize("row, kinds", CASES)
def test_bounds_hold_every_sampled_value(row, kinds, foreknown):
    random = torch.Generator().manual_seed(len(row.name))
    node = apply(row.name, *leaves(kinds))
    for scale in (1.0, 40.0):
        ends = [random_intervals(k, d.lo * scale, d.hi * scale, 48, random) for d, k in zip(row.domain, kinds, strict=True)]
        points = [samples(k, *e, 40, random) for e, k in zip(ends, kinds, strict=True)]
        # One at a time: what is unknown about one interval must not excuse another.
        for i in range(48):
            operands = [of_ends(lo[i], hi[i], foreknown) for lo, hi in ends]
            known = bounds([node], {}, operands)[node]
            for dtype in (torch.float32, torch.float64):
                (found,) = evaluate([node], Environment({}, scalars=[p[i] for p in points], float_dtype=dtype))
                assert_holds(known, found.double(), f"{row.name} of {[(lo[i].item(), hi[i].item()) for lo, hi in ends]}")


def of_ends(lo: torch.Tensor, hi: torch.Tensor, foreknown: bool) -> Interval:
    """With the ends known before any data, a point is one tensor."""
    if not foreknown:
        return Interval(lo, hi)
    return Interval(lo, lo if lo == hi else hi).with_range(lo.item(), hi.item())


def assert_holds(known: Interval, found: torch.Tensor, what: str) -> None:
    nan = found.isnan()
    assert known.nan or not nan.any(), f"{what} can be NaN"
    inside = (known.lo <= found) & (found <= known.hi) | nan
    assert inside.all(), f"{what}: {found[~inside][:3].tolist()} outside [{known.lo.item()}, {known.hi.item()}]"
    assert known.least <= known.lo and known.hi <= known.most, f"{what}: {known} is not what was known before"


class NoHostDecisions(TorchFunctionMode):
    """Refuses what would wait for a GPU: a tensor's value in Python's hands."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in (
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "item",
            "tolist",
            "is_nonzero",
            "nonzero",
            "numpy",
        ), f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


def test_host_decisions_are_seen():
    for decide in (bool, int, float, torch.Tensor.item, torch.Tensor.nonzero):
        with pytest.raises(AssertionError, match="waits for the device"), NoHostDecisions():
            decide(torch.ones(()))


@pytest.mark.parametrize("nan", [False, True], ids=["numbers", "perhaps NaN"])
@pytest.mark.parametrize("row, kinds", CASES)
def test_bounds_decide_nothing_on_the_host(row, kinds, nan):
    random = torch.Generator().manual_seed(4)
    ends = [random_intervals(k, d.lo * 3, d.hi * 3, 48, random) for d, k in zip(row.domain, kinds, strict=True)]
    uncertain = (torch.arange(48) % 2 == 0)[:, None] if nan else False
    operands = [Interval(lo, hi, uncertain if k == "float" else False) for (lo, hi), k in zip(ends, kinds, strict=True)]
    foreknown = [x.with_range(x.lo.min().item(), x.hi.max().item()) for x in operands]
    node = apply(row.name, *leaves(kinds))
    both_sides = [apply(row.name, leaves(kinds)[0], leaves(kinds)[0])] if row.arity == 2 and len(set(kinds)) == 1 else []
    with NoHostDecisions():
        bounds([node, *both_sides], {}, operands)
        bounds([node, *both_sides], {}, foreknown)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_bounds_of_casts_decide_nothing_on_the_host(source, target):
    lo = torch.tensor([-3.0, 0.0, 1e30, -math.inf], dtype=torch.float64)
    node = cast(scalar(0, source), target)
    with NoHostDecisions():
        bounds([node], {}, [Interval(lo, lo + 2.0, torch.tensor([True, False, False, True]))])


def test_what_can_be_nan_is_told_of_each_tile():
    x, y = scalar(0, FLOAT32), scalar(1, FLOAT32)
    operands = [
        Interval(torch.tensor([-1.0, 4.0, 4.0]).double(), torch.tensor([3.0, 9.0, 9.0]).double()),
        Interval(torch.tensor([2.0, 1.0, 0.0]).double(), torch.tensor([2.0, 1.0, 5.0]).double(), torch.tensor([False, False, True])),
    ]
    for node, expected in [
        (apply("sqrt", x), [True, False, False]),
        (apply("truediv", x, y), [False, False, True]),
        (apply("pow", x, y), [True, False, True]),
        (apply("where", apply("gt", x, 3.5), x, y), [False, False, False]),
        (apply("where", apply("gt", x, 3.5), y, x), [False, False, True]),
        (apply("where", apply("gt", x, 0.0), y, apply("sqrt", x)), [True, False, True]),
    ]:
        assert torch.as_tensor(bounds([node], {}, operands)[node].nan).expand(3).tolist() == expected, node
    compared = bounds([apply("ge", x, apply("truediv", x, y))], {}, operands)
    assert compared[apply("ge", x, apply("truediv", x, y))].is_true.tolist() == [False, False, False]
    below = apply("lt", y, 6.0)
    assert bounds([below], {}, operands)[below].is_true.tolist() == [True, True, False]


@pytest.mark.parametrize("row, kinds", CASES)
def test_bounds_are_not_everything(row, kinds):
    """Of a point within the domain they are nearly that point: bounds that always say "anything" would be sound, and useless."""
    if row.name in ("sin", "cos") or (row.name in ("and", "or", "xor") and "int" in kinds) or (row.name == "floormod" and "float" in kinds):
        pytest.skip("only the range is known")
    random = torch.Generator().manual_seed(3)
    points = []
    for d, k in zip(row.domain, kinds, strict=True):
        value = d.lo + (d.hi - d.lo) * (0.2 + 0.6 * torch.rand(1, generator=random, dtype=torch.float64)).item()
        points.append(torch.tensor(float(round(value)) if k != "float" else value, dtype=torch.float32).double().clamp(d.lo, d.hi))
    node = apply(row.name, *leaves(kinds))
    known = bounds([node], {}, [Interval(p, p) for p in points])[node]
    (found,) = evaluate([node], Environment({}, scalars=points, float_dtype=torch.float64))
    assert known.hi.double() - known.lo.double() <= 0.01 * (1 + found.double().abs())


@pytest.mark.parametrize("name", [row.name for row in ROWS if row.vjp is not None])
def test_vjp_agrees_with_autograd(name):
    row = TABLE[name]
    if row.dtype(*[BOOL if d.kind == "bool" else FLOAT32 for d in row.domain]) != FLOAT32:
        pytest.skip("no floats, no gradient")
    random = torch.Generator().manual_seed(1)
    kinds = ["bool" if d.kind == "bool" else "float" for d in row.domain]
    nodes = leaves(kinds)
    y = apply(name, *nodes)
    values = [
        torch.randint(0, 2, (200,), generator=random).bool()
        if k == "bool"
        else (d.lo + (d.hi - d.lo) * torch.rand(200, generator=random, dtype=torch.float64)).requires_grad_()
        for d, k in zip(row.domain, kinds, strict=True)
    ]
    env = Environment({}, scalars=values, float_dtype=torch.float64)
    (out,) = evaluate([y], env)
    floats = [(n, v) for n, v in zip(nodes, values, strict=True) if v.is_floating_point()]
    expected = torch.autograd.grad(out.sum(), [v for _, v in floats], allow_unused=True) if out.requires_grad else [None] * len(floats)
    for (node, value), want, factor in zip(floats, expected, gradient(y, [n for n, _ in floats]), strict=True):
        found = torch.zeros_like(value) if factor is None else evaluate([factor], env)[0].expand_as(value)
        torch.testing.assert_close(found, torch.zeros_like(value) if want is None else want, rtol=1e-6, atol=1e-7, msg=f"{name} by {node}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_is_complete(row):
    assert row.name and row.arity in (1, 2, 3)
    assert row.promotes in ("common", "float", "branches", "")
    assert row.traits <= TRAITS
    for domain in row.domain:
        assert domain.kind in KIND_DTYPES and domain.lo <= domain.hi
    assert ("commutative" not in row.traits and "associative" not in row.traits) or row.arity == 2


def test_no_spelling_means_two_ops():
    seen: dict[object, str] = {}
    for row in ROWS:
        for spelling in row.spelled:
            assert seen.setdefault(spelling, row.name) == row.name, f"{spelling} means {seen[spelling]} and {row.name}"


@pytest.mark.parametrize("row, kinds", CASES)
def test_dtype_rule_is_what_eager_makes(row, kinds):
    random = torch.Generator().manual_seed(0)
    ends = [random_intervals(k, d.lo, d.hi, 8, random) for d, k in zip(row.domain, kinds, strict=True)]
    node = apply(row.name, *leaves(kinds))
    (found,) = evaluate([node], Environment({}, scalars=[lo for lo, _ in ends]))
    assert found.dtype == ops.TORCH_DTYPES[node.dtype]


@pytest.mark.parametrize("row, kinds", CASES)
def test_traits_hold(row, kinds):
    """Commutative, idempotent and rising are promises that passes rely on."""
    random = torch.Generator().manual_seed(5)
    points = []
    for d, k in zip(row.domain, kinds, strict=True):
        lo, _ = random_intervals(k, d.lo, d.hi, 60, random)
        low, high = (0, 1) if k == "bool" else (d.lo, d.hi)
        points.append(lo.clamp(low, high).flatten().to(ops.TORCH_DTYPES[KIND_DTYPES[k]]))
    if "commutative" in row.traits:
        assert torch.equal(row.eager(*points), row.eager(*points[::-1]))
    if "idempotent" in row.traits:
        y = row.eager(*points)
        assert torch.equal(row.eager(y), y) if row.arity == 1 else torch.equal(row.eager(y, points[1]), y)
    if "rising" in row.traits:
        y = row.eager(points[0].sort().values)
        assert (y[1:] >= y[:-1]).all()


@pytest.mark.parametrize(
    "name, python",
    [("floordiv", lambda a, b: a // b), ("floormod", lambda a, b: a % b), ("shr", lambda a, b: a >> b), ("shl", lambda a, b: a << b)],
)
def test_integer_ops_floor_as_python_does(name, python):
    for a in range(-9, 10):
        for b in (1, 2, 3, 7) if name in ("shl", "shr") else (-7, -3, -2, -1, 1, 2, 3, 7):
            (found,) = evaluate([apply(name, scalar(0, INT32), scalar(1, INT32))], Environment({}, scalars=[a, b]))
            assert int(found) == python(a, b), (a, b)


def test_integers_wrap_around():
    node = apply("add", scalar(0, INT32), scalar(1, INT32))
    assert int(evaluate([node], Environment({}, scalars=[2**31 - 1, 1]))[0]) == -(2**31)


def test_division_by_zero_does_not_fault():
    for name in ("floordiv", "floormod"):
        evaluate([apply(name, scalar(0, INT32), scalar(1, INT32))], Environment({}, scalars=[5, 0]))


@pytest.mark.parametrize(
    "name, operands, message",
    [
        ("add", [True, False], "expected numbers, got truth values"),
        ("shl", [1.0, 2], "expected integers"),
        ("and", [1.5, True], "expected integers or truth values, got float32"),
        ("not", [1], "expected truth values"),
        ("where", [1, 2.0, 3.0], "expected a truth value as the condition"),
        ("tanh", [1.0, 2.0], "tanh takes 1 operands, got 2"),
    ],
)
def test_operands_that_a_row_does_not_take(name, operands, message):
    with pytest.raises(TypeError, match=message):
        apply(name, *operands)


def test_promotion_follows_the_order_of_dtypes():
    assert [promote(a, b) for a, b in pairwise(DTYPES)] == [INT32, INT64, FLOAT32]
    sum_ = apply("add", input_node("q_idx"), 0.5)
    assert sum_.dtype == FLOAT32 and [a.dtype for a in sum_.args] == [FLOAT32, FLOAT32]


@pytest.mark.parametrize(
    "value, dtype, expected",
    [(2.9, INT32, 2), (-2.9, INT64, -2), (2**40, FLOAT32, 2.0**40), (3, BOOL, True), (math.nan, BOOL, True), (True, FLOAT32, 1.0)],
)
def test_cast_of_a_constant_is_a_constant(value, dtype, expected):
    node = cast(const(value), dtype)
    assert node.op == "const" and node.dtype == dtype and const_value(node) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e9])
def test_cast_of_a_float_without_an_integer_stays_a_cast(value):
    assert cast(const(value), INT32).op == "cast"


def test_values_that_decide_something_are_found():
    score, q_idx = input_node("score"), input_node("q_idx")
    third = q_idx / 3
    smooth = score * 0.1
    root = apply("where", apply("gt", apply("floor", third), 2.0), smooth, 0.0)
    feeding = feeding_steps([root])
    assert third in feeding and smooth not in feeding and score not in feeding
