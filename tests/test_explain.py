"""`kernel.explain`: its figures against counts by hand, and what it says of loads, copies and the backend."""

import math
import re

import pytest
import torch

import flexc
from flexc.backends import Options, Shapes
from flexc.explain import explain
from flexc.launch import Launch
from flexc.pipeline import compile_for
from tests.accuracy import normal, qkv


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_work_of_causal_attention_by_hand():
    """256 queries see 1 + 2 + … + 256 keys; each pair costs 2·D flops for the score and 2·Dv for the value."""
    q, k, v = qkv(batch=2, heads=4, kv_heads=2, q_len=256, dim=64, v_dim=32)
    found = flexc.attention(None, causal).explain(q, k, v)
    pairs = 2 * 4 * 256 * 257 // 2
    assert found.unmasked_share == pytest.approx(257 / 512)
    assert found.flops_forward == pairs * (2 * 64 + 2 * 32)
    # Backward: the score again, dP = dO·Vᵀ, dV, dQ, dK.
    assert found.flops_backward == pairs * (2 * 64 + 2 * 32 + 2 * 32 + 2 * 64 + 2 * 64)
    assert found.bytes_forward == 4 * (2 * 4 * 256 * (64 + 32) + 2 * 2 * 256 * (64 + 32)) + 4 * 2 * 4 * 256
    assert found.workspace_bytes == 2 * 4 * 2 * 4 * 256
    assert found.blocks.counts() == {"empty": 1, "partial": 2, "full": 1}
    assert found.roofline_ms is None and found.device == "CPU"


def test_work_without_a_mask():
    q, k, v = qkv(batch=1, heads=2, q_len=100, kv_len=50, dim=16, dtype=torch.float16)
    found = flexc.attention().explain(q, k, v)
    assert found.unmasked_share == 1.0 and found.flops_forward == 2 * 100 * 50 * 4 * 16
    assert found.bytes_forward == 2 * (2 * 100 * 32 + 2 * 50 * 32) + 4 * 2 * 100


def test_mask_of_each_head_counts_each_head():
    q, k, v = qkv(heads=4, q_len=64)
    found = flexc.attention(None, lambda b, h, i, j: (h == 0) & (i == j)).explain(q, k, v)
    assert found.unmasked_share == pytest.approx(64 / (4 * 64 * 64))


def test_page_of_a_variant():
    slopes, ids = normal(4), torch.arange(300) // 100

    def alibi(score, batch, head, q_idx, kv_idx):
        return score - slopes[head] * (q_idx - kv_idx)

    def packed(batch, head, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    q, k, v = qkv(q_len=300, dim=64)
    kernel = flexc.attention(alibi, packed)
    found = kernel.explain(q, k, v.transpose(2, 3).contiguous().transpose(2, 3))
    assert found.name == "alibi with mask packed"
    assert set(found.loads) == {("slopes", "head", "head"), ("ids", "q_idx", "query"), ("ids", "kv_idx", "key")}
    assert found.copied == ("v",)
    assert found.mathematics[0] == "score       0.125 · q·k"
    share = 3 * (100 * 101 / 2) / 300**2
    assert found.unmasked_share == pytest.approx(share)
    page = str(found)
    for text in (
        "alibi with mask packed\n",
        "allowed     ids[q_idx] = ids[kv_idx] ∧ q_idx ≥ kv_idx",
        f"allowed     {share:.2%} of all pairs",
        "loads       slopes[head] once for each head",
        "loads       ids[q_idx] once for each query",
        "loads       ids[kv_idx] once for each key",
        "copies      v: its last dimension is not contiguous",
        "backend     cpu: the tensors are on the CPU: blockwise PyTorch",
        "of 128x128 tokens",
    ):
        assert text in page, page
    assert "slopes[head]" in found.mathematics[1] and "q_idx" in found.mathematics[1]


@pytest.mark.parametrize(
    ("index", "rate"),
    [
        (lambda b, h, i, j: 0, "call"),
        (lambda b, h, i, j: h + b, "head"),
        (lambda b, h, i, j: i // 2, "query"),
        (lambda b, h, i, j: j + b, "key"),
        (lambda b, h, i, j: abs(i - j), "difference q_idx - kv_idx"),
        (lambda b, h, i, j: (i * j) % 7, "pair"),
    ],
)
def test_rate_of_a_load(index, rate):
    table = normal(200)
    found = flexc.attention(lambda s, b, h, i, j: s + table[index(b, h, i, j)]).explain(*qkv(q_len=60))
    assert [(name, at) for name, _, at in found.loads] == [("table", rate)]
    assert f"once for each {rate}" in str(found)


def test_given_scale_is_shown_as_given():
    """Also a negative one, for which kernels get -q."""
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    for scale in (-0.3, 0.0, 2):
        assert kernel.explain(q, k, v, scale=scale).mathematics[0] == f"score       {float(scale):.6g} · q·k"
    assert kernel.explain(q, k, v).mathematics[0] == f"score       {1 / math.sqrt(32):.6g} · q·k"
    assert kernel.explain(q, k, v).mathematics[1:] == ("logit       score", "allowed     q_idx ≥ kv_idx")


def test_explain_runs_no_kernel_and_shows_the_plan(monkeypatch):
    kernel = flexc.attention(None, causal)
    q, k, v = qkv(q_len=20)
    from flexc.launch import Launch

    monkeypatch.setattr(Launch, "forward", lambda *_: pytest.fail("explain ran the kernel"))
    found = kernel.explain(q, k, v)
    assert found.plan in "\n".join(line[2:] for line in str(found).splitlines()) and found.plan


def test_roofline_on_a_known_device():
    from flexc import pipeline
    from flexc.backends import Options, Shapes
    from flexc.explain import explain
    from flexc.launch import Launch
    from flexc.sparsity import classify

    target = flexc.Target.parse("sm_90")
    for length, head_dim in ((8192, 128), (16, 64)):
        shapes = Shapes(2, 16, 16, length, length, head_dim, head_dim, torch.bfloat16)
        artifact = pipeline.compile_for(None, causal, shapes=shapes, target=target)
        launch = Launch(artifact, shapes, 0.1, (), Options(), "causal")
        blocks = classify(artifact.graph, length, length, batch=2, heads=16)
        found = explain(launch, blocks, 0.1, [], "causal")
        pairs = 32 * length * (length + 1) / 2
        arithmetic = 4 * head_dim * pairs / (target.peak_tflops * 1e12) * 1e3
        traffic = (4 * 32 * length * head_dim * 2 + 4 * 32 * length) / (target.dram_gb_per_s * 1e9) * 1e3
        assert found.roofline_ms == pytest.approx(max(arithmetic, traffic))
        assert (arithmetic > traffic) == (length == 8192)
        assert f"{found.roofline_ms:.4f} ms forward on H200" in str(found)


# --- blocks ------------------------------------------------------------------------------------------------------------------------


def test_page_says_how_blocks_were_decided():
    q, k, v = qkv(q_len=1024)
    found = flexc.attention(None, causal).explain(q, k, v)
    proof = found.blocks.proof
    assert proof.bounds + proof.mixed + proof.sampled + proof.evaluated + proof.undecided == math.prod(found.blocks.shape)
    assert f"decided     {proof.bounds} by bounds" in str(found)
    assert found.certificate is None and "rewrite" not in str(found) and "fell back" not in str(found)


def test_page_names_what_stopped_a_proof_and_how_to_rewrite_it():
    def hidden(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((q_idx * 2 + kv_idx * 2) % 2 == 0)

    q, k, v = qkv(q_len=1024)
    found = flexc.attention(None, hidden).explain(q, k, v)
    assert found.blocks.proof.evaluated > 0 and found.certificate is not None and not found.certificate.wrong
    (stopper,) = found.certificate.stoppers
    page = str(found)
    assert f"{found.blocks.proof.evaluated} fell back to evaluation of all their pairs" in page
    assert f"  rewrite     `(q_idx * 2 + kv_idx * 2) % 2` at {stopper.where}:\n              {stopper.why}\n" in page
    assert stopper.where.startswith("test_explain.py:")


def test_page_says_when_blocks_are_loose(monkeypatch):
    """Past its limit, classification leaves blocks partial that nobody has looked at."""
    from flexc.sparsity import by_evaluation

    monkeypatch.setitem(by_evaluation._AUTO_PAIRS, "cpu", 0)
    q, k, v = qkv(q_len=1000)
    found = flexc.attention(None, lambda b, h, i, j: (i * 2 + j * 6) % 2 == 0).explain(q, k, v)
    undecided = math.prod(found.blocks.shape)
    assert found.blocks.proof.undecided == undecided
    assert f"{undecided} left partial, undecided" in str(found)
    full = (1000 // found.blocks.block[1]) * found.blocks.shape[2]  # a ragged last column is partial in truth
    assert f"loose       {full / undecided:.2%} of all blocks are called partial and are empty or full" in str(found)


def test_a_share_that_takes_long_to_count_is_an_estimate_and_says_so():
    def window(batch, head, q_idx, kv_idx):
        return 0 <= q_idx - kv_idx < 200

    q, k, v = qkv(batch=1, heads=1, kv_heads=1, q_len=65536, dim=16)
    found = flexc.attention(None, window).explain(q, k, v)
    assert found.blocks.counts()["partial"] > 512 and found.is_estimated
    pairs = sum(min(i + 1, 200) for i in range(65536))
    assert found.unmasked_share == pytest.approx(pairs / 65536**2, rel=0.05) and found.unmasked_share != pairs / 65536**2
    assert f"allowed     about {found.unmasked_share:.2%} of all pairs" in str(found) and "work        about" in str(found)
    few = flexc.attention(None, window).explain(*(x[:, :, :4096] for x in (q, k, v)))
    assert not few.is_estimated and "about" not in str(few)
    assert few.unmasked_share == sum(min(i + 1, 200) for i in range(4096)) / 4096**2


def test_gradients_and_the_memory_that_they_take():
    """float32 sums; deterministic ones are 32 integers of 64 bits for each element, but for what is only stored."""
    slopes, relative = normal(4, grad=True), normal(513, grad=True)
    pairs = normal(4, 256, 256, grad=True, dtype=torch.bfloat16)

    def learned(score, batch, head, q_idx, kv_idx):
        return score * slopes[head] + relative[q_idx - kv_idx + 256] + pairs[head, q_idx, kv_idx]

    shapes = Shapes(1, 4, 4, 256, 256, 64, 64, torch.float16)
    for deterministic, of_sum in ((False, 4), (True, 256)):
        options = Options(deterministic=deterministic)
        artifact = compile_for(learned, None, shapes=shapes, target=flexc.Target.parse("sm_90a"), backend="triton", options=options)
        launch = Launch(artifact, shapes, 0.125, (), options, "learned")
        tensors = [{"slopes": slopes, "relative": relative, "pairs": pairs}[t.name] for t in artifact.graph.tensors]
        found = explain(launch, flexc.block_map(causal, 256, 256), 0.125, [], "learned", tensors)
        assert found.workspace_bytes == 2 * 4 * 256 * 4 + of_sum * (4 + 513) + 4 * pairs.numel()
        assert {tensor: how for tensor, _, how in found.gradients} == {
            "slopes": "a sum for each head",
            "relative": "a sum for each difference q_idx - kv_idx, block by block",
            "pairs": "no two pairs of a head meet",
        }
        assert re.search(r"^  gradient    slopes\[head\]: a sum for each head$", str(found), re.MULTILINE)


def test_steps_of_the_score_have_derivative_0():
    def stepped(score, batch, head, q_idx, kv_idx):
        return torch.where(score > 0, torch.floor(score * 4) + score, score * (q_idx > 3))

    q, k, v = qkv(q_len=16)
    found = flexc.attention(stepped).explain(q, k, v)
    assert {expression for expression, _ in found.steps} == {"score > 0.0", "floor(4.0*score)"}
    assert re.search(r"^  derivative  0 through `floor\(4.0\*score\)` at test_explain\.py:\d+$", str(found), re.MULTILINE)
    assert not flexc.attention(lambda s, b, h, i, j: s - (i - j) // 2).explain(q, k, v).steps
