"""How gradients of captured tensors collide, from the index expression; and by brute force, that no class promises too much."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from flexc import frontend, passes
from flexc.backends import CPU, TRITON
from flexc.errors import InternalError
from flexc.ir.collisions import CLASSES, gradient_terms, is_diagonal
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import FLOAT32, Graph, const, input_node
from flexc.ir.ops import apply, gather

B, H, S = 2, 3, 6


def table(*shape):
    return torch.zeros(shape, requires_grad=True)


SCALE, SLOPES, ROWS, RELATIVE, BY_HEAD = table(), table(H), table(S), table(2 * S), table(H, 2 * S)
PAIRS, HEAD_PAIRS, ALL_PAIRS, WIDE = table(S, S), table(H, S, S), table(B, H, S, S), table(2 * S, 2 * S)
IDS = torch.tensor([0, 2, 1, 2, 0, 5])


def bucket(q_idx, kv_idx):
    """T5's, over floats."""
    distance = abs(q_idx - kv_idx)
    far = 2 + (torch.log(distance.float() / 2) / math.log(4) * 2).to(torch.int32)
    return torch.where(distance < 2, distance, torch.minimum(far, 5))


CASES = [
    ("a number", lambda s, b, h, i, j: s * SCALE, "uniform", ""),
    ("a fixed element", lambda s, b, h, i, j: s * SLOPES[1], "uniform", ""),
    ("slopes", lambda s, b, h, i, j: s * SLOPES[h], "head", ""),
    ("by query", lambda s, b, h, i, j: s * ROWS[i], "row", ""),
    ("by query through a table", lambda s, b, h, i, j: s * ROWS[IDS[i]], "row", ""),
    ("by key", lambda s, b, h, i, j: s + PAIRS[b, j], "column", ""),
    ("relative", lambda s, b, h, i, j: s + RELATIVE[i - j + S], "diagonal", ""),
    ("relative, backwards", lambda s, b, h, i, j: s + RELATIVE[3 + j - i], "diagonal", ""),
    ("relative by head, with ends", lambda s, b, h, i, j: s + BY_HEAD[h, torch.clamp(i - j, -2, 2) + 2], "diagonal", ""),
    ("relative, modulo", lambda s, b, h, i, j: s + RELATIVE[(i - j) % 4], "diagonal", ""),
    ("T5 buckets", lambda s, b, h, i, j: s + BY_HEAD[h, bucket(i, j)], "diagonal", ""),
    ("of each pair", lambda s, b, h, i, j: s + PAIRS[i, j], "unique", "batch head"),
    ("of each pair, turned", lambda s, b, h, i, j: s + PAIRS[j, i], "unique", "batch head"),
    ("of each pair and head", lambda s, b, h, i, j: s + HEAD_PAIRS[h, i, j], "unique", "batch"),
    ("of each pair, head and batch element", lambda s, b, h, i, j: s + ALL_PAIRS[b, h, i, j], "unique", ""),
    ("skewed", lambda s, b, h, i, j: s + WIDE[2 * i + 1, i + j], "unique", "batch head"),
    ("counted from the end for some", lambda s, b, h, i, j: s + PAIRS[i - 2, j], "arbitrary", ""),
    ("counted backwards", lambda s, b, h, i, j: s + PAIRS[5 - i, j], "arbitrary", ""),
    ("of pairs of batch and query", lambda s, b, h, i, j: s + WIDE[i + b, j], "arbitrary", ""),
    ("sum of positions", lambda s, b, h, i, j: s + RELATIVE[i + j], "arbitrary", ""),
    ("permuted", lambda s, b, h, i, j: s + PAIRS[IDS[i], j], "arbitrary", ""),
    ("blocks", lambda s, b, h, i, j: s + PAIRS[i // 2, j // 2], "arbitrary", ""),
]


def lowered(function, backend=TRITON):
    return backend.lower(passes.run(frontend.trace(function, None)[0].graph))


@pytest.mark.parametrize("backend", [TRITON, CPU], ids=["lowered", "plain"])
@pytest.mark.parametrize("function, collisions, shared", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_class_of_an_index(function, collisions, shared, backend):
    (term,) = gradient_terms(lowered(function, backend))
    assert (term.collisions, term.shared) == (collisions, frozenset(shared.split()))
    assert is_diagonal(term.gather) == (collisions == "diagonal")


@pytest.mark.parametrize("function", [c[1] for c in CASES], ids=[c[0] for c in CASES])
def test_a_class_promises_nothing_that_some_pair_breaks(function):
    """Evaluates the index for all positions: which pairs read the same element?"""
    graph = lowered(function)
    (term,) = gradient_terms(graph)
    numbers = torch.arange(max(B, H, S), dtype=torch.int32)
    inputs = {
        "batch": numbers[:B].view(-1, 1, 1, 1),
        "head": numbers[:H].view(-1, 1, 1),
        "q_idx": numbers[:S].view(-1, 1),
        "kv_idx": numbers[:S],
    }
    tensors = [IDS if t.name == "IDS" else globals()[t.name] for t in graph.tensors]
    indices = evaluate(list(term.gather.args), Environment(inputs, tensors))
    sizes = tensors[term.slot].shape
    wrapped = [(index.long() % size).expand(B, H, S, S) for index, size in zip(indices, sizes)]
    elements = defaultdict(set)
    for b, h, i, j in itertools.product(range(B), range(H), range(S), range(S)):
        elements[tuple(int(index[b, h, i, j]) for index in wrapped)].add((b, h, i, j))
    key = {
        "uniform": lambda b, h, i, j: (),
        "head": lambda b, h, i, j: (b, h),
        "row": lambda b, h, i, j: (b, h, i),
        "column": lambda b, h, i, j: (b, h, j),
        "diagonal": lambda b, h, i, j: (b, h, i - j),
    }.get(term.collisions)
    if key is not None:  # all pairs of a kind read one element
        found = defaultdict(set)
        for element, pairs in elements.items():
            for pair in pairs:
                found[key(*pair)].add(element)
        assert all(len(one) == 1 for one in found.values())
    if term.collisions == "unique":  # an element's pairs differ in what the index does not read, and in nothing else
        for pairs in elements.values():
            assert len({(i, j) for _, _, i, j in pairs}) == 1
            assert len({b for b, *_ in pairs}) == (B if "batch" in term.shared else 1)
            assert len({h for _, h, *_ in pairs}) == (H if "head" in term.shared else 1)


def test_each_read_of_a_tensor_is_a_term_of_its_own():
    terms = gradient_terms(lowered(lambda s, b, h, i, j: s + RELATIVE[i - j + S] + RELATIVE[j] + SLOPES[h] * RELATIVE[0]))
    assert sorted(term.collisions for term in terms) == ["column", "diagonal", "head", "uniform"]
    assert [term.number for term in terms] == [0, 1, 2, 3] and len({term.slot for term in terms}) == 2


def test_every_class_has_a_case():
    assert {collisions for _, _, collisions, _ in CASES} == set(CLASSES)


def test_a_gather_without_its_factor_is_refused():
    node = gather(0, FLOAT32, [apply("add", input_node("q_idx"), const(1))])
    with pytest.raises(InternalError, match="no output dgather:0"):
        gradient_terms(Graph((("gather:0", node),)))
