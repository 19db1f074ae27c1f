"""Sizes where 32-bit offsets, launch limits or memory give way. Each needs a large GPU; sampled rows stand for all."""

import gc

import pytest
import torch

import flexc
from flexc.reference import reference

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def enough_memory():
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if free < 100 * 2**30:
        pytest.skip("needs 100 GiB of GPU memory")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def random(*shape, grad=False):
    generator = torch.Generator("cuda").manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def assert_rows_equal(out, mask_mod, q, k, v, batch, head, rows, score_mod=None):
    """Compare some rows of one head with the reference, given the functions at their true places."""
    group = q.shape[1] // k.shape[1]
    places = torch.tensor(rows, device="cuda", dtype=torch.int32)
    mask = None if mask_mod is None else lambda b, h, i, j: mask_mod(b + batch, h + head, places[i], j)
    score = None if score_mod is None else lambda s, b, h, i, j: score_mod(s, b + batch, h + head, places[i], j)
    part = slice(batch, batch + 1), slice(head // group, head // group + 1)
    with torch.no_grad():
        true, _ = reference(score, mask, q[part[0], head : head + 1, rows], k[part], v[part])
    torch.testing.assert_close(out[part[0], head : head + 1, rows].double(), true, rtol=2e-2, atol=4e-3)


def test_long_sequence_with_a_repeating_mask():
    def clean(batch, head, q_idx, kv_idx):
        return q_idx % 46848 < 11712

    q, k, v = (random(2, 24, 93696, 128) for _ in range(3))
    out = flexc.attention(None, clean, backend="triton")(q, k, v)
    for batch, head in ((0, 0), (1, 23)):
        assert_rows_equal(out, clean, q, k, v, batch, head, [0, 11711, 11712, 46847, 46848, 58559, 58560, 93695])


def test_offsets_beyond_32_bits():
    """q, k, v, out and all gradients have more than 2^31 elements."""
    heads, length, dim = 65, 262144, 128
    assert heads * length * dim > 2**31
    q, k, v = (random(1, heads, length, dim, grad=True) for _ in range(3))
    window = flexc.masks.sliding_window(100)
    out = flexc.attention(None, window, backend="triton")(q, k, v)
    assert_rows_equal(out, window, q, k, v, 0, heads - 1, [0, 99, 100, length // 2, length - 1])
    out.backward(torch.ones_like(out))
    # With dO = 1, dV[j] is the sum of the probabilities of column j, and all of them add up to the number of rows.
    for head in (0, heads - 1):
        column_sums = v.grad[0, head, :, 0].double()
        assert column_sums.sum().item() == pytest.approx(length, rel=1e-3)
        assert bool((v.grad[0, head, -1] != 0).all()) and bool((q.grad[0, head, -1] != 0).any())


def test_captured_tensor_beyond_32_bits():
    length = 2**14 + 128
    bias = torch.randn(8, length, length, device="cuda", dtype=torch.bfloat16)
    assert bias.numel() > 2**31

    def score(s, batch, head, q_idx, kv_idx):
        return s + bias[head, q_idx, kv_idx]

    q, k, v = (random(1, 8, length, 64) for _ in range(3))
    out = flexc.attention(score, flexc.masks.causal, backend="triton")(q, k, v)
    assert_rows_equal(out, flexc.masks.causal, q, k, v, 0, 7, [0, 1, length - 1], score)


def test_more_batch_elements_and_heads_than_a_launch_dimension():
    q, k, v = (random(70000, 2, 16, 16, grad=True) for _ in range(3))
    out = flexc.attention(None, flexc.masks.causal, backend="triton")(q, k, v)
    out.sum().backward()
    for batch in (0, 40000, 69999):
        assert_rows_equal(out, flexc.masks.causal, q, k, v, batch, 1, list(range(16)))
        assert bool((v.grad[batch, :, 0] != 0).all())


def test_learnable_factor_over_8192_tokens():
    q, k, v = (random(1, 1, 8192, 64) for _ in range(3))
    c = torch.tensor(0.7, device="cuda", requires_grad=True)

    def score(s, batch, head, q_idx, kv_idx):
        return s * c

    (ours,) = torch.autograd.grad(flexc.attention(score, None, backend="triton")(q, k, v).float().square().sum(), c)
    (true,) = torch.autograd.grad(reference(score, None, q, k, v)[0].square().sum(), c)
    assert ours.item() == pytest.approx(true.item(), rel=2e-2)


def test_mask_of_a_long_sequence_takes_little_memory():
    q, k, v = (random(1, 1, 96000, 64) for _ in range(3))
    kernel = flexc.attention(None, flexc.masks.causal, backend="triton")
    kernel(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fresh = flexc.attention(None, flexc.masks.sliding_window(1000), backend="triton")
    out = fresh(q, k, v)
    used = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert used < 100 * 2**20, f"{used / 2**20:.0f} MiB besides the output"
