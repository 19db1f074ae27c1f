"""What a kernel keeps of a call for those like it: the launch, found by all that is read of q, k and v before their contents.

Equal inputs need no check twice. A call that finds its launch here costs the host a few microseconds besides the launch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flexc.alike import address, like
from flexc.extents import Extent
from flexc.launch import Launch

Tensor = torch.Tensor

_MOST_LIKENESSES = 256
_MOST_TRACES = 16  # of one likeness
_MOST_CHECKS = 32
_is_deterministic = torch._C._get_deterministic_algorithms  # what `torch.are_deterministic_algorithms_enabled` asks
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
        self._newest: _Newest | None = None
        self._last: tuple | None = None
        self._checks_made = 0

    def like(self, q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> dict[Any, Ready] | None:
        """By trace, the launches for such inputs, with what else was asked."""
        newest = self._newest
        if newest is not None and newest.asked == asked and newest.check(q, k, v) and (address(q, k, v) % 16 == 0) is newest.is_aligned:
            return newest.known
        likeness = likeness_of(q, k, v, *asked)
        known = None if likeness is None else self._kept.get(likeness)
        if known is not None:
            # A check for each kind of inputs that come in turns would cost more than it saves.
            if likeness == self._last and self._checks_made < _MOST_CHECKS:
                self._note(known, q, k, v, asked)
            self._last = likeness
        return known

    def _note(self, known: dict[Any, Ready], q: Tensor, k: Tensor, v: Tensor, asked: tuple) -> None:
        check = like((q, k, v))
        if check is not None:
            self._checks_made += 1
            self._newest = _Newest(check, asked, address(q, k, v) % 16 == 0, known)

    def keep(self, likeness: tuple | None, trace: Any, ready: Ready) -> None:
        """Keep a launch for inputs of this likeness, if they have one."""
        if likeness is None:
            return
        if len(self._kept) >= _MOST_LIKENESSES:
            self._kept.clear()
            self._newest = None
        by_trace = self._kept.setdefault(likeness, {})
        if len(by_trace) >= _MOST_TRACES:
            by_trace.clear()
        by_trace[trace] = ready
        self._last = likeness

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))


class _Newest(NamedTuple):
    """What the inputs of two calls one after another were like: the next ones mostly are, too.

    Attributes:
        check: whether q, k and v are like them in all but `is_aligned` and contents.
        known: what `ReadyLaunches` keeps for them.
    """

    check: Callable[..., bool]
    asked: tuple
    is_aligned: bool
    known: dict[Any, Ready]


def likeness_of(q: Tensor, k: Tensor, v: Tensor, *asked: Any) -> tuple | None:
    """What decides how inputs are taken, with what else was asked; None for what is no dense tensor."""
    try:
        return (
            *(q.shape, k.shape, v.shape),
            *(q.stride(), k.stride(), v.stride()),
            *(q.dtype, k.dtype, v.dtype),
            *(q.device, k.device, v.device),
            address(q, k, v) % 16 == 0,
            *asked,
        )
    except (RuntimeError, AttributeError, NotImplementedError):  # nested and sparse tensors have no sizes or strides
        return None


def wants_determinism() -> bool:
    """`torch.use_deterministic_algorithms(True)` asks every kernel for it. With warn_only=True a kernel that cannot be so is let be."""
    return _is_deterministic() and not torch.is_deterministic_algorithms_warn_only_enabled()
