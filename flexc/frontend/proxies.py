"""Captured containers and objects as the traced function sees them: read lazily, so that only what is read is guarded."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from flexc.frontend.callables import global_names, is_foreign
from flexc.frontend.guards import Source
from flexc.frontend.indexing import select
from flexc.frontend.session import refuse
from flexc.frontend.symbol import Symbol, Traced
from flexc.frontend.vector import MOST_ELEMENTS, Vector, elements_of, wrap


def _refuse_write(source: Source, how: str) -> NoReturn:
    refuse(
        f"{how} writes to the captured {source.name}",
        why="the function runs for many scores at once, in no order, and while tracing nothing is computed",
        instead="a local variable",
    )


def _writer(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: _refuse_write(self._source, name)


class _Proxy:
    """A captured container or object, read lazily along its path. `rebuilder` has `wrap` and `guards`."""

    _rebuilder: Any
    _value: Any
    _source: Source

    def __init__(self, rebuilder: Any, value: Any, source: Source):
        object.__setattr__(self, "_rebuilder", rebuilder)
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_source", source)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`isinstance` sees the captured value's class."""
        return type(self._value)

    def __repr__(self) -> str:
        return repr(self._value)

    def _item(self, key: Any) -> Any:
        return self._rebuilder.wrap(self._value[key], self._source.item(key))

    def _length(self) -> int:
        self._rebuilder.guards.has_length(self._source, len(self._value))
        return len(self._value)

    def _attribute(self, name: str) -> Any:
        rebuilder, value, source = self._rebuilder, self._value, self._source
        try:
            attribute = getattr(value, name)
        except AttributeError:
            rebuilder.guards.lacks_attribute(source, name)
            raise
        return rebuilder.wrap(attribute, source.attribute(name))


for _name in ("__setitem__", "__delitem__"):
    setattr(_Proxy, _name, _writer("an assignment to an element"))


class SequenceProxy(_Proxy, Sequence):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A captured list or tuple. Indexed by a symbol it is a small table."""

    __flexc_elements__ = True

    def __len__(self) -> int:
        return self._length()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Symbol | Vector):
            if isinstance(key, Vector):
                return Vector(elements_of(list(self)))[key]
            return self._selected(key)
        if isinstance(key, slice):
            return [self[i] for i in range(len(self))[key]]
        return self._item(key)

    def _selected(self, key: Symbol) -> Any:
        count = len(self)
        if count > MOST_ELEMENTS:
            select(range(count), key)  # refuses
        for position, element in enumerate(self._value):
            if not _is_number_like(element):
                refuse(
                    f"index {key} into {self._source.name}: element {position} is a {type(element).__name__}",
                    why="which element is meant is unknown while tracing, so all must be numbers (or lists of numbers)",
                    instead="one captured tensor with a dimension for it: torch.stack(values)",
                )
        return wrap(select(list(self), key))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, value: Any) -> Any:
        return any(bool(element == value) for element in self)

    def __eq__(self, other: Any) -> Any:
        return type(self._value)(self) == (type(other._value)(other) if isinstance(other, SequenceProxy) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Any) -> Any:
        return type(self._value)([*self, *other])

    def __radd__(self, other: Any) -> Any:
        return type(self._value)([*other, *self])

    def __mul__(self, times: int) -> Any:
        return type(self._value)([*self] * times)

    def __getattr__(self, name: str) -> Any:
        if name in _WRITING:
            _refuse_write(self._source, f".{name}()")
        if type(self._value) not in (list, tuple):  # a named tuple, or a class of the user's
            return self._attribute(name)
        raise AttributeError(f"{type(self._value).__name__} has no attribute {name!r}")


_WRITING = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "update", "setdefault", "popitem"}


def _is_number_like(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number_like, value))
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim == 0
    return isinstance(value, bool | int | float | np.generic)


class DictProxy(_Proxy, Mapping):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A captured dict."""

    def __getitem__(self, key: Any) -> Any:
        present = key in self
        if not present and not hasattr(type(self._value), "__missing__"):
            raise KeyError(key)
        return self._item(key)

    def __contains__(self, key: Any) -> bool:
        hash(key)
        present = key in self._value
        self._rebuilder.guards.contains(self._source, key, present)
        return present

    def __iter__(self) -> Iterator[Any]:
        self._rebuilder.guards.has_keys(self._source, tuple(self._value))
        return iter(self._value)

    def __len__(self) -> int:
        return self._length()

    def __getattr__(self, name: str) -> Any:
        if name in _WRITING:
            _refuse_write(self._source, f".{name}()")
        if type(self._value) is not dict:  # a class of the user's, such as one whose items are attributes
            return self._attribute(name)
        raise AttributeError(name)


class ObjectProxy(_Proxy):
    """A captured object: attributes, methods, calls and elements are read along its path."""

    def __getattr__(self, name: str) -> Any:
        return self._attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_write(self._source, f"an assignment to .{name}")

    def _special(self, name: str) -> Any:
        """A method of the class, bound to this proxy."""
        function = getattr(type(self._value), name)
        path = Source(self._source, f"{{0}}.__class__.{name}", f"{self._source.name}.{name}")
        return functools.partial(self._rebuilder.wrap(function, path), self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._value, torch.nn.Module):
            if self._value._forward_hooks or self._value._forward_pre_hooks:
                refuse(f"{self._source.name} has forward hooks", why="they would not run in the kernel", instead="the module without hooks")
            return self.__getattr__("forward")(*args, **kwargs)
        if not isinstance(inspect.getattr_static(type(self._value), "__call__", None), types.FunctionType):
            self._rebuilder.guards.identical(self._source, self._value)  # written in C, such as operator.itemgetter(0)
            return self._value(*args, **kwargs)
        return self._special("__call__")(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Traced) or (isinstance(key, tuple) and any(isinstance(k, Traced) for k in key)):
            return self._special("__getitem__")(key)
        return self._item(key)

    def __len__(self) -> int:
        return self._length()

    def __iter__(self) -> Iterator[Any]:
        return iter([self._item(i) for i in range(self._length())])

    def __bool__(self) -> bool:
        truth = bool(self._value)
        self._rebuilder.guards.truth(self._source, truth)
        return truth


def _object_operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._special(f"__{name}__")(*args)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "and", "or", "xor", "invert", "neg", "contains"):
    setattr(ObjectProxy, f"__{_name}__", _object_operator(_name))


class ModuleProxy(ObjectProxy):
    """A module of the user's: its variables are captured values like any other."""


class ClassProxy(ObjectProxy):
    """A class of the user's: its variables are captured values; calling it makes a real object."""

    @property
    def __flexc_stands_for__(self) -> type:
        """The class itself, for isinstance."""
        return self._value

    def __getattr__(self, name: str) -> Any:
        if name == "apply" and issubclass(self._value, torch.autograd.Function):
            refuse(
                f"{self._value.__name__}.apply of a traced value",
                why="there is no such operation on one score; the derivative of what the function computes is derived from it",
                instead="its formula in torch operations",
            )
        return super().__getattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for base in self._value.__mro__:
            for name, member in vars(base).items():
                if isinstance(member, types.FunctionType) and not is_foreign(base.__module__) and _reads_outside(member):
                    refuse(
                        f"an object of class {self._value.__name__} made in the function",
                        why=f"its method {name} reads variables outside the class, which would be frozen into the kernel",
                        instead="an object made outside the function and captured, or a plain function",
                    )
        return self._value(*args, **kwargs)


def _reads_outside(function: types.FunctionType) -> bool:
    if function.__code__.co_filename == "<string>":
        return False  # generated, by dataclass or NamedTuple
    outside = [n for n in global_names(function.__code__) if n in function.__globals__]
    return bool(outside) or bool(set(function.__code__.co_freevars) - {"__class__"})
