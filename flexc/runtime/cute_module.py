"""Load a generated CuTe module without the DSL: the part that defines its kernels is run when one of them must be compiled."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flexc.errors import InternalError
from flexc.runtime.module import load_module

_lock = threading.RLock()


@dataclass(frozen=True)
class LaterFunction:
    """Stands for a function of the module's text until it must be compiled.

    Attributes:
        path: of the module.
        make: by name, the function itself.
    """

    name: str
    path: str
    make: Callable[[str], Any]

    def made(self) -> Any:
        """The function itself."""
        return self.make(self.name)


def load_cute_module(text: str, path: str | Path) -> ModuleType:
    """As `load_module`; the functions that its launchers were given are `LaterFunction`s."""
    return load_module(text, path, _run_host)


def _run_host(text: str, path: str, namespace: dict[str, Any]) -> None:
    """Run what is there from the first launcher on, and before it what needs no DSL: imports of others, and constants."""
    tree = ast.parse(text, path)
    first = next((index for index, statement in enumerate(tree.body) if _makes_launcher(statement)), None)
    if first is None:
        raise InternalError(f"generated module {path} has no launcher")
    kernels, host = tree.body[:first], tree.body[first:]
    is_made = False

    def run(statements: list[ast.stmt]) -> None:
        exec(compile(ast.Module(statements, []), path, "exec"), namespace)

    def make(name: str) -> Any:
        nonlocal is_made
        with _lock:
            if not is_made:
                run(kernels)
                is_made = True
            return namespace[name]

    for statement in kernels:
        if isinstance(statement, ast.FunctionDef):
            namespace[statement.name] = LaterFunction(statement.name, path, make)
    run([statement for statement in kernels if _needs_no_dsl(statement)] + host)


def _makes_launcher(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Launcher"


def _needs_no_dsl(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import):
        return not any(name.name.startswith("cutlass") for name in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return not (statement.module or "").startswith("cutlass") and not any(name.name.endswith("_tiles") for name in statement.names)
    if not isinstance(statement, ast.Assign):
        return False
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return True
