"""Masks and score functions that are pickled and copied: by name, by how they were made, by graph; here and in another process."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given

import flexc
from flexc import frontend, masks, scores
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import FLOAT32, Graph, input_node, substitute
from flexc.ir.ops import apply, cast
from flexc.pickling import has_a_name, mask_of_graph, python_source
from flexc.reference import reference
from tests.accuracy import normal, qkv
from tests.strategies import environment, graphs, quick

IDS = torch.tensor([0] * 7 + [1] * 8 + [2] * 5)
LENGTHS = torch.tensor([5, 18])
FOUR, TABLE, SIX = torch.tensor(4), np.array([3, 1, 2, 5]), flexc.runtime(6)


@flexc.mask
def decorated(batch, head, q_idx, kv_idx):
    return q_idx - kv_idx >= head


def plain(batch, head, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 6


def with_width(width, batch, head, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < width


def calling(inner, batch, head, q_idx, kv_idx):
    return inner(batch, head, q_idx, kv_idx)


class Window:
    width = 5

    @flexc.mask
    @staticmethod
    def inside(batch, head, q_idx, kv_idx):
        return q_idx - kv_idx < 3

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, batch, head, q_idx, kv_idx):
        return (self.ids[q_idx] == self.ids[kv_idx]) & (q_idx - kv_idx < self.width)

    def method(self, batch, head, q_idx, kv_idx):
        return self(batch, head, q_idx, kv_idx) | (kv_idx == 0)


def local_mask():
    width, ids = 4, IDS.clone()

    @flexc.mask
    def window(batch, head, q_idx, kv_idx):
        if batch == 1 and not q_idx > 15:
            return True
        return ids[q_idx] == ids[kv_idx] and 0 <= q_idx - kv_idx < width

    return window


def local_class():
    class Local:
        def __init__(self):
            self.ids = IDS

        def __call__(self, batch, head, q_idx, kv_idx):
            return self.ids[q_idx] <= self.ids[kv_idx]

    return flexc.mask(Local())


NAMED = {"decorated": decorated, "static method": Window.inside, "causal": masks.causal, "everything": masks.everything, "noop": masks.noop}
MADE = {
    "sliding_window": masks.sliding_window(4),
    "prefix": masks.prefix(3),
    "prefix of each": masks.prefix(length=LENGTHS),
    "prefix_lm": masks.prefix_lm(LENGTHS),
    "document": masks.document(IDS),
    "document of each": masks.document(IDS.expand(2, 20), IDS.expand(2, 20).flip(1)),
    "dilated": masks.dilated(3, step=2),
    "block_diagonal": masks.block_diagonal(6),
    "neighborhood_2d": masks.neighborhood_2d(5, (1, 2)),
    "padding": masks.padding(LENGTHS),
    "padding table": masks.padding(IDS > 0),
    "sinks": masks.sinks(2),
    "plain function": flexc.mask(plain),
    "partial": flexc.mask(functools.partial(with_width, 3)),
    "callable object": flexc.mask(Window(IDS)),
    "bound method": flexc.mask(Window(IDS).method),
    "and": masks.causal & masks.document(IDS),
    "or": masks.sliding_window(3) | plain,
    "xor": decorated ^ masks.sliding_window(3),
    "reflected": plain & masks.causal,
    "not": ~masks.document(IDS),
    "nested": (masks.sliding_window(13) | masks.sinks(4)) & ~(decorated ^ masks.causal),
}
BY_GRAPH = {
    "lambda": flexc.mask(lambda b, h, i, j: (i + j) % 3 != 1),
    "local function": local_mask(),
    "local class": local_class(),
    "partial of a lambda": flexc.mask(functools.partial(lambda n, b, h, i, j: i - j < n, 7)),
    "partial over a lambda": flexc.mask(functools.partial(calling, lambda b, h, i, j: i > j)),
    "not a lambda": ~flexc.mask(lambda b, h, i, j: IDS[i] == IDS[j]),
    "lambda and mask": masks.causal & (lambda b, h, i, j: i - j < LENGTHS[b]),
    "no index": flexc.mask(lambda b, h, i, j, n=FOUR: i - j < n),
    "many operations": flexc.mask(
        lambda b, h, i, j: (
            (torch.where(i > 3, torch.sqrt(i * 1.5), math.inf) > torch.maximum(j / 2, torch.floor(j * 0.3))) ^ ((~i & 3) == (j << 1) % 4)
            | torch.logical_not(i.float().tanh() < torch.minimum(j, i) // 3)
        )
    ),
    "table of a closure": flexc.mask(lambda b, h, i, j, t=TABLE: t[h] <= i - j + 2),
    "always": flexc.mask(lambda b, h, i, j: True),
    "never": flexc.mask(lambda b, h, i, j: i < 0),
    "run-time number": flexc.mask(lambda b, h, i, j, w=SIX: i - j < w),
}
SCORES = {
    "alibi": scores.alibi(4),
    "alibi of a table": scores.alibi(normal(4)),
    "distance_bias": scores.distance_bias(0.25),
    "distance_bias of each head": scores.distance_bias(weight=normal(4)),
    "soft_cap": scores.soft_cap(3),
    "temperature": scores.temperature(2.0),
    "temperature of each head": scores.temperature(normal(4).abs() + 1),
    "relative_bias": scores.relative_bias(normal(9)),
    "relative_bias of each head": scores.relative_bias(normal(4, 9)),
    "bucketed_bias": scores.bucketed_bias(normal(16, 4), max_distance=12, bidirectional=False),
}


def attended(mask=None, score=None):
    """What attention gives with it, as numbers that travel."""
    q, k, v = qkv(q_len=20)
    out = flexc.attention(score, mask, backend="cpu")(q, k, v)
    assert isinstance(out, torch.Tensor)
    return out.tolist()


def from_pickle(data, is_score):
    thing = pickle.loads(data)
    return attended(None, thing) if is_score else attended(thing)


@pytest.fixture(scope="module")
def elsewhere():
    """A process that was not forked from this one."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    yield lambda *args: pool.submit(from_pickle, *args).result()
    pool.shutdown()


@pytest.mark.parametrize("mask", NAMED.values(), ids=NAMED.keys())
def test_a_mask_with_a_name_is_the_same_object(mask, elsewhere):
    data = pickle.dumps(mask)
    assert pickle.loads(data) is mask and copy.deepcopy(mask) is mask and copy.copy(mask) is mask
    assert len(data) < 200
    assert elsewhere(data, False) == attended(mask)


@pytest.mark.parametrize("mask", [*MADE.values(), *BY_GRAPH.values()], ids=[*MADE, *BY_GRAPH])
def test_any_mask_pickles(mask, elsewhere):
    expected, data = attended(mask), pickle.dumps(mask)
    for twin in (pickle.loads(data), copy.deepcopy(mask), pickle.loads(pickle.dumps(pickle.loads(data)))):
        assert isinstance(twin, flexc.Mask) and twin is not mask and twin.__name__ == mask.__name__
        assert attended(twin) == expected
        q, k, v = qkv(q_len=20)
        torch.testing.assert_close(reference(None, twin, q, k, v), reference(None, mask, q, k, v))
        assert attended(twin & masks.causal) == attended(mask & masks.causal)
    assert elsewhere(data, False) == expected


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES.keys())
def test_score_functions_pickle(score, elsewhere):
    expected, data = attended(None, score), pickle.dumps(score)
    for twin in (pickle.loads(data), copy.deepcopy(score)):
        assert twin is not score and twin.__name__ == score.__name__ and twin.__doc__ == score.__doc__
        assert attended(None, twin) == expected
    assert elsewhere(data, True) == expected


def test_a_kernel_of_masks_and_scores_pickles():
    kernel = flexc.attention(scores.alibi(4), local_mask() & masks.causal, backend="cpu", deterministic=True)
    twin = pickle.loads(pickle.dumps(kernel))
    q, k, v = qkv(q_len=20)
    assert twin(q, k, v).equal(kernel(q, k, v))


def test_a_copy_has_tensors_of_its_own():
    table, ids = normal(4, grad=True), IDS.clone()
    for twin in (copy.deepcopy(scores.alibi(table)), pickle.loads(pickle.dumps(scores.alibi(table)))):
        (captured,) = flexc.attention(twin).captured(*qkv(q_len=20)).values()
        assert captured is not table and captured.requires_grad and captured.equal(table)
    for mask in (masks.document(ids), flexc.mask(lambda b, h, i, j: ids[i] == ids[j])):
        before, twin = attended(mask), copy.deepcopy(mask)
        ids.zero_()
        assert attended(twin) == before != attended(mask)
        ids.copy_(IDS)


def test_what_is_shared_stays_shared():
    ids = IDS.clone()
    first, second = pickle.loads(pickle.dumps((masks.document(ids), masks.document(ids) & masks.causal)))
    assert first.recipe[1][0] is second.recipe[1][0].recipe[1][0]


def test_copies_by_graph_share_their_code():
    """And so their traces: a copy for each worker compiles nothing."""
    mask = local_mask()
    first, second = copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))
    assert first.__flexc_function__.__code__ is second.__flexc_function__.__code__
    assert frontend.trace(None, first)[0] is frontend.trace(None, second)[0]


def test_a_name_that_holds_something_else_is_not_trusted():
    """The function of this name in the module is not the one inside the mask."""

    def plain(batch, head, q_idx, kv_idx):
        return q_idx == kv_idx

    plain.__qualname__ = "plain"
    assert not has_a_name(plain)
    mask = flexc.mask(plain)
    assert attended(pickle.loads(pickle.dumps(mask))) == attended(mask) != attended(flexc.mask(globals()["plain"]))


def test_a_mask_that_cannot_be_traced_says_why():
    with pytest.raises(flexc.TraceError, match="random"):
        pickle.dumps(flexc.mask(lambda b, h, i, j: torch.rand(()) > 0.5))


# --- graphs as Python functions ------------------------------------------------------------------------------------------------------


def test_the_function_of_a_graph_reads_like_one():
    text = python_source(frontend.trace(None, BY_GRAPH["no index"])[0].graph)
    assert text.splitlines() == [
        "def make(t0):",
        "    def mask(batch, head, q_idx, kv_idx):",
        "        x0 = q_idx - kv_idx",
        "        x1 = x0.to(torch.int64)",
        "        x2 = x1 < t0[()]",
        "        return x2",
        "    return mask",
    ]


@quick
@given(graph=graphs())
def test_a_graph_becomes_a_function_that_traces_to_it(graph):
    """Random graphs, as masks that read positions."""
    by_position = {input_node("score"): cast(input_node("kv_idx"), FLOAT32) * 0.25 - 0.5}
    for root in (graph.mask, None if graph.score is None else apply("gt", graph.score, 0.3)):
        if root is None or root.op == "const":
            continue
        root = substitute(root, by_position)
        env = environment(0)
        function = mask_of_graph(str(Graph((("mask", root),), graph.tensors, graph.scalars)), env.tensors, env.scalars)
        trace, binding = frontend.trace(None, function)
        assert trace.graph.mask is not None
        (expected,) = evaluate([root], env)
        (found,) = evaluate([trace.graph.mask], Environment(env.inputs, binding.tensors, binding.scalars, env.float_dtype))
        assert torch.equal(found.expand(2, 3, 5, 7), expected.expand(2, 3, 5, 7))
