"""flexc.compat beside PyTorch's own FlexAttention, run eagerly, and beside the float64 reference."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.attention.flex_attention  # the package's attribute of this name is the module; its function hides it elsewhere

import flexc
from flexc import compat
from flexc.check import compare

TORCH = sys.modules["torch.nn.attention.flex_attention"]
LISTS = "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices q_num_blocks q_indices full_q_num_blocks full_q_indices".split()
# Signatures follow the newest PyTorch, whose block masks also carry the order of additions to dQ.
KNOWS_ORDERS = pytest.mark.skipif("dq_write_order" not in TORCH.BlockMask.__annotations__, reason="an older PyTorch: fewer arguments")


def torchs(query, key, value, score_mod=None, block_mask=None, **options):
    """PyTorch's flex_attention: its dense mathematics, called without its compiler, which it otherwise asks to run them."""
    before = TORCH._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    TORCH._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with torch.no_grad():
            return TORCH.flex_attention(query, key, value, score_mod, block_mask, **options)
    finally:
        TORCH._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


class Called:
    """`compat.flex_attention` as `flexc.check` calls a kernel."""

    backend = "compat"

    def __init__(self, score_mod=None, mask_mod=None, block_mask=None, **options):
        self.score_mod, self.mask_mod, self.block_mask, self.options = score_mod, mask_mod, block_mask, options

    def __call__(self, q, k, v, *, scale=None, return_lse=False):
        out, lse = compat.flex_attention(q, k, v, self.score_mod, self.block_mask, scale=scale, return_lse=True, **self.options)
        return out, flexc.AuxOutput(lse)


def assert_right(q, k, v, score_mod=None, mask_mod=None, block_mask=None, captured=None, scale=None, **options):
    """Output, lse and all gradients within the accuracy rule; `mask_mod` is what `block_mask` means."""
    compare(Called(score_mod, mask_mod, block_mask, **options), q, k, v, captured or {}, scale=scale).raise_if_bad()


def assert_same_block_mask(ours, theirs):
    """Equal lists, sizes and views."""
    for name in LISTS:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None), name
        if mine is not None:
            assert (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device), name
            assert torch.equal(mine, other), name
    assert (ours.shape, ours.seq_lengths, ours.BLOCK_SIZE) == (theirs.shape, theirs.seq_lengths, theirs.BLOCK_SIZE)
    assert ours.numel() == theirs.numel()
    assert ours.sparsity() == theirs.sparsity()
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.to_dense().dtype == theirs.to_dense().dtype
    assert str(ours) == str(theirs)
