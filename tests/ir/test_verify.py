"""Illegal graphs and what is said about them."""

from __future__ import annotations

import pytest

from flexc.errors import InternalError
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Graph, ScalarInput, TensorInput, const, input_node, make, scalar
from flexc.ir.ops import apply, cast, gather
from flexc.ir.verify import verify

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))
SLOPES = TensorInput("slopes", "bfloat16", 1)


def test_a_legal_graph_passes():
    score = SCORE - gather(0, FLOAT32, [HEAD]) * (Q - K) * scalar(0, FLOAT32)
    verify(Graph((("score", score), ("mask", apply("ge", Q, K))), (SLOPES,), (ScalarInput("strength", FLOAT32),)))
    verify(Graph(()))


@pytest.mark.parametrize(
    "node, message",
    [
        (make("frobnicate", (SCORE,)), "unknown op 'frobnicate'"),
        (make("add", (SCORE,)), "add takes 2 operands, got 1"),
        (make("tanh", (SCORE,), (), INT32), "tanh of float32: expected a result of float32, got int32"),
        (make("add", (SCORE, Q)), "add: expected operands float32, float32, got float32, int32"),
        (make("truediv", (Q, K)), "truediv: expected operands float32, float32, got int32, int32"),
        (make("where", (apply("ge", Q, K), SCORE, Q)), "where: expected operands bool, float32, float32, got bool, float32, int32"),
        (make("where", (Q, SCORE, SCORE)), "where of int32, float32, float32: expected a truth value as the condition"),
        (make("add", (SCORE, SCORE), (), "float16"), "unknown dtype 'float16' of add"),
        (make("input", (), ("query",), INT32), "unknown input"),
        (make("input", (), ("q_idx",), FLOAT32), "input q_idx: expected int32, got float32"),
        (make("const", (), (1,), FLOAT32), r"const of float32 holds \(1,\)"),
        (make("const", (), (2**31,), INT32), "const 2147483648 does not fit int32"),
        (make("cast", (SCORE,), (), FLOAT32), "cast from float32 to itself"),
        (make("cast", (), (), FLOAT32), "cast takes 1 operand, got 0"),
        (scalar(1, INT32), "scalar slot 1 is out of range: the graph has 1 scalars"),
        (scalar(0, INT32), "scalar strength: expected float32, got int32"),
        (gather(3, FLOAT32, [HEAD]), "tensor slot 3 is out of range: the graph has 1 tensors"),
        (gather(0, FLOAT32, [HEAD, Q]), "gather of slopes: expected 1 indices, got 2"),
        (gather(0, FLOAT32, [SCORE]), "gather of slopes: expected integer indices, got float32"),
        (gather(0, INT64, [HEAD]), r"gather of slopes \(bfloat16\): expected float32, got int64"),
    ],
)
def test_broken_nodes_are_named(node, message):
    with pytest.raises(InternalError, match=message) as caught:
        verify(Graph((("value", node),), (SLOPES,), (ScalarInput("strength", FLOAT32),)))
    assert "value = %" in str(caught.value), "the graph is part of the message"


@pytest.mark.parametrize(
    "name, node, message",
    [
        ("score", apply("ge", Q, K), "output 'score': expected float32, got bool"),
        ("mask", SCORE, "output 'mask': expected bool, got float32"),
        ("dscore", Q, "output 'dscore': expected float32, got int32"),
        ("dgather:0", const(1), "output 'dgather:0': expected float32, got int32"),
    ],
)
def test_outputs_have_their_dtypes(name, node, message):
    with pytest.raises(InternalError, match=message):
        verify(Graph(((name, node),)))


def test_names_are_told_apart():
    with pytest.raises(InternalError, match=r"two tensors have one name \(slopes, slopes\)"):
        verify(Graph((), (SLOPES, SLOPES)))
    with pytest.raises(InternalError, match="two scalars have one name"):
        verify(Graph((), (), (ScalarInput("width", INT32), ScalarInput("width", INT32))))


def test_a_cast_between_dtypes_is_legal():
    verify(Graph((("value", cast(cast(Q, INT64), BOOL)),)))
