"""Machine code of generated Triton kernels, in flexc's disk cache.

Triton's own cache lets every process that starts with others compile for itself, notes absolute paths, and loads what it finds unchecked;
to look anything up it reads the whole of Triton first (0.4 s). So kernels of generated modules are looked for here, and compiled into a
folder of the moment. Triton's launchers, which are C around the driver's call and belong to the machine, stay in Triton's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from flexc import settings
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of

_KEPT = (".json", ".cubin", ".ptx")


def binary_of(
    compile_source: Callable[..., Any], source: Any, target: Any, options: Mapping[str, Any], missing: Callable[[], None]
) -> tuple[Any, bool]:
    """Triton's compiled kernel, and whether it was compiled just now. Of many processes that need it, one compiles.

    Args:
        compile_source: `triton.compile`.
        missing: called where it must be compiled, before anything is; what it raises ends the call.
    """
    from triton.compiler.compiler import CompiledKernel

    if _is_worked_on():
        missing()
        return compile_source(source, target=target, options=options), True
    store, key, is_compiled = cache_of(settings.current()), _key(source, target, options), False
    entry = store.get(key)
    if entry is None:
        missing()
        with store.lock(key):
            entry = store.get(key)
            if entry is None:
                files, is_compiled = _compiled(compile_source, source, target, options), True
                entry = store.put(key, files, {"backend": "triton", "arch": str(target.arch)})
    return CompiledKernel(source, {name: str(entry.path(name)) for name in entry.files}, key), is_compiled


def _is_worked_on() -> bool:
    """Whether someone asks Triton to show what it compiles, or to take something else for it."""
    from triton import knobs

    asked = knobs.compilation
    return asked.override or asked.dump_ir or asked.always_compile


def _key(source: Any, target: Any, options: Mapping[str, Any]) -> str:
    """Of all that machine code depends on; the same wherever Triton is installed."""
    from triton._C.libtriton import get_cache_invalidating_env_vars  # pyright: ignore[reportMissingImports]

    ptxas = {name: value for name, value in os.environ.items() if name.startswith("TRITON_PTXAS")}
    libraries = [(name, _digest(path)) for name, path in options.get("extern_libs") or ()]
    return key_of(
        source=source.hash(),
        target=[target.backend, target.arch, target.warp_size],
        options={**options, "extern_libs": libraries},
        environment={**get_cache_invalidating_env_vars(), **ptxas},
        triton=_compiler(),
    )


@cache
def _compiler() -> list[str | int]:
    """Triton's version, and the size of its library: builds from source may share a version."""
    import triton
    from triton._C import libtriton

    return [triton.__version__, os.path.getsize(str(libtriton.__file__))]


@cache
def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _compiled(compile_source: Callable[..., Any], source: Any, target: Any, options: Mapping[str, Any]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="flexc-") as folder, _compiles_into(Path(folder)):
        binary = compile_source(source, target=target, options=options)
        files = {name: Path(path) for name, path in binary.metadata_group.items()}
        return {name: path.read_bytes() for name, path in files.items() if path.suffix in _KEPT}


class _Here(threading.local):
    """Where Triton compiles into, in this thread."""

    folder: Path | None = None


_here = _Here()


@contextlib.contextmanager
def _compiles_into(folder: Path) -> Iterator[None]:
    from triton import knobs

    if not isinstance(knobs.cache.manager_class, _Managers):
        knobs.cache.manager_class = _Managers(knobs.cache.manager_class)  # pyright: ignore[reportAttributeAccessIssue]
    before, _here.folder = _here.folder, folder
    try:
        yield
    finally:
        _here.folder = before


class _Managers:
    """Stands for Triton's class of caches: ours where flexc compiles, else what was there."""

    def __init__(self, previous: Any):
        self.previous = previous

    def __call__(self, key: str, **purpose: bool) -> Any:
        from triton.runtime.cache import FileCacheManager

        if _here.folder is None or any(purpose.values()):
            return (self.previous or FileCacheManager)(key, **purpose)
        return _Folder(_here.folder)


class _Folder:
    """As much of Triton's `CacheManager` as compiling one kernel uses."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get_group(self, filename: str) -> None:
        """There is nothing yet."""

    def put_group(self, filename: str, group: Mapping[str, str]) -> None:
        """The files are one group as they are."""

    def get_file(self, filename: str) -> str | None:
        """Its path."""
        path = self.folder / filename
        return str(path) if path.exists() else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file."""
        path = self.folder / filename
        path.write_bytes(data if isinstance(data, bytes) else str(data).encode())
        return str(path)
