"""A call as two ordinary PyTorch operators, `flexc::attention` (or `flexc::attention_with_max`, which also returns the largest scores) and
`flexc::attention_backward`, for everything that looks at operators:
torch.compile, torch.export, make_fx, torch.func, selective checkpointing, profilers.

Eager calls on plain tensors do not come here: `flexc.autograd.Attention` computes the same with less work for the host. `Kernel.__call__`
turns here when something is watching (a dispatch mode, a functorch transform, a tensor subclass), `flexc.dynamo` when Dynamo traces.
Compiled programs go on by `flexc.direct_calls` where nobody watches.

A variant enters the operator as text (`flexc.variants`).
Captured tensors are a `Tensor[]` argument, so that autograd, functionalisation and CUDA graphs see them; captured numbers are `SymInt[]`
and, because PyTorch has no list of symbolic floats, 0-d float64 tensors on the CPU, of which reading one waits for nothing.

`scale` may be any finite number, or None for 1 / sqrt(D); if there is one float more than the graph has, that one is the scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._library.autograd import Info, make_autograd_impl

from flexc import frontend, settings
from flexc.autograd import refuse_second_derivative, run
from flexc.direct_calls import all_same, directly
from flexc.inference.decode import decoding
from flexc.prepare import launch_for
from flexc.variants import Variant, variant_from
from flexc.watched import PLAIN, is_watched

if TYPE_CHECKING:
    from flexc.launch import Launch

Tensor = torch.Tensor

LIBRARY = torch.library.Library("flexc", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v"
_VARIANT = "Tensor[] tensors, str variant, float? scale, SymInt[] ints, Tensor[] floats"
LIBRARY.define(f"attention({_INPUTS}, {_VARIANT}) -> (Tensor out, Tensor lse)", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define(
    f"attention_with_max({_INPUTS}, {_VARIANT}) -> (Tensor out, Tensor lse, Tensor max_scores)", tags=(torch.Tag.pt2_compliant_tag,)
)
LIBRARY.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_VARIANT}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ATTENTION = torch.ops.flexc.attention.default
ATTENTION_WITH_MAX = torch.ops.flexc.attention_with_max.default
ATTENTION_BACKWARD = torch.ops.flexc.attention_backward.default


def _launched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    text: str,
    scale: float | None,
    ints: Sequence[int],
    floats: Sequence[Tensor],
    *,
    max_scores: bool = False,
) -> tuple[Variant, float | None, Launch, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """What a call needs, as `Kernel.__call__` has it."""
    variant, current = variant_from(text), settings.current()
    scalars, among = variant.numbers(ints, floats)
    scale = among if scale is None else scale
    binding = frontend.Binding(tuple(tensors), scalars)
    launch, q, k, v, taken = launch_for(variant.runner, q, k, v, scale, current, (variant.trace, binding), max_scores)
    if current.check:
        variant.runner._check(launch, q, k, taken)
    return variant, scale, launch, q, k, v, taken


@torch.library.impl(LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, ...]:
    variant, _, launch, q, k, v, tensors = _launched(q, k, v, *captured)
    launch = decoding(launch, q, k, v, tensors)
    variant.ran(launch, tensors, q.device)
    return run(launch, q, k, v, tensors)


@torch.library.impl(LIBRARY, "attention_with_max", "CompositeExplicitAutograd")
def _attention_with_max(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, ...]:
    variant, _, launch, q, k, v, tensors = _launched(q, k, v, *captured, max_scores=True)
    variant.ran(launch, tensors, q.device)
    return run(launch, q, k, v, tensors)


@torch.library.register_fake("flexc::attention_with_max", lib=LIBRARY)
def _attention_with_max_fake(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, ...]:
    out, lse = _attention_fake(q, k, v, *captured)
    return out, lse, torch.empty_like(lse)


@torch.library.register_fake("flexc::attention", lib=LIBRARY)
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, Tensor]:
    from flexc.arguments import refuse_inputs

    refuse_inputs(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.impl(LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    *captured: Any,
) -> list[Tensor]:
    variant, scale, launch, *rows, taken = _launched(q, k, v, tensors, *captured)
    given: tuple[Any, ...] = tuple(rows)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else dlse.to(lse.dtype)
        dq, dk, dv, *gradients = launch.backward(*given, out=out, lse=lse, dout=dout, dlse=dlse, tensors=taken)
        if scale is not None and scale <= 0:
            dq = None if dq is None or scale == 0 else -dq
        found = [dq, dk, dv, *(gradients[slot] for slot in variant.gradient_slots)]
        likes = [q, k, v, *(tensors[slot] for slot in variant.gradient_slots)]
        return [_as_promised(gradient, like) for gradient, like in zip(found, likes, strict=True)]


def _as_promised(gradient: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or zeros, as the fake implementation says: contiguous, dtype and device of what it is the gradient of."""
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return gradient.to(device=like.device, dtype=like.dtype).contiguous()


@torch.library.register_fake("flexc::attention_backward", lib=LIBRARY)
def _attention_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    text: str,
    *captured: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, *(tensors[slot] for slot in variant_from(text).gradient_slots))]


# --- autograd ------------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    q, k, v, tensors, text, scale, ints, floats = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output[:2], *tensors, *floats)
    ctx.counts, ctx.rest = (len(tensors), len(floats)), (text, scale, ints)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
    (count, float_count), (text, scale, ints) = ctx.counts, ctx.rest
    q, k, v, out, lse, *rest = ctx.saved_tensors
    of_tensors: list[Tensor | None] = [None] * count
    if dout is None and dlse is None:
        dq = dk = dv = None
    else:
        tensors, floats = rest[:count], rest[count:]
        dq, dk, dv, *gradients = ATTENTION_BACKWARD(dout, dlse, q, k, v, out, lse, tensors, text, scale, ints, floats)
        for slot, gradient in zip(variant_from(text).gradient_slots, gradients, strict=True):
            of_tensors[slot] = gradient
    # PyTorch compares the structure: a list of numbers counts as one value, an empty list as a list of tensors.
    return dq, dk, dv, of_tensors, None, None, None if ints else [], [None] * float_count


def _differentiable(operator: Any, kernel: Any) -> Any:
    """What `torch.library.register_autograd` registers, but where nobody differentiates or watches, the kernel at once: half the way."""
    recording = make_autograd_impl(operator, Info(_differentiate, _save))

    def attend(keyset: Any, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *rest: Any) -> Any:
        is_plain = not is_watched(q, k, v) and all([type(x) in PLAIN for x in tensors])
        if is_plain and not (torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v, tensors)):
            return kernel(q, k, v, tensors, *rest)
        return recording(keyset, q, k, v, tensors, *rest)

    return attend


def _launch_alone(max_scores: bool) -> Any:
    """What `direct_calls.directly` asks: the launch of a call, if kernels take its tensors as they are and nothing is tried or checked."""

    def launch_of(q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *rest: Any) -> Launch | None:
        variant, _, launch, *taken, captured = _launched(q, k, v, tensors, *rest, max_scores=max_scores)
        if settings.current().check or variant.runner._autotune or not all_same((*taken, *captured), (q, k, v, *tensors)):
            return None
        return launch if max_scores else decoding(launch, q, k, v, captured)

    return launch_of


LIBRARY.impl("attention", _differentiable(ATTENTION, _attention), "Autograd", with_keyset=True)
LIBRARY.impl("attention_with_max", _differentiable(ATTENTION_WITH_MAX, _attention_with_max), "Autograd", with_keyset=True)
torch.library.register_autograd("flexc::attention_backward", refuse_second_derivative, lib=LIBRARY)
ATTENTION._op = directly(ATTENTION._op, _launch_alone(max_scores=False))  # pyright: ignore[reportAttributeAccessIssue]
ATTENTION_WITH_MAX._op = directly(ATTENTION_WITH_MAX._op, _launch_alone(max_scores=True))  # pyright: ignore[reportAttributeAccessIssue]
