"""Modules that load when something of them is first asked for: `import flexc` takes what a first call takes, and no more."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """Stands for a module of ours."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
