"""What a traced graph must equal: the user's function called with plain numbers, one pair at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from flexc import frontend
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import Graph

BATCH, HEADS, QUERIES, KEYS = 2, 4, 4, 5

_PAIRS = torch.tensor(list(itertools.product(range(BATCH), range(HEADS), range(QUERIES), range(KEYS))), dtype=torch.int32)
_SCORES = torch.linspace(-3, 3, len(_PAIRS))


def traced(function: Callable[..., Any]) -> Graph:
    """The graph of a score function (five arguments) or mask function (four)."""
    return traced_with_values(function)[0].graph


def traced_with_values(function: Callable[..., Any]) -> tuple[frontend.Trace, frontend.Binding]:
    """Its trace and captured values."""
    return frontend.trace(function, None) if frontend.arity(function) == 5 else frontend.trace(None, function)


def values_of_graph(function: Callable[..., Any]) -> torch.Tensor:
    """The graph's result for every pair."""
    trace, binding = traced_with_values(function)
    inputs = dict(zip(("batch", "head", "q_idx", "kv_idx"), _PAIRS.unbind(1)))
    environment = Environment({"score": _SCORES, **inputs}, binding.tensors, binding.scalars)
    ((_, root),) = trace.graph.outputs
    return evaluate([root], environment)[0].expand(len(_PAIRS))


def values_of_function(function: Callable[..., Any], as_tensors: bool) -> torch.Tensor:
    """The function's result for every pair, called with 0-d tensors or with Python numbers."""
    is_score = frontend.arity(function) == 5
    results = []
    for score, pair in zip(_SCORES, _PAIRS):
        arguments = [score, *pair] if is_score else [*pair]
        if not as_tensors:
            arguments = [a.item() for a in arguments]
        results.append(torch.as_tensor(function(*arguments)).reshape(()))
    return torch.stack([r.bool() if not is_score else r.float() for r in results])


def assert_same(function: Callable[..., Any], *, as_tensors: bool = True) -> None:
    """Tracing then evaluating equals calling the function. `as_tensors=False` for functions of Python numbers, such as `math.sqrt(q)`."""
    expected = values_of_function(function, as_tensors)
    torch.testing.assert_close(values_of_graph(function), expected, rtol=2e-6, atol=1e-6, equal_nan=True)
