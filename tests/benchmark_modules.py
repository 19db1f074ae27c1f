"""The modules of the benchmarks, which are scripts and in no package."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent.parent / "benchmarks"


@contextmanager
def benchmark_modules(monkeypatch, *names: str) -> Iterator[dict[str, ModuleType]]:
    """These modules by name, found as a script finds them, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)
