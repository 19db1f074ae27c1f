"""Who allocates what is kept; whether PyTorch is content with it shows tests/test_cuda_graphs.py on a GPU."""

import contextlib
import sys
import threading
import types

import pytest
import torch

import flexc
from flexc import launch
from flexc.runtime.graph_pools import outside_of_pools

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Streams of a GPU that is not there; the streams that were made current."""
    entered = []

    @contextlib.contextmanager
    def current(stream):
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream of the caller")
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return entered


def test_another_thread_makes_it_where_graphs_may_own_the_memory(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", types.ModuleType("trees"))
    made = outside_of_pools(lambda: (threading.current_thread(), torch.is_grad_enabled()), CUDA)
    assert made[0] is not threading.current_thread() and not made[1] and gpu == ["the stream of the caller"]
    with pytest.raises(KeyError, match="as it was raised"):
        outside_of_pools(lambda: {}["as it was raised"], CUDA)


def test_this_thread_makes_it_elsewhere(gpu, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert outside_of_pools(threading.current_thread, CUDA) is threading.current_thread()
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", types.ModuleType("trees"))
    assert outside_of_pools(threading.current_thread, torch.device("cpu")) is threading.current_thread()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert outside_of_pools(threading.current_thread, CUDA) is threading.current_thread() and not gpu


def test_maps_that_are_kept_start_no_thread(monkeypatch):
    """A thread takes longer than a launch: only what is made anew is made in one."""
    made = []

    def counted(make, device):
        made.append(device)
        return make()

    monkeypatch.setattr(launch, "outside_of_pools", counted)
    ids = torch.arange(64) // 20

    def documents(b, h, q, k):
        return ids[q] == ids[k]

    kernel, q = flexc.attention(None, documents), torch.randn(1, 2, 64, 16)
    for _ in range(3):
        kernel(q, q, q)
    assert len(made) == 1
    ids[30:] += 1
    kernel(q, q, q)
    assert len(made) == 2
