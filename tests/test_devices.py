"""Two GPUs in one process: a launch goes to the device of its tensors and its current stream, and nothing kept for one serves the other.

Where there is one GPU, or none, `cuda:1` is a device that only says so: what is asked of it shows where a launch would have gone.
"""

import contextlib
import itertools
import threading
import types

import pytest
import torch

import flexc
from flexc import backends, block_kernels, launch, pipeline
from flexc.arguments import shapes_of
from flexc.backends import Call
from flexc.errors import InputError
from flexc.map_making import stream_of
from flexc.ready import likeness_of
from flexc.runtime import cute_again, tile_counter, triton_again
from tests.accuracy import distance, normal, qkv

SECOND = torch.device("cuda", 1)


def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 48


def scaled_by(weight):
    return lambda score, batch, head, q_idx, kv_idx: score * weight[head]


def documents(ids):
    return lambda batch, head, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


# --- a device that only says so ----------------------------------------------------------------------------------------------------------


class On:
    """A tensor of the CPU that says it is on a GPU."""

    def __init__(self, tensor, device):
        self.tensor, self.device, self.is_cuda = tensor, device, True

    def __getattr__(self, name):
        return getattr(self.tensor, name)


@pytest.fixture
def current(monkeypatch):
    """Which device is current, and streams: of device i the stream 100 + i."""
    place = types.SimpleNamespace(index=0)

    @contextlib.contextmanager
    def device(other):
        before, place.index = place.index, other.index
        yield
        place.index = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: place.index)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: place.index, raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    return place


@pytest.mark.parametrize("index", [0, 1])
def test_modules_are_called_on_the_device_of_the_tensors(current, monkeypatch, index):
    seen = []
    called = lambda *given: seen.append(current.index) or (None,) * 4
    module = types.SimpleNamespace(forward=called, backward=called)
    for again in (triton_again, cute_again):
        monkeypatch.setattr(again, "record", lambda module, *given: (called(), None))
    x = On(torch.zeros(1, 1, 16, 16), torch.device("cuda", index))
    call = Call(x, x, x, 1.0, (), ())
    for backend in (backends.TRITON, backends.CUTE, backends.DECODE):
        backend.forward(module, call, {})
    for backend in (backends.TRITON, backends.CUTE):
        backend.record(module, call, {})
    for backend in (backends.TRITON, backends.CUTE_BACKWARD):
        backend.backward(module, call, {}, x, x, torch.zeros(1, 1, 16, 16), None)
    assert seen == [index] * 7 and current.index == 0


def test_launch_that_is_made_again_goes_there_too(current):
    trace, _ = flexc.frontend.trace(None, None)
    x = torch.zeros(1, 1, 16, 16)
    artifact = pipeline.compile_attention(
        trace.graph, shapes_of(x, x, x), flexc.Target.parse("cpu"), backends.CPU, "", backends.Options(), "t"
    )
    made = launch.Launch(artifact, shapes_of(x, x, x), 1.0, (), backends.Options(), "t")
    made.remembered.again = lambda *given: (current.index,)
    assert made.forward(On(x, SECOND), x, x, ()) == (1,)
    assert current.index == 0


def test_block_maps_are_written_on_the_device_of_the_mask(current):
    plan = types.SimpleNamespace(shape=(1, 1, 1, 1), written=lambda side, device, *given: (side, device.index, current.index))
    for index in (0, 1):
        made = block_kernels.DeviceMap(plan, torch.device("cuda", index), (), ())
        assert made.written("rows") == ("rows", index, index) and made.has("rows")
    assert current.index == 0 and stream_of(SECOND) == 101


def test_what_is_kept_is_kept_by_device(current, monkeypatch):
    first, second = (On(torch.zeros(1, 1, 16, 16), torch.device("cuda", index)) for index in (0, 1))
    assert likeness_of(first, first, first) == likeness_of(first, first, first) != likeness_of(second, second, second)
    kernel = flexc.attention(None, window)
    kernel(*qkv(q_len=32))
    ran, _, _ = kernel._last
    keys = {launch.MAPS.key_of(ran, (128, 128), (), torch.device("cuda", index)) for index in (0, 1)}
    assert len(keys) == 2
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: On(zeros(*size, **options), device))
    monkeypatch.setattr(tile_counter, "_counters", {})
    monkeypatch.setattr(tile_counter, "_is_capturing", lambda: False)
    counters = [tile_counter.tile_counter(torch.device("cuda", index)) for index in (0, 1, 0)]
    assert counters[0] is counters[2] and [x.device.index for x in counters[:2]] == [0, 1]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)  # the default stream of each
    assert tile_counter.tile_counter(SECOND) is not tile_counter.tile_counter(torch.device("cuda", 0))


# --- two GPUs ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two():
    """Two GPUs, the first of them current; and a backend."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    yield [torch.device("cuda", index) for index in (0, 1)]
    assert torch.cuda.current_device() == 0


def inputs(device, seed=0):
    return [x.requires_grad_() for x in qkv(q_len=200, dim=64, device=device, dtype=torch.bfloat16, seed=seed)]


def check(kernel, q, k, v):
    out = kernel(q, k, v)
    out.sum().backward()
    assert out.device == q.grad.device == q.device
    assert distance(out, flexc.reference(kernel.score_mod, kernel.mask_mod, *(x.detach() for x in (q, k, v)))[0]) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
class TestTwoGPUs:
    def test_one_kernel_serves_both(self, two, backend):
        """In turns, often enough that launches are recorded, and with maps that are kept."""
        kernel = flexc.attention(None, window, backend=backend)
        for index, seed in itertools.product((1, 0, 1), range(4)):
            check(kernel, *inputs(two[index], seed))
            with torch.no_grad():
                q, k, v = inputs(two[index], seed)
                assert distance(kernel(q, k, v), flexc.reference(None, window, q, k, v)[0]) < 0.05

    def test_captured_tensors(self, two, backend):
        weights = [normal(4, device=device) for device in two]
        ids = [torch.arange(200, device=device) // (30 + 20 * device.index) for device in two]
        for index in (1, 0, 1):
            check(flexc.attention(scaled_by(weights[index]), documents(ids[index]), backend=backend), *inputs(two[index]))
        with pytest.raises(InputError, match=r"weight is on cuda:0 and q on cuda:1: move it with weight.to\('cuda:1'\)"):
            flexc.attention(scaled_by(weights[0]), window, backend=backend)(*inputs(two[1]))

    def test_stream_of_the_other_device(self, two, backend):
        """What is launched waits for that stream's work, not for that of the current device."""
        kernel = flexc.attention(None, window, backend=backend)
        q, k, v = (x.detach() for x in inputs(two[1]))
        truth = flexc.reference(None, window, 2 * q, k, v)[0]
        kernel(q, k, v)  # compiled here: that takes longer than the stream is kept busy below
        stream, event = torch.cuda.Stream(two[1]), torch.cuda.Event()
        for _ in range(4):
            torch.cuda.synchronize(two[1])
            with torch.cuda.stream(stream), torch.cuda.device(two[1]):
                torch.cuda._sleep(10**8)
                doubled = 2 * q
                with torch.cuda.device(two[0]):
                    out = kernel(doubled, k, v)
                event.record()
                assert not event.query()
            event.synchronize()
            assert distance(out, truth) < 0.05

    def test_threads_with_a_device_each(self, two, backend):
        kernel, wrong = flexc.attention(None, window, backend=backend), []

        def work(device):
            try:
                for seed in range(6):
                    check(kernel, *inputs(device, seed))
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(device,)) for device in two * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong

    def test_graph_of_the_other_device(self, two, backend):
        kernel = flexc.attention(None, window, backend=backend)
        with torch.cuda.device(two[1]), torch.no_grad():
            q, k, v = (x.detach() for x in inputs(two[1]))
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                kernel(q, k, v)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = kernel(q, k, v)
            q.mul_(0.5)
            graph.replay()
            assert distance(out, flexc.reference(None, window, q, k, v)[0]) < 0.05
