"""The factors that the backward kernel multiplies by. Agreement with autograd is in test_random_graphs.py."""

from __future__ import annotations

from flexc import passes
from flexc.ir.graph import FLOAT32, Graph, TensorInput, const, input_node
from flexc.ir.ops import apply, gather
from flexc.passes.derivative import differentiate

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))
SLOPE, BIAS = gather(0, FLOAT32, [HEAD]), gather(1, FLOAT32, [HEAD, Q - K])
TENSORS = (TensorInput("slopes", "float32", 1, True), TensorInput("bias", "bfloat16", 2, True), TensorInput("fixed", "float32", 1))


def test_alibi():
    graph = differentiate(Graph((("score", SCORE - SLOPE * (Q - K)),), TENSORS))
    assert graph.get("dscore") is const(1.0)
    assert graph.get("gather:0") is SLOPE
    assert graph.get("dgather:0") is -apply("mul", 1.0, Q - K).args[1]
    assert graph.get("gather:1") is None


def test_softcap_has_no_division():
    graph = differentiate(passes.run(Graph((("score", 50.0 * apply("tanh", SCORE / 50.0)),))))
    t = apply("tanh", SCORE * 0.02)
    assert graph.get("dscore") is 1.0 - t * t


def test_every_gather_of_a_tensor_counts():
    other = gather(1, FLOAT32, [HEAD, const(0)])
    graph = differentiate(Graph((("score", SCORE + BIAS * other),), TENSORS))
    found = {graph.get(f"gather:{k}"): graph.get(f"dgather:{k}") for k in range(2)}
    assert found == {BIAS: other, other: BIAS}


def test_tensors_that_need_no_gradient_are_left_out():
    fixed = gather(2, FLOAT32, [K])
    graph = differentiate(Graph((("score", SCORE * fixed),), TENSORS))
    assert graph.get("dscore") is fixed and graph.get("gather:0") is None


def test_a_gather_that_only_decides_is_left_out():
    graph = differentiate(Graph((("score", apply("where", apply("gt", SLOPE, 0.0), SCORE, SCORE * 2.0)),), TENSORS))
    assert graph.get("gather:0") is None
    assert graph.get("dscore") is apply("where", apply("gt", SLOPE, 0.0), 1.0, 2.0)


def test_a_score_that_ignores_the_raw_score_has_factor_zero():
    graph = differentiate(Graph((("score", SLOPE * 2.0),), TENSORS))
    assert graph.get("dscore") is const(0.0)
    assert graph.get("dgather:0") is const(2.0)


def test_no_score_nothing_to_add():
    graph = Graph((("mask", apply("ge", Q, K)),))
    assert differentiate(graph) is graph


def test_score_and_mask_are_left_alone():
    graph = passes.run(Graph((("score", SCORE * SCORE), ("mask", apply("ge", Q, K)))))
    after = differentiate(graph)
    assert after.score is graph.score and after.mask is graph.mask
