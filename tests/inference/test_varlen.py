"""Packed sequences: against a run for each, on the CPU and on Triton's interpreter; nested tensors; and what is refused."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import flexc
from flexc import pipeline
from flexc.errors import InputError, ShapeError
from flexc.inference import varlen
from tests.inference import interpreted


@pytest.mark.parametrize("seed", range(30))
def test_packed_sequences_equal_separate_runs_on_the_cpu(seed):
    assert not interpreted.varlen(seed, "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(16))
def test_packed_sequences_equal_separate_runs_interpreted(worker, seed):
    assert not worker.submit(interpreted.varlen, seed).result(timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "seed"), [*(("triton", seed) for seed in range(8)), *(("cute", seed) for seed in range(4))])
def test_varlen_on_a_gpu(backend, seed):
    if backend == "cute" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    assert not interpreted.varlen(seed, backend, "cuda", torch.bfloat16)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def packed(*lengths, heads=2, dim=16, **options):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return *(torch.randn(sum(lengths), heads, dim, **options) for _ in range(3)), cu


def test_other_lengths_compile_nothing(monkeypatch):
    pipeline.clear_cache()
    compiled, compile_attention = [], pipeline.compile_attention
    monkeypatch.setattr(pipeline, "compile_attention", lambda *a, **k: compiled.append(a) or compile_attention(*a, **k))
    kernel = flexc.attention(mask_mod=causal)
    for lengths in ((3, 4, 40), (20, 20, 20), (1, 2, 3, 4, 50)):
        flexc.varlen_attention(*packed(*lengths), kernel=kernel)
    assert len(compiled) == 1


def test_boundaries_written_in_place_are_followed():
    q, k, v, cu = packed(10, 10)
    kernel = flexc.attention(mask_mod=causal)
    flexc.varlen_attention(q, k, v, cu, kernel=kernel)
    cu[1] = 4
    fresh = flexc.varlen_attention(q, k, v, cu.clone(), kernel=kernel)
    torch.testing.assert_close(flexc.varlen_attention(q, k, v, cu, kernel=kernel), fresh)


def test_boundaries_written_in_place_keep_nothing_of_before():
    """A server writes them at each step, with another number of tokens."""
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    for total in (9, 10, 11):
        cu[2] = total
        q = torch.randn(total, 2, 16)
        flexc.varlen_attention(q, q, q, cu, kernel=causal)
    assert len(varlen._kept[cu]) == 2, "of queries and of keys"


def test_blocks_of_two_sequences_are_skipped():
    kernel = flexc.attention(mask_mod=causal)
    flexc.varlen_attention(*packed(512, 512, 512), kernel=kernel)
    counts = kernel.blocks.counts()
    (block_q, block_kv), blocks = kernel.blocks.block, sum(counts.values())
    seen = 3 * sum(-(-(first + block_q) // block_kv) for first in range(0, 512, block_q))
    assert blocks - counts["empty"] == seen, kernel.blocks


def test_functions_are_taken_as_flexc_kernel_takes_them():
    q, k, v, cu = packed(5, 9)
    expected = flexc.varlen_attention(q, k, v, cu, kernel=flexc.attention(mask_mod=causal))
    torch.testing.assert_close(flexc.varlen_attention(q, k, v, cu, kernel=causal), expected)


def test_nested_tensors_bring_their_lengths():
    parts = [torch.randn(n, 2, 16) for n in (5, 0, 9)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out = flexc.varlen_attention(q, q, q, kernel=causal)
    flat, cu = q.values().detach(), q.offsets()
    torch.testing.assert_close(out.values(), flexc.varlen_attention(flat, flat, flat, cu, kernel=causal))
    out.values().sum().backward()
    assert q.grad is not None and q.grad.values().abs().sum() > 0


def test_eager_setting_sees_sequences(monkeypatch):
    given = packed(5, 9)
    kernel = flexc.attention(lambda s, b, h, i, j: s * (b + 1) - 0.1 * i, causal)
    expected = flexc.varlen_attention(*given, kernel=kernel)
    monkeypatch.setenv("FLEXC_EAGER", "1")
    torch.testing.assert_close(flexc.varlen_attention(*given, kernel=kernel), expected)


def test_watched_calls_see_sequences():
    q, k, v, cu = packed(5, 9)
    kernel = flexc.attention(mask_mod=causal)
    graph = make_fx(lambda q, k, v, cu: flexc.varlen_attention(q, k, v, cu, kernel=kernel))(q, k, v, cu)
    torch.testing.assert_close(graph(q, k, v, cu), flexc.varlen_attention(q, k, v, cu, kernel=kernel))


def test_compiled_regions_run_sequences_outside():
    q, k, v, cu = packed(5, 9)

    def step(q):
        return flexc.varlen_attention(q, k, v, cu, kernel=causal) * 2

    torch.testing.assert_close(torch.compile(step, backend="eager")(q), step(q))


def test_a_table_of_another_number_of_sequences_is_refused():
    table = torch.randn(3)
    with pytest.raises(ShapeError, match=r"table has 3 entries along dimension 0, which `batch` indexes; cu_seqlens_q and q have 2"):
        flexc.varlen_attention(*packed(5, 9), kernel=lambda s, b, h, i, j: s + table[b])


CU = torch.tensor([0, 5, 14], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens_q": None}, InputError, "cu_seqlens_q is missing; expected where each sequence begins"),
        ({"cu_seqlens_q": [0, 5, 14]}, InputError, r"cu_seqlens_q is a list; expected an int32 or int64 tensor \[B \+ 1\]"),
        ({"cu_seqlens_q": CU.float()}, InputError, "cu_seqlens_q has dtype torch.float32; expected int32 or int64: convert it"),
        ({"cu_seqlens_q": CU[None]}, ShapeError, r"cu_seqlens_q has shape \[1, 3\]; expected \[B \+ 1\]"),
        ({"cu_seqlens_k": CU[:2]}, ShapeError, "cu_seqlens_q has 2 sequences and cu_seqlens_k 1; expected equally many"),
        ({"cu_seqlens_k": CU.to("meta")}, InputError, "cu_seqlens_k is on meta and q on cpu: move it with"),
        ({"q": torch.randn(1, 14, 2, 16)}, ShapeError, r"q is \[1, 14, 2, 16\]; expected \[total, heads, head_dim\]"),
        ({"v": torch.randn(13, 2, 16)}, ShapeError, "k and v must have as many tokens, got 14 and 13"),
        ({"k": torch.randn(14, 3, 16), "v": torch.randn(14, 3, 16)}, ShapeError, "the heads of q must be a multiple of the heads of k"),
    ],
)
def test_bad_sequences_are_named(changes, error, message):
    q, k, v, _ = packed(5, 9)
    with pytest.raises(error, match=message):
        flexc.varlen_attention(**({"q": q, "k": k, "v": v, "cu_seqlens_q": CU} | changes))


def test_bad_nested_tensors_are_named():
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (5, 9)], layout=torch.jagged)
    with pytest.raises(InputError, match="cu_seqlens were given beside nested tensors"):
        flexc.varlen_attention(nested, nested, nested, CU)
    with pytest.raises(InputError, match="expected q, k and v to be jagged nested tensors .* got k of another kind"):
        flexc.varlen_attention(nested, torch.randn(14, 2, 16), nested)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([1, 5, 14], r"cu_seqlens_q\[0\] is 1; expected 0"),
        ([0, 9, 5], r"cu_seqlens_q\[2\] is 5 after 9; expected boundaries that do not fall"),
        ([0, -3, 5], r"cu_seqlens_q\[1\] is -3 after 0"),
        ([0, 5, 15], r"cu_seqlens_q\[-1\] is 15 and there are 14 tokens"),
    ],
)
def test_check_mode_reads_the_boundaries(boundaries, message, monkeypatch):
    monkeypatch.setenv("FLEXC_CHECK", "1")
    q, k, v, _ = packed(5, 9)
    with pytest.raises(InputError, match=message):
        flexc.varlen_attention(q, k, v, torch.tensor(boundaries, dtype=torch.int32))
