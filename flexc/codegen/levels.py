"""What the GPU backends share: at which level of a kernel a node changes, what is known of it there, what a captured value is called.

`tile` values change from tile to tile, `row` values with q_idx, `column` values with kv_idx, `element` values with both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexc.ir.bounds import bounds
from flexc.ir.graph import FLOAT32, Graph, Node
from flexc.ir.interval import Interval

TILE, ROW, COLUMN, ELEMENT = "tile", "row", "column", "element"


def captured(graph: Graph, name: str) -> str:
    """What a captured tensor or number is called in a kernel: no name of the templates begins so, and the user may call it anything.

    Other names are made from a tensor's by `_` and an ending. A name that continues another one, such as `bias_2` beside `bias`, could be
    one of those and is numbered.
    """
    names = [each.name for each in (*graph.tensors, *graph.scalars)]
    number = names.index(name) if any(name.startswith(f"{other}_") for other in names) else ""
    return f"u{number}_{name}"


def rate_levels(graph: Graph, is_flat: bool = False) -> dict[Node, str]:
    """The level of every node; "diagonal" nodes are elements here. Flat: q_idx and kv_idx are vectors of pairs, both at the level `row`."""
    levels: dict[Node, str] = {}
    for node in graph.nodes():
        levels[node] = ROW if is_flat and node.op == "input" and node.attrs[0] == "kv_idx" else level_of(node, levels)
    return levels


def level_of(node: Node, levels: Mapping[Node, str]) -> str:
    """The level of a node, from those of its operands."""
    if node.op == "input":
        return {"q_idx": ROW, "kv_idx": COLUMN, "raw": ELEMENT, "score": ELEMENT}.get(node.attrs[0], TILE)
    return joined(levels[a] for a in node.args)


def joined(levels: Iterable[str]) -> str:
    """The level at which values of all these levels meet."""
    found = set(levels) - {TILE}
    if not found:
        return TILE
    return found.pop() if len(found) == 1 else ELEMENT


def position_bounds(graph: Graph, max_tokens: int) -> dict[Node, Interval]:
    """What is known of every node while a kernel is printed: positions are not negative and below max_tokens, scale is positive."""
    position = Interval.of(0.0, float(max_tokens - 1))
    unknown = Interval.of(-1e30, 1e30)  # an infinite product is NaN on every path
    inputs = {name: position for name in ("q_idx", "kv_idx", "batch", "head")}
    inputs |= {"score": unknown, "raw": unknown, "scale": Interval.of(0.0, 1e30)}
    scalars = [Interval.everything(nan=s.dtype == FLOAT32) for s in graph.scalars]
    return bounds([node for _, node in graph.outputs], inputs, scalars, None)
