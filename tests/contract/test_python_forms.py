"""Ways to write a function in Python, each equal to what the function itself says when it is called with numbers.

How a function becomes a graph has nothing to do with the backend, so the CPU speaks for all.
"""

import functools
import math
import operator
from math import sqrt as root

import numpy as np
import pytest
import torch

import flexc
from flexc.check import compare
from tests.accuracy import normal, qkv

slopes = normal(4, seed=50, grad=True)
bias = normal(2, 4, 17, 21, seed=51, grad=True)
single = normal(2, 1, 17, 21, seed=52)
starts = torch.tensor([[3], [7]])
temperature = normal(seed=53, grad=True)
factors = [1.0, 0.5, 0.25, 2.0]
widths = (3, 5, 9, 20)
CAP = 3.0
limits = {"near": 4, "far": 9}
small = torch.tensor([0.1, 0.2, 0.3])


def distance(q_idx, kv_idx):
    return q_idx - kv_idx


def is_near(q_idx, kv_idx, within=6):
    return abs(distance(q_idx, kv_idx)) < within


# --- scores --------------------------------------------------------------------------------------------------------------------------


def if_else(score, batch, head, q_idx, kv_idx):
    if q_idx >= kv_idx:
        return score
    else:
        return score * 0.5


def nested_ifs(score, batch, head, q_idx, kv_idx):
    if head < 2:
        if q_idx > kv_idx and batch == 1:
            score = score * slopes[head]
        elif q_idx == kv_idx or kv_idx == 0:
            score = score - 1
    return score


def conditional_expression(score, batch, head, q_idx, kv_idx):
    return score if head == 0 else score * 2


def augmented(score, batch, head, q_idx, kv_idx):
    score += 1
    score *= slopes[head]
    score -= q_idx
    score /= 3
    return score


def augmented_keeps_the_argument(score, batch, head, q_idx, kv_idx):
    d = q_idx
    d -= kv_idx
    return score + d * q_idx * 0.01


def list_by_head(score, batch, head, q_idx, kv_idx):
    return score * factors[head]


def square_root_of_an_index(score, batch, head, q_idx, kv_idx):
    return score * math.sqrt(q_idx + 1) + root(kv_idx)


def numpy_function(score, batch, head, q_idx, kv_idx):
    return np.tanh(score) * np.float32(1.5) + np.sqrt(q_idx)


def minimum_and_maximum(score, batch, head, q_idx, kv_idx):
    return min(score, 0.5) + max(q_idx - kv_idx, -3, 2 - kv_idx) * 0.1


def static_loop(score, batch, head, q_idx, kv_idx):
    for step in range(1, 4):
        score = score + small[step - 1] * (q_idx % step == 0)
    return score


def list_comprehension(score, batch, head, q_idx, kv_idx):
    return score + sum([(kv_idx % n) * 0.01 for n in (2, 3, 5)])


def nested_function(score, batch, head, q_idx, kv_idx):
    def capped(x):
        return CAP * torch.tanh(x / CAP)

    return capped(score) + capped(distance(q_idx, kv_idx) * 0.1)


def chained_index(score, batch, head, q_idx, kv_idx):
    return score + bias[batch][head][q_idx][kv_idx]


def index_with_a_constant(score, batch, head, q_idx, kv_idx):
    return score + single[batch, 0, q_idx, kv_idx]


def vector(score, batch, head, q_idx, kv_idx):
    return score + (small * kv_idx).sum()


def zero_dimensional(score, batch, head, q_idx, kv_idx):
    return score * temperature


def methods(score, batch, head, q_idx, kv_idx):
    return score.tanh().mul(2).add(slopes[head]).clamp(-1.5, 1.5) + (q_idx - kv_idx).abs().float().sqrt()


def unary(score, batch, head, q_idx, kv_idx):
    return -score + abs(-q_idx + kv_idx) + +score * 2


def powers(score, batch, head, q_idx, kv_idx):
    return score**2 * 2.0 ** (-head) + 2 ** -(head + 1) + q_idx**0.5


def truth_value_as_a_number(score, batch, head, q_idx, kv_idx):
    return score + (q_idx > kv_idx) * 0.5 - (head == 1)


def integer_division(score, batch, head, q_idx, kv_idx):
    return score + (kv_idx - q_idx) // 4 + (kv_idx - q_idx) % 5 * 0.1 + divided(q_idx, 3)


def divided(x, y):
    return x / y


def shifts_and_bits(score, batch, head, q_idx, kv_idx):
    return score + ((q_idx >> 2) & 3) - ((kv_idx << 1) ^ 5) * 0.1 + (q_idx | 1) * 0.01


def dictionary(score, batch, head, q_idx, kv_idx):
    return score * limits["near"] - limits["far"]


def default_arguments(score, batch, head, q_idx, kv_idx, cap=CAP, table=slopes):
    return cap * torch.tanh(score / cap) * table[head]


def keyword_helper(score, batch, head, q_idx, kv_idx):
    return torch.where(is_near(kv_idx=kv_idx, q_idx=q_idx, within=4), score, score - 2.0)


def with_scale(factor, score, batch, head, q_idx, kv_idx, *, offset):
    return score * factor + offset


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(normal(4, seed=54))
        self.register_buffer("start", torch.tensor(3))
        self.strength = 0.7

    def forward(self, score, batch, head, q_idx, kv_idx):
        return score + self.strength * self.weight[head] * (q_idx - self.start)


class Callable:
    def __init__(self, strength):
        self.strength = strength

    def __call__(self, score, batch, head, q_idx, kv_idx):
        return score * self.strength

    def method(self, score, batch, head, q_idx, kv_idx):
        return score + self.strength * q_idx

    @staticmethod
    def static(score, batch, head, q_idx, kv_idx):
        return score - q_idx


module = Module()
SCORES = {
    **{
        f.__name__: f
        for f in (
            *(if_else, nested_ifs, conditional_expression, augmented, augmented_keeps_the_argument, list_by_head, square_root_of_an_index),
            *(numpy_function, minimum_and_maximum, static_loop, list_comprehension, nested_function, chained_index, index_with_a_constant),
            *(vector, zero_dimensional, methods, unary, powers, truth_value_as_a_number, integer_division, shifts_and_bits, dictionary),
            *(default_arguments, keyword_helper),
        )
    },
    "partial": functools.partial(with_scale, 0.5, offset=2.0),
    "module": module,
    "callable object": Callable(0.3),
    "bound method": Callable(0.3).method,
    "static method": Callable.static,
    "lambda": lambda s, b, h, i, j: s - slopes[h] * (i - j),
    "flexc.where": lambda s, b, h, i, j: flexc.where(i > j, s, s - 1),
    "constant and run-time number": lambda s, b, h, i, j: s * scaled_by + offset_by,
    "NumPy table": lambda s, b, h, i, j: s * float(numbers[1]) + numbers[2],
}
scaled_by, offset_by = flexc.constant(0.5), flexc.runtime(2.0)
numbers = np.array([1.0, 2.0, 3.0], dtype=np.float32)


@pytest.mark.parametrize("form", SCORES)
def test_score(form):
    captured = {"slopes": slopes, "bias": bias, "temperature": temperature, "weight": module.weight}
    kernel = flexc.attention(SCORES[form], backend="cpu")
    report = compare(kernel, *qkv(q_len=17, kv_len=21), captured)
    assert report.ok, f"\n{report}"


# --- masks ---------------------------------------------------------------------------------------------------------------------------


def several_ifs(batch, head, q_idx, kv_idx):
    if kv_idx > q_idx:
        return False
    if head == 0:
        return True
    return q_idx - kv_idx < 5


def loop_with_an_exit(batch, head, q_idx, kv_idx):
    for n in range(4):
        if head == n:
            return q_idx - kv_idx <= widths[n]
    return False


MASKS = {
    "and": lambda b, h, i, j: i >= j and i - j < 5,
    "or": lambda b, h, i, j: i >= j or j < 3,
    "not": lambda b, h, i, j: not i < j,
    "not of and of or": lambda b, h, i, j: not (i < j and (h == 1 or j > 10)),
    "chained comparison": lambda b, h, i, j: 0 <= i - j < 5,
    "bitwise": lambda b, h, i, j: (i >= j) & ~(j == 2) | (h == 3) ^ (j == 4),
    "operator": lambda b, h, i, j: operator.ge(i, j),
    "torch.logical": lambda b, h, i, j: torch.logical_and(i >= j, torch.logical_not(j == 3)),
    "ifs": several_ifs,
    "loop with an exit": loop_with_an_exit,
    "width by head": lambda b, h, i, j: 0 <= i - j < widths[h],
    "membership": lambda b, h, i, j: i >= j if h in (0, 2) else i <= j,
    "helper": lambda b, h, i, j: is_near(i, j),
    "table of batch": lambda b, h, i, j: i + starts[b, 0] >= j,
    "chained table of batch": lambda b, h, i, j: i + starts[b][0] >= j,
    "constant": lambda b, h, i, j: True,
    "all and any": lambda b, h, i, j: all((i >= j, j != 1)) or any([j == 0]),
    "bound of floats": lambda b, h, i, j: j <= i * 0.7 + 1.5,
    "modulo of negatives": lambda b, h, i, j: (j - i) % 3 != 1,
    "partial": functools.partial(lambda n, b, h, i, j: i - j < n, 4),
    "inverted": ~flexc.mask(lambda b, h, i, j: i < j),
    "mask with a plain function": flexc.masks.causal & (lambda b, h, i, j: j != 1),
}


@pytest.mark.parametrize("form", MASKS)
def test_mask(form):
    kernel = flexc.attention(None, MASKS[form], backend="cpu")
    report = compare(kernel, *qkv(q_len=17, kv_len=21), {})
    assert report.ok, f"\n{report}"
