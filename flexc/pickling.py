"""Masks and score functions that pickle: by name where they have one, else by how they were made, else by the graph that they trace to.

A graph is pickled as text (`ir.text`) with its captured tensors and numbers, and comes back as a plain Python function that traces to
it. It holds what the function captured when it was pickled; a variable bound to another value since then is not seen.
"""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from flexc.ir.graph import BOOL, FLOAT32, Graph, Node, const_value
from flexc.ir.ops import TABLE
from flexc.ir.text import parse_graph

P = ParamSpec("P")
Made = TypeVar("Made")
Recipe = tuple[Callable[..., Any], tuple, dict[str, Any]]  # what makes an object, and its arguments

MASK_ARGUMENTS = ("batch", "head", "q_idx", "kv_idx")


def made_again(factory: Callable[P, Made]) -> Callable[P, Made]:
    """A factory whose products pickle as the factory and its arguments: they take the attribute `recipe`."""

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Made:
        made: Any = factory(*args, **kwargs)
        made.recipe = (make, args, kwargs)
        return made

    make.makes_functions = True  # pyright: ignore[reportAttributeAccessIssue]  (for who passes it in place of what it makes)
    return make


def follow(recipe: Recipe) -> Any:
    """The object that a recipe makes."""
    maker, args, kwargs = recipe
    return maker(*args, **kwargs)


def held_at(module: str, qualified_name: str) -> Any:
    """What a module holds under a name such as "window" or "Model.window"; None if nothing."""
    found: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    return found


def has_a_name(function: Any) -> bool:
    """Whether pickle finds the function, or the class of a callable object, where it was defined."""
    if isinstance(function, functools.partial):
        return has_a_name(function.func) and all(not callable(a) or has_a_name(a) for a in (*function.args, *function.keywords.values()))
    if isinstance(function, types.MethodType):
        return has_a_name(function.__self__)
    if not isinstance(function, types.FunctionType | types.BuiltinFunctionType | type):
        return has_a_name(type(function))
    return held_at(function.__module__, function.__qualname__) is function


def graph_of_mask(function: Callable[..., Any]) -> tuple[str, tuple[torch.Tensor, ...], tuple[int | float, ...]]:
    """A mask function as text of its graph, captured tensors and captured numbers."""
    from flexc import frontend

    trace, binding = frontend.trace(None, function)
    return str(trace.graph), binding.tensors, binding.scalars


def mask_of_graph(text: str, tensors: Sequence[torch.Tensor], scalars: Sequence[int | float]) -> Callable[..., Any]:
    """The inverse of `graph_of_mask`: a plain function (batch, head, q_idx, kv_idx)."""
    return _maker(text)(*tensors, *scalars)


@functools.lru_cache(maxsize=256)
def _maker(text: str) -> Callable[..., Callable[..., Any]]:
    """Equal graphs share their code, so that their functions share traces."""
    scope: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(compile(python_source(parse_graph(text)), "<flexc graph>", "exec"), scope)
    return scope["make"]


def python_source(graph: Graph) -> str:
    """A function `make` that takes the captured values of a graph with a mask and returns its mask function, as Python text."""
    assert graph.mask is not None
    captured = [f"t{slot}" for slot in range(len(graph.tensors))] + [f"s{slot}" for slot in range(len(graph.scalars))]
    lines = [f"def make({', '.join(captured)}):", f"    def mask({', '.join(MASK_ARGUMENTS)}):"]
    names: dict[Node, str] = {}
    for node in graph.nodes():
        text = _expression(node, names)
        if node.args:
            names[node] = f"x{len(lines) - 2}"
            lines.append(f"        {names[node]} = {text}")
        else:
            names[node] = text
    return "\n".join([*lines, f"        return {names[graph.mask]}", "    return mask", ""])


_OPERATORS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "floormod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
}


def _expression(node: Node, names: dict[Node, str]) -> str:
    if node.op == "const":
        value = const_value(node)
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if node.op == "input":
        return node.attrs[0]
    if node.op == "scalar":
        return f"s{node.attrs[0]}"
    operands = [names[a] for a in node.args]
    if node.op == "gather":
        return f"t{node.attrs[0]}[{', '.join(operands) or '()'}]"
    if node.op in _OPERATORS:
        return f"{operands[0]} {_OPERATORS[node.op]} {operands[1]}"
    if node.op == "invert":
        return f"~{operands[0]}"
    tensors = [
        f"torch.tensor({text}, dtype={_DTYPE[a.dtype]})" if a.op in ("const", "scalar") else text for a, text in zip(node.args, operands)
    ]
    if node.op == "cast":
        return f"{tensors[0]}.to({_DTYPE[node.dtype]})"
    return f"torch.{TABLE[node.op].spelled[0].__name__}({', '.join(tensors)})"


_DTYPE = {BOOL: "torch.bool", FLOAT32: "torch.float32", "int32": "torch.int32", "int64": "torch.int64"}
