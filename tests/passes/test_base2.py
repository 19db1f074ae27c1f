"""The base-2 domain: the same score and factors in other units, with as little as possible left to do for each element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexc import passes
from flexc.ir.dependence import DIAGONAL, ELEMENT, HEAD, UNIFORM, rate_of
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import FLOAT32, INT32, Graph, Node, TensorInput, const, input_node, inputs_of, is_const, scalar, substitute, topological
from flexc.ir.ops import apply, cast, gather
from flexc.ir.verify import verify
from flexc.passes.base2 import LOG2E, RAW, SCALE, lower_to_base2
from flexc.passes.derivative import differentiate
from tests.strategies import environment, graphs, quick

S, H, Q, K = (input_node(name) for name in ("score", "head", "q_idx", "kv_idx"))
SLOPES = (TensorInput("slopes", "float32", 1, True),)
SLOPE = gather(0, FLOAT32, [H])
SCALE_VALUE = 0.3


def lowered(score: Node | None, tensors: tuple[TensorInput, ...] = SLOPES) -> Graph:
    """As the Triton backend does it."""
    return lower_to_base2(differentiate(passes.run(Graph((("score", score),) if score is not None else (), tensors))))


def verify_lowered(graph: Graph) -> None:
    """`verify` for a graph in raw and scale, which are no inputs of what it checks."""
    back = {RAW: S, SCALE: const(SCALE_VALUE)}
    verify(Graph(tuple((name, substitute(node, back)) for name, node in graph.outputs), graph.tensors, graph.scalars))


def output(graph: Graph, name: str) -> Node:
    """One that must be there."""
    node = graph.get(name)
    assert node is not None
    return node


def per_element(root: Node) -> list[str]:
    """The ops that every element pays for."""
    return sorted(n.op for n in topological([root]) if n.args and n.op != "gather" and rate_of(n) in (ELEMENT, DIAGONAL))


def raw_environment(env: Environment) -> Environment:
    """The same values with raw and scale in place of the score."""
    inputs = dict(env.inputs)
    inputs |= {"raw": inputs.pop("score") / SCALE_VALUE, "scale": torch.tensor(SCALE_VALUE, dtype=torch.float64)}
    return Environment(inputs, env.tensors, env.scalars, env.float_dtype, names=env.names)


@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_the_logit_is_the_score_times_log2_e(graph, seed):
    graph = passes.run(graph)
    after = lower_to_base2(differentiate(graph))
    verify_lowered(after)
    env = environment(seed)
    (score,) = evaluate([graph.score or S], env)
    logit, outer = evaluate([output(after, "logit2"), output(after, "outer")], raw_environment(env))
    torch.testing.assert_close((logit * outer).expand(2, 3, 5, 7), (score * LOG2E).expand(2, 3, 5, 7), rtol=1e-5, atol=1e-5, equal_nan=True)


@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_outer_is_uniform_and_positive(graph, seed):
    outer = output(lower_to_base2(differentiate(passes.run(graph))), "outer")
    assert rate_of(outer) in (UNIFORM, HEAD) and inputs_of(outer) <= {"scale"}
    (value,) = evaluate([outer], raw_environment(environment(seed)))
    assert value > 0 and value.isfinite()


@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_derivative_factors_keep_their_values_and_the_mask_is_left_alone(graph, seed):
    before = differentiate(passes.run(graph))
    after = lower_to_base2(before)
    env = environment(seed)
    assert after.mask is before.mask and after.score is None
    names = [name for name, _ in before.outputs if name not in ("score", "mask")]
    found = evaluate([output(after, name) for name in names], raw_environment(env))
    for name, value, expected in zip(names, found, evaluate([output(before, name) for name in names], env), strict=True):
        torch.testing.assert_close(value.expand(2, 3, 5, 7), expected.expand(2, 3, 5, 7), rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def test_a_plain_score_is_the_raw_product_with_one_uniform_factor():
    graph = lowered(None)
    assert output(graph, "logit2") is RAW
    assert rate_of(output(graph, "outer")) == UNIFORM and output(graph, "outer") is SCALE * const(LOG2E)


def test_a_scaled_score_moves_its_positive_factors_outside():
    graph = lowered(S * 2.0)
    assert output(graph, "logit2") is RAW
    (outer,) = evaluate([output(graph, "outer")], Environment({"scale": torch.tensor(0.5)}))
    assert float(outer) == pytest.approx(2.0 * 0.5 * LOG2E)


@pytest.mark.parametrize("factor", [-2.0, 0.0, math.inf], ids=str)
def test_a_factor_that_is_not_positive_stays_inside(factor):
    """Otherwise the row maximum of the logit would be another key's, or NaN."""
    outer = output(lower_to_base2(Graph((("score", S * factor),))), "outer")
    assert 0 < float(evaluate([outer], Environment({"scale": torch.tensor(0.5)}))[0]) < math.inf
    assert not any(is_const(node, factor) for node in topological([outer]))


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max], ids=["least", "greatest"])
def test_a_number_at_the_end_of_float32_stays_finite(value):
    """The least one stands for -inf in some masks; a row of it alone is an average of its keys, which -inf would not be."""
    logit = output(lowered(apply("where", apply("ge", Q, K), S, value)), "logit2")
    assert is_const(logit.args[2], value)
    infinite = output(lower_to_base2(Graph((("score", apply("where", apply("ge", Q, K), S, -math.inf)),))), "logit2")
    assert is_const(infinite.args[2], -math.inf)


def test_log2_e_is_part_of_a_captured_value_of_a_diagonal():
    """Which GPU kernels work out once for each diagonal: an element is left one multiplication and one addition."""
    graph = lowered(S + gather(0, FLOAT32, [H, Q - K]), (TensorInput("table", "float16", 2, True),))
    logit = output(graph, "logit2")
    assert logit.op == "add" and is_const(output(graph, "outer"), 1.0)
    product, value = logit.args
    assert product.args[0] is RAW and rate_of(product.args[1]) == UNIFORM
    assert value.op == "mul" and rate_of(value) == DIAGONAL and value.args[0].op == "gather"


LEAST = torch.finfo(torch.float32).min
ROW_BIAS = (TensorInput("bias", "float32", 1, True),)


def logits(score: Node, values: torch.Tensor) -> torch.Tensor:
    """logit2 * outer of a score that reads a captured tensor by query, for a raw product of 3."""
    graph = lower_to_base2(Graph((("score", score),), ROW_BIAS))
    inputs = {"raw": torch.tensor(3.0), "scale": torch.tensor(0.5), "q_idx": torch.arange(len(values)), "kv_idx": torch.tensor(0)}
    logit, outer = evaluate([output(graph, "logit2"), output(graph, "outer")], Environment(inputs, [values]))
    return logit * outer


BY_ROW = gather(0, FLOAT32, [Q])
SUMS = {
    "sum": S + BY_ROW,
    "difference": S - apply("neg", BY_ROW),
    "factor": (S + BY_ROW) * 0.9,
    "choice": apply("where", apply("ge", Q, K), S + BY_ROW, S),
    "larger": apply("maximum", BY_ROW, S - 3e38),
    "product of captured values": S + BY_ROW * gather(0, FLOAT32, [const(0)]),
}


@pytest.mark.parametrize("score", SUMS.values(), ids=SUMS.keys())
def test_a_captured_number_at_the_end_of_float32_stays_finite(score):
    """Times log2(e) it would overflow, and a row of it alone would have no key; -inf stays what it is."""
    found = logits(score, torch.tensor([1.0, LEAST, LEAST * 0.75, -1e30, -math.inf]))
    assert found[:4].isfinite().all() and found[1] == found[2] < found[3] < found[0]
    assert found[4] == -math.inf or score is SUMS["larger"]


@pytest.mark.parametrize("score", SUMS.values(), ids=SUMS.keys())
def test_a_huge_score_has_no_factor_outside(score):
    """An FMA with it would skip the rounding that the row's maximum has."""
    assert is_const(output(lower_to_base2(Graph((("score", score),), ROW_BIAS)), "outer"), 1.0)


def test_captured_numbers_of_both_signs_and_nan():
    found = logits(S + BY_ROW, torch.tensor([-LEAST, math.inf, math.nan]))
    assert found[0].isfinite() and found[1] == math.inf and found[2].isnan()


@pytest.mark.parametrize("score", [S * BY_ROW, S - BY_ROW * (Q - K), apply("tanh", BY_ROW) + S], ids=["factor", "slope", "tanh"])
def test_a_captured_number_that_is_not_added_costs_nothing_more(score):
    ops = [n.op for n in topological([output(lower_to_base2(Graph((("score", score),), ROW_BIAS)), "logit2")])]
    assert not {"where", "minimum", "maximum"} & set(ops)


def test_a_captured_number_with_bounds_costs_nothing_more():
    limited = apply("minimum", apply("maximum", BY_ROW, const(-100.0)), const(100.0))
    for score, tensors in ((S + limited, ROW_BIAS), (S + BY_ROW, (TensorInput("bias", "float16", 1, True),))):
        ops = [n.op for n in topological([output(lower_to_base2(Graph((("score", score),), tensors)), "logit2")])]
        assert "where" not in ops


def test_a_captured_factor_may_be_negative_so_it_stays_inside():
    graph = lowered(S * SLOPE)
    assert all(n.op != "gather" for n in topological([output(graph, "outer")]))
    assert per_element(output(graph, "logit2")) == ["mul"]


def test_softcap_folds_the_scale_into_one_multiplication():
    graph = lowered(apply("tanh", S / 20.0) * 20.0)
    assert per_element(output(graph, "logit2")) == ["mul", "tanh"]
    (outer,) = evaluate([output(graph, "outer")], Environment({}))
    assert float(outer) == pytest.approx(20.0 * LOG2E)
    tanh = next(n for n in topological([output(graph, "logit2")]) if n.op == "tanh")
    element, factor = tanh.args[0].args
    assert element is RAW and rate_of(factor) == UNIFORM and "scale" in inputs_of(factor)


def test_alibi_costs_two_multiplications_and_no_conversion_for_each_element():
    """raw * (scale * log2 e) + (slope * log2 e) * (float(kv_idx) - float(q_idx)): positions are converted once a row and once a column."""
    graph = lowered(S - SLOPE * (Q - K))
    assert per_element(output(graph, "logit2")) == ["add", "mul", "mul", "sub"] or per_element(output(graph, "logit2")) == [
        "mul",
        "mul",
        "sub",
        "sub",
    ]
    assert is_const(output(graph, "outer"), 1.0)


@pytest.mark.parametrize(
    "position",
    [Q - K, Q + K, apply("abs", Q - K), -(Q - K), Q - K + const(5), apply("abs", K - (Q + const(2)))],
    ids=str,
)
def test_positions_are_converted_at_their_own_rate(position):
    logit = output(lowered(S + SLOPE * position), "logit2")
    assert "cast" not in per_element(logit)
    env = {
        "raw": torch.zeros(5, 7),
        "scale": torch.tensor(1.0),
        "q_idx": torch.arange(5).view(5, 1),
        "kv_idx": torch.arange(7),
        "head": torch.tensor(0),
    }
    (found,) = evaluate([logit], Environment(env, (torch.tensor([1.0]),)))
    (expected,) = evaluate([position], Environment(env))
    torch.testing.assert_close(found / LOG2E, expected.float().expand(5, 7), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("position", [scalar(0, INT32) + Q, Q * K, Q - const(2**24), Q - gather(0, INT32, [K])], ids=str)
def test_integers_that_may_be_large_are_added_as_integers(position):
    """float(i + j) is not float(i) + float(j) once a term needs more than 24 bits."""
    from flexc.ir.graph import ScalarInput

    graph = Graph((("score", S + cast(position, FLOAT32)),), (TensorInput("table", "int32", 1),), (ScalarInput("n", INT32),))
    logit = output(lower_to_base2(graph), "logit2")
    assert any(n.op == "cast" and n.args[0] is position for n in topological([logit]))


def test_what_a_step_reads_is_computed_as_written():
    """(x * c) * h and x * (c * h) round differently, and where they meet an integer a bucket would move."""
    distance = cast(Q - K, FLOAT32)
    heat = gather(0, FLOAT32, [])
    inner = distance * (1 / 49) * heat
    graph = Graph((("score", S + apply("floor", inner)),), (TensorInput("heat", "float32", 0),))
    logit = output(lower_to_base2(graph), "logit2")
    floor = next(n for n in topological([logit]) if n.op == "floor")
    env = {"q_idx": torch.arange(4000).view(-1, 1), "kv_idx": torch.zeros(1, dtype=torch.int32)}
    values = [evaluate([root], Environment(env, (torch.tensor(7.0),)))[0] for root in (floor, apply("floor", inner))]
    assert torch.equal(*values)
    assert not torch.equal(values[0], evaluate([apply("floor", distance * (heat * (1 / 49)))], Environment(env, (torch.tensor(7.0),)))[0])
    assert "cast" not in per_element(floor), "positions are still converted at their own rate: that is exact"


def test_a_product_that_a_step_reads_may_change_elsewhere():
    """The same product feeds a floor and the score: one stays, the other absorbs the factor log2(e)."""
    inner = cast(Q - K, FLOAT32) * (1 / 49) * 7.0
    graph = lower_to_base2(Graph((("score", S + SLOPE * inner + apply("floor", inner)),), SLOPES))
    verify_lowered(graph)
    floor = next(n for n in topological([output(graph, "logit2")]) if n.op == "floor")
    env = Environment({"q_idx": torch.arange(4000).view(-1, 1), "kv_idx": torch.zeros(1, dtype=torch.int32)})
    assert torch.equal(evaluate([floor], env)[0], evaluate([apply("floor", inner)], env)[0])


def test_products_of_the_score_are_joined_under_a_comparison_too():
    """One multiplication for each element: the raw product is not exact to the last bit in any order."""
    logit = output(lowered(apply("where", apply("gt", S * 3.0, 1.0), S * 3.0, 1.0)), "logit2")
    assert per_element(logit).count("mul") <= 2
    assert output(lowered(apply("where", apply("gt", S * 3.0, 1.0), 0.5, 1.0)), "logit2").args[0].args[0].args[0] is RAW
