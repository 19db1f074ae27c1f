"""What the emitted modules look like, and that tile functions mean what the graph means."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import jinja2.meta
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from flexc.codegen import cpu
from flexc.codegen.cpu.emit import TEMPLATE
from flexc.codegen.cpu.plan import Rates
from flexc.codegen.templates import template_source
from flexc.errors import UnsupportedError
from flexc.ir.eager import evaluate
from flexc.ir.graph import FLOAT32, INT32, Graph, Location, ScalarInput, TensorInput, const, inputs_of, scalar
from flexc.ir.ops import apply, gather
from flexc.passes.derivative import differentiate
from flexc.runtime.module import load_module
from tests.codegen.cpu.attention_cases import CASES, CAUSAL, H, K, Q, S, both, f32
from tests.strategies import environment, graphs, quick

pytestmark = pytest.mark.usefixtures("nodes_without_lines")

CODE_HOLES = {
    "origin",
    "values_code",
    "score_code",
    "mask_code",
    "factors_code",
    "gradients_code",
    "accumulate_code",
    "finish_code",
    "uses",
}


def text_of(graph: Graph, q_len: int = 256, dtype: str = "float32", backward: bool = True) -> str:
    """The emitted module of a graph."""
    graph = differentiate(graph) if backward else graph
    return cpu.emit(graph, cpu.plan(graph, q_len=q_len, kv_len=q_len, head_dim=64, head_dim_v=64, dtype=dtype, backward=backward))


def function(text: str, name: str) -> str:
    """One function of a module's text."""
    found = re.search(rf"^def {name}\(.*?(?=\n\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no function {name}"
    return found.group(0).rstrip() + "\n"


def test_holes_of_the_template_are_the_fields_of_the_plan():
    source = template_source(TEMPLATE)
    holes = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(source))
    assert holes == {*cpu.Plan.__dataclass_fields__, *CODE_HOLES}
    header = source[: source.index("#}")]
    assert {name for name in holes if re.search(rf"\b{name}\b", header)} == holes, "the template begins with a list of its holes"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_input_gives_the_same_text(case):
    text = text_of(case.graph)
    assert text == text_of(case.graph)
    assert "tmp" not in text and not re.search(r"[ \t]\n", text), "no stray blanks"
    assert "\n\n\n\n" not in text and text.endswith("\n") and not text.endswith("\n\n")
    compile(text, "kernel.py", "exec")


def test_values_are_computed_at_their_own_rate():
    where = Location("/home/user/alibi.py", 12, "return score - slopes[head] * (q_idx - kv_idx)")
    difference = apply("sub", Q, K, where=where)
    score = apply("sub", S, apply("mul", gather(0, FLOAT32, [H], where), f32(difference), where=where), where=where)
    text = text_of(Graph((("score", score),), (TensorInput("slopes", "float32", 1),)))
    assert "# score: alibi.py:12: return score - slopes[head] * (q_idx - kv_idx)" in text
    assert function(text, "_score") == textwrap.dedent(
        '''\
        def _score(score, at, b, h, r, c):
            """The score function on a tile; overwrites its argument."""
            score.sub_(_diagonal(at.mul[:, h], r, c))  # alibi.py:12
            return score
        '''
    )
    assert function(text, "_values") == textwrap.dedent(
        '''\
        def _values(tensors, scalars, q, k):
            """What no tile changes, each value at its own rate."""
            slopes = tensors[0]
            # once a diagonal
            head = torch.arange(q.shape[1], dtype=torch.int32).view(1, -1, 1, 1)
            difference = torch.arange(q.shape[2] - 1, -k.shape[2], -1, dtype=torch.int32).view(1, 1, 1, -1)  # q_idx - kv_idx
            q_on, kv_on = difference.clamp(min=0), (-difference).clamp(min=0)  # a pair of positions on each diagonal
            slopes_at_head = _load(slopes, head)             # alibi.py:12
            mul = slopes_at_head * (q_on - kv_on).to(FLOAT)  # alibi.py:12
            return SimpleNamespace(tensors=tensors, q_len=q.shape[2], mul=mul)
        '''
    )


def test_a_tile_is_overwritten_where_its_old_value_is_not_needed():
    text = text_of(Graph((("score", apply("tanh", S / 20.0) * 20.0),)))
    assert function(text, "_score") == textwrap.dedent(
        '''\
        def _score(score, at, b, h, r, c):
            """The score function on a tile; overwrites its argument."""
            score.mul_(0.05)
            score.tanh_()
            score.mul_(20.0)
            return score
        '''
    )


def test_a_mask_is_one_expression_of_slices():
    graph = Graph((("mask", both(CAUSAL, apply("lt", Q - K, scalar(0, INT32)))),), (), (ScalarInput("width", INT32),))
    assert function(text_of(graph), "_allowed") == textwrap.dedent(
        '''\
        def _allowed(at, b, h, r, c):
            """The mask function on a tile."""
            q_idx = at.q_idx[:, :, r]
            kv_idx = at.kv_idx[:, :, :, c]
            return (q_idx >= kv_idx) & ((q_idx - kv_idx) < at.width)
        '''
    )


def test_only_what_a_kernel_calls_is_in_it():
    plain = text_of(Graph(()))
    for name in ("_score", "_mask", "_load", "_window", "_scatter", "_diagonal", "_clear", "_accumulate"):
        assert f"def {name}(" not in plain
    assert "def backward(" in plain and "def backward(" not in text_of(Graph(()), backward=False)
    for case in CASES:
        text = text_of(case.graph)
        for name in re.findall(r"^def (_\w+)\(", text, re.MULTILINE):
            assert len(re.findall(rf"\b{name}\(", text)) > 1, f"{case.name}: {name} is never called"
        for name in set(re.findall(r"(?<![\w.])(_[a-z]\w*)\(", text)):
            assert f"def {name}(" in text, f"{case.name}: {name} is missing"


def test_names_of_captured_tensors_cannot_hide_others():
    names = ["torch", "q", "at", "lambda", "_load", "score", "slice"]
    node = S
    for slot in range(len(names)):
        node = node + gather(slot, FLOAT32, [H])
    graph = Graph((("score", node),), tuple(TensorInput(name, "float32", 1, True) for name in names))
    text = text_of(graph)
    compile(text, "kernel.py", "exec")
    assert "torch_2 = tensors[0]" in text and "lambda_2 = tensors[3]" in text


def test_plain_scores_take_the_scale_in_base_2():
    assert ".to(FLOAT) * (scale * LOG2E)" in text_of(Graph(()))
    assert ".to(FLOAT) * scale\n" in text_of(Graph((("score", S * 2.0),)))


def test_block_sizes_take_few_values_as_lengths_grow():
    plans = {cpu.plan(Graph(()), q_len=n, kv_len=n, head_dim=64, head_dim_v=64, dtype="bfloat16") for n in range(1, 5000, 7)}
    assert len(plans) == 2


def test_dtype_that_is_not_computed_is_refused():
    with pytest.raises(
        UnsupportedError, match="the cpu backend takes float16, bfloat16, float32, float64; expected one of these, got int8"
    ):
        cpu.plan(Graph(()), q_len=8, kv_len=8, head_dim=8, head_dim_v=8, dtype=torch.int8)


@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_tile_functions_mean_what_the_graph_means(tmp_path_factory, graph, seed):
    """Random programs; the tile is a corner of the whole, so that slices and diagonals are off zero."""
    assume("score" not in inputs_of(graph.mask))
    env = environment(seed)
    graph = differentiate(graph)
    plan = cpu.plan(graph, q_len=5, kv_len=7, head_dim=4, head_dim_v=4, dtype="float64")
    module = load_module(cpu.emit(graph, plan), tmp_path_factory.mktemp("tile") / "kernel.py")
    q, k = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
    at = module._values(env.tensors, env.scalars, q, k)
    b, h, r, c = slice(1, 2), slice(1, 3), slice(1, 4), slice(2, 7)
    whole = [x.expand(2, 3, 5, 7) for x in evaluate([graph.score, graph.mask or const(True), graph.get("dscore")], env)]
    score, mask, derivative, raw = (x.flip(2)[b, h, r, c] if plan.is_descending else x[b, h, r, c] for x in (*whole, env.inputs["score"]))
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(module._score(raw.clone(), at, b, h, r, c), score, **close)
    assert graph.mask is None or torch.equal(module._allowed(at, b, h, r, c).expand(mask.shape), mask)
    again, *factors = module._score_and_factors(raw.clone(), at, b, h, r, c)
    torch.testing.assert_close(again, score, **close)
    found = {"one": 1.0, "zero": 0.0}.get(plan.derivative)
    factor = factors[0] if found is None else torch.tensor(found)
    torch.testing.assert_close(factor.to(torch.float64).expand(score.shape), derivative, **close)
    assert again.data_ptr() not in [x.data_ptr() for x in factors if isinstance(x, torch.Tensor)], "the caller overwrites the score"


def test_numbers_of_any_kind_as_scalars(tmp_path: Path):
    graph = Graph((("score", S + f32(scalar(0, INT32)) * scalar(1, FLOAT32)),), (), (ScalarInput("n", INT32), ScalarInput("x", FLOAT32)))
    module = load_module(text_of(graph), tmp_path / "kernel.py")
    q = torch.zeros(1, 1, 2, 4)
    for scalars in ((3, 0.5), (torch.tensor(3), torch.tensor(0.5))):
        at = module._values((), scalars, q, q)
        whole = slice(0, 1), slice(0, 1), slice(0, 2), slice(0, 2)
        assert (module._score(torch.zeros(1, 1, 2, 2), at, *whole) == 1.5).all()


def test_diagonals_are_found_through_sums_and_comparisons():
    yes = [Q - K, (Q + const(3)) - K, K * const(2) - Q * const(2), apply("ge", Q, K), apply("lt", Q, K + const(5)), f32(Q) - f32(K)]
    yes += [apply("floordiv", Q - K, const(3)), both(CAUSAL, apply("lt", Q - K, scalar(0, INT32))), gather(0, FLOAT32, [H, Q - K])]
    no = [
        Q + K,
        Q * K,
        apply("minimum", Q, K),
        Q - K * const(2),
        both(CAUSAL, apply("lt", Q, const(3))),
        S - f32(Q - K),
        gather(0, FLOAT32, [Q, K]),
    ]
    for node in (*yes, *no):
        rates = Rates(Graph((("any", node),)))
        assert rates.is_diagonal(node) == (node in yes), node
