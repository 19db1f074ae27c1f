"""At which rate a node changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from flexc.ir.dependence import RATES, joined, rate_of, rates
from flexc.ir.eager import evaluate
from flexc.ir.graph import FLOAT32, INT32, INT64, Graph, const, input_node, scalar
from flexc.ir.ops import apply, cast, gather
from tests.strategies import environment, nodes, quick

SCORE, BATCH, HEAD, Q, K = (input_node(n) for n in ("score", "batch", "head", "q_idx", "kv_idx"))
SLOPE, W = gather(0, FLOAT32, [HEAD]), scalar(0, INT32)


@pytest.mark.parametrize(
    "node, rate",
    [
        (const(1.0), "uniform"),
        (W, "uniform"),
        (gather(0, FLOAT32, []), "uniform"),
        (gather(0, FLOAT32, [const(3)]), "uniform"),
        (HEAD, "head"),
        (SLOPE * 2.0, "head"),
        (BATCH + HEAD, "head"),
        (Q, "row"),
        (gather(1, INT64, [Q]), "row"),
        (SLOPE * Q, "row"),
        (Q - Q * 2, "row"),
        ((Q - K) + K, "row"),
        (K, "column"),
        (gather(1, INT64, [BATCH, K]), "column"),
        ((Q + K) - Q, "column"),
        (Q - K, "diagonal"),
        ((Q + 3) - K, "diagonal"),
        (Q - (K + W), "diagonal"),
        (K - Q, "diagonal"),
        (K * 2 - Q * 2, "diagonal"),
        (Q - K + HEAD, "diagonal"),
        (apply("abs", Q - K), "diagonal"),
        (apply("minimum", Q - K, 128), "diagonal"),
        (apply("floordiv", Q - K, 16) + (K - Q), "diagonal"),
        (SLOPE * (Q - K), "diagonal"),
        (gather(2, FLOAT32, [HEAD, Q - K + 7]), "diagonal"),
        (cast(Q, INT64) - cast(K, INT64), "diagonal"),
        (apply("lt", Q - K, W), "diagonal"),
        (apply("where", apply("lt", Q - K, W), SLOPE, 0.0), "diagonal"),
        ((Q - K) + (K - Q), "uniform"),
        (Q + K, "element"),
        (Q - K * 2, "element"),
        (apply("mul", Q, K), "element"),
        ((Q - K) + apply("floordiv", Q, 2), "element"),
        (apply("ge", Q, K), "element"),
        (gather(1, INT64, [Q]) - gather(1, INT64, [K]), "element"),
        (SCORE, "element"),
        (SCORE * 0.0, "element"),
    ],
)
def test_rate(node, rate):
    assert rate_of(node) == rate


def test_every_node_of_a_graph_has_a_rate():
    graph = Graph((("score", SCORE - SLOPE * (Q - K)), ("mask", apply("ge", Q, K))))
    found = rates(graph)
    assert set(found) == set(graph.nodes())
    assert found[Q - K] == "diagonal" and found[SLOPE] == "head"


@pytest.mark.parametrize("a", RATES)
@pytest.mark.parametrize("b", RATES)
def test_joining_is_symmetric_and_never_slower_than_either(a, b):
    assert joined(a, b) == joined(b, a)
    assert RATES.index(joined(a, b)) >= max(RATES.index(a), RATES.index(b))
    if a != b and {a, b} <= {"row", "column", "diagonal"}:
        assert joined(a, b) == "element"


@quick
@given(pool=nodes())
def test_values_change_no_faster_than_their_rate(pool):
    """A row value is the same in every column, a diagonal value along every diagonal."""
    env = environment(1)
    everything = pool.float + pool.int + pool.bool
    for node, value in zip(everything, evaluate(everything, env), strict=True):
        value = value.expand(2, 3, 5, 7)
        rate = rate_of(node)
        if rate in ("uniform", "head", "row"):
            assert_same(value, value[..., :1].expand_as(value))
        if rate in ("uniform", "head", "column"):
            assert_same(value, value[..., :1, :].expand_as(value))
        if rate == "uniform":
            assert_same(value, value[:1, :1, :1, :1].expand_as(value))
        if rate == "diagonal":
            assert_same(value[..., 1:, 1:], value[..., :-1, :-1])


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal up to the last bits: PyTorch's functions round differently at the end of a vector register."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
