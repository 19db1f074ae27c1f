"""Elements of small arrays and lists by static and by traced indices."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from flexc.frontend.powers import is_nonnegative
from flexc.frontend.session import refuse
from flexc.frontend.symbol import Array, Symbol, call
from flexc.frontend.vector import MOST_ELEMENTS, elements_of, is_array, object_array, stacked, wrap
from flexc.ir.graph import BOOL, FLOAT32


def index(value: Any, key: Any) -> Any:
    """value[key] for an array of any kind, where value or key is traced."""
    if isinstance(value, Array):
        return value[key]  # pyright: ignore[reportIndexIssue]
    return index_elements(elements_of(value), key)


def index_elements(elements: np.ndarray, key: Any) -> Any:
    """elements[key]; a symbol in the key selects with a tree of comparisons."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(is_array(k) for k in keys):
        return _index_by_arrays(elements, keys)
    if Ellipsis in [k for k in keys if not isinstance(k, Symbol)]:
        position = next(i for i, k in enumerate(keys) if k is Ellipsis)
        consumed = sum(k is not None for k in keys) - 1
        keys[position : position + 1] = [slice(None)] * (elements.ndim - consumed)
    if sum(k is not None for k in keys) > elements.ndim:
        refuse(
            f"{len(keys)} indices into an array with {elements.ndim} axes", why="one index for each axis at most", instead="fewer indices"
        )
    traced: list[tuple[int, Any]] = []
    axis = 0
    static: list[Any] = []
    for k in keys:
        if isinstance(k, Symbol):
            traced.append((axis, k))
            static.append(slice(None))
        else:
            static.append(_static_key(k))
        axis += not isinstance(static[-1], int)
    picked = elements[tuple(static)]
    for axis, k in reversed(traced):
        rows = [np.take(picked, i, axis) for i in range(picked.shape[axis])]
        picked = select(rows, k)
    return wrap(picked)


def _static_key(k: Any) -> Any:
    if isinstance(k, slice):
        return slice(*(None if x is None else operator.index(x) for x in (k.start, k.stop, k.step)))
    return k if k is None else operator.index(k)


def _index_by_arrays(elements: np.ndarray, keys: list[Any]) -> Any:
    arrays = [elements_of(k) if is_array(k) else object_array([k], ()) for k in keys]
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    spread = [np.broadcast_to(a, shape).ravel() for a in arrays]
    results = [elements_of(index_elements(elements, tuple(s[i] for s in spread))) for i in range(int(np.prod(shape)))]
    rows = stacked(results, 0)
    return wrap(rows.reshape((*shape, *rows.shape[1:])))


def select(rows: Sequence[Any], position: Symbol) -> Any:
    """rows[position]: comparisons in a balanced tree. Negative positions count from the end; past the ends, the last one there."""
    if not rows:
        refuse(f"index {position} into an empty list", why="there is nothing to select", instead="at least one element")
    if len(rows) > MOST_ELEMENTS:
        refuse(
            f"index {position} into a list of {len(rows)}",
            why=f"lists are selected from with comparisons, at most {MOST_ELEMENTS} elements",
            instead="a captured tensor, torch.tensor(values)",
        )
    if position.node.dtype in (BOOL, FLOAT32):
        refuse(f"index {position} ({position.node.dtype})", why="an index is an integer", instead=".int(), or // in place of /")
    if not is_nonnegative(position.node):
        position = call("where", call("lt", position, 0), call("add", position, len(rows)), position)

    def between(start: int, end: int) -> np.ndarray:
        if end - start == 1:
            return elements_of(rows[start])
        middle = (start + end) // 2
        left, right = between(start, middle), between(middle, end)
        if left.shape != right.shape:
            refuse("a list of arrays of unequal shapes indexed by a traced value", why="the result needs one shape", instead="equal shapes")
        condition = call("lt", position, middle)
        chosen = [a if a is b else call("where", condition, a, b) for a, b in zip(left.flat, right.flat, strict=True)]
        return object_array(chosen, left.shape)

    return between(0, len(rows))
