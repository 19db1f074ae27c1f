"""Keys and values of eight bits, with scales: half the bytes of a cache, multiplied out in the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexc.errors import InputError, ShapeError

Tensor = torch.Tensor

DTYPES = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Scales:
    """Factors of the keys and of the values.

    Attributes:
        k, v: float32 views [N, Hkv, S], like the keys without their last dimension: of a batch entry or page, of a head, of a token.
        of_tokens: whether a token has one of its own; else one serves a head, or all.
    """

    k: Tensor
    v: Tensor
    of_tokens: bool


def is_quantized(x: Tensor) -> bool:
    """Whether a tensor holds numbers of eight bits."""
    return x.dtype in DTYPES


def is_readable(x: Tensor) -> bool:
    """Whether kernels read the keys or values of a cache where they are.

    Those of eight bits are read two at a time, if the head dim is even: then each row is to begin at an even address.
    """
    if x.stride(-1) != 1:
        return False
    return not is_quantized(x) or x.shape[-1] % 2 == 1 or (x.data_ptr() % 2 == 0 and not any(stride % 2 for stride in x.stride()[:-1]))


def scales_of(k_scale: Tensor | None, v_scale: Tensor | None, k: Tensor, v: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Scales:
    """The scales of k and v [N, Hkv, S, D], given for all, for each head, or for each token and head; None for 1.

    Args:
        order: turns a scale of three dimensions into one like k's.

    Raises:
        InputError, ShapeError: names the scale, what it is and what it may be.
    """
    views, kinds = [], set()
    for name, scale, x in (("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        if scale is None:
            scale = torch.ones((), device=x.device)
        if not isinstance(scale, Tensor):
            raise InputError(f"{name} is a {type(scale).__name__}; expected a float32 tensor")
        if scale.dtype != torch.float32:
            raise InputError(f"{name} has dtype {scale.dtype}; expected float32: convert it with {name}.float()")
        if scale.device != x.device:
            raise InputError(f"{name} is on {scale.device} and what it scales on {x.device}: move it with {name}.to({str(x.device)!r})")
        view = scale.permute(order) if scale.dim() == 3 else scale.view(1, -1, 1) if scale.dim() == 1 else scale
        if scale.dim() not in (0, 1, 3) or (scale.dim() == 1 and scale.shape[0] not in (1, x.shape[1])) or not _is_like(view, x):
            whole = [x.shape[place] for place in (order.index(i) for i in range(3))]
            raise ShapeError(f"{name} has shape {list(scale.shape)}; expected [], [{x.shape[1]}] (heads) or {whole} (tokens and heads)")
        kinds.add(scale.dim() == 3)
        views.append(view.expand(x.shape[:3]))
    return Scales(views[0], views[1], True in kinds)


def _is_like(view: Tensor, x: Tensor) -> bool:
    if view.dim() < 3:
        return True
    return view.shape[1] in (1, x.shape[1]) and (view.shape == x.shape[:3] or view.shape[0] == view.shape[2] == 1)


def refuse_scales_of_wide(k_scale: Tensor | None, v_scale: Tensor | None, k: Tensor) -> None:
    """Refuse scales of keys and values that are no numbers of eight bits."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not is_quantized(k):
            raise InputError(f"{name} was given, and keys are {k.dtype}; expected float8_e4m3fn or int8")


def meant(k: Tensor, v: Tensor, scales: Scales | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v [N, Hkv, S, D] times their scales."""
    if scales is None:
        return k, v
    return (k.float() * scales.k[..., None]).to(dtype), (v.float() * scales.v[..., None]).to(dtype)
