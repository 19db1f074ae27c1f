"""`flexc.block_map`: what it takes, what it gives, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flexc
from flexc import masks
from flexc.errors import IndexRangeError, InputError, ShapeError, TraceError, UnsupportedError
from flexc.sparsity import FULL, PARTIAL
from tests.sparsity.graphs import kinds_of


def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 100


def dense_window(q_len: int, kv_len: int) -> torch.Tensor:
    difference = torch.arange(q_len)[:, None] - torch.arange(kv_len)
    return ((difference >= 0) & (difference < 100))[None, None]


def hidden(score, batch, head, q_idx, kv_idx):
    return flexc.where((q_idx >= kv_idx) & (q_idx - kv_idx < 100), score * 2.0, -math.inf)


@pytest.mark.parametrize(
    "mask",
    [
        window,
        flexc.mask(window),
        masks.sliding_window(100),
        flexc.kernel(window),
        flexc.attention(mask_mod=window),
        flexc.attention(score_mod=lambda s, b, h, i, j: s * 2, mask_mod=window),
        flexc.kernel(hidden),
        flexc.attention(score_mod=hidden, mask_mod=masks.causal),
    ],
    ids=["function", "Mask", "flexc.masks", "kernel", "attention", "score and mask", "hidden", "hidden and mask"],
)
def test_every_form_of_a_mask(mask):
    blocks = flexc.block_map(mask, 300, 333, block=(32, 16))
    assert torch.equal(blocks.kind, kinds_of(dense_window(300, 333), (32, 16)))
    assert torch.equal(blocks.to_dense(), dense_window(300, 333))
    assert (blocks.q_len, blocks.kv_len, blocks.block) == (300, 333, (32, 16))


def test_it_is_the_map_that_a_kernel_uses():
    kernel = flexc.kernel(window)
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 333, 16)
    kernel(q, k, k)
    blocks = flexc.block_map(kernel, 300, 333, batch=1, heads=2, block=kernel.blocks.block)
    assert torch.equal(blocks.kind, kernel.blocks.kind)


def test_without_a_mask_everything_is_full():
    for kernel in (flexc.attention(), flexc.attention(score_mod=lambda s, b, h, i, j: s + 1)):
        assert (flexc.block_map(kernel, 256, 256).kind == FULL).all()


def test_a_block_is_128_tokens_or_what_is_asked_for():
    assert flexc.block_map(window, 300, 300).block == (128, 128)
    assert flexc.block_map(window, 300, 300, block=64).block == (64, 64)
    assert flexc.block_map(window, 300, 300, block=np.int64(64)).block == (64, 64)
    assert flexc.block_map(window, 300, 300, block=(64, 32)).shape == (1, 1, 5, 10)


def test_batch_and_heads_have_entries_only_where_the_mask_reads_them():
    widths, lengths = torch.tensor([10, 50, 200]), torch.tensor([300, 5])

    def of_heads(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < widths[head])

    blocks = flexc.block_map(of_heads, 300, 300, batch=2, heads=3)
    assert blocks.shape == (1, 3, 3, 3) and (blocks.batch, blocks.heads) == (2, 3)
    assert flexc.block_map(masks.padding(lengths), 300, 300, batch=2, heads=3).shape == (2, 1, 3, 3)
    assert flexc.block_map(window, 300, 300, batch=2, heads=3).shape == (1, 1, 3, 3)


@pytest.mark.parametrize("q_len, kv_len", [(0, 0), (0, 5), (5, 0), (1, 1), (1, 200), (200, 1)])
def test_short_lengths(q_len, kv_len):
    blocks = flexc.block_map(window, q_len, kv_len)
    assert blocks.shape == (1, 1, -(-q_len // 128), -(-kv_len // 128))
    assert torch.equal(blocks.kind, kinds_of(dense_window(q_len, kv_len), (128, 128)))
    assert blocks.unmasked_pairs() == int(dense_window(q_len, kv_len).sum())
    assert str(blocks)


def test_a_long_map_is_small():
    blocks = flexc.block_map(window, 2**20, 2**20)
    assert blocks.counts() == {"empty": 8192**2 - 2 * 8192 + 1, "partial": 2 * 8192 - 1, "full": 0}
    assert blocks.size_bytes < 2**20


def test_the_device_is_that_of_the_captured_tensors_or_the_cpu():
    assert flexc.block_map(window, 10, 10).device.type == "cpu"
    assert flexc.block_map(window, 10, 10, device="cpu").device.type == "cpu"
    assert flexc.block_map(masks.document(torch.zeros(10, dtype=torch.int32)), 10, 10).device.type == "cpu"


@pytest.mark.gpu
def test_on_a_gpu():
    ids = (torch.arange(3000, device="cuda") // 700).int()
    mask = masks.document(ids) & masks.causal
    blocks = flexc.block_map(mask, 3000, 3000)
    assert blocks.device == ids.device
    expected = flexc.block_map(masks.document(ids.cpu()) & masks.causal, 3000, 3000)
    assert torch.equal(blocks.kind.cpu(), expected.kind)
    assert flexc.block_map(mask, 3000, 3000, device="cuda").device == ids.device
    assert flexc.block_map(window, 3000, 3000, device="cuda").device.type == "cuda"
    width = torch.tensor(100)
    assert flexc.block_map(lambda b, h, i, j: (i >= j) & (i - j < width) & (ids[i] == 0), 3000, 3000).device == ids.device
    certificate = blocks.certify()
    assert certificate.is_complete and not certificate.wrong


def test_a_short_table_reads_zero_past_its_end_as_in_kernels():
    ids = torch.ones(200, dtype=torch.int64)

    def mask(batch, head, q_idx, kv_idx):
        return ids[kv_idx] == 1

    blocks = flexc.block_map(mask, 300, 300, block=50)
    assert blocks.kind[0, 0, 0].tolist() == [FULL] * 4 + [0] * 2
    q = torch.randn(1, 1, 300, 16)
    seen = flexc.kernel(mask)(q, q, q)
    torch.testing.assert_close(seen, torch.softmax(q @ q[:, :, :200].mT / 4, -1) @ q[:, :, :200])


def test_check_mode_finds_a_read_past_a_table(monkeypatch):
    ids = torch.ones(200, dtype=torch.int64)

    def mask(batch, head, q_idx, kv_idx):
        return ids[kv_idx] == 1

    monkeypatch.setenv("FLEXC_CHECK", "1")
    assert flexc.block_map(mask, 300, 200).counts()["full"]
    with pytest.raises(IndexRangeError, match=r"index 200 of `kv_idx` is out of range: expected -200 <= index < 200"):
        flexc.block_map(mask, 300, 201)


@pytest.mark.parametrize("q_len, kv_len", [(0, 0), (0, 5), (5, 0)])
def test_check_mode_has_nothing_to_check_without_tokens(q_len, kv_len, monkeypatch):
    monkeypatch.setenv("FLEXC_CHECK", "1")
    assert flexc.block_map(masks.document(torch.zeros(1, dtype=torch.int32)), q_len, kv_len).unmasked_pairs() == 0


def test_check_mode_finds_a_false_fact(monkeypatch):
    ids = flexc.sorted(torch.tensor([0, 0, 1, 0]))
    monkeypatch.setenv("FLEXC_CHECK", "1")
    with pytest.raises(InputError, match=r"doc_ids was declared sorted, but doc_ids\[3\] = 0 comes after 1"):
        flexc.block_map(masks.document(ids), 4, 4)


def test_numbers_that_change_trace_once_and_still_count():
    for width in (10, 20, 30, 200):
        mask = masks.sliding_window(width)
        difference = torch.arange(300)[:, None] - torch.arange(300)
        expected = kinds_of(((difference >= 0) & (difference < width))[None, None], (32, 32))
        assert torch.equal(flexc.block_map(mask, 300, 300, block=32).kind, expected)


def test_captured_gradients_do_not_matter():
    limit = torch.tensor([100.0], requires_grad=True)
    blocks = flexc.block_map(lambda b, h, i, j: j < limit[0], 256, 256, block=64)
    assert blocks.kind[0, 0, 0].tolist() == [FULL, PARTIAL, 0, 0]


# --- what is refused ---------------------------------------------------------------------------------------------------------------


def test_a_score_function_is_refused():
    with pytest.raises(InputError, match=r"'hidden' takes 5 positional arguments; expected 4 .*pass flexc.kernel\(function\)"):
        flexc.block_map(hidden, 10, 10)


def test_another_number_of_arguments_is_refused():
    with pytest.raises(InputError, match="'<lambda>' takes 3 positional arguments; expected 4"):
        flexc.block_map(lambda b, i, j: i >= j, 10, 10)


def test_no_function_is_refused():
    with pytest.raises(InputError, match="mask is a Tensor; expected a function"):
        flexc.block_map(torch.ones(3, 3, dtype=torch.bool), 10, 10)


def test_a_mask_that_returns_a_number_is_refused():
    with pytest.raises(TraceError, match="a mask function returns a truth value"):
        flexc.block_map(lambda b, h, i, j: i - j, 10, 10)


@pytest.mark.parametrize("length", [1.5, "8", None, True, torch.tensor(2.0)])
def test_lengths_that_are_no_integers_are_refused(length):
    with pytest.raises(InputError, match="expected q_len to be an integer number of tokens, got"):
        flexc.block_map(window, length, 10)
    with pytest.raises(InputError, match="expected kv_len to be an integer number of tokens, got"):
        flexc.block_map(window, 10, length)


def test_negative_lengths_are_refused():
    with pytest.raises(ShapeError, match="expected kv_len >= 0, got -1"):
        flexc.block_map(window, 10, -1)


def test_lengths_beyond_exact_positions_are_refused():
    assert flexc.block_map(masks.causal, 2**24 - 1, 10, block=2**20).shape == (1, 1, 16, 1)
    with pytest.raises(UnsupportedError, match="expected fewer than 16777216 tokens, got q_len 16777216"):
        flexc.block_map(masks.causal, 2**24, 10)


@pytest.mark.parametrize("name", ["batch", "heads"])
def test_no_batch_and_no_heads_are_refused(name):
    with pytest.raises(ShapeError, match=f"expected {name} >= 1, got 0"):
        flexc.block_map(window, 10, 10, **{name: 0})
    with pytest.raises(InputError, match=f"expected {name} to be an integer, got True"):
        flexc.block_map(window, 10, 10, **{name: True})


@pytest.mark.parametrize("block", [0, -8, (64, 0)])
def test_blocks_without_tokens_are_refused(block):
    with pytest.raises(ShapeError, match="expected a block of at least 1 × 1 tokens, got"):
        flexc.block_map(window, 10, 10, block=block)


@pytest.mark.parametrize("block", [True, 1.5, "64", (64, 1.5), (64, True)])
def test_blocks_that_are_no_integers_are_refused(block):
    with pytest.raises(InputError, match="expected block to be integers, tokens per block, got"):
        flexc.block_map(window, 10, 10, block=block)


def test_what_was_checked_holds_for_arguments_of_the_same_types():
    """Arguments are checked once; 1 == True == 1.0."""
    made = flexc.block_map(window, 64, 1, batch=1, heads=1, block=(64, 1))
    assert flexc.block_map(window, 64, 1, batch=1, heads=1, block=[64, 1]).shape == made.shape
    for wrong in ({"kv_len": True}, {"kv_len": 1.0}, {"batch": True}, {"heads": 1.0}, {"block": (64, True)}, {"block": [64, True]}):
        with pytest.raises(InputError, match="True|1.0"):
            flexc.block_map(window, **{"q_len": 64, "kv_len": 1, "batch": 1, "heads": 1, "block": (64, 1), **wrong})


def test_another_table_is_checked_again():
    def by_head(table):
        return lambda batch, head, q_idx, kv_idx: q_idx - kv_idx < table[head]

    flexc.block_map(by_head(torch.arange(4)), 64, 64, heads=4)
    with pytest.raises(ShapeError, match="has 3 entries along dimension 0"):
        flexc.block_map(by_head(torch.arange(3)), 64, 64, heads=4)


def test_a_block_of_three_sides_is_refused():
    with pytest.raises(InputError, match=r"expected block to be \(query tokens, key tokens\) or one number, got \(1, 2, 3\)"):
        flexc.block_map(window, 10, 10, block=(1, 2, 3))


def test_a_table_for_another_batch_or_other_heads_is_refused():
    lengths, widths = torch.tensor([3, 4]), torch.tensor([3, 4, 5])
    with pytest.raises(
        ShapeError, match="length has 2 entries along dimension 0, which `batch` indexes; the map is made for 1 batch entries"
    ):
        flexc.block_map(masks.padding(lengths), 10, 10)
    with pytest.raises(ShapeError, match="widths has 3 entries along dimension 0, which `head` indexes; the map is made for 4 heads"):
        flexc.block_map(lambda b, h, i, j: i - j < widths[h], 10, 10, heads=4)


def test_tensors_on_different_devices_are_refused():
    here, there = torch.zeros(10, dtype=torch.int32), torch.zeros(10, dtype=torch.int32, device="meta")
    with pytest.raises(InputError, match="captured tensors must be on one device, got here on cpu and there on meta"):
        flexc.block_map(lambda b, h, i, j: here[i] == there[j], 10, 10)
    with pytest.raises(InputError, match="the captured tensor there is on meta, but the map was asked for on cpu"):
        flexc.block_map(lambda b, h, i, j: there[i] == there[j], 10, 10, device="cpu")


def test_no_device_is_refused():
    with pytest.raises(InputError, match="expected device to name a device, such as 'cuda:0', got 'gpu'"):
        flexc.block_map(window, 10, 10, device="gpu")


def test_more_blocks_than_int32_counts_are_refused():
    def mask(batch, head, q_idx, kv_idx):
        return q_idx * batch >= kv_idx * head

    with pytest.raises(ShapeError, match="expected at most 2,147,483,647 rows of blocks and as many columns, .* got 1,048,576 x 8,192"):
        flexc.block_map(mask, 2**20, 2**20, batch=2**10, heads=2**10)
