"""Functions of a whole small array: reductions, products, and those that move elements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flexc.frontend.indexing import index
from flexc.frontend.session import refuse
from flexc.frontend.symbol import Array, Symbol, call, cast, node_of
from flexc.frontend.vector import broadcast, elements_of, object_array, stacked, wrap
from flexc.ir.graph import BOOL, INT32


def _reduction(op: str, empty: Any = None) -> Callable[..., Any]:
    """A reduction over all axes or some."""

    def reduce(input: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: Any = None, **options: Any) -> Any:
        elements = elements_of(input)
        axes = dim if axis is None else axis
        axes = tuple(range(elements.ndim)) if axes is None else ((axes,) if isinstance(axes, int) else tuple(axes))
        axes = tuple(a % elements.ndim for a in axes) if elements.ndim else ()
        kept = [a for a in range(elements.ndim) if a not in axes]
        moved = elements.transpose([*kept, *axes])
        rows = moved.reshape([elements.shape[a] for a in kept] + [-1]) if elements.size else moved.reshape(-1)
        results = [_fold(op, list(row), empty) for row in rows.reshape(-1, rows.shape[-1])]
        shape = [1 if a in axes else elements.shape[a] for a in range(elements.ndim) if keepdim or a in kept]
        return wrap(object_array(results, shape))

    return reduce


def _fold(op: str, values: list[Any], empty: Any) -> Any:
    if op == "add":
        # A sum of truth values counts them.
        values = [cast(v, INT32) if node_of(v).dtype == BOOL else v for v in values]
    if not values:
        if empty is None:
            refuse(f"`{op}` over no elements", why="there is nothing to reduce", instead="at least one element")
        return Symbol(node_of(empty))
    result = functools.reduce(lambda a, b: call(op, a, b), values)
    return result if isinstance(result, Symbol) else Symbol(node_of(result))


_sum = _reduction("add", 0)
_any = _reduction("or", False)


def _truths(reduce: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, *args, **kwargs: reduce(broadcast(lambda x: cast(x, BOOL), (input,), {}), *args, **kwargs)


def _mean(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    total = _sum(input, dim, keepdim, **options)
    count = elements_of(input).size // max(elements_of(total).size, 1)
    return broadcast(lambda x: call("truediv", x, count), (total,), {})


def _extreme(op: str) -> Callable[..., Any]:
    reduce = _reduction(op)

    def extreme(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        result = reduce(input, dim, keepdim, **options)
        return result if dim is None else SimpleNamespace(values=result)

    return extreme


def matmul(a: Any, b: Any) -> Any:
    """a @ b for one and two axes."""
    left, right = elements_of(a), elements_of(b)
    if not (left.ndim and right.ndim) or left.shape[-1] != right.shape[-2 if right.ndim > 1 else 0] or max(left.ndim, right.ndim) > 2:
        refuse(
            f"@ of shapes {left.shape} and {right.shape}", why="the sizes do not fit", instead="vectors or matrices whose inner sizes agree"
        )
    rows, columns = left.reshape(-1, left.shape[-1]), right.reshape(right.shape[0], -1)
    results = [_fold("add", [call("mul", x, y) for x, y in zip(row, column, strict=True)], 0) for row in rows for column in columns.T]
    return wrap(object_array(results, left.shape[:-1] + right.shape[1:]))


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    product = matmul(input, wrap(elements_of(weight).T))
    return product if bias is None else broadcast(lambda x, y: call("add", x, y), (product, bias), {})


def _embedding(input: Any, weight: Any, *args: Any, **options: Any) -> Any:
    return index(weight, input)


def _stack(tensors: Any, dim: int = 0, *, axis: int | None = None, out: None = None) -> Any:
    return wrap(stacked([elements_of(t) for t in tensors], dim if axis is None else axis))


def _cat(tensors: Any, dim: int = 0, *, axis: int | None = None, out: None = None) -> Any:
    return wrap(np.concatenate([elements_of(t) for t in tensors], axis=dim if axis is None else axis))


def _reshape(input: Any, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return wrap(elements_of(input).reshape(tuple(map(operator.index, sizes))))


def _unsqueeze(input: Any, dim: int) -> Any:
    return wrap(np.expand_dims(elements_of(input), dim))


def _squeeze(input: Any, dim: Any = None) -> Any:
    return wrap(elements_of(input).squeeze(dim))


def _flatten(input: Any) -> Any:
    return wrap(elements_of(input).reshape(-1))


def _unbind(input: Any, dim: int = 0) -> tuple:
    return tuple(wrap(row) for row in np.moveaxis(elements_of(input), dim, 0))


def _norm(input: Any, *args: Any, **options: Any) -> Any:
    if args or options:
        refuse("norm with options", why="only the Euclidean norm of all elements is known", instead="(x * x).sum().sqrt()")
    return call("sqrt", _sum(broadcast(lambda x: call("mul", x, x), (input,), {})))


def _same_array(input: Any, *args: Any, **options: Any) -> Any:
    return wrap(elements_of(input))


WHOLE: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "nansum": _sum,
    "prod": _reduction("mul", 1),
    "mean": _mean,
    "amax": _reduction("maximum"),
    "amin": _reduction("minimum"),
    "max": _extreme("maximum"),
    "min": _extreme("minimum"),
    "any": _truths(_any),
    "all": _truths(_reduction("and", True)),
    "dot": matmul,
    "inner": matmul,
    "vdot": matmul,
    "matmul": matmul,
    "mm": matmul,
    "mv": matmul,
    "linear": _linear,
    "embedding": _embedding,
    "stack": _stack,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "reshape": _reshape,
    "view": _reshape,
    "unsqueeze": _unsqueeze,
    "expand_dims": _unsqueeze,
    "squeeze": _squeeze,
    "flatten": _flatten,
    "ravel": _flatten,
    "unbind": _unbind,
    "norm": _norm,
    "vector_norm": _norm,
    "contiguous": _same_array,
    "clone": _same_array,
    "cpu": _same_array,
    "cuda": _same_array,
    "dim": lambda input: elements_of(input).ndim,
    "numel": lambda input: elements_of(input).size,
}
_TWO_SIDED = {"max": "maximum", "min": "minimum"}


def takes_whole(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether this call is about a whole array: torch.max(x, y) of two values is not, torch.max(x) and torch.max(x, 0) are."""
    if name in _TWO_SIDED and (len(args) > 1 or "other" in kwargs):
        other = kwargs.get("other", args[1] if len(args) > 1 else None)
        return not isinstance(other, Array | Symbol | torch.Tensor)
    return True


def two_sided(name: str) -> Callable[..., Any]:
    """torch.max or torch.min of two values."""
    return lambda input, other, out=None: call(_TWO_SIDED[name], input, other)


def tensor_of(data: Any) -> Any:
    """What torch.tensor(data) makes of data with traced values in it."""
    return wrap(elements_of(data))
