"""Who compiles machine code, when and for how long: Triton does it inside a launch, wherever its own cache lacks the binary.

`watch` marks the kernels of one generated module; kernels of others are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

_MARK = "_flexc_observer"


class Observer(Protocol):
    """What is told of each binary."""

    def missing(self, kernel: str) -> None:
        """Triton's cache has no binary of this kernel and compiles one next, unless this raises."""

    def ready(self, kernel: str, compiled: bool, seconds: float) -> None:
        """A binary was compiled, or else read from Triton's cache."""


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
    """`triton.compile`, which makes the IR of a source only after its cache had no binary."""

    def __init__(self, compile_source: Callable[..., Any], observer: Observer):
        self.compile_source, self.observer = compile_source, observer

    def __call__(self, source: Any, **options: Any) -> Any:
        name, compiled, make_ir = source.name, False, source.make_ir

        def noticed(*args: Any) -> Any:
            nonlocal compiled
            self.observer.missing(name)
            compiled = True
            return make_ir(*args)

        source.make_ir = noticed
        started = time.perf_counter()
        binary = self.compile_source(source, **options)
        self.observer.ready(name, compiled, time.perf_counter() - started)
        return binary
