"""Block maps on a GPU: no call waits for the device, and a CUDA graph follows documents, lengths and numbers that change."""

from __future__ import annotations

import contextlib

import pytest
import torch

import flexc
from flexc.launch import MAPS

pytestmark = pytest.mark.gpu

TOKENS = 1000


@pytest.fixture(autouse=True)
def no_maps():
    MAPS.clear()


@contextlib.contextmanager
def no_waiting():
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Captured:
    """What the mask reads, and other contents of it, already on the device."""

    def __init__(self):
        with torch.device("cuda"):
            self.documents = torch.arange(TOKENS, dtype=torch.int32) // 130
            self.lengths = torch.tensor([TOKENS, 700], dtype=torch.int32)
            self.width = torch.tensor(300)
            self.others = [
                (torch.arange(TOKENS, dtype=torch.int32) // 370, torch.tensor([900, 1000], dtype=torch.int32), torch.tensor(90)),
                (torch.arange(TOKENS, dtype=torch.int32) // 61, torch.tensor([1, 333], dtype=torch.int32), torch.tensor(1000)),
            ]

    def change(self, nth: int) -> None:
        for tensor, other in zip((self.documents, self.lengths, self.width), self.others[nth], strict=True):
            tensor.copy_(other)

    def mask(self, batch, head, q_idx, kv_idx):
        same = self.documents[q_idx] == self.documents[kv_idx]
        return same & (q_idx >= kv_idx) & (q_idx - kv_idx < self.width) & (kv_idx < self.lengths[batch])


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((2, 4, TOKENS, 64), (2, 2, TOKENS, 64), (2, 2, TOKENS, 64))
    return [torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes]


def is_right(kernel, qkv, found) -> None:
    """Output and gradients of the sum of squares agree with the reference for the captured tensors as they are."""
    out = flexc.reference(None, kernel.mask_mod, *qkv)[0]
    expected = (out, *torch.autograd.grad(out.square().sum(), qkv))
    for ours, truth in zip(found, expected):
        assert (ours.double() - truth.double()).abs().max() <= 0.03 * max(1.0, truth.abs().max().item())


@pytest.fixture(params=["triton", "cute"])
def backend(request):
    if request.param == "cute":
        pytest.importorskip("cutlass")
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU")
    return request.param


def test_no_call_waits_for_the_device(backend):
    captured, qkv = Captured(), inputs()
    kernel = flexc.attention(None, captured.mask, backend=backend)

    def step():
        out = kernel(*qkv)
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    step()
    for nth in (0, 1):
        with no_waiting():
            captured.change(nth)
            found = step()
        is_right(kernel, qkv, found)


def test_other_lengths_wait_for_nothing():
    captured = Captured()
    kernel = flexc.attention(None, captured.mask, backend="triton")
    qkv = inputs()
    kernel(*qkv)
    with no_waiting():
        out = kernel(*(x[:, :, :777].contiguous() for x in qkv))
    truth = flexc.reference(None, captured.mask, *(x[:, :, :777] for x in qkv))[0]
    assert (out.double() - truth.double()).abs().max() <= 0.03


def test_a_block_map_waits_until_it_is_looked_at():
    captured, width = Captured(), torch.tensor(200)

    def mask(batch, head, q_idx, kv_idx):
        return captured.mask(batch, head, q_idx, kv_idx) & (q_idx - kv_idx < width)  # a number on the CPU

    flexc.block_map(mask, TOKENS, TOKENS, batch=2, block=64, device="cuda").column_walk()
    with no_waiting():
        captured.change(0)
        width.fill_(77)
        blocks = flexc.block_map(mask, TOKENS, TOKENS, batch=2, block=64, device="cuda")
        blocks.row_walk(), blocks.column_walk()
    assert not blocks.waited
    certificate = blocks.certify()
    assert certificate.is_complete and not certificate.wrong and not certificate.loose
    assert "decided: " in str(blocks) and blocks.counts()["full"] + blocks.counts()["partial"] < 2 * 16 * 16


def test_a_cuda_graph_follows_what_the_mask_reads(backend):
    captured, qkv = Captured(), inputs()
    kernel = flexc.attention(None, captured.mask, backend=backend)

    def step():
        out = kernel(*qkv)
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(), step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for nth in (0, 1):
        captured.change(nth)
        graph.replay()
        is_right(kernel, qkv, found)
    # What the graph wrote is no one else's.
    is_right(kernel, qkv, step())


def test_a_cuda_graph_keeps_the_map_of_a_mask_that_reads_nothing():
    """The map was made before the capture, and would be dropped when others come."""
    qkv = inputs()
    kernel = flexc.attention(None, lambda b, h, i, j: (i >= j) & (i - j < 222), backend="triton")

    def step():
        out = kernel(*qkv)
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    MAPS.clear()
    rubbish = [torch.full((2**16,), -1, device="cuda", dtype=torch.int32) for _ in range(64)]
    graph.replay()
    is_right(kernel, qkv, found)
    del rubbish


def test_a_first_call_inside_a_capture_leaves_nothing_unwritten_behind():
    """What a capture records has not run: a call outside must not walk it."""
    qkv = inputs()
    mask = flexc.mask(lambda b, h, i, j: (i >= j) & (i - j < 333))
    kernel = flexc.attention(None, mask, backend="triton")
    kernel(*qkv)  # compiles
    MAPS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(*qkv)
    out = kernel(*qkv)
    graph.replay()
    truth = flexc.reference(None, mask, *qkv)[0]
    for found in (out, captured):
        assert (found.double() - truth.double()).abs().max() <= 0.03


def test_two_streams_have_maps_of_their_own():
    captured, qkv = Captured(), inputs()
    kernel = flexc.attention(None, captured.mask, backend="triton")
    truth = flexc.reference(None, captured.mask, *qkv)[0]
    kernel(*qkv)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = kernel(*qkv)
    side.synchronize()
    assert (out.double() - truth.double()).abs().max() <= 0.03
    assert len({key[1] for key in MAPS._kept}) == 2


def test_after_a_warm_up_no_map_is_compiled(monkeypatch, tmp_path):
    """Binaries are found by what Triton sees of arguments: a warm-up without tensors must show it the same."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "flexc"))
    captured = Captured()
    kernel = flexc.attention(None, captured.mask, backend="triton")
    kernel.warmup({"batch": 2, "heads": 4, "heads_kv": 2, "q_len": TOKENS, "head_dim": 64, "device": "cuda"}, processes=4)
    monkeypatch.setenv("FLEXC_NO_COMPILE", "1")
    qkv = inputs()
    out = kernel(*qkv)
    out.square().sum().backward()
    captured.change(0)
    is_right(kernel, qkv, (kernel(*qkv),))
