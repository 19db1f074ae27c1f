"""The operators under transforms of torch.func: grad, vjp, jacrev and vmap, alone and nested.

PyTorch's own autograd of operators refuses functorch transforms; an autograd function with a `setup_context` is what they take.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from flexc.autograd import refuse_forward_mode, refuse_second_derivative
from flexc.errors import UnsupportedError
from flexc.operators import ATTENTION, ATTENTION_BACKWARD, ATTENTION_WITH_MAX, LIBRARY
from flexc.variants import variant_from

Tensor = torch.Tensor


class Transformed(torch.autograd.Function):
    """The operator under transforms of torch.func: (text, scale, ints, number of captured tensors, q, k, v, *tensors, *floats)."""

    @staticmethod
    def forward(text: str, scale: float | None, ints: list[int], count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rest = inputs
        return ATTENTION(q, k, v, rest[:count], text, scale, ints, rest[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs[4:7], *output[:2], *inputs[7:])
        ctx.rest = inputs[:4]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
        slots = variant_from(ctx.rest[0]).gradient_slots
        of_inputs: list[Tensor | None] = [None] * (len(ctx.saved_tensors) - 2)
        if dout is not None or dlse is not None:
            found = _TransformedBackward.apply(*ctx.rest, dout, dlse, *ctx.saved_tensors)
            for index, gradient in zip((0, 1, 2, *(3 + slot for slot in slots)), found, strict=True):
                of_inputs[index] = gradient
        return None, None, None, None, *of_inputs

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _many(Transformed.apply, info, in_dims, args)


class TransformedWithMax(Transformed):
    """The same with the largest scores."""

    @staticmethod
    def forward(text: str, scale: float | None, ints: list[int], count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rest = inputs
        return ATTENTION_WITH_MAX(q, k, v, rest[:count], text, scale, ints, rest[count:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _many(TransformedWithMax.apply, info, in_dims, args)


class _TransformedBackward(torch.autograd.Function):
    """Its backward: the same leading arguments, then dout, dlse and what was saved. It has no derivative itself."""

    @staticmethod
    def forward(
        text: str, scale: float | None, ints: list[int], count: int, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        (q, k, v, out, lse), rest = saved[:5], saved[5:]
        return tuple(ATTENTION_BACKWARD(dout, dlse, q, k, v, out, lse, rest[:count], text, scale, ints, rest[count:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _one_by_one(_TransformedBackward.apply, info, in_dims, args)


def _many(call: Any, info: Any, in_dims: tuple, args: tuple) -> tuple:
    """The arguments of `Transformed` with a dimension more, on which problems are independent."""
    if not info.batch_size:
        raise UnsupportedError("torch.func.vmap of flexc attention over no problems, on any backend: expected at least one")
    variant = variant_from(args[0])
    if variant.reads_batch or any(d is not None for d in _dims_of(args, in_dims)[7:]):
        return _one_by_one(call, info, in_dims, args)
    # No problem knows its batch index: one call with a larger batch.
    together = [_repeated(x, d, info.batch_size).flatten(0, 1) for x, d in zip(args[4:7], in_dims[4:7])]
    results = call(*args[:4], *together, *args[7:])
    return tuple(x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) for x in results), (0,) * len(results)


def _one_by_one(call: Any, info: Any, in_dims: tuple, args: tuple) -> tuple:
    """One call for each problem, results stacked."""
    results, dims = [], _dims_of(args, in_dims)
    for index in range(info.batch_size):
        results.append(call(*(x if d is None else x.select(d, index) for x, d in zip(args, dims, strict=True))))
    return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])


def _dims_of(args: tuple, in_dims: tuple) -> list[int | None]:
    """The batched dimension of each argument; of a list of numbers PyTorch says it for each number."""
    return [d if isinstance(x, Tensor) else None for x, d in zip(args, in_dims, strict=True)]


def _repeated(x: Tensor, dim: int | None, count: int) -> Tensor:
    return x.unsqueeze(0).expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _vmap_of(call: Any) -> Any:
    """For the operator itself, as torch.compile meets it below vmap."""

    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        q, k, v, tensors, text, scale, ints, floats = args
        dims = (None, None, None, None, *in_dims[:3], *in_dims[3], *in_dims[7])
        return _many(call, info, dims, (text, scale, ints, len(tensors), q, k, v, *tensors, *floats))

    return vmap


torch.library.register_vmap("flexc::attention", _vmap_of(Transformed.forward), lib=LIBRARY)
torch.library.register_vmap("flexc::attention_with_max", _vmap_of(TransformedWithMax.forward), lib=LIBRARY)
