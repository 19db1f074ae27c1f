"""FLEXC_CHECK where the score itself decides which element is read, or whether one is. The rest: test_pipeline.py."""

from __future__ import annotations

import math

import pytest
import torch

from flexc import frontend, index_check
from flexc.backends import Shapes
from flexc.errors import IndexRangeError, UnsupportedError
from flexc.index_check import Scores, check_indices
from tests.accuracy import qkv

TABLE = torch.zeros(9)
SCALE = 1 / math.sqrt(32)


def checked(score, mask=None, size=1.0, with_scores=True):
    """The check of a call with scores of about this size."""
    q, k, _ = qkv(q_len=40, kv_len=30)
    shapes = Shapes(2, 4, 2, 40, 30, 32, 32, torch.float32)
    trace, binding = frontend.trace(score, mask)
    q = q * size
    check_indices(trace.graph, shapes, binding.tensors, binding.scalars, q.device, Scores(q, k, SCALE) if with_scores else None)


def bucket_of_score(s, batch, head, q_idx, kv_idx):
    return s + TABLE[(s * 4).int() + 4]


def guarded_by_score(s, batch, head, q_idx, kv_idx):
    return torch.where(s > 0.5, s + TABLE[q_idx], s)


def test_an_index_that_depends_on_the_score_is_checked_with_the_scores():
    checked(bucket_of_score, size=0.15)  # without the scale they would be too large
    with pytest.raises(IndexRangeError, match=r"of `int32\(score \* 4\.0\) \+ 4` is out of range: expected -9 <= index < 9"):
        checked(bucket_of_score, size=5.0)


def test_the_named_index_is_the_one_that_the_scores_give():
    q, k, _ = qkv(q_len=40, kv_len=30)
    scores = q * 5.0 @ k.repeat_interleave(2, 1).mT * SCALE
    indices = ((scores * 4).int() + 4).unique().tolist()
    with pytest.raises(IndexRangeError) as caught:
        checked(bucket_of_score, size=5.0)
    assert int(str(caught.value).split()[1]) in [i for i in indices if not -9 <= i < 9]


def test_a_read_that_the_score_guards_is_needed_where_the_score_says():
    checked(guarded_by_score, size=0.001)  # nowhere above 0.5
    with pytest.raises(IndexRangeError, match="of `q_idx` is out of range"):
        checked(guarded_by_score)


def test_masked_pairs_do_not_count():
    checked(bucket_of_score, lambda b, h, i, j: i < 0, size=100.0)


def test_all_slabs_use_their_own_scores(monkeypatch):
    """Only the last query's scores are large."""
    monkeypatch.setattr(index_check, "_PAIRS_AT_ONCE", 2 * 4 * 30 * 7)  # seven queries at a time
    q, k, _ = qkv(q_len=40, kv_len=30)
    q = q * 0.01
    trace, binding = frontend.trace(bucket_of_score, None)
    shapes = Shapes(2, 4, 2, 40, 30, 32, 32, torch.float32)
    check_indices(trace.graph, shapes, binding.tensors, binding.scalars, q.device, Scores(q, k, SCALE))
    q[:, :, -1] *= 1000
    with pytest.raises(IndexRangeError):
        check_indices(trace.graph, shapes, binding.tensors, binding.scalars, q.device, Scores(q, k, SCALE))


@pytest.mark.parametrize(("score", "said"), [(bucket_of_score, r"int32\(score \* 4\.0\) \+ 4"), (guarded_by_score, "score > 0.5")])
def test_without_scores_it_is_refused(score, said):
    with pytest.raises(UnsupportedError, match=rf"(?s)FLEXC_CHECK=1: `{said}` depends on the score.*test_index_check.py:\d+"):
        checked(score, with_scores=False)


def test_scores_are_not_computed_where_they_decide_nothing():
    checked(lambda s, b, h, i, j: torch.where(s > 0, s, -s) + TABLE[i % 9] * s, with_scores=False)
