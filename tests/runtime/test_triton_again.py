"""A recorded launch against Triton's own way to the launcher in C, for which a list stands in: no GPU is needed."""

import gc
import inspect
import linecache
import types

import pytest
import torch

import flexc
from flexc import pipeline
from flexc.backends import Shapes
from flexc.runtime import triton_again
from flexc.target import Target
from tests.accuracy import normal, qkv

nvidia = pytest.importorskip("triton.backends.nvidia.driver")


def by_number(slopes, factor):
    return lambda score, batch, head, q_idx, kv_idx: score - slopes[head] * factor * (q_idx - kv_idx)


def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 40


class InC(list):
    """Notes what it is called with; no Python function, as the one in C is none."""

    def __call__(self, *given):
        self.append(given)


def narrow(width):
    return lambda batch, head, q_idx, kv_idx: 0 <= q_idx - kv_idx < width


class CudaLauncher:
    """As Triton's: `launch` encodes descriptors in Python around a function in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, in_c, names):
        kinds = {i: "tensordesc<bf16[1, 1, 64, 64]>" if "_desc" in name else "i32" for i, name in enumerate(names)}
        count = sum(kind != "i32" for kind in kinds.values())
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}
        self.launch = nvidia.wrap_handle_tensordesc(in_c, kinds, [dict(meta, swizzle=i) for i in range(count)])


class JitFunction:
    """A kernel as Triton launches it."""

    def __init__(self, names, run):
        self.arg_names, self.launches = names, 0
        self.binary = types.SimpleNamespace(run=run, function=99, packed_metadata=("packed",))

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, num_stages):
            self.launches += 1
            fixed = (*(*grid, 1, 1)[:3], 7, 99, False, False, None, None, ("packed",), None, None, None)
            self.binary.run.launch(*fixed, *arguments)
            return self.binary

        return launch


@pytest.fixture
def seen(monkeypatch):
    """What the launcher in C was given."""
    import triton.runtime

    encode = lambda *given: ("encoded", *map(str, given))
    active = types.SimpleNamespace(get_current_stream=lambda index: 7, utils=types.SimpleNamespace(fill_tma_descriptor=encode))
    driver = types.SimpleNamespace(active=active)
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(nvidia, "triton", types.SimpleNamespace(runtime=types.SimpleNamespace(driver=driver)))
    return InC()


class Prepared:
    """The module of a variant with stand-ins for its kernel, and inputs for it."""

    def __init__(self, seen, score_mod, mask_mod, tensors, scalars=(), *, aligned=True, runs_numbers=False, kv_len=300):
        self.seen, self.tensors, self.scalars = seen, tensors, scalars
        trace, _ = flexc.frontend.trace(score_mod, mask_mod, runs_numbers=runs_numbers)
        shapes = Shapes(2, 4, 2, 200, kv_len, 64, 64, torch.bfloat16, aligned)
        target = Target.parse("sm_90a")
        options = flexc.backends.Options()
        artifact = pipeline.compile_attention(trace.graph, shapes, target, flexc.backends.TRITON, "", options, "test")
        self.module = artifact.fresh_module()
        names = self.module.forward_kernel.arg_names
        self.kernel = self.module.forward_kernel = JitFunction(names, CudaLauncher(seen, names))
        self.q, self.k, self.v = self.inputs(0)
        self.walk = None
        if mask_mod is not None:
            self.walk = flexc.block_map(mask_mod, 200, kv_len, block=artifact.map_blocks["forward"]).row_walk()

    def inputs(self, seed):
        kv_len = 300
        return qkv(2, 4, 2, 200, kv_len, 64, seed=seed, dtype=torch.bfloat16)

    def record(self):
        return triton_again.record(self.module, self.q, self.k, self.v, 0.125, self.tensors, self.scalars, self.walk)

    def compare(self, again, tensors, scale=0.125, scalars=()):
        """Triton's way and the recorded one with other tensors: what reached the launcher is the same, up to the results' addresses."""
        inputs = self.inputs(1)
        results = self.module.forward(*inputs, scale, tensors, scalars, self.walk)
        found = again(*inputs, scale, tensors, scalars, self.walk)
        through_triton, recorded = self.seen[-2:]
        renamed = {id(x): f"result {i}" for i, x in enumerate(results)}
        expected = [renamed.get(id(x), x.data_ptr() if isinstance(x, torch.Tensor) else x) for x in through_triton]
        addresses = {x.data_ptr(): f"result {i}" for i, x in enumerate(found)}
        assert [addresses.get(x, x) if type(x) is int else x for x in recorded] == expected
        for x, y in zip(results, found, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("mask_mod", [None, window])
def test_the_recorded_launch_is_the_one_that_triton_makes(seen, mask_mod, aligned):
    prepared = Prepared(seen, by_number(normal(4), 2), mask_mod, (normal(4),), aligned=aligned)
    results, again = prepared.record()
    assert len(results) == 2 and again is not None and prepared.kernel.launches == 1
    prepared.compare(again, (normal(4, seed=5),), scale=0.5)


def test_the_launch_is_of_the_device_that_it_was_recorded_on(seen):
    """On the stream that is current there. `likeness_of` keeps launches of two devices apart."""
    prepared = Prepared(seen, None, None, (), aligned=False)
    results = prepared.module.forward(prepared.q, prepared.k, prepared.v, 0.125, (), (), None)
    q = types.SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.bfloat16, data_ptr=lambda: 0)
    kernel = JitFunction(["out", "lse"], prepared.kernel.binary.run)
    printed = triton_again._Printer(kernel, kernel.binary, (1,), results, results, q, prepared.k, prepared.v, (), (), None)
    lines = printed.all_lines()
    assert any("launch(1, 1, 1, stream_of(1), " in line for line in lines)
    assert "result1 = empty((2, 4, 200), (800, 200, 1), float32)" in lines


def test_lines_of_a_recorded_launch_are_found_while_it_lives(seen):
    again = Prepared(seen, None, None, (), aligned=False).record()[1]
    name = again.__code__.co_filename
    assert inspect.getsource(again).startswith("def again(q, k, v, ") and "    launch(" in inspect.getsource(again)
    del again
    gc.collect()
    assert linecache.getlines(name) == []


def test_one_tensor_in_two_places_is_not_recorded(seen):
    """The next call may have two: attention of a sequence to itself, then to another."""
    prepared = Prepared(seen, None, None, (), aligned=False)
    prepared.v = prepared.k
    results, again = prepared.record()
    assert again is None and len(results) == 2 and prepared.kernel.launches == 1


def test_run_time_numbers_reach_the_launch(seen):
    prepared = Prepared(seen, by_number(normal(4), 2), narrow(40), (normal(4),), (2, 40), runs_numbers=True)
    again = prepared.record()[1]
    prepared.compare(again, prepared.tensors, scalars=(3, 50))
    inputs = prepared.inputs(1)
    for other in ((3, 2**31), (2.0, 40)):  # another type for Triton, hence another binary
        assert again(*inputs, 0.125, prepared.tensors, other, prepared.walk) is None


def test_captured_tensors_of_other_sizes_strides_or_alignment_are_other_launches(seen):
    prepared = Prepared(seen, by_number(normal(4), 2), window, (normal(4),))
    again = prepared.record()[1]
    for other in (normal(5), normal(8)[::2], normal(5)[1:], normal(4).double()):
        assert again(*prepared.inputs(1), 0.125, (other,), (), prepared.walk) is None
    assert len(seen) == 1


def test_which_of_the_inputs_is_aligned_matters(seen):
    """Triton compiles for it, and calls in which another one is not aligned are alike in all else."""
    prepared = Prepared(seen, None, window, (), aligned=False)
    moved = lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:].as_strided(x.shape, x.stride(), 1)
    aligned = prepared.inputs(0)
    prepared.q = moved(aligned[0])
    again = prepared.record()[1]
    q, k, v = prepared.inputs(1)
    assert again(moved(q), k, v, 0.125, (), (), prepared.walk) is not None
    assert again(q, moved(k), v, 0.125, (), (), prepared.walk) is None
    assert again(q, k, v, 0.125, (), (), prepared.walk) is None


def test_hooks_on_launches_are_called_by_triton(seen, monkeypatch):
    from triton import knobs

    prepared = Prepared(seen, None, window, ())
    again = prepared.record()[1]
    hook = lambda metadata: None
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert again(*prepared.inputs(1), 0.125, (), (), prepared.walk) is None
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert again(*prepared.inputs(1), 0.125, (), (), prepared.walk) is not None


def test_a_launcher_of_another_kind_is_left_to_triton(seen):
    prepared = Prepared(seen, None, window, ())
    prepared.kernel.binary.run.profile_scratch_size = 8
    results, again = prepared.record()
    assert len(results) == 2 and again is None and len(seen) == 1


def test_nothing_is_recorded_where_nothing_is_launched(seen):
    prepared = Prepared(seen, None, None, ())
    prepared.k, prepared.v = prepared.k[:, :, :0], prepared.v[:, :, :0]
    results, again = prepared.record()
    assert again is None and not seen and bool((results[1] == -torch.inf).all())


def test_descriptors_are_encoded_once_for_an_address(seen, monkeypatch):
    prepared = Prepared(seen, None, window, ())
    again = prepared.record()[1]
    import triton.runtime

    encoded = []
    kept = triton.runtime.driver.active.utils
    kept.fill_tma_descriptor = lambda address, *rest: encoded.append(address)
    fresh = triton_again.record(prepared.module, prepared.q, prepared.k, prepared.v, 0.125, (), (), prepared.walk)[1]
    encoded.clear()
    inputs = prepared.inputs(1)
    for _ in range(3):
        fresh(*inputs, 0.125, (), (), prepared.walk)
    assert again is not None and encoded == [x.data_ptr() for x in inputs]
