"""Graph + plan → a Triton module: kernels for the forward and backward pass, and the host functions that launch them."""

from flexc.codegen.triton.emit import emit
from flexc.codegen.triton.plan import Plan, Tile, candidates, make_plan, map_blocks
from flexc.codegen.triton.signature import signature
from flexc.codegen.triton.tiles import known_tiles

__all__ = ["Plan", "Tile", "candidates", "emit", "known_tiles", "make_plan", "map_blocks", "signature"]
