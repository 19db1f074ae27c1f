"""Nodes, inputs and graphs: what a traced program is.

Nodes are frozen and interned: two nodes with the same op, operands, attributes and dtype are the same object, so equality is
identity and common subexpressions need no pass. The user's line is not part of a node's identity: a node holds the last line that made
it, whichever function that was in, and a graph remembers the lines that its nodes had when it was made (`Graph.lines`).
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexc.errors import InternalError

BOOL, INT32, INT64, FLOAT32 = "bool", "int32", "int64", "float32"
DTYPES = (BOOL, INT32, INT64, FLOAT32)  # in order of promotion

POSITIONS = ("batch", "head", "q_idx", "kv_idx")  # int32, counted in tokens
INPUTS = ("score", *POSITIONS)
LOWERED_INPUTS = ("raw", "scale")  # what "score" becomes close to the hardware: q·k, and the uniform positive factor on it

LEAVES = ("const", "input", "scalar")


def promote(*dtypes: str) -> str:
    """The widest of the dtypes, in the order bool, int32, int64, float32."""
    return max(dtypes, key=DTYPES.index)


def loaded_dtype(torch_dtype: str) -> str:
    """IR dtype of an element loaded from a tensor of the torch dtype named `torch_dtype` ("bfloat16", "int64", …)."""
    if torch_dtype == "bool":
        return BOOL
    if torch_dtype == "int64":
        return INT64
    if torch_dtype in ("int8", "uint8", "int16", "int32"):
        return INT32
    if torch_dtype in ("float16", "bfloat16", "float32", "float64"):
        return FLOAT32
    raise TypeError(f"a captured tensor of dtype {torch_dtype} cannot be read: expected bool, an integer or a floating dtype")


@dataclass(frozen=True)
class Location:
    """A line of the user's source."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        return f"{name}:{self.line}: {self.text}" if self.text else f"{name}:{self.line}"


class Node:
    """One value of a program. Made by `make`, `const`, `input_node`, `scalar` or an op of `ir.ops`; never directly.

    Attributes:
        op: name of a row of the op table, or one of LEAVES.
        args: operands.
        attrs: what is baked in, hashable: ("value", bits) of a const, the name of an input, the slot of a scalar or tensor, …
        dtype: one of DTYPES.
        where: the user's line that made the node last, or None. Two functions may share a node: ask `Graph.lines` for the line in one.
    """

    __slots__ = ("__weakref__", "args", "attrs", "dtype", "op", "where")
    op: str
    args: tuple[Node, ...]
    attrs: tuple
    dtype: str
    where: Location | None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("nodes are frozen")

    def __repr__(self) -> str:
        from flexc.ir.text import format_node

        return format_node(self)

    # Arithmetic on nodes is for passes and derivatives; users meet `frontend.symbol.Symbol`.
    def __add__(self, other: Any) -> Node:
        return _call("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return _call("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return _call("sub", self, other)

    def __rsub__(self, other: Any) -> Node:
        return _call("sub", other, self)

    def __mul__(self, other: Any) -> Node:
        return _call("mul", self, other)

    def __rmul__(self, other: Any) -> Node:
        return _call("mul", other, self)

    def __truediv__(self, other: Any) -> Node:
        return _call("truediv", self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return _call("truediv", other, self)

    def __neg__(self) -> Node:
        return _call("neg", self)

    def __and__(self, other: Any) -> Node:
        return _call("and", self, other)

    def __or__(self, other: Any) -> Node:
        return _call("or", self, other)

    def __invert__(self) -> Node:
        return _call("not", self)


def _call(op: str, *operands: Any) -> Node:
    from flexc.ir import ops

    return ops.apply(op, *operands)


_interned: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def make(op: str, args: tuple[Node, ...] = (), attrs: tuple = (), dtype: str = FLOAT32, where: Location | None = None) -> Node:
    """The one node with these parts. Does not check them: `ops.apply` does, and `verify` after every pass."""
    key = (op, tuple(map(id, args)), attrs, dtype)
    with _lock:
        node = _interned.get(key)
        if node is None:
            node = object.__new__(Node)
            for name, value in zip(("op", "args", "attrs", "dtype", "where"), (op, args, attrs, dtype, where), strict=True):
                object.__setattr__(node, name, value)
            _interned[key] = node
        elif where is not None:
            object.__setattr__(node, "where", where)
        return node


def const(value: bool | int | float, dtype: str | None = None, where: Location | None = None) -> Node:
    """A constant. Floats are rounded to float32 and told apart by their bits, so -0.0 is not 0.0 and NaN equals itself."""
    if dtype is None:
        if isinstance(value, bool):
            dtype = BOOL
        elif isinstance(value, int):
            dtype = INT32 if -(2**31) <= value < 2**31 else INT64
        else:
            dtype = FLOAT32
    if dtype == FLOAT32:
        return make("const", (), (float_bits(float(value)),), dtype, where)
    return make("const", (), (bool(value) if dtype == BOOL else int(value),), dtype, where)


def float_bits(value: float) -> str:
    """The float32 nearest to `value` as eight hexadecimal digits. Values past float32's range become infinite, as in PyTorch."""
    try:
        return struct.pack(">f", value).hex()
    except OverflowError:
        return struct.pack(">f", float("inf") if value > 0 else float("-inf")).hex()


def const_value(node: Node) -> bool | int | float:
    """The Python value of a constant node."""
    if node.op != "const":
        raise InternalError(f"const_value of a {node.op} node")
    if node.dtype == FLOAT32:
        return struct.unpack(">f", bytes.fromhex(node.attrs[0]))[0]
    return node.attrs[0]


def is_const(node: Node, value: bool | int | float | None = None) -> bool:
    """Whether the node is a constant (equal to `value`, if given; 0.0 equals -0.0, NaN equals nothing)."""
    return node.op == "const" and (value is None or const_value(node) == value)


def input_node(name: str) -> Node:
    """`score`, one of POSITIONS (int32) or of LOWERED_INPUTS; float32 unless it is a position."""
    if name not in INPUTS + LOWERED_INPUTS:
        raise InternalError(f"unknown input {name!r}")
    return make("input", (), (name,), INT32 if name in POSITIONS else FLOAT32)


def scalar(slot: int, dtype: str) -> Node:
    """A number given at run time: slot of `Graph.scalars`."""
    return make("scalar", (), (slot,), dtype)


@dataclass(frozen=True)
class TensorInput:
    """A captured tensor. Its sizes and strides are run-time values; dtype and rank are not.

    Attributes:
        name: what the user calls it; letters, digits and underscores, unique in the graph.
        dtype: torch dtype without the prefix, for example "bfloat16".
        rank: number of dimensions.
        needs_grad: whether its gradient was asked for.
    """

    name: str
    dtype: str
    rank: int
    needs_grad: bool = False


@dataclass(frozen=True)
class ScalarInput:
    """A number that changes between calls: int32, int64 or float32."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Graph:
    """A program over one score and its position.

    Attributes:
        outputs: (name, node) pairs. After tracing: "score" (float32) and/or "mask" (bool); passes may add more.
        tensors: captured tensors; a gather's first attribute is a slot of this tuple.
        scalars: run-time numbers.
        lines: the user's line of each node that has one. Not part of what makes graphs equal.

    Argument names of the user's functions are not kept; positions print as batch, head, q_idx, kv_idx.
    """

    outputs: tuple[tuple[str, Node], ...]
    tensors: tuple[TensorInput, ...] = ()
    scalars: tuple[ScalarInput, ...] = ()
    lines: Mapping[Node, Location] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A pass gives its nodes the lines of those they replace. What they carry of other functions, which share them, is not theirs.
        own = set(self.lines.values())
        lines = {node: self.lines.get(node, node.where) for node in self.nodes()}
        lines = {node: line for node, line in lines.items() if line is not None and (not own or line in own)}
        object.__setattr__(self, "lines", lines)

    def get(self, name: str) -> Node | None:
        """The output called `name`, or None."""
        for key, node in self.outputs:
            if key == name:
                return node
        return None

    @property
    def score(self) -> Node | None:
        """The modified score (float32), or None for the plain score."""
        return self.get("score")

    @property
    def mask(self) -> Node | None:
        """True where attention is allowed (bool), or None where everything is."""
        return self.get("mask")

    def with_outputs(self, **outputs: Node | None) -> Graph:
        """This graph with outputs replaced, added, or (None) removed. The same object if nothing changed."""
        merged: dict[str, Node | None] = dict(self.outputs)
        merged.update(outputs)
        pairs = tuple((name, node) for name, node in merged.items() if node is not None)
        return self if pairs == self.outputs else Graph(pairs, self.tensors, self.scalars, self.lines)

    def nodes(self) -> list[Node]:
        """Every node that an output needs, operands first."""
        return topological(node for _, node in self.outputs)

    def __str__(self) -> str:
        from flexc.ir.text import format_graph

        return format_graph(self)


def topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes below the roots, each once, operands before their users, in a stable order."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack.append((root, iter(root.args)))
        while stack:
            node, operands = stack[-1]
            for operand in operands:
                if operand not in seen:
                    seen.add(operand)
                    stack.append((operand, iter(operand.args)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


def inputs_of(node: Node) -> frozenset[str]:
    """Which of score, batch, head, q_idx, kv_idx the node reads, exactly as far as syntax tells."""
    return frozenset(n.attrs[0] for n in topological([node]) if n.op == "input")


@dataclass
class Rewriter:
    """Rebuilds nodes bottom-up: `rule` gets a node whose operands are already rewritten and returns it or its replacement."""

    rule: Callable[[Node], Node]
    done: dict[Node, Node] = field(default_factory=dict)

    def __call__(self, root: Node) -> Node:
        for node in topological([root]):
            if node not in self.done:
                args = tuple(self.done[a] for a in node.args)
                rebuilt = node if args == node.args else make(node.op, args, node.attrs, node.dtype, node.where)
                self.done[node] = self.rule(rebuilt)
        return self.done[root]


def rewrite_graph(graph: Graph, rule: Callable[[Node], Node]) -> Graph:
    """`rule` applied bottom-up to every output. The same graph object if nothing changed."""
    rewriter = Rewriter(rule)
    return graph.with_outputs(**{name: rewriter(node) for name, node in graph.outputs})


def substitute(root: Node, replacements: dict[Node, Node]) -> Node:
    """`root` with every node that is a key replaced by its value."""
    return Rewriter(lambda node: replacements.get(node, node), dict(replacements))(root)
