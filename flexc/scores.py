"""The usual score functions: each call makes a function (score, batch, head, q_idx, kv_idx) → score, which can be copied and pickled.

Scores are float32 and already scaled (scale · q·k); softmax follows. Captured tensors that require a gradient receive it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexc.errors import InputError, ShapeError
from flexc.pickling import Recipe, follow, made_again

Tensor = torch.Tensor


class Score:
    """A score function that a factory of this module made. Calling it calls the function; it pickles as the factory and its arguments.

    Attributes:
        __flexc_function__: the plain function, for the tracer.
        recipe: the factory and its arguments.
    """

    recipe: Recipe

    def __init__(self, function: Callable[..., Any]):
        self.__flexc_function__ = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.__flexc_function__(score, batch, head, q_idx, kv_idx)

    def __repr__(self) -> str:
        return f"<flexc score function {self.__name__}>"

    def __reduce__(self) -> tuple:
        return follow, (self.recipe,)


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of ALiBi, float32 [heads]: 2^(-8/n), 2^(-16/n), … for n heads, n a power of two.

    For other n: those of the power of two below, then every second one of twice that power.

    Source: arXiv:2108.12409, section 3, and the authors' code for numbers of heads that are no power of two.
    """
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
        raise InputError(f"expected heads to be an integer >= 1, got {heads!r}")
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)]
    return torch.tensor((slopes + between)[:heads], dtype=torch.float32)


@made_again
def alibi(slopes: Tensor | int, *, device: torch.device | str | None = None) -> Score:
    """Subtract slopes[head] for each token of distance: score - slopes[head] * (q_idx - kv_idx).

    Meant for causal attention: for keys after the query it adds. See `distance_bias` for both directions.

    Args:
        slopes: float tensor [Hq]; or the number of heads, for the slopes of the paper, made on `device`.

    Source: ALiBi, arXiv:2108.12409.
    """
    table = slopes if isinstance(slopes, Tensor) else alibi_slopes(slopes).to(device)
    _float_tensor("slopes", table, (1,), "[Hq]")

    def alibi(score, batch, head, q_idx, kv_idx):
        return score - table[head] * (q_idx - kv_idx)

    return Score(alibi)


@made_again
def distance_bias(weight: float | Tensor) -> Score:
    """Subtract `weight` for each token of distance, in both directions: score - weight * |q_idx - kv_idx|.

    Args:
        weight: a number, or a float tensor [] for all heads or [Hq] for each head.

    Source: the symmetric form of ALiBi, arXiv:2108.12409.
    """
    if _is_per_head("weight", weight):

        def distance_bias(score, batch, head, q_idx, kv_idx):
            return score - weight[head] * abs(q_idx - kv_idx)  # pyright: ignore[reportIndexIssue]

    else:

        def distance_bias(score, batch, head, q_idx, kv_idx):
            return score - weight * abs(q_idx - kv_idx)

    return Score(distance_bias)


@made_again
def soft_cap(cap: float) -> Score:
    """Keep scores inside (-cap, cap), smoothly: cap * tanh(score / cap).

    Source: logit soft-capping of Gemma 2, arXiv:2408.00118.
    """
    if isinstance(cap, bool) or not isinstance(cap, int | float):
        raise InputError(f"expected cap to be a number, got {cap!r}")
    if not (cap > 0 and math.isfinite(cap)):
        raise ShapeError(f"expected a finite cap > 0, got {cap}")
    cap = float(cap)

    def soft_cap(score, batch, head, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return Score(soft_cap)


@made_again
def temperature(values: float | Tensor) -> Score:
    """Divide the score by a temperature: above 1 attention spreads, below 1 it sharpens.

    Args:
        values: a number, or a float tensor [] for all heads or [Hq] for each head. Not zero.
    """
    if _is_per_head("temperature", values):

        def temperature(score, batch, head, q_idx, kv_idx):
            return score / values[head]  # pyright: ignore[reportIndexIssue]

    else:
        if not isinstance(values, Tensor) and values == 0:
            raise ShapeError("expected a temperature other than 0")

        def temperature(score, batch, head, q_idx, kv_idx):
            return score / values

    return Score(temperature)


@made_again
def relative_bias(table: Tensor) -> Score:
    """Add a learned bias for the distance q_idx - kv_idx; distances past the table use its ends.

    Args:
        table: float tensor [2 R + 1] for all heads or [Hq, 2 R + 1] for each head; entry R + d is for q_idx - kv_idx == d, -R <= d <= R.

    Source: relative position, Shaw et al., arXiv:1803.02155 (its clipping), as a bias on the score, T5, arXiv:1910.10683.
    """
    _float_tensor("the table", table, (1, 2), "[2 R + 1] or [Hq, 2 R + 1]")
    if table.shape[-1] % 2 == 0:
        raise ShapeError(f"expected an odd number of distances, -R to R, in the table, got {table.shape[-1]} in {list(table.shape)}")
    reach = table.shape[-1] // 2
    if table.dim() == 1:

        def relative_bias(score, batch, head, q_idx, kv_idx):
            return score + table[torch.clamp(q_idx - kv_idx, -reach, reach) + reach]

    else:

        def relative_bias(score, batch, head, q_idx, kv_idx):
            return score + table[head, torch.clamp(q_idx - kv_idx, -reach, reach) + reach]

    return Score(relative_bias)


@made_again
def bucketed_bias(table: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> Score:
    """Add the relative bias of T5: exact buckets for near keys, logarithmic ones up to `max_distance`, one for all beyond.

    Args:
        table: float tensor [buckets, Hq], T5's `relative_attention_bias.weight`.
        max_distance: tokens from which on all distances share the last bucket.
        bidirectional: half of the buckets for keys after the query (encoder); otherwise keys after the query share bucket 0.

    Source: T5, arXiv:1910.10683, section 2.1.
    """
    _float_tensor("the table", table, (2,), "[buckets, Hq]")
    buckets = bucket_of_distance(table.shape[0], max_distance, bidirectional).to(table.device)

    def bucketed_bias(score, batch, head, q_idx, kv_idx):
        distance = torch.clamp(q_idx - kv_idx, -max_distance, max_distance)
        return score + table[buckets[distance + max_distance], head]

    return Score(bucketed_bias)


def bucket_of_distance(buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """T5's bucket of every distance q_idx - kv_idx from -max_distance to max_distance: int32 [2 max_distance + 1]."""
    one_side = buckets // 2 if bidirectional else buckets
    exact = one_side // 2
    if exact < 1 or max_distance <= exact:
        least = 4 if bidirectional else 2
        raise ShapeError(f"expected at least {least} buckets and max_distance > {max(exact, 1)}, got {buckets} and {max_distance}")
    distance = torch.arange(-max_distance, max_distance + 1)
    offset = one_side * (distance < 0) if bidirectional else torch.zeros_like(distance)
    apart = distance.abs() if bidirectional else distance.clamp(min=0)
    # float32 and this order of operations, as in T5: the buckets of distances on a boundary depend on the rounding.
    growth = torch.log(apart.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (one_side - exact)
    far = (exact + growth.to(torch.int64)).clamp(max=one_side - 1)
    return (offset + torch.where(apart < exact, apart, far)).to(torch.int32)


def _is_per_head(name: str, value: Any) -> bool:
    """Whether the value is one number for each head; refuses what is neither a number nor a float tensor [] or [Hq]."""
    if isinstance(value, Tensor):
        _float_tensor(name, value, (0, 1), "[] or [Hq]")
        return value.dim() == 1
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"expected {name} to be a number or a float tensor [] or [Hq], got {type(value).__name__}")
    return False


def _float_tensor(name: str, value: Any, ranks: tuple[int, ...], shapes: str) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"expected {name} to be a float tensor {shapes}, got {type(value).__name__}")
    if not value.is_floating_point():
        raise InputError(f"expected {name} to be a float tensor {shapes}, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() not in ranks:
        raise ShapeError(f"expected {name} of shape {shapes}, got {list(value.shape)}")
