"""Sizes that captured tensors must have: a table indexed by `batch` or `head` itself has one entry for each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexc.errors import ShapeError
from flexc.ir.graph import BOOL, Graph, Node, inputs_of

Extent = tuple[int, int, str]  # (slot of a captured tensor, dimension, "batch" or "head" itself that indexes it)


def extents_of(graph: Graph) -> tuple[Extent, ...]:
    """Which dimensions of captured tensors `batch` or `head` itself indexes, other than where a condition on it guards the read."""
    found: set[Extent] = set()
    for name in ("batch", "head"):
        seen: set[Node] = set()
        waiting = [node for _, node in graph.outputs]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            is_choice = node.op == "where" or (node.dtype == BOOL and node.op in ("and", "or"))
            waiting += node.args[:1] if is_choice and name in inputs_of(node.args[0]) else node.args
            if node.op == "gather":
                found |= {(node.attrs[0], axis, name) for axis, i in enumerate(node.args) if i.op == "input" and i.attrs[0] == name}
    return tuple(sorted(found))


def refuse_wrong_sizes(extents: Sequence[Extent], graph: Graph, tensors: Sequence[Tensor], batch: int, heads: int, whose: str) -> None:
    """A table of another size means that the function was written for other sizes.

    Args:
        whose: who says how many there are, with a verb: "q has".

    Raises:
        ShapeError: names the table, its size and the size expected.
    """
    for slot, axis, name in extents:
        size, expected = tensors[slot].shape[axis], batch if name == "batch" else heads
        if size != expected:
            raise ShapeError(
                f"the captured tensor {graph.tensors[slot].name} has {size} entries along dimension {axis}, which `{name}` indexes; "
                f"{whose} {expected} {'batch entries' if name == 'batch' else 'heads'}"
            )
