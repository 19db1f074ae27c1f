"""Masks hidden in scores."""

from __future__ import annotations

import math

import pytest

from flexc import passes
from flexc.ir.graph import BOOL, FLOAT32, Graph, Node, TensorInput, const, input_node
from flexc.ir.ops import apply, gather
from flexc.passes.split_mask import split_mask_from_score

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))
CAUSAL, NEAR, VALID = apply("ge", Q, K), apply("lt", Q - K, 128), gather(0, BOOL, [K])
HIGH = apply("gt", SCORE, 0.0)
INF = math.inf


def split(score: Node, mask: Node | None = None) -> tuple[Node | None, Node | None]:
    graph = passes.run(Graph((("score", score), *([("mask", mask)] if mask is not None else [])), (TensorInput("valid", "bool", 1),)))
    return graph.score, graph.mask


def where(condition, a, b) -> Node:
    return apply("where", condition, a, b)


@pytest.mark.parametrize(
    "hidden, score, mask",
    [
        (where(CAUSAL, SCORE, -INF), None, CAUSAL),
        (where(apply("lt", Q, K), -INF, SCORE), None, CAUSAL),
        (where(CAUSAL, SCORE * 2.0, -INF), SCORE * 2.0, CAUSAL),
        (where(CAUSAL, where(NEAR, SCORE * 2.0, -INF), -INF), SCORE * 2.0, CAUSAL & NEAR),
        (where(VALID, where(CAUSAL, SCORE * 2.0, -INF), SCORE), where(VALID, SCORE * 2.0, SCORE), ~VALID | CAUSAL),
        (where(VALID, where(CAUSAL, SCORE, -INF), where(NEAR, SCORE, -INF)), None, where(VALID, CAUSAL, NEAR)),
        (SCORE + where(CAUSAL, 0.0, -INF), None, CAUSAL),
        (where(CAUSAL, 0.0, -INF) + SCORE * 2.0, SCORE * 2.0, CAUSAL),
        (SCORE - where(CAUSAL, 0.0, INF), None, CAUSAL),
        (SCORE + where(CAUSAL, 1.0, -INF), SCORE + 1.0, CAUSAL),
        ((SCORE + where(CAUSAL, 0.0, -INF)) + where(NEAR, 0.0, -INF), None, CAUSAL & NEAR),
        (where(CAUSAL, SCORE, -INF) * 0.5, SCORE * 0.5, CAUSAL),
        (where(CAUSAL, SCORE, INF) * -0.5, SCORE * -0.5, CAUSAL),
        (-where(CAUSAL, SCORE, INF), -SCORE, CAUSAL),
        (const(-INF), None, const(False)),
        (where(CAUSAL & HIGH, SCORE, -INF), where(HIGH, SCORE, -INF), CAUSAL),
        (where(apply("lt", Q, K) | HIGH, -INF, SCORE), where(HIGH, -INF, SCORE), CAUSAL),
        (where(HIGH, where(CAUSAL, SCORE * 2.0, -INF), where(CAUSAL, SCORE, -INF)), where(HIGH, SCORE * 2.0, SCORE), CAUSAL),
    ],
)
def test_what_is_found(hidden, score, mask):
    assert split(hidden) == (score, mask)


@pytest.mark.parametrize(
    "score",
    [
        SCORE * 2.0,
        where(CAUSAL, SCORE, -1e9),
        where(CAUSAL, SCORE, INF),
        where(HIGH, SCORE, -INF),
        where(HIGH, where(CAUSAL, SCORE, -INF), SCORE),
        apply("tanh", where(CAUSAL, SCORE, -INF)),
        apply("exp", where(CAUSAL, SCORE, -INF)),
        where(CAUSAL, SCORE, -INF) * 0.0,
        where(CAUSAL, SCORE, -INF) * SCORE,
    ],
    ids=str,
)
def test_what_is_left_alone(score):
    graph = Graph((("score", score),))
    assert split_mask_from_score(graph) is graph


def test_the_masks_are_joined():
    score, mask = split(where(NEAR, SCORE * 2.0, -INF), CAUSAL)
    assert score is SCORE * 2.0 and mask is CAUSAL & NEAR


def test_no_score_no_change():
    graph = Graph((("mask", CAUSAL),))
    assert split_mask_from_score(graph) is graph


def test_a_captured_bias_keeps_its_gradient():
    bias = gather(1, FLOAT32, [HEAD])
    graph = passes.run(
        Graph((("score", where(CAUSAL, SCORE + bias, -INF)),), (TensorInput("valid", "bool", 1), TensorInput("bias", "float32", 1, True)))
    )
    assert graph.score is SCORE + bias and graph.mask is CAUSAL


def test_deep_and_shared_scores_take_one_step_for_each_node():
    """Nested a thousand deep, and doubled sixty times, which is 2^60 steps for whoever follows every path."""
    nested, doubled = SCORE, where(CAUSAL, SCORE, -INF)
    for i in range(1000):
        nested = where(apply("lt", Q, i), nested, -INF)
    for _ in range(60):
        doubled = doubled + doubled
    assert split_mask_from_score(Graph((("score", nested),))).score is SCORE
    assert split_mask_from_score(Graph((("score", doubled),))).mask is where(CAUSAL, True, False)
