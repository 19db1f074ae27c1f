"""Every pass on random programs: the meaning stays, and a second run changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexc import passes
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import Graph, const, input_node
from flexc.ir.text import parse_graph
from flexc.ir.verify import verify
from flexc.passes.derivative import differentiate
from flexc.passes.fold import fold_constants
from flexc.passes.split_mask import split_mask_from_score
from tests.strategies import environment, graphs, quick

PASSES = [fold_constants, split_mask_from_score, passes.run]


def masked_scores(graph: Graph, env: Environment) -> torch.Tensor:
    """What attention sees: the score where the mask allows, -inf elsewhere."""
    score, mask = evaluate([graph.score or input_node("score"), graph.mask or const(True)], env)
    score, mask = torch.broadcast_tensors(score, mask)
    return torch.where(mask, score, -math.inf).expand(2, 3, 5, 7)


@pytest.mark.parametrize("apply_pass", PASSES, ids=lambda f: f.__name__)
@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_a_pass_keeps_the_meaning(apply_pass, graph, seed):
    after = apply_pass(graph)
    verify(after)
    env = environment(seed)
    torch.testing.assert_close(masked_scores(after, env), masked_scores(graph, env), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("apply_pass", PASSES, ids=lambda f: f.__name__)
@quick
@given(graph=graphs())
def test_a_second_run_changes_nothing(apply_pass, graph):
    once = apply_pass(graph)
    assert apply_pass(once) is once


@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_folding_makes_no_number_of_nan_and_no_nan_of_a_number(graph, seed):
    env = environment(seed)
    score = env.inputs["score"]
    score.view(-1)[::3] = math.nan
    score.view(-1)[1::5] = math.inf
    score.view(-1)[2::7] = -math.inf
    before, after = masked_scores(graph, env), masked_scores(fold_constants(graph), env)
    assert torch.equal(before.isnan(), after.isnan())
    assert torch.equal(before.isinf(), after.isinf())


@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_the_factors_are_autograds_gradients(graph, seed):
    """In float64, of the score and of every captured tensor, through any number of gathers."""
    graph = differentiate(passes.run(graph))
    if graph.score is None:
        return
    verify(graph)
    env = environment(seed, requires_grad=True)
    (out,) = evaluate([graph.score], env)
    out = out.expand(2, 3, 5, 7)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=out.dtype)
    wanted = [env.inputs["score"], *env.tensors[:3]]
    expected = torch.autograd.grad(out, wanted, upstream, allow_unused=True) if out.requires_grad else [None] * 4
    found = factors_times(graph, upstream, env)
    for e, f in zip(expected, found, strict=True):
        e = torch.zeros_like(f) if e is None else e
        sane = e.isfinite()  # autograd gives NaN beside a branch not taken; the factors do not
        torch.testing.assert_close(f[sane], e[sane], rtol=1e-5, atol=1e-6)
        assert f.isfinite().all()


def factors_times(graph: Graph, upstream: torch.Tensor, env: Environment) -> list[torch.Tensor]:
    """Gradients of score, slopes, bias and temperature from the graph's factors."""
    from flexc.ir.ops import wrap_indices

    found = [torch.zeros_like(t).detach() for t in (env.inputs["score"], *env.tensors[:3])]
    with torch.no_grad():
        found[0] += upstream * evaluate([graph.get("dscore")], env)[0]
        k = 0
        while (node := graph.get(f"gather:{k}")) is not None:
            factor = evaluate([graph.get(f"dgather:{k}")], env)[0] * upstream
            indices = [i.expand(upstream.shape) for i in evaluate(node.args, env)] if node.args else []
            target = found[1 + node.attrs[0]]
            wrapped, inside = wrap_indices(target.shape, indices)
            if inside is None:
                target += factor.sum()
            else:
                target.index_put_(tuple(wrapped), torch.where(inside, factor, 0.0), accumulate=True)
            k += 1
    return found


@quick
@given(graph=graphs())
def test_text_round_trips(graph):
    for each in (graph, differentiate(passes.run(graph))):
        assert parse_graph(str(each)) == each
