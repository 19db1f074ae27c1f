"""Whether a call must be an operator that PyTorch sees: someone watches operators, or tensors are more than their memory."""

from __future__ import annotations

import sys

import torch

from flexc.errors import InputError

Tensor = torch.Tensor

_count_of_modes = torch._C._len_torch_dispatch_stack
_is_transformed = torch._C._are_functorch_transforms_active
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # tensors that are their memory and no more


def is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call must be an operator: someone watches operators, or tensors are more than their memory."""
    if _count_of_modes() or _is_transformed():
        return True
    return not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)


def is_distributed(*tensors: Tensor) -> bool:
    """Whether any is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor without it
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def refuse_distributed(tensor: Tensor, name: str) -> None:
    """Refuse a captured DTensor where q, k and v are plain: a kernel would read this rank's part for the whole."""
    if is_distributed(tensor):
        raise InputError(
            f"the captured tensor {name} is a DTensor and q, k and v are plain tensors; expected all to be DTensors, "
            f"or {name}.full_tensor()"
        )
