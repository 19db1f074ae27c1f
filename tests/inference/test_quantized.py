"""Caches of eight bits: against what their numbers mean, on the CPU and on Triton's interpreter, and what is refused."""

import re

import numpy as np
import pytest
import torch

import flexc
from flexc import backends, frontend, pipeline
from flexc.backends import Options, Shapes
from flexc.codegen.triton import Tile
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.inference import places
from flexc.target import Target
from tests.inference import interpreted


@pytest.mark.parametrize("seed", range(24))
def test_eight_bits_give_what_they_mean_on_the_cpu(seed):
    assert not interpreted.quantized(seed, "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(24))
def test_eight_bits_give_what_they_mean_interpreted(worker, seed):
    assert not worker.submit(interpreted.quantized, seed).result(timeout=300)


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(8))
def test_eight_bits_and_bfloat16_queries_interpreted(worker, seed):
    """Their products are of float16, which the interpreter computes."""
    assert not worker.submit(interpreted.quantized, seed, dtype=torch.bfloat16).result(timeout=300)


@pytest.mark.interpret
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("eight", [torch.float8_e4m3fn, torch.int8])
def test_queries_of_any_size_interpreted(worker, eight, of_tokens):
    assert not worker.submit(interpreted.queries_of_any_size, eight, of_tokens).result(timeout=300)


@pytest.mark.interpret
def test_rows_at_odd_addresses_interpreted(worker):
    assert not worker.submit(interpreted.rows_at_odd_addresses).result(timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("eight", [torch.float8_e4m3fn, torch.int8])
def test_queries_of_any_size_on_a_gpu(eight, of_tokens):
    assert not interpreted.queries_of_any_size(eight, of_tokens, "triton", "cuda")


# --- what the interpreter does not run: instructions that take numbers of eight bits out of pairs ----------------------------------------


def artifact_of(cache, arch="sm_90a", **changes):
    sizes = {"head_dim": 128, "head_dim_v": 128, "dtype": torch.bfloat16, "cache": cache} | changes
    shapes = Shapes(16, 8, 8, 4, 8192, **sizes)
    graph = places.packed(frontend.trace()[0].graph, 4)
    return pipeline.compile_attention(graph, shapes, Target.parse(arch), backends.DECODE, "asked for", Options(), "decoding")


def carried_out(text, pairs):
    """float16 [n, 2]: what instructions of PTX make of registers that hold two numbers of sixteen bits each; those that are used here."""
    values = {"$1": pairs, "0": np.zeros_like(pairs)}
    for line in text.strip("{} ").split("; "):
        name, rest = line.strip("; ").split(" ", 1)
        if name == ".reg":
            continue
        into, *given = re.findall(r"\{.*?\}|[$\w]+", rest)
        read = [values[x] if x in values else np.uint32(int(x, 0)) for x in given]
        if name == "prmt.b32":
            source = np.stack([x >> np.uint32(8 * i) & 255 for x in read[:2] for i in range(4)])
            values[into] = sum(source[int(read[2]) >> 4 * i & 7].astype(np.uint32) << np.uint32(8 * i) for i in range(4))
        elif name == "mov.b32" and into.startswith("{"):
            for half, register in enumerate(re.findall(r"\w+", into)):
                values[register] = (read[0] >> np.uint32(16 * half) & 0xFFFF).astype(np.uint32)
        elif name == "mov.b32":
            values[into] = read[0]
        elif name == "xor.b32":
            values[into] = read[0] ^ read[1]
        elif name == "lop3.b32":
            assert read[3] == 0xF0 & 0xCC ^ 0xAA
            values[into] = read[0] & read[1] ^ read[2]
        elif name == "sub.f16x2":
            values[into] = (halves(read[0]) - halves(np.broadcast_to(read[1], pairs.shape))).view(np.uint32)[:, 0]
        else:
            assert name == "cvt.rn.f16x2.e4m3x2", name
            bytes_ = torch.from_numpy(np.stack([read[0] & 255, read[0] >> 8], 1).astype(np.uint8))
            values[into] = bytes_.view(torch.float8_e4m3fn).half().numpy().view(np.uint32)[:, 0]
    return halves(values["$0"])


def halves(registers):
    return np.ascontiguousarray(registers, dtype=np.uint32).view(np.float16).reshape(-1, 2)


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8"])
def test_instructions_take_every_number_out_of_its_pair(cache):
    low, high = np.meshgrid(np.arange(256), np.arange(256))
    each = np.stack([low.ravel(), high.ravel()], 1).astype(np.uint8)
    each = np.concatenate([each, each[::-1]], 1)  # [65536, 4]: all first pairs, and others behind them
    expected = torch.from_numpy(each).view(getattr(torch, cache)).half().numpy()
    texts = re.findall(r'asm: tl\.constexpr = "(.*)"', artifact_of(cache).source)
    assert len(texts) == 2
    for text, numbers in zip(texts, (expected[:, ::2], expected[:, 1::2])):
        np.testing.assert_array_equal(carried_out(text, each.view(np.uint32)[:, 0]), numbers)


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8"])
def test_pairs_reach_products_by_matrix_loads(cache):
    """One by one they would be three times as many loads from shared memory. And no copy into it is of less than 16 bytes."""
    artifact = artifact_of(cache)
    assert artifact.plan.pairs and artifact.plan.forward == Tile(16, 128, 4, 4)
    ptx = artifact.ptx()
    assert len(re.findall(r"ldmatrix\S*x4\.trans", ptx)) == len(re.findall(r"ldmatrix\S*x4\.shared", ptx)) == 2 * 16, "of two loops"
    assert not re.search(r"ld\.shared\.[bu]8", ptx)
    assert set(re.findall(r"cp\.async\.\w+\.shared\.global[\w:.]* \[[^\]]*\], \[[^\]]*\], (\w+)", ptx)) <= {"0x10", "16"}
    (spilled,) = re.findall(r"split_kernel +\d+ +(\d+) ", artifact.resources())
    assert int(spilled) <= 32


@pytest.mark.parametrize(("dims", "pairs"), [((128, 128), True), ((64, 96), True), ((63, 64), False), ((64, 63), False)])
def test_an_odd_head_dim_is_read_one_by_one(dims, pairs):
    plan = artifact_of("int8", head_dim=dims[0], head_dim_v=dims[1]).plan
    assert plan.pairs == pairs
    for parts, dim in ((plan.parts, dims[0]), (plan.parts_v, dims[1])):
        read = sorted(part.first + i * part.step for part in parts for i in range(part.width))
        assert read[:dim] == list(range(dim)), "each number once"


def test_float8_is_refused_where_nothing_converts_it():
    with pytest.raises(UnsupportedError, match="float8_e4m3fn on sm_80: expected sm_89 or later, or int8"):
        artifact_of("float8_e4m3fn", "sm_80")
    assert artifact_of("int8", "sm_80").plan.pairs


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
