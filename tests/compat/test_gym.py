"""Every variant of the collection: forward beside PyTorch, forward and backward against the float64 reference."""

from __future__ import annotations

import pytest
import torch

import flexc
from flexc import compat
from tests.accuracy import normal, qkv
from tests.compat.beside import TORCH, assert_right, torchs
from tests.compat.gym import BATCH, HEADS, VARIANTS


def inputs(entry, kv_heads=HEADS, dtype=torch.float32):
    return qkv(BATCH, HEADS, kv_heads, entry.q_len, entry.kv_len, *entry.dims, dtype=dtype)


def block_mask_of(variant, entry, **options):
    if variant.mask_mod is None:
        return None
    return compat.create_block_mask(variant.mask_mod, BATCH, HEADS, entry.q_len, entry.kv_len, device="cpu", **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_forward_and_backward(name):
    entry = VARIANTS[name]
    variant = entry.make(entry.q_len, entry.kv_len)
    assert_right(*inputs(entry), variant.score_mod, variant.mask_mod, block_mask_of(variant, entry), variant.captured)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_beside_torch(name):
    """The same output and lse in float64 as PyTorch, also from PyTorch's own block mask, whose blocks are other ones."""
    entry = VARIANTS[name]
    variant = entry.make(entry.q_len, entry.kv_len)
    q, k, v = inputs(entry, 2, torch.float64)
    exact = 1e-6 if variant.captured else 1e-9  # PyTorch computes with captured float32 tensors in float32
    theirs = None
    if variant.mask_mod is not None:
        theirs = TORCH.create_block_mask(variant.mask_mod, BATCH, HEADS, entry.q_len, entry.kv_len, device="cpu", BLOCK_SIZE=(32, 16))
    expected, aux = torchs(q, k, v, variant.score_mod, theirs, enable_gqa=True, return_aux=TORCH.AuxRequest(lse=True))
    for block_mask in (block_mask_of(variant, entry, BLOCK_SIZE=32), theirs):
        out, lse = compat.flex_attention(q, k, v, variant.score_mod, block_mask, enable_gqa=True, return_lse=True)
        torch.testing.assert_close(out.detach(), expected, rtol=exact, atol=exact)
        torch.testing.assert_close(lse.detach(), aux.lse.float(), rtol=1e-6, atol=1e-6)


def test_stick_breaking_is_refused():
    """It weighs a key by what the keys after it leave over: a score depends on the other scores of its row."""

    def stick_breaking(score, b, h, q, kv):
        stays = torch.nn.functional.logsigmoid(-score)
        return torch.nn.functional.logsigmoid(score) + torch.cumsum(stays, -1) - stays

    q, k, v = qkv(1, 1, 1, 8)
    with pytest.raises(flexc.TraceError, match=r"cumsum.*\n.*test_gym.py.*\n.*sees one score and its position, never a whole row"):
        compat.flex_attention(q, k, v, stick_breaking)


@torch.library.custom_op("flexc_tests::gate", mutates_args=())
def gate(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.ops.flexc_tests.gate(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (output,) = ctx.saved_tensors
        return gradient * (1 - output * output)


def gated_by_operator(score, b, h, q, kv):
    return 2.0 * torch.ops.flexc_tests.gate(score / 2.0)


def gated_by_function(score, b, h, q, kv):
    return 2.0 * Gate.apply(score / 2.0)


@pytest.mark.parametrize("score_mod", [gated_by_operator, gated_by_function])
def test_operators_of_users_are_refused(score_mod):
    """The hardware's approximate tanh, as the collection reaches it, is an operator of its own; `precision="fast"` has it built in."""
    with pytest.raises(flexc.TraceError, match=r"[gG]ate.*of a traced value\n.*test_gym.py.*\n.*no such operation on one score"):
        compat.flex_attention(*qkv(1, 1, 1, 8), score_mod)


def test_latent_attention_with_one_key_head_shared_by_all():
    """The absorbed form: one latent key and value for all heads, D = 48 of which the first 40 are also the value."""
    q, latent = normal(2, 8, 33, 48, seed=1), normal(2, 1, 65, 48, seed=2)
    out = compat.flex_attention(q, latent, latent[..., :40], enable_gqa=True)
    expected, _ = flexc.reference(None, None, q, latent, latent[..., :40])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
