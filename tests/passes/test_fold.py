"""Folding, rule by rule: what becomes what, and what must stay. The meaning on random programs is in test_random_graphs.py."""

from __future__ import annotations

import math

import pytest
import torch

from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Graph, Node, const, input_node, scalar
from flexc.ir.ops import apply, cast, gather
from flexc.passes.fold import fold_constants

SCORE, BATCH, HEAD, Q, K = (input_node(n) for n in ("score", "batch", "head", "q_idx", "kv_idx"))
W = scalar(0, INT32)  # a number that may be negative
X, Y = scalar(1, FLOAT32), scalar(2, FLOAT32)
P, R = gather(0, BOOL, [Q]), gather(0, BOOL, [K])
INF = math.inf


def folded(node: Node) -> Node:
    return fold_constants(Graph((("value", node),))).outputs[0][1]


def c(value, dtype: str | None = None) -> Node:
    return const(value, dtype)


@pytest.mark.parametrize(
    "before, after",
    [
        # constants
        (apply("add", 2, 3), c(5)),
        (apply("mul", 1 << 20, 1 << 20), c(0)),
        (apply("add", 2**31 - 1, 1), c(-(2**31))),
        (apply("floordiv", -7, 2), c(-4)),
        (apply("exp", 0.0), c(1.0)),
        (apply("truediv", 1, 3), c(1 / 3)),
        (apply("truediv", 1.0, 0.0), c(INF)),
        (apply("sub", INF, INF), c(math.nan)),
        (apply("lt", 2, 3), c(True)),
        (cast(apply("add", 2, 3), FLOAT32) * 2.0, c(10.0)),
        # order
        (apply("add", 1.0, X), apply("add", X, 1.0)),
        (apply("lt", 5, W), apply("gt", W, 5)),
        (apply("ge", 5, W), apply("le", W, 5)),
        (apply("gt", Q, K), apply("gt", Q, K)),
        # sums
        (X + 0.0, X),
        (X - 0.0, X),
        (0.0 - X, -X),
        (X - 2.0, X + -2.0),
        (X + -Y, X - Y),
        (X - -Y, X + Y),
        (-X + Y, Y - X),
        (W - W, c(0)),
        ((W + 3) + 4, W + 7),
        ((W - 3) + 3, W),
        ((5 - W) + 2, 7 - W),
        (5 - (W + 2), 3 - W),
        (5 - (2 - W), W + 3),
        ((W + (2**31 - 1)) + 1, W + -(2**31)),
        ((X + 3.0) + 4.0, (X + 3.0) + 4.0),
        (X - X, X - X),
        (cast(Q, FLOAT32) - cast(K, FLOAT32), cast(Q - K, FLOAT32)),
        # products
        (X * 1.0, X),
        (X * -1.0, -X),
        (W * 0, c(0)),
        (X * 0.0, X * 0.0),
        ((W * 3) * 5, W * 15),
        ((X * 3.0) * 5.0, X * 15.0),
        ((X * 1e30) * 1e30, (X * 1e30) * 1e30),
        (-X * 2.0, X * -2.0),
        (-X * -Y, X * Y),
        (-(X * 2.0), X * -2.0),
        (apply("neg", -X), X),
        (-(X + 2.0), -2.0 - X),
        (-(W - K), K - W),
        (X / 1.0, X),
        (X / 4.0, X * 0.25),
        (X / 3.0, X * c(1 / 3)),
        (X / 0.0, X / 0.0),
        (X / 1e-39, X / 1e-39),
        (X / Y, X / Y),
        (50.0 * apply("tanh", X / 50.0), apply("tanh", X * 0.02) * 50.0),
        (1.0 / apply("sqrt", X), apply("rsqrt", X)),
        (apply("floordiv", W, 1), W),
        (apply("floormod", W, 1), c(0)),
        (apply("floordiv", W, 0), apply("floordiv", W, 0)),
        (apply("floormod", 5, 0), apply("floormod", 5, 0)),
        # powers
        (apply("pow", X, 2), X * X),
        (apply("pow", X, 3), X * X * X),
        (apply("pow", X, 0.5), apply("sqrt", X)),
        (apply("pow", X, -0.5), apply("rsqrt", X)),
        (apply("pow", X, -1), 1.0 / X),
        (apply("pow", X, 1), X),
        (apply("pow", X, 0), c(1.0)),
        (apply("pow", 2.0, X), apply("exp2", X)),
        # extremes, absolute values, roundings
        (apply("minimum", apply("minimum", W, 5), 3), apply("minimum", W, 3)),
        (apply("maximum", X, -INF), X),
        (apply("minimum", X, INF), X),
        (apply("maximum", X, INF), apply("maximum", X, INF)),
        (apply("minimum", apply("minimum", X, Y), Y), apply("minimum", X, Y)),
        (apply("maximum", Q, 0), Q),
        (apply("maximum", W, 0), apply("maximum", W, 0)),
        (apply("abs", apply("abs", X)), apply("abs", X)),
        (apply("abs", -X), apply("abs", X)),
        (apply("abs", Q), Q),
        (apply("floor", apply("round", X)), apply("round", X)),
        (apply("floor", cast(W, FLOAT32)), cast(W, FLOAT32)),
        (apply("floor", apply("floormod", X, 2.5)), apply("floor", apply("floormod", X, 2.5))),
        # casts
        (cast(cast(P, INT32), FLOAT32), cast(P, FLOAT32)),
        (cast(cast(W, INT64), FLOAT32), cast(W, FLOAT32)),
        (cast(cast(W, INT64), INT32), W),
        (cast(cast(X, INT32), FLOAT32), cast(cast(X, INT32), FLOAT32)),
        (cast(W, BOOL), apply("ne", W, 0)),
        (cast(cast(P, INT32), BOOL), P),
        (cast(c(3e9), INT32), cast(c(3e9), INT32)),
        # logic
        (apply("and", True, P), P),
        (apply("and", P, False), c(False)),
        (apply("or", P, True), c(True)),
        (apply("or", P, False), P),
        (apply("xor", P, True), ~P),
        (apply("xor", P, P), c(False)),
        (~~P, P),
        (P & P, P),
        (P & ~P, c(False)),
        (P | ~P, c(True)),
        ((P & R) & P, P & R),
        (P & (R & ~P), c(False)),
        (P & (P | R), P),
        (P | (R & P), P),
        (apply("not", apply("lt", W, K)), apply("ge", W, K)),
        (apply("not", apply("eq", X, Y)), apply("ne", X, Y)),
        (apply("not", apply("lt", X, Y)), apply("not", apply("lt", X, Y))),
        (apply("lt", W, K) & apply("ge", W, K), c(False)),
        (apply("lt", X, Y) | apply("ge", X, Y), apply("lt", X, Y) | apply("ge", X, Y)),
        (apply("eq", P, True), P),
        (apply("eq", cast(P, INT32), 0), ~P),
        (apply("eq", cast(P, INT32), 2), c(False)),
        (apply("ne", P, False), P),
        (apply("and", W, 0), c(0)),
        (apply("and", W, -1), W),
        (apply("xor", W, 0), W),
        (apply("xor", W, 1), apply("xor", W, 1)),
        (apply("invert", apply("invert", W)), W),
        (apply("shl", W, 0), W),
        # comparisons
        (apply("lt", X, X), c(False)),
        (apply("eq", X, X), apply("eq", X, X)),
        (apply("le", W, W), c(True)),
        (apply("ne", W, W), c(False)),
        (apply("ge", Q, 0), c(True)),
        (apply("lt", K, 0), c(False)),
        (apply("gt", Q, 0), apply("gt", Q, 0)),
        (apply("eq", Q, -1), c(False)),
        (apply("ge", W, 0), apply("ge", W, 0)),
        # selection
        (apply("where", True, X, Y), X),
        (apply("where", False, X, Y), Y),
        (apply("where", P, X, X), X),
        (apply("where", ~P, X, Y), apply("where", P, Y, X)),
        (apply("where", P, True, R), P | R),
        (apply("where", P, R, False), P & R),
        (apply("where", P, False, R), ~P & R),
        (apply("where", P, R, True), ~P | R),
        (apply("where", P, P, R), P | R),
        (apply("where", P, apply("where", P, X, Y), 0.0), apply("where", P, X, 0.0)),
        (apply("where", P, 0.0, apply("where", P, X, Y)), apply("where", P, 0.0, Y)),
        (apply("where", P, apply("where", R, X, Y), Y), apply("where", P & R, X, Y)),
        (apply("where", P, X, apply("where", R, X, Y)), apply("where", P | R, X, Y)),
        (apply("where", apply("ge", W, K), X, apply("where", apply("lt", W, K), Y, 0.0)), apply("where", apply("ge", W, K), X, Y)),
        (apply("where", P, apply("where", R, Y, X), Y), apply("where", P & ~R, X, Y)),
        (apply("where", P, X, apply("where", R, Y, X)), apply("where", P | ~R, X, Y)),
        (apply("where", P, X * 0.0, X), apply("where", P, X * 0.0, X)),
    ],
)
def test_one_rule(before, after):
    assert folded(before) is after, f"{before} became {folded(before)}, not {after}"
    assert folded(after) is after, "the canonical form is not canonical"


def test_a_value_that_decides_something_is_computed_as_written():
    """49 * (1 / 49) is below 1 in float32: its floor would put a key into the wrong block."""
    node = cast(apply("floor", Q / 49), INT32)
    assert "truediv" in str(Graph((("value", folded(node)),)))
    env = Environment({"q_idx": torch.arange(4096)})
    assert torch.equal(*evaluate([folded(node), apply("floordiv", Q, 49)], env))
    assert folded(apply("gt", X / 3.0, 1.0)) is apply("gt", X / 3.0, 1.0)
    assert folded(apply("where", apply("gt", X, 1.0), X / 3.0, 0.0)) is apply("where", apply("gt", X, 1.0), X * c(1 / 3), 0.0)


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize(
    "node",
    [SCORE * 0.0, SCORE - SCORE, SCORE / SCORE, apply("eq", SCORE, SCORE), apply("not", apply("lt", SCORE, 1.0)), 0.0 * SCORE + 1.0],
    ids=str,
)
def test_nan_and_infinity_are_kept(node, value):
    env = Environment({"score": torch.tensor([value])})
    before, after = evaluate([node, folded(node)], env)
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_outputs_that_say_nothing_are_dropped():
    graph = fold_constants(Graph((("score", SCORE * 1.0), ("mask", apply("ge", Q, 0)))))
    assert graph.score is None and graph.mask is None and graph == Graph(())


def test_a_mask_that_is_false_is_kept():
    assert fold_constants(Graph((("mask", apply("lt", Q, 0)),))).mask is c(False)


def test_nothing_to_do_returns_the_same_object():
    graph = Graph((("score", SCORE - X * (Q - K)), ("mask", apply("ge", Q, K))))
    assert fold_constants(graph) is graph


def test_the_users_line_stays_with_what_a_node_becomes():
    from flexc.ir.graph import Location, make

    line = Location("scores.py", 7, "return score / 8.0 + slopes[head]")
    quotient = make("truediv", (SCORE, c(8.0)), (), FLOAT32, line)
    assert folded(quotient).where == line
