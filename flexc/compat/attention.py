"""`flex_attention`: PyTorch's signature, flexc's kernels."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from flexc import frontend
from flexc.algebra import plain_function
from flexc.api import Kernel
from flexc.compat.errors import ArgumentError, UsageError
from flexc.compat.options import FlexKernelOptions, backend_and_precision
from flexc.compat.rules import rule_of
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.pipeline import title_of

Tensor = torch.Tensor
Function = Callable[..., Any]

_MOST_KERNELS = 256
_kernels: OrderedDict[tuple, tuple[Kernel, tuple]] = OrderedDict()


class AuxRequest(NamedTuple):
    """What to return besides the output.

    Attributes:
        lse: the natural logarithm of the sum of exponentials of each row's scores.
        max_scores: the largest score of each row, after score_mod.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for; the rest is None.

    Attributes:
        lse: float32 [B, Hq, Sq], differentiable; -inf for a row without keys.
        max_scores: float32 [B, Hq, Sq], without a gradient; -inf for a row without keys.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention of query to key and value, with every score changed by `score_mod` and the pairs that `block_mask` allows.

    Args:
        query: [B, Hq, Sq, D].
        key, value: [B or 1, Hkv, Skv, D] and [B or 1, Hkv, Skv, Dv]. Of a dtype with fewer bits than query's they are converted first.
        score_mod: (score, batch, head, q_idx, kv_idx) → score; tensors that it captures receive gradients.
        block_mask: a BlockMask of this module or of PyTorch, made for these lengths; B and H as here, or 1.
        scale: on the scores before score_mod; default 1 / sqrt(D).
        enable_gqa: allow fewer heads in key and value, of which Hq must be a multiple.
        return_lse: return (out, lse).
        kernel_options: see FlexKernelOptions.
        return_aux: return (out, AuxOutput).

    Returns:
        out [B, Hq, Sq, Dv]. A row without keys is 0, with lse -inf and zero gradients. Under autocast the inputs are cast as PyTorch does.

    Raises:
        ShapeError, InputError and their kinds in `flexc.compat.errors`: sizes, dtypes, devices or options do not fit.
        TraceError: a function cannot be compiled.
        UnsupportedError: inputs that are not of 4 dimensions, nested tensors, more than a backend can do.
    """
    _refuse_inputs(query, key, value, enable_gqa)
    q_shape, kv_shape = query.shape, key.shape
    if q_shape[0] != kv_shape[0]:
        key, value = _of_batch(query, key, value, block_mask)
    mask = None if block_mask is None else rule_of(block_mask, q_shape, kv_shape, query.device)
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise InputError(f"return_aux is a {type(return_aux).__name__}; expected AuxRequest(lse=True), AuxRequest(max_scores=True) or both")
    if return_aux is not None and return_lse:
        raise ArgumentError("return_lse and return_aux are both given: expected return_aux=AuxRequest(lse=True) alone")
    options = backend_and_precision(kernel_options, query.device.type == "cpu")
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = _autocast(query, key, value)
    if key.dtype != query.dtype or value.dtype != query.dtype:
        key, value = _widened(key, query.dtype), _widened(value, query.dtype)
    kernel: Any = kernel_for(score_mod, mask, options)
    if return_aux is None:
        if not return_lse:
            return kernel(query, key, value, scale=scale)
        out, aux = kernel(query, key, value, scale=scale, return_lse=True)
        return out, aux.lse
    out, aux = kernel(query, key, value, scale=scale, return_lse=True, return_max_scores=bool(return_aux.max_scores))
    return out, AuxOutput(aux.lse if return_aux.lse else None, aux.max_scores)


# --- kernels ------------------------------------------------------------------------------------------------------------------------


def kernel_for(score_mod: Function | None, mask: Function | None, options: tuple[str, str] = ("auto", "fast")) -> Kernel:
    """A kernel of these functions, with (backend, precision).

    What kernels of functions with equal code share is kept, but none of the functions: closures made anew at each call find it again, and
    the tensors that they captured can go.
    """
    if is_dynamo_compiling():  # what is kept here would be a guard, and every call would change it
        return Kernel(score_mod, mask, backend=options[0], precision=options[1])
    score_mod = None if score_mod is None else plain_function(score_mod)
    mask = None if mask is None else plain_function(mask)
    score_key, mask_key = _code(score_mod), _code(mask)
    # By identity, as comparing code is slow; what is kept holds the code, so no other can take its address.
    key = (id(score_key), id(mask_key), options)
    found = _kernels.get(key)
    if found is None:
        if callable(score_mod) and frontend.arity(score_mod) == 4:
            raise InputError(
                "score_mod takes 4 positional arguments, expected 5: this looks like a mask: pass block_mask=create_block_mask(...)"
            )
        made = Kernel(score_mod, mask, backend=options[0], precision=options[1])
        made.score_mod = made.mask_mod = None
        found = _kernels[key] = made, (score_key, mask_key)
        while len(_kernels) > _MOST_KERNELS:
            _kernels.popitem(last=False)
    kernel = Kernel.__new__(Kernel)
    vars(kernel).update(vars(found[0]), score_mod=score_mod, mask_mod=mask, __name__=title_of(score_mod, mask))
    return kernel


def _code(function: Any) -> Any:
    """What functions that can share a kernel have in common: their code, or the class of a callable object."""
    while isinstance(function, partial | types.MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    return getattr(function, "__code__", None) if isinstance(function, types.FunctionType) else type(function)


# --- inputs -------------------------------------------------------------------------------------------------------------------------


def _refuse_inputs(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    """What is wrong with the tensors, as the errors that PyTorch raises; kernels check the rest."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.is_nested:
            raise UnsupportedError(f"{name} is a nested tensor: expected a dense one; pack the sequences and mask by document")
    if not query.device == key.device == value.device:
        raise ArgumentError(f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}")
    shapes = (query.shape, key.shape, value.shape)
    if min(map(len, shapes)) < 2:
        raise ShapeError(f"query, key and value have {', '.join(map(str, map(len, shapes)))} dimensions: expected 4")
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"query and key must have one head_dim, got {query.shape[-1]} and {key.shape[-1]}")
    if any(len(shape) != 4 for shape in shapes):
        found = ", ".join(str(len(shape)) for shape in shapes)
        raise UnsupportedError(f"query, key and value have {found} dimensions: expected 4, [batch, heads, tokens, head_dim]")
    heads_q, heads_kv = query.shape[1], key.shape[1]
    if heads_q != heads_kv and not enable_gqa:
        raise ShapeError(f"query has {heads_q} heads, key and value {heads_kv}: expected as many, or enable_gqa=True")
    if enable_gqa and (heads_kv == 0 or heads_q % heads_kv):
        raise ShapeError(f"the heads of query must be a multiple of those of key and value, got {heads_q} and {heads_kv}")


def _of_batch(query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of one batch element, seen by every batch element of the queries."""
    batch = query.shape[0]
    if block_mask is None:
        raise ShapeError(
            f"query has batch size {batch}, key {key.shape[0]}: expected as many, or one and a block_mask of batch size {batch}"
        )
    made_for = (1, 1, *block_mask.shape)[-4]
    if made_for != batch:
        raise ShapeError(f"query has batch size {batch}, key {key.shape[0]} and block_mask {made_for}: expected {batch}, 1 and {batch}")
    if key.shape[0] != 1 or value.shape[0] != 1:
        raise UsageError(f"query has batch size {batch}, key {key.shape[0]} and value {value.shape[0]}: expected 1 key/value for all")
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _autocast(*inputs: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    return tuple(x.to(dtype) if x.dtype in (torch.float16, torch.bfloat16, torch.float32) else x for x in inputs)


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Floats of fewer bits in the dtype of the query; the kernel refuses what has as many bits or more."""
    return x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize else x
