"""A call as one PyTorch autograd node: nothing is saved but q, k, v, out, lse and the captured tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad

from flexc.errors import UnsupportedError

if TYPE_CHECKING:
    from flexc.launch import Launch

Tensor = torch.Tensor


class Attention(torch.autograd.Function):
    """out and lse of a launch; gradients of q, k, v and of every captured tensor that requires one. Largest scores have no gradient.

    lse is float32. Of float64 inputs the backward pass keeps it in float64.
    """

    @staticmethod
    def forward(ctx: Any, launch: Launch, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        out, lse, *largest = run(launch, q, k, v, tensors)
        ctx.launch = launch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        if not largest:
            return out, lse.float()
        scores = largest[0].float()
        ctx.mark_non_differentiable(scores)
        return out, lse.float(), scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (4 + len(tensors))
        with torch.no_grad(), _no_autocast(q):
            gradients = ctx.launch.backward(
                *(q, k, v, out, lse),
                torch.zeros_like(out) if dout is None else dout,
                None if dlse is None else dlse.to(lse.dtype),
                tensors,
            )
        if torch.is_grad_enabled():
            gradients = _NoSecondDerivative.apply(len(gradients), *gradients, dout, dlse, q, k, v, *tensors)
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        refuse_forward_mode()


# `Attention.apply` without its look at functorch, which calls that come here have behind them (`flexc.watched.is_watched`).
_apply: Any = super(torch.autograd.Function, Attention).apply  # pyright: ignore[reportAttributeAccessIssue]


def attend(launch: Launch, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """out and float32 lse of a launch, and largest scores if it has them; a node of autograd only where someone may ask for a gradient."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or any([x.requires_grad for x in tensors])):
        return _apply(launch, q, k, v, *tensors)
    if forward_ad._current_level >= 0:  # dual tensors may be among them, which the node refuses
        return _apply(launch, q, k, v, *tensors)
    results = run(launch, q, k, v, tensors)
    return results if results[1].dtype == torch.float32 else (results[0], *(x.float() for x in results[1:]))


def run(launch: Launch, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The forward pass of a launch, out and lse (and largest scores), in the dtypes of its inputs: autocast changes nothing inside."""
    if not q.is_cuda and torch.is_autocast_enabled(q.device.type):  # on a GPU there are no products but those of kernels
        with _no_autocast(q):
            return launch.forward(q, k, v, tensors)
    return launch.forward(q, k, v, tensors)


def _no_autocast(q: Tensor) -> torch.autocast:
    return torch.autocast(q.device.type, enabled=False)


class _NoSecondDerivative(torch.autograd.Function):
    """The first `count` values unchanged, as gradients that depend on the rest: differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *values: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in values[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        refuse_second_derivative()


def refuse_second_derivative(*_: Any) -> NoReturn:
    """What differentiating a gradient does."""
    raise UnsupportedError(
        "the gradient of flexc attention cannot be differentiated again, on any backend: expected create_graph=False, or a loss that "
        "uses no gradient of attention. For second derivatives of small problems use flexc.reference"
    )


def refuse_forward_mode() -> NoReturn:
    """What dual tensors and their transforms do."""
    raise UnsupportedError(
        "forward-mode derivatives (torch.func.jvp, jacfwd, hessian, forward_ad) of flexc attention, on any backend: expected reverse mode: "
        "torch.func.grad, vjp or jacrev, or backward()"
    )
