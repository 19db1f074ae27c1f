"""Scores under a mask: simpler, and the same wherever the mask allows a pair."""

import pytest
import torch

from flexc import frontend, passes
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import topological
from flexc.passes.under_mask import simplify_under_mask

LENGTH = 40
TABLE = torch.randn(LENGTH)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (k <= q) & (q - k < 8)


def diagonal(b, h, q, k):
    return q == k + 2


def either(b, h, q, k):
    return (q >= k) | (k < 4)


def graph_of(score, mask):
    return passes.run(frontend.trace(score, mask)[0].graph)


def ops_of(graph):
    return {node.op for node in topological([graph.score])}


def values(graph, name):
    inputs = {
        "batch": torch.zeros(1, 1, dtype=torch.int32), "head": torch.zeros(1, 1, dtype=torch.int32),
        "q_idx": torch.arange(LENGTH, dtype=torch.int32)[:, None], "kv_idx": torch.arange(LENGTH, dtype=torch.int32)[None, :],
        "score": torch.linspace(-3, 3, LENGTH * LENGTH).view(LENGTH, LENGTH),
    }  # fmt: skip
    found = evaluate([graph.get(name)], Environment(inputs, (TABLE,), ()))[0]
    return found.expand(LENGTH, LENGTH)


CASES = {
    "abs": (lambda s, b, h, q, k: s - (q - k).abs() * 0.5, causal, {"abs"}),
    "abs the other way round": (lambda s, b, h, q, k: s - abs(k - q) * 0.5, causal, {"abs"}),
    "abs of a cast": (lambda s, b, h, q, k: s - torch.abs((q - k).float()), causal, {"abs"}),
    "abs with room": (lambda s, b, h, q, k: s - abs(q - k + 3) * 0.5, causal, {"abs"}),
    "sign": (lambda s, b, h, q, k: s * (2 + torch.sign(q - k + 1)), causal, {"sign"}),
    "clamp from below": (lambda s, b, h, q, k: s + torch.clamp(q - k, min=0) * 0.5, causal, {"maximum"}),
    "clamp at both ends": (lambda s, b, h, q, k: s + torch.clamp(q - k, -1, 7) * 0.5, window, {"maximum", "minimum"}),
    "a comparison that holds": (lambda s, b, h, q, k: torch.where(q - k < 100, 3 * s, 2 * s), window, {"where", "lt"}),
    "a comparison that does not": (lambda s, b, h, q, k: torch.where(q + 1 == k, 3 * s, 2 * s), causal, {"where", "eq"}),
    "equality is two facts": (lambda s, b, h, q, k: s * torch.where(q > k, 2.0, 3.0) + abs(k - q), diagonal, {"where", "abs"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_mask_says_simplifies_the_score(name):
    score, mask, gone = CASES[name]
    plain, under = graph_of(score, None), graph_of(score, mask)
    assert gone <= ops_of(plain) and not gone & ops_of(under)
    allowed = values(under, "mask")
    assert torch.equal(values(plain, "score")[allowed], values(under, "score")[allowed])


@pytest.mark.parametrize(
    ("score", "mask"),
    [
        (lambda s, b, h, q, k: s - (q - k).abs() * 0.5, either),  # the mask allows pairs of both signs
        (lambda s, b, h, q, k: s - (q - k - 1).abs() * 0.5, causal),  # -1 on the diagonal
        (lambda s, b, h, q, k: s - abs(q - 2 * k) * 0.5, causal),
        (lambda s, b, h, q, k: s + torch.clamp(q - k, max=6), window),  # 7 is allowed
        (lambda s, b, h, q, k: s + torch.where(q - k > 0, 1.0, 2.0), causal),
    ],
)
def test_what_the_mask_leaves_open_stays(score, mask):
    plain, under = graph_of(score, None), graph_of(score, mask)
    assert under.score is plain.score


def test_an_index_stays_inside_its_tensor_for_every_pair():
    graph = graph_of(lambda s, b, h, q, k: s + TABLE[torch.clamp(q - k, min=0)], causal)
    assert "maximum" in ops_of(graph)


def test_a_graph_that_does_not_change_is_the_same_object():
    graph = graph_of(lambda s, b, h, q, k: s * 2, causal)
    assert simplify_under_mask(graph) is graph
