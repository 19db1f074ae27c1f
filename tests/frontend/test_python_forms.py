"""Every way in which Python users write a score or a mask: tracing then evaluating equals calling the function."""

from __future__ import annotations

import builtins
import math
import operator
from functools import reduce

import pytest
import torch

from flexc import frontend
from flexc.ir.graph import topological
from tests.frontend.truth import assert_same, traced


def test_no_functions_make_an_empty_graph():
    trace, binding = frontend.trace(None, None)
    assert trace.graph.outputs == () and binding == frontend.Binding((), ())


def _while(s, b, h, q, k):
    rounds = 0
    while rounds < 3 and q > rounds:
        rounds += 1
    return s + rounds


def _loop(s, b, h, q, k):
    for step in range(4):
        s = s + step * (q - k)
    return s


def _early_return(s, b, h, q, k):
    if q < k:
        return float("-inf")
    if h == 0:
        return s
    return s * 2


def _elif(s, b, h, q, k):
    if h == 0:
        s += 1
    elif h == 1:
        s -= 1
    elif h == 2:
        s *= 3
    else:
        s /= 2
    return s


def _match(s, b, h, q, k):
    match h:
        case 0:
            return s
        case 1 | 2:
            return s + q
        case _:
            return s - k


def _unpacking(s, b, h, q, k):
    low, high = (q, k) if q < k else (k, q)
    return s + (high - low)


def _comprehension(s, b, h, q, k):
    return s + sum([i * q for i in range(3)]) + sum(k * i for i in (1, 2))


def _nested_function(s, b, h, q, k):
    def bias(distance):
        return -distance if distance > 0 else distance

    return s + bias(q - k)


def _walrus(s, b, h, q, k):
    return s - d if (d := q - k) > 1 else s


SCORES = {
    "plus": lambda s, b, h, q, k: s + q,
    "reflected": lambda s, b, h, q, k: 2 - s,
    "floor division of negatives": lambda s, b, h, q, k: s + (q - k) // 2,
    "modulo of negatives": lambda s, b, h, q, k: s + (q - k) % 3,
    "reflected division": lambda s, b, h, q, k: 3 / (q + 1) + 7 // (k + 1) + 7 % (k + 1),
    "divmod": lambda s, b, h, q, k: s + sum(divmod(q - k, 2)),
    "negation": lambda s, b, h, q, k: -s - (-q),
    "unary plus": lambda s, b, h, q, k: +s,
    "square": lambda s, b, h, q, k: s**2,
    "cube": lambda s, b, h, q, k: s**3.0,
    "zeroth power": lambda s, b, h, q, k: s + q**0,
    "inverse power": lambda s, b, h, q, k: s + (q + 1.0) ** -2,
    "square root as power": lambda s, b, h, q, k: (q + 1.0) ** 0.5 + (k + 1.0) ** -0.5,
    "power of two": lambda s, b, h, q, k: s * 2 ** (h * 2),
    "power of a half": lambda s, b, h, q, k: s * 0.5 ** (h + 1),
    "ALiBi slope": lambda s, b, h, q, k: s - 2 ** (-8.0 * (h + 1) / 4) * abs(q - k),
    "whole power": lambda s, b, h, q, k: s + 3**h,
    "shifts": lambda s, b, h, q, k: s + (q << 2) + (k >> 1) + (1 << h),
    "bits": lambda s, b, h, q, k: s + (q & 3) + (k | 4) + (q ^ k) + ~q,
    "if": _early_return,
    "elif": _elif,
    "match": _match,
    "while": _while,
    "static loop": _loop,
    "conditional expression": lambda s, b, h, q, k: s if h == 0 else s * 2,
    "swap": _unpacking,
    "comprehension": _comprehension,
    "nested function": _nested_function,
    "assignment expression": _walrus,
    "min and max": lambda s, b, h, q, k: max(min(s, 1.0), -1.0, q - 3) + min([q, k, 2]),
    "min with a key": lambda s, b, h, q, k: s + min(q, k, key=lambda x: -x),
    "abs": lambda s, b, h, q, k: s + abs(q - k),
    "round": lambda s, b, h, q, k: round(s) + round(s, 1),
    "int": lambda s, b, h, q, k: s + int(s),
    "float": lambda s, b, h, q, k: float(q) / 3,
    "bool": lambda s, b, h, q, k: s + bool(q),
    "pow": lambda s, b, h, q, k: pow(s, 2),
    "sum of comparisons": lambda s, b, h, q, k: s + sum([q > 1, k > 1, h > 1]),
    "any and all": lambda s, b, h, q, k: s if any(q == i for i in (1, 3)) and all([k > 0, h > 0]) else -s,
    "in a tuple": lambda s, b, h, q, k: s if h in (0, 2) else -s,
    "not in": lambda s, b, h, q, k: s if h not in [1] else -s,
    "sorted": lambda s, b, h, q, k: s + sorted([q, k])[0],
    "reduce": lambda s, b, h, q, k: reduce(operator.add, [s, q, k]),
    "type of a result": lambda s, b, h, q, k: s + (1 if isinstance(3, int) and not isinstance(2.5, int) and type(h) is type(k) else 5),
    "number as a whole": lambda s, b, h, q, k: 1.5,
    "whole number": lambda s, b, h, q, k: q * 2,
    "infinity": lambda s, b, h, q, k: s if q >= k else -math.inf,
    "qualified builtins": lambda s, b, h, q, k: builtins.max(s, builtins.float(q)),
}


@pytest.mark.parametrize("name", SCORES)
def test_score(name):
    assert_same(SCORES[name], as_tensors=False)


MASKS = {
    "comparison": lambda b, h, q, k: q >= k,
    "reflected comparison": lambda b, h, q, k: 2 > k,
    "chained comparison": lambda b, h, q, k: 0 <= q - k < 2,
    "and": lambda b, h, q, k: q >= k and h > 0,
    "or": lambda b, h, q, k: q >= k or h == 0 or k == 1,
    "not": lambda b, h, q, k: not q >= k,
    "not of and": lambda b, h, q, k: not (q >= k and b == 0),
    "conditional": lambda b, h, q, k: q >= k if h > 1 else k > 2,
    "constant on a path": lambda b, h, q, k: True if h == 0 else q >= k,
    "False on a path": lambda b, h, q, k: q >= k if h else False,
    "always": lambda b, h, q, k: True,
    "equal": lambda b, h, q, k: q % 2 == k % 2,
    "unequal": lambda b, h, q, k: q != k,
    "dilated": lambda b, h, q, k: (q - k) % 2 == 0 and abs(q - k) < 4,
    "symbols": lambda b, h, q, k: (q >= k) & (h > 0) | (b == 1) ^ (q == 2),
    "exclusive": lambda b, h, q, k: (q > k) != (h > 1),
    "truth of a number": lambda b, h, q, k: True if q else False,
}


@pytest.mark.parametrize("name", MASKS)
def test_mask(name):
    assert_same(MASKS[name], as_tensors=False)


def test_inverted_truth_is_not():
    assert_same(lambda b, h, q, k: ~(q >= k))


def test_sum_of_truths_is_or_and_product_is_and():
    """As PyTorch has it for bool tensors."""
    assert_same(lambda b, h, q, k: (q >= k) + (h == 0))
    assert_same(lambda b, h, q, k: (q >= k) * (h == 0))


def test_an_opposite_condition_is_decided_already():
    """`k > q` after `q >= k` has failed is known: two paths, not three."""

    def mask(b, h, q, k):
        if q >= k:
            return h == 0
        elif q < k:
            return h == 1
        raise AssertionError("never reached")

    assert_same(mask, as_tensors=False)


def test_not_a_number_is_neither_below_nor_above():
    """For floats `x >= 1` is not the opposite of `x < 1`."""

    def score(s, b, h, q, k):
        x = s * (q - 1) / (q - 1)
        if x < 1:
            return 1.0
        if x >= 1:
            return 2.0
        return 3.0

    assert_same(score)


def test_a_condition_asked_twice_forks_once():
    def score(s, b, h, q, k):
        for _ in range(20):
            s = s + 1 if q >= k else s - 1
        return s

    graph = traced(score)
    assert sum(node.op == "where" for node in graph.nodes()) == 1
    assert_same(score, as_tensors=False)


def test_and_keeps_only_what_the_path_leaves_open():
    graph = traced(lambda b, h, q, k: 0 <= q - k < 3)
    assert {node.op for node in graph.nodes()} == {"input", "sub", "const", "ge", "lt", "and"}


def test_a_function_with_up_to_64_paths_is_merged():
    def score(s, b, h, q, k):
        for bit in range(6):
            if (q * 5 + k) >> bit & 1:
                s = s + 3**bit
        return s

    assert_same(score, as_tensors=False)


def test_printing_shows_the_expression(capsys):
    def score(s, b, h, q, k):
        print(s + q, f"{q - k:>3}", repr(h))
        return s

    traced(score)
    assert capsys.readouterr().out == "score + q_idx q_idx - kv_idx <head: int32>\n"


def test_every_operation_carries_the_users_line():
    """Equal nodes are one object and keep the first line in the process, hence a number used nowhere else."""

    def score(s, b, h, q, k):
        distance = q - 7919
        return s / torch.tanh(distance)

    first = score.__code__.co_firstlineno
    lines = {n.op: n.where for n in topological([traced(score).score]) if n.op != "input"}
    assert lines["sub"].line == first + 1 and lines["sub"].text == "distance = q - 7919"
    assert {lines[op].line for op in ("cast", "tanh", "truediv")} == {first + 2}
    assert lines["truediv"].file == __file__


def test_a_helpers_line_is_the_innermost():
    def double(x):
        return x * 7907

    def score(s, b, h, q, k):
        return double(s)

    assert traced(score).score.where.text == "return x * 7907"
