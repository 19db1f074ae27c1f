"""Reverse mode on the graph. Agreement with autograd on random programs is in tests/passes/test_random_graphs.py."""

from __future__ import annotations

import math

import pytest
import torch

from flexc.ir.eager import Environment, evaluate
from flexc.ir.grad import gradient
from flexc.ir.graph import FLOAT32, INT32, const, input_node
from flexc.ir.ops import apply, cast, gather

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))
SLOPE = gather(0, FLOAT32, [HEAD])


def at(factor, value: float) -> float:
    return float(evaluate([factor], Environment({"score": torch.tensor(value, dtype=torch.float64)}, float_dtype=torch.float64))[0])


def test_what_does_not_reach_the_output_has_no_gradient():
    other = gather(1, FLOAT32, [HEAD])
    by_score, by_slope, by_other = gradient(SCORE - SLOPE * (Q - K), [SCORE, SLOPE, other])
    assert by_score is const(1.0) and by_slope is not None and by_other is None


def test_integers_carry_no_gradient():
    through = cast(cast(SCORE, INT32), FLOAT32)
    assert gradient(through + 1.0, [SCORE]) == [None]
    assert gradient(apply("floor", SCORE), [SCORE]) == [None]


def test_indices_carry_no_gradient():
    moved = gather(0, FLOAT32, [cast(SCORE, INT32)])
    by_score, by_moved = gradient(moved * 2.0, [SCORE, moved])
    assert by_score is None and by_moved is not None
    assert gradient(moved * 2.0, [SCORE]) == [None]


def test_conditions_carry_no_gradient():
    (factor,) = gradient(apply("where", apply("gt", SCORE, 0.0), 1.0, 2.0), [SCORE])
    assert factor is None


def test_contributions_add_up():
    (factor,) = gradient(SCORE * SCORE + SCORE, [SCORE])
    assert at(factor, 3.0) == 7.0


@pytest.mark.parametrize(
    "guarded, value, expected",
    [
        (apply("where", apply("gt", SCORE, 0.0), apply("sqrt", SCORE), 0.0), 0.0, 0.0),
        (apply("where", apply("gt", SCORE, 0.0), apply("sqrt", SCORE), 0.0), 4.0, 0.25),
        (apply("where", apply("le", SCORE, 0.0), 0.0, apply("log", SCORE)), -1.0, 0.0),
        (apply("where", apply("gt", SCORE, 0.0), apply("log", SCORE) * SCORE, SCORE), -2.0, 1.0),
        (apply("tanh", apply("where", apply("gt", SCORE, 0.0), apply("sqrt", SCORE) + apply("log", SCORE), 0.0)), 0.0, 0.0),
        (apply("where", apply("gt", SCORE, 1.0), apply("where", apply("lt", SCORE, 9.0), apply("sqrt", SCORE - 1.0), 0.0), 0.0), 1.0, 0.0),
    ],
)
def test_a_branch_not_taken_gives_zero_not_nan(guarded, value, expected):
    (factor,) = gradient(guarded, [SCORE])
    assert at(factor, value) == pytest.approx(expected)


def test_guards_that_differ_add_up():
    a = apply("where", apply("gt", SCORE, 0.0), apply("sqrt", SCORE), 0.0)
    b = apply("where", apply("gt", SCORE, 4.0), SCORE * 3.0, SCORE)
    (factor,) = gradient(a + b, [SCORE])
    assert [at(factor, v) for v in (0.0, 1.0, 4.0, 9.0)] == pytest.approx([1.0, 1.5, 1.25, 3 + 1 / 6])


def test_guards_that_exclude_each_other_are_both_kept():
    high = apply("where", apply("gt", SCORE, 4.0), SCORE * 3.0, 0.0)
    low = apply("where", apply("lt", SCORE, 1.0), SCORE * 5.0, 0.0)
    (factor,) = gradient(high + low, [SCORE])
    assert [at(factor, v) for v in (0.0, 2.0, 9.0)] == [5.0, 0.0, 3.0]


def test_powers_at_zero():
    (factor,) = gradient(apply("pow", SCORE, 2.0), [SCORE])
    assert at(factor, 0.0) == 0.0
    (factor,) = gradient(apply("pow", SCORE, 0.0), [SCORE])
    assert at(factor, 0.0) == 0.0
    x = gather(0, FLOAT32, [])
    (factor,) = gradient(apply("pow", SCORE, x), [x])
    env = Environment({"score": torch.tensor(0.0)}, [torch.tensor(2.0)])
    assert evaluate([factor], env)[0] == 0.0


def test_softcap():
    capped = 20.0 * apply("tanh", SCORE / 20.0)
    (factor,) = gradient(capped, [SCORE])
    assert at(factor, 5.0) == pytest.approx(1 - math.tanh(0.25) ** 2)
