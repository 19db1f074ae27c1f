"""Dynamo's values for `flexc.dynamo`: real functions for symbolic ones, and the captured values that the paths of a trace lead to."""

from __future__ import annotations

import copy
import functools
import re
import types
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, GetItemSource
from torch._dynamo.variables.base import VariableTracker as Value
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import (
    FunctoolsPartialVariable,
    NestedUserFunctionVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic

from flexc import frontend
from flexc.frontend.guards import Source
from flexc.ir.graph import FLOAT32

Tensor = torch.Tensor

from_numpy = torch.from_numpy  # what paths may say besides Python's own


class NotCompiled(Exception):
    """Works in eager Python, not here: a graph break, or with fullgraph=True an error that says so."""


class Functions:
    """Real Python values for symbolic ones, to be traced: only their structure counts, no tensor in them is computed with."""

    def __init__(self, tx: Any):
        self.tx = tx
        self._made: dict[int, Any] = {}

    def real(self, value: Value) -> Any:
        """A value that traces as this one will."""
        value = value.realize()
        if id(value) not in self._made:
            self._made[id(value)] = self._real(value)
        return self._made[id(value)]

    def _real(self, value: Any) -> Any:
        if isinstance(value, TensorVariable):
            return self._stand_in(value.as_proxy().node.meta["example_value"])
        if isinstance(value, SymNodeVariable):
            number = value.as_proxy().node.meta["example_value"]
            hint = number.node.hint
            return int(hint) if isinstance(number, torch.SymInt) else float(hint)
        if isinstance(value, NestedUserFunctionVariable):
            return self._function(value)
        if isinstance(value, UserMethodVariable):
            return types.MethodType(value.fn, self.real(value.obj))
        if isinstance(value, UserFunctionVariable):
            return value.fn
        if isinstance(value, FunctoolsPartialVariable):
            args = [self.real(x) for x in value.args]
            return functools.partial(self.real(value.func), *args, **{name: self.real(x) for name, x in value.keywords.items()})
        if isinstance(value, BaseListVariable):
            return value.python_type()(self.real(x) for x in value.items)
        if isinstance(value, ConstDictVariable) and value.source is None:
            return {self.real(key.vt): self.real(x) for key, x in value.items.items()}
        if isinstance(value, UserDefinedObjectVariable):
            return self._object(value)
        held = getattr(value, "value", None)
        return value.as_python_constant() if held is None else held

    def _stand_in(self, example: Tensor) -> Tensor:
        """A tensor like the example, without data and with numbers for sizes."""
        sizes = [size if isinstance(size, int) else size.node.hint for size in example.shape]
        made = torch.empty_strided(sizes, [0] * len(sizes), dtype=example.dtype, device="meta")
        return _Placed(made, example.device, example.requires_grad)

    def _function(self, value: Any) -> types.FunctionType:
        code = value.code.as_python_constant()
        cells = tuple(types.CellType() for _ in code.co_freevars)
        made = types.FunctionType(code, value.f_globals, value.fn_name.as_python_constant(), None, cells)
        self._made[id(value)] = made  # a function may capture itself
        made.__defaults__ = self.real(value.defaults) if value.defaults else None
        made.__kwdefaults__ = self.real(value.kwdefaults) if value.kwdefaults else None
        for cell, symbolic in zip(cells, value.closure.items if value.closure else ()):
            content = self.tx.output.side_effects.load_cell(symbolic).realize()
            if type(content).__name__ != "DeletedVariable":
                cell.cell_contents = self.real(content)
        return made

    def _object(self, value: Any) -> Any:
        """An object with the attributes that the region gave it."""
        changes = self.tx.output.side_effects.store_attr_mutations.get(value)
        if value.source is not None and not changes:
            return value.value
        kind: Any = value.python_type()
        made = copy.copy(value.value) if value.source is not None else kind.__new__(kind)
        self._made[id(value)] = made
        for name, content in (changes or {}).items():
            object.__setattr__(made, name, self.real(content))
        return made


class _Placed(Tensor):
    """A tensor without data that says it is elsewhere."""

    _where: torch.device

    @staticmethod
    def __new__(cls, base: Tensor, where: torch.device, requires_grad: bool) -> _Placed:
        made = torch.Tensor._make_subclass(cls, base, requires_grad)
        made._where = where
        return made

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._where


class _Globals:
    """The globals of a function, of which Dynamo reads one by one."""

    def __init__(self, names: dict[str, Any]):
        self.names = names


_CELL = re.compile(r"\{0\}\.__closure__\[(\d+)\]\.cell_contents")
_DEFAULT = re.compile(r"\{0\}\.__defaults__\[(\d+)\]")


def run(tx: Any, text: str, v: Any = None, k: Any = None, names: dict[str, Any] | None = None) -> Value:
    """Python text, run by Dynamo on a value `v` and a key `k`."""
    code = compile(f"lambda v, k: {text}", __file__, "eval").co_consts[0]
    function = types.FunctionType(code, globals() if names is None else names)
    arguments = [x if isinstance(x, Value) else Value.build(tx, x) for x in (v, k)]
    return Value.build(tx, function).call_function(tx, arguments, {})


class Reader:
    """The values at the paths of a trace, as Dynamo knows them."""

    def __init__(self, tx: Any, trace: frontend.Trace, roots: dict[str, Value]):
        self.tx = tx
        self.trace = trace
        self._roots = roots
        self._numbers = frozenset(trace.paths.numbers) if trace.paths is not None else frozenset()
        self._unread: dict[Source, Any] = {}
        self._known: dict[Source, Any] = {}

    def value(self, source: Source) -> Any:
        """The value at a path, with Dynamo's guards on it."""
        if source not in self._known:
            found = self._at(source)
            if source in self._numbers:
                found = self._symbolic(found)
            self._known[source] = found if isinstance(found, _Globals) else found.realize()
        return self._known[source]

    def has_symbolic_constants(self) -> bool:
        """Whether a number that the trace compiles in is symbolic for Dynamo."""
        found = [self._at(source) for source in self.trace.paths.guards.numbers]  # type: ignore[union-attr]
        return any(isinstance(value.realize(), SymNodeVariable) for value in found)

    def _symbolic(self, value: Value) -> Value:
        """A run-time integer as a symbol, also where Dynamo's own rule makes integers constants: globals, attributes of modules."""
        if isinstance(value, LazyVariableTracker) and not value.is_realized() and type(value.peek_value()) is int:
            source: Any = value.source
            return VariableBuilder(self.tx, source).wrap_symint(value.peek_value(), DimDynamic.DYNAMIC)
        return value

    def _at(self, source: Source) -> Any:
        """The value at a path, which Dynamo need not have looked at."""
        if source not in self._unread:
            self._unread[source] = self._read(source)
        return self._unread[source]

    def _read(self, source: Source) -> Any:
        if source.parent is None:
            return self._roots[source.read]
        parent = self.value(source.parent)
        if isinstance(parent, _Globals):
            return self.run(source.key, parent.names)
        if isinstance(parent, NestedUserFunctionVariable):
            found = self._part(parent, source)
            if found is not None:
                return found
        elif source.read == "{0}.__globals__":
            return _Globals(parent.fn.__globals__)
        elif _CELL.fullmatch(source.read) and isinstance(parent, UserFunctionVariable) and parent.source is not None:
            return self._cell(parent, int(_CELL.fullmatch(source.read)[1]))  # type: ignore[index]
        return self.run(source.read.format("v", "k"), None, parent, source.key)

    def _cell(self, function: Any, index: int) -> Value:
        """The content of a closure cell, as Dynamo reads it where it inlines the function."""
        cell, effects = function.fn.__closure__[index], self.tx.output.side_effects
        if cell in effects:
            return effects.load_cell(effects[cell])
        path = AttrSource(GetItemSource(AttrSource(function.source, "__closure__"), index), "cell_contents")
        return Value.build(self.tx, cell.cell_contents, path)

    def _part(self, function: Any, source: Source) -> Any:
        """What Dynamo does not let Python code read of a function that the region makes."""
        cell, default = _CELL.fullmatch(source.read), _DEFAULT.fullmatch(source.read)
        if cell:
            return self.tx.output.side_effects.load_cell(function.closure.items[int(cell[1])])
        if source.read == "{0}.__globals__":
            return _Globals(function.f_globals)
        if source.read == "{0}.__defaults__":
            return function.defaults or ConstantVariable.create(None)
        if default:
            return function.defaults.realize().items[int(default[1])]
        if source.read == "{0}.__kwdefaults__":
            return function.kwdefaults or ConstantVariable.create(None)
        return None

    def run(self, text: str, names: dict[str, Any] | None, v: Any = None, k: Any = None) -> Value:
        """Python text, run by Dynamo on a value `v` and a key `k`."""
        return run(self.tx, text, v, k, names)

    # --- guards -------------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Have Dynamo guard all that the trace depends on."""
        paths = self.trace.paths
        assert paths is not None
        for check in paths.guards.checks:
            self._check(check, self.value(check.source))
        for text in paths.guards.predicates:
            numbers = {f"s{slot}": source for slot, source in enumerate(paths.numbers) if re.search(rf"\bs{slot}\b", text)}
            self._holds(self._over(text, [self.value(s) for s in numbers.values()], list(numbers)), text)

    def _over(self, text: str, values: list[Value], names: list[str]) -> Value:
        code = compile(f"lambda {', '.join(names)}: bool({text})", __file__, "eval").co_consts[0]
        return Value.build(self.tx, types.FunctionType(code, globals())).call_function(self.tx, values, {})

    def _holds(self, outcome: Value, what: str) -> None:
        outcome = outcome.realize()
        truth = outcome.evaluate_expr(self.tx.output) if isinstance(outcome, SymNodeVariable) else outcome.as_python_constant()
        if not truth:
            raise NotCompiled(f"a captured number changes inside the compiled region ({what}): expected it to be set outside")

    def _check(self, check: Any, value: Any) -> None:
        source = check.source
        if isinstance(value, _Globals):
            return  # of each global that is read there is a path of its own
        if "tobytes" in check.text:
            raise NotCompiled(
                f"the captured NumPy array {source.name}, whose contents torch.compile does not watch: expected a torch tensor, or a list"
            )
        if check.about_number:
            constant = source in self.trace.paths.guards.numbers  # type: ignore[union-attr]
            expected: Any = self.trace.paths.guards.numbers.get(source)  # type: ignore[union-attr]
            if isinstance(value, SymNodeVariable):
                if constant:
                    found = value.evaluate_expr(self.tx.output)
                else:
                    condition = check.text.format(v="v", c="None", w="None")
                    self._holds(self.run(f"not ({condition})", None, value), source.name)
                    return
            else:
                found = value.as_python_constant()
            if constant and repr(type(expected)(found)) != repr(expected):
                raise NotCompiled(
                    f"the captured number {source.name} changes inside the compiled region: expected it to be set outside, or flexc.runtime"
                )
        elif check.text == "{v} is not {c}":
            self._same_object(source, value, check.constant)
        elif check.text.startswith(("len(", "tuple(", "bool(")):
            self.run(check.text.split(" ")[0].format(v="v"), None, value)

    def _same_object(self, source: Source, value: Value, expected: Any) -> None:
        if expected is None or isinstance(expected, bool):
            if value.as_python_constant() is not expected:
                raise NotCompiled(f"{source.name} changes inside the compiled region: expected it to be set outside")
        elif value.source is not None:
            install_guard(value.source.make_guard(GuardBuilder.ID_MATCH))

    # --- inputs -------------------------------------------------------------------------------------------------------------------------

    def tensor(self, slot: int) -> Value:
        """A captured tensor of the graph."""
        paths, spec = self.trace.paths, self.trace.graph.tensors[slot]
        assert paths is not None
        value = self.value(paths.tensors[slot])
        example = value.as_proxy().node.meta["example_value"] if isinstance(value, TensorVariable) else None
        if example is None or (str(example.dtype).removeprefix("torch."), example.ndim) != (spec.dtype, spec.rank):
            raise NotCompiled(f"the captured tensor {spec.name} changes inside the compiled region: expected it to be set outside")
        return value

    def scalars(self) -> tuple[list[Value], list[Value]]:
        """The run-time numbers of the graph: integers and floats."""
        paths, graph = self.trace.paths, self.trace.graph
        assert paths is not None
        pairs = [(self.value(source), spec) for source, spec in zip(paths.scalars, graph.scalars, strict=True)]
        return [v for v, s in pairs if s.dtype != FLOAT32], [v for v, s in pairs if s.dtype == FLOAT32]
