"""Prefill of some sequences and decoding of others in one call on a paged cache, over random batches; and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import flexc
from flexc.errors import InputError, ShapeError, UnsupportedError
from tests.inference import ragged


@given(ragged.batches())
@settings(max_examples=60, deadline=None)
def test_a_batch_equals_a_run_for_each_sequence_on_the_cpu(batch):
    assert not ragged.wrong(batch, "cpu")


@pytest.mark.interpret
@given(batch=ragged.batches())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_batch_equals_a_run_for_each_sequence_interpreted(worker, batch):
    assert not worker.submit(ragged.wrong, batch).result(timeout=300)


def given_batch(**changes):
    lengths = torch.tensor([7, 12], dtype=torch.int32)
    table = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32)
    pages = [torch.randn(6, 4, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    cache = flexc.PagedKV(*pages, changes.pop("table", table), changes.pop("lengths", lengths))
    return {"q": torch.randn(6, 4, 16), "k": cache, "cu_seqlens_q": torch.tensor([0, 1, 6], dtype=torch.int32)} | changes


def test_offsets_may_be_given():
    """Verification of drafts, whose keys are in the cache behind the queries' own."""
    given, kernel = given_batch(), flexc.attention(mask_mod=lambda b, h, i, j: i >= j)
    default = flexc.varlen_attention(**given, kernel=kernel)
    offsets = torch.tensor([6, 7])
    torch.testing.assert_close(flexc.varlen_attention(**given, kernel=kernel, q_offset=offsets), default)
    assert not torch.equal(flexc.varlen_attention(**given, kernel=kernel, q_offset=offsets - 2), default)


def test_offsets_of_packed_keys_equal_those_of_each_sequence():
    kernel = flexc.attention(mask_mod=lambda b, h, i, j: i >= j)
    q, k, v = (torch.randn(n, 2, 16) for n in (3, 20, 20))
    cu_q, cu_k, offsets = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 8, 20], [7, 10]))
    out = flexc.varlen_attention(q, k, v, cu_q, cu_k, kernel, q_offset=offsets)
    for number, start in enumerate(offsets.tolist()):
        rows, keys = slice(*cu_q[number : number + 2].tolist()), slice(*cu_k[number : number + 2].tolist())
        alone = kernel(*(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), q_offset=start)
        torch.testing.assert_close(out[rows], alone[0].transpose(0, 1))


def test_boundaries_and_lengths_written_in_place_are_followed():
    """Positions are kept for the next layer of a step, and no longer."""
    given, kernel = given_batch(), flexc.attention(mask_mod=lambda b, h, i, j: i >= j)
    for boundaries, lengths in (([0, 1, 6], [7, 12]), ([0, 1, 6], [9, 6]), ([0, 5, 6], [9, 6]), ([0, 5, 5], [9, 6])):
        given["cu_seqlens_q"].copy_(torch.tensor(boundaries))
        given["k"].lengths.copy_(torch.tensor(lengths))
        cu, cache = given["cu_seqlens_q"].clone(), replace(given["k"], lengths=given["k"].lengths.clone())
        expected = flexc.varlen_attention(given["q"], cache, cu_seqlens_q=cu, kernel=kernel)
        torch.testing.assert_close(flexc.varlen_attention(**given, kernel=kernel), expected)


def test_tensors_of_inference_mode_are_taken():
    with torch.inference_mode():
        given = given_batch()
        for lengths in ([7, 12], [9, 6]):
            given["k"].lengths.copy_(torch.tensor(lengths))
            out = flexc.varlen_attention(**given, kernel=lambda b, h, i, j: i >= j)
    fresh = given_batch(q=given["q"].clone(), lengths=torch.tensor([9, 6], dtype=torch.int32))
    torch.testing.assert_close(out.clone(), flexc.varlen_attention(**fresh, kernel=lambda b, h, i, j: i >= j))


def test_compiled_regions_run_a_batch_outside():
    given = given_batch()
    q = given.pop("q")
    compiled = torch.compile(lambda q: flexc.varlen_attention(q, **given) * 2, backend="eager")
    torch.testing.assert_close(compiled(q), flexc.varlen_attention(q, **given) * 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v": torch.randn(6, 2, 16)}, InputError, "v was given beside a PagedKV"),
        ({"cu_seqlens_k": torch.tensor([0, 1, 6])}, InputError, "cu_seqlens_k was given beside a PagedKV"),
        ({"cu_seqlens_q": None}, InputError, "cu_seqlens_q is missing"),
        ({"cu_seqlens_q": torch.tensor([0, 6])}, ShapeError, "cu_seqlens_q has 1 sequences and the cache 2; expected equally many"),
        ({"cu_seqlens_q": torch.tensor([0.0, 1, 6])}, InputError, "cu_seqlens_q has dtype torch.float32; expected int32 or int64"),
        ({"q": torch.randn(1, 4, 6, 16)}, ShapeError, r"q is \[1, 4, 6, 16\]; expected \[total, heads, head_dim\]"),
        ({"q": torch.randn(6, 3, 16)}, ShapeError, "the heads of q must be a multiple of those of the cache"),
        ({"q": torch.randn(6, 4, 16).requires_grad_()}, UnsupportedError, "a gradient through a paged cache"),
        ({"q_offset": torch.tensor([1])}, ShapeError, r"q_offset has shape \[1\]; expected an int, or an int32 or int64 tensor of shape"),
        ({"kernel": lambda s, b, h, i, j: s + TABLE[b]}, ShapeError, "TABLE has 3 entries along dimension 0, which `batch` indexes"),
    ],
)
def test_bad_batches_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        flexc.varlen_attention(**given_batch(**changes))


TABLE = torch.randn(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 7, 6])}, r"cu_seqlens_q\[2\] is 6 after 7"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 7])}, r"cu_seqlens_q\[-1\] is 7 and there are 6 tokens"),
        ({"lengths": torch.tensor([7, 13], dtype=torch.int32)}, r"lengths\[1\] is 13; expected 0 to 12"),
        (
            {"table": torch.tensor([[3, 1, 0], [5, 1, 4]], dtype=torch.int32), "lengths": torch.tensor([8, 12], dtype=torch.int32)},
            r"token 7 of sequence 1 is written to place 3 of page 1, and so is one of sequence 0: .* in page_table\[1, 1\]",
        ),
    ],
)
def test_check_mode_reads_the_batch(changes, message, monkeypatch):
    monkeypatch.setenv("FLEXC_CHECK", "1")
    with pytest.raises(InputError, match=message):
        flexc.varlen_attention(**given_batch(**changes))


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["has_no_block_map", "leaves_tiles_without_rows_out"])
def test_a_batch(worker, name):
    assert not worker.submit(getattr(ragged, name)).result(timeout=300)


@pytest.mark.gpu
@given(batch=ragged.batches())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_a_batch_equals_a_run_for_each_sequence_on_a_gpu(batch):
    assert not ragged.wrong(batch, "triton", "cuda", torch.bfloat16)


@pytest.mark.gpu
def test_one_graph_serves_other_boundaries_and_lengths():
    given = given_batch()
    q, cu, cache = given["q"].cuda(), given["cu_seqlens_q"].cuda(), given["k"]
    cache = flexc.PagedKV(*(x.cuda() for x in (cache.k_pages, cache.v_pages, cache.page_table, cache.lengths)))
    kernel = flexc.attention(mask_mod=lambda b, h, i, j: (i >= j) & ((i - j < 5) | (j < 1)))
    flexc.varlen_attention(q, cache, cu_seqlens_q=cu, kernel=kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexc.varlen_attention(q, cache, cu_seqlens_q=cu, kernel=kernel)
    for boundaries, lengths in (([0, 1, 6], [7, 12]), ([0, 5, 6], [12, 1]), ([0, 0, 4], [3, 9])):
        cu.copy_(torch.tensor(boundaries))
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, flexc.varlen_attention(q, cache, cu_seqlens_q=cu, kernel=kernel))
