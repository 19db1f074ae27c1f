"""What the right answer is: attention in plain PyTorch, float64, applying the user's *function*.

Nothing here knows the graph, the tracer or a backend, so it shares no bug with them. How a function of one pair is called on all of them:
`flexc.pairs`. A masked pair is never given to the score function, so its NaNs and its indices out of range do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexc.errors import InputError, ShapeError
from flexc.pairs import evaluate

_PAIRS_AT_ONCE = 2**22  # float64 scores of one chunk of rows: 32 MB


def reference(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    kv_len: int | Tensor | None = None,
    one_by_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention in float64, differentiable for q, k, v and for captured tensors that require a gradient.

    Args:
        score_mod: (score, batch, head, q_idx, kv_idx) → score; None for the score itself. `head` is the query head.
        mask_mod: (batch, head, q_idx, kv_idx) → truth value; None for all allowed.
        q, k, v: [B, Hq, Sq, D], [B, Hkv, Skv, D], [B, Hkv, Skv, Dv], any float dtype; Hq is a multiple of Hkv.
        scale: factor of q·k; None for 1 / sqrt(D).
        sink: [Hq], a finite logit for each query head that takes part in the softmax and has no value.
        q_offset: position of the first query row, a number or an integer tensor [B]: row r is at q_idx = q_offset + r.
        kv_len: keys that are there, a number or an integer tensor [B]: no row sees the rest, whatever it holds.
        one_by_one: call the functions once for each pair, even where they could be vectorised (about 0.1 ms a pair).

    Returns:
        out [B, Hq, Sq, Dv] and lse [B, Hq, Sq] (natural logarithm), both float64. A row without an allowed key (mask false, or a score of
        −inf) has output 0, lse −inf and no gradient.

    Raises:
        InputError, ShapeError: q, k and v are no tensors, or do not fit each other; a kernel in place of a function.
        IndexRangeError: the result depends on an element outside a captured tensor.
        TypeError: a score function returned a truth value, a mask function something else, or either more than one number.
    """
    _refuse_bad_inputs(score_mod, mask_mod, q, k, v)
    q, k, v = q.double(), k.double(), v.double()
    return _attention(score_mod, mask_mod, q, k, v, scale, torch.float64, one_by_one, sink, q_offset, kv_len)


def _refuse_bad_inputs(score_mod: Any, mask_mod: Any, q: Any, k: Any, v: Any) -> None:
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if hasattr(function, "score_mod"):
            raise InputError(f"{name} is a flexc kernel; expected its function: pass kernel.score_mod and kernel.mask_mod")
        if function is not None and not callable(function):
            raise InputError(f"{name} is a {type(function).__name__}; expected a function or None")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    is_fitting = all(len(shape) == 4 for shape in shapes) and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]
    if not is_fitting or q.shape[3] != k.shape[3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"expected q [B, Hq, Sq, D], k [B, Hkv, Skv, D] and v [B, Hkv, Skv, Dv], Hq a multiple of Hkv; got {shapes[0]}, {shapes[1]} "
            f"and {shapes[2]}"
        )


def eager(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    kv_len: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What eager PyTorch gives in the dtype of the inputs: the yardstick of accuracy, not the truth.

    q @ kᵀ in the inputs' dtype, then float32: times scale, the functions, softmax. The probabilities are cast to the inputs' dtype and
    multiplied with v in it. Arguments as in `reference`.

    Returns:
        out [B, Hq, Sq, Dv] in the inputs' dtype, lse [B, Hq, Sq] in float32.
    """
    return _attention(score_mod, mask_mod, q, k, v, scale, torch.float32, False, sink, q_offset, kv_len)


def scores(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    row: int,
) -> Tensor:
    """The modified scores of one query position in float64, [B, Hq, Skv]; masked pairs are −inf. Arguments as in `reference`."""
    q, k = q.double(), k.double()
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    offset, length = (torch.full(q.shape[:1], n, device=q.device) for n in (0, k.shape[2]))
    return _modified_scores(score_mod, mask_mod, q, k, factor, range(row, row + 1), torch.float64, False, offset, length)[:, :, 0]


def largest_scores(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    q_offset: int | Tensor | None = None,
    kv_len: int | Tensor | None = None,
) -> Tensor:
    """The largest modified score of each row in float64, [B, Hq, Sq]; −inf for a row without keys. Arguments as in `reference`."""
    q, k = q.detach().double(), k.detach().double()
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    offset = torch.as_tensor(0 if q_offset is None else q_offset, device=q.device).expand(q.shape[0])
    length = torch.as_tensor(k.shape[2] if kv_len is None else kv_len, device=q.device).expand(q.shape[0])
    found = q.new_full(q.shape[:3], -math.inf)
    if not k.shape[2]:
        return found
    rows_at_once = max(1, _PAIRS_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], rows_at_once):
        rows = range(start, min(start + rows_at_once, q.shape[2]))
        with torch.no_grad():
            modified = _modified_scores(score_mod, mask_mod, q, k, factor, rows, torch.float64, False, offset, length)
        found[:, :, rows.start : rows.stop] = modified.amax(-1)
    return found


def _attention(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    wide: torch.dtype,
    one_by_one: bool,
    sink: Tensor | None,
    q_offset: int | Tensor | None,
    kv_len: int | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`wide` is the dtype of scores, functions and softmax; the products with k and v run in the dtype of the inputs."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    offset = torch.as_tensor(0 if q_offset is None else q_offset, device=q.device).expand(q.shape[0])
    length = torch.as_tensor(k.shape[2] if kv_len is None else kv_len, device=q.device).expand(q.shape[0])
    if kv_len is not None:
        is_there = (torch.arange(k.shape[2], device=q.device) < length[:, None])[:, None, :, None]
        k, v = torch.where(is_there, k, 0.0), torch.where(is_there, v, 0.0)
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    rows_at_once = max(1, _PAIRS_AT_ONCE // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    outs, lses = [], []
    for start in range(0, max(1, q.shape[2]), rows_at_once):
        rows = range(start, min(start + rows_at_once, q.shape[2]))
        modified = _modified_scores(score_mod, mask_mod, q, k, factor, rows, wide, one_by_one, offset, length)
        if sink is not None:
            # One more key, whose value is 0.
            modified = torch.cat([modified, sink.to(wide)[None, :, None, None].expand(*modified.shape[:3], 1)], -1)
        has_key = (modified != -math.inf).any(-1, keepdim=True)
        # A row of −inf alone would be NaN in softmax and its gradient; any finite row in its place is dropped again below.
        finite = torch.where(has_key, modified, 0.0)
        out = torch.softmax(finite, -1)[..., : values.shape[2]].to(v.dtype) @ values
        outs.append(torch.where(has_key, out, 0.0))
        lses.append(torch.where(has_key[..., 0], torch.logsumexp(finite, -1), -math.inf))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _modified_scores(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    factor: float,
    rows: range,
    wide: torch.dtype,
    one_by_one: bool,
    offset: Tensor,
    length: Tensor,
) -> Tensor:
    """Scores after the functions, −inf where masked; `offset` of the query rows and `length` of the keys for each batch entry."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    raw = (q[:, :, rows.start : rows.stop] @ keys.mT).to(wide) * factor
    batch, head, row, column = torch.meshgrid(*(torch.arange(n, device=q.device) for n in raw.shape), indexing="ij")
    allowed = (column < length[batch]).flatten()
    if score_mod is None and mask_mod is None:
        return raw.masked_fill(~allowed.view(raw.shape), -math.inf)
    places = [p.flatten().int() for p in (batch, head, row + rows.start + offset[batch], column)]
    if mask_mod is not None:
        with torch.no_grad():
            seen = [p[allowed] for p in places]  # what is past the length may be past the end of a captured tensor
            allowed = allowed.masked_scatter(allowed, evaluate(mask_mod, seen, wide, is_mask=True, one_by_one=one_by_one))
    flat = raw.flatten()[allowed]
    if score_mod is not None:
        places = [p[allowed] for p in places]
        values = evaluate(score_mod, [flat, *places], wide, one_by_one=one_by_one)
        kept = values.detach() != -math.inf
        if not bool(kept.all()):
            # A score of −inf is a masked pair: evaluated without it, no derivative of what the function discarded is left.
            allowed = allowed.masked_scatter(allowed, kept)
            flat = flat[kept]
            values = evaluate(score_mod, [flat, *(p[kept] for p in places)], wide, one_by_one=one_by_one)
        flat = values
    return torch.full_like(raw, -math.inf).flatten().masked_scatter(allowed, flat).view(raw.shape)
