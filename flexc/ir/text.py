"""Programs as text: one line of mathematics for a message, and a form with one node a line that prints and parses.

    tensors slopes: float32[1] grad
    scalars width: int32
    %0 = input head : int32
    %1 = gather slopes[%0] : float32  # alibi.py:4: return score - slopes[head] * (q_idx - kv_idx)
    %2 = const 0.5 : float32
    score = %1

A graph that is printed and parsed is the same graph: its nodes are the same objects. User lines are comments, and parsing drops them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from flexc.errors import InternalError
from flexc.ir.graph import (
    BOOL,
    DTYPES,
    FLOAT32,
    INPUTS,
    INT64,
    Graph,
    Node,
    ScalarInput,
    TensorInput,
    const,
    const_value,
    float_bits,
    make,
    topological,
)
from flexc.ir.ops import TABLE

_LONGEST = 240  # characters of a one-line expression; longer operands print as "..."

# How tightly an infix op binds; operands that bind less are put in parentheses.
_INFIX = {
    "lt": ("<", 4),
    "le": ("<=", 4),
    "gt": (">", 4),
    "ge": (">=", 4),
    "eq": ("==", 4),
    "ne": ("!=", 4),
    "or": ("|", 5),
    "xor": ("^", 6),
    "and": ("&", 7),
    "shl": ("<<", 8),
    "shr": (">>", 8),
    "add": ("+", 9),
    "sub": ("-", 9),
    "mul": ("*", 10),
    "truediv": ("/", 10),
    "floordiv": ("//", 10),
    "floormod": ("%", 10),
}
_LOGIC = {"or": ("or", 1), "and": ("and", 2)}  # of truth values
_PREFIX = {"not": ("not ", 3), "neg": ("-", 11), "invert": ("~", 11)}
_GROUPED = {"add", "mul", "and", "or", "xor"}  # a + (b + c) may print without parentheses
_TIGHTEST = 12


def format_float(value: float) -> str:
    """The shortest decimal that reads back as the same float32; "nan", "inf" and "-inf" by name."""
    if math.isnan(value):
        return "nan"
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if float_bits(float(text)) == float_bits(value):
            return repr(float(text))
    raise InternalError(f"{value!r} has no decimal of nine digits")


def format_node(node: Node, tensors: Sequence[str] = (), scalars: Sequence[str] = ()) -> str:
    """One line that reads like mathematics: "slopes[head] * (q_idx - kv_idx)".

    Casts that Python would do by itself are not shown, and very long operands print as "...".

    Args:
        tensors, scalars: names of the captured tensors and run-time numbers by slot; t0, t1, … and s0, s1, … where missing.
    """
    printed: dict[Node, tuple[str, int]] = {}

    def name(names: Sequence[str], slot: int, letter: str) -> str:
        return names[slot] if slot < len(names) else f"{letter}{slot}"

    def operand(argument: Node, tightness: int) -> str:
        text, own = printed[argument]
        return f"({text})" if own < tightness else text

    def line(node: Node) -> tuple[str, int]:
        if node.op == "const":
            value = const_value(node)
            text = format_float(value) if node.dtype == FLOAT32 else str(value)
            return text, 11 if text.startswith("-") else _TIGHTEST
        if node.op == "input":
            return node.attrs[0], _TIGHTEST
        if node.op == "scalar":
            return name(scalars, node.attrs[0], "s"), _TIGHTEST
        if node.op == "gather":
            return f"{name(tensors, node.attrs[0], 't')}[{', '.join(printed[a][0] for a in node.args)}]", _TIGHTEST
        if node.op == "cast":
            is_implicit = node.dtype in (FLOAT32, INT64) and node.args[0].dtype not in (FLOAT32, BOOL)
            return printed[node.args[0]] if is_implicit else (f"{node.dtype}({printed[node.args[0]][0]})", _TIGHTEST)
        infix = _LOGIC.get(node.op) if node.dtype == BOOL else None
        infix = infix or _INFIX.get(node.op)
        if infix is not None and len(node.args) == 2:
            symbol, tightness = infix
            right = tightness if node.op in _GROUPED else tightness + 1
            return f"{operand(node.args[0], tightness + (tightness == 4))} {symbol} {operand(node.args[1], right)}", tightness
        if node.op in _PREFIX and len(node.args) == 1:
            symbol, tightness = _PREFIX[node.op]
            return symbol + operand(node.args[0], tightness), tightness
        return f"{node.op}({', '.join(printed[a][0] for a in node.args)})", _TIGHTEST

    for each in topological([node]):
        text, tightness = line(each)
        printed[each] = (text, tightness) if each is node or len(text) <= _LONGEST else ("...", _TIGHTEST)
    return printed[node][0]


def format_graph(graph: Graph) -> str:
    """The text form of the module's docstring. Prints broken graphs too, because messages about them need it."""
    lines = []
    if graph.tensors:
        lines.append("tensors " + ", ".join(f"{t.name}: {t.dtype}[{t.rank}]{' grad' if t.needs_grad else ''}" for t in graph.tensors))
    if graph.scalars:
        lines.append("scalars " + ", ".join(f"{s.name}: {s.dtype}" for s in graph.scalars))
    numbers: dict[Node, int] = {}
    for node in graph.nodes():
        numbers[node] = len(numbers)
        operands = [f"%{numbers[a]}" for a in node.args]
        text = f"%{numbers[node]} = {_format_right_side(node, operands, graph)} : {node.dtype}"
        if node in graph.lines:
            text = f"{text:<40}  # {' '.join(str(graph.lines[node]).split())}"
        lines.append(text)
    lines.extend(f"{name} = %{numbers[node]}" for name, node in graph.outputs)
    return "\n".join(lines) + "\n"


def _format_right_side(node: Node, operands: list[str], graph: Graph) -> str:
    if node.op == "const":
        if node.dtype != FLOAT32 or not isinstance(node.attrs[0], str):
            return f"const {str(node.attrs[0]).lower()}"
        text = format_float(const_value(node))
        return f"const nan:{node.attrs[0]}" if text == "nan" and node.attrs[0] != float_bits(math.nan) else f"const {text}"
    if node.op == "input":
        return f"input {node.attrs[0]}"
    if node.op == "scalar":
        slot = node.attrs[0]
        return f"scalar {graph.scalars[slot].name if 0 <= slot < len(graph.scalars) else f'<slot {slot}>'}"
    if node.op == "gather":
        slot = node.attrs[0]
        name = graph.tensors[slot].name if 0 <= slot < len(graph.tensors) else f"<slot {slot}>"
        return f"gather {name}[{', '.join(operands)}]"
    return " ".join([node.op, *operands])


_NODE = re.compile(r"%(\d+) = (\w+) ?(.*?) : (\w+)")
_GATHER = re.compile(r"([^\[\]]+)\[(.*)\]")
_TENSOR = re.compile(r"(.+): (\w+)\[(\d+)\]( grad)?")


def parse_graph(text: str) -> Graph:
    """The graph that `format_graph` printed.

    Raises:
        ValueError: a line does not have the form of the module's docstring.
    """
    tensors: list[TensorInput] = []
    scalars: list[ScalarInput] = []
    nodes: dict[str, Node] = {}
    outputs: list[tuple[str, Node]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].strip()
        try:
            if not line:
                continue
            if line.startswith("tensors "):
                for item in line.removeprefix("tensors ").split(", "):
                    name, dtype, rank, grad = _matched(_TENSOR, item)
                    tensors.append(TensorInput(name, dtype, int(rank), grad is not None))
            elif line.startswith("scalars "):
                for item in line.removeprefix("scalars ").split(", "):
                    name, dtype = item.rsplit(": ", 1)
                    scalars.append(ScalarInput(name, dtype))
            elif line.startswith("%"):
                key, op, rest, dtype = _matched(_NODE, line)
                nodes[f"%{key}"] = _parse_node(op, rest, dtype, nodes, [t.name for t in tensors], [s.name for s in scalars])
            else:
                name, key = line.rsplit(" = ", 1)
                outputs.append((name, nodes[key]))
        except (ValueError, KeyError, IndexError) as error:
            raise ValueError(f"line {number} of the graph text cannot be read: {raw.strip()!r} ({error})") from error
    return Graph(tuple(outputs), tuple(tensors), tuple(scalars))


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} does not look like {pattern.pattern}")
    return match.groups()


def _parse_node(op: str, rest: str, dtype: str, nodes: dict[str, Node], tensors: list[str], scalars: list[str]) -> Node:
    if dtype not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}, got {dtype}")
    if op == "const":
        if dtype == FLOAT32:
            return make("const", (), (rest.removeprefix("nan:"),), dtype) if rest.startswith("nan:") else const(float(rest), dtype)
        return const(rest == "true" if dtype == BOOL else int(rest), dtype)
    if op == "input":
        if rest not in INPUTS:
            raise ValueError(f"unknown input {rest}")
        return make("input", (), (rest,), dtype)
    if op == "scalar":
        return make("scalar", (), (scalars.index(rest),), dtype)
    if op == "gather":
        name, indices = _matched(_GATHER, rest)
        return make("gather", tuple(nodes[i] for i in indices.split(", ") if i), (tensors.index(name),), dtype)
    if op != "cast" and op not in TABLE:
        raise ValueError(f"unknown op {op}")
    return make(op, tuple(nodes[i] for i in rest.split()), (), dtype)
