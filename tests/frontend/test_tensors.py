"""Captured tensors: full, partial and computed indices, slices, small vectors, sizes, dtypes."""

from __future__ import annotations

import pytest
import torch

from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64
from tests.frontend.truth import BATCH, HEADS, KEYS, QUERIES, assert_same, traced

torch.manual_seed(0)
BIAS = torch.rand(BATCH, HEADS, QUERIES, KEYS)
ROWS = torch.rand(HEADS, 3)
COUNTS = torch.tensor([[3], [1]])  # [B, 1]
DOCUMENTS = torch.tensor([0, 0, 1, 2, 2])
PER_HEAD = torch.rand(HEADS)

READS = {
    "full": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "one at a time": lambda s, b, h, q, k: s + BIAS[b][h][q][k],
    "mixed": lambda s, b, h, q, k: s + BIAS[b, h][q, k],
    "static": lambda s, b, h, q, k: s + BIAS[1, 0, q, k] + BIAS[b, 0][-1, k],
    "computed": lambda s, b, h, q, k: s + BIAS[b, (h + 1) % 4, q // 2, (q * k) % 5],
    "negative": lambda s, b, h, q, k: s + PER_HEAD[h - 4] + PER_HEAD[-1],
    "ellipsis": lambda s, b, h, q, k: s + BIAS[..., q, k][b, h] + BIAS[b, ..., k][h, q],
    "slices": lambda s, b, h, q, k: s + BIAS[:, h][b][q, k] + BIAS[b, h, 1:][q % 3, k] + BIAS[b, h, ::2, -1][q % 2],
    "reversed slice": lambda s, b, h, q, k: s + PER_HEAD[1:3][h % 2] + PER_HEAD[1:3][-1] + PER_HEAD[1:3][h % 2 - 2],
    "slice of a slice": lambda s, b, h, q, k: s + PER_HEAD[1:][1:][h % 2] + BIAS[b, h, q, ::2][1:][k % 2] + PER_HEAD[:3][::2][h % 2],
    "index from a tensor": lambda s, b, h, q, k: s + PER_HEAD[DOCUMENTS[k]],
    "one column": lambda s, b, h, q, k: s + COUNTS[b, 0],
    "shape (1,) as a number": lambda s, b, h, q, k: s + COUNTS[b],
    "shape (1,) as an index": lambda s, b, h, q, k: s + PER_HEAD[COUNTS[b]],
    "indexed by own constants": lambda s, b, h, q, k: s + PER_HEAD[torch.tensor(2)] + torch.tensor([1.0, 2.0, 3.0, 4.0])[h],
    "transposed": lambda s, b, h, q, k: s + ROWS.T[1, h] + ROWS.transpose(0, 1)[2][h] + BIAS.permute(3, 2, 1, 0)[k, q, h, b],
    "cast": lambda s, b, h, q, k: s + DOCUMENTS.float()[k] / 2 + DOCUMENTS.to(torch.int32)[k] + PER_HEAD.double()[h],
    "sizes": lambda s, b, h, q, k: s + BIAS.shape[1] + BIAS.size(-1) + len(ROWS) + ROWS.ndim + ROWS.dim() + ROWS.numel() + BIAS.size()[0],
    "unpacked sizes": lambda s, b, h, q, k: s * ROWS.shape[0] + sum(BIAS.shape[1:]),
    "loop over rows": lambda s, b, h, q, k: s + sum([row[0] for row in ROWS]),
    "sum": lambda s, b, h, q, k: s + ROWS[h].sum() + torch.sum(ROWS[h] * 2),
    "mean, max and min": lambda s, b, h, q, k: s + ROWS[h].mean() + ROWS[h].max() + ROWS[h].amin() + torch.max(ROWS[h]),
    "dot": lambda s, b, h, q, k: s + torch.dot(ROWS[h], ROWS[q]) + ROWS[h] @ ROWS[k % 4] + (ROWS[h] * ROWS[q]).sum(-1),
    "matrix": lambda s, b, h, q, k: s + (ROWS @ ROWS[h])[q] + torch.nn.functional.linear(ROWS[q], ROWS)[h],
    "elementwise": lambda s, b, h, q, k: s + (ROWS[h].exp() - s * torch.tanh(ROWS[q])).sum() + (ROWS[h] ** 2).sum().sqrt(),
    "clamp": lambda s, b, h, q, k: s + torch.clamp(ROWS[h], 0.3, 0.6).sum() + torch.maximum(ROWS[h], ROWS[q]).sum(),
    "broadcast": lambda s, b, h, q, k: s + (ROWS[:, 0] * ROWS[:, 1:2].squeeze(1)).sum() + (ROWS.unsqueeze(0) + 1).sum(),
    "reduce one axis": lambda s, b, h, q, k: s + ROWS.sum(dim=1)[h] + ROWS.max(dim=0).values[1] + ROWS.mean(0, keepdim=True)[0, 2],
    "own vector": lambda s, b, h, q, k: s + (torch.arange(3) * ROWS[h]).sum() + (torch.tensor([1.0, 2.0, 3.0]) @ ROWS[q]),
    "stack": lambda s, b, h, q, k: torch.stack([s, s * 2, ROWS[h, 0]]).max() + torch.cat([ROWS[h], ROWS[q]]).sum(),
    "tensor of values": lambda s, b, h, q, k: torch.stack((s, q.float()))[h % 2],
    "vector of booleans": lambda s, b, h, q, k: s + (ROWS[h] > 0.01).sum() + (ROWS[h] > 0.5).any().int() + (ROWS[h] > 0.1).all().int(),
    "norm": lambda s, b, h, q, k: s + ROWS[h].norm() + torch.linalg.vector_norm(ROWS[q]),
}


@pytest.mark.parametrize("name", READS)
def test_read(name):
    assert_same(READS[name])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bool, BOOL),
        (torch.uint8, INT32),
        (torch.int8, INT32),
        (torch.int16, INT32),
        (torch.int32, INT32),
        (torch.int64, INT64),
        (torch.float16, FLOAT32),
        (torch.bfloat16, FLOAT32),
        (torch.float32, FLOAT32),
        (torch.float64, FLOAT32),
    ],
)
def test_dtype_of_an_element(dtype, expected):
    table = torch.tensor([0, 1, 1, 0]).to(dtype)
    graph = traced(lambda s, b, h, q, k: s + table[h] * 2 + (table[h] == 1).int())
    assert {node.dtype for node in graph.nodes() if node.op == "gather"} == {expected}
    assert graph.tensors[0].dtype == str(dtype).removeprefix("torch.")
    assert_same(lambda s, b, h, q, k: s + table[h] * 2 + (table[h] == 1).int())


def test_zero_dimensional_tensors_are_values():
    gain, length, on = torch.tensor(0.5), torch.tensor(3), torch.tensor(True)
    assert_same(lambda s, b, h, q, k: gain * s + (s if k < length else -s) + torch.where(on, q, k))
    assert_same(lambda s, b, h, q, k: gain + length)
    assert_same(lambda b, h, q, k: (k < length) & on)


def test_in_place_operators_on_a_captured_number_make_a_new_one():
    gain = torch.tensor(0.5)

    def score(s, b, h, q, k):
        total = gain
        total = total + s
        total += q
        return total

    assert_same(score)
    assert gain.item() == 0.5


def test_a_guarded_read_out_of_range_keeps_its_guard():
    short = torch.rand(2)
    graph = traced(lambda s, b, h, q, k: s + short[q] if q < 2 else s)
    assert graph.score is not None and graph.score.op == "where"


def test_detached_tensor_needs_no_gradient():
    table = torch.rand(HEADS, requires_grad=True)
    graph = traced(lambda s, b, h, q, k: s + table[h] + table.detach()[q])
    assert [t.needs_grad for t in graph.tensors] == [True, False]


def test_the_cases_that_others_refuse():
    """table[b, 0, i, j] of shape (2, 1, 5, 5), and i + position[b, 0] of shape (B, 1)."""
    table, position = torch.rand(2, 1, 5, 5), torch.tensor([[1], [2]])
    assert_same(lambda s, b, h, q, k: s + table[b, 0, q, k])
    assert_same(lambda b, h, q, k: q + position[b, 0] >= k)


def test_a_vector_of_64_elements_is_taken():
    large = torch.rand(HEADS, 64)
    assert_same(lambda s, b, h, q, k: s + large[h].sum())


def test_computing_with_a_vector_fixes_its_size_only():
    from flexc import frontend

    def make(heads, width):
        rows = torch.rand(heads, width)
        return lambda s, b, h, q, k: s + rows[h].sum()

    first, _ = frontend.trace(make(4, 3))
    assert frontend.trace(make(8, 3))[0] is first
    assert frontend.trace(make(4, 5))[0] is not first
