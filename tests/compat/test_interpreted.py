"""A few variants and block masks on Triton's interpreter, in a process of its own: see contract/test_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from tests.contract.interpreter import interpreting_workers

pytestmark = pytest.mark.interpret

NAMES = ["documents", "alibi_learned", "natten_simple", "flamingo", "latent_rope_as_score"]


@pytest.fixture(scope="module")
def interpreting():
    with interpreting_workers() as pool:
        yield pool


def run_variant(name):
    from flexc import compat
    from tests.accuracy import qkv
    from tests.compat.beside import assert_right
    from tests.compat.gym import BATCH, HEADS, VARIANTS

    entry = VARIANTS[name]
    variant = entry.make(entry.q_len, entry.kv_len)
    mask = None
    if variant.mask_mod is not None:
        mask = compat.create_block_mask(variant.mask_mod, BATCH, HEADS, entry.q_len, entry.kv_len, device="cpu")
    q, k, v = qkv(BATCH, HEADS, 2, entry.q_len, entry.kv_len, *entry.dims)
    options = {"kernel_options": {"BACKEND": "TRITON"}, "enable_gqa": True}
    assert_right(q, k, v, variant.score_mod, variant.mask_mod, mask, variant.captured, **options)


def run_lists(maker):
    """Lists without a rule, with blocks that no tile of the kernel has."""
    from flexc import compat
    from tests.accuracy import qkv
    from tests.compat.beside import TORCH, assert_right

    table = torch.rand(2, 1, 4, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    tokens = table.repeat_interleave(24, 2).repeat_interleave(40, 3)
    module = {"ours": compat, "torch": TORCH}[maker]
    mask = module.BlockMask.from_kv_blocks(*compat.lists.ordered(table), BLOCK_SIZE=(24, 40))
    q, k, v = qkv(2, 2, 2, 96, 120, 16)
    assert_right(q, k, v, None, lambda b, h, q, kv: tokens[b, 0, q, kv], mask, kernel_options={"BACKEND": "TRITON"})


def run_picked_row():
    from flexc import compat, reference
    from flexc.compat.options import backend_and_precision
    from tests.accuracy import qkv

    def rule(b, h, q, kv):
        return (q >= kv) & (q - kv < 30 + 20 * b)

    assert backend_and_precision({"BACKEND": "TRITON"}, on_cpu=True) == ("triton", "fast")
    q, k, v = qkv(3, 2, 2, 150, 150, 16)
    mask = compat.create_block_mask(rule, 3, None, 150, 150, device="cpu", BLOCK_SIZE=64)[1:, :, 2]
    out = compat.flex_attention(q[1:, :, 128:], k[1:], v[1:], block_mask=mask, kernel_options={"BACKEND": "TRITON"})
    torch.testing.assert_close(out.double(), reference(None, rule, q, k, v)[0][1:, :, 128:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_variant(name, interpreting):
    interpreting.submit(run_variant, name).result()


@pytest.mark.parametrize("maker", ["ours", "torch"])
def test_lists_without_a_rule(maker, interpreting):
    interpreting.submit(run_lists, maker).result()


def test_a_picked_row_of_some_batch_elements(interpreting):
    interpreting.submit(run_picked_row).result()
