"""The backward kernels on the device: random shapes, strides, masks and learned captures against float64; the same bits where asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexc
from flexc.reference import eager, reference
from tests.accuracy import assert_as_accurate_as_eager, distance
from tests.codegen.cute.test_on_hopper import DIMS, HEADS, KERNELS, LAYOUTS, MASKS, Values, differing_of_a_thousand, laid_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"),
]


class Learned(Values):
    """Captured tensors that want a gradient."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.degree = (self.slopes.sum() + 0.5).detach()
        for x in (self.slopes, self.keys, self.degree):
            x.requires_grad_()


# A score function, and which captured tensors it learns.
SCORES = [
    lambda x: (None, ()),
    lambda x: (lambda s, b, h, i, j: s - x.slopes[h] * (i - j), (x.slopes,)),
    lambda x: (lambda s, b, h, i, j: 10 * torch.tanh(s / 10), ()),
    lambda x: (lambda s, b, h, i, j: 10 * torch.tanh((s - x.slopes[h] * (i - j)) / 10) + x.keys[j], (x.slopes, x.keys)),
    lambda x: (lambda s, b, h, i, j: s * x.degree + x.keys[j] * x.slopes[0], (x.degree, x.keys, x.slopes)),
    lambda x: (lambda s, b, h, i, j: torch.where(s > 0, s, 0.25 * s) + x.table[h, i - j + x.kv_len], ()),
]


def gradients(attention, leaves, learned, dout, dlse):
    """Zeros where no pair is left that a captured tensor could have a gradient by."""
    out, lse = attention(*leaves)
    loss = (out * dout).sum() + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    return torch.autograd.grad(loss, [*leaves, *learned], allow_unused=True, materialize_grads=True)


def check_gradients(functions, learned, inputs, dout, dlse, **options):
    """The output, and gradients of the inputs and of what is learned, against the reference in float64.

    Of the forward pass the output is kept, and delta comes from it: it is made of rounded weights and rounded itself. What that changes
    is the gradient of lse by the output's error times dout, which eager PyTorch, that keeps its weights, does not make.
    """
    score_mod, mask_mod = functions
    kernel = flexc.attention(score_mod, mask_mod, **options)
    outputs = []

    def attention(*leaves):
        out, aux = kernel(*leaves, return_lse=True)
        outputs.append(out.detach())
        return out, aux.lse

    doubles = [x.detach().double().requires_grad_() for x in inputs]

    def true(dout, dlse):
        return gradients(lambda *x: reference(*functions, *x), doubles, learned, dout.double(), dlse.double())

    def error_of_eager(dout, dlse):
        rough = gradients(lambda *x: eager(*functions, *x), [x.detach().requires_grad_() for x in inputs], learned, dout, dlse)
        return map(distance, rough, true(dout, dlse))

    found = gradients(attention, [x.detach().requires_grad_() for x in inputs], learned, dout, dlse)
    with torch.no_grad():
        out, _ = reference(*functions, *doubles)
        near, _ = eager(*functions, *inputs)
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}[inputs[0].dtype]
    # weights are rounded, and their sum is not; the output once more
    assert_as_accurate_as_eager(outputs[0], near, out, floor=2 * rounding * float(out.abs().max()))
    by_output = ((outputs[0].double() - out) * dout.double()).sum(-1)
    # A sum over all pairs may have hardly any error by chance: what counts is the largest of a few.
    random = torch.Generator(dout.device).manual_seed(0)

    def another(x):
        return torch.randn(x.shape, generator=random, dtype=x.dtype, device=x.device)

    draws = [(dout, dlse), *((another(dout), another(dlse)) for _ in range(4))]
    allowed = [max(errors) for errors in zip(*(error_of_eager(*draw) for draw in draws), strict=True)]
    for x, near, truth, change in zip(found, allowed, true(dout, dlse), true(0 * dout, -by_output), strict=True):
        error, floor = distance(x.double() - change, truth), rounding * float(truth.abs().max()) + 1e-6
        assert error <= 2 * near + floor, f"error {error:.2e}, eager {near:.2e}, floor {floor:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KERNELS))
@settings(derandomize=True, deadline=None, max_examples=13, database=None)  # 312 in all
@given(
    batch=st.integers(1, 3),
    q_len=st.integers(1, 420),
    kv_len=st.integers(1, 420),
    layouts=LAYOUTS,
    deterministic=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_random_gradients(number, batch, q_len, kv_len, layouts, deterministic, seed):
    """Every kind of mask, score function, head dimension and dtype, a kernel each; all else changes without a compilation."""
    (dim, dim_v), (heads, kv_heads) = DIMS[number % len(DIMS)], HEADS[number % len(HEADS)]
    dtype = torch.float16 if number % 4 == 3 else torch.bfloat16
    values = Learned(seed, heads, q_len, kv_len)
    score_mod, learned = SCORES[number % len(SCORES)](values)
    random = torch.Generator("cuda").manual_seed(seed)
    sizes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, dim_v))
    inputs = [
        laid_out(torch.randn(batch, *size, generator=random, device="cuda").to(dtype), layout)
        for size, layout in zip(sizes, layouts, strict=True)
    ]
    dout = torch.randn(batch, heads, q_len, dim_v, generator=random, device="cuda").to(dtype)
    dlse = torch.randn(batch, heads, q_len, generator=random, device="cuda")
    functions = score_mod, MASKS[number % len(MASKS)](values)
    check_gradients(functions, learned, inputs, dout, dlse, backend="cute", deterministic=deterministic)


@pytest.mark.parametrize("dim", [40, 64, 80, 96, 128, 160, 192, 256])
def test_every_head_dimension(dim):
    values = Learned(0, 4, 300, 270)
    random = torch.Generator("cuda").manual_seed(dim)
    inputs = [torch.randn(2, n, s, dim, generator=random, device="cuda").bfloat16() for n, s in ((4, 300), (2, 270), (2, 270))]
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(2, 4, 300, generator=random, device="cuda")
    score_mod, learned = SCORES[3](values)
    check_gradients((score_mod, MASKS[2](values)), learned, inputs, dout, dlse, backend="cute")


REPEATED = {
    "every block": (0, 0, (128, 128)),
    "every block, 128 queries a step": (1, 0, (64, 64)),
    "every block, by dims": (2, 0, (256, 256)),
    "a window": (1, 2, (128, 128)),
    "documents, a block of threads for each tile": (0, 4, (64, 64)),
    "partial and full blocks by turns, by dims": (0, 5, (256, 256)),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_thousand_deterministic_runs_give_the_same_bits(case):
    """While another stream keeps the memory system busy, so that blocks of keys come to a block of queries in ever other orders."""
    score, mask, (dim, dim_v) = REPEATED[case]
    values = Values(1, 8, 900, 900)
    score_mod, _ = SCORES[score](values)
    kernel = flexc.attention(score_mod, MASKS[mask](values), backend="cute", deterministic=True)
    random = torch.Generator("cuda").manual_seed(1)
    leaves = [
        torch.randn(2, n, 900, w, generator=random, device="cuda").bfloat16().requires_grad_() for n, w in ((8, dim), (2, dim), (2, dim_v))
    ]
    out = kernel(*leaves)
    dout = torch.randn(out.shape, generator=random, device="cuda").bfloat16()
    assert differing_of_a_thousand(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)) == 0
