"""The rule of accuracy for tensors that a test has in hand, and builders of inputs. For whole kernels there is `flexc.check`."""

from __future__ import annotations

import torch

EPS32 = torch.finfo(torch.float32).eps


def assert_as_accurate_as_eager(out, eager, truth, floor=0.0):
    """At most twice the error of eager PyTorch in the same dtype; truth is float32 or wider. NaN fails.

    `floor` is added to what is allowed, for errors that eager PyTorch happens not to make.
    """
    assert out.shape == truth.shape, f"shape {list(out.shape)}, expected {list(truth.shape)}"
    error, allowed = distance(out, truth), distance(eager, truth)
    floor += 2 * EPS32 * float(truth[truth.isfinite()].abs().max()) if truth.isfinite().any() else 0.0
    assert error <= 2 * allowed + floor, f"error {error:.2e}, eager {allowed:.2e}"


def distance(x, truth):
    """The largest absolute difference; equal infinities are 0 apart, a NaN makes it NaN."""
    if not truth.numel():
        return 0.0
    wide, true = x.double(), truth.double()
    return float(torch.where(wide == true, 0.0, (wide - true).abs()).max())


def normal(*shape, seed=0, device="cpu", dtype=torch.float32, size=1.0, grad=False):
    """Normal numbers, the same on every device and up to rounding in every dtype."""
    drawn = {"generator": torch.Generator().manual_seed(seed), "device": "cpu", "dtype": torch.float64}
    values = torch.randn(shape, **drawn) * size
    return values.to(device, dtype).requires_grad_(grad)


def qkv(batch=2, heads=4, kv_heads=2, q_len=100, kv_len=None, dim=32, v_dim=None, *, seed=0, device="cpu", dtype=torch.float32, grad=False):
    """q [B, Hq, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]; kv_len and v_dim default to q_len and dim."""
    kv_len, v_dim = q_len if kv_len is None else kv_len, v_dim or dim
    options = {"device": device, "dtype": dtype, "grad": grad}
    return (
        normal(batch, heads, q_len, dim, seed=3 * seed, **options),
        normal(batch, kv_heads, kv_len, dim, seed=3 * seed + 1, **options),
        normal(batch, kv_heads, kv_len, v_dim, seed=3 * seed + 2, **options),
    )
