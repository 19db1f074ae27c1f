"""Sinks: a learnable logit for each head that takes its share of the softmax and gives nothing.

softmax over a row's scores and one more logit s is the softmax over the scores alone, times exp(lse - lse'), where
lse' = log(exp(lse) + exp(s)). So a sink costs one pass over the output, on every backend, and its gradient comes through lse.

Source: gpt-oss (OpenAI, 2025); Miller, Attention is off by one, 2023, with s = 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flexc.errors import InputError, ShapeError
from flexc.watched import is_distributed

Tensor = torch.Tensor


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output and lse of rows that attend to a sink, too.

    Args:
        out: [B, Hq, Sq, Dv]; lse: [B, Hq, Sq]; sink: [Hq], any float dtype.

    Returns:
        out in its dtype, and lse with the sink in it. A row without keys keeps output 0, and has the lse of the sink alone.
    """
    logit = sink.to(lse.dtype)[None, :, None]
    nothing = (lse == -math.inf) & (logit == -math.inf)  # inf - inf would be NaN, and so would its gradient
    safe = lse.masked_fill(nothing, 0.0)
    total = torch.logaddexp(safe, logit)
    return (out * torch.exp(safe - total)[..., None]).to(out.dtype), total.masked_fill(nothing, -math.inf)


def refuse_bad_sink(sink: Any, q: Tensor) -> None:
    """A sink that does not fit the queries [B, Hq, Sq, D].

    Raises:
        InputError: no float tensor, on another device, or a plain tensor beside distributed ones.
        ShapeError: not one logit for each query head.
    """
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        kind = sink.dtype if isinstance(sink, Tensor) else type(sink).__name__
        raise InputError(f"expected sink to be a float tensor of one logit for each query head, got {kind}")
    if sink.layout is not torch.strided:
        raise InputError(f"sink has layout {sink.layout}; expected a dense tensor: convert it with sink.to_dense()")
    if tuple(sink.shape) != (q.shape[1],):
        raise ShapeError(f"expected sink of shape ({q.shape[1]},), one logit for each query head, got {tuple(sink.shape)}")
    if sink.device != q.device:
        raise InputError(f"sink is on {sink.device}, q on {q.device}: move it with sink.to(q.device)")
    if not is_dynamo_compiling() and is_distributed(q) != is_distributed(sink):
        kinds = ["a DTensor" if is_distributed(x) else "a plain tensor" for x in (sink, q)]
        raise InputError(
            f"sink is {kinds[0]} and q is {kinds[1]}; expected both alike: distribute_tensor(sink, mesh, [Shard(0)]) where q is sharded on "
            "heads, [Replicate()] elsewhere; or sink.full_tensor()"
        )
