"""Nodes and graphs."""

from __future__ import annotations

import math

import pytest

from flexc.errors import InternalError
from flexc.ir.graph import (
    FLOAT32,
    INT32,
    INT64,
    Graph,
    Location,
    const,
    const_value,
    float_bits,
    input_node,
    inputs_of,
    is_const,
    loaded_dtype,
    make,
    rewrite_graph,
    substitute,
    topological,
)
from flexc.ir.ops import apply

SCORE, Q, K = input_node("score"), input_node("q_idx"), input_node("kv_idx")


def test_equal_nodes_are_one_object():
    assert apply("add", SCORE, 1.0) is apply("add", input_node("score"), 1.0)
    assert apply("add", SCORE, 1.0) is not apply("add", SCORE, 2.0)
    assert apply("sub", Q, K) is not apply("sub", K, Q)


def test_two_functions_share_nodes_but_not_lines():
    """Nodes are interned across functions; a message about one function must not name a line of the other."""
    first, second = Location("a.py", 1, "x"), Location("b.py", 2, "y")
    node = make("add", (SCORE, const(0.12345)), (), FLOAT32, first)
    graph = Graph((("score", node),))
    assert make("add", (SCORE, const(0.12345)), (), FLOAT32, second) is node
    other = Graph((("score", node),))
    assert graph == other and hash(graph) == hash(other)
    assert graph.lines[node] is first and other.lines[node] is second
    assert graph.with_outputs(mask=apply("ge", Q, K)).lines[node] is first


def test_a_line_prints_without_its_folder():
    assert str(Location("/home/me/alibi.py", 4, "return score")) == "alibi.py:4: return score"


def test_nodes_are_frozen():
    with pytest.raises(AttributeError, match="frozen"):
        SCORE.op = "const"


def test_constants_are_told_apart_by_their_bits():
    assert const(0.0) is not const(-0.0)
    assert const(math.nan) is const(math.nan)
    assert const(0.1) is const(0.1 + 1e-12)  # one float32
    assert const(1) is not const(1.0) and const(1) is not const(True)
    assert const(2**31).dtype == INT64 and const(-(2**31)).dtype == INT32
    assert const_value(const(1e300)) == math.inf and const_value(const(-1e300)) == -math.inf
    assert float_bits(1.0) == "3f800000"
    assert is_const(const(0.0), -0.0) and not is_const(const(math.nan), math.nan) and not is_const(SCORE)


def test_const_value_of_something_else_is_refused():
    with pytest.raises(InternalError, match="const_value of a input node"):
        const_value(SCORE)


def test_unknown_inputs_are_refused():
    with pytest.raises(InternalError, match="unknown input 'query'"):
        input_node("query")


def test_which_torch_dtypes_can_be_read():
    assert [loaded_dtype(d) for d in ("bool", "uint8", "int64", "bfloat16", "float64")] == ["bool", INT32, INT64, FLOAT32, FLOAT32]
    with pytest.raises(TypeError, match="complex64 cannot be read: expected bool, an integer or a floating dtype"):
        loaded_dtype("complex64")


def test_operands_come_before_their_users_and_once():
    shared = SCORE * 2.0
    root = shared + shared * shared
    order = topological([root, shared])
    assert len(order) == len(set(order))
    assert all(order.index(a) < order.index(n) for n in order for a in n.args)


def test_long_chains_do_not_overflow_the_stack():
    node = SCORE
    for i in range(20_000):
        node = make("add", (node, const(float(i % 7))), (), FLOAT32)
    assert len(topological([node])) > 20_000
    assert inputs_of(node) == {"score"}


def test_rewriting_nothing_returns_the_same_graph():
    graph = Graph((("score", SCORE * 2.0), ("mask", apply("ge", Q, K))))
    assert rewrite_graph(graph, lambda node: node) is graph
    assert graph.with_outputs(score=graph.score) is graph
    assert graph.with_outputs(mask=None).mask is None


def test_substitution_goes_through_shared_nodes():
    difference = apply("sub", Q, K)
    root = apply("mul", difference, difference)
    assert substitute(root, {K: const(0)}) is apply("mul", apply("sub", Q, const(0)), apply("sub", Q, const(0)))
