"""Graph + plan → a Triton module: kernels for the forward and backward pass, and the host functions that launch them."""

from flexc.codegen.triton.decode_emit import emit_decode
from flexc.codegen.triton.decode_plan import DecodePlan, plan_decode, tile_rows
from flexc.codegen.triton.emit import emit
from flexc.codegen.triton.gradients import gradient_bytes
from flexc.codegen.triton.plan import Plan, Tile, candidates, make_plan, map_blocks
from flexc.codegen.triton.signature import signature
from flexc.codegen.triton.tiles import known_tiles

__all__ = [
    "DecodePlan",
    "Plan",
    "Tile",
    "candidates",
    "emit",
    "emit_decode",
    "gradient_bytes",
    "known_tiles",
    "make_plan",
    "map_blocks",
    "plan_decode",
    "signature",
    "tile_rows",
]
