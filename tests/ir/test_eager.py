"""Evaluation in PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

from flexc.errors import IndexRangeError, InternalError
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Location, const, input_node, make, scalar
from flexc.ir.ops import apply, cast, gather

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))


def positions(rows: int, columns: int, **kwargs) -> Environment:
    inputs = {
        "q_idx": torch.arange(rows).view(-1, 1),
        "kv_idx": torch.arange(columns),
        "head": torch.tensor(0),
        "score": torch.zeros(rows, columns),
    }
    return Environment(inputs, **kwargs)


def test_shapes_broadcast_and_stay_small():
    row, both, constant = evaluate([Q * 2, Q - K, const(1.5)], positions(3, 4))
    assert row.shape == (3, 1) and both.shape == (3, 4) and constant.shape == ()
    assert both.dtype == torch.int32 and both[2, 3] == -1


def test_float_dtype_is_that_of_the_evaluation():
    env = positions(2, 2, scalars=(0.1,), float_dtype=torch.float64, tensors=[torch.ones(2, dtype=torch.bfloat16)])
    values = evaluate([const(0.5), scalar(0, FLOAT32), gather(0, FLOAT32, [K]), cast(Q, FLOAT32), SCORE], env)
    assert {v.dtype for v in values} == {torch.float64}


def test_every_node_is_computed_once(monkeypatch):
    from flexc.ir import eager

    count = 0
    row = eager.TABLE["tanh"]

    def counting(x):
        nonlocal count
        count += 1
        return row.eager(x)

    import dataclasses

    monkeypatch.setitem(eager.TABLE, "tanh", dataclasses.replace(row, eager=counting))
    t = apply("tanh", SCORE)
    evaluate([t + t * t, t], positions(2, 2))
    assert count == 1


def test_dtypes_of_captured_tensors():
    tensors = [torch.ones(3, dtype=d) for d in (torch.uint8, torch.int64, torch.bool, torch.float16)]
    nodes = [gather(0, INT32, [K]), gather(1, INT64, [K]), gather(2, BOOL, [K]), gather(3, FLOAT32, [K])]
    assert [v.dtype for v in evaluate(nodes, positions(1, 3, tensors=tensors))] == [torch.int32, torch.int64, torch.bool, torch.float32]


def test_negative_indices_count_from_the_end_and_others_read_zero():
    table = torch.tensor([1.0, 2.0, 3.0])
    (value,) = evaluate([gather(0, FLOAT32, [K - 4])], positions(1, 9, tensors=[table]))
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 0.0, 0.0]


def test_an_empty_tensor_reads_zero():
    (value,) = evaluate([gather(0, FLOAT32, [const(0)])], positions(1, 1, tensors=[torch.zeros(1)]))
    assert value == 0.0


def test_gradients_flow_into_captured_tensors():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    (value,) = evaluate([SCORE - gather(0, FLOAT32, [HEAD]) * (Q - K)], positions(3, 3, tensors=[slopes]))
    value.tril().sum().backward()
    assert slopes.grad.tolist() == [-4.0, 0.0]


def test_a_missing_input_is_named():
    with pytest.raises(InternalError, match="evaluation needs batch, which was not given"):
        evaluate([input_node("batch")], positions(1, 1))


LINE = Location("windows.py", 3, "return score + bias[q_idx - kv_idx]")


def biased():
    return SCORE + make("gather", (apply("sub", Q, K),), (0,), FLOAT32, LINE)


def checked(root, rows: int = 4, columns: int = 4, size: int = 2, **kwargs):
    return evaluate([root], positions(rows, columns, tensors=[torch.zeros(size)], check=True, names=["bias"], **kwargs))


def test_an_index_out_of_range_is_named_with_the_users_line():
    with pytest.raises(IndexRangeError, match="index -3 of `q_idx - kv_idx` is out of range: expected -2 <= index < 2") as caught:
        checked(biased())
    assert "windows.py:3: return score + bias[q_idx - kv_idx]" in str(caught.value)
    assert "`bias[q_idx - kv_idx]` reads dimension 0 of a tensor of shape (2,)" in str(caught.value)


def test_without_check_nothing_is_raised():
    evaluate([biased()], positions(4, 4, tensors=[torch.zeros(2)]))


def near(node, otherwise=0.0):
    return apply("where", apply("lt", apply("abs", Q - K), 2), node, otherwise)


@pytest.mark.parametrize(
    "root",
    [
        near(biased()),
        apply("where", apply("ge", apply("abs", Q - K), 2), 0.0, biased() * 2.0),
        near(near(biased()) + biased(), 1.0),
        apply("and", apply("lt", apply("abs", Q - K), 2), apply("gt", biased(), 0.0)),
        apply("or", apply("ge", apply("abs", Q - K), 2), apply("gt", biased(), 0.0)),
    ],
)
def test_a_branch_not_taken_may_read_anywhere(root):
    checked(root)


@pytest.mark.parametrize(
    "root",
    [
        near(biased()) + biased(),
        apply("where", apply("gt", biased(), 0.0), near(biased()), 0.0),
        near(0.0, biased()),
        apply("and", apply("gt", biased(), 0.0), apply("lt", apply("abs", Q - K), 2)),
    ],
)
def test_a_value_that_is_needed_elsewhere_is_still_checked(root):
    with pytest.raises(IndexRangeError):
        checked(root)


def test_only_places_that_are_needed_count():
    allowed = (torch.arange(4).view(-1, 1) - torch.arange(4)).abs() < 2
    checked(biased(), needed=allowed)
    with pytest.raises(IndexRangeError):
        checked(biased(), needed=allowed.logical_not())


def test_an_index_of_an_index_is_checked():
    inner = gather(1, INT32, [K])
    env = positions(1, 3, tensors=[torch.zeros(5), torch.tensor([0, 4, 5], dtype=torch.int32)], check=True, names=["bias", "order"])
    with pytest.raises(IndexRangeError, match=r"index 5 of `order\[kv_idx\]` is out of range"):
        evaluate([gather(0, FLOAT32, [inner])], env)


def test_nan_comparisons_are_false():
    env = positions(1, 1)
    env.inputs["score"] = torch.tensor(math.nan)
    assert [bool(v) for v in evaluate([apply(n, SCORE, 1.0) for n in ("lt", "ge", "eq", "ne")], env)] == [False, False, False, True]


def test_a_tensor_without_elements_reads_as_zero():
    """No index is inside, and none is read."""
    tensors = [torch.zeros(0, dtype=torch.int64), torch.zeros(3, 0)]
    one, two = evaluate([gather(0, INT64, [K]), gather(1, FLOAT32, [Q, K])], positions(2, 3, tensors=tensors))
    assert not one.any() and not two.any() and one.shape[-1] == two.shape[-1] == 3
