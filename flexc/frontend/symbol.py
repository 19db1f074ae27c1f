"""Symbols: what the user's function gets in place of numbers. Every operation on one adds a node to the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from flexc.frontend.predicate import as_python, evaluate
from flexc.frontend.session import current, is_scalar_only, refuse
from flexc.ir import ops
from flexc.ir.graph import BOOL, FLOAT32, INT32, Location, Node, const, make, topological
from flexc.ir.ops import TORCH_DTYPES


class Traced:
    """Base of everything that stands for a value unknown while tracing."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        from flexc.frontend.functions import call_torch

        return call_torch(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        from flexc.frontend.functions import call_ufunc

        return call_ufunc(ufunc, method, args, kwargs)

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        from flexc.frontend.functions import call_torch

        return call_torch(func, args, kwargs)


class Array(Traced):
    """Base of traced values with more than one element."""

    __slots__ = ()


class Symbol(Traced):
    """One number or truth value of the graph."""

    __slots__ = ("_node", "_session")

    def __init__(self, node: Node):
        self._node = node
        self._session = current()

    @property
    def node(self) -> Node:
        """The node; refused outside the tracing that made it."""
        if self._session is not current():
            refuse(
                f"a traced value from another call: {self._node!r}",
                why="it was kept (in a global, a list, an attribute) when the function that made it had returned",
                instead="compute it again in this function",
            )
        return self._node

    def __repr__(self) -> str:
        return f"<{self._describe()}: {self._node.dtype}>"

    def __str__(self) -> str:
        return self._describe()

    def __format__(self, spec: str) -> str:
        return self._describe()

    def _describe(self) -> str:
        return describe(self._node, self._session)

    # --- Python asks for a value ----------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        node = to_bool(self.node)
        session = current()
        assert session is not None
        if not is_scalar_only(node):
            return session.path.decide(node, session.location())
        text = as_python(node)
        value = None if text is None else evaluate(text, session.scalar_values)
        if text is None or value is None:
            session.pin(node)
            refuse(f"`if` on {self}", why="its value cannot be computed while tracing", instead="flexc.where(condition, a, b)")
        outcome = bool(value)
        if any(n.op == "scalar" for n in topological([node])):
            session.guards.predicate(text if outcome else f"not {text}")
        return outcome

    def _known(self) -> bool | int | float | None:
        """The value, if it depends on nothing at all."""
        node = self.node
        if any(n.op == "scalar" for n in topological([node])) or not is_scalar_only(node):
            return None
        text = as_python(node)
        return None if text is None else evaluate(text, [])

    def _need(self, what: str, why: str, instead: str) -> NoReturn:
        """Python needs the number: trace again with it as a constant if it is a captured one, else refuse."""
        session = current()
        assert session is not None
        session.pin(*([self.node] if is_scalar_only(self.node) else []))
        refuse(what, why=why, instead=instead)

    def __index__(self) -> int:
        value = self._known()
        if isinstance(value, int):
            return operator.index(value)
        self._need(
            f"Python asks for the value of {self}",
            "it differs between the scores of one call, so there is no single number while tracing",
            "a captured torch tensor indexed by it (a list made inside the function cannot be), or flexc.where",
        )

    def __int__(self) -> int:
        value = self._known()
        if value is not None:
            return int(value)
        self._need(f"int() of {self}", "it is unknown while tracing", "the method .int(), or torch.floor(x).int()")

    def __float__(self) -> float:
        value = self._known()
        if value is not None:
            return float(value)
        self._need(f"float() of {self}", "it is unknown while tracing", "the method .float(), or torch functions in place of math's")

    def __complex__(self) -> complex:
        refuse(f"complex() of {self}", why="scores are real numbers", instead="its real and imaginary part apart")

    def __hash__(self) -> int:
        value = self._known()
        if value is not None:
            return hash(value)
        self._need(
            f"{self} as a dict key or in a set",
            "looking it up needs its value, which is unknown while tracing",
            "a list or a captured tensor indexed by it, or comparisons joined by |",
        )

    def __iter__(self) -> Any:
        refuse(f"a loop over {self}", why="a traced value is one number", instead="a captured tensor, which can be looped over")

    def __getitem__(self, key: Any) -> Any:
        if key is Ellipsis or key == ():
            return self
        refuse(f"an index into {self}", why="a traced value is one number", instead="the number itself")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        refuse(f"a NumPy array of {self}", why="its value is unknown while tracing", instead="torch functions and operators")

    def __deepcopy__(self, memo: Any) -> Symbol:
        return self

    # --- numbers ----------------------------------------------------------------------------------------------------------------------

    def __invert__(self) -> Any:
        return call("not" if self.node.dtype == BOOL else "invert", self)

    def __neg__(self) -> Any:
        return call("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return call("abs", self)

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None:
            return cast(call("round", self), INT32)
        if self.node.dtype != FLOAT32:
            return self
        return call("truediv", call("round", call("mul", self, 10.0**digits)), 10.0**digits)

    def __floor__(self) -> Any:
        return cast(call("floor", self), INT32)

    def __ceil__(self) -> Any:
        return cast(call("ceil", self), INT32)

    def __trunc__(self) -> Any:
        return cast(call("trunc", self), INT32)

    def __divmod__(self, other: Any) -> Any:
        return call("floordiv", self, other), call("floormod", self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return call("floordiv", other, self), call("floormod", other, self)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        return NotImplemented if isinstance(other, Array) else _power()(self, other)

    def __rpow__(self, other: Any) -> Any:
        return _power()(other, self)

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Array):
            return NotImplemented
        refuse(f"{self} @ {other}", why="a traced value is one number", instead="*")

    __rmatmul__ = __matmul__

    # --- what a 0-d tensor has ---------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that the value has in the kernel."""
        return TORCH_DTYPES[self._node.dtype]

    @property
    def device(self) -> torch.device:
        """Where small constants made beside it may live: anywhere, they become part of the kernel."""
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """Of a 0-d tensor."""
        return torch.Size()

    @property
    def ndim(self) -> int:
        """Of a 0-d tensor."""
        return 0

    @property
    def real(self) -> Symbol:
        """The number itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from flexc.frontend.functions import method

        return method(self, name)


def describe(node: Node, session: Any) -> str:
    """The node as one line of mathematics with the user's names."""
    from flexc.ir.text import format_node

    if session is None:
        return format_node(node)
    return format_node(node, [slot.input.name for slot in session.tensors], [s[1].name for s in session.scalars])


# --- from operands to nodes -------------------------------------------------------------------------------------------------------------


def is_plain_number(value: Any) -> bool:
    """Whether the value is a number or truth value of Python or NumPy."""
    return isinstance(value, bool | int | float | np.generic)


def node_of(value: Any, where: Location | None = None) -> Node:
    """The node for a symbol, a number, or a 0-d tensor that the function itself made."""
    if isinstance(value, Symbol):
        return value.node
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        value = float(value)
    if isinstance(value, bool | int | float):
        return const(value, where=where)
    if isinstance(value, torch.Tensor):
        refuse_foreign(value)
        if value.numel() == 1:
            return node_of(value.item(), where)
    if isinstance(value, complex):
        refuse(f"the complex number {value}", why="scores are real numbers", instead="its real and imaginary part apart")
    refuse(
        f"{type(value).__name__} {value!r} as an operand of a traced value",
        why="only numbers, truth values, captured tensors and traced values can be computed with",
        instead="a number or an element of a tensor",
    )


def refuse_foreign(tensor: torch.Tensor) -> None:
    """Refuse a tensor that is neither captured along a path we can read again nor made by the function itself."""
    session = current()
    if session is not None and session.made.get(id(tensor)) is not tensor:
        refuse(
            f"a tensor of shape {tuple(tensor.shape)} that flexc did not see captured",
            why="it is hidden in something that cannot be read again at the next call, so it would be frozen into the kernel",
            instead="a tensor from a closure, a global, a default argument, or an attribute of a captured object",
        )


def to_bool(node: Node, where: Location | None = None) -> Node:
    """Whether the node differs from zero."""
    if node.dtype == BOOL or node.op == "const":
        return ops.cast(node, BOOL)
    return ops.apply("ne", node, 0, where=where)


def cast(value: Any, dtype: str) -> Symbol:
    """The symbol in another IR dtype; floats are truncated toward zero."""
    session = current()
    node = node_of(value)
    if dtype == BOOL:
        return Symbol(to_bool(node, session.location() if session else None))
    return Symbol(_located_cast(node, dtype, session.location() if session else None))


def _located_cast(node: Node, dtype: str, where: Location | None) -> Node:
    if node.dtype == dtype:
        return node
    # `ops.cast` gives a cast its operand's line.
    return ops.cast(node, dtype) if node.op == "const" else make("cast", (node,), (), dtype, where)


# On truth values PyTorch's + and * are `or` and `and`; `minimum` and `maximum` likewise.
_ON_TRUTH = {"add": "or", "mul": "and", "minimum": "and", "maximum": "or"}
_WHOLE_ALREADY = {"floor", "ceil", "round", "trunc"}


def call(op: str, *operands: Any) -> Symbol:
    """The symbol for an op of the table on symbols and numbers, with the user's line."""
    session = current()
    where = session.location() if session is not None else None
    nodes = [node_of(o, where) for o in operands]
    dtypes = {n.dtype for n in nodes}
    if dtypes == {BOOL} and op in _ON_TRUTH:
        op = _ON_TRUTH[op]
    if op in _WHOLE_ALREADY and FLOAT32 not in dtypes:
        return Symbol(nodes[0])
    try:
        wanted = ops.operand_dtypes(op, tuple(n.dtype for n in nodes))
        ops.TABLE[op].dtype(*(n.dtype for n in nodes))
        nodes = [_located_cast(n, d, where) for n, d in zip(nodes, wanted, strict=True)]
        return Symbol(ops.apply(op, *nodes, where=where))
    except TypeError as error:
        listed = ", ".join(f"{describe(n, session)} ({n.dtype})" for n in nodes)
        refuse(f"`{op}` of {listed}", why=str(error), instead=_REPAIR.get(op, "a cast such as .float(), .int() or .bool()"), where=where)


_REPAIR = {
    "sub": "a & ~b, or a ^ b, for truth values; .int() to count them",
    "neg": "~a for a truth value",
    "and": ".int() or .bool() before &; `and` for truth values",
    "or": ".int() or .bool() before |; `or` for truth values",
    "xor": ".int() or .bool() before ^",
    "where": "a comparison, or .bool(), as the condition",
}


def _power() -> Callable[..., Any]:
    from flexc.frontend.powers import power

    return power


_REPEATED = (str, bytes, list, tuple)  # `[0] * n` is theirs to answer, with __index__


def _operator(op: str) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if isinstance(other, Symbol) or is_plain_number(other):
            return call(op, self, other)
        if isinstance(other, _REPEATED):
            return NotImplemented
        from flexc.frontend.vector import broadcast, is_array

        if isinstance(other, Array):
            return NotImplemented
        return broadcast(lambda a, b: call(op, a, b), (self, other), {}) if is_array(other) else call(op, self, other)

    return operate


def _reflected(op: str) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        if isinstance(other, Symbol) or is_plain_number(other):
            return call(op, other, self)
        if isinstance(other, _REPEATED):
            return NotImplemented
        from flexc.frontend.vector import broadcast

        return broadcast(lambda a, b: call(op, a, b), (other, self), {})

    return operate


OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "truediv",
    "floordiv": "floordiv",
    "mod": "floormod",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "lshift": "shl",
    "rshift": "shr",
}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

for _name, _op in OPERATORS.items():
    setattr(Symbol, f"__{_name}__", _operator(_op))
    setattr(Symbol, f"__r{_name}__", _reflected(_op))


def _comparison(op: str) -> Callable[[Any, Any], Any]:
    compare = _operator(op)

    def operate(self: Any, other: Any) -> Any:
        if other is None or isinstance(other, str):
            return op == "ne" if op in ("eq", "ne") else NotImplemented
        return compare(self, other)

    return operate


for _op in COMPARISONS:
    setattr(Symbol, f"__{_op}__", _comparison(_op))
