"""Arguments of launches that are made again and again on tensors of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def is_wide(number: int | float) -> bool:
    """Whether Triton takes it as int64, or as no integer."""
    return type(number) is not int or not -(2**31) <= number < 2**31


class Arguments:
    """What stays the same, and where tensors and numbers that change go.

    Args:
        device: that is launched on.
        starts: where parts of one piece of memory of int32 begin, which are the first arguments.
    """

    def __init__(self, device: torch.device, starts: Sequence[int] = ()):
        self.given: list[Any] = [0] * len(starts)
        self.kind: tuple = (device.index,)
        self._starts = tuple(starts)
        self._parts = tuple([(place, 4 * start) for place, start in enumerate(starts)])
        self._pointers: list[int] = []
        self._scalars = slice(0, 0)

    def pointer(self, dtype: torch.dtype) -> None:
        """Where a tensor begins."""
        self._pointers.append(len(self.given))
        self.given.append(0)
        self.kind += (dtype,)

    def numbers(self, numbers: Sequence[int | float]) -> None:
        """Numbers, of which Triton looks at the type alone."""
        self.given.extend(numbers)
        self.kind += tuple((nth, type(number)) for nth, number in enumerate(numbers, len(self.given)) if is_wide(number))

    def scalars(self, scalars: Sequence[int | float]) -> None:
        """Numbers that change."""
        self._scalars = slice(len(self.given), len(self.given) + len(scalars))
        self.numbers(scalars)

    def constant(self, value: Any) -> None:
        """A value that is part of the binary."""
        self.given.append(value)
        self.kind += (value,)

    def addresses(self, memory: Tensor | None, tensors: Sequence[Tensor], scalars: Sequence[int | float] = ()) -> list[Any]:
        """The arguments with addresses in place of tensors.

        Args:
            memory: whose parts come first.
            tensors: whose pointers are among the arguments, in order.
        """
        given = self.given.copy()
        if memory is not None:
            base = memory.data_ptr()
            for place, start in self._parts:
                given[place] = base + start
        for place, tensor in zip(self._pointers, tensors, strict=True):
            given[place] = tensor.data_ptr()
        if scalars:
            given[self._scalars] = scalars
        return given

    def with_tensors(self, given: list[Any], memory: Tensor | None, tensors: Sequence[Tensor]) -> list[Any]:
        """What `addresses` gave for the same, with tensors."""
        found = given.copy()
        for place, tensor in zip(self._pointers, tensors, strict=True):
            found[place] = tensor
        if memory is not None:
            found[: len(self._starts)] = [memory[start:] for start in self._starts]
        return found
