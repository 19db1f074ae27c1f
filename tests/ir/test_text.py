"""Programs as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexc.ir.graph import (
    FLOAT32,
    INT32,
    Graph,
    Location,
    ScalarInput,
    TensorInput,
    const,
    const_value,
    float_bits,
    input_node,
    make,
    scalar,
)
from flexc.ir.ops import apply, cast, gather
from flexc.ir.text import format_float, format_graph, format_node, parse_graph
from tests.strategies import quick

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))
LINE = Location("/home/me/alibi.py", 4, "return score - slopes[head] * (q_idx - kv_idx)  # a comment")

ALIBI = """\
tensors slopes: float32[1] grad
scalars width: int32
%0 = input score : float32
%1 = input head : int32
%2 = gather slopes[%1] : float32          # alibi.py:4: return score - slopes[head] * (q_idx - kv_idx) # a comment
%3 = input q_idx : int32
%4 = input kv_idx : int32
%5 = sub %3 %4 : int32
%6 = cast %5 : float32
%7 = mul %2 %6 : float32
%8 = sub %0 %7 : float32
%9 = scalar width : int32
%10 = lt %5 %9 : bool
score = %8
mask = %10
"""


def alibi() -> Graph:
    slope = make("gather", (HEAD,), (0,), FLOAT32, LINE)
    return Graph(
        (("score", SCORE - slope * (Q - K)), ("mask", apply("lt", Q - K, scalar(0, INT32)))),
        (TensorInput("slopes", "float32", 1, True),),
        (ScalarInput("width", "int32"),),
    )


def test_a_graph_prints_one_node_a_line():
    graph = alibi()
    # Nodes are shared with every other function traced in this process, and so are their lines.
    graph = Graph(graph.outputs, graph.tensors, graph.scalars, {**dict.fromkeys(graph.nodes()), gather(0, FLOAT32, [HEAD]): LINE})
    assert format_graph(graph) == ALIBI
    assert str(graph) == ALIBI


def test_parsing_gives_the_same_nodes():
    graph = alibi()
    parsed = parse_graph(ALIBI)
    assert parsed == graph and parsed.score is graph.score


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.1, -1e-45, 3.4028235e38, 1e-38, math.inf, -math.inf, math.nan, 16777217.0, 1 / 3])
def test_constants_come_back_bit_by_bit(value):
    graph = Graph((("score", apply("mul", SCORE, const(value))),))
    assert parse_graph(format_graph(graph)) == graph


@quick
@given(bits=st.integers(0, 2**32 - 1))
def test_every_float32_comes_back(bits):
    node = make("const", (), (f"{bits:08x}",), FLOAT32)
    (found,) = [n for _, n in parse_graph(format_graph(Graph((("score", node),)))).outputs]
    assert found is node


@quick
@given(value=st.floats(width=32, allow_nan=False))
def test_floats_print_shortly(value):
    text = format_float(value)
    assert float_bits(float(text)) == float_bits(value)
    assert len(text) <= len(repr(value))


def test_integers_and_truth_values_come_back():
    outputs = tuple((f"x{i}", const(v)) for i, v in enumerate([True, False, 0, -5, 2**31 - 1, 2**40]))
    assert parse_graph(format_graph(Graph(outputs))) == Graph(outputs)


def test_a_tensor_without_dimensions_is_read_without_indices():
    graph = Graph((("score", SCORE * gather(0, FLOAT32, [])),), (TensorInput("c", "bfloat16", 0, True), TensorInput("d", "int64", 3)))
    assert "gather c[] : float32" in str(graph)
    assert parse_graph(str(graph)) == graph


@pytest.mark.parametrize(
    "line, complaint",
    [
        ("%0 = frobnicate %1 : float32", "unknown op frobnicate"),
        ("%0 = const 1.0 : float8", "expected one of bool, int32, int64, float32, got float8"),
        ("%0 = input query : int32", "unknown input query"),
        ("%0 = gather t[] : float32", "not in list"),
        ("score = %7", "%7"),
        ("tensors a b c", "does not look like"),
        ("nonsense", "nonsense"),
    ],
)
def test_text_that_cannot_be_read_names_the_line(line, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_graph("%5 = const 1 : int32\n" + line)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    "node, text",
    [
        (SCORE - gather(0, FLOAT32, [HEAD]) * (Q - K), "score - slopes[head] * (q_idx - kv_idx)"),
        ((Q - K) - Q, "q_idx - kv_idx - q_idx"),
        (Q - (K - Q), "q_idx - (kv_idx - q_idx)"),
        (Q + (K + Q), "q_idx + kv_idx + q_idx"),
        (apply("floordiv", Q, apply("floordiv", K, 3)), "q_idx // (kv_idx // 3)"),
        (apply("floormod", Q + 1, 4), "(q_idx + 1) % 4"),
        (apply("and", apply("ge", Q, K), apply("not", apply("lt", Q, 5))), "q_idx >= kv_idx and not q_idx < 5"),
        (apply("or", apply("and", Q, 7), 1), "q_idx & 7 | 1"),
        (apply("eq", apply("and", Q, 7), 1), "q_idx & 7 == 1"),
        (apply("lt", apply("lt", Q, K), apply("lt", K, Q)), "(q_idx < kv_idx) < (kv_idx < q_idx)"),
        (apply("where", apply("ge", Q, K), SCORE, -math.inf), "where(q_idx >= kv_idx, score, -inf)"),
        (SCORE * -2.0, "score * -2.0"),
        (-(SCORE + 1.0), "-(score + 1.0)"),
        (Q / 2, "q_idx / 2.0"),
        (cast(Q / 2.0, INT32), "int32(q_idx / 2.0)"),
        (cast(apply("lt", Q, K), INT32), "int32(q_idx < kv_idx)"),
        (apply("lt", Q, scalar(0, INT32)), "q_idx < width"),
        (scalar(3, INT32), "s3"),
        (apply("tanh", SCORE), "tanh(score)"),
    ],
)
def test_a_node_reads_like_mathematics(node, text):
    assert format_node(node, ["slopes"], ["width"]) == text


def test_printed_mathematics_binds_as_python_does():
    """What prints without parentheses must be evaluated by Python as the graph would be."""
    node = apply("mul", apply("sub", apply("shl", apply("add", Q, 1), 2), apply("or", K, 4)), apply("xor", Q, apply("and", K, 6)))
    from flexc.ir.eager import Environment, evaluate

    for q, k in ((3, 5), (0, 9), (12, 7)):
        (value,) = evaluate([node], Environment({"q_idx": _tensor(q), "kv_idx": _tensor(k)}))
        assert eval(format_node(node), {"q_idx": q, "kv_idx": k}) == int(value)


def _tensor(value: int):
    import torch

    return torch.tensor(value)


def test_a_node_with_much_below_it_prints_on_one_short_line():
    node = SCORE
    for _ in range(64):
        node = node + node * node
    assert len(repr(node)) < 2000 and "..." in repr(node)


def test_a_constant_reads_back_from_its_value():
    assert const_value(const(float(format_float(const_value(const(0.1)))))) == const_value(const(0.1))
