"""What a user states about captured tensors: `flexc.sorted`."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence

import torch

from flexc.errors import InputError
from flexc.sparsity.table_cache import place_of

Tensor = torch.Tensor

_sorted: dict[Hashable, weakref.ref] = {}


def declare_sorted(tensor: Tensor) -> Tensor:
    """State that the tensor ascends along its last dimension (equal neighbours are fine), now and whenever it is written to.

    Block maps then read the ends of a range of positions instead of looking at every element. The statement holds for this tensor and for
    views that look the same, for as long as its memory lives; with FLEXC_CHECK=1 it is verified.

    Returns:
        The tensor.

    Raises:
        InputError: no tensor, one without a dimension, or one of truth values.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(f"expected a tensor of numbers, got a {type(tensor).__name__}: lists are compiled in, and need no statement")
    if tensor.dim() == 0 or tensor.dtype == torch.bool:
        raise InputError(f"expected a tensor of numbers with a dimension to be sorted along, got {tensor.dtype} {tuple(tensor.shape)}")
    key = place_of(tensor)
    _sorted[key] = weakref.ref(tensor.untyped_storage(), lambda dead: _sorted.pop(key, None) if _sorted.get(key) is dead else None)
    return tensor


def is_declared_sorted(tensor: Tensor) -> bool:
    """Whether `declare_sorted` was called with this tensor."""
    return bool(_sorted) and place_of(tensor) in _sorted


def verify_facts(tensors: Iterable[Tensor], names: Sequence[str] = ()) -> None:
    """Check what was stated about the tensors. Waits for the device.

    Args:
        names: what the user calls them, for messages.

    Raises:
        InputError: a tensor that was declared sorted descends; names the first position that does.
    """
    for slot, tensor in enumerate(tensors):
        if not is_declared_sorted(tensor):
            continue
        descends = ~(tensor[..., 1:] >= tensor[..., :-1])
        if not bool(descends.any()):
            continue
        *before, place = (int(i[0]) for i in descends.nonzero(as_tuple=True))
        name = names[slot] if slot < len(names) else "a tensor"
        values = tensor[(*before, place)].item(), tensor[(*before, place + 1)].item()
        at = ", ".join(map(str, (*before, place + 1)))
        raise InputError(f"{name} was declared sorted, but {name}[{at}] = {values[1]} comes after {values[0]}")
