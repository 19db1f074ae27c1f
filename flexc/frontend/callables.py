"""What is known of a callable without calling it: its arguments, its code, its name, the lines and variables that it reads."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from flexc.errors import TraceError
from flexc.frontend.session import line_of, location_of
from flexc.ir.graph import Location

# Modules whose functions do not change and capture nothing of the user's.
_FOREIGN = {"torch", "numpy", "scipy", "sympy", "triton", "jax", *sys.stdlib_module_names} - {"__main__"}
_OURS = "flexc.frontend"
_THEIR_FUNCTIONS_OF_PAIRS = "torch.nn.attention."  # masks and scores made there are closures over the user's, as those of paged attention


def is_foreign(module: str | None) -> bool:
    """Whether functions and classes of this module are called as they are."""
    if module is None:
        return True
    is_library = module.partition(".")[0] in _FOREIGN and not module.startswith(_THEIR_FUNCTIONS_OF_PAIRS)
    return is_library or module == _OURS or module.startswith(f"{_OURS}.")


def inner_function(value: Any) -> tuple[str, Any] | None:
    """For a mask, a kernel, a cached or a compiled function: the attribute that holds the plain function, and the function."""
    for name in ("__flexc_function__", "_torchdynamo_orig_callable"):
        try:
            inner = getattr(value, name, None)
        except LookupError:  # an object that looks attributes up in a dict
            continue
        if callable(inner):
            return name, inner
    if isinstance(value, functools._lru_cache_wrapper):
        return "__wrapped__", value.__wrapped__
    return None


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or code inside it, looks up in the globals."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(global_names(constant))
    return tuple(names)


def refuse_assignments(code: types.CodeType) -> None:
    """Refuse writes to globals and to variables of enclosing functions, which would be lost."""
    outer = set(code.co_freevars)
    waiting = [code]
    while waiting:
        inner = waiting.pop()
        line = inner.co_firstlineno
        for i in dis.get_instructions(inner):
            # Python 3.13 tells the line apart from whether it starts there.
            line = getattr(i, "line_number", None) or i.starts_line or line
            is_global = i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
            if is_global or (i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in outer and i.argval in inner.co_freevars):
                raise TraceError(
                    f"assignment to the {'global' if is_global else 'captured'} variable {i.argval}",
                    where=line_of(inner.co_filename, int(line)),
                    why="the function runs for many scores at once, in no order, and while tracing nothing is computed",
                    instead="a local variable",
                )
        waiting += [c for c in inner.co_consts if isinstance(c, types.CodeType)]


def arity(function: Callable[..., Any]) -> int:
    """Number of positional arguments that the function must be given, after those bound by partial or as self.

    Raises:
        TraceError: not callable, something that makes functions, or a function whose arguments are not all given by position.
    """
    plain = plain_callable(function)
    if not callable(plain):
        shown = repr(function)
        kind = type(function).__name__
        raise TraceError(
            f"{kind} {shown} is not a function" if len(shown) <= 60 and "\n" not in shown else f"a {kind} is not a function",
            why="a score or mask function is called once for each score, while tracing",
            instead="a function (score, batch, head, q_idx, kv_idx) or (batch, head, q_idx, kv_idx)",
        )
    if isinstance(plain, type) or getattr(plain, "makes_functions", False):
        name = name_of(function)
        raise TraceError(
            f"{name} {'is a class' if isinstance(plain, type) else 'makes mask or score functions, and is none itself'}",
            why="its own arguments are missing: it is called once, before there are scores and positions",
            instead=f"what that call gives, {name}(...)",
        )
    try:
        parameters = inspect.signature(plain).parameters.values()
    except ValueError:
        raise TraceError(
            f"{name_of(function)} is not written in Python",
            why="its arguments are unknown and it cannot be traced",
            instead="a Python function that calls it",
        ) from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) and len(required) < 4:
        raise TraceError(
            f"{name_of(function)} takes any number of arguments",
            where=where_defined(function),
            why="four arguments make a mask function, five a score function, and this one could be either",
            instead="named arguments: (score, batch, head, q_idx, kv_idx) or (batch, head, q_idx, kv_idx)",
        )
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is inspect.Parameter.empty]
    if by_name:
        raise TraceError(
            f"{name_of(function)} needs the keyword argument {by_name[0]}",
            where=where_defined(function),
            why="a kernel gives its functions positions, and nothing by name",
            instead=f"a default, or functools.partial(function, {by_name[0]}=...)",
        )
    return len(required)


def plain_callable(function: Any) -> Any:
    """The function inside masks and kernels; of a module, its forward."""
    while not isinstance(function, types.FunctionType | functools.partial | types.MethodType):
        inner = inner_function(function)
        if inner is not None:
            function = inner[1]
        elif isinstance(function, torch.nn.Module):
            return function.forward
        else:
            break
    return function


def code_of(function: Any) -> types.CodeType | None:
    """The code that runs when the function is called, or None for what is not written in Python."""
    plain = plain_callable(function)
    while isinstance(plain, functools.partial | types.MethodType):
        plain = plain_callable(plain.func if isinstance(plain, functools.partial) else plain.__func__)
    if not isinstance(plain, types.FunctionType):
        plain = type(plain).__call__ if callable(plain) else None
    return getattr(plain, "__code__", None)


def where_defined(function: Any) -> Location | None:
    """The line of the function's definition, or None."""
    code = code_of(function)
    return None if code is None else location_of(code)


def name_of(function: Any) -> str:
    """What to call the function in a message."""
    return getattr(function, "__name__", None) or getattr(plain_callable(function), "__name__", None) or type(function).__name__
