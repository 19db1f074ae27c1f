"""Kernels under torch.func, forward mode, and on distributed tensors: right, or refused with what to write instead."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

import flexc
from flexc import operators, variants
from flexc.errors import InputError, UnsupportedError
from flexc.transforms import Transformed
from tests.accuracy import normal, qkv

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, of functorch and of distributed tensors


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def weighted(weight, q, k, v, scale=None):
    kernel = flexc.attention(lambda s, b, h, i, j: s * weight[h] + 0.1 * b * j, causal)
    out, aux = kernel(q, k, v, scale=scale, return_lse=True)
    return out.sin().sum() + aux.lse.sum()


# --- torch.func --------------------------------------------------------------------------------------------------------------------------


def test_func_grad():
    q, k, v = qkv(q_len=20, grad=True)
    weight = normal(4, grad=True)
    expected = torch.autograd.grad(weighted(weight, q, k, v, -0.3), [weight, q, k, v])
    inputs = [x.detach() for x in (weight, q, k, v)]
    for found in (torch.func.grad, torch.func.jacrev):
        for ours, theirs in zip(found(weighted, argnums=(0, 1, 2, 3))(*inputs, -0.3), expected):
            assert theirs.any()
            close(ours, theirs)


def test_func_grad_of_a_capture_that_requires_none_by_itself():
    """What requires a gradient is the transform's knowledge, not the tensor's."""
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(lambda s, b, h, i, j: s * w[h])
    w = normal(4)
    kernel(q, k, v)
    (found,) = torch.func.vjp(lambda weight: flexc.attention(lambda s, b, h, i, j: s * weight[h])(q, k, v), w)[1](torch.ones_like(q))
    leaf = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(flexc.attention(lambda s, b, h, i, j: s * leaf[h])(q, k, v).sum(), [leaf])
    close(found, expected)


def test_func_grad_of_lse_alone_and_of_nothing():
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    found = torch.func.grad(lambda q: kernel(q, k, v, return_lse=True)[1].lse.exp().sum())(q)
    leaf = q.clone().requires_grad_()
    close(found, torch.autograd.grad(kernel(leaf, k, v, return_lse=True)[1].lse.exp().sum(), [leaf])[0])
    assert not torch.func.grad(lambda q: (kernel(q, k, v).detach() * q).sum() * 0)(q).any()


@pytest.mark.parametrize("reads_batch", [False, True])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 0, 2), (0, 4, None)])
def test_vmap(in_dims, reads_batch):
    """In one call with a larger batch, unless a problem knows its batch index."""
    one = qkv(q_len=12)
    inputs = [x if d is None else torch.stack([x, 2 * x, -x], dim=d) for x, d in zip(one, in_dims)]
    kernel = flexc.attention(lambda s, b, h, i, j: s + 0.1 * b * j if reads_batch else s * 0.5, causal)
    found = torch.func.vmap(lambda q, k, v: kernel(q, k, v), in_dims=in_dims)(*inputs)
    for index in range(3):
        close(found[index], kernel(*(x if d is None else x.select(d, index) for x, d in zip(inputs, in_dims))))


def test_vmap_is_one_launch_where_it_can_be(monkeypatch):
    from flexc.launch import Launch

    batches, forward = [], Launch.forward
    monkeypatch.setattr(Launch, "forward", lambda self, *args: batches.append(self.shapes.batch) or forward(self, *args))
    q, table = normal(5, 2, 4, 12, 8), normal(5, 4)
    weight = normal(4, grad=True)
    torch.func.vmap(lambda q: flexc.attention(lambda s, b, h, i, j: s * weight[h], causal)(q, q, q))(q)
    torch.func.vmap(lambda q, t: flexc.attention(lambda s, b, h, i, j: s * t[h])(q, q, q))(q, table)
    assert batches == [10, 2, 2, 2, 2, 2]


def test_vmap_of_a_captured_tensor_and_its_gradients_for_each_problem():
    q, k, v = qkv(q_len=12)
    weights = normal(3, 4)
    found = torch.func.vmap(torch.func.grad(weighted), in_dims=(0, None, None, None))(weights, q, k, v)
    for index in range(3):
        leaf = weights[index].clone().requires_grad_()
        close(found[index], torch.autograd.grad(weighted(leaf, q, k, v), [leaf])[0])
    queries = torch.stack([q, 2 * q, -q])  # one captured tensor, a gradient for each problem
    found = torch.func.vmap(torch.func.grad(weighted), in_dims=(None, 0, None, None))(weights[0], queries, k, v)
    leaf = weights[0].clone().requires_grad_()
    for index in range(3):
        close(found[index], torch.autograd.grad(weighted(leaf, queries[index], k, v), [leaf])[0])


def test_func_grad_around_vmap_over_a_captured_tensor():
    """Below vmap the tensor does not say that it requires a gradient."""
    q, k, v = qkv(q_len=12)
    weights = normal(3, 4)
    found = torch.func.grad(lambda w: torch.func.vmap(weighted, in_dims=(0, None, None, None))(w, q, k, v).sum())(weights)
    for index in range(3):
        leaf = weights[index].clone().requires_grad_()
        close(found[index], torch.autograd.grad(weighted(leaf, q, k, v), [leaf])[0])


def test_gradient_through_vmap():
    q, k, v = qkv(q_len=12)
    queries, weight = torch.stack([q, 2 * q]).requires_grad_(), normal(4, grad=True)
    found = torch.autograd.grad(torch.func.vmap(weighted, in_dims=(None, 0, None, None))(weight, queries, k, v).sum(), [queries, weight])
    expected = torch.autograd.grad(sum(weighted(weight, x, k, v) for x in queries), [queries, weight])
    for ours, theirs in zip(found, expected):
        close(ours, theirs)
    (found,) = torch.autograd.grad(torch.func.vmap(lambda q: flexc.attention(None, causal)(q, k, v))(queries).sin().sum(), [queries])
    (expected,) = torch.autograd.grad(sum(flexc.attention(None, causal)(x, k, v).sin().sum() for x in queries), [queries])
    close(found, expected)


def test_vmap_over_no_problems_is_refused():
    # PyTorch itself refuses a dimension of size 0 in some releases; the operator's rule is asked here.
    info = type("Info", (), {"batch_size": 0, "randomness": "error"})()
    with pytest.raises(UnsupportedError, match="vmap of flexc attention over no problems, on any backend: expected at least one"):
        Transformed.vmap(info, (None,) * 4 + (0, 0, 0), "", None, [], 0, *(torch.zeros(0, 1, 1, 1, 1),) * 3)


@pytest.mark.parametrize("is_compiled_gradient", [False, True])
def test_vmap_inside_torch_compile(is_compiled_gradient):
    torch._dynamo.reset()
    queries, weight = normal(3, 2, 4, 12, 8, grad=is_compiled_gradient), normal(4, grad=is_compiled_gradient)
    function = lambda q: torch.func.vmap(lambda q: flexc.attention(lambda s, b, h, i, j: s * weight[h], causal)(q, q, q))(q)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(queries)
    close(found, function(queries))
    if is_compiled_gradient:
        pairs = (torch.autograd.grad(x.sin().sum(), [queries, weight]) for x in (found, function(queries)))
        for ours, theirs in zip(*pairs):
            close(ours, theirs)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_func_grad_inside_torch_compile_is_refused(fullgraph):
    torch._dynamo.reset()
    q = qkv(q_len=8)[0]
    function = lambda q: torch.func.grad(lambda q: flexc.attention()(q, q, q).sum())(q)
    with pytest.raises(
        UnsupportedError, match="torch.func.grad and the like .* inside torch.compile: expected the transform in eager code"
    ):
        torch.compile(function, backend="eager", fullgraph=fullgraph)(q)


def test_second_derivative_is_refused():
    q, k, v = qkv(q_len=8, grad=True)
    weight = normal(4, grad=True)
    refused = pytest.raises(UnsupportedError, match="cannot be differentiated again, on any backend: .*use flexc.reference")
    plain = [x.detach() for x in (weight, q, k, v)]
    with refused:
        torch.func.grad(lambda q: torch.func.grad(weighted, argnums=1)(plain[0], q, *plain[2:]).square().sum())(plain[1])
    variant = variants.variant_of(kernel := flexc.attention(None, causal), flexc.frontend.trace(None, causal)[0])
    out, _ = operators.ATTENTION(q, k, v, [], variant.text, None, [], [])
    (first,) = torch.autograd.grad(out.sin().sum(), [q], create_graph=True)
    close(first, torch.autograd.grad(kernel(q, k, v).sin().sum(), [q])[0])
    with refused:
        first.square().sum().backward()


def test_forward_mode_is_refused():
    q, k, v = qkv(q_len=8)
    kernel = flexc.attention(None, causal)
    refused = pytest.raises(UnsupportedError, match="forward-mode derivatives .* of flexc attention, on any backend: expected reverse mode")
    with refused:
        torch.func.jvp(lambda q: kernel(q, k, v), (q,), (q,))
    with refused:
        torch.func.hessian(lambda q: kernel(q, k, v).sum())(q)
    with torch.autograd.forward_ad.dual_level(), refused:
        kernel(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("case", ["out", "lse"])
def test_gradcheck_of_the_operator(case):
    q, k, v = qkv(batch=1, heads=2, kv_heads=1, q_len=5, kv_len=6, dim=3, v_dim=2, dtype=torch.float64, grad=True)
    w, table = normal(2, dtype=torch.float64, grad=True), normal(12, seed=1, dtype=torch.float64, grad=True)
    score = lambda s, b, h, i, j: torch.tanh(s) * w[h] + table[i - j + 6] * s
    trace, _ = flexc.frontend.trace(score, causal)
    text = variants.variant_of(flexc.attention(score, causal), trace).text
    names = [spec.name for spec in trace.graph.tensors]

    def call(q, k, v, w, table):
        tensors = [{"w": w, "table": table}[name] for name in names]
        return operators.ATTENTION(q, k, v, tensors, text, -0.7, [], [])[case == "lse"]

    assert torch.autograd.gradcheck(call, (q, k, v, w, table))


# --- distributed tensors -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def spread(mesh, placement, *tensors):
    from torch.distributed.tensor import distribute_tensor

    return [distribute_tensor(x.detach(), mesh, [placement]).requires_grad_(x.requires_grad) for x in tensors]


def test_distributed_inputs(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    q, k, v = qkv(q_len=20, grad=True)
    kernel = flexc.attention(lambda s, b, h, i, j: s - 0.1 * h * j + b * i, causal)
    out, aux = kernel(q, k, v, return_lse=True)
    for placement in (Replicate(), Shard(0), Shard(1)):
        found, other = kernel(*spread(mesh, placement, q, k, v), return_lse=True)
        assert isinstance(found, DTensor) and found.placements == other.lse.placements == (placement,)
        assert found.full_tensor().equal(out) and other.lse.full_tensor().equal(aux.lse)
        _, largest = kernel(*spread(mesh, placement, q, k, v), return_max_scores=True)
        assert largest.max_scores.full_tensor().equal(kernel(q, k, v, return_max_scores=True)[1].max_scores)
    assert kernel.backend == "cpu"
    assert kernel(*spread(mesh, Shard(1), q, k, v), scale=-0.5).full_tensor().equal(kernel(q, k, v, scale=-0.5))


def test_distributed_inputs_that_do_not_fit_are_refused(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    with pytest.raises(UnsupportedError, match=r"q lies as .*2.*\(a query needs keys of other ranks\): expected Replicate\(\), Shard\(0\)"):
        kernel(*spread(mesh, Shard(2), q, k, v))
    with pytest.raises(UnsupportedError, match=r"\(a score needs all of head_dim\)"):
        kernel(*spread(mesh, Shard(3), q, k, v))
    with pytest.raises(UnsupportedError, match=r"v lies as .*\(the scores of a sum are not the sum of scores\)"):
        kernel(*spread(mesh, Replicate(), q, k), DTensor.from_local(v, mesh, [Partial()]))
    with pytest.raises(UnsupportedError, match=r"k lies as \[.*\] and q as \[.*\], on every backend: expected q, k and v to lie alike"):
        kernel(*spread(mesh, Shard(1), q), *spread(mesh, Replicate(), k, v))
    with pytest.raises(InputError, match="k is a plain tensor and not all of q, k and v are; expected three DTensors"):
        kernel(*spread(mesh, Shard(1), q), k, v)
    other = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1))
    with pytest.raises(InputError, match="v is on the mesh .* and q on .*: expected one mesh"):
        kernel(*spread(mesh, Replicate(), q, k), distribute_tensor(v, other, [Replicate()] * 2))
    run = torch.compile(lambda q, k, v: kernel(q, k, v), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="DTensors, which attention inside torch.compile does not take: .*x.to_local"):
        run(*spread(mesh, Shard(1), q, k, v))


def test_sink_of_distributed_inputs(mesh):
    from torch.distributed.tensor import Replicate, Shard

    q, k, v = qkv(q_len=20, grad=True)
    sink = torch.randn(4, requires_grad=True)
    kernel = flexc.attention(None, causal)
    out = kernel(q, k, v, sink=sink)
    expected = torch.autograd.grad(out.square().sum(), (q, sink))
    for placement, of_sink in ((Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(1), Shard(0))):
        inputs, (logits,) = spread(mesh, placement, q, k, v), spread(mesh, of_sink, sink)
        found = kernel(*inputs, sink=logits)
        torch.testing.assert_close(found.full_tensor(), out)
        for x, y in zip(torch.autograd.grad(found.full_tensor().square().sum(), (inputs[0], logits)), expected, strict=True):
            torch.testing.assert_close(x.full_tensor(), y)
    with pytest.raises(InputError, match=r"sink is a plain tensor and q is a DTensor; expected both alike: distribute_tensor\(sink, "):
        kernel(*inputs, sink=sink)
    with pytest.raises(InputError, match=r"sink is a DTensor and q is a plain tensor; .* or sink.full_tensor\(\)"):
        kernel(q, k, v, sink=logits)


def test_captured_tensors_of_distributed_inputs(mesh):
    from torch.distributed.tensor import Replicate, Shard

    q, k, v = qkv(q_len=20)
    weight = normal(4, grad=True)
    make = lambda w: flexc.attention(lambda s, b, h, i, j: s * w[h])
    (expected,) = torch.autograd.grad(make(weight)(q, k, v).sin().sum(), [weight])
    (shared,) = spread(mesh, Replicate(), weight)
    make(shared)(*spread(mesh, Shard(1), q, k, v)).sin().sum().backward()
    close(shared.grad.full_tensor(), expected)
    make(weight)(*spread(mesh, Replicate(), q, k, v)).sin().sum().backward()
    close(weight.grad, expected)
    with pytest.raises(
        UnsupportedError, match="captured tensor w requires a gradient and is a plain tensor, .*Expected a replicated DTensor"
    ):
        make(weight)(*spread(mesh, Shard(0), q, k, v))
    with pytest.raises(UnsupportedError, match=r"captured tensor w lies as .* expected it replicated on the mesh of q"):
        make(*spread(mesh, Shard(0), weight))(*spread(mesh, Shard(1), q, k, v))
    with pytest.raises(InputError, match=r"captured tensor w is a DTensor and q, k and v are plain tensors; expected .*w.full_tensor\(\)"):
        make(shared)(q, k, v)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.projection = torch.nn.Linear(16, 3 * 4 * 8)
        self.factor = torch.nn.Parameter(normal(4))
        self.attention = flexc.attention(self.score, flexc.masks.causal)

    def score(self, score, batch, head, q_idx, kv_idx):
        return score * self.factor[head]

    def forward(self, x):
        q, k, v = self.projection(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v)


def check_fully_sharded():
    from torch.distributed.fsdp import fully_shard

    plain, x = Layer(), normal(2, 20, 16)
    expected = plain(x)
    expected.sin().sum().backward()
    for is_compiled in (False, True):
        layer = fully_shard(Layer())
        out = (torch.compile(layer, backend="aot_eager") if is_compiled else layer)(x)
        close(out, expected)
        out.sin().sum().backward()
        close(layer.factor.grad.full_tensor(), plain.factor.grad)
        close(layer.projection.weight.grad.full_tensor(), plain.projection.weight.grad)


def test_fully_shard(mesh):
    check_fully_sharded()


def on_rank(rank, world, port):
    """What must hold in a world of several processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    q, k, v = qkv(batch=3, q_len=20, grad=True)
    weight, lengths = normal(4, grad=True), torch.tensor([20, 9, 4])
    make = lambda w: flexc.attention(lambda s, b, h, i, j: s * w[h] - 0.1 * h * (i - j), lambda b, h, i, j: j < lengths[b])
    out, aux = make(weight)(q, k, v, return_lse=True)
    gradients = torch.autograd.grad(out.sin().sum() + aux.lse.sum(), [q, k, v, weight])
    for placement in (Shard(0), Shard(1), Replicate()):  # three batch entries on two ranks: one has two, the other one
        inputs = spread(mesh, placement, q, k, v) + spread(mesh, Replicate(), weight)
        found, other = make(inputs[3])(*inputs[:3], return_lse=True)
        close(found.full_tensor(), out)
        close(other.lse.full_tensor(), aux.lse)
        (found.sin().sum() + other.lse.sum()).backward()
        for x, expected in zip(inputs, gradients):
            close(x.grad.full_tensor(), expected)
    with pytest.raises(
        UnsupportedError, match="6 query heads and 3 key heads over 2 ranks, on every backend: expected both to divide evenly"
    ):
        make(weight.detach())(*spread(mesh, Shard(1), *qkv(heads=6, kv_heads=3)))
    check_fully_sharded()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes():
    """Score and mask functions see the indices of the whole tensors; gradients of captured tensors are sums over the ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(on_rank, (2, free_port()), nprocs=2)
