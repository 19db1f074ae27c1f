"""Which scores may be as large as a captured number."""

import pytest

from flexc.ir.addends import adds_wide_capture, wide_captures
from flexc.ir.graph import FLOAT32, Graph, TensorInput, const, input_node
from flexc.ir.ops import apply, gather

S, Q, K = input_node("score"), input_node("q_idx"), input_node("kv_idx")
WIDE, NARROW = gather(0, FLOAT32, [Q]), gather(1, FLOAT32, [Q])
TENSORS = (TensorInput("wide", "bfloat16", 1, True), TensorInput("narrow", "float16", 1, True))

ADDED = {
    "sum": S + WIDE,
    "difference": S - WIDE,
    "scaled": (S + WIDE * 2.0) * 0.5,
    "product of captured values": S + WIDE * NARROW,
    "choice": apply("where", apply("ge", Q, K), S, S + WIDE),
    "larger": apply("neg", apply("maximum", S + WIDE, const(0.0))),
}
NOT_ADDED = {
    "factor": S * WIDE,
    "slope": S - WIDE * (Q - K),
    "of sixteen bits": S + NARROW,
    "bounded": S + apply("tanh", WIDE),
    "condition": apply("where", apply("lt", WIDE, const(0.0)), S, S * 2.0),
    "nothing captured": S * 2.0 - 1e30,
}


def graph_of(score):
    return Graph((("score", score),), TENSORS)


@pytest.mark.parametrize("score", ADDED.values(), ids=ADDED.keys())
def test_a_captured_number_is_added(score):
    assert adds_wide_capture(score, graph_of(score))


@pytest.mark.parametrize("score", NOT_ADDED.values(), ids=NOT_ADDED.keys())
def test_no_captured_number_is_added(score):
    assert not adds_wide_capture(score, graph_of(score))


def test_captures_of_dtypes_that_reach_past_1e38():
    assert wide_captures(S + WIDE * NARROW, graph_of(S)) == {WIDE}
