"""Kernels as users call them: making and combining them, scale, edge sizes, dtypes, autograd, autocast, modules, copies and pickles."""

import copy
import math
import pickle

import pytest
import torch

import flexc
from flexc.check import compare
from flexc.errors import UnsupportedError
from flexc.reference import reference
from tests.accuracy import normal, qkv

SLOPES = normal(4)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def capped(score, batch, head, q_idx, kv_idx):
    """Soft cap at five."""
    return 5.0 * torch.tanh(score / 5.0)


@flexc.kernel
def alibi(score, batch, head, q_idx, kv_idx):
    """Linear biases."""
    return score - SLOPES[head] * (q_idx - kv_idx)


@flexc.kernel
def narrow(batch, head, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 7


class Variants:
    """A name with a dot."""

    @flexc.kernel
    def doubled(score, batch, head, q_idx, kv_idx):
        return score * 2


def assert_right(kernel, q, k, v, captured=None, **options):
    report = compare(kernel, q, k, v, captured or {}, **options)
    assert report.ok, f"\n{report}"


def gradients(output, inputs, **options):
    return torch.autograd.grad(output, inputs, **options)


def close(ours, truth, tolerance=1e-4):
    torch.testing.assert_close(ours.double(), truth.double(), rtol=tolerance, atol=tolerance)


# --- making kernels --------------------------------------------------------------------------------------------------------------------


def test_decorated_function_is_a_kernel():
    assert isinstance(alibi, flexc.Kernel) and alibi.mask_mod is None
    assert alibi.__name__ == "alibi" and alibi.__doc__ == "Linear biases." and alibi.__module__ == __name__
    assert_right(alibi, *qkv(q_len=40))
    assert narrow.score_mod is None
    assert_right(narrow, *qkv(q_len=40))
    assert flexc.kernel(alibi) is alibi


def test_kernel_of_one_function_is_taken_for_the_function():
    """As the README combines them."""
    both = flexc.attention(score_mod=alibi, mask_mod=narrow)
    assert both.score_mod is alibi.score_mod and both.mask_mod is narrow.mask_mod
    assert_right(both, *qkv(q_len=40))
    assert repr(both) == "<flexc kernel alibi with mask narrow>"


def test_kernel_of_a_mask():
    kernel = flexc.kernel(flexc.masks.causal)
    assert kernel.score_mod is None
    assert kernel(*qkv(q_len=40)).equal(flexc.attention(None, causal)(*qkv(q_len=40)))


def test_plain_attention_is_that_of_pytorch():
    q, k, v = qkv(heads=4, kv_heads=4, q_len=40)
    close(flexc.attention()(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))
    assert repr(flexc.attention()) == "<flexc kernel plain attention>"


def test_every_public_name_is_there():
    for name in flexc.__all__:
        assert getattr(flexc, name).__doc__, name


def test_captured_names_the_tensors_that_require_a_gradient():
    w, u = normal(4, grad=True), normal(4)
    kernel = flexc.attention(lambda s, b, h, i, j: s * w[h] + u[h])
    assert kernel.captured(*qkv(q_len=4)) == {"w": w}


# --- scale -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.3, 1, 2.5, -0.3, -1.0, 0.0, -0.0, 1e-30, torch.tensor(0.25), torch.tensor(-2)])
def test_any_finite_scale(scale):
    assert_right(flexc.attention(alibi, causal), *qkv(q_len=40), scale=float(scale))
    q, k, v = qkv(q_len=40)
    assert alibi(q, k, v, scale=scale).equal(alibi(q, k, v, scale=float(scale)))


def test_scale_reaches_the_score_function():
    """The function sees scale · q·k, also where the kernel was given -q."""
    clipped = flexc.attention(lambda s, b, h, i, j: flexc.where(s > 0, s, 0.0))
    for scale in (0.5, -0.5):
        assert_right(clipped, *qkv(q_len=40), scale=scale)


# --- sizes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 5, 6), (2, 0, 6), (2, 5, 0), (0, 0, 0)])
def test_nothing_to_attend(batch, q_len, kv_len):
    """The last batch of a data set, an empty document."""
    q, k, v = qkv(batch=batch, q_len=q_len, kv_len=kv_len, v_dim=8, grad=True)
    w, lengths = normal(4, grad=True), torch.zeros(batch, dtype=torch.int64)
    kernel = flexc.attention(lambda s, b, h, i, j: s * w[h], lambda b, h, i, j: i + lengths[b] >= j)
    out, aux = kernel(q, k, v, return_lse=True)
    assert out.shape == (batch, 4, q_len, 8) and not out.any()
    assert aux.lse.shape == (batch, 4, q_len) and aux.lse.dtype == torch.float32 and bool((aux.lse == -math.inf).all())
    found = gradients([out, aux.lse], [q, k, v, w], grad_outputs=[torch.ones_like(out), torch.ones_like(aux.lse)])
    assert all(g.shape == x.shape and not g.any() for g, x in zip(found, (q, k, v, w)))


def test_one_query_and_one_key():
    assert_right(flexc.attention(alibi, causal), *qkv(q_len=1))


def test_last_dimensions_that_are_not_contiguous():
    q, k, v = qkv(q_len=40)
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    kernel = flexc.attention(alibi, causal)
    assert kernel(*strided).equal(kernel(q, k, v))
    one = [x[..., :1] for x in (q, k, v)]
    assert kernel(*one).equal(kernel(*(x.contiguous() for x in one)))
    wide = [x[:, :, :, ::2] for x in (q, k, v)]
    assert_right(kernel, *wide)


def test_one_tensor_three_times():
    x, _, _ = qkv(q_len=40, grad=True)
    kernel = flexc.attention(alibi, causal)
    (ours,) = gradients(kernel(x, x, x).sin().sum(), [x])
    (truth,) = gradients(reference(alibi.score_mod, causal, x, x, x)[0].sin().sum(), [x])
    close(ours, truth)


# --- dtypes ----------------------------------------------------------------------------------------------------------------------------


def test_float64_is_computed_in_float64_and_its_lse_is_float32():
    q, k, v = qkv(q_len=70, dtype=torch.float64)
    out, aux = flexc.attention(None, causal)(q, k, v, return_lse=True)
    truth, lse = reference(None, causal, q, k, v)
    assert out.dtype == torch.float64 and (out - truth).abs().max() < 1e-13
    assert aux.lse.dtype == torch.float32 and aux.lse.equal(lse.float())


def test_float64_gradients_are_float64_also_through_lse():
    q, k, v = qkv(q_len=30, dtype=torch.float64, grad=True)

    def loss(out, lse):
        return out.sin().sum() + (2.0 * lse).sum()

    out, aux = flexc.attention(None, causal)(q, k, v, return_lse=True)
    ours, truth = gradients(loss(out, aux.lse), [q, k, v]), gradients(loss(*reference(None, causal, q, k, v)), [q, k, v])
    assert all((x - y).abs().max() < 1e-12 for x, y in zip(ours, truth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    """The dtype of q decides; inside, products stay in the precision that the plan says."""
    q, k, v = qkv(q_len=70, grad=True)
    w = normal(4, grad=True)
    kernel = flexc.attention(lambda s, b, h, i, j: s * w[h], causal)

    def run():
        out, aux = kernel(q, k, v, return_lse=True)
        return out, aux.lse, *gradients(out.sin().sum() + aux.lse.sum(), [q, k, v, w])

    expected = run()
    with torch.autocast("cpu", dtype):
        found = run()
        out = kernel(q, k, v)
    assert all(x.dtype == torch.float32 and x.equal(y) for x, y in zip(found, expected))
    assert out.equal(expected[0])


def test_autocast_computes_projections_around_it():
    x = normal(2, 4, 40, 32)
    layer = torch.nn.Linear(32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        projected = layer(x)
        out = flexc.attention(None, causal)(projected, projected, projected)
    assert projected.dtype == out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.any()


# --- autograd ---------------------------------------------------------------------------------------------------------------------------


def test_gradients_of_a_leaf_and_of_a_computed_capture():
    q, k, v = qkv(q_len=40, grad=True)
    w, c = normal(4, grad=True), normal(grad=True)

    def forward(attention):
        bias = 2 * w  # a result inside the graph, not a leaf
        return attention(lambda s, b, h, i, j: s * c + bias[h] * (j - i) + w[h] * 0.1 * j)

    ours = gradients(forward(lambda score: flexc.attention(score, causal)(q, k, v)).sin().sum(), [q, k, v, w, c])
    truth = gradients(forward(lambda score: reference(score, causal, q, k, v)[0]).sin().sum(), [q, k, v, w, c])
    for x, y in zip(ours, truth):
        assert y.any()
        close(x, y, 1e-3)


def test_gradient_of_lse_alone_and_with_the_output():
    q, k, v = qkv(q_len=40, grad=True)
    for part in (lambda out, lse: lse.exp().sum(), lambda out, lse: (out * lse.exp()[..., None]).sum()):
        out, aux = flexc.attention(capped, causal)(q, k, v, return_lse=True)
        ours = gradients(part(out, aux.lse), [q, k])
        truth = gradients(part(*reference(capped, causal, q, k, v)), [q, k])
        for x, y in zip(ours, truth):
            close(x, y, 1e-3)


@pytest.mark.parametrize("case", ["plain", "scores", "captured", "lse", "rows without keys"])
def test_gradcheck(case):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, q_len=5, kv_len=6, dim=3, v_dim=2, dtype=torch.float64, grad=True)
    w, table = normal(2, dtype=torch.float64, grad=True), normal(12, seed=1, dtype=torch.float64, grad=True)

    def score(s, batch, head, q_idx, kv_idx):
        return torch.tanh(s) * w[head] + table[q_idx - kv_idx + 6] * s

    mask = causal if case != "rows without keys" else lambda b, h, i, j: (i >= j) & (i > 1)
    kernel = {
        "plain": flexc.attention(None, causal),
        "scores": flexc.attention(capped, causal),
    }.get(case, flexc.attention(score, mask))

    def call(q, k, v, *_):
        return kernel(q, k, v, scale=0.7)

    if case == "lse":
        # float32 numbers allow float32 differences.
        def call(q, k, v, *_):
            return kernel(q, k, v, scale=0.7, return_lse=True)[1].lse.double()

        assert torch.autograd.gradcheck(call, (q, k, v, w, table), eps=1e-2, atol=1e-3, rtol=1e-3)
    else:
        assert torch.autograd.gradcheck(call, (q, k, v, w, table))


def test_no_grad_and_inference_mode_build_no_graph():
    q, k, v = qkv(q_len=40, grad=True)
    kernel = flexc.attention(alibi, causal)
    expected, aux = kernel(q, k, v, return_lse=True)
    assert expected.requires_grad and aux.lse.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, other = kernel(q, k, v, return_lse=True)
        assert not out.requires_grad and not other.lse.requires_grad
        assert out.equal(expected) and other.lse.equal(aux.lse) and other.lse.any()
    detached = kernel(*(x.detach() for x in (q, k, v)))
    assert not detached.requires_grad


def test_second_derivative_is_refused():
    q, k, v = qkv(q_len=20, grad=True)
    w = normal(4, grad=True)
    kernel = flexc.attention(lambda s, b, h, i, j: s * w[h], causal)
    for wrt in (q, k, v, w):
        (first,) = gradients(kernel(q, k, v).sin().sum(), [wrt], create_graph=True)
        with pytest.raises(UnsupportedError, match="cannot be differentiated again, on any backend: .*use flexc.reference"):
            first.square().sum().backward()
    # The truth has one.
    (first,) = gradients(reference(kernel.score_mod, causal, q, k, v)[0].sin().sum(), [q], create_graph=True)
    first.square().sum().backward()


def test_create_graph_for_another_part_of_the_loss_is_taken():
    """A gradient penalty on something that attention is not in."""
    q, k, v = qkv(q_len=20, grad=True)
    x = normal(3, grad=True)
    kernel = flexc.attention(None, causal)
    loss = kernel(q, k, v).sin().sum() + x.pow(3).sum()
    dq, dx = gradients(loss, [q, x], create_graph=True)
    close(dq, gradients(reference(None, causal, q, k, v)[0].sin().sum(), [q])[0])
    dx.sum().backward()
    close(x.grad, 6 * x)


def test_graph_kept_for_a_second_backward():
    q, k, v = qkv(q_len=40, grad=True)
    out = flexc.attention(capped, causal)(q, k, v)
    first = gradients(out.sum(), [q, k, v], retain_graph=True)
    second = gradients(out.sum(), [q, k, v])
    assert all(x.equal(y) for x, y in zip(first, second))
    with pytest.raises(RuntimeError, match="second time"):
        gradients(out.sum(), [q, k, v])


def test_captured_tensor_written_to_before_the_backward_is_noticed():
    q, k, v = qkv(q_len=40, grad=True)
    w = normal(4)
    out = flexc.attention(lambda s, b, h, i, j: s * w[h])(q, k, v)
    w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradient_of_a_tensor_that_only_the_mask_reads():
    """A comparison has none; PyTorch says None, as for `torch.where`."""
    q, k, v = qkv(q_len=40, grad=True)
    bound = normal(40, grad=True)
    kernel = flexc.attention(None, lambda b, h, i, j: (bound[j] > 0) | (i == j))
    dq, dbound = gradients(kernel(q, k, v).sum(), [q, bound], allow_unused=True)
    assert dq.any() and (dbound is None or not dbound.any())


def test_saved_for_backward_is_only_what_it_needs():
    """q, k, v, out, lse and the captured tensors: nothing of the size Sq · Skv."""
    q, k, v = qkv(batch=1, q_len=300, grad=True)
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = flexc.attention(alibi, causal)(q, k, v)
    assert sorted(sizes) == sorted([q.numel(), k.numel(), v.numel(), out.numel(), 4 * 300, 4])
    out.sum().backward()
    assert q.grad.any()


def test_checkpointed_layer():
    q, k, v = qkv(q_len=70, grad=True)
    kernel = flexc.attention(alibi, flexc.masks.document(torch.arange(70) // 30))
    expected = gradients(kernel(q, k, v).sin().sum(), [q, k, v])
    out = torch.utils.checkpoint.checkpoint(kernel, q, k, v, use_reentrant=False)
    assert all(x.equal(y) for x, y in zip(gradients(out.sin().sum(), [q, k, v]), expected))


# --- modules, copies, pickles ------------------------------------------------------------------------------------------------------------


class Temperature(torch.nn.Module):
    """A score function that is a module."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((4,), 1.5))

    def forward(self, score, batch, head, q_idx, kv_idx):
        return score * self.factor[head]


class Layer(torch.nn.Module):
    """What a model has: projections, and a kernel as an attribute."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 3 * 4 * 8)
        self.temperature = Temperature()
        self.attention = flexc.attention(self.temperature, flexc.masks.causal)

    def forward(self, x):
        q, k, v = self.projection(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v).transpose(1, 2).flatten(2)


def test_kernel_in_a_module_trains():
    layer, x = Layer(), normal(2, 20, 16)
    assert {"temperature.factor", "projection.weight"} <= dict(layer.named_parameters()).keys()
    layer(x).square().sum().backward()
    assert layer.temperature.factor.grad.any() and layer.projection.weight.grad.any()
    before = layer(x).detach()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert not layer(x).equal(before)


def test_deep_copy_of_a_module_has_its_own_parameters():
    layer, x = Layer(), normal(2, 20, 16)
    expected = layer(x)  # ran: block maps and modules are there
    twin = copy.deepcopy(layer)
    assert twin(x).equal(expected)
    assert twin.attention is not layer.attention and twin.attention.score_mod is twin.temperature is not layer.temperature
    with torch.no_grad():
        twin.temperature.factor.mul_(3)
    assert not twin(x).equal(expected) and layer(x).equal(expected)


def test_state_dict_and_half_precision_of_a_module():
    layer, x = Layer(), normal(2, 20, 16)
    other = Layer()
    other.load_state_dict(layer.state_dict())
    assert other(x).equal(layer(x))
    assert other.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_copy_of_a_kernel_keeps_functions_and_options():
    kernel = flexc.attention(capped, flexc.masks.causal, backend="cpu", precision="exact", deterministic=True)
    q, k, v = qkv(q_len=20)
    expected = kernel(q, k, v)
    for twin in (copy.copy(kernel), copy.deepcopy(kernel)):
        assert twin.score_mod is capped and twin(q, k, v).equal(expected)
        assert twin.reason == "asked for by backend='cpu'" and twin._options == kernel._options


def test_pickled_kernel():
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(capped, causal, backend="cpu")
    expected = kernel(q, k, v)
    twin = pickle.loads(pickle.dumps(kernel))
    assert twin is not kernel and twin.score_mod is capped and twin.mask_mod is causal
    assert twin(q, k, v).equal(expected)


@pytest.mark.parametrize("kernel", [alibi, narrow, Variants.doubled])
def test_decorated_kernel_is_pickled_by_name(kernel):
    kernel(*qkv(q_len=8))
    assert pickle.loads(pickle.dumps(kernel)) is kernel
    assert copy.deepcopy([kernel])[0] is kernel


def test_kernel_of_a_local_function_says_why_it_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match="local object .*<lambda>"):
        pickle.dumps(flexc.attention(lambda s, b, h, i, j: s))
