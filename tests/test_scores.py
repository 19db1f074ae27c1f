"""The usual score functions, against formulas written out pair by pair, called plainly and traced."""

from __future__ import annotations

import math

import pytest
import torch

from flexc import scores
from flexc.errors import InputError, ShapeError
from flexc.frontend import trace
from flexc.ir.eager import Environment, evaluate

B, H, Q, K = 2, 4, 9, 11
GENERATOR = torch.Generator().manual_seed(0)
SCORE = 5 * torch.randn(B, H, Q, K, generator=GENERATOR)


def inputs() -> dict[str, torch.Tensor]:
    shapes = {"batch": (B, 1, 1, 1), "head": (1, H, 1, 1), "q_idx": (1, 1, Q, 1), "kv_idx": (1, 1, 1, K)}
    return {"score": SCORE, **{name: torch.arange(max(shape), dtype=torch.int32).view(shape) for name, shape in shapes.items()}}


def called(function) -> torch.Tensor:
    return function(**inputs())


def traced(function) -> torch.Tensor:
    found, binding = trace(function, None)
    assert found.graph.score is not None
    return evaluate([found.graph.score], Environment(inputs(), binding.tensors, binding.scalars))[0].expand(B, H, Q, K)


def pair_by_pair(formula) -> torch.Tensor:
    """`formula` is called on Python numbers."""
    rows = [
        [[[float(formula(SCORE[b, h, q, k].item(), b, h, q, k)) for k in range(K)] for q in range(Q)] for h in range(H)] for b in range(B)
    ]
    return torch.tensor(rows)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 2.0])
RELATIVE = torch.randn(H, 7, generator=GENERATOR)
BUCKETED = torch.randn(8, H, generator=GENERATOR)


def t5_bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The rule of T5 in words: sign, then exact buckets, then logarithmic ones."""
    start = 0
    if bidirectional:
        buckets //= 2
        start = buckets if distance < 0 else 0
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    return start + min(buckets - 1, exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)))


CASES = {
    "alibi": (scores.alibi(SLOPES), lambda s, b, h, q, k: s - SLOPES[h].item() * (q - k)),
    "alibi of the paper": (scores.alibi(4), lambda s, b, h, q, k: s - 2.0 ** (-2 * (h + 1)) * (q - k)),
    "distance_bias": (scores.distance_bias(0.5), lambda s, b, h, q, k: s - 0.5 * abs(q - k)),
    "distance_bias of heads": (scores.distance_bias(SLOPES), lambda s, b, h, q, k: s - SLOPES[h].item() * abs(q - k)),
    "distance_bias, 0-d tensor": (scores.distance_bias(torch.tensor(0.5)), lambda s, b, h, q, k: s - 0.5 * abs(q - k)),
    "soft_cap": (scores.soft_cap(3), lambda s, b, h, q, k: 3 * math.tanh(s / 3)),
    "temperature": (scores.temperature(0.7), lambda s, b, h, q, k: s / 0.7),
    "temperature of heads": (scores.temperature(SLOPES), lambda s, b, h, q, k: s / SLOPES[h].item()),
    "relative_bias": (scores.relative_bias(RELATIVE), lambda s, b, h, q, k: s + RELATIVE[h, max(-3, min(3, q - k)) + 3].item()),
    "relative_bias for all heads": (
        scores.relative_bias(RELATIVE[1]),
        lambda s, b, h, q, k: s + RELATIVE[1, max(-3, min(3, q - k)) + 3].item(),
    ),
    "bucketed_bias": (
        scores.bucketed_bias(BUCKETED, max_distance=6),
        lambda s, b, h, q, k: s + BUCKETED[t5_bucket(q - k, 8, 6, True), h].item(),
    ),
    "bucketed_bias, one direction": (
        scores.bucketed_bias(BUCKETED, max_distance=9, bidirectional=False),
        lambda s, b, h, q, k: s + BUCKETED[t5_bucket(q - k, 8, 9, False), h].item(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_agree_pair_by_pair(name):
    function, formula = CASES[name]
    expected = pair_by_pair(formula)
    torch.testing.assert_close(called(function), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(traced(function), expected, rtol=1e-5, atol=1e-5)


def test_slopes_of_alibi():
    """Section 3 of the paper: 1/2, 1/4, …, 1/256 for eight heads; twelve heads add every second one of sixteen."""
    assert scores.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert scores.alibi_slopes(16)[:2].tolist() == pytest.approx([2**-0.5, 2**-1])
    assert scores.alibi_slopes(12).tolist() == pytest.approx([2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    assert scores.alibi_slopes(1).tolist() == [2.0**-8]
    assert scores.alibi_slopes(3).tolist() == pytest.approx([2**-4, 2**-8, 2**-2])


def test_buckets_of_t5():
    """Default sizes of T5: exact up to 7, the last bucket of each side from 128 on."""
    buckets = scores.bucket_of_distance(32, 128, True)
    assert buckets.shape == (257,) and buckets.dtype == torch.int32
    of = {distance: int(buckets[distance + 128]) for distance in range(-128, 129)}
    assert [of[d] for d in range(8)] == list(range(8)) and of[8] == 8 and of[128] == 15 and of[91] == 15 and of[90] == 14
    assert of[-1] == 17 and of[-128] == 31
    one_way = scores.bucket_of_distance(32, 128, False)
    assert (one_way[:129] == 0).all() and int(one_way[128 + 15]) == 15 and int(one_way[-1]) == 31


def test_captured_tables_get_gradients():
    table = RELATIVE.clone().requires_grad_()
    called(scores.relative_bias(table)).sum().backward()
    apart = torch.arange(Q)[:, None] - torch.arange(K)
    expected = torch.bincount((apart.clamp(-3, 3) + 3).flatten(), minlength=7).float() * B
    assert table.grad is not None and torch.equal(table.grad, expected.expand(H, 7))


def test_names_are_those_of_the_makers():
    assert scores.alibi(4).__name__ == "alibi" and scores.soft_cap(20.0).__name__ == "soft_cap"


# --- what is refused ---------------------------------------------------------------------------------------------------------------


def test_heads_that_are_no_number_are_refused():
    for heads in (0, -1, True, 2.0):
        with pytest.raises(InputError, match=f"expected heads to be an integer >= 1, got {heads!r}"):
            scores.alibi(heads)  # pyright: ignore[reportArgumentType]


def test_tensors_of_the_wrong_kind_are_refused():
    with pytest.raises(InputError, match=r"expected slopes to be a float tensor \[Hq\], got int64"):
        scores.alibi(torch.arange(4))
    with pytest.raises(ShapeError, match=r"expected slopes of shape \[Hq\], got \[2, 2\]"):
        scores.alibi(torch.ones(2, 2))
    with pytest.raises(InputError, match="expected the table to be a float tensor .*, got list"):
        scores.relative_bias([1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"expected the table of shape \[buckets, Hq\], got \[8\]"):
        scores.bucketed_bias(torch.ones(8))
    with pytest.raises(ShapeError, match=r"expected temperature of shape \[\] or \[Hq\], got \[2, 2\]"):
        scores.temperature(torch.ones(2, 2))
    with pytest.raises(InputError, match="expected weight to be a number or a float tensor .*, got str"):
        scores.distance_bias("1")  # pyright: ignore[reportArgumentType]


def test_a_table_without_a_middle_is_refused():
    with pytest.raises(ShapeError, match=r"expected an odd number of distances, -R to R, in the table, got 6 in \[4, 6\]"):
        scores.relative_bias(torch.ones(4, 6))


def test_caps_and_temperatures_that_divide_by_zero_are_refused():
    for cap in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ShapeError, match="expected a finite cap > 0, got"):
            scores.soft_cap(cap)
    with pytest.raises(InputError, match="expected cap to be a number, got '3'"):
        scores.soft_cap("3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="expected a temperature other than 0"):
        scores.temperature(0.0)


def test_too_few_buckets_are_refused():
    with pytest.raises(ShapeError, match="expected at least 4 buckets and max_distance > 1, got 2 and 128"):
        scores.bucketed_bias(torch.ones(2, 4))
    with pytest.raises(ShapeError, match="expected at least 4 buckets and max_distance > 8, got 32 and 8"):
        scores.bucketed_bias(torch.ones(32, 4), max_distance=8)
