"""Mask functions that are made of others, and masks by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flexc import frontend
from flexc.algebra import plain_function
from flexc.compat.errors import CallableError, UsageError
from flexc.errors import InputError, TraceError
from flexc.pairs import evaluate
from flexc.target import named_device

Tensor = torch.Tensor
MaskFunction = Callable[..., Any]

_PAIRS_AT_ONCE = 2**22


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """Every query sees every key."""
    return batch == batch  # a tensor on its device where the function is called with tensors


def and_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """The mask function that allows what all the given ones allow; everything, of none.

    Raises:
        UsageError: not callable.
    """
    _refuse_uncallable(mask_mods)

    def and_mask(b, h, q_idx, kv_idx):
        allowed = b == b
        for mask in mask_mods:
            allowed = allowed & mask(b, h, q_idx, kv_idx)
        return allowed

    return and_mask


def or_masks(*mask_mods: MaskFunction) -> MaskFunction:
    """The mask function that allows what one of the given ones allows; nothing, of none.

    Raises:
        UsageError: not callable.
    """
    _refuse_uncallable(mask_mods)

    def or_mask(b, h, q_idx, kv_idx):
        allowed = b != b
        for mask in mask_mods:
            allowed = allowed | mask(b, h, q_idx, kv_idx)
        return allowed

    return or_mask


def _refuse_uncallable(mask_mods: tuple) -> None:
    for mask in mask_mods:
        if not callable(mask):
            raise UsageError(f"expected mask functions (batch, head, q_idx, kv_idx), got a {type(mask).__name__}")


def create_mask(
    mod_fn: Callable[..., Any], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: torch.device | str | None = None
) -> Tensor:
    """The mask by token: bool [B or 1, H or 1, Q_LEN, KV_LEN], true where allowed.

    Args:
        mod_fn: a mask function; or a score function, which allows what it does not make -inf of the score 0.
        device: default the accelerator, the CPU without one.

    Raises:
        CallableError: another number of arguments.
        TypeError: a mask function that gives no truth value.
        IndexRangeError: a captured tensor read out of range.
    """
    is_mask = arity_of(mod_fn) == 4
    device = default_device(device)
    B, H = (1 if size is None else size for size in (B, H))
    mask = torch.empty(B, H, Q_LEN, KV_LEN, dtype=torch.bool, device=device)
    rows_at_once = max(1, _PAIRS_AT_ONCE // max(1, B * H * KV_LEN))
    for first in range(0, Q_LEN, rows_at_once):
        rows = range(first, min(first + rows_at_once, Q_LEN))
        sizes = (range(B), range(H), rows, range(KV_LEN))
        places = torch.meshgrid(*(torch.arange(s.start, s.stop, device=device) for s in sizes), indexing="ij")
        columns = [place.flatten().int() for place in places]
        with torch.no_grad():
            if is_mask:
                allowed = evaluate(plain_function(mod_fn), columns, torch.float32, is_mask=True)
            else:
                score = torch.zeros(columns[0].shape, device=device)
                allowed = evaluate(plain_function(mod_fn), [score, *columns], torch.float32) != -math.inf
        mask[:, :, first : rows.stop] = allowed.view(B, H, len(rows), KV_LEN)
    return mask


def default_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, else the accelerator, else the CPU; with its number, as tensors name it."""
    named = named_device(device if device is not None else torch.accelerator.current_accelerator() or "cpu")
    return named if named.type == "cpu" or named.index is not None else torch.empty(0, device=named).device


def arity_of(function: Any) -> int:
    """4 for a mask function, 5 for a score function.

    Raises:
        CallableError: anything else.
    """
    if is_dynamo_compiling():
        from flexc.dynamo import arity

        return arity(function)
    try:
        count = frontend.arity(function)
    except (TraceError, InputError) as error:
        raise CallableError(str(error)) from error
    if count not in (4, 5):
        name = getattr(function, "__name__", type(function).__name__)
        raise CallableError(
            f"{name} takes {count} positional arguments: expected 4 (batch, head, q_idx, kv_idx) for a mask function, "
            "or 5 (score, batch, head, q_idx, kv_idx) for a score function"
        )
    return count
