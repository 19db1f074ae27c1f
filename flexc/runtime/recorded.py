"""What recorded launches of both GPU backends share: functions printed for one launch, and the results that they allocate."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

import torch

Results = tuple[torch.Tensor, ...]
Again = Callable[..., Results | None]  # (q, k, v, scale, tensors, scalars, walk) → results; None: this call is another one

_numbers = itertools.count()
# As code that torch.compile generates allocates, in less time than torch.empty takes. On the current device.
_guards: Any = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
_empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)


class OtherLaunch(Exception):
    """Not a launch of the kind that can be made again."""


def allocation(result: torch.Tensor, device: torch.device, known: dict[str, Any]) -> str:
    """Text that allocates a tensor like the result, which is contiguous; adds the names that it reads."""
    if not result.is_contiguous():
        raise OtherLaunch
    dtype = str(result.dtype).removeprefix("torch.")
    known[dtype] = result.dtype
    if device.type == "cuda" and _empty_strided_cuda is not None:
        known["empty"] = _empty_strided_cuda
        return f"empty({tuple(result.shape)}, {result.stride()}, {dtype})"
    known |= {"empty": torch.empty, "device": device}
    return f"empty({tuple(result.shape)}, dtype={dtype}, device=device)"


def function_of(lines: list[str], known: dict[str, Any]) -> Again:
    """The function with these lines, over these names. Tracebacks and profilers find its lines for as long as it lives."""
    text, name = text_of(lines), f"<launch {next(_numbers)}>"
    exec(compile(text, name, "exec"), known)
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    weakref.finalize(known["again"], linecache.cache.pop, name, None)
    return known["again"]


def text_of(lines: list[str]) -> str:
    """The text of the function."""
    return "\n    ".join(["def again(q, k, v, scale, tensors, scalars, walk):", *lines]) + "\n"


def checks_of_scalars(scalars: tuple) -> list[str]:
    """Conditions under which run-time numbers are other ones for a launcher: another type, or another width."""
    tests = []
    for slot, number in enumerate(scalars):
        if type(number) is int and -(2**31) <= number < 2**31:
            tests.append(f"scalars[{slot}].__class__ is not int or not {-(2**31)} <= scalars[{slot}] < {2**31}")
        elif type(number) is float:
            tests.append(f"scalars[{slot}].__class__ is not float")
        else:
            raise OtherLaunch
    return tests
