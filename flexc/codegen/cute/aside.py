"""Statements beside those of an element: a thread executes them for one place, and all pairs that meet there take what they find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexc.codegen.cute.body import Body
from flexc.codegen.levels import TILE
from flexc.ir.graph import Node, topological


@dataclass
class Aside(Body):
    """Statements at the place `column` of a body of their own; nothing is linear there, and nothing bounds columns.

    Attributes:
        prefix: of the names of its values.
    """

    prefix: ClassVar[str]

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

    def _limit(self, node: Node) -> None:
        return None

    def _new(self, prefix: str = "x") -> str:
        return super()._new(self.prefix)
