"""Caches of eight bits: against what their numbers mean, on the CPU and on Triton's interpreter, and what is refused."""

import pytest
import torch

import flexc
from flexc.errors import InputError, ShapeError, UnsupportedError
from tests.inference import interpreted


@pytest.mark.parametrize("seed", range(24))
def test_eight_bits_give_what_they_mean_on_the_cpu(seed):
    assert not interpreted.quantized(seed, "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(24))
def test_eight_bits_give_what_they_mean_interpreted(worker, seed):
    assert not worker.submit(interpreted.quantized, seed).result(timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eight_bits_give_what_they_mean_on_a_gpu(seed, dtype):
    assert not interpreted.quantized(seed, "triton", "cuda", dtype)


def cache(**changes):
    given = {"q": torch.randn(2, 4, 1, 16), "k": torch.ones(2, 2, 9, 16), "v": torch.ones(2, 2, 9, 16)}
    given["k"], given["v"] = given["k"].to(torch.int8), given["v"].to(torch.int8)
    return given | changes


def test_no_scale_is_one():
    given = cache()
    whole = given | {"k": given["k"].float(), "v": given["v"].float()}
    torch.testing.assert_close(flexc.attention()(**given), flexc.attention()(**whole))


def test_a_number_of_keys_cuts_their_scales_too():
    given = cache(k_scale=torch.rand(2, 2, 9), v_scale=torch.rand(2, 2, 9))
    cut = {name: x if name == "q" else x[:, :, :5] for name, x in given.items()}
    torch.testing.assert_close(flexc.attention()(**given, kv_len=5), flexc.attention()(**cut))


def test_compiled_regions_read_eight_bits_outside():
    kernel, given = flexc.attention(), cache(k_scale=torch.rand(2))
    q = given.pop("q")
    torch.testing.assert_close(torch.compile(lambda q: kernel(q, **given), backend="eager")(q), kernel(q, **given))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k_scale": 2.0}, InputError, "k_scale is a float; expected a float32 tensor"),
        ({"v_scale": torch.ones(2).half()}, InputError, "v_scale has dtype torch.float16; expected float32: convert it"),
        ({"v_scale": torch.ones(2, device="meta")}, InputError, "v_scale is on meta and what it scales on cpu"),
        ({"k_scale": torch.ones(3)}, ShapeError, r"k_scale has shape \[3\]; expected \[\], \[2\] \(heads\) or \[2, 2, 9\]"),
        ({"k_scale": torch.ones(2, 9, 2)}, ShapeError, r"k_scale has shape \[2, 9, 2\]; expected"),
        ({"v": torch.ones(2, 2, 9, 16)}, ShapeError, "expected one dtype and device"),
        (
            {"k": torch.ones(2, 2, 9, 16), "v": torch.ones(2, 2, 9, 16), "k_scale": torch.ones(())},
            InputError,
            "k_scale was given, and keys are",
        ),
        ({"q": torch.ones(2, 4, 1, 16, dtype=torch.int8)}, InputError, "q has dtype torch.int8; expected float16 or bfloat16: convert it"),
        (
            {"q": torch.randn(2, 4, 1, 16, requires_grad=True)},
            UnsupportedError,
            "a gradient through a cache of eight bits, on every backend",
        ),
        ({"return_max_scores": True}, UnsupportedError, "return_max_scores on a paged cache or one of eight bits"),
    ],
)
def test_bad_scales_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        flexc.attention()(**cache(**changes))


def test_pages_name_bad_scales_when_they_are_made():
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    pages = torch.ones(3, 4, 2, 16).to(torch.int8)
    with pytest.raises(ShapeError, match=r"k_scale has shape \[3, 2, 4\]; expected \[\], \[2\] \(heads\) or \[3, 4, 2\]"):
        flexc.PagedKV(pages, pages, table, lengths, k_scale=torch.ones(3, 2, 4))
    with pytest.raises(InputError, match="v_scale was given beside a PagedKV, which has its own"):
        flexc.attention()(torch.randn(2, 2, 1, 16), flexc.PagedKV(pages, pages, table, lengths), v_scale=torch.ones(()))
