"""A recorded launch against the module's own way to the compiled launcher, for which a list stands in: no GPU and no DSL is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flexc.codegen.cute import emit
from flexc.runtime import cute_again, recorded
from flexc.runtime.cute_module import load_cute_module
from tests.codegen.cute.texts import HOPPER, VARIANTS, lowered, planned

SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])


class Launcher(list):
    """Notes what it is called with."""

    def __init__(self, arguments):
        super().__init__()
        self.arguments = arguments

    def __call__(self, *values):
        assert len(values) == len(self.arguments)
        self.append(values)

    def prepare(self):
        return self


class Prepared:
    """The module of a variant, and inputs for it."""

    def __init__(self, tmp_path, name, tensors=(), *, grad=False, head_dim=64, head_dim_v=64, walk=True, **changes):
        graph = lowered(*VARIANTS[name]) if isinstance(name, str) else lowered(*name)
        self.plan = planned(graph, head_dim=head_dim, head_dim_v=head_dim_v, **changes)
        self.module = load_cute_module(emit(graph, self.plan, HOPPER), tmp_path / "kernel.py")
        self.seen = self.module.FORWARD = Launcher(self.module.FORWARD.arguments)
        self.tensors, self.sizes, self.grad = tensors, (head_dim, head_dim_v), grad
        self.walk = self.walks() if self.plan.walk == "runs" else None

    def walks(self):
        return SimpleNamespace(**{name: torch.zeros(4, dtype=torch.int32) for name in "rows partial full order".split()})

    def inputs(self):
        d, dv = self.sizes
        made = (torch.randn(2, heads, length, size).bfloat16() for heads, length, size in ((4, 50, d), (4, 60, d), (4, 60, dv)))
        return [x.requires_grad_(self.grad) for x in made]

    def record(self, scalars=()):
        results, again = cute_again.record(self.module, *self.inputs(), 0.5, self.tensors, scalars, self.walk)
        assert len(self.seen) == 1 and results[0] is self.seen[0][3]
        return again

    def compare(self, again, tensors, scale=0.25, scalars=()):
        """What reaches the launcher is the same, up to new results and counters of tiles."""
        inputs, walk = self.inputs(), self.walks() if self.walk is not None else None
        expected = self.module.forward(*inputs, scale, tensors, scalars, walk)
        found = again(*inputs, scale, tensors, scalars, walk)
        first, second = self.seen[-2:]
        own = [argument.name in ("out", "lse", "largest", "counter") for argument in self.seen.arguments]
        for name, x, y in zip(own, first, second, strict=True):
            if isinstance(x, torch.Tensor):
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) and not y.requires_grad
                assert name or x.data_ptr() == y.data_ptr()
            else:
                assert type(x) is type(y) and x == y
        assert len(found) == len(expected) and all(any(x is y for y in second) for x in found)
        for x, y in zip(found, expected, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("name", "tensors"), [("plain", ()), ("causal", ()), ("alibi", (SLOPES,))])
def test_the_recorded_launch_is_the_one_that_the_module_makes(tmp_path, name, tensors, grad):
    tensors = tuple(x.clone().requires_grad_(grad) for x in tensors)
    prepared = Prepared(tmp_path, name, tensors, grad=grad)
    again = prepared.record()
    assert again is not None
    prepared.compare(again, tuple(x.detach().clone().requires_grad_(grad) for x in tensors))
    prepared.grad = not grad  # inputs may begin or cease to require a gradient
    prepared.compare(again, tuple(x.detach().clone().requires_grad_(grad) for x in tensors))


def test_largest_scores_are_among_the_results(tmp_path):
    prepared = Prepared(tmp_path, "causal", max_scores=True)
    prepared.compare(prepared.record(), ())


def test_run_time_numbers_reach_the_launch(tmp_path):
    from flexc import frontend, passes
    from flexc.passes.base2 import lower_to_base2
    from flexc.passes.derivative import differentiate

    width, factor = 40, 2.5
    trace, binding = frontend.trace(lambda s, b, h, i, j: s * factor, lambda b, h, i, j: i - j < width, runs_numbers=True)
    graph = lower_to_base2(differentiate(passes.run(trace.graph)))
    prepared = Prepared.__new__(Prepared)
    prepared.plan = planned(graph, head_dim=64, head_dim_v=64)
    prepared.module = load_cute_module(emit(graph, prepared.plan, HOPPER), tmp_path / "kernel.py")
    prepared.seen = prepared.module.FORWARD = Launcher(prepared.module.FORWARD.arguments)
    prepared.tensors, prepared.sizes, prepared.grad, prepared.walk = (), (64, 64), False, prepared.walks()
    again = prepared.record(binding.scalars)
    others = tuple(x + 1 for x in binding.scalars)
    prepared.compare(again, (), scalars=others)
    assert again(*prepared.inputs(), 0.5, (), tuple(map(str, others)), prepared.walk) is None


def test_other_captured_tensors_are_other_launches(tmp_path):
    prepared = Prepared(tmp_path, "alibi", (SLOPES,))
    again = prepared.record()
    for other in (torch.zeros(5), SLOPES.double(), SLOPES.clone().requires_grad_()):
        assert again(*prepared.inputs(), 0.5, (other,), (), prepared.walk) is None
    assert len(prepared.seen) == 1


@pytest.mark.parametrize("case", ["not in bulk", "sliced results", "truth values", "a number in a tensor"])
def test_what_the_host_makes_anew_at_each_call_is_not_recorded(tmp_path, case):
    options = {"not in bulk": {"bulk": False}, "sliced results": {"head_dim": 64, "head_dim_v": 44}}.get(case, {})
    captured = {"truth values": torch.rand(700) > 0.5, "a number in a tensor": torch.tensor(2.0)}.get(case)
    if captured is None:
        prepared = Prepared(tmp_path, "causal", **options)
    elif captured.dtype == torch.bool:
        prepared = Prepared(tmp_path, (None, lambda b, h, i, j: captured[j]), (captured,))
    else:
        prepared = Prepared(tmp_path, (lambda s, b, h, i, j: s * captured, None), (captured,))
    dv = prepared.sizes[1]
    results, again = cute_again.record(prepared.module, *prepared.inputs(), 0.5, prepared.tensors, (), prepared.walk)
    assert again is None and results[0].shape == (2, 4, 50, dv)


@pytest.mark.parametrize("grad", [False, True])
def test_one_tensor_in_two_places_is_not_recorded(tmp_path, grad):
    """The next call may have two."""
    prepared = Prepared(tmp_path, "causal", grad=grad)
    q, k, _ = prepared.inputs()
    _, again = cute_again.record(prepared.module, q, k, k, 0.5, (), (), prepared.walk)
    assert again is None
    _, again = cute_again.record(prepared.module, q, k, k.detach().requires_grad_(grad), 0.5, (), (), prepared.walk)  # of one memory
    prepared.compare(again, ())


def test_no_keys_are_no_launch(tmp_path):
    prepared = Prepared(tmp_path, "causal")
    q, k, v = prepared.inputs()
    (out, _), again = cute_again.record(prepared.module, q, k[:, :, :0], v[:, :, :0], 0.5, (), (), prepared.walk)
    assert again is None and not out.any() and prepared.seen == []


def test_results_on_a_gpu_are_allocated_as_compiled_programs_do(monkeypatch):
    known = {}
    text = recorded.allocation(torch.zeros(2, 3, dtype=torch.bfloat16), torch.device("cuda", 1), known)
    assert text == "empty((2, 3), (3, 1), bfloat16)" and known == {"bfloat16": torch.bfloat16, "empty": recorded._empty_strided_cuda}
    monkeypatch.setattr(recorded, "_empty_strided_cuda", None)
    text = recorded.allocation(torch.zeros(2, 3), torch.device("cuda", 1), known)
    assert text == "empty((2, 3), dtype=float32, device=device)" and known["device"] == torch.device("cuda", 1)
    with pytest.raises(recorded.OtherLaunch):
        recorded.allocation(torch.zeros(3, 2).T, torch.device("cpu"), known)
