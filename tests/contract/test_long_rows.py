"""The rule of accuracy for rows of more keys than any tile or span holds: few queries, so that it is quick."""

import pytest
import torch

import flexc
from flexc.check import compare
from tests.accuracy import normal, qkv

LENGTH = 16_384


def last_tokens(batch, head, q_idx, kv_idx):
    """The queries are the last ones of the sequence."""
    return q_idx + (LENGTH - 6) >= kv_idx


def far_and_near(batch, head, q_idx, kv_idx):
    """Two runs of keys with a gap of more than 8,192 between them."""
    return (kv_idx < 700) | (kv_idx > 10_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("mask", [None, last_tokens, far_and_near], ids=["full", "causal", "two runs"])
def test_rows_of_16384_keys_meet_the_rule(backend, device, dtype, mask):
    slopes = normal(2, size=0.001, device=device, grad=True)

    def slope(score, batch, head, q_idx, kv_idx):
        return score + slopes[head] * (kv_idx - LENGTH)

    q, k, v = qkv(1, 2, 1, 6, LENGTH, 32, device=device, dtype=dtype)
    report = compare(flexc.attention(slope, mask, backend=backend), q, k, v, {"slopes": slopes})
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weights_of_16384_keys_add_up_to_one(backend, device, dtype):
    """Equal scores: the output is the mean of all values. A sum that is rounded to bfloat16 would stop growing at 256."""
    q, k = (torch.zeros(1, 1, n, 16, dtype=dtype, device=device) for n in (3, LENGTH))
    v = torch.ones(1, 1, LENGTH, 16, dtype=dtype, device=device)
    v[:, :, ::2] = 3.0
    out, aux = flexc.attention(None, None, backend=backend)(q, k, v, return_lse=True)
    torch.testing.assert_close(out.float(), torch.full_like(out, 2.0).float(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(aux.lse.exp(), torch.full_like(aux.lse, LENGTH), rtol=1e-5, atol=0.0)
