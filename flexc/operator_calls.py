"""Calls that go through the operators: of kernels that something watches, and of variants with their captured values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flexc import frontend
from flexc.autograd import refuse_forward_mode
from flexc.errors import InternalError
from flexc.ir.graph import BOOL, FLOAT32, Graph
from flexc.operators import ATTENTION, ATTENTION_WITH_MAX
from flexc.transforms import Transformed, TransformedWithMax
from flexc.variants import Variant, variant_of

if TYPE_CHECKING:
    from flexc.api import Kernel
    from flexc.inference.places import Positions
    from flexc.inference.varlen import Sequences

Tensor = torch.Tensor


def call(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    places: Positions | Sequences | None = None,
    max_scores: bool = False,
) -> tuple[Tensor, ...]:
    """out and lse, and largest scores if asked for, by the operator, in eager Python."""
    with _disable_current_modes():  # tracing computes constants, which are nobody's operators
        trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    if places is not None:
        trace, binding = places.placed(trace, binding)
        k, v = places.without_rest(k, v, may_look=False)
    variant = variant_of(kernel, trace, every_gradient=is_differentiated())
    variant.serve(kernel)
    return call_variant(variant, q, k, v, scale, binding, max_scores)


def call_variant(
    variant: Variant, q: Tensor, k: Tensor, v: Tensor, scale: float | None, binding: frontend.Binding, max_scores: bool = False
) -> tuple[Tensor, ...]:
    """out and float32 lse (and largest scores) of a variant with these captured values."""
    ints, floats = split_numbers(variant.graph, binding.scalars)
    tensors = binding.tensors
    if torch._C._are_functorch_transforms_active():
        transformed = TransformedWithMax if max_scores else Transformed
        out, *rows = transformed.apply(variant.text, scale, ints, len(tensors), q, k, v, *tensors, *floats)
    else:
        operator = ATTENTION_WITH_MAX if max_scores else ATTENTION
        out, *rows = operator(q, k, v, list(tensors), variant.text, scale, ints, floats)
    return out, *(x.float() for x in rows)


def split_numbers(graph: Graph, scalars: Sequence[int | float]) -> tuple[list[int], list[Tensor]]:
    """Scalars as the operators take them."""
    if any(s.dtype == BOOL for s in graph.scalars):
        raise InternalError(f"a truth value as a run-time scalar\n{graph}")
    pairs = list(zip(graph.scalars, scalars, strict=True))
    floats = [torch.tensor(float(x), dtype=torch.float64) for s, x in pairs if s.dtype == FLOAT32]
    return [int(x) for s, x in pairs if s.dtype != FLOAT32], floats


def is_differentiated() -> bool:
    """Whether a transform of torch.func takes gradients here.

    Raises:
        UnsupportedError: it takes them in forward mode.
    """
    from torch._C._functorch import TransformType, get_interpreter_stack  # pyright: ignore[reportMissingImports]

    kinds = {level.key() for level in get_interpreter_stack() or ()}
    if TransformType.Jvp in kinds:
        refuse_forward_mode()
    return TransformType.Grad in kinds
