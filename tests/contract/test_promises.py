"""What every backend promises besides right numbers for one call: exact zeros, repeatability, any set of gradients, no stale state."""

import math

import pytest
import torch

import flexc
from flexc.check import compare
from flexc.reference import reference
from tests.accuracy import normal, qkv


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.fixture
def attention(backend):
    """flexc.attention on the backend under test."""
    return lambda score_mod=None, mask_mod=None, **options: flexc.attention(score_mod, mask_mod, backend=backend, **options)


def close(ours, truth, tolerance=2e-5):
    torch.testing.assert_close(ours.double(), truth.double(), rtol=tolerance, atol=tolerance)


# --- shapes, dtypes, zeros -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_has_the_dtype_of_q_and_lse_is_float32(attention, device, dtype):
    q, k, v = qkv(q_len=20, kv_len=30, dim=16, v_dim=24, device=device, dtype=dtype)
    out, aux = attention(None, causal)(q, k, v, return_lse=True)
    assert out.shape == (2, 4, 20, 24) and out.dtype == dtype and out.device.type == device.type
    assert aux.lse.shape == (2, 4, 20) and aux.lse.dtype == torch.float32
    assert attention(None, causal)(q, k, v).equal(out)


def test_inputs_and_captured_tensors_are_left_alone(attention, device):
    q, k, v = qkv(device=device, grad=True)
    w = normal(4, device=device, grad=True)
    before = [x.detach().clone() for x in (q, k, v, w)]
    attention(lambda s, b, h, i, j: s * w[h], causal)(q, k, v).sum().backward()
    assert all(x.equal(y) for x, y in zip((q, k, v, w), before))


def test_keys_that_nobody_sees_get_exactly_zero_gradients(attention, device):
    q, k, v = qkv(q_len=300, kv_len=300, device=device, grad=True)
    kernel = attention(None, lambda b, h, i, j: ((j < 40) | (j >= 250)) & (i >= j))
    kernel(q, k, v).square().sum().backward()
    assert not k.grad[:, :, 40:250].any() and not v.grad[:, :, 40:250].any()
    assert bool(v.grad[:, :, :40].any(-1).all()) and bool(v.grad[:, :, 250:].any(-1).all())


def test_rows_without_keys_ignore_the_gradient_of_lse(attention, device):
    q, k, v = qkv(q_len=100, device=device, grad=True)
    _, aux = attention(None, lambda b, h, i, j: (i >= 10) & (b == 0))(q, k, v, return_lse=True)
    assert bool((aux.lse[0, :, :10] == -math.inf).all()) and bool((aux.lse[1] == -math.inf).all())
    dq, dk = torch.autograd.grad(aux.lse, [q, k], torch.full_like(aux.lse, 1e3))
    for gradient in (dq, dk):
        assert gradient.isfinite().all() and not gradient[1].any()
    assert not dq[:, :, :10].any() and dq[0, :, 10:].any()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(attention, device, q_len, kv_len):
    q, k, v = qkv(q_len=q_len, kv_len=kv_len, device=device, grad=True)
    out, aux = attention(lambda s, b, h, i, j: s + i, causal)(q, k, v, return_lse=True)
    assert out.shape == (2, 4, q_len, 32) and not out.any() and bool((aux.lse == -math.inf).all())
    gradients = torch.autograd.grad([out, aux.lse], [q, k, v], [torch.ones_like(out), torch.ones_like(aux.lse)])
    assert all(g.shape == x.shape and not g.any() for g, x in zip(gradients, (q, k, v)))


@pytest.mark.parametrize("rate", ["row", "element"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_only_the_least_number_are_means_of_all_keys(attention, device, dtype, rate):
    """A bias with the least number of its dtype for "masked" is finite: such a row is a mean of all keys, not empty."""
    q, k, v = qkv(q_len=40, device=device, grad=True)
    least = torch.finfo(dtype).min
    bias = torch.zeros(40, dtype=dtype, device=device)
    bias[5:9] = least
    bias[9] = -math.inf
    if rate == "element":
        bias = bias[:, None].repeat(1, 40)
        bias[:5, 30:] = least
        bias[0, :3] = -math.inf
    by_row = (lambda s, b, h, i, j: s + bias[i]) if rate == "row" else (lambda s, b, h, i, j: s + bias[i, j])
    out, aux = attention(by_row)(q, k, v, return_lse=True)
    truth, lse = reference(by_row, None, q, k, v)
    close(out, truth)
    close(out[:, :, 5:9], v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 4, -1))
    assert bool((aux.lse[:, :, 5:9] < -2e38).all()) and not out[:, :, 9].any() and bool((aux.lse[:, :, 9] == -math.inf).all())
    rest = torch.cat([aux.lse[:, :, :5], aux.lse[:, :, 10:]], 2)
    close(rest, torch.cat([lse[:, :, :5], lse[:, :, 10:]], 2))
    gradients = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert all(g.isfinite().all() for g in gradients)


def test_gradients_of_rows_past_the_digits_of_lse_are_finite(attention, device):
    """Every key of a row has about the same huge score, whose rounding in lse may be hundreds: no weight is 2 to the power of that."""
    q, k, v = qkv(1, 2, 1, 400, 33, device=device, grad=True)
    bias = -(10.0 ** (8 + 29 * torch.rand(400, generator=torch.Generator().manual_seed(0)))).to(device)
    out = attention(lambda s, b, h, i, j: s + bias[i] * 3.0)(q, k, v)
    gradients = torch.autograd.grad(out.square().sum(), [q, k, v])
    assert out.isfinite().all() and all(g.isfinite().all() and g.abs().max() < 1e3 for g in gradients)


# --- any set of gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", ["q", "k", "v", "w", "qk", "kv", "qw", "vw"])
def test_only_some_inputs_need_gradients(attention, device, needed):
    q, k, v = qkv(q_len=70, device=device)
    w = normal(4, device=device)
    inputs = dict(zip("qkvw", (q, k, v, w)))
    for name in needed:
        inputs[name].requires_grad_()

    def score(s, batch, head, q_idx, kv_idx):
        return s - w[head] * (q_idx - kv_idx) * 0.1

    wrt = [inputs[name] for name in needed]
    ours = torch.autograd.grad(attention(score, causal)(q, k, v).sin().sum(), wrt)
    truth = torch.autograd.grad(reference(score, causal, q, k, v)[0].sin().sum(), wrt)
    for gradient, expected in zip(ours, truth):
        close(gradient, expected, 1e-4)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_only_one_of_output_and_lse_has_a_gradient(attention, device, used):
    q, k, v = qkv(q_len=70, device=device, grad=True)

    def loss(out, lse):
        return out.sin().sum() if used == "out" else lse.sin().sum()

    out, aux = attention(None, causal)(q, k, v, return_lse=True)
    ours = torch.autograd.grad(loss(out, aux.lse), [q, k, v], allow_unused=True)
    truth = torch.autograd.grad(loss(*reference(None, causal, q, k, v)), [q, k, v], allow_unused=True)
    for x, gradient, expected in zip((q, k, v), ours, truth):
        close(*(torch.zeros_like(x) if g is None else g for g in (gradient, expected)), 1e-4)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_gradient_of_the_output_has_any_strides(attention, device, layout):
    q, k, v = qkv(q_len=70, device=device, grad=True)
    layouts = {
        "expanded": lambda: torch.ones((), device=device).expand(2, 4, 70, 32),
        "transposed": lambda: normal(2, 70, 4, 32, device=device).transpose(1, 2),
        "sliced": lambda: normal(2, 4, 75, 64, device=device)[:, :, 5:, ::2],
    }
    dout = layouts[layout]()
    ours = torch.autograd.grad(attention(None, causal)(q, k, v), [q, k, v], dout)
    truth = torch.autograd.grad(reference(None, causal, q, k, v)[0], [q, k, v], dout.double())
    for gradient, expected in zip(ours, truth):
        close(gradient, expected, 1e-4)


def test_backward_twice_through_one_graph_gives_the_same(attention, device):
    q, k, v = qkv(q_len=70, device=device, grad=True)
    out = attention(None, causal)(q, k, v)
    first = torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(x.equal(y) for x, y in zip(first, second))


def test_gradients_have_the_dtype_and_shape_of_their_tensors(attention, device):
    q, k, v = qkv(dtype=torch.float16, device=device, grad=True)
    w, c = normal(1, 4, device=device, grad=True), normal(dtype=torch.float16, device=device, grad=True)
    attention(lambda s, b, h, i, j: s * w[0, h] + c * j, causal)(q, k, v).sum().backward()
    for x in (q, k, v, w, c):
        assert x.grad.dtype == x.dtype and x.grad.shape == x.shape and x.grad.isfinite().all()


def test_inference_mode(attention, device):
    q, k, v = qkv(device=device)
    kernel = attention(None, causal)
    expected = kernel(q, k, v)
    with torch.inference_mode():
        assert kernel(q, k, v).equal(expected)


# --- repeatability ---------------------------------------------------------------------------------------------------------------------


def test_forward_is_bitwise_equal_from_run_to_run(attention, device):
    q, k, v = qkv(heads=8, q_len=256, device=device, dtype=torch.bfloat16)
    kernel = attention(lambda s, b, h, i, j: s - (i - j) * 0.1, causal)
    first, aux = kernel(q, k, v, return_lse=True)
    for _ in range(3 if device.type == "cpu" else 100):
        out, other = kernel(q, k, v, return_lse=True)
        assert out.equal(first) and other.lse.equal(aux.lse)


@pytest.mark.parametrize("by_setting", [False, True], ids=["argument", "setting"])
def test_deterministic_backward_is_bitwise_equal_from_run_to_run(attention, device, by_setting):
    """Gradients that meet in every way, in blocks that a mask thins out, of grouped heads."""
    q, k, v = qkv(heads=8, q_len=256, device=device, grad=True)
    w, r, c = normal(8, device=device, grad=True), normal(512, device=device, grad=True), normal(2, 256, device=device, grad=True)
    pairs, table = normal(8, 256, 256, device=device, grad=True), normal(128, device=device, grad=True)
    shared = normal(256, 256, device=device, grad=True, dtype=torch.float16)
    ids = torch.stack([torch.arange(256) // 100, torch.arange(256) // 70]).to(device)

    def score(s, b, h, i, j):
        return s * w[h] + r[i - j + 256] + c[b, j] + pairs[h, i, j] + shared[i, j] * s + table[(i + j) // 4]

    kernel = attention(score, lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), deterministic=not by_setting)
    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(by_setting or asked)
    try:
        out = kernel(q, k, v)
        weight = out.detach().cos()

        def gradients():
            return torch.autograd.grad(out, [q, k, v, w, r, c, pairs, shared, table], weight, retain_graph=True)

        first = gradients()
        for _ in range(2 if device.type == "cpu" else 1000):
            assert all(x.equal(y) for x, y in zip(gradients(), first))
    finally:
        torch.use_deterministic_algorithms(asked)


# --- no stale state ------------------------------------------------------------------------------------------------------------------


def test_one_kernel_takes_other_lengths_batches_heads_and_dtypes(attention, device):
    kernel = attention(lambda s, b, h, i, j: s - (h + 1) * (i - j) * 0.1, causal)
    sizes = [
        {"q_len": 160},
        {"q_len": 128},
        {"q_len": 96, "kv_len": 131},
        {"q_len": 64, "batch": 3},
        {"q_len": 64, "heads": 6, "kv_heads": 3},
        {"q_len": 64, "dim": 48},
        {"q_len": 64, "dtype": torch.float16},
    ]
    for size in sizes:
        report = compare(kernel, *qkv(device=device, **size), {})
        assert report.ok, f"\n{report}"


def test_documents_changed_in_place_are_seen(attention, device):
    """Block maps made of the old documents would leave out keys."""
    ids = torch.zeros(200, dtype=torch.int64, device=device)
    kernel = attention(None, lambda b, h, i, j: ids[i] == ids[j])
    q, k, v = qkv(q_len=200, device=device)
    for cuts in ([], [50, 150], [77], [10, 20, 190]):
        ids.zero_()
        for cut in cuts:
            ids[cut:] += 1
        close(kernel(q, k, v), reference(None, kernel.mask_mod, q, k, v)[0])


def test_parameter_changed_by_an_optimiser_is_seen(attention, device):
    w = normal(4, device=device, grad=True)
    q, k, v = qkv(device=device)
    kernel = attention(lambda s, b, h, i, j: s - w[h] * (i - j), causal)
    for _ in range(3):
        out = kernel(q, k, v)
        close(out, reference(kernel.score_mod, causal, q, k, v)[0])
        (gradient,) = torch.autograd.grad(out.square().sum(), w)
        with torch.no_grad():
            w -= 0.1 * gradient


def test_captured_name_bound_to_another_value_is_seen(attention, device):
    """A closure cell, rebound between calls: other tensor, other shape, other number."""
    table, width = normal(100, device=device), 5
    kernel = attention(lambda s, b, h, i, j: s + table[j], lambda b, h, i, j: (i - j < width) & (i >= j))
    q, k, v = qkv(device=device)
    for seed, size, width in ((1, 100, 5), (2, 100, 50), (3, 170, 51), (4, 100, 52), (5, 130, 13)):  # noqa: B007
        table = normal(size, seed=seed, device=device)
        close(kernel(q, k, v), reference(kernel.score_mod, kernel.mask_mod, q, k, v)[0])


def test_functions_of_one_code_with_other_defaults_differ(attention, device):
    def make(default):
        def score(s, batch, head, q_idx, kv_idx, c=default):
            return s * c

        return score

    q, k, v = qkv(device=device)
    for c in (1, 2, 3, 1.0, 0.5):
        close(attention(make(c), causal)(q, k, v), reference(lambda s, b, h, i, j, c=c: s * c, causal, q, k, v)[0])


class Wide:
    """Two of these print the same."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "Wide()"


def test_functions_over_values_that_print_the_same_differ(attention, device):
    q, k, v = qkv(q_len=60, device=device)
    long = torch.arange(20000.0, device=device)
    other = long.clone()
    other[5000] += 3  # in the part of the array that its repr leaves out
    for holder, table in ((Wide(2), long), (Wide(3), long), (Wide(2), other)):

        def score(s, batch, head, q_idx, kv_idx, holder=holder, table=table):
            return s * holder.value + table[5000 - q_idx + kv_idx] * 0.01

        close(attention(score, causal)(q, k, v), reference(score, causal, q, k, v)[0])


def test_window_that_changes_every_step(attention, device):
    q, k, v = qkv(q_len=60, device=device)
    for width in range(10, 22):
        mask = flexc.masks.sliding_window(width)
        close(attention(None, mask)(q, k, v), reference(None, mask, q, k, v)[0])


@pytest.mark.parametrize("name", ["q_len", "kv_len", "heads", "scale", "rows", "x5", "lse", "tl"])
def test_captured_names_do_not_meet_the_names_of_the_kernel(attention, device, name):
    """The second value makes the number an argument of the kernel, under the name the user gave it."""
    q, k, v = qkv(q_len=40, device=device)
    make = eval(f"lambda {name}: (lambda s, b, h, i, j: s * {name}, lambda b, h, i, j: i + {name} >= j)")
    for value in (3, 5, 7):
        score, mask = make(value)
        truth, _ = reference(lambda s, b, h, i, j, c=value: s * c, lambda b, h, i, j, c=value: i + c >= j, q, k, v)
        close(attention(score, mask)(q, k, v), truth)


# --- several calls that must agree ---------------------------------------------------------------------------------------------------


def test_decode_steps_equal_the_rows_of_causal_attention(attention, device):
    q, k, v = qkv(batch=4, q_len=512, device=device)
    full = attention(None, causal)(q, k, v)
    for t in (0, 1, 5, 63, 64, 127, 128, 300, 511):
        step = attention(None, lambda b, h, i, j, t=t: t + i >= j)(q[:, :, t : t + 1], k, v)
        close(step, full[:, :, t : t + 1])


def test_packed_documents_equal_separate_runs(attention, device):
    lengths = (100, 300, 111)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(device)
    q, k, v = qkv(batch=1, q_len=sum(lengths), device=device, grad=True)
    packed = attention(None, flexc.masks.causal & flexc.masks.document(ids))(q, k, v)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)))
    separate = torch.cat([attention(None, flexc.masks.causal)(*part) for part in parts], 2)
    close(packed, separate)
    weight = normal(*packed.shape, seed=9, device=device)
    for x, y in zip(torch.autograd.grad((packed * weight).sum(), [q, k, v]), torch.autograd.grad((separate * weight).sum(), [q, k, v])):
        close(x, y, 1e-4)


def test_lse_joins_two_halves_of_the_keys(attention, device):
    """The rule of ring and split attention: it holds only if lse is the natural logarithm and differentiable."""
    q, k, v = qkv(q_len=70, kv_len=130, device=device, grad=True)
    halves = [attention()(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 50), slice(50, 130))]
    lses = torch.stack([aux.lse for _, aux in halves])
    joined = (torch.stack([out for out, _ in halves]) * torch.softmax(lses, 0).unsqueeze(-1)).sum(0)
    whole = attention()(q, k, v)
    close(joined, whole)
    for x, y in zip(torch.autograd.grad(joined.sin().sum(), [q, k, v]), torch.autograd.grad(whole.sin().sum(), [q, k, v])):
        close(x, y, 1e-4)
