"""What a kernel keeps of a call for those like it: the launch, found by all that is read of q, k and v before their contents.

Equal inputs need no check twice. A call that finds its launch here costs the host a few microseconds besides the launch itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flexc.extents import Extent
from flexc.launch import Launch

Tensor = torch.Tensor

_MOST_LIKENESSES = 256
_MOST_TRACES = 16  # of one likeness
LARGEST_SCALE = torch.finfo(torch.float32).max


@dataclass(slots=True, eq=False)
class Ready:
    """A launch for inputs that kernels take as they are, without a copy.

    Attributes:
        launch: at the default scale and, if the graph has run-time numbers, at some of them.
        extents: sizes that captured tensors must have, which each call brings anew.
    """

    launch: Launch
    extents: tuple[Extent, ...]

    def at(self, scale: float | None, scalars: tuple[int | float, ...]) -> Launch:
        """The launch at a positive scale, or the default, and with these numbers."""
        kept = self.launch
        if scale is None and not scalars:
            return kept
        made = Launch(kept.artifact, kept.shapes, kept.scale if scale is None else scale, scalars, kept.options, kept.title)
        made.remembered = kept.remembered
        return made


class ReadyLaunches:
    """By likeness of the inputs, then by trace."""

    def __init__(self) -> None:
        self._kept: dict[tuple, dict[Any, Ready]] = {}

    def like(self, likeness: tuple) -> dict[Any, Ready] | None:
        """By trace, the launches for such inputs."""
        return self._kept.get(likeness)

    def keep(self, likeness: tuple, trace: Any, ready: Ready) -> None:
        """Keep a launch for inputs of this likeness."""
        if len(self._kept) >= _MOST_LIKENESSES:
            self._kept.clear()
        by_trace = self._kept.setdefault(likeness, {})
        if len(by_trace) >= _MOST_TRACES:
            by_trace.clear()
        by_trace[trace] = ready

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


def likeness_of(q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> tuple | None:
    """What decides how inputs are taken, with what else was asked; None for what is no dense tensor."""
    try:
        return (
            *(q.shape, k.shape, v.shape),
            *(q.stride(), k.stride(), v.stride()),
            *(q.dtype, k.dtype, v.dtype),
            *(q.device, k.device, v.device),
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0,
            *asked,
        )
    except (RuntimeError, AttributeError, NotImplementedError):  # nested and sparse tensors have no sizes or strides
        return None
