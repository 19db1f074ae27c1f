"""Launch a Triton kernel again and again at the cost of the launch alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch


class Launcher:
    """One kernel of a generated module.

    Triton looks at every argument of every launch to find the binary that fits, which costs more than the launch itself. A caller that
    knows of what `kind` its arguments are has each binary looked for once.

    Args:
        module: with `LAUNCH`: kernel name → (num_warps, num_stages).
        name: of the kernel.
        options: num_warps and num_stages other than the module's.
    """

    def __init__(self, module: Any, name: str, **options: int):
        warps, stages = module.LAUNCH[name]
        self.kernel = getattr(module, name)
        self.options = {"num_warps": warps, "num_stages": stages, **options}
        self._binaries: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, ...], kind: Hashable, device: int, arguments: Sequence[Any], tensors: Callable[[], Sequence[Any]]):
        """Launch on the current stream of a CUDA device, which is the current one.

        Args:
            kind: equal for arguments that Triton tells apart in nothing: the device, dtypes of tensors and their alignment where the
                kernel looks at it, integers that fit into 32 bits or do not, types of other numbers, values of constants.
            arguments: of the kernel in its order, with addresses in place of tensors.
            tensors: the same with tensors, for a launch that Triton itself makes: the first of a kind, and all that a profiler looks at.
        """
        binary = self._binaries.get(kind)
        if binary is None or _is_watched():
            binary = self.kernel[grid](*tensors(), **self.options)
            if binary is not None:  # Triton's interpreter has none
                self._binaries[kind] = binary
            return
        x, y = grid if len(grid) == 2 else (grid[0], 1)
        stream = torch._C._cuda_getCurrentRawStream(device)
        binary.run(x, y, 1, stream, binary.function, binary.packed_metadata, None, None, None, *arguments)


@cache
def _hooks() -> Any:
    from triton import knobs

    return knobs.runtime


def _is_watched() -> bool:
    """Whether a profiler has hooks on launches."""
    knobs = _hooks()
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (leave is not None and bool(getattr(leave, "calls", True)))
