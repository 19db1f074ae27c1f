"""Argument types of the generated kernels, for compiling them ahead of time without tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexc.codegen.levels import captured
from flexc.codegen.triton.plan import Plan
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
}
_FIXED = {
    "scale": "fp32",
    "lse_ptr": "*fp32",
    "dlse_ptr": "*fp32",
    "lse2_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "full_ptr": "*i32",
    "partial_ptr": "*i32",
    "map_ptr": "*i32",
    "order_ptr": "*i32",
    "has_dlse": "constexpr",
}


def signature(names: Sequence[str], graph: Graph, plan: Plan) -> dict[str, str]:
    """Triton's type of each argument of a generated kernel, by name. Pointers and descriptors are taken as 16-byte aligned."""
    given = {f"{captured(graph, t.name)}_ptr": POINTERS[t.dtype] for t in graph.tensors}
    given |= {f"{captured(graph, t.name)}_grad_ptr": "*fp32" for t in graph.tensors}
    given |= {captured(graph, s.name): "fp32" if s.dtype == FLOAT32 else "i64" if s.dtype == INT64 else "i32" for s in graph.scalars}
    own = POINTERS[plan.dtype]
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
        else:
            types[name] = own if name.endswith("_ptr") else "i32"
    return types
