"""Conditions that a warp decides by vote: a captured value of the key equals one of the query, or a captured truth value of the key holds.

Of 128 columns of a block a thread has 32, and so have seven others of its warp: those with the same rest by 4. So a lane looks at four
columns in place of 32, 8 * (lane // 2) + lane % 2 + 2 * part, and vote `part` holds, bit by bit, what the threads with rest `part` need to
know of their columns. A warp's 16 rows seldom have more than two different values; each value takes one round of votes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.cute.aside import Aside
from flexc.codegen.cute.body import Body
from flexc.codegen.levels import COLUMN, ROW
from flexc.ir.graph import BOOL, INT32, Node, topological


@dataclass(frozen=True)
class Match:
    """A condition: `column` names a value of a column, `row` the register tensor of what it equals in a row; "": it is a truth value."""

    column: str
    row: str


@dataclass
class Columns(Aside):
    """The statements that a lane executes for a column that it looks at."""

    prefix = "seen"

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


def _reads_memory(node: Node) -> bool:
    return any(each.op == "gather" for each in topological([node]))
