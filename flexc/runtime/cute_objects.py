"""Object files of compiled launchers, linked to libraries, which a process loads without the DSL: to import it takes longer than the rest.

The library finds what it calls in two others: TVM-FFI's, and the DSL's small runtime. Where no C compiler was at hand there is the object
file alone, and the DSL loads it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from flexc.runtime.cache import Entry

OBJECT, LIBRARY = "launch.o", "launch.so"
_DISTRIBUTION = "nvidia_cutlass_dsl"


def linked(compiled: bytes) -> bytes | None:
    """The library of an object file; None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="flexc-") as folder:
        source, target = Path(folder) / OBJECT, Path(folder) / LIBRARY
        source.write_bytes(compiled)
        # All libraries have the same names inside: each means its own.
        command = [compiler, "-shared", "-Wl,-Bsymbolic", "-o", target, source]
        done = subprocess.run(command, capture_output=True, check=False)
        return target.read_bytes() if done.returncode == 0 else None


def runtime_place() -> str:
    """Where the DSL's runtime library lies below the distribution, whichever folder that is installed in; "" if it is elsewhere."""
    try:
        from cutlass.runtime import find_runtime_libraries  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ""
    root = _root()
    for path in map(Path, find_runtime_libraries(enable_tvm_ffi=False)):
        if root is not None and path.resolve().is_relative_to(root):
            return str(path.resolve().relative_to(root))
    return ""


def loaded(entry: Entry, name: str) -> Callable[..., Any] | None:
    """A function of the entry's library; None where the DSL must load the object file."""
    place = entry.meta.get("runtime", "")
    if LIBRARY not in entry.files or not place or not _loads_runtime(place):
        return None
    import tvm_ffi  # pyright: ignore[reportMissingImports]

    try:
        return tvm_ffi.load_module(str(entry.path(LIBRARY))).get_function(name)
    except (OSError, RuntimeError):  # linked for another C library, in an image: the object file serves
        return None


@cache
def _loads_runtime(place: str) -> bool:
    """Make what libraries call visible to them."""
    root = _root()
    if root is None or not (root / place).is_file():
        return False
    try:
        ctypes.CDLL(str(root / place), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


@cache
def _root() -> Path | None:
    found = importlib.util.find_spec(_DISTRIBUTION)
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return Path(places[0]).resolve() if places else None
