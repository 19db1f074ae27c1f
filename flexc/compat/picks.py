"""Picking entries of a mask's batch, heads and rows of blocks: which entries, and where the rule finds what it now stands for.

The functions made here are closures of few codes over numbers, so that masks picked at other places share their traces.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexc.errors import IndexRangeError, InputError, ShapeError

Tensor = torch.Tensor
Index = int | slice | Tensor | Sequence[int]
Place = Callable[[Any], Any]  # a place in the picked mask → the place in the mask that it was picked from


def as_selection(index: Any, size: int, what: str) -> slice | Tensor:
    """An index as what keeps its dimension: a slice of known borders, or an integer tensor [k].

    Raises:
        IndexRangeError: a number past the end.
        InputError: not an integer, a slice or a list of integers.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        if step < 1:
            raise InputError(f"expected a slice of {what} with a step of at least 1, got {index}")
        return slice(start, max(start, stop), step)
    if not isinstance(index, list | tuple | Tensor) or (isinstance(index, Tensor) and index.dim() == 0):
        entry = _whole(index, what)
        if not -size <= entry < size:
            raise IndexRangeError(f"{what} {entry} of a block mask that has {size}")
        return slice(entry % size, entry % size + 1, 1)
    chosen = torch.as_tensor(index)
    if chosen.dim() != 1 or (chosen.is_floating_point() and len(chosen)):
        raise _not_an_index(index, what)
    if chosen.dtype == torch.bool:
        if len(chosen) != size:
            raise IndexRangeError(f"a table of {len(chosen)} truth values picks from {size} {what}: expected one each")
        chosen = chosen.nonzero()[:, 0]
    chosen = chosen.long()
    if bool(((chosen < -size) | (chosen >= size)).any()):
        raise IndexRangeError(f"{what} {chosen.tolist()} of a block mask that has {size}")
    return chosen % max(size, 1)


def _whole(index: Any, what: str) -> int:
    try:
        if isinstance(index, bool):
            raise TypeError
        return operator.index(index)
    except TypeError:
        raise _not_an_index(index, what) from None


def _not_an_index(index: Any, what: str) -> InputError:
    return InputError(f"expected {what} to be an integer, a slice or a list of integers, got {index!r}")


def count(selection: slice | Tensor) -> int:
    """How many entries are picked."""
    return len(range(selection.start, selection.stop, selection.step)) if isinstance(selection, slice) else len(selection)


def place_of_entry(selection: slice | Tensor, size: int) -> Place | None:
    """For batch or heads; None where nothing moves."""
    if count(selection) == 1:
        # One entry of many stands for all; the only entry stays what it is, for every batch element or head that the mask is used with.
        return None if size == 1 else _always(int(_first(selection)))
    if isinstance(selection, Tensor):
        return _looked_up(selection)
    if (selection.start, selection.step) == (0, 1):
        return None
    return _shifted(selection.start) if selection.step == 1 else _strided(selection.start, selection.step)


def place_of_query(selection: slice | Tensor, block: int) -> Place | None:
    """For queries, of which a row holds `block`; None where nothing moves."""
    if isinstance(selection, Tensor):
        return _in_looked_up_row(selection, block)
    if selection.step == 1 or count(selection) == 1:
        return None if selection.start == 0 else _shifted(selection.start * block)
    return _in_strided_row(selection.start, selection.step, block)


def queries_in(selection: slice | Tensor, rows: int, q_len: int, block: int) -> int:
    """Queries in the picked rows, of which the last may be shorter.

    Raises:
        ShapeError: a short row before another one.
    """
    picked = count(selection)
    last = q_len - (rows - 1) * block
    if not picked or last >= block:
        return min(picked * block, q_len) if rows == 1 else picked * block
    chosen = list(range(selection.start, selection.stop, selection.step)) if isinstance(selection, slice) else selection.tolist()
    if rows - 1 in chosen[:-1]:
        raise ShapeError(f"the last row of the block mask has {last} of {block} queries: expected it last in {chosen}, or not at all")
    return picked * block - (block - last if chosen[-1] == rows - 1 else 0)


def _first(selection: slice | Tensor) -> Any:
    return selection.start if isinstance(selection, slice) else selection[0]


def _always(entry: int) -> Place:
    return lambda place: entry


def _shifted(start: int) -> Place:
    return lambda place: place + start


def _strided(start: int, step: int) -> Place:
    return lambda place: place * step + start


def _looked_up(entries: Tensor) -> Place:
    return lambda place: entries[place]


def _in_strided_row(start: int, step: int, block: int) -> Place:
    return lambda place: (place // block * step + start) * block + place % block


def _in_looked_up_row(rows: Tensor, block: int) -> Place:
    return lambda place: rows[place // block] * block + place % block


def picked_rule(rule: Callable[..., Any], batch: Place | None, head: Place | None, query: Place | None) -> Callable[..., Any]:
    """The rule of a picked mask."""
    of_batch, of_head, of_query = (place or _same for place in (batch, head, query))

    def picked(b, h, q_idx, kv_idx):
        return rule(of_batch(b), of_head(h), of_query(q_idx), kv_idx)

    return picked


def _same(place: Any) -> Any:
    return place
