"""Whether tensors are in all but their contents like those of a call before: one look in C++, which Dynamo's guards take, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexc.watched import PLAIN

Tensor = torch.Tensor

_guards: Any = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
_Guards: Any = getattr(_guards, "TensorGuards", None)


def like(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """A function of as many tensors: whether each has the same type, dtype, device, sizes, strides and `requires_grad`, and autocast,
    inference mode and the like are as they are now. It does not look at addresses, and takes no tensor that is there twice.

    Returns:
        None where PyTorch has no such function, for what is more than its memory, and where one tensor is there twice.
    """
    if _Guards is None or not all([type(x) in PLAIN for x in tensors]):
        return None
    try:
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        check = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (RuntimeError, TypeError, SystemError):  # nested and sparse tensors
        return None
    return check if check(*tensors) else None


def address(q: Tensor, k: Tensor, v: Tensor) -> int:
    """A multiple of each power of two that all three begin at multiples of."""
    return q.data_ptr() | k.data_ptr() | v.data_ptr()
