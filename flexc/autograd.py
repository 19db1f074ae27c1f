"""A call as one PyTorch autograd node: nothing is saved but q, k, v, out, lse and the captured tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from flexc.launch import Launch

Tensor = torch.Tensor


class Attention(torch.autograd.Function):
    """out and lse of a launch; gradients of q, k, v and of every captured tensor that requires one."""

    @staticmethod
    def forward(ctx: Any, launch: Launch, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = launch.forward(q, k, v, tensors)
        ctx.launch = launch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (4 + len(tensors))
        if dout is None:
            dout = torch.zeros_like(out)
        return (None, *ctx.launch.backward(q, k, v, out, lse, dout, dlse, tensors))
