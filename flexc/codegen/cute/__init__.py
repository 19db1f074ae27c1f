"""Graph + plan → CuTe DSL modules for Hopper: kernels, their launches, and the host functions `forward` and `backward` that call them."""

from flexc.codegen.cute.backward import emit_backward
from flexc.codegen.cute.backward_kernel import print_backward
from flexc.codegen.cute.backward_plan import (
    BackwardPlan,
    BackwardTile,
    backward_candidates,
    backward_gradient_bytes,
    backward_map_blocks,
    backward_workspace_bytes,
    make_backward_plan,
)
from flexc.codegen.cute.emit import emit
from flexc.codegen.cute.plan import ARCHITECTURES, Plan, Tile, candidates, make_plan, map_blocks, reads_pairs

__all__ = [
    "ARCHITECTURES",
    "BackwardPlan",
    "BackwardTile",
    "Plan",
    "Tile",
    "backward_candidates",
    "backward_gradient_bytes",
    "backward_map_blocks",
    "backward_workspace_bytes",
    "candidates",
    "emit",
    "emit_backward",
    "make_backward_plan",
    "make_plan",
    "map_blocks",
    "print_backward",
    "reads_pairs",
]
