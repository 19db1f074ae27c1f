"""What a legal graph is. Runs after tracing and after every pass."""

from __future__ import annotations

from collections.abc import Callable

from flexc.errors import InternalError
from flexc.ir.graph import BOOL, DTYPES, FLOAT32, INPUTS, INT32, INT64, LEAVES, Graph, Node, loaded_dtype
from flexc.ir.ops import TABLE, operand_dtypes
from flexc.ir.text import format_graph

_OUTPUT_DTYPES = {"score": FLOAT32, "mask": BOOL, "dscore": FLOAT32}


def verify(graph: Graph) -> None:
    """Check every node, every slot and the outputs.

    Raises:
        InternalError: what is wrong, with the graph as text.
    """

    def broken(what: str) -> InternalError:
        return InternalError(f"the graph is not legal: {what}\n{format_graph(graph)}")

    for kind, names in (("tensors", [t.name for t in graph.tensors]), ("scalars", [s.name for s in graph.scalars])):
        if len(set(names)) != len(names):
            raise broken(f"two {kind} have one name ({', '.join(names)})")
    for node in graph.nodes():
        check = _CHECKS.get(node.op)
        if check is None and node.op not in TABLE:
            raise broken(f"unknown op {node.op!r}")
        if node.dtype not in DTYPES:
            raise broken(f"unknown dtype {node.dtype!r} of {node.op}")
        complaint = (check or _check_row)(node, graph)
        if complaint:
            raise broken(complaint)
    for name, node in graph.outputs:
        expected = _OUTPUT_DTYPES.get(name, FLOAT32 if name.startswith("dgather:") else node.dtype)
        if node.dtype != expected:
            raise broken(f"output {name!r}: expected {expected}, got {node.dtype}")


def _check_const(node: Node, graph: Graph) -> str:
    kinds = {BOOL: bool, INT32: int, INT64: int, FLOAT32: str}
    if node.args or len(node.attrs) != 1 or type(node.attrs[0]) is not kinds[node.dtype]:
        return f"const of {node.dtype} holds {node.attrs!r}"
    if node.dtype in (INT32, INT64):
        bits = 31 if node.dtype == INT32 else 63
        if not -(2**bits) <= node.attrs[0] < 2**bits:
            return f"const {node.attrs[0]} does not fit {node.dtype}"
    return ""


def _check_input(node: Node, graph: Graph) -> str:
    if node.args or len(node.attrs) != 1 or node.attrs[0] not in INPUTS:
        return f"unknown input {node.attrs!r}"
    expected = FLOAT32 if node.attrs[0] == "score" else INT32
    return "" if node.dtype == expected else f"input {node.attrs[0]}: expected {expected}, got {node.dtype}"


def _check_scalar(node: Node, graph: Graph) -> str:
    slot = node.attrs[0]
    if not 0 <= slot < len(graph.scalars):
        return f"scalar slot {slot} is out of range: the graph has {len(graph.scalars)} scalars"
    expected = graph.scalars[slot].dtype
    return "" if node.dtype == expected else f"scalar {graph.scalars[slot].name}: expected {expected}, got {node.dtype}"


def _check_gather(node: Node, graph: Graph) -> str:
    slot = node.attrs[0]
    if not 0 <= slot < len(graph.tensors):
        return f"tensor slot {slot} is out of range: the graph has {len(graph.tensors)} tensors"
    tensor = graph.tensors[slot]
    if len(node.args) != tensor.rank:
        return f"gather of {tensor.name}: expected {tensor.rank} indices, got {len(node.args)}"
    for index in node.args:
        if index.dtype not in (INT32, INT64):
            return f"gather of {tensor.name}: expected integer indices, got {index.dtype}"
    expected = loaded_dtype(tensor.dtype)
    return "" if node.dtype == expected else f"gather of {tensor.name} ({tensor.dtype}): expected {expected}, got {node.dtype}"


def _check_cast(node: Node, graph: Graph) -> str:
    if len(node.args) != 1:
        return f"cast takes 1 operand, got {len(node.args)}"
    return f"cast from {node.dtype} to itself" if node.args[0].dtype == node.dtype else ""


def _check_row(node: Node, graph: Graph) -> str:
    row = TABLE[node.op]
    if len(node.args) != row.arity:
        return f"{node.op} takes {row.arity} operands, got {len(node.args)}"
    given = tuple(a.dtype for a in node.args)
    try:
        result = row.dtype(*given)
    except TypeError as error:
        return f"{node.op} of {', '.join(given)}: {error}"
    if node.dtype != result:
        return f"{node.op} of {', '.join(given)}: expected a result of {result}, got {node.dtype}"
    expected = operand_dtypes(node.op, given)
    return "" if given == expected else f"{node.op}: expected operands {', '.join(expected)}, got {', '.join(given)}"


_CHECKS: dict[str, Callable[[Node, Graph], str]] = {
    "const": _check_const,
    "input": _check_input,
    "scalar": _check_scalar,
    "gather": _check_gather,
    "cast": _check_cast,
}
assert set(LEAVES) <= set(_CHECKS)
