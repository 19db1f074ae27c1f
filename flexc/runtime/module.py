"""Load a generated text as a Python module from a real file, so that tracebacks, debuggers and inspect.getsource show its lines."""

from __future__ import annotations

import importlib.util
import linecache
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flexc.errors import InternalError


def _run(text: str, path: str, namespace: dict[str, Any]) -> None:
    # Compiled from the text, not from a .pyc: those are matched by time stamp and would confuse two texts of one second.
    exec(compile(text, path, "exec"), namespace)


def load_module(text: str, path: str | Path, run: Callable[[str, str, dict[str, Any]], None] = _run) -> ModuleType:
    """The module that `text` defines, loaded from `path`. The file is written (whole or not at all) unless it already holds the text.

    The module is not entered in sys.modules: two kernels never meet, and dropping the last reference frees it.

    Args:
        run: runs the text of a path in a namespace.

    Raises:
        InternalError: the text is not legal Python, or fails while it is loaded.
    """
    path = Path(path)
    if not _holds(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0].replace("-", "_"), path)
    if spec is None:
        raise InternalError(f"a module file must end in .py, got {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        run(text, str(path), module.__dict__)
    except Exception as error:
        raise InternalError(f"generated module {path} does not load: {type(error).__name__}: {error}") from error
    return module


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False
