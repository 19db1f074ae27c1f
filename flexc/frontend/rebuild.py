"""The user's function built again with everything that it captures replaced by what can be traced.

Every captured value is reached along a `Source`, and everything that is read leaves a guard, so that the trace is used again exactly when
reading the same paths gives values that it holds for. Containers and objects are read lazily: what is not read is not guarded.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from typing import Any

import numpy as np
import torch

from flexc.frontend.callables import global_names, inner_function, is_foreign, refuse_assignments
from flexc.frontend.captured import captured_tensor
from flexc.frontend.guards import Source
from flexc.frontend.proxies import ClassProxy, DictProxy, ModuleProxy, ObjectProxy, SequenceProxy
from flexc.frontend.session import Session, refuse
from flexc.frontend.specialise import captured_number
from flexc.frontend.stand_ins import BUILTINS, STAND_INS, stand_in
from flexc.frontend.symbol import Traced
from flexc.frontend.vector import MOST_ELEMENTS, elements_of, wrap

_BY_VALUE = (bool, str, bytes, complex, type(None), type(Ellipsis), range, slice, torch.dtype, torch.device)


class Rebuilder:
    """Replaces captured values for one session. The same path, and the same function or tensor, is replaced once."""

    def __init__(self, session: Session):
        self.session = session
        self.guards = session.guards
        self._by_source: dict[Source, Any] = {}
        self._first: dict[int, tuple[Any, Source]] = {}  # by identity; the object is kept so that its id stays its own
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any], Source]] = {}

    def wrap(self, value: Any, source: Source) -> Any:
        """What the traced function gets in place of `value`."""
        if source not in self._by_source:
            known = self._first.get(id(value))
            if known is not None:
                self.guards.same(source, known[1])
                self._by_source[source] = self._by_source[known[1]]
            else:
                self._by_source[source] = self._replace(value, source)
        return self._by_source[source]

    def _remember(self, value: Any, source: Source, replacement: Any) -> Any:
        self._first[id(value)] = (value, source)
        self._by_source[source] = replacement
        return replacement

    def _replace(self, value: Any, source: Source) -> Any:
        if isinstance(value, Traced):
            refuse(
                f"{source.name} holds a traced value of another call", why="it was kept when the function had returned", instead="a number"
            )
        if isinstance(value, enum.Enum) or id(value) in STAND_INS:
            self.guards.identical(source, value)
            return stand_in(value)
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, source)
        if isinstance(value, _BY_VALUE):
            if value is None or isinstance(value, bool):
                self.guards.identical(source, value)
            else:
                self.guards.has_type(source, type(value))
                self.guards.equals(source, value)
            return value
        if isinstance(value, int | float):
            return captured_number(self.session, source, value)
        if isinstance(value, torch.Tensor):
            return self._remember(value, source, captured_tensor(self.session, source, value))
        if isinstance(value, np.ndarray):
            return self._array(value, source)
        if isinstance(value, dict):
            self.guards.has_type(source, type(value))
            return DictProxy(self, value, source)
        if isinstance(value, list | tuple):
            self.guards.has_type(source, type(value))
            return SequenceProxy(self, value, source)
        if isinstance(value, set | frozenset):
            self.guards.has_type(source, type(value))
            self.guards.equals(source, type(value)(value))
            return value
        return self._callable_or_object(value, source)

    def _numpy_scalar(self, value: np.generic, source: Source) -> Any:
        self.guards.has_type(source, type(value))
        if isinstance(value, np.bool_):
            self.guards.equals(source, value)
            return bool(value)
        if isinstance(value, np.integer | np.floating):
            return captured_number(self.session, Source(source, "{0}.item()", source.name), value.item())
        refuse(f"{source.name} is a {type(value).__name__}", why="scores are real numbers", instead="an int or a float")

    def _array(self, value: np.ndarray, source: Source) -> Any:
        if value.size <= MOST_ELEMENTS:
            self.guards.has_type(source, type(value))
            self.guards.array(source, value)
            return wrap(elements_of(value))
        try:
            tensor = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            refuse(f"the captured array {source.name}: {error}", why="it must become a tensor", instead="a torch tensor")
        return self.wrap(tensor, Source(source, "from_numpy({0})", source.name))

    def _callable_or_object(self, value: Any, source: Source) -> Any:
        if isinstance(value, types.FunctionType):
            if value.__module__ not in (None, "builtins") and is_foreign(value.__module__):  # of neither: `exec` made it without a __name__
                self.guards.identical(source, value)
                return value
            return self.function(value, source)
        if isinstance(value, types.MethodType):
            self.guards.has_type(source, types.MethodType)
            inner = value.__func__
            function = self.wrap(inner, Source(source, "{0}.__func__", source.name))
            return functools.partial(function, self.wrap(value.__self__, Source(source, "{0}.__self__", "self")))
        if isinstance(value, functools.partial):
            return self._partial(value, source)
        if isinstance(value, weakref.ref):
            self.guards.has_type(source, type(value))
            return lambda: self.wrap(value(), Source(source, "{0}()", source.name))
        if isinstance(value, types.BuiltinFunctionType | np.ufunc | types.MethodDescriptorType | types.WrapperDescriptorType):
            self.guards.identical(source, value)
            return stand_in(value)
        if isinstance(value, types.ModuleType):
            self.guards.identical(source, value)
            return value if is_foreign(value.__name__) else ModuleProxy(self, value, source)
        if isinstance(value, type):
            self.guards.identical(source, value)
            return value if is_foreign(value.__module__) else ClassProxy(self, value, source)
        self.guards.has_type(source, type(value))
        function = inner_function(value)
        if function is not None:
            name, inner = function
            return self.wrap(inner, Source(source, f"{{0}}.{name}", source.name))
        return self._remember(value, source, ObjectProxy(self, value, source))

    def _partial(self, value: functools.partial, source: Source) -> functools.partial:
        self.guards.has_type(source, type(value))
        function = self.wrap(value.func, Source(source, "{0}.func", source.name))
        self.guards.has_length(Source(source, "{0}.args"), len(value.args))
        args = [self.wrap(a, Source(source, f"{{0}}.args[{i}]", f"argument_{i}")) for i, a in enumerate(value.args)]
        self.guards.has_keys(Source(source, "{0}.keywords"), tuple(value.keywords))
        keywords = {k: self.wrap(v, Source(source, f"{{0}}.keywords[{k!r}]", k)) for k, v in value.keywords.items()}
        return functools.partial(function, *args, **keywords)

    # --- functions --------------------------------------------------------------------------------------------------------------------

    def function(self, function: types.FunctionType, source: Source) -> types.FunctionType:
        """The function with its cells, globals and defaults replaced. Recursion finds itself."""
        code = function.__code__
        refuse_assignments(code)
        self.guards.has_type(source, types.FunctionType)
        self.guards.runs(source, code)
        self.session.add_code(code)
        module_globals, replaced, globals_source = self._globals_of(function, source)
        cells = tuple(types.CellType() for _ in code.co_freevars)
        rebuilt = types.FunctionType(code, replaced, function.__name__, None, cells)
        rebuilt.__qualname__ = function.__qualname__
        self._remember(function, source, rebuilt)
        for name in global_names(code):
            self._replace_global(name, module_globals, replaced, globals_source)
        for index, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True)):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not assigned: using it raises NameError, as in the user's function
            path = source.cell(index, name)
            cells[index].cell_contents = content if name == "__class__" else self.wrap(content, path)
        rebuilt.__defaults__ = self._defaults(function, source)
        rebuilt.__kwdefaults__ = self._keyword_defaults(function, source)
        for name, value in vars(function).items():
            if name != "__wrapped__":  # left by functools.wraps; nobody calls it
                setattr(rebuilt, name, self.wrap(value, source.attribute(name)))
        return rebuilt

    def _globals_of(self, function: types.FunctionType, source: Source) -> tuple[dict[str, Any], dict[str, Any], Source]:
        original = function.__globals__
        path = Source(source, "{0}.__globals__")
        if id(original) not in self._globals:
            replaced = {"__builtins__": BUILTINS, "__name__": original.get("__name__")}
            self._globals[id(original)] = (original, replaced, path)
        known = self._globals[id(original)]
        self.guards.same(path, known[2])
        return known

    def _replace_global(self, name: str, original: dict[str, Any], replaced: dict[str, Any], source: Source) -> None:
        if name in replaced:
            return
        self.guards.contains(source, name, name in original)
        if name in original:
            replaced[name] = None  # a helper that calls itself meets its own name
            replaced[name] = self.wrap(original[name], source.item(name))

    def _defaults(self, function: types.FunctionType, source: Source) -> tuple | None:
        path = Source(source, "{0}.__defaults__")
        if function.__defaults__ is None:
            self.guards.identical(path, None)
            return None
        self.guards.has_length(path, len(function.__defaults__))
        names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(function.__defaults__) :]
        wrapped = []
        for index, (name, value) in enumerate(zip(names, function.__defaults__, strict=True)):
            wrapped.append(self.wrap(value, Source(source, f"{{0}}.__defaults__[{index}]", name)))
        return tuple(wrapped)

    def _keyword_defaults(self, function: types.FunctionType, source: Source) -> dict[str, Any] | None:
        path = Source(source, "{0}.__kwdefaults__")
        if function.__kwdefaults__ is None:
            self.guards.identical(path, None)
            return None
        self.guards.has_keys(path, tuple(function.__kwdefaults__))
        return {k: self.wrap(v, path.item(k)) for k, v in function.__kwdefaults__.items()}
