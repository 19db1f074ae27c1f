"""What a cache may free, against a loop over all pairs of a dense mask."""

from __future__ import annotations

import pytest
import torch

import flexc
from flexc import masks
from flexc.sparsity import EMPTY
from tests.sparsity.graphs import both, causal, classified, head, kv_idx, op, q_idx, read


def last_by_loops(kind: torch.Tensor) -> list:
    """The last query block that may see each key block, from the kinds of all blocks."""
    b, h, n, m = kind.shape
    return [[[max((i for i in range(n) if kind[e, g, i, j] != EMPTY), default=-1) for j in range(m)] for g in range(h)] for e in range(b)]


def live_by_loops(kind: torch.Tensor, block: tuple[int, int]) -> list:
    """Step by step: a key block appears with its first token or its first reader, and leaves after its last reader."""
    b, h, n, m = kind.shape
    found = []
    for e in range(b):
        for g in range(h):
            seen = kind[e, g] != EMPTY
            for i in range(n):
                held = 0
                for j in range(m):
                    has_come = (i + 1) * block[0] > j * block[1] or bool(seen[: i + 1, j].any())
                    held += has_come and bool(seen[i:, j].any())
                found.append(held)
    return found


@pytest.mark.parametrize("block", [(8, 8), (16, 8), (8, 16), (5, 7)])
@pytest.mark.parametrize("q_len, kv_len", [(64, 64), (20, 61), (61, 20), (1, 1), (1, 40), (40, 1)])
def test_random_masks_agree_with_a_loop(q_len, kv_len, block):
    for seed in range(4):
        table = torch.rand(2, 80, 80, generator=torch.Generator().manual_seed(seed)) < (0.004, 0.03, 0.2, 0.9)[seed]
        found = classified(read(0, table, head, q_idx, kv_idx), q_len, kv_len, block, h=2, tensors=(table,), exact=True)
        assert found.last_reader().tolist() == last_by_loops(found.kind)
        assert found.live().flatten().tolist() == live_by_loops(found.kind, block)
        assert found.most_live() == max(live_by_loops(found.kind, block))


@pytest.mark.parametrize(
    "mask", [causal, both(causal, op("lt", q_idx - kv_idx, 19)), op("or", causal, op("lt", kv_idx, 23)), op("lt", q_idx, kv_idx)]
)
@pytest.mark.parametrize("block", [(8, 8), (16, 8), (8, 16)])
def test_structured_masks_agree_with_a_loop(mask, block):
    found = classified(mask, 90, 90, block)
    assert found.last_reader().tolist() == last_by_loops(found.kind)
    assert found.live().flatten().tolist() == live_by_loops(found.kind, block)


def test_shapes_and_dtypes():
    widths = torch.tensor([3, 30])
    found = classified(both(causal, op("lt", q_idx - kv_idx, read(0, widths, head))), 24, 40, h=2, tensors=(widths,))
    assert found.last_reader().dtype == found.live().dtype == torch.int32
    assert found.last_reader().shape == (1, 2, 5) and found.live().shape == (1, 2, 3)


def test_causal_frees_nothing():
    blocks = flexc.block_map(masks.causal, 1024, 1024, block=32)
    assert (blocks.last_reader() == 31).all()
    assert blocks.live().flatten().tolist() == list(range(1, 33)) and blocks.most_live() == 32


@pytest.mark.parametrize("length", [4096, 2**16])
def test_a_window_with_sinks_holds_a_constant_number_of_blocks(length):
    """A window of 256 tokens reaches into five blocks of 64, and the first block holds the sinks."""
    blocks = flexc.block_map(masks.sliding_window(257) | masks.sinks(4), length, length, block=64)
    assert (blocks.live()[0, 0, 5:] == 6).all() and blocks.most_live() == 6
    last = blocks.last_reader()[0, 0]
    rows = blocks.shape[2]
    assert last[0] == rows - 1
    assert torch.equal(last[1:].long(), (torch.arange(1, rows) + 4).clamp(max=rows - 1))


def test_documents_hold_no_more_than_the_longest():
    ids = torch.arange(6).repeat_interleave(torch.tensor([64, 128, 320, 64, 64, 64]))
    blocks = flexc.block_map(masks.document(ids) & masks.causal, len(ids), len(ids), block=64)
    assert blocks.most_live() == 5
    assert blocks.last_reader().flatten().tolist() == [0, 2, 2, 7, 7, 7, 7, 7, 8, 9, 10]


def test_keys_that_nobody_sees_are_never_held():
    blocks = flexc.block_map(masks.causal & masks.padding(70), 256, 256, block=32)
    assert blocks.last_reader().flatten().tolist() == [7, 7, 7, -1, -1, -1, -1, -1]
    assert blocks.most_live() == 3


def test_a_prefix_is_held_from_its_first_reader_on():
    blocks = flexc.block_map(masks.prefix_lm(96), 256, 256, block=32)
    assert blocks.live().flatten().tolist() == [3, 3, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("q_len, kv_len", [(0, 0), (0, 100), (100, 0)])
def test_without_tokens_nothing_is_held(q_len, kv_len):
    blocks = flexc.block_map(masks.causal, q_len, kv_len, block=32)
    assert blocks.last_reader().shape == (1, 1, -(-kv_len // 32)) and (blocks.last_reader() == -1).all()
    assert blocks.live().shape == (1, 1, -(-q_len // 32)) and blocks.most_live() == 0
