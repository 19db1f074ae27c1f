"""Graph + plan → a CuTe DSL module for Hopper: the forward kernel, its launch, and the host function that calls it."""

from flexc.codegen.cute.emit import emit
from flexc.codegen.cute.plan import Plan, Tile, candidates, make_plan, map_blocks

__all__ = ["Plan", "Tile", "candidates", "emit", "make_plan", "map_blocks"]
