"""flexc.compat inside torch.compile: one graph, made masks and functions inside or outside, gradients, lengths that change."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from flexc import compat
from tests.accuracy import normal, qkv
from tests.compat.beside import TORCH

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def causal(b, h, q, kv):
    return q >= kv


def whole(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("make", [compat.create_block_mask, TORCH.create_block_mask])
def test_block_mask_made_outside(make):
    q, k, v = qkv(q_len=40, grad=True)
    weight = normal(4, grad=True)
    block_mask = make(causal, None, None, 40, 40, device="cpu")

    def run(q, k, v):
        out, lse = compat.flex_attention(
            q, k, v, lambda s, b, h, i, j: s * weight[h], block_mask, scale=0.3, enable_gqa=True, return_lse=True
        )
        return out, lse

    gradients = lambda results: torch.autograd.grad(results[0].sum() + results[1].sum(), [q, k, v, weight])
    found, expected = whole(run)(q, k, v), run(q, k, v)
    same(found, expected)
    same(gradients(found), gradients(expected))


def test_block_mask_made_inside():
    q, k, v = qkv(q_len=40)

    def run(q, k, v, width):
        block_mask = compat.create_block_mask(
            lambda b, h, i, j: (i - j < width) & (i >= j), None, None, q.shape[2], k.shape[2], device="cpu"
        )
        return compat.flex_attention(q, k, v, None, block_mask, enable_gqa=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for width in (3, 5, 8, 13):
        same([compiled(q, k, v, width)], [run(q, k, v, width)])
    assert counter.frame_count <= 2


def test_what_else_is_returned_and_options():
    q, k, v = qkv(2, 4, 4, 40)
    request = compat.AuxRequest(lse=True, max_scores=True)
    run = lambda q, k, v: compat.flex_attention(q, k, v, return_aux=request, kernel_options={"FLOAT32_PRECISION": "ieee"})
    (out, aux), (expected, other) = whole(run)(q, k, v), run(q, k, v)
    same([out, aux.lse, aux.max_scores], [expected, other.lse, other.max_scores])


def test_dynamic_lengths():
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda q, k, v: compat.flex_attention(q, k, v, enable_gqa=True), backend=counter, fullgraph=True, dynamic=True)
    for length in (20, 33, 47):
        q, k, v = qkv(q_len=length)
        same([run(q, k, v)], [compat.flex_attention(q, k, v, enable_gqa=True)])
    assert counter.frame_count == 1
