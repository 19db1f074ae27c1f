"""The truth itself: against PyTorch's own attention in float64, rows computed by hand, and its three ways of calling a function."""

import functools
import importlib
import math
import threading
from math import tanh as tanh_of_math

import numpy as np
import pytest
import torch

from flexc.errors import IndexRangeError
from flexc.pairs import evaluate
from flexc.reference import eager, reference, scores


def inputs(batch=2, heads=2, kv_heads=2, q_len=6, kv_len=7, dim=8, v_dim=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return normal(batch, heads, q_len, dim), normal(batch, kv_heads, kv_len, dim), normal(batch, kv_heads, kv_len, v_dim)


def table(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(out, lse, wrt):
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * torch.arange(out.numel()).view_as(out).cos()).sum() + finite.sin().sum()
    return torch.autograd.grad(loss, wrt, allow_unused=True)


# --- against something independent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
def test_plain_attention_equals_scaled_dot_product_attention(heads, kv_heads, scale):
    q, k, v = inputs(heads=heads, kv_heads=kv_heads)
    out, lse = reference(None, None, q, k, v, scale=scale)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    factor = 1 / math.sqrt(8) if scale is None else scale
    keys = k.repeat_interleave(heads // kv_heads, 1)
    torch.testing.assert_close(lse, torch.logsumexp(torch.einsum("bhid,bhjd->bhij", q, keys) * factor, -1))
    for ours, theirs in zip(torch.autograd.grad(out.sin().sum(), [q, k, v]), torch.autograd.grad(expected.sin().sum(), [q, k, v])):
        torch.testing.assert_close(ours, theirs)


def test_bias_and_mask_equal_scaled_dot_product_attention_with_a_dense_bias():
    q, k, v = inputs(heads=4, kv_heads=2)
    bias = table(2, 4, 6, 7).double().detach().requires_grad_()
    out, _ = reference(lambda s, b, h, i, j: s + bias[b, h, i, j], lambda b, h, i, j: (i + b >= j) | (h == 3), q, k, v)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in bias.shape), indexing="ij")
    dense = torch.where((i + b >= j) | (h == 3), bias, -math.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    wrt = [q, k, v, bias]
    for ours, theirs in zip(torch.autograd.grad(out.cos().sum(), wrt), torch.autograd.grad(expected.cos().sum(), wrt)):
        torch.testing.assert_close(ours, theirs)


def test_a_row_by_hand():
    """Two keys with scores 0 and ln 3 after the function: probabilities 1/4 and 3/4, lse ln 4."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[0.0], [1.0]]]])
    v = torch.tensor([[[[4.0], [8.0]]]])
    out, lse = reference(lambda s, b, h, i, j: s * math.log(3), None, q, k, v)
    assert out.item() == pytest.approx(7.0, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-15)


def test_gradient_of_a_slope_by_hand():
    """d out / d w of softmax([0, w]) · [0, 1] is p (1 − p)."""
    w = torch.zeros((), requires_grad=True)
    q, k, v = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 2, 1), torch.tensor([[[[0.0], [1.0]]]])
    out, _ = reference(lambda s, b, h, i, j: s + w * j, None, q, k, v)
    out.sum().backward()
    assert w.grad is not None and w.grad.item() == pytest.approx(0.25)


# --- rows and pairs that do not count ------------------------------------------------------------------------------------------------

MASKED_ROWS = {
    "mask": (None, lambda b, h, i, j: i >= 3),
    "mask hidden in the score": (lambda s, b, h, i, j: torch.where(i >= 3, s, -math.inf), None),
    "mask hidden in the score by an if": (lambda s, b, h, i, j: s if i >= 3 else -math.inf, None),
}


@pytest.mark.parametrize("form", MASKED_ROWS)
def test_row_without_keys_is_zero_and_has_no_gradient(form):
    q, k, v = inputs()
    out, lse = reference(*MASKED_ROWS[form], q, k, v)
    assert not out[:, :, :3].any() and bool((lse[:, :, :3] == -math.inf).all()) and bool(lse[:, :, 3:].isfinite().all())
    dq, dk, dv = torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), torch.ones_like(lse)])
    assert not dq[:, :, :3].any() and dq[:, :, 3:].all() and dk.isfinite().all() and dv.isfinite().all()


def test_key_that_nobody_sees_gets_exactly_zero():
    q, k, v = inputs()
    out, lse = reference(None, lambda b, h, i, j: j != 4, q, k, v)
    dk, dv = torch.autograd.grad([out, lse], [k, v], [torch.ones_like(out), torch.ones_like(lse)])
    assert not dk[:, :, 4].any() and not dv[:, :, 4].any() and dv[:, :, :4].all()


def test_masked_pairs_are_never_given_to_the_score_function():
    """log of a distance that is negative above the diagonal: NaN in a dense evaluation and in its gradient."""
    q, k, v = inputs()
    w = table(2)
    out, lse = reference(lambda s, b, h, i, j: s + w[h] * torch.log(i - j + 1.0), lambda b, h, i, j: i >= j, q, k, v)
    assert not any(g.isnan().any() for g in gradients(out, lse, [q, k, v, w]))


def test_branch_that_where_discards_gives_no_nan():
    q, k, v = inputs()
    out, lse = reference(lambda s, b, h, i, j: torch.where(s > 0, torch.sqrt(s), 0.0), None, q, k, v)
    assert not any(g.isnan().any() for g in gradients(out, lse, [q, k, v]))


def test_no_queries_and_no_keys():
    q, k, v = inputs(q_len=0)
    assert reference(None, None, q, k, v)[0].shape == (2, 2, 0, 4)
    q, k, v = inputs(kv_len=0)
    out, lse = reference(lambda s, b, h, i, j: s + i, None, q, k, v)
    assert not out.any() and bool((lse == -math.inf).all())


# --- the function: three ways to call it are equal ------------------------------------------------------------------------------------

slopes, pair_bias, scalar = table(2), table(2, 2, 6, 7), table()
half_slopes = slopes.detach().half().requires_grad_()
per_head = [1.0, 2.0]


def augmented(s, b, h, i, j):
    distance = i
    distance -= j
    s += slopes[h]
    return s + distance * i


class Bias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, s, b, h, i, j):
        return s + self.weight[h] * j


def scaled(s, b, h, i, j, *, by):
    return s * by


SCORES = {
    "ALiBi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
    "0-d tensor": lambda s, b, h, i, j: s * scalar,
    "float16 table": lambda s, b, h, i, j: s - half_slopes[h] * (i - j),
    "chained index": lambda s, b, h, i, j: s + pair_bias[b][h][i][j],
    "index and power": lambda s, b, h, i, j: s + pair_bias[b, h, i, j] * 2 ** -(h + 1),
    "true division of integers": lambda s, b, h, i, j: s * (i / 7),
    "floor of negatives": lambda s, b, h, i, j: s * ((j - i) // 3) + (j - i) % 4,
    "math": lambda s, b, h, i, j: math.tanh(s) * math.sqrt(i + 1),
    "math imported by name": lambda s, b, h, i, j: tanh_of_math(s) + math.floor(i / 2),
    "NumPy": lambda s, b, h, i, j: np.tanh(s) * np.sqrt(i + 1) * np.float32(2),
    "if": lambda s, b, h, i, j: s if i >= j else s * slopes[h],
    "min and max": lambda s, b, h, i, j: min(s, 0.5) + max(i, j),
    "list": lambda s, b, h, i, j: s * per_head[h] + [slopes[0], slopes[1]][h],
    "chained comparison": lambda s, b, h, i, j: s * 2 if 0 <= i - j < 3 else -math.inf,
    "loop over a position": lambda s, b, h, i, j: s + sum(slopes[x] for x in range(h + 1)),
    "vector": lambda s, b, h, i, j: s + (slopes * s).sum(),
    "dtype limits": lambda s, b, h, i, j: torch.where(i >= j, s, torch.finfo(s.dtype).min),
    "guarded index": lambda s, b, h, i, j: torch.where(h < 1, s + slopes[3 * h], s),
    "constant": lambda s, b, h, i, j: 1,
    "augmented assignment": augmented,
    "partial": functools.partial(scaled, by=3),
    "module": Bias(),
}
MASKS = {
    "all": None,
    "causal": lambda b, h, i, j: i >= j,
    "python": lambda b, h, i, j: i >= j and not (j == 2),
    "rows and batch": lambda b, h, i, j: (i > 2) & (b == 0),
    "constant": lambda b, h, i, j: True,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_columns_and_single_pairs_are_equal(score, mask):
    q, k, v = inputs()
    wrt = [q, k, v, slopes, half_slopes, pair_bias, scalar]
    results = []
    for one_by_one in (False, True):
        out, lse = reference(SCORES[score], MASKS[mask], q, k, v, one_by_one=one_by_one)
        results.append([out, lse, *gradients(out, lse, wrt)])
    for vectorised, single in zip(*results):
        assert (vectorised is None) == (single is None)
        if vectorised is not None:
            assert vectorised.dtype == single.dtype
            wide = vectorised.dtype == torch.float64
            torch.testing.assert_close(vectorised, single, rtol=1e-12 if wide else 2e-7, atol=1e-12 if wide else 1e-9)


@pytest.mark.parametrize("score", ["if", "min and max", "list", "chained comparison", "loop over a position", "math"])
def test_decisions_split_the_columns(score, monkeypatch):
    """The quick way must really be taken: 100,000 single calls would be minutes."""
    monkeypatch.setattr("flexc.pairs._Evaluation._each_pair", lambda *a: pytest.fail("called once for each pair"))
    reference(SCORES[score], MASKS["python"], *inputs())


def test_arithmetic_is_float64_whatever_the_function_says():
    q, k, v = inputs(dtype=torch.float32)
    third = torch.tensor(1 / 3)

    def function(s, b, h, i, j):
        return s.float() * third + torch.tensor(0.1, dtype=torch.float32).double() * 0 + s.to(torch.float32) / (j + 3)

    for one_by_one in (False, True):
        column = [torch.tensor([1 / 7], dtype=torch.float64), *torch.zeros(4, 1, dtype=torch.int32)]
        result = evaluate(function, column, torch.float64, one_by_one=one_by_one)
        assert result.item() == pytest.approx(third.item() / 7 + 1 / 21, rel=1e-15)
    assert reference(function, None, q, k, v)[0].dtype == torch.float64


def test_gradient_of_a_float32_table_is_summed_in_float64():
    """16.8 million ones: a float32 sum of single contributions stops at 2^24."""
    w = torch.zeros(1, requires_grad=True)
    n = 2**24 + 2**12
    columns = [torch.zeros(n, dtype=torch.float64), *(torch.zeros(n, dtype=torch.int32) for _ in range(4))]
    evaluate(lambda s, b, h, i, j: s + w[h], columns, torch.float64).sum().backward()
    assert w.grad is not None and w.grad.item() == n


def test_math_and_globals_are_restored():
    exp = math.exp
    with pytest.raises(ZeroDivisionError):
        reference(lambda s, b, h, i, j: 1 / 0, None, *inputs())
    assert math.exp is exp and SCORES["math imported by name"].__globals__["tanh_of_math"] is math.tanh
    assert torch.get_default_dtype() == torch.float32


def test_threads_take_turns_at_changing_math_and_the_default_dtype():
    """Interleaved, the second would take the first one's float64 for the default and restore that."""
    exp, entered, left = math.exp, threading.Event(), threading.Event()
    columns = [torch.zeros(1, dtype=torch.float64), *(torch.zeros(1, dtype=torch.int32) for _ in range(4))]

    def first(s, b, h, i, j):
        second_thread.start()
        entered.wait(0.2)
        return s

    def second(s, b, h, i, j):
        entered.set()
        left.wait(5)
        return s

    second_thread = threading.Thread(target=evaluate, args=(second, columns, torch.float64), kwargs={"one_by_one": True})
    evaluate(first, columns, torch.float64, one_by_one=True)
    left.set()
    second_thread.join()
    assert math.exp is exp and torch.get_default_dtype() == torch.float32


# --- refusals ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [False, True])
def test_index_outside_a_table_is_refused_if_the_result_depends_on_it(one_by_one):
    q, k, v = inputs()
    with pytest.raises(IndexRangeError, match=r"depends on an element outside a captured tensor: index [56] with size 5"):
        short = torch.zeros(5)
        reference(lambda s, b, h, i, j: s + short[j], None, q, k, v, one_by_one=one_by_one)
    with pytest.raises(IndexRangeError, match="outside a captured tensor"):
        documents = torch.tensor([0, 0, 1, 1])
        reference(None, lambda b, h, i, j: documents[i] == documents[j], q, k, v, one_by_one=one_by_one)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("score", "mask", "message"),
    [
        (lambda s, b, h, i, j: i >= j, None, "expected a number from a score function, got bool"),
        (None, lambda b, h, i, j: i - j, "expected a truth value from a mask function, got int32"),
        (lambda s, b, h, i, j: s + slopes, None, r"a score function returns one value for a pair, got shape \(2,\)"),
    ],
)
def test_results_that_are_no_score_and_no_mask_are_refused(score, mask, message, one_by_one):
    with pytest.raises(TypeError, match=message):
        reference(score, mask, *inputs(), one_by_one=one_by_one)


def test_a_dropped_gradient_is_refused():
    with pytest.raises(TypeError, match="drops its gradient"):
        reference(lambda s, b, h, i, j: float(s) * 2, None, *inputs())


def test_writing_to_a_tensor_is_refused():
    counts = torch.zeros(2)

    def counting(s, b, h, i, j):
        counts.add_(1)
        return s

    with pytest.raises(TypeError, match="add_ writes to a tensor"):
        reference(counting, None, *inputs())
    assert not counts.any()


# --- the yardstick and single rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_eager_is_the_reference_up_to_its_dtype(dtype):
    q, k, v = inputs(dtype=dtype)
    out, lse = eager(SCORES["ALiBi"], MASKS["rows and batch"], q, k, v)
    true_out, true_lse = reference(SCORES["ALiBi"], MASKS["rows and batch"], q, k, v)
    assert out.dtype == dtype and lse.dtype == torch.float32
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), true_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), true_lse, rtol=tolerance, atol=tolerance)


def test_scores_of_one_row_make_its_output():
    q, k, v = inputs()
    out, _ = reference(SCORES["ALiBi"], MASKS["causal"], q, k, v)
    row = scores(SCORES["ALiBi"], MASKS["causal"], q, k, row=3)
    assert bool((row[..., 4:] == -math.inf).all())
    torch.testing.assert_close(torch.softmax(row, -1).unsqueeze(2) @ v, out[:, :, 3:4])


def test_chunks_of_rows_do_not_show(monkeypatch):
    q, k, v = inputs()
    whole = reference(SCORES["ALiBi"], MASKS["causal"], q, k, v)
    monkeypatch.setattr(importlib.import_module("flexc.reference"), "_PAIRS_AT_ONCE", 60)  # the attribute of flexc is the function
    for chunked, expected in zip(reference(SCORES["ALiBi"], MASKS["causal"], q, k, v), whole):
        torch.testing.assert_close(chunked, expected)
