"""Calls of the operators without PyTorch's dispatcher: as those with it, and only where nobody can tell."""

import itertools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flexc
from flexc import direct_calls, frontend, operators
from flexc.errors import IndexRangeError
from flexc.variants import variant_of
from tests.accuracy import normal, qkv

_numbers = itertools.count()


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def kernel_of(table):
    """A kernel with a name of its own, and so a variant that no call before was of."""

    def alibi(score, batch, head, q_idx, kv_idx):
        return score - table[head] * (q_idx - kv_idx)

    alibi.__name__ = f"alibi{next(_numbers)}"
    return flexc.attention(alibi, causal)


@pytest.fixture
def runs(monkeypatch):
    """A list that each direct call makes longer."""
    seen, run = [], direct_calls.run
    monkeypatch.setattr(direct_calls, "run", lambda *given: (seen.append(1), run(*given))[1])
    return seen


class Call:
    """The operator, called as a compiled program calls it."""

    def __init__(self, kernel, max_scores=False):
        self.kernel, self.operator = kernel, operators.ATTENTION_WITH_MAX if max_scores else operators.ATTENTION
        self.variant = variant_of(kernel, frontend.trace(kernel.score_mod, kernel.mask_mod)[0])

    def __call__(self, q, k, v, scale=None):
        binding = frontend.trace(self.kernel.score_mod, self.kernel.mask_mod)[1]
        return self.operator(q, k, v, list(binding.tensors), self.variant.text, scale, [], [])


def assert_right(kernel, results, q, k, v, scale=None):
    expected = flexc.reference(kernel.score_mod, kernel.mask_mod, q.detach(), k, v, scale=scale)
    for result, truth in zip(results, expected):
        torch.testing.assert_close(result.double(), truth, atol=2e-5, rtol=2e-5)  # float32 sums, against float64


@pytest.mark.parametrize("max_scores", [False, True])
def test_equal_calls_go_directly(runs, max_scores):
    kernel = kernel_of(normal(4))
    call = Call(kernel, max_scores)
    for seed in range(5):
        q, k, v = qkv(q_len=20, seed=seed)
        assert_right(kernel, call(q, k, v), q, k, v)
    assert len(runs) == 3


def test_other_calls_do_not(runs):
    """Sizes, strides, alignment, dtype, scale, or a tensor given twice."""
    kernel = kernel_of(normal(4))
    call = Call(kernel)
    q, k, v = qkv(q_len=20)
    for _ in range(3):
        call(q, k, v)
    assert len(runs) == 1
    others = [(q[:, :, :19], k, v), (q.mT.contiguous().mT, k, v), (q, k, v[..., :4]), (q, q, q)]
    others += [(torch.nn.functional.pad(q.flatten(), (1, 0))[1:].view(q.shape), k, v)]
    for inputs in others:
        assert_right(kernel, call(*inputs), *inputs)
    for scale in (0.5, -0.5, 0.0):
        assert_right(kernel, call(q, k, v, scale), q, k, v, scale)
    assert call(q.double(), k.double(), v.double())[0].dtype == torch.float64
    assert len(runs) == 1
    assert_right(kernel, call(q, k, v), q, k, v)
    for inputs in others:
        for _ in range(2):
            assert_right(kernel, call(*inputs), *inputs)


def test_settings_and_modes_are_looked_at(runs, monkeypatch):
    kernel = kernel_of(normal(4))
    call = Call(kernel)
    q, k, v = qkv(q_len=20)
    for _ in range(3):
        call(q, k, v)
    monkeypatch.setenv("FLEXC_CHECK", "1")
    with pytest.raises(IndexRangeError):
        short = Call(flexc.attention(lambda s, b, h, i, j: s * call.kernel.score_mod.__closure__[0].cell_contents[i]))
        for _ in range(3):
            short(q, k, v)
    monkeypatch.delenv("FLEXC_CHECK")
    before = len(runs)
    torch.use_deterministic_algorithms(True)
    try:
        assert_right(kernel, call(q, k, v), q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu"):
        assert_right(kernel, call(q, k, v), q, k, v)
    with torch.inference_mode():
        assert_right(kernel, call(q, k, v), q, k, v)
    assert len(runs) == before


def test_whoever_watches_sees_the_operator(runs):
    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen, call = [], Call(kernel_of(normal(4)))
    q, k, v = qkv(q_len=20)
    for _ in range(3):
        call(q, k, v)
    for mode in (Dispatched, Functions):
        with mode():
            call(q, k, v)
        assert "flexc.attention.default" in seen
        seen.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(q, k, v)
    assert "flexc::attention" in [event.name for event in profile.events()]


def test_gradients_are_recorded_where_they_may_be_asked_for(runs):
    table = normal(4, grad=True)
    kernel = kernel_of(table)
    call = Call(kernel)
    q, k, v = qkv(q_len=20)
    with torch.no_grad():
        for _ in range(4):
            assert call(q, k, v)[0].grad_fn is None
    assert len(runs) == 2
    call(q, k, v)[0].sum().backward()
    assert table.grad is not None and table.grad.abs().sum() > 0 and len(runs) == 2
    q.requires_grad_()
    assert call(q, k, v)[0].requires_grad and len(runs) == 2


def test_the_kernel_shows_what_ran(runs):
    kernel = kernel_of(normal(4))
    call = Call(kernel)
    call.variant.serve(kernel)
    for length in (20, 20, 30, 30, 20):
        call(*qkv(q_len=length))
        assert kernel._last[0].shapes.q_len == length
    for _ in range(2):
        call(*qkv(q_len=20))
    assert runs and kernel._last[0].shapes.q_len == 20
