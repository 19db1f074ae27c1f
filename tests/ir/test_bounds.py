"""Bounds of whole programs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexc.ir.bounds import anything, bounds
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node, const, input_node, scalar
from flexc.ir.interval import Interval
from flexc.ir.ops import apply, cast, gather
from tests.strategies import environment, nodes, quick

Q, K, SCORE = input_node("q_idx"), input_node("kv_idx"), input_node("score")


def interval(lo, hi) -> Interval:
    return Interval.of(torch.tensor(lo, dtype=torch.float64), torch.tensor(hi, dtype=torch.float64))


def tile(rows: tuple[int, int], columns: tuple[int, int]) -> dict[str, Interval]:
    return {"q_idx": interval(*rows), "kv_idx": interval(*columns)}


def verdict(mask: Node, rows: tuple[int, int], columns: tuple[int, int], **kwargs) -> str:
    found = bounds([mask], tile(rows, columns), **kwargs)[mask]
    return "empty" if found.is_false.all() else "full" if found.is_true.all() else "partial"


@quick
@given(pool=nodes(), seed=st.integers(0, 100), data=st.data())
def test_bounds_hold_every_value_of_every_node(pool, seed, data):
    """In float32 and float64, over random tiles of positions, with captured tensors unknown or known by their extremes."""
    everything = pool.float + pool.int + pool.bool
    env = environment(seed, torch.float32)
    q0, q1 = sorted(data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4))))
    k0, k1 = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    score = env.inputs["score"]
    inputs = {
        **tile((q0, q1), (k0, k1)),
        "batch": interval(0, 1),
        "head": interval(0, 2),
        "score": interval(score.min().item(), score.max().item()),
    }

    def by_extremes(node: Node, indices: list[Interval]) -> Interval:
        tensor = env.tensors[node.attrs[0]].double()
        return interval(min(tensor.min().item(), 0.0), max(tensor.max().item(), 0.0))

    known = bounds(everything, inputs, [interval(3, 3), interval(0.75, 0.75)], data.draw(st.sampled_from([None, by_extremes])))
    for dtype in (torch.float32, torch.float64):
        env = environment(seed, dtype)
        for node, value in zip(everything, evaluate(everything, env), strict=True):
            value = value.expand(2, 3, 5, 7)[..., q0 : q1 + 1, k0 : k1 + 1].double()
            x = known[node]
            assert x.nan or not value.isnan().any(), f"{node} can be NaN"
            assert node.dtype == BOOL or (x.least <= x.lo and x.hi <= x.most), f"{node}: {x} is not what was known before"
            assert ((x.lo <= value) & (value <= x.hi) | value.isnan()).all(), f"{node}: {value.min()}..{value.max()} outside {x}"


def test_causal_is_decided_off_the_diagonal():
    causal = apply("ge", Q, K)
    assert verdict(causal, (64, 127), (0, 63)) == "full"
    assert verdict(causal, (0, 63), (64, 127)) == "empty"
    assert verdict(causal, (0, 63), (0, 63)) == "partial"


def test_tiles_are_vectorised():
    starts = torch.arange(4, dtype=torch.float64) * 16
    inputs = {
        "q_idx": Interval(starts.view(4, 1), starts.view(4, 1) + 15),
        "kv_idx": Interval(starts.view(1, 4), starts.view(1, 4) + 15),
    }
    window = apply("and", apply("ge", Q, K), apply("lt", Q - K, 16))
    found = bounds([window], inputs)[window]
    assert found.hi.shape == (4, 4)
    assert found.is_false.sum() == 9 and not found.is_true.any()


def test_blocks_of_a_floor_division_are_exact():
    same = apply("eq", apply("floordiv", Q, 16), apply("floordiv", K, 16))
    assert verdict(same, (32, 47), (32, 47)) == "full"
    assert verdict(same, (32, 47), (48, 63)) == "empty"


def test_a_remainder_within_one_period_is_exact():
    first = apply("lt", apply("floormod", K, 64), 16)
    assert verdict(first, (0, 0), (128, 143)) == "full"
    assert verdict(first, (0, 0), (144, 191)) == "empty"
    assert verdict(first, (0, 0), (128, 200)) == "partial"


def test_a_shift_of_both_sides_does_not_hide_the_diagonal():
    """Positions in a packed sequence: the start is unknown, but the same on both sides."""
    start = gather(0, INT32, [input_node("batch")])
    mask = apply("ge", Q - start, K - start)

    def positions(node, indices):
        return interval(0, 10**6)

    assert verdict(mask, (64, 127), (0, 63), gather=positions) == "full"
    assert verdict(mask, (0, 63), (64, 127), gather=positions) == "empty"


def test_a_shift_that_may_wrap_decides_nothing():
    start = gather(0, INT32, [input_node("batch")])
    assert verdict(apply("ge", Q - start, K - start), (64, 127), (0, 63)) == "partial"


def test_like_terms_are_collected():
    twice = apply("sub", apply("add", Q, K), K)
    found = bounds([twice], tile((3, 5), (0, 1000)))[twice]
    assert (found.lo, found.hi, found.nan, found.dtype) == (3, 5, False, INT32)


def test_an_int32_that_may_wrap_is_anything():
    far = apply("mul", Q, 2**20)
    known = bounds([far], tile((0, 2**12), (0, 0)))[far]
    assert (known.lo, known.hi) == (-(2.0**31), 2.0**31 - 1)
    assert verdict(apply("ge", far, 0), (0, 2**12), (0, 0)) == "partial"
    wide = apply("mul", cast(Q, INT64), 2**20)
    assert verdict(apply("ge", wide, 0), (0, 2**12), (0, 0)) == "full"


def test_a_product_that_float32_flushes_to_zero_is_not_positive():
    tiny = apply("mul", scalar(0, FLOAT32), scalar(0, FLOAT32))
    positive = apply("gt", tiny, 0.0)
    assert verdict(positive, (0, 0), (0, 0), scalars=[interval(1e-30, 1e-30)]) == "partial"
    assert verdict(apply("gt", apply("exp", scalar(0, FLOAT32)), 0.0), (0, 0), (0, 0), scalars=[interval(-200.0, -200.0)]) == "partial"


def test_a_negative_product_that_float32_flushes_to_zero_is_not_negative():
    tiny = apply("mul", scalar(0, FLOAT32), scalar(1, FLOAT32))
    known = bounds([tiny], {}, [interval(1e-30, 1e-30), interval(-1e-30, -1e-30)])[tiny]
    assert known.lo < 0 <= known.hi


def test_a_product_that_overflows_float32_is_infinite():
    huge = apply("mul", scalar(0, FLOAT32), 1e30)
    known = bounds([huge, huge - huge], {}, [interval(1e30, 1e30)])
    assert known[huge].hi == math.inf
    assert known[huge - huge].nan


def test_a_sum_of_like_terms_that_wraps_is_not_believed():
    twice = apply("add", scalar(0, INT32), scalar(0, INT32))
    known = bounds([twice], {}, [interval(2.0**30, 2.0**31 - 1)])[twice]
    assert known.lo <= -2 <= known.hi  # 2 * (2^31 - 1)


def test_a_value_minus_itself_is_zero():
    x = scalar(0, FLOAT32)
    known = bounds([x - x], {}, [interval(-3.0, 2.0)])[x - x]
    assert (known.lo, known.hi, known.nan) == (0.0, 0.0, False)
    assert bounds([x - x], {}, [interval(-math.inf, 2.0)])[x - x].nan


def test_the_sign_of_nan_is_zero():
    sign = apply("sign", scalar(0, FLOAT32))
    known = bounds([sign], {}, [Interval.of(3.0, 5.0, nan=True)])[sign]
    assert known.lo == 0.0 and known.hi == 1.0


def test_one_over_the_root_of_minus_zero_is_minus_infinity():
    node = apply("rsqrt", scalar(0, FLOAT32))
    assert evaluate([node], Environment({}, scalars=[-0.0]))[0] == -math.inf
    assert bounds([node], {}, [interval(0.0, 4.0)])[node].lo == -math.inf


@pytest.mark.parametrize("name", ["and", "or", "xor"])
@pytest.mark.parametrize("x", [(0, 0), (0, 7), (3, 9), (5, 5), (-4, 6), (-9, -3), (0, 63)])
@pytest.mark.parametrize("y", [(0, 3), (6, 6), (-8, -1), (-2, 20)])
def test_bit_operations_by_brute_force(name, x, y):
    node = apply(name, scalar(0, INT32), scalar(1, INT32))
    known = bounds([node], {}, [interval(*x), interval(*y)])[node]
    a, b = torch.arange(x[0], x[1] + 1, dtype=torch.int32).view(-1, 1), torch.arange(y[0], y[1] + 1, dtype=torch.int32)
    (found,) = evaluate([node], Environment({}, scalars=[a, b]))
    assert known.lo <= found.min() and found.max() <= known.hi
    if x[0] >= 0 and y[0] >= 0:
        assert known.lo >= 0 and known.hi <= 127


def test_nan_is_never_proved_to_compare():
    log = apply("log", scalar(0, FLOAT32))
    for name, expected in (("le", "partial"), ("gt", "empty"), ("ne", "full")):
        compare = apply(name, log, 5.0)
        assert verdict(compare, (0, 0), (0, 0), scalars=[interval(-1.0, 2.0)]) == expected
    assert verdict(apply("le", log, 5.0), (0, 0), (0, 0), scalars=[interval(0.5, 2.0)]) == "full"
    assert verdict(apply("eq", log, log), (0, 0), (0, 0), scalars=[interval(-1.0, 2.0)]) == "partial"


def test_a_branch_that_is_not_taken_does_not_widen():
    value = apply("where", apply("ge", Q, K), 1.0, SCORE)
    known = bounds([value], tile((10, 20), (0, 5)))[value]
    assert (known.lo, known.hi, known.nan) == (1.0, 1.0, False)


def test_a_square_is_not_negative():
    x = scalar(0, FLOAT32)
    known = bounds([x * x], {}, [interval(-3.0, 2.0)])[x * x]
    assert known.lo == 0.0 and known.hi == 9.0


@pytest.mark.parametrize("dtype", [BOOL, INT32, INT64, FLOAT32])
def test_what_is_not_known_is_anything(dtype):
    node = gather(0, dtype, [Q])
    known = bounds([node], tile((0, 1), (0, 1)))[node]
    assert known.nan == (dtype == FLOAT32)
    assert known.lo <= anything(dtype).lo and known.hi >= anything(dtype).hi


def test_a_nan_constant_is_anything():
    assert bounds([const(math.nan)], {})[const(math.nan)].nan


def test_known_intervals_are_used_and_nothing_below_them_is_evaluated():
    row = apply("floordiv", gather(0, INT32, [Q]), 7)
    mask = apply("eq", row, K)
    asked = []

    def refuse(node, indices):
        raise AssertionError(f"{node} was evaluated")

    class Known(dict):
        def __getitem__(self, node):
            asked.append(node)
            return super().__getitem__(node)

    known = Known({row: Interval.of(3.0, 3.0, dtype=INT32)})
    found = bounds([mask], tile((0, 9), (3, 3)), gather=refuse, known=known)
    assert found[mask].is_true
    assert asked == [row]
    assert Q not in found


def test_terms_of_known_intervals_are_collected():
    """Rows and columns evaluated by themselves: what both subtract still cancels."""
    start = gather(0, INT32, [input_node("batch")])
    mask = apply("ge", Q - start, K - start)

    def positions(node, indices):
        return interval(0, 10**6)

    rows = bounds([Q - start], tile((64, 127), (0, 0)), gather=positions)
    columns = bounds([K - start], tile((0, 0), (0, 63)), gather=positions)
    known = {Q - start: rows[Q - start], K - start: columns[K - start], Q: rows[Q], K: columns[K], start: rows[start]}
    assert bounds([mask], {}, known=known)[mask].is_true


def test_a_sum_that_float64_rounds_is_not_believed():
    """2^53 + 1 is no float64: the difference of the two sides would be off by one."""
    a, b, c = (scalar(slot, INT64) for slot in range(3))
    mask = apply("gt", (a + b) + c, b - c)
    big = 2.0**53 - 1
    found = bounds([mask], {}, [interval(big, big), interval(0, 0), interval(-big, -big)])[mask]
    assert not (found.is_true and found.is_false)
    exact = (int(big) + 0 - int(big)) > (0 + int(big))
    assert not (found.is_true if not exact else found.is_false)


def test_positions_below_their_length_need_no_wrapping():
    """What cannot leave int32 is known before any data, and costs no operation."""
    inputs = {name: Interval.positions(*[torch.tensor([3.0, 9.0], dtype=torch.float64)] * 2, 64) for name in ("q_idx", "kv_idx")}
    known = bounds([Q - K, Q * 1000], inputs)
    assert (known[Q - K].least, known[Q - K].most) == (-63.0, 63.0)
    assert (known[Q * 1000].least, known[Q * 1000].most) == (0.0, 63000.0)
    wraps = bounds([Q * 2**26], inputs)[Q * 2**26]
    assert wraps.hi.tolist() == [3.0 * 2**26, 9.0 * 2**26] and wraps.most == 2.0**31 - 1
