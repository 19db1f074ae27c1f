"""What a call is given: tensors, a scale and captured values checked, named in errors, and made what kernels take."""

from __future__ import annotations

import math
import numbers
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flexc import backends, frontend
from flexc.backends import Shapes
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.extents import extents_of, refuse_wrong_sizes
from flexc.ir.graph import Graph
from flexc.map_making import number_on
from flexc.watched import PLAIN, refuse_distributed

if TYPE_CHECKING:
    from flexc.api import Kernel
    from flexc.inference.places import Positions

Tensor = torch.Tensor

MAX_TOKENS = 2**24  # positions are exact in float32 below it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


_IN_PLACE_OF_A_FUNCTION = {
    "BlockMap": ": pass the mask that the map was made of",
    "BlockMask": ": pass its .mask_mod, or use flexc.compat.flex_attention",
    "Tensor": " that reads it, as in table[q_idx, kv_idx]",
}


def refuse_bad_switch(name: str, value: Any) -> None:
    """Refuse what is neither True nor False, such as the text "no", which Python counts as true."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is a {type(value).__name__}; expected True or False")


def refuse_arity(function: Any, expected: int, name: str, arguments: str) -> None:
    """Refuse what is no function of so many positional arguments."""
    if function is None:
        return
    if not callable(function):
        hint = _IN_PLACE_OF_A_FUNCTION.get(type(function).__name__, "")
        raise InputError(f"{name} is a {type(function).__name__}; expected a function {arguments}{hint}")
    found = frontend.arity(function)
    if found != expected:
        meant = " (this looks like a mask: pass it as mask_mod)" if (found, expected) == (4, 5) else ""
        meant = " (this looks like a score function: pass it as score_mod)" if (found, expected) == (5, 4) else meant
        raise InputError(f"{name} takes {found} positional arguments, expected {expected}: {arguments}{meant}")


def refuse_what_is_no_input(q: Any, k: Any, v: Any) -> None:
    """Each alone: a dense tensor of four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.is_nested:
            raise InputError(f"{name} is a nested tensor; expected a dense one: pack the sequences and mask with flexc.masks.document")
        if x.layout is not torch.strided:
            raise InputError(f"{name} has layout {x.layout}; expected a dense tensor: convert it with {name}.to_dense()")
        if x.dim() != 4:
            raise ShapeError(f"{name} has {x.dim()} dimensions, {_shape(x)}; expected 4: [batch, heads, tokens, head_dim]")


def refuse_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that cannot be q, k and v, whether their sizes are numbers or symbols."""
    refuse_what_is_no_input(q, k, v)
    _shapes.__wrapped__(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, True)


def shapes_of(q: Tensor, k: Tensor, v: Tensor) -> Shapes:
    """Sizes of a call, all three checked together."""
    return _shapes(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, lie_in_bulk(q, k, v))


@lru_cache(maxsize=4096)
def _shapes(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    in_bulk: bool,
) -> Shapes:
    """All three together. Kept, because most calls repeat one before."""
    if q_dtype not in _DTYPES:
        raise InputError(f"q has dtype {q_dtype}; expected float16, bfloat16 or float32: convert it with q.to(torch.bfloat16)")
    if not q_dtype == k_dtype == v_dtype:
        raise InputError(f"q, k and v must have one dtype, got {q_dtype}, {k_dtype} and {v_dtype}")
    if not q_device == k_device == v_device:
        raise InputError(f"q, k and v must be on one device, got {q_device}, {k_device} and {v_device}")
    batch, heads_q, q_len, head_dim = q_shape
    heads_kv, kv_len, head_dim_v = k_shape[1], k_shape[2], v_shape[3]
    if not batch == k_shape[0] == v_shape[0]:
        raise ShapeError(f"q, k and v must have one batch size, got {batch}, {k_shape[0]} and {v_shape[0]}")
    if k_shape[3] != head_dim:
        raise ShapeError(f"q and k must have one head_dim, got {head_dim} and {k_shape[3]}")
    if v_shape[1] != heads_kv:
        raise ShapeError(f"k and v must have as many heads, got {heads_kv} and {v_shape[1]}")
    if v_shape[2] != kv_len:
        raise ShapeError(f"k and v must have as many tokens, got {kv_len} and {v_shape[2]}")
    if heads_q == 0 or heads_kv == 0 or heads_q % heads_kv:
        raise ShapeError(
            f"the heads of q must be a multiple of the heads of k and v, and not 0, got {heads_q} and {heads_kv} in "
            "[batch, heads, tokens, head_dim]"
        )
    if head_dim == 0 or head_dim_v == 0:
        raise ShapeError(f"head_dim must be at least 1, got {head_dim} for q and k, {head_dim_v} for v")
    if max(q_len, kv_len) >= MAX_TOKENS:
        raise UnsupportedError(f"expected fewer than {MAX_TOKENS} tokens on every backend, got {max(q_len, kv_len)}")
    return Shapes(batch, heads_q, heads_kv, q_len, kv_len, head_dim, head_dim_v, q_dtype, in_bulk)


def lie_in_bulk(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether hardware bulk copies can read them as they are."""
    return q.is_cuda and backends.reads_in_bulk((q, k, v))


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def finite_scale(scale: Any) -> float:
    """The scale as a number; a tensor is read from its device."""
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise InputError("scale requires a gradient, which would be lost; multiply q by it, or capture it in the score function")
        if scale.numel() != 1:
            raise InputError(f"scale is a tensor of shape {_shape(scale)}; expected one number")
        scale = scale.item()
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise InputError(f"scale is a {type(scale).__name__}; expected a number")
    scale = float(scale)
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise InputError(f"scale must be finite in float32, got {scale}")
    return scale


def positive_scale(q: Tensor, scale: Any) -> tuple[Tensor, float]:
    """Kernels take a positive scale: a negative one turns q around, zero makes it zero."""
    scale = finite_scale(scale)
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)


def as_kernels_take(
    kernel: Kernel, q: Tensor, scale: float | None, positions: Positions | None, batch: int
) -> tuple[Tensor, float, tuple[Tensor, ...], frontend.Trace, frontend.Binding]:
    """q, the scale, the captured tensors, and the trace at positions with its binding, for a call that makes its own launch.

    Args:
        batch: entries, which are packed in one of q where it has another number.
    """
    if scale is not None:
        q, scale = positive_scale(q, scale)
    trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    if positions is not None:
        trace, binding = positions.placed(trace, binding)
    tensors = captured_as_kernels_take(binding.tensors, trace.graph, q.device)
    refuse_wrong_sizes(extents_of(trace.graph), trace.graph, tensors, batch, q.shape[1], "q has")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    return contiguous_rows(q), scale, tensors, trace, binding


def captured_as_kernels_take(tensors: tuple[Tensor, ...], graph: Graph, device: torch.device) -> tuple[Tensor, ...]:
    """Captured tensors as kernels take them."""
    for slot, tensor in enumerate(tensors):
        if type(tensor) not in PLAIN:
            refuse_distributed(tensor, graph.tensors[slot].name)
        if tensor.device != device:
            moved = number_beside(tensor, graph.tensors[slot].name, device)
            tensors = (*tensors[:slot], moved, *tensors[slot + 1 :])
    return tensors


def contiguous_rows(x: Tensor) -> Tensor:
    """The same tensor if its last dimension is contiguous, else one copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


_on_gpu: WeakIdKeyDictionary = WeakIdKeyDictionary()


def number_beside(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """A captured tensor as kernels read it: on q's device; a single number may come from the CPU, and is copied whenever it changes."""
    if tensor.dim() or tensor.device.type != "cpu":
        raise InputError(f"the captured tensor {name} is on {tensor.device} and q on {device}: move it with {name}.to({str(device)!r})")
    if tensor.requires_grad or tensor.is_inference():
        return tensor.to(device)
    version = (tensor._version, tensor.data_ptr(), device)
    found = _on_gpu.get(tensor)
    if found is None or found[0] != version:
        # One copy while the number stays: block maps are kept for as long as the tensors that they were made from.
        found = _on_gpu[tensor] = version, number_on(tensor, device)
    return found[1]
