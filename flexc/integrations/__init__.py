"""flexc inside other libraries, each in a module that loads when it is asked for: `flexc.integrations.transformers.register()`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexc.integrations import transformers as transformers


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return importlib.import_module("flexc.integrations.transformers")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
