"""Launch a Triton kernel again and again at the cost of the launch alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch


class Launcher:
    """One kernel of a generated module.

    Triton looks at every argument of every launch to find the binary that fits, which costs more than the launch itself. A caller that
    knows of what kind its arguments are has each binary looked for once.

    Args:
        module: with `LAUNCH`: kernel name → (num_warps, num_stages).
        name: of the kernel.
        options: num_warps and num_stages other than the module's.
    """

    def __init__(self, module: Any, name: str, **options: int):
        warps, stages = module.LAUNCH[name]
        self.kernel = getattr(module, name)
        self.options = {"num_warps": warps, "num_stages": stages, **options}
        self._of_kinds: dict[Hashable, OfKind] = {}

    def of_kind(self, kind: Hashable) -> OfKind:
        """What launches the kernel on arguments of one kind, which a caller may keep.

        Args:
            kind: equal for arguments that Triton tells apart in nothing: the device, dtypes of tensors and their alignment where the
                kernel looks at it, integers that fit into 32 bits or do not, types of other numbers, values of constants.
        """
        found = self._of_kinds.get(kind)
        if found is None:
            found = self._of_kinds.setdefault(kind, OfKind(self.kernel, self.options))
        return found


class OfKind:
    """Launches of one kernel on arguments of one kind. Made by `Launcher.of_kind`."""

    __slots__ = ("_fixed", "_kernel", "_launch", "_options")

    def __init__(self, kernel: Any, options: dict[str, int]):
        self._kernel, self._options = kernel, options
        self._launch: Callable[..., None] | None = None
        self._fixed: tuple = ()

    def __call__(self, grid: tuple[int, int], device: int, arguments: Sequence[Any], tensors: Callable[[], Sequence[Any]]) -> None:
        """Launch on the current stream of a CUDA device, which is the current one.

        Args:
            grid: programs along x and y.
            arguments: of the kernel in its order, with addresses in place of tensors.
            tensors: the same with tensors, for a launch that Triton itself makes: the first one, and all that a profiler looks at.
        """
        launch = self._launch
        if launch is None or _is_watched():
            binary = self._kernel[grid](*tensors(), **self._options)
            if binary is not None:  # Triton's interpreter has none
                launch, function, settings = _launch_of(binary)
                self._fixed = (function, *settings, None, None, None)
                self._launch = launch  # last: other threads look at it first
            return
        launch(*grid, 1, torch._C._cuda_getCurrentRawStream(device), *self._fixed, *arguments)


def _launch_of(binary: Any) -> tuple[Callable[..., None], Any, tuple]:
    """What launches a binary: the function in C, where it is Triton's launcher of 3.6 and needs no memory of its own, else `run`."""
    run = binary.run
    is_known = type(run).__name__ == "CudaLauncher" and hasattr(run, "launch") and hasattr(run, "launch_pdl")
    if is_known and not (run.global_scratch_size or run.profile_scratch_size):
        return run.launch, binary.function, (run.launch_cooperative_grid, run.launch_pdl, None, None, binary.packed_metadata)
    return run, binary.function, (binary.packed_metadata,)


@cache
def _hooks() -> Any:
    from triton import knobs

    return knobs.runtime


def _is_watched() -> bool:
    """Whether a profiler has hooks on launches."""
    knobs = _hooks()
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (leave is not None and bool(getattr(leave, "calls", True)))
