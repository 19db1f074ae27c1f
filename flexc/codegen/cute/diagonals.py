"""Values that are the same along a diagonal, such as those of a table of relative positions: worked out once for each diagonal of a block.

The accumulators of a warpgroup's block meet rows + columns - 1 diagonals, and each value of one stands in up to `rows` places. So a thread
takes a diagonal, evaluates the whole part of the score that depends on q_idx - kv_idx alone for one pair of positions on it, and leaves
the result in shared memory. Only what is worth it goes that way: what reads memory or takes the special-function unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexc.codegen.cute.aside import Aside
from flexc.codegen.cute.body import Body
from flexc.codegen.levels import COLUMN, ELEMENT, TILE
from flexc.ir.collisions import is_diagonal
from flexc.ir.graph import LEAVES, Node, input_node, topological
from flexc.ir.ops import has_trait


@dataclass
class Along(Aside):
    """The statements that a thread executes for a diagonal: along_q and along_kv are a pair of positions on it.

    Attributes:
        wanted: values that statements of an element take, name → IR dtype.
    """

    prefix = "along"

    wanted: dict[str, str] = field(default_factory=dict)
    _pairs: dict[Node, str] = field(default_factory=dict)
    _takes: dict[Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pairs = self.levels
        self.levels = {node: TILE if level == TILE else COLUMN for node, level in self.levels.items()}
        self.names |= {input_node("q_idx"): "along_q", input_node("kv_idx"): "along_kv"}

    def takes(self, node: Node) -> bool:
        """Whether the node, of the graph, is worked out here."""
        if self._pairs.get(node) != ELEMENT or node.op in LEAVES:
            return False
        if node not in self._takes:
            costs = any(self._pairs[n] == ELEMENT and (n.op == "gather" or has_trait(n, "costly")) for n in topological([node]))
            self._takes[node] = costs and is_diagonal(node)
        return self._takes[node]

    def value(self, node: Node, body: Body) -> str:
        """Prints the node here, and what is the same for the whole tile in `body`; returns the name of its value."""
        name = super().value(node, body)
        self.wanted[name] = node.dtype
        return name
