"""Paged caches: against the same tokens one after another, on the CPU and on Triton's interpreter, and what is refused."""

import re

import pytest
import torch

import flexc
from flexc import backends, frontend, pipeline
from flexc.backends import Options, Shapes
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.inference.places import Positions, packed
from flexc.target import Target
from tests.inference import interpreted


@pytest.mark.parametrize("seed", range(25))
def test_pages_equal_one_after_another_on_the_cpu(seed):
    assert not interpreted.paged(seed, "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(25))
def test_pages_equal_one_after_another_interpreted(worker, seed):
    assert not worker.submit(interpreted.paged, seed).result(timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_paged_on_a_gpu(seed):
    assert not interpreted.paged(seed, "triton", "cuda", torch.bfloat16)


def pages(count=6, page=4, heads=2, dim=16, **changes):
    given = {
        "k_pages": torch.randn(count, page, heads, dim),
        "v_pages": torch.randn(count, page, heads, dim),
        "page_table": torch.tensor([[3, 1, 0], [5, 2, 0]], dtype=torch.int32),
        "lengths": torch.tensor([7, 8], dtype=torch.int32),
    }
    return given | changes


def q_of(batch=2, heads=4, tokens=1, dim=16):
    return torch.randn(batch, heads, tokens, dim)


def test_chunks_of_a_prefill_equal_the_whole():
    kernel = flexc.attention(lambda s, b, h, i, j: s - 0.1 * (i - j), lambda b, h, i, j: (i >= j) & (i - j < 6))
    given = pages()
    q = q_of(tokens=7)
    whole = kernel(q, flexc.PagedKV(**(given | {"lengths": torch.tensor([7, 7], dtype=torch.int32)})))
    for start in (0, 3, 6):
        lengths = torch.tensor([start + 1, start + 1], dtype=torch.int32)
        chunk = kernel(q[:, :, start : start + 1], flexc.PagedKV(**(given | {"lengths": lengths})))
        torch.testing.assert_close(chunk, whole[:, :, start : start + 1])


def test_compiled_regions_read_pages_outside():
    kernel, cache, q = flexc.attention(), flexc.PagedKV(**pages()), q_of()
    torch.testing.assert_close(torch.compile(lambda q: kernel(q, cache), backend="eager")(q), kernel(q, cache))


def test_keys_of_a_page_are_read_in_16_bytes_and_ahead():
    trace, _ = Positions(kv_len=torch.zeros(2, dtype=torch.int32)).placed(*frontend.trace(None, None))
    for page in (16, 64):
        shapes = Shapes(4, 32, 8, 1, 8192, 128, 128, torch.bfloat16, page=page)
        target = Target.parse("sm_90a")
        artifact = pipeline.compile_attention(packed(trace.graph, 4), shapes, target, backends.DECODE, "", Options(), "a test")
        copies = re.findall(r"cp\.async\.\w+\.shared\.global[\w:.]* \[[^\]]*\], \[[^\]]*\], (0x10|16)", artifact.ptx())
        assert len(copies) >= 4 * 16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": ["NHD"]}, InputError, r"unknown layout \['NHD'\]"),
        ({"k_pages": pages()["k_pages"].to_sparse()}, InputError, r"k_pages has layout torch.sparse_coo; .*k_pages.to_dense\(\)"),
        ({"layout": "NDH"}, InputError, 'unknown layout \'NDH\': expected "NHD" or "HND"'),
        ({"lengths": [7, 8]}, InputError, "lengths is a list; expected a torch.Tensor"),
        ({"lengths": torch.tensor([7, 8])}, InputError, r"lengths has dtype torch.int64; expected int32: convert it"),
        ({"lengths": torch.tensor([7], dtype=torch.int32)}, ShapeError, "page_table has 2 rows and lengths 1"),
        ({"page_table": torch.zeros(2, dtype=torch.int32)}, ShapeError, r"page_table has shape \[2\]; expected 2 dimensions"),
        ({"v_pages": torch.randn(6, 4, 1, 16)}, ShapeError, "expected one dtype and all but the last size alike"),
        (
            {"k_pages": torch.randn(6, 257, 2, 16), "v_pages": torch.randn(6, 257, 2, 16)},
            ShapeError,
            "a page of 257 tokens; expected 1 to 256",
        ),
        ({"lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, InputError, "lengths is on meta and k_pages on cpu"),
        ({"page_table": torch.zeros(2, 2**23, dtype=torch.int32)}, UnsupportedError, "expected at most 16777215 tokens of a sequence"),
    ],
)
def test_bad_caches_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        flexc.PagedKV(**pages(**changes))


@pytest.mark.parametrize(
    ("q", "options", "error", "message"),
    [
        (q_of(dim=8), {}, ShapeError, "q and k must have one head_dim, got 8 and 16"),
        (q_of(batch=3), {}, ShapeError, "q has batch size 3 and the cache 2 sequences"),
        (q_of(heads=3), {}, ShapeError, "the heads of q must be a multiple of those of the cache, and not 0, got 3 and 2"),
        (q_of().half(), {}, InputError, "q is torch.float16 on cpu and the cache torch.float32 on cpu"),
        (q_of()[0], {}, ShapeError, r"q is \[4, 1, 16\]; expected \[batch, heads, tokens, head_dim\]"),
        (q_of().requires_grad_(), {}, UnsupportedError, "a gradient through a paged cache, on every backend: call the kernel under"),
        (q_of(), {"kv_len": 3}, InputError, "kv_len was given beside a PagedKV"),
        (q_of(), {"v": q_of()}, InputError, "v was given beside a PagedKV"),
        (q_of(), {"return_max_scores": True}, UnsupportedError, "return_max_scores on a paged cache or one of eight bits"),
    ],
)
def test_bad_calls_are_named(q, options, error, message):
    with pytest.raises(error, match=message):
        flexc.attention()(q, flexc.PagedKV(**pages()), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": torch.tensor([7, 13], dtype=torch.int32)}, r"lengths\[1\] is 13; expected 0 to 12"),
        ({"lengths": torch.tensor([-1, 3], dtype=torch.int32)}, r"lengths\[0\] is -1"),
        ({"page_table": torch.tensor([[0, 1, 9], [5, 6, 0]], dtype=torch.int32)}, r"page_table\[1, 1\] is 6; expected a page from 0 to 5"),
    ],
)
@pytest.mark.parametrize("check", ["0", "1"])
def test_pages_and_lengths_that_cannot_be(changes, message, check, monkeypatch):
    """On the CPU, where looking waits for nothing, they are refused without FLEXC_CHECK=1, too."""
    monkeypatch.setenv("FLEXC_CHECK", check)
    with pytest.raises(InputError, match=message):
        flexc.attention()(q_of(), flexc.PagedKV(**pages(**changes)))
