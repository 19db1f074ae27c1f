"""Pictures at any size, against cells counted one by one."""

from __future__ import annotations

import pytest
import torch

import flexc
from flexc.errors import InputError
from flexc.sparsity import EMPTY, FULL, PARTIAL
from flexc.sparsity.picture import cells
from tests.sparsity.graphs import causal, classified, head, kv_idx, op, q_idx, read

SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}
COLOURS = {EMPTY: (0xF3, 0xF3, 0xF3), PARTIAL: (0xF2, 0xA5, 0x41), FULL: (0x2B, 0x6C, 0xB0)}


def random_map(q_len: int, kv_len: int, share: float, seed: int = 0, h: int = 1):
    """Layouts of 4 x 4 tokens, so that blocks of 2 are often empty, full, and neighbours."""
    layout = torch.rand(h, 40, 40, generator=torch.Generator().manual_seed(seed)) < share
    mask = read(0, layout, head, op("floordiv", q_idx + 1, 4), op("floordiv", kv_idx, 4))
    return classified(mask, q_len, kv_len, (2, 2), h=h, tensors=(layout,), exact=True)


def cells_one_by_one(kind: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The kind that all blocks of a square share, or PARTIAL. The side of the square is the smallest that fits."""
    n, m = kind.shape
    step = max(1, -(-n // rows), -(-m // columns))
    found = torch.zeros(-(-n // step), -(-m // step), dtype=torch.uint8)
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            inside = kind[i * step : (i + 1) * step, j * step : (j + 1) * step]
            found[i, j] = inside.flatten()[0] if (inside == inside.flatten()[0]).all() else PARTIAL
    return found


@pytest.mark.parametrize("rows, columns", [(1, 1), (5, 5), (7, 20), (20, 3), (48, 96), (1000, 1000)])
@pytest.mark.parametrize("q_len, kv_len", [(100, 100), (37, 91), (91, 37), (2, 150), (1, 1)])
def test_cells_agree_with_those_counted_one_by_one(q_len, kv_len, rows, columns):
    for share in (0.05, 0.5, 0.95):
        found = random_map(q_len, kv_len, share, h=2)
        for entry in range(2):
            expected = cells_one_by_one(found.kind[0, entry], rows, columns)
            assert torch.equal(cells(found.rows(), entry, rows, columns), expected)
            text = found.picture(0, entry, columns, rows)
            assert text == "\n".join("".join(SIGNS[k] for k in line) for line in expected.tolist())


def test_no_picture_is_larger_than_asked_for():
    for length in (1, 95, 96, 97, 10_000, 2**20):
        lines = str(flexc.block_map(flexc.masks.sliding_window(1000), length, length, block=32)).splitlines()[2:]
        assert 1 <= len(lines) <= 48 and max(map(len, lines)) <= 96


def test_a_million_tokens_show_their_structure():
    blocks = flexc.block_map(flexc.masks.prefix_lm(2**18), 2**20, 2**20)
    assert blocks.picture(columns=8, rows=8) == "██······\n██······\n██▒·····\n███▒····\n████▒···\n█████▒··\n██████▒·\n███████▒"


def test_an_empty_map_has_no_picture():
    for lengths in ((0, 64), (64, 0), (0, 0)):
        assert len(str(classified(causal, *lengths)).splitlines()) == 2


# --- image files -------------------------------------------------------------------------------------------------------------------


def share_of(path, kind: int) -> float:
    """Of the pixels of an image, how many have the colour of a kind."""
    from matplotlib.image import imread

    colour = torch.tensor(COLOURS[kind]) / 255
    return float(((torch.from_numpy(imread(path))[..., :3] - colour).abs().amax(-1) < 0.02).float().mean())


@pytest.fixture
def image(tmp_path):
    pytest.importorskip("matplotlib")
    return tmp_path / "mask.png"


def test_plot_draws_each_kind(image):
    table = torch.tensor([[True, True], [False, False]])
    halves = classified(read(0, table, op("floordiv", q_idx, 32), op("floordiv", kv_idx, 32)), 64, 64, tensors=(table,))
    halves.plot(image)
    assert share_of(image, FULL) == pytest.approx(share_of(image, EMPTY), rel=0.1) and share_of(image, FULL) > 0.25
    classified(op("eq", q_idx, kv_idx), 64, 64).plot(image)
    assert share_of(image, FULL) < 0.01 and share_of(image, PARTIAL) > 0.05


def test_plot_draws_the_asked_head(image):
    widths = torch.tensor([1, 1000])
    found = classified(op("lt", op("abs", q_idx - kv_idx), read(0, widths, head)), 64, 64, h=2, tensors=(widths,))
    found.plot(image, head=0)
    narrow = share_of(image, FULL)
    found.plot(image, head=1)
    assert narrow < 0.01 < 0.5 < share_of(image, FULL)


def test_an_inset_shows_tokens(image):
    """Every other diagonal: all blocks are partial, and only the tokens show half of the pairs in blue."""
    mask = op("eq", op("floormod", q_idx - kv_idx, 2), 0)
    stripes = classified(op("eq", op("floormod", op("floordiv", q_idx - kv_idx, 64), 2), 0), 1024, 1024, (512, 512))
    stripes.plot(image)
    assert share_of(image, FULL) < 0.01
    stripes.plot(image, inset=(100, 700))
    assert share_of(image, FULL) > 0.1
    classified(mask, 1000, 1000, (512, 512)).plot(image, inset=(999, 999))  # one token is left


def test_an_inset_of_everything_is_full(image):
    classified(None, 100, 100).plot(image, inset=(0, 0))
    assert share_of(image, FULL) > 0.4


@pytest.mark.parametrize("inset", [(100, 0), (0, 64), (-1, 0)])
def test_an_inset_outside_is_refused(inset, tmp_path):
    with pytest.raises(InputError, match="expected an inset that begins at query < 100 and key < 64, got"):
        classified(causal, 100, 64).plot(tmp_path / "unused.png", inset=inset)


def test_plot_of_an_unknown_head_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected batch < 1 and head < 1, got 0 and 1"):
        classified(causal, 64, 64).plot(tmp_path / "unused.png", head=1)


def test_plot_of_a_million_tokens_is_a_small_file(image):
    flexc.block_map(flexc.masks.causal, 2**20, 2**20).plot(image, title="a million tokens")
    assert image.stat().st_size < 2**19
