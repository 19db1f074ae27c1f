"""Argument types of the generated kernels, for compiling them ahead of time without tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flexc.codegen.levels import captured
from flexc.codegen.triton.gradients import gradient_buffers
from flexc.ir.graph import FLOAT32, INT64, Graph

POINTERS = {
    "bool": "*i1",
    "uint8": "*u8",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "float64": "*fp64",
    "float8_e4m3fn": "*fp8e4nv",
}
_FIXED = {
    "scale": "fp32",
    "lse_ptr": "*fp32",
    "largest_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "lse2_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "full_ptr": "*i32",
    "partial_ptr": "*i32",
    "map_ptr": "*i32",
    "order_ptr": "*i32",
    "prefix_ptr": "*i32",
    "first_ptr": "*i32",
    "stop_ptr": "*i32",
    "gap_first_ptr": "*i32",
    "gap_stop_ptr": "*i32",
    "table_ptr": "*i32",
    "tile_ptr": "*i32",
    "length_ptr": "*i32",
    "part_ptr": "*fp32",
    "part_lse_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "has_dlse": "constexpr",
    "in_turn": "constexpr",
    "bins_ptr": "*i64",
    "sum_ptr": "*fp32",
}


def signature(names: Sequence[str], graph: Graph, plan: Any) -> dict[str, str]:
    """Triton's type of each argument of a generated kernel, by name. Pointers and descriptors are taken as 16-byte aligned."""
    given = {f"{captured(graph, t.name)}_ptr": POINTERS[t.dtype] for t in graph.tensors}
    buffers = gradient_buffers(graph, getattr(plan, "deterministic", False))
    given |= {f"{b.arguments}_ptr": POINTERS["int64" if b.dtype == "bins" else b.dtype] for b in buffers}
    given |= {captured(graph, s.name): "fp32" if s.dtype == FLOAT32 else "i64" if s.dtype == INT64 else "i32" for s in graph.scalars}
    own = POINTERS[plan.dtype]
    cached = POINTERS["int16" if getattr(plan, "pairs", False) else getattr(plan, "cache", "") or plan.dtype]
    types: dict[str, str] = {}
    for name in names:
        descriptor = re.fullmatch(r".+_desc(\d+)_(\d+)", name)
        if descriptor:
            width, rows = descriptor.groups()
            types[name] = f"tensordesc<{own[1:]}[1, 1, {rows}, {width}]>"
        elif name in ("lse2_desc", "delta_desc"):
            types[name] = f"tensordesc<fp32[1, {plan.dkv.rows}]>"
        elif name in given:
            types[name] = given[name]
        elif name in _FIXED:
            types[name] = _FIXED[name]
        elif name in ("k_ptr", "v_ptr"):
            types[name] = cached
        else:
            types[name] = own if name.endswith("_ptr") else "i32"
    return types
