"""How the text of a module adds up gradients of captured tensors: where, how often, into which buffer."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from flexc.codegen.triton import gradient_bytes
from flexc.codegen.triton.gradients import BINS
from flexc.codegen.triton.tiles import smem_bytes
from tests.codegen.triton.texts import HOPPER, function, loop, lowered, planned, text_of

RELATIVE, PAIRS, HEAD_PAIRS = (torch.zeros(shape, requires_grad=True) for shape in ((256,), (64, 64), (4, 64, 64)))
ALL_PAIRS = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
HALF = torch.zeros(4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
SLOPES, SUMS = torch.ones(4, requires_grad=True), torch.zeros(128, requires_grad=True)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def relative(score, batch, head, q_idx, kv_idx):
    return score + RELATIVE[q_idx - kv_idx + 64]


def pairs(score, batch, head, q_idx, kv_idx):
    return score + PAIRS[q_idx, kv_idx]


def pairs_of_heads(score, batch, head, q_idx, kv_idx):
    return score + HEAD_PAIRS[head, q_idx, kv_idx]


def pairs_of_all(score, batch, head, q_idx, kv_idx):
    return score + ALL_PAIRS[batch, head, q_idx, kv_idx]


def additions(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.search(r"tl\.atomic_add\(|deposit\(", line) and "def " not in line]


@pytest.mark.parametrize("which", ["partial", "full"])
def test_a_relative_bias_is_added_once_for_each_diagonal_of_a_square(which):
    body = loop(text_of(relative, causal), "dq_kernel", which)
    added = additions(body)
    assert len(added) == 2 and all("[:, None]" not in line and "[None, :]" not in line for line in added), "vectors, not tiles"
    assert "diagonal_sums(u_RELATIVE_grad0_part, 64, 64, 32)" in body
    assert body.count("(diagonal < q_len) & (diagonal > -kv_len)") == 2 and all(
        ", counts" in line or "mask=counts" in line for line in added
    )
    assert not additions(function(text_of(relative, causal), "dkv_kernel"))


def test_a_bias_of_all_pairs_is_stored_in_its_own_dtype():
    text = text_of(pairs_of_all, causal)
    assert "atomic_add" not in text and "for member" not in function(text, "dq_kernel")
    body = loop(text, "dq_kernel", "full")
    assert re.search(r"tl\.store\(u_ALL_PAIRS_grad0_ptr .*u_ALL_PAIRS_grad0_part\.to\(tl\.bfloat16\), mask=stored", body)
    host = function(text, "backward")
    assert "u_ALL_PAIRS_grad0 = torch.zeros(tensors[0].shape, dtype=torch.bfloat16" in host
    assert "dq_kernel[(tiles * batch * heads,)](" in host and "return dq, dk, dv, (u_ALL_PAIRS_grad0,)" in host


def test_batch_elements_that_share_a_bias_take_turns():
    text = text_of(pairs_of_heads, causal)
    kernel = function(text, "dq_kernel")
    assert "for member in range(members):" in kernel and "entry = own_entry + member * heads" in kernel
    assert kernel.rstrip().splitlines()[-1].strip().startswith("tl.debug_barrier()")
    lines = [line.strip() for line in loop(text, "dq_kernel", "full").splitlines()]
    stored = lines[lines.index("if in_turn:") :]
    assert re.match(r"u_HEAD_PAIRS_grad0_part \+= tl\.load\(u_HEAD_PAIRS_grad0_ptr ", stored[1])
    assert re.match(r"tl\.store\(u_HEAD_PAIRS_grad0_ptr .*, u_HEAD_PAIRS_grad0_part, mask=", stored[2])
    assert stored[3] == "else:" and re.match(r"tl\.atomic_add\(u_HEAD_PAIRS_grad0_ptr .* & \(p > 0\), sem", stored[4])
    host = function(text, "backward")
    assert "entries = heads  #" in host and "in_turn = tiles * entries >= 264 " in host
    assert "dq_kernel[(tiles * entries,)](" in host and "padded_len, batch * heads // entries, in_turn,\n" in host
    assert "dkv_kernel[(tiles * batch * kv_heads,)](" in host
    assert '"members"' in text.split("def dq_kernel")[0].rsplit("@triton.jit", 1)[1], "one binary for any batch size"


def test_a_shared_bias_in_half_precision_is_added_up_in_float32():
    def halves(score, batch, head, q_idx, kv_idx):
        return score + HALF[head, q_idx, kv_idx]

    assert "u_HALF_grad0 = torch.zeros(tensors[0].shape, dtype=torch.float32" in text_of(halves, causal)


def test_two_stored_reads_in_half_precision_are_added_up_in_float32():
    text = text_of(lambda s, b, h, i, j: s + ALL_PAIRS[b, h, i, j] + ALL_PAIRS[b, h, j, i], causal)
    assert text.count("= torch.zeros(tensors[0].shape, dtype=torch.float32") == 2


def test_heads_that_share_a_bias_add_to_it_or_take_turns_if_the_order_counts():
    free, fixed = text_of(pairs, causal), text_of(pairs, causal, deterministic=True)
    assert len(additions(loop(free, "dq_kernel", "full"))) == 1 and "for member" not in function(free, "dq_kernel")
    assert "entry = own_entry + member\n" in function(fixed, "dq_kernel")
    host = function(fixed, "backward")
    assert "entries = 1  #" in host and "in_turn = True\n" in host


def test_a_tensor_read_several_times_has_a_buffer_for_each_read_that_is_stored():
    def both(score, batch, head, q_idx, kv_idx):
        return (
            score
            + HEAD_PAIRS[head, q_idx, kv_idx]
            + HEAD_PAIRS[head, kv_idx, q_idx]
            + HEAD_PAIRS[0, 0, kv_idx]
            + HEAD_PAIRS[head, 1, q_idx]
        )

    host = function(text_of(both, causal), "backward")
    assert len(re.findall(r"u_HEAD_PAIRS_grad\d = torch\.zeros", host)) == 2 and len(re.findall(r"u_HEAD_PAIRS_grad = torch", host)) == 1
    result = re.search(r"return dq, dk, dv, \((.*),\)", host)[1]  # type: ignore[index]
    assert len(set(result.split(" + "))) == 3


def test_deterministic_sums_are_integers():
    def several(score, batch, head, q_idx, kv_idx):
        return score * SLOPES[head] + RELATIVE[q_idx - kv_idx + 64] + SUMS[q_idx + kv_idx]

    text = text_of(several, causal, deterministic=True)
    assert text.count("tl.atomic_add(") == 1, "the one in `deposit`"
    assert len(additions(loop(text, "dq_kernel", "full"))) == 3 and "deposit(u_SLOPES_grad_ptr" in function(text, "dq_kernel")
    host = function(text, "backward")
    assert len(re.findall(rf"_grad = torch\.zeros\(\({BINS}, \*tensors\[\d\]\.shape\), dtype=torch\.int64", host)) == 3
    assert re.search(r"return dq, dk, dv, \(summed\(\w+\), summed\(\w+\), summed\(\w+\)\)", host)
    assert "sum_bins_kernel" not in text_of(several, causal)


def test_determinism_changes_nothing_without_gradients_of_captured_tensors():
    assert text_of(None, causal, deterministic=True) == text_of(None, causal)


def test_bytes_of_buffers():
    def several(score, batch, head, q_idx, kv_idx):
        return (
            score * SLOPES[head]
            + HALF[head, q_idx, kv_idx]
            + ALL_PAIRS[batch, head, q_idx, kv_idx]
            + PAIRS[q_idx, kv_idx]
            + PAIRS[kv_idx, 0]
        )

    graph = lowered(several)
    elements = [{"SLOPES": 4, "HALF": 100, "ALL_PAIRS": 1000, "PAIRS": 10}[t.name] for t in graph.tensors]
    assert gradient_bytes(graph, False, elements) == {"SLOPES": 16, "HALF": 400, "ALL_PAIRS": 2000, "PAIRS": 40}
    assert gradient_bytes(graph, True, elements) == {"SLOPES": 1024, "HALF": 400, "ALL_PAIRS": 2000, "PAIRS": 40 + 2560}


def test_a_table_of_differences_is_read_once_for_each_diagonal():
    def scaled(score, batch, head, q_idx, kv_idx):
        return score * 2 + torch.tanh(RELATIVE[q_idx - kv_idx + 64]) * SLOPES[head]

    text = text_of(scaled, causal)
    for kernel, spread in (("forward_kernel", "spread"), ("dq_kernel", "spread"), ("dkv_kernel", "spread_transposed")):
        for which in ("partial", "full"):
            body = loop(text, kernel, which)
            value, *_ = re.findall(rf" = {spread}\((\w+), q_len - 1 - first_row, 64, 64\)", body)
            assert re.search(rf"{value} = .*", body) and "along = first_row - first_column - 63 + tl.arange(0, 128)" in body
            read = re.search(r"= tl\.load\(u_RELATIVE_ptr \+ (.*)", body)[1]  # type: ignore[index]
            assert "[:, None]" not in read and "[None, :]" not in read, "a vector"
            assert re.search(r"tanh_approx\(u_RELATIVE_along\d+\)", body), "once for each diagonal, too"
        assert "tl.load(u_SLOPES_ptr" in function(text, kernel).split("# partial blocks")[0]


def test_differences_without_a_table_are_formed_for_each_pair():
    """One subtraction: a vector of diagonals would cost more."""
    for score in (lambda s, b, h, i, j: s - SLOPES[h] * (i - j), pairs):
        assert not re.search(r"= spread\w*\(", text_of(score, causal))


def test_diagonals_count_in_shared_memory():
    """Rows that are turned round take a tile of float32 beside what is streamed."""
    plain, turned = (planned(lowered(f, causal), head_dim=256, head_dim_v=256, tma=True) for f in (None, relative))
    assert plain.dq == turned.dq
    small = dataclasses.replace(HOPPER, smem_bytes=smem_bytes("dq", plain.dq, HOPPER, "bfloat16", 256, 256) + 1024)
    plain, turned = (planned(lowered(f, causal), small, head_dim=256, head_dim_v=256) for f in (None, relative))
    assert plain.dq != turned.dq
    assert smem_bytes("dq", turned.dq, small, "bfloat16", 256, 256) + 4 * turned.dq.rows * turned.dq.columns <= small.smem_bytes
