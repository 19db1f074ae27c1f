"""Who compiles machine code, when and for how long: Triton does it inside a launch, wherever this process has not loaded the binary.

`watch` marks the kernels of one generated module, whose binaries are then kept in flexc's cache; kernels of others are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from flexc.runtime.triton_cache import binary_of

_MARK = "_flexc_observer"


class Observer(Protocol):
    """What is told of each binary."""

    def missing(self, kernel: str) -> None:
        """The cache has no binary of this kernel, and it is compiled next unless this raises."""

    def ready(self, kernel: str, compiled: bool, seconds: float) -> None:
        """A binary was compiled, or else read from the cache."""


def watch(module: ModuleType, observer: Observer) -> None:
    """Tell the observer of every binary of the module's kernels. Nothing happens in Triton's interpreter, which makes none."""
    from triton import knobs

    for name in module.LAUNCH:
        setattr(getattr(module, name), _MARK, observer)
    if not isinstance(knobs.runtime.jit_cache_hook, _Hook):
        knobs.runtime.jit_cache_hook = _Hook(knobs.runtime.jit_cache_hook)


class _Hook:
    """Triton calls it where a kernel is not in this process's memory, before it looks on the disk; a hook that was there keeps its say."""

    def __init__(self, previous: Callable[..., Any] | None):
        self.previous = previous

    def __call__(self, **given: Any) -> Any:
        function = given["fn"].jit_function
        observer = getattr(function, _MARK, None)
        if observer is not None and not isinstance(function.compile, _Watched):
            function.compile = _Watched(function.compile, observer)
        return None if self.previous is None else self.previous(**given)


class _Watched:
    """Stands for `triton.compile`, of one kernel."""

    def __init__(self, compile_source: Callable[..., Any], observer: Observer):
        self.compile_source, self.observer = compile_source, observer

    def __call__(self, source: Any, *, target: Any, options: Mapping[str, Any], **others: Any) -> Any:
        started = time.perf_counter()
        compile_source = partial(self.compile_source, **others)
        binary, is_compiled = binary_of(compile_source, source, target, options, lambda: self.observer.missing(source.name))
        self.observer.ready(source.name, is_compiled, time.perf_counter() - started)
        return binary
