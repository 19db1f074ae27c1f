"""Runs, figures and pictures of block maps."""

from __future__ import annotations

import sys

import pytest
import torch

from flexc.errors import InputError, ShapeError, ToolchainError
from flexc.sparsity import FULL, PARTIAL
from tests.sparsity.graphs import both, causal, classified, dense_mask, head, kv_idx, op, q_idx, read
from tests.sparsity.test_runs import kinds_from_runs, kinds_from_walk


def test_columns_are_the_transposed_rows():
    widths = torch.tensor([3, 30])
    found = classified(both(causal, op("lt", q_idx - kv_idx, read(0, widths, head))), 20, 64, h=2, tensors=(widths,))
    assert torch.equal(kinds_from_runs(found.columns()), found.kind.transpose(-1, -2))
    assert torch.equal(kinds_from_runs(found.rows()), found.kind)
    assert torch.equal(kinds_from_walk(found.row_walk(), 8), found.kind)
    assert torch.equal(kinds_from_walk(found.column_walk(), 3), found.kind.transpose(-1, -2))
    assert found.columns() is found.columns() and found.row_walk() is found.row_walk()


def test_rows_are_ordered_longest_first_and_stable():
    assert classified(causal, 64, 64).row_walk().order.tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert classified(causal, 64, 64).column_walk().order.tolist() == list(range(8))
    assert classified(None, 64, 64).row_walk().order.tolist() == list(range(8))


def test_a_ragged_last_key_block_is_partial_in_rows_and_columns():
    found = classified(None, 20, 33)
    assert torch.equal(found.kind, torch.tensor([FULL] * 4 + [PARTIAL]).byte().expand(1, 1, 3, 5))
    assert torch.equal(kinds_from_runs(found.columns()), found.kind.transpose(-1, -2))


def test_figures():
    found = classified(causal, 64, 64)
    assert found.unmasked_pairs() == 64 * 65 // 2
    assert found.unmasked_share() == pytest.approx(65 / 128)
    assert found.sparsity() == 28 / 64 and found.visited_share() == 36 / 64
    assert found.row_work().tolist() == list(range(1, 9))


@pytest.mark.parametrize("q_len, kv_len", [(64, 64), (20, 33), (15, 143), (9, 8)])
def test_unmasked_pairs_of_ragged_lengths(q_len, kv_len):
    for mask in (causal, op("lt", q_idx, 19), None):
        expected = int(dense_mask(mask, 1, 1, q_len, kv_len).sum()) if mask is not None else q_len * kv_len
        assert classified(mask, q_len, kv_len).unmasked_pairs() == expected
        assert classified(mask, q_len, kv_len, b=2, h=3).unmasked_pairs() == 6 * expected


def test_pairs_of_a_mask_that_reads_the_head():
    widths = torch.tensor([3, 30])
    mask = both(causal, op("lt", q_idx - kv_idx, read(0, widths, head)))
    assert classified(mask, 20, 33, b=5, h=2, tensors=(widths,)).unmasked_pairs() == 5 * int(
        dense_mask(mask, 1, 2, 20, 33, (widths,)).sum()
    )


def test_picture_has_one_character_a_block():
    assert classified(causal, 32, 32).picture() == "▒···\n█▒··\n██▒·\n███▒"


def test_picture_of_a_large_map_is_scaled_down():
    lines = classified(causal, 4000, 4000).picture(columns=50, rows=50).splitlines()
    assert len(lines) == 50 and all(len(line) == 50 for line in lines)
    assert lines[0] == "▒" + "·" * 49 and lines[-1] == "█" * 49 + "▒"
    ragged = classified(causal, 8 * 101, 8 * 101).picture(columns=50, rows=50).splitlines()
    assert len(ragged) == 34 and ragged[-1] == "█" * 33 + "▒"


def test_picture_chooses_the_head():
    widths = torch.tensor([1, 64])
    found = classified(both(causal, op("lt", q_idx - kv_idx, read(0, widths, head))), 16, 16, h=2, tensors=(widths,))
    assert found.picture(0, 0) == "▒·\n·▒" and found.picture(0, 1) == "▒·\n█▒"
    with pytest.raises(InputError, match="expected batch < 1 and head < 2, got 0 and 2"):
        found.picture(0, 2)


def test_str_names_sizes_counts_and_how_they_were_found():
    text = str(classified(causal, 64, 64))
    assert "64 queries x 64 keys in blocks of 8 x 8: 8 x 8 blocks" in text
    assert "empty 28 (43.8 %), partial 8 (12.5 %), full 28 (43.8 %)" in text
    assert "64 by bounds" in text and text.endswith("███████▒")
    assert repr(classified(causal, 64, 64)).startswith("<BlockMap 64 queries x 64 keys")
    assert "0 queries" in str(classified(causal, 0, 64))


def test_dense_view_of_tokens():
    found = classified(causal, 20, 33)
    assert torch.equal(found.to_dense(), torch.ones(1, 1, 20, 33, dtype=torch.bool).tril())
    assert classified(None, 3, 5).to_dense().all()
    assert classified(causal, 0, 5).to_dense().shape == (1, 1, 0, 5)


def test_a_dense_view_that_is_too_large_is_refused():
    with pytest.raises(ShapeError, match=r"a dense mask of shape \[1, 1, 20000, 20000\] has 400,000,000 entries"):
        classified(causal, 20_000, 20_000, (1000, 1000)).to_dense()


def test_plot_writes_an_image(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    classified(causal, 64, 64).plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    from matplotlib.image import imread

    image = imread(path)
    blue = (abs(image[..., :3] - torch.tensor([0x2B, 0x6C, 0xB0]).numpy() / 255).max(-1) < 0.02).mean()
    assert 0.2 < blue < 0.45  # 28 of 64 blocks are full


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ToolchainError, match="pip install matplotlib"):
        classified(causal, 64, 64).plot("unused.png")


@pytest.mark.parametrize("most", [1, 3, 8, 100])
def test_pairs_estimated_from_some_partial_blocks(most):
    assert classified(causal, 64, 64).unmasked_pairs(most) == 64 * 65 // 2  # every partial block is alike
    documents = torch.arange(640) // 37
    found = classified(op("eq", read(0, documents, q_idx), read(0, documents, kv_idx)), 640, 640, tensors=(documents,))
    assert found.unmasked_pairs(most) == pytest.approx(found.unmasked_pairs(), rel=0.5 if most < 8 else 0.15)


def test_a_map_too_large_to_list_its_blocks_still_prints():
    found = classified(causal, 2**20, 2**20, (32, 32))
    with pytest.raises(ShapeError, match=r"a dense map of shape \[1, 1, 32768, 32768\] has 1,073,741,824 entries"):
        found.kind  # noqa: B018
    assert found.counts() == {"empty": 2**14 * (2**15 - 1), "partial": 2**15, "full": 2**14 * (2**15 - 1)}
    assert found.picture(columns=4, rows=4) == "▒···\n█▒··\n██▒·\n███▒"
    assert found.size_bytes < 4 * 2**20


@pytest.mark.parametrize("q_len, kv_len", [(64, 64), (20, 33), (0, 8), (200, 7)])
def test_other_lengths_are_derived_anew(q_len, kv_len):
    """A mask of lengths cannot be cropped: the last documents of a longer one begin later, and a ragged last block is another one."""
    documents = torch.arange(200) // 7
    for mask, tensors in ((both(causal, op("eq", read(0, documents, q_idx), read(0, documents, kv_idx))), (documents,)), (None, ())):
        found = classified(mask, 37, 91, b=2, h=3, tensors=tensors).with_lengths(q_len, kv_len)
        direct = classified(mask, q_len, kv_len, b=2, h=3, tensors=tensors)
        assert torch.equal(found.kind, direct.kind) and found.summary() == direct.summary()
        assert classified(mask, 0, 0, tensors=tensors).with_lengths(q_len, kv_len).counts() == direct.counts()
