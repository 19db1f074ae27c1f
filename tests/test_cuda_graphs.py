"""Kernels inside CUDA graphs, on several streams and threads: one launch is the same wherever it is made from."""

import threading

import pytest
import torch

import flexc
from flexc.errors import UnsupportedError
from tests.accuracy import distance, normal, qkv

pytestmark = pytest.mark.gpu

WINDOW = 48


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(params=["triton", pytest.param("cute", marks=pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU"))])
def gpu_backend(request):
    if request.param == "cute":
        pytest.importorskip("cutlass")
    return request.param


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < WINDOW


def scaled_by(weight):
    return lambda score, batch, head, q_idx, kv_idx: score * weight[head]


def inputs(device="cuda", grad=True):
    q, k, v = qkv(q_len=200, dim=64, device=device, dtype=torch.bfloat16)
    return [x.requires_grad_(grad) for x in (q, k, v)]


def captured(run):
    """A graph of `run`, which ran three times on another stream before, and what it returned while it was captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def test_a_graph_of_forward_and_backward_follows_its_inputs(gpu_backend):
    q, k, v = inputs()
    weight = normal(4, device="cuda", grad=True)
    kernel = flexc.attention(scaled_by(weight), window, backend=gpu_backend)
    dout = normal(*q.shape, seed=9, device="cuda", dtype=torch.bfloat16)

    def step():
        out, aux = kernel(q, k, v, return_lse=True)
        return out, aux.lse, *torch.autograd.grad([out, aux.lse], [q, k, v, weight], [dout, torch.ones_like(aux.lse)])

    graph, results = captured(step)
    with torch.no_grad():
        for seed, x in enumerate((q, k, v, weight)):
            x.copy_(normal(*x.shape, seed=20 + seed))
    for x in results:
        x.detach().fill_(7.0)
    graph.replay()
    for found, expected in zip(results, step(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)  # sums by atomic additions differ in their order


def test_a_graph_follows_a_mask_whose_tensors_change(monkeypatch, gpu_backend):
    """Kernels find the blocks, also at a replay; PyTorch operators, which would wait, are refused."""
    q, k, v = inputs(grad=False)
    documents = torch.arange(200, device="cuda", dtype=torch.int32) // 50
    kernel = flexc.attention(None, flexc.masks.document(documents), backend=gpu_backend)
    monkeypatch.setenv("FLEXC_DEVICE_MAPS", "0")
    kernel(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="FLEXC_DEVICE_MAPS=0"), torch.cuda.graph(graph):
        kernel(q, k, v)
    monkeypatch.delenv("FLEXC_DEVICE_MAPS")
    graph, out = captured(lambda: kernel(q, k, v))
    documents.copy_(torch.arange(200, device="cuda") // 77)
    graph.replay()
    torch.testing.assert_close(out, kernel(q, k, v))
    other = flexc.attention(None, lambda b, h, i, j: documents[i] == documents[j], backend=gpu_backend)
    torch.testing.assert_close(out, other(q, k, v))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_dynamo")
def test_reduce_overhead(gpu_backend):
    """`mode="reduce-overhead"` replays CUDA graphs after two calls."""
    q, k, v = inputs()
    weight = torch.nn.Parameter(normal(4, device="cuda"))
    kernel = flexc.attention(scaled_by(weight), window, backend=gpu_backend)
    run = torch.compile(lambda q, k, v: kernel(q, k, v).float().square().sum(), mode="reduce-overhead", fullgraph=True)
    for step in range(5):
        with torch.no_grad():
            for seed, x in enumerate((q, k, v)):
                x.copy_(normal(*x.shape, seed=10 * step + seed))
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(run(q, k, v), [q, k, v, weight])
        expected = torch.autograd.grad(kernel(q, k, v).float().square().sum(), [q, k, v, weight])
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_a_launch_goes_to_the_current_stream(gpu_backend):
    """A call under another stream waits for what that stream did before it."""
    q, k, v = inputs(grad=False)
    kernel = flexc.attention(None, window, backend=gpu_backend)
    expected, side = kernel(q, k, v), torch.cuda.Stream()
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        out = kernel(late, k, v)
    side.synchronize()
    assert out.equal(expected)


def test_threads_launch_at_once(gpu_backend):
    """Each has a stream, a captured tensor and lengths of its own."""
    wrong, start = [], threading.Barrier(4)

    def work(index):
        q, k, v = qkv(q_len=100 + 30 * index, dim=64, seed=index, device="cuda", dtype=torch.bfloat16)
        weight = normal(4, seed=index, device="cuda")
        kernel = flexc.attention(scaled_by(weight), window, backend=gpu_backend)
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [kernel(q, k, v) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        truth, _ = flexc.reference(scaled_by(weight), window, q, k, v)
        if not all(out.equal(outs[0]) for out in outs) or distance(outs[0], truth) > 0.05:
            wrong.append(index)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_local_shards_of_distributed_tensors(gpu_backend):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        q, k, v = inputs()
        kernel = flexc.attention(lambda s, b, h, i, j: s - 0.1 * h * (i - j), window, backend=gpu_backend)
        expected = torch.autograd.grad(kernel(q, k, v).float().square().sum(), [q, k, v])
        shards = [DTensor.from_local(x.detach(), mesh, [Shard(1)], run_check=False).requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(kernel(*shards).to_local().float().square().sum(), shards)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.to_local(), y)
    finally:
        torch.distributed.destroy_process_group()
