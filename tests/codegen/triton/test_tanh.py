"""tanh from 2^x keeps the rule of accuracy in float16, and the hardware's own would not: the printed helper, off as a GPU may be.

Errors of the special-function unit, from the PTX manual: ex2.approx 2^-22 relative, rcp.approx one unit in the last place,
tanh.approx 2^-11 relative.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from flexc.check import compare
from flexc.codegen.triton.emit import HELPERS
from flexc.codegen.triton.plan import make_plan
from flexc.target import Target
from tests.accuracy import qkv
from tests.codegen.triton.texts import lowered


def off(value, size, way):
    """Values off by at most `size`, relative: all one way, all the other way, or each its own."""
    signs = {"up": 1.0, "down": -1.0}.get(way)
    if signs is None:
        signs = torch.rand(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    return (value.double() * (1 + size * signs)).float()


def exp2_form(way):
    """The helper `tanh_exp2` as it is printed, on float32 tensors."""
    tl = SimpleNamespace(
        float32=torch.float32,
        where=torch.where,
        abs=torch.abs,
        exp2=lambda x: off(x.double().exp2(), 2.0**-22, way),
        inline_asm_elementwise=lambda text, kinds, x, **_: off(1 / x[0].double(), 2.0**-23, way),
    )
    scope = {"tl": tl}
    exec(HELPERS["tanh_exp2"].removeprefix("@triton.jit\n"), scope)
    return scope["tanh_exp2"]


def hardware_form(way):
    return lambda x: off(x.double().tanh(), 2.0**-11, way)


class Tanh(torch.autograd.Function):
    """A form of tanh with the derivative that kernels compute from its result."""

    @staticmethod
    def forward(ctx, x, form):
        y = form(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y), None


class InDtype(torch.autograd.Function):
    """The raw score, whose gradient is cast before the products that make dq and dk."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).float(), None


class Emulated:
    """Soft-capped attention with the roundings of a kernel: products accumulate in float32, weights are cast, the output is cast once."""

    backend = "emulated"
    mask_mod = None

    def __init__(self, cap, form):
        self.cap, self.form = cap, form

    def score_mod(self, score, batch, head, q_idx, kv_idx):
        return self.cap * torch.tanh(score / self.cap)

    def __call__(self, q, k, v, *, scale=None, return_lse=False):
        raw = InDtype.apply(q.float() @ k.repeat_interleave(2, 1).float().mT, q.dtype)
        score = self.cap * Tanh.apply(raw * (1 / math.sqrt(q.shape[-1]) / self.cap), self.form)
        lse = score.logsumexp(-1)
        p = (score - lse[..., None]).exp().to(q.dtype).float()
        out = (p @ v.repeat_interleave(2, 1).float()).to(q.dtype)
        return (out, SimpleNamespace(lse=lse)) if return_lse else out


def report(cap, size, form, dtype=torch.float16):
    q, k, v = qkv(q_len=80, kv_len=160, dtype=dtype)
    return compare(Emulated(cap, form), q * size, k, v, {})


WAYS = ["up", "down", "each"]


@pytest.mark.parametrize("way", WAYS)
def test_error_of_the_form_from_exp2(way):
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.logspace(-30, 4, 100_001), -torch.logspace(-30, 4, 100_001)])
    found, truth = exp2_form(way)(x).double(), x.double().tanh()
    error = (found - truth).abs()
    assert error.max() < 2.0**-21
    assert (error / truth.abs().clamp(min=1e-30)).max() < 2.0**-18
    assert found.abs().max() <= 1 + 2.0**-22


def test_extremes_of_the_form_from_exp2():
    x = torch.tensor([math.inf, -math.inf, 3e38, -3e38, 100.0, -100.0, 0.0, math.nan])
    found = exp2_form("exactly right")(x)
    torch.testing.assert_close(found, x.tanh(), rtol=2.0**-22, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("size", [0.01, 1.0, 20.0, 60.0, 400.0])
@pytest.mark.parametrize("cap", [1.0, 20.0, 50.0, 1e4])
def test_soft_cap_in_float16_meets_the_rule(cap, size):
    for way in WAYS:
        found = report(cap, size, exp2_form(way))
        assert found.ok, f"{way}\n{found}"


def test_the_rule_forbids_the_hardware_form_in_float16():
    assert any(not report(20.0, size, hardware_form("each")).ok for size in (1.0, 20.0, 60.0))


@pytest.mark.parametrize("size", [0.01, 1.0, 20.0])
def test_soft_cap_in_bfloat16_meets_the_rule_with_the_hardware_form(size):
    found = report(20.0, size, hardware_form("each"), torch.bfloat16)
    assert found.ok, f"\n{found}"


@pytest.mark.parametrize(
    ("dtype", "precision", "form"),
    [
        ("bfloat16", "fast", "hardware"),
        ("float16", "fast", "exp2"),
        ("float32", "fast", "libdevice"),
        ("float32", "tf32", "libdevice"),
        ("bfloat16", "exact", "libdevice"),
        ("float16", "exact", "libdevice"),
    ],
)
def test_form_by_dtype_and_precision(dtype, precision, form):
    plan = make_plan(lowered(), Target.parse("sm_90a"), dtype=dtype, head_dim=64, head_dim_v=64, group=1, tma=False, precision=precision)
    assert plan.tanh == form
