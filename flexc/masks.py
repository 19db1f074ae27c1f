"""The usual masks. Each is a `Mask`, or makes one, and combines with others: `masks.causal & masks.document(ids)`.

True means that query `q_idx` may see key `kv_idx`. Lengths, widths and blocks are counted in tokens.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from flexc.algebra import Mask, mask
from flexc.errors import InputError, ShapeError
from flexc.pickling import made_again

Tensor = torch.Tensor


@mask
def everything(batch, head, q_idx, kv_idx):
    """Every query sees every key."""
    return True


noop = everything


@mask
def causal(batch, head, q_idx, kv_idx):
    """A query sees its own position and those before it."""
    return q_idx >= kv_idx


@made_again
def sliding_window(width: int) -> Mask:
    """A query sees the last `width` tokens, itself included: 0 <= q_idx - kv_idx < width.

    Source: local attention of Longformer, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825.
    """
    width = _positive("width", width)

    def sliding_window(batch, head, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < width)

    return Mask(sliding_window)


@made_again
def prefix(length: int | Tensor) -> Mask:
    """Every query sees the first `length` keys. A prefix language model is `causal | prefix(length)`, see `prefix_lm`.

    Args:
        length: tokens; an integer for all, or an integer tensor [B] with one length for each batch element.
    """
    return Mask(_first_keys("prefix", length), "prefix")


@made_again
def prefix_lm(length: int | Tensor) -> Mask:
    """Both directions inside the first `length` tokens, causal after them. `length` as in `prefix`.

    Source: prefix LM of T5, arXiv:1910.10683, section 3.2.
    """
    combined = causal | prefix(length)
    combined.__name__ = "prefix_lm"
    return combined


@made_again
def document(doc_ids: Tensor, kv_doc_ids: Tensor | None = None) -> Mask:
    """Tokens see each other only inside one document of a packed sequence.

    Args:
        doc_ids: integer tensor [S] or [B, S], the document of each token. Any numbers; sorted ones make the most empty blocks.
        kv_doc_ids: the documents of the keys, [Skv] or [B, Skv], where queries and keys are different tokens.

    Source: packing without cross-contamination, arXiv:2107.02027.
    """
    kv_doc_ids = doc_ids if kv_doc_ids is None else kv_doc_ids
    for name, ids in (("doc_ids", doc_ids), ("kv_doc_ids", kv_doc_ids)):
        _integer_tensor(name, ids, (1, 2), "[S] or [B, S]")
    if doc_ids.dim() != kv_doc_ids.dim():
        raise ShapeError(f"expected doc_ids and kv_doc_ids of the same rank, got {list(doc_ids.shape)} and {list(kv_doc_ids.shape)}")

    if doc_ids.dim() == 1:

        def document(batch, head, q_idx, kv_idx):
            return doc_ids[q_idx] == kv_doc_ids[kv_idx]

    else:

        def document(batch, head, q_idx, kv_idx):
            return doc_ids[batch, q_idx] == kv_doc_ids[batch, kv_idx]

    return Mask(document)


@made_again
def dilated(width: int, step: int) -> Mask:
    """A query sees `width` keys that lie `step` tokens apart: q_idx - kv_idx is 0, step, 2 step, …, (width - 1) step.

    Source: dilated sliding window of Longformer, arXiv:2004.05150.
    """
    width, step = _positive("width", width), _positive("step", step)
    span = width * step

    def dilated(batch, head, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < span) & (distance % step == 0)

    return Mask(dilated)


@made_again
def block_diagonal(block: int) -> Mask:
    """Tokens see each other only inside blocks of `block` tokens: q_idx // block == kv_idx // block."""
    block = _positive("block", block)

    def block_diagonal(batch, head, q_idx, kv_idx):
        return q_idx // block == kv_idx // block

    return Mask(block_diagonal)


@made_again
def neighborhood_2d(width: int, radius: int | tuple[int, int]) -> Mask:
    """Tokens are cells of a grid, row after row, `width` cells a row; a cell sees the cells at most `radius` away in each direction.

    Args:
        width: cells in a row of the grid. The number of rows follows from the length of the sequence.
        radius: cells; a pair gives rows and columns apart. A radius of 1 is a 3 × 3 window, cut off at the border of the grid.

    Source: neighborhood attention, arXiv:2204.07143 (which moves the window inward at the border; this one cuts it off).
    """
    width = _positive("width", width)
    down, across = radius if isinstance(radius, tuple) else (radius, radius)
    down, across = _not_negative("radius", down), _not_negative("radius", across)

    def neighborhood_2d(batch, head, q_idx, kv_idx):
        rows_apart = q_idx // width - kv_idx // width
        columns_apart = q_idx % width - kv_idx % width
        return (abs(rows_apart) <= down) & (abs(columns_apart) <= across)

    return Mask(neighborhood_2d)


@made_again
def padding(lengths_or_table: int | Tensor) -> Mask:
    """Keys that are padding are seen by nobody.

    Args:
        lengths_or_table: tokens in use, an integer or an integer tensor [B]; or a table of bool, [Skv] or [B, Skv], true where the key
            is a token and false where it is padding.
    """
    table = lengths_or_table
    if not isinstance(table, Tensor) or table.dtype != torch.bool:
        return Mask(_first_keys("padding", lengths_or_table), "padding")
    if table.dim() == 1:

        def padding(batch, head, q_idx, kv_idx):
            return table[kv_idx]

    elif table.dim() == 2:

        def padding(batch, head, q_idx, kv_idx):
            return table[batch, kv_idx]

    else:
        raise ShapeError(f"expected a padding table [Skv] or [B, Skv], got {list(table.shape)}")
    return Mask(padding)


@made_again
def sinks(count: int) -> Mask:
    """A query sees the first `count` tokens, as far as they are not after it: `sliding_window(width) | sinks(4)`.

    Source: StreamingLLM, arXiv:2309.17453.
    """
    count = _not_negative("count", count)

    def sinks(batch, head, q_idx, kv_idx):
        return (kv_idx < count) & (q_idx >= kv_idx)

    return Mask(sinks)


def _first_keys(name: str, length: int | Tensor) -> Any:
    """The function that allows keys below a length: one for all, or one for each batch element."""
    if isinstance(length, Tensor):
        _integer_tensor(f"the length of {name}", length, (0, 1), "[] or [B]")
        if length.dim() == 1:

            def first_keys_of_batch(batch, head, q_idx, kv_idx):
                return kv_idx < length[batch]

            return first_keys_of_batch
    else:
        length = _not_negative(f"the length of {name}", length)

    def first_keys(batch, head, q_idx, kv_idx):
        return kv_idx < length

    return first_keys


def _whole_number(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(f"expected {name} to be an integer number of tokens, got {value!r}") from None


def _positive(name: str, value: Any) -> int:
    number = _whole_number(name, value)
    if number < 1:
        raise ShapeError(f"expected {name} >= 1, got {number}")
    return number


def _not_negative(name: str, value: Any) -> int:
    number = _whole_number(name, value)
    if number < 0:
        raise ShapeError(f"expected {name} >= 0, got {number}")
    return number


def _integer_tensor(name: str, value: Any, ranks: tuple[int, ...], shapes: str) -> None:
    if not isinstance(value, Tensor):
        raise InputError(f"expected {name} to be an integer tensor {shapes}, got {type(value).__name__}")
    if value.dtype not in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        raise InputError(f"expected {name} to be an integer tensor {shapes}, got {str(value.dtype).removeprefix('torch.')}")
    if value.dim() not in ranks:
        raise ShapeError(f"expected {name} of shape {shapes}, got {list(value.shape)}")
