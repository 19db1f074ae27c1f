"""Looking inside: every stage as an attribute that prints, FLEXC_DUMP, FLEXC_OVERRIDE, FLEXC_EAGER, FLEXC_CHECK, other targets."""

import linecache
import re

import pytest
import torch

import flexc
from flexc import pipeline
from flexc.backends import Shapes
from flexc.errors import IndexRangeError, SettingError
from flexc.ir.text import parse_graph
from flexc.reference import reference
from tests.accuracy import normal, qkv

Q, K, V = qkv(q_len=40, dim=16)
STAGES = ["1-trace.ir", "2-passes.ir", "3-lowered.ir", "4-plan.txt", "5-kernel.py"]


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def capped(score, batch, head, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


# --- attributes ------------------------------------------------------------------------------------------------------------------------


def test_stages_are_attributes_that_print():
    kernel = flexc.attention(capped, causal)
    kernel(Q, K, V)
    assert parse_graph(str(kernel.graph)).score is kernel.graph.score
    assert kernel.graph.mask is not None and "tanh" in str(kernel.graph)
    assert "float32" in str(kernel.plan)
    assert "█" in str(kernel.blocks) or "▒" in str(kernel.blocks)
    assert (kernel.blocks.q_len, kernel.blocks.kv_len) == (40, 40)
    assert kernel.backend == "cpu" and kernel.reason == "the tensors are on the CPU: blockwise PyTorch"
    assert re.fullmatch(r"[0-9a-f]{64}", kernel.key)
    assert repr(kernel) == "<flexc kernel capped with mask causal>"
    artifact = kernel.artifact
    assert artifact.source == kernel.source and artifact.key == kernel.key and artifact.seconds > 0
    assert artifact.traced.mask is not None and artifact.lowered.get("dscore") is not None


def test_source_is_the_file_that_runs():
    kernel = flexc.attention(capped)
    kernel(Q, K, V)
    artifact = kernel.artifact
    assert artifact.path.read_text() == kernel.source
    assert artifact.module.forward.__code__.co_filename == str(artifact.path)
    assert linecache.getline(str(artifact.path), 1) == kernel.source.splitlines(keepends=True)[0]


def test_source_holds_the_users_lines_and_no_path():
    kernel = flexc.attention(capped, causal)
    kernel(Q, K, V)
    assert "tanh" in kernel.source and "test_pipeline.py:" in kernel.source
    assert __file__ not in kernel.source and "/tests/" not in kernel.source


def test_graph_needs_no_call():
    assert "tanh" in str(flexc.kernel(capped).graph)
    assert flexc.kernel(causal).graph.score is None


def test_backend_asked_for_is_the_reason():
    kernel = flexc.attention(capped, backend="cpu")
    kernel(Q, K, V)
    assert kernel.reason == "asked for by backend='cpu'"


def test_attributes_are_those_of_the_last_call():
    kernel = flexc.attention(capped)
    kernel(Q, K, V)
    first = kernel.key
    kernel(Q.half(), K.half(), V.half())
    assert kernel.key != first and kernel.plan.dtype == "float16"
    kernel(Q, K, V)
    assert kernel.key == first


def test_explain_does_not_count_as_a_run():
    kernel = flexc.attention(capped)
    kernel.explain(Q, K, V)
    with pytest.raises(flexc.FlexcError, match="has not run yet"):
        kernel.source  # noqa: B018


# --- FLEXC_DUMP, FLEXC_OVERRIDE -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dumped(monkeypatch, tmp_path):
    """A folder that FLEXC_DUMP wrote for `capped` with `causal`."""
    folder = tmp_path / "stages"
    monkeypatch.setenv("FLEXC_DUMP", str(folder))
    kernel = flexc.attention(capped, causal)
    kernel(Q, K, V)
    monkeypatch.delenv("FLEXC_DUMP")
    return folder


@pytest.mark.usefixtures("nodes_without_lines")
def test_dump_writes_every_stage(dumped):
    assert sorted(file.name for file in dumped.iterdir()) == STAGES
    kernel = flexc.attention(capped, causal)
    kernel(Q, K, V)
    artifact = kernel.artifact
    stages = (artifact.traced, artifact.graph, artifact.lowered, artifact.plan, artifact.source)
    for name, stage in zip(STAGES, stages):
        assert (dumped / name).read_text() == f"{str(stage).rstrip()}\n"
    for name in STAGES[:3]:
        parse_graph((dumped / name).read_text())
    compile((dumped / STAGES[4]).read_text(), "kernel", "exec")


def test_dump_asked_for_after_the_first_call_is_written(monkeypatch, tmp_path):
    kernel = flexc.attention(capped, causal)
    kernel(Q, K, V)
    monkeypatch.setenv("FLEXC_DUMP", str(tmp_path / "new" / "stages"))
    kernel(Q, K, V)
    assert sorted(file.name for file in (tmp_path / "new" / "stages").iterdir()) == STAGES


def test_override_runs_the_edited_kernel(monkeypatch, dumped):
    kernel = flexc.attention(capped, causal)
    before = kernel(Q, K, V)
    file = dumped / "5-kernel.py"
    text = file.read_text()
    assert "return out, lse" in text
    file.write_text(text.replace("return out, lse", "return out + 100, lse"))
    monkeypatch.setenv("FLEXC_OVERRIDE", str(dumped))
    torch.testing.assert_close(kernel(Q, K, V), before + 100)
    assert kernel.source == file.read_text() and kernel.artifact.path == file
    assert kernel.reason.endswith(f"; FLEXC_OVERRIDE replaces its source by {file}")
    monkeypatch.delenv("FLEXC_OVERRIDE")
    assert kernel(Q, K, V).equal(before)
    assert flexc.attention(capped, causal)(Q, K, V).equal(before)


def test_override_never_reaches_the_disk_cache(monkeypatch, dumped):
    file = dumped / "5-kernel.py"
    file.write_text(file.read_text().replace("return out, lse", "return out + 100, lse"))
    pipeline.clear_cache()
    monkeypatch.setenv("FLEXC_OVERRIDE", str(dumped))
    edited = flexc.attention(capped, causal)(Q, K, V)
    monkeypatch.delenv("FLEXC_OVERRIDE")
    pipeline.clear_cache()
    torch.testing.assert_close(flexc.attention(capped, causal)(Q, K, V) + 100, edited)


def test_override_without_a_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXC_OVERRIDE", str(tmp_path))
    with pytest.raises(SettingError, match=r"FLEXC_OVERRIDE: expected .*5-kernel.py, which FLEXC_DUMP writes"):
        flexc.attention(capped, causal)(Q, K, V)
    monkeypatch.setenv("FLEXC_OVERRIDE", str(tmp_path / "nowhere"))
    with pytest.raises(SettingError, match="FLEXC_OVERRIDE: expected a folder that exists"):
        flexc.attention(capped, causal)(Q, K, V)


# --- FLEXC_EAGER -----------------------------------------------------------------------------------------------------------------------


def test_eager_runs_the_users_function(monkeypatch, capsys):
    def printing(score, batch, head, q_idx, kv_idx):
        print("score", tuple(score.shape))
        return capped(score, batch, head, q_idx, kv_idx)

    monkeypatch.setenv("FLEXC_EAGER", "1")
    q = Q.clone().requires_grad_()
    kernel = flexc.attention(printing, causal)
    out, aux = kernel(q, K, V, scale=-0.3, return_lse=True)
    assert "score" in capsys.readouterr().out
    truth, lse = reference(capped, causal, Q, K, V, scale=-0.3)
    torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.lse.double(), lse, rtol=1e-4, atol=1e-5)
    assert aux.lse.dtype == torch.float32
    (aux.lse.sum() + out.sum()).backward()
    assert q.grad.any()
    with pytest.raises(flexc.FlexcError, match="has not run yet"):
        kernel.source  # noqa: B018


def test_eager_runs_what_cannot_be_traced(monkeypatch):
    def with_item(score, batch, head, q_idx, kv_idx):
        return score * (1 + score.sum().item() * 0)

    with pytest.raises(flexc.TraceError, match="item"):
        flexc.attention(with_item)(Q, K, V)
    monkeypatch.setenv("FLEXC_EAGER", "1")
    torch.testing.assert_close(flexc.attention(with_item)(Q, K, V).double(), reference(None, None, Q, K, V)[0], rtol=1e-4, atol=1e-5)


# --- FLEXC_CHECK -----------------------------------------------------------------------------------------------------------------------

SHORT = normal(25)
SHORT_IDS = torch.arange(25)


@pytest.fixture
def checking(monkeypatch):
    monkeypatch.setenv("FLEXC_CHECK", "1")


def test_index_out_of_range_names_the_expression_and_the_users_line(checking):
    def biased(score, batch, head, q_idx, kv_idx):
        return score + SHORT[kv_idx + 1]  # this line

    message = (
        r"(?s)index 25 of `kv_idx \+ 1` is out of range: expected -25 <= index < 25\n"
        r"  at test_pipeline.py:\d+: return score \+ SHORT\[kv_idx \+ 1\]  # this line\n"
        r"  why: `SHORT\[kv_idx \+ 1\]` reads dimension 0 of a tensor of shape \(25,\)\n"
        r"  instead: flexc.where\(index < 25, ..., 0\)"
    )
    with pytest.raises(IndexRangeError, match=message):
        flexc.kernel(biased)(Q, K, V)
    with pytest.raises(IndexError, match="out of range"):
        flexc.attention(None, lambda b, h, i, j: SHORT_IDS[i] == SHORT_IDS[j])(Q, K, V)


def test_index_that_is_not_needed_is_not_checked(checking):
    def guarded(score, batch, head, q_idx, kv_idx):
        return score + flexc.where(kv_idx < 25, SHORT[kv_idx], 0.0)

    def branch(score, batch, head, q_idx, kv_idx):
        return score + SHORT[kv_idx] if kv_idx < 25 else score

    def unguarded(score, batch, head, q_idx, kv_idx):
        return score + SHORT[kv_idx]

    def short(batch, head, q_idx, kv_idx):
        return kv_idx < 25

    def short_documents(batch, head, q_idx, kv_idx):
        return (q_idx < 25) & (kv_idx < 25) & (SHORT_IDS[q_idx] == SHORT_IDS[kv_idx])

    for score, mask in ((guarded, None), (guarded, causal), (branch, causal), (unguarded, short), (None, short_documents)):
        kernel = flexc.attention(score, mask)
        torch.testing.assert_close(kernel(Q, K, V).double(), reference(score, mask, Q, K, V)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(IndexRangeError, match="index 25 of `kv_idx`"):
        flexc.attention(unguarded, lambda b, h, i, j: j < 26)(Q, K, V)


def test_negative_index_counts_from_the_end_and_no_further(checking):
    table = normal(40)
    flexc.attention(lambda s, b, h, i, j: s + table[-1 - j])(Q, K, V)
    with pytest.raises(IndexRangeError, match="index -41 of"):
        flexc.attention(lambda s, b, h, i, j: s + table[-2 - j])(Q, K, V)


def test_index_past_the_end_reads_zero_without_the_check():
    def biased(score, batch, head, q_idx, kv_idx):
        return score + SHORT[kv_idx]

    padded = torch.cat([SHORT, torch.zeros(15)])
    truth, _ = reference(lambda s, b, h, i, j: s + padded[j], None, Q, K, V)
    torch.testing.assert_close(flexc.kernel(biased)(Q, K, V).double(), truth, rtol=1e-4, atol=1e-5)


def test_check_looks_at_every_slab_of_queries(checking, monkeypatch):
    import flexc.index_check as index_check

    monkeypatch.setattr(index_check, "_PAIRS_AT_ONCE", 2 * 4 * 40 * 7)  # seven queries at a time
    with pytest.raises(IndexRangeError, match="index 39 of `q_idx`"):
        flexc.attention(None, lambda b, h, i, j: TABLE_39[i] >= j)(Q, K, V)


TABLE_39 = torch.full((39,), 100)


# --- targets that are not in this machine -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_source_for_a_gpu_that_is_not_here(arch):
    target = flexc.Target.parse(arch)
    shapes = Shapes(1, 8, 2, 4096, 4096, 128, 128, torch.bfloat16)
    artifact = pipeline.compile_for(capped, causal, shapes=shapes, target=target, backend="triton")
    assert artifact.backend.name == "triton" and artifact.target == target and artifact.reason
    assert "def forward_kernel" in artifact.source and "test_pipeline.py:" in artifact.source
    again = pipeline.compile_for(capped, causal, shapes=shapes, target=target, backend="triton")
    assert again.source == artifact.source and again.key == artifact.key


def test_passes_and_tracing_take_milliseconds():
    """The promise is 30 ms on a quiet machine; a stage that grew by an order of magnitude is found on any."""
    pipeline.clear_cache()
    kernel = flexc.attention(lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0) - (i - j) * 0.1, causal)
    kernel(Q, K, V)
    assert kernel.artifact.seconds < 1.0
