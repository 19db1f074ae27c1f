"""Conditions that a warp decides by vote: a captured value of the key equals one of the query, or a captured truth value of the key holds.

Of 128 columns of a block a thread has 32, and so have seven others of its warp: those with the same rest by 4. So a lane looks at four
columns in place of 32, 8 * (lane // 2) + lane % 2 + 2 * part, and vote `part` holds, bit by bit, what the threads with rest `part` need to
know of their columns. A warp's 16 rows seldom have more than two different values; each value takes one round of votes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.cute.body import Body
from flexc.codegen.levels import COLUMN, ROW, TILE
from flexc.ir.graph import BOOL, INT32, Node, topological


@dataclass(frozen=True)
class Match:
    """A condition: `column` names a value of a column, `row` the register tensor of what it equals in a row; "": it is a truth value."""

    column: str
    row: str


@dataclass
class Columns(Body):
    """The statements that a lane executes for a column that it looks at, at the place `column`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.linear = {}

    def value(self, node: Node, body: Body) -> str:
        """Prints the node here, and what is the same for the whole tile in `body`; returns the name of its value."""
        for low in topological([node]):
            if self.level(low) == TILE and low.op != "const":
                body.add(low)
                self.names[low] = body.names[low]
        self.add(node)
        return self.names[node]

    def match(self, node: Node, body: Body) -> Match | None:
        """Prints a condition that a warp decides by vote; None for others."""
        if node.dtype != BOOL:
            return None
        if self.level(node) == COLUMN:
            return Match(self.value(node, body), "") if _reads_memory(node) else None
        if node.op != "eq" or any(side.dtype != INT32 for side in node.args):
            return None
        for column, row in (node.args, node.args[::-1]):
            if self.level(column) == COLUMN and self.level(row) == ROW and _reads_memory(column):
                body.add(row)
                return Match(self.value(column, body), body.names[row])
        return None

    def _limit(self, node: Node) -> None:
        return None

    def _new(self, prefix: str = "x") -> str:
        return super()._new("seen")


def _reads_memory(node: Node) -> bool:
    return any(each.op == "gather" for each in topological([node]))
