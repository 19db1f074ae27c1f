"""The passes together."""

from __future__ import annotations

import math

import pytest

from flexc import passes
from flexc.errors import InternalError
from flexc.ir.graph import INT32, Graph, input_node, make, scalar
from flexc.ir.ops import apply

SCORE, Q, K = input_node("score"), input_node("q_idx"), input_node("kv_idx")


def test_a_mask_that_folding_uncovers_is_split_off():
    forbidden = apply("where", apply("eq", apply("ge", Q, K), False), -math.inf, SCORE * 1.0)
    graph = passes.run(Graph((("score", forbidden),)))
    assert graph.score is None and graph.mask is apply("ge", Q, K)


def test_nothing_to_do_returns_the_same_object():
    graph = Graph((("score", SCORE * 2.0), ("mask", apply("ge", Q, K))))
    assert passes.run(graph) is graph


def test_an_illegal_graph_is_refused():
    with pytest.raises(InternalError, match="scalar slot 0 is out of range"):
        passes.run(Graph((("mask", apply("lt", Q, scalar(0, INT32))),)))


def test_a_pass_that_breaks_the_graph_is_caught(monkeypatch):
    def breaks(graph: Graph) -> Graph:
        return graph.with_outputs(score=make("tanh", (SCORE, SCORE)))

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, breaks))
    with pytest.raises(InternalError, match="tanh takes 1 operands, got 2"):
        passes.run(Graph((("score", SCORE * 2.0),)))
