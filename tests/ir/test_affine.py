"""Integer nodes as sums."""

from __future__ import annotations

import torch
from hypothesis import given

from flexc.ir.affine import Affine, affine_form
from flexc.ir.eager import evaluate
from flexc.ir.graph import INT32, INT64, input_node
from flexc.ir.ops import apply, cast, gather
from tests.strategies import environment, nodes, quick

Q, K, HEAD = input_node("q_idx"), input_node("kv_idx"), input_node("head")


def test_sums_are_collected():
    form = affine_form(apply("add", apply("mul", Q - K, 3), apply("neg", apply("shl", K, 1))) + 5)
    assert form == Affine(5, {Q: 3, K: -5})
    assert (form.coefficient("q_idx"), form.coefficient("kv_idx"), form.coefficient("head")) == (3, -5, 0)


def test_terms_that_cancel_are_left_out():
    assert affine_form((Q + K) - K) == Affine(0, {Q: 1})
    assert affine_form(Q - Q) == Affine(0, {})


def test_other_nodes_are_terms():
    start, square = gather(0, INT32, [HEAD]), apply("mul", Q, K)
    form = affine_form(start * 2 + square - Q)
    assert form.rest == {start: 2, square: 1}


def test_casts_are_terms_unless_looked_through():
    wide = cast(Q, INT64)
    assert affine_form(wide - cast(K, INT64)).rest == {wide: 1, cast(K, INT64): -1}
    assert affine_form(wide - cast(K, INT64), through_casts=True) == Affine(0, {Q: 1, K: -1})


def test_floats_are_not_sums():
    score = input_node("score")
    assert affine_form(score + 1.0).terms == {score + 1.0: 1}


@quick
@given(pool=nodes())
def test_a_sum_has_the_value_of_its_node(pool):
    env = environment(0)
    for node in pool.int:
        form = affine_form(node)
        value, *terms = evaluate([node, *form.terms], env)
        total = torch.tensor(form.constant, dtype=torch.int64)
        for term, factor in zip(terms, form.terms.values(), strict=True):
            total = total + term.long() * factor
        if node.dtype == INT32:
            total = (total + 2**31) % 2**32 - 2**31
        assert torch.equal(total.expand(value.shape), value.long())
