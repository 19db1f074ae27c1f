"""flexc.compat on a GPU beside PyTorch's compiled FlexAttention: the same inputs, both held against float64."""

from __future__ import annotations

import functools

import pytest
import torch

import flexc
from flexc import compat
from flexc.check import compare
from tests.accuracy import EPS32, distance, normal, qkv
from tests.compat import gym
from tests.compat.beside import TORCH, Called

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

BESIDE = ["causal", "causal_ragged", "sliding_window", "prefix_lm", "documents", "alibi", "soft_cap", "relative_positional_table"]


@pytest.fixture
def made_on_the_gpu(monkeypatch):
    """A variant with its captured tensors on the GPU."""
    monkeypatch.setattr(gym, "normal", functools.partial(normal, device="cuda"))

    def make(name):
        entry = gym.VARIANTS[name]
        with torch.device("cuda"):
            return entry, entry.make(entry.q_len, entry.kv_len)

    return make


def known(names):
    """Those of the collection that there are, so that a renamed one is missed here and not skipped."""
    missing = set(names) - set(gym.VARIANTS)
    assert not missing, f"no such variants: {missing}; there are {sorted(gym.VARIANTS)}"
    return names


def mask_of(module, variant, entry):
    if variant.mask_mod is None:
        return None
    return module.create_block_mask(variant.mask_mod, gym.BATCH, gym.HEADS, entry.q_len, entry.kv_len, device="cuda")


def inputs(entry, dtype):
    return qkv(gym.BATCH, gym.HEADS, 2, entry.q_len, entry.kv_len, *entry.dims, device="cuda", dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", gym.VARIANTS)
def test_variant(name, dtype, made_on_the_gpu):
    entry, variant = made_on_the_gpu(name)
    called = Called(variant.score_mod, variant.mask_mod, mask_of(compat, variant, entry), enable_gqa=True)
    compare(called, *inputs(entry, dtype), variant.captured).raise_if_bad()


@pytest.mark.parametrize("name", known(BESIDE))
def test_variant_beside_compiled_flex_attention(name, made_on_the_gpu):
    entry, variant = made_on_the_gpu(name)
    q, k, v = inputs(entry, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(TORCH.flex_attention, dynamic=False)
    mask = mask_of(TORCH, variant, entry)
    truth = flexc.reference(variant.score_mod, variant.mask_mod, q, k, v)
    with torch.no_grad():
        theirs = compiled(q, k, v, variant.score_mod, mask, enable_gqa=True, return_lse=True)
        for block_mask in (mask, mask_of(compat, variant, entry)):
            ours = compat.flex_attention(q, k, v, variant.score_mod, block_mask, enable_gqa=True, return_lse=True)
            for found, other, true in zip(ours, theirs, truth, strict=True):
                assert distance(found, true) <= 2 * distance(other, true) + 16 * EPS32 * float(true[true.isfinite()].abs().max())


def test_largest_scores_beside_compiled_flex_attention():
    q, k, v = qkv(2, 4, 4, 128, dim=64, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    request = TORCH.AuxRequest(lse=True, max_scores=True)
    block_mask = TORCH.create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cuda")
    with torch.no_grad():
        theirs = torch.compile(TORCH.flex_attention, dynamic=False)(q, k, v, None, block_mask, return_aux=request)[1]
        ours = compat.flex_attention(q, k, v, None, block_mask, return_aux=request)[1]
    torch.testing.assert_close(ours.max_scores, theirs.max_scores, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_flash_is_the_cute_backend():
    pytest.importorskip("cutlass")
    q, k, v = qkv(2, 4, 2, 200, dim=64, device="cuda", dtype=torch.bfloat16)
    block_mask = compat.create_block_mask(gym.causal_rule, None, None, 200, 200, device="cuda")
    called = Called(None, gym.causal_rule, block_mask, enable_gqa=True, kernel_options={"BACKEND": "FLASH"})
    compare(called, q, k, v, {}).raise_if_bad()
