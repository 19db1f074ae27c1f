"""From a kernel and the inputs of a call to the launch: one that is ready for inputs like these, or one prepared from the functions on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from flexc import backends, frontend, pipeline, settings
from flexc.arguments import captured_as_kernels_take, contiguous_rows, positive_scale, refuse_what_is_no_input, shapes_of
from flexc.backends import Options, Shapes
from flexc.extents import Extent, extents_of, refuse_wrong_sizes
from flexc.launch import Launch
from flexc.pipeline import Artifact
from flexc.ready import LARGEST_SCALE, Ready, likeness_of, wants_determinism

if TYPE_CHECKING:
    from flexc.api import Kernel

Tensor = torch.Tensor


def launch_for(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    current: settings.Settings,
    traced: tuple[frontend.Trace, frontend.Binding] | None = None,
    max_scores: bool = False,
) -> tuple[Launch, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """The launch for these inputs, and the inputs as kernels take them: q, k, v and the captured tensors.

    Args:
        traced: what to run in place of the kernel's own functions.
        max_scores: the launch also gives the largest scores.
    """
    asked = max_scores, wants_determinism(), current.device_maps, current.dump, current.override
    known = kernel._ready.like(q, k, v, *asked)
    if known is not None and (scale is None or (type(scale) is float and 0.0 < scale <= LARGEST_SCALE)):
        trace, binding = _trace(kernel) if traced is None else traced
        ready = known.get(trace)
        if ready is not None:
            tensors = captured_as_kernels_take(binding.tensors, trace.graph, q.device) if binding.tensors else ()
            if ready.extents:
                shapes = ready.launch.shapes
                refuse_wrong_sizes(ready.extents, trace.graph, tensors, shapes.batch, shapes.heads_q, "q has")
            launch = ready.at(scale, binding.scalars)
            return _tuned(launch, trace, q, k, v, tensors) if kernel._autotune else launch, q, k, v, tensors
    refuse_what_is_no_input(q, k, v)
    taken = q, k, v
    if scale is not None:
        q, scale = positive_scale(q, scale)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    shapes = shapes_of(q, k, v)
    trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod) if traced is None else traced
    tensors = captured_as_kernels_take(binding.tensors, trace.graph, q.device)
    artifact, extents, options = _prepared(kernel, trace, tensors, shapes, q.device, max_scores)
    default = 1.0 / math.sqrt(shapes.head_dim)
    launch = Launch(artifact, shapes, default, binding.scalars, options, kernel.__name__)
    ready = Ready(launch, extents)
    if q is taken[0] and k is taken[1] and v is taken[2]:  # the launch is for copies otherwise
        kernel._ready.keep(likeness_of(q, k, v, *asked), trace, ready)
    launch = ready.at(scale, binding.scalars)
    return _tuned(launch, trace, q, k, v, tensors) if kernel._autotune else launch, q, k, v, tensors


def _trace(kernel: Kernel) -> tuple[frontend.Trace, frontend.Binding]:
    """`frontend.trace`, after a look at whether the last trace still holds: it mostly does."""
    last = kernel._traced
    binding = None if last is None else last.bind(kernel.score_mod, kernel.mask_mod)
    if last is not None and binding is not None:
        return last, binding
    kernel._traced, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    return kernel._traced, binding


def _tuned(launch: Launch, trace: frontend.Trace, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> Launch:
    from flexc.autotune import tuned

    return tuned(launch, trace, q, k, v, tensors)


_extents: WeakKeyDictionary[frontend.Trace, tuple[Extent, ...]] = WeakKeyDictionary()


def _prepared(
    kernel: Kernel, trace: frontend.Trace, tensors: tuple[Tensor, ...], shapes: Shapes, device: torch.device, max_scores: bool
) -> tuple[Artifact, tuple[Extent, ...], Options]:
    extents = _extents.get(trace)
    if extents is None:
        extents = _extents[trace] = extents_of(trace.graph)
    refuse_wrong_sizes(extents, trace.graph, tensors, shapes.batch, shapes.heads_q, "q has")  # before anything is compiled
    backend, reason = backends.choose(kernel._backend, device)
    target = pipeline.target_of(device)
    options = kernel._options
    if max_scores or wants_determinism():
        options = replace(options, max_scores=max_scores, deterministic=options.deterministic or wants_determinism())
    return pipeline.artifact_for(trace, shapes, target, backend, reason, options, kernel.__name__), extents, options
