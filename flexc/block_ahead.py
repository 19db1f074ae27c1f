"""Compile the kernels of block maps for calls that are not made, and for a target that need not be here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from flexc.block_kernels import compiled_for, load_shared
from flexc.block_launches import is_coarse
from flexc.block_tables import ORDER_LAUNCH, table_launches
from flexc.codegen.levels import captured
from flexc.codegen.triton.blocks import block_signature, emit_tables
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph
from flexc.runtime.triton_ahead import KernelsJob

_DTYPES = {"*i1": "bool", "*u8": "uint8", "*i8": "int8", "*i16": "int16", "*i32": "int32", "*i64": "int64"}
_DTYPES |= {"*fp16": "float16", "*bf16": "bfloat16", "*fp32": "float32", "*fp64": "float64"}


def jobs_of_map(
    graph: Graph,
    block: tuple[int, int],
    sides: Iterable[str],
    lengths: tuple[int, int],
    tensors: Sequence[Tensor],
    scalars: Sequence[int | float],
    capability: int,
    title: str,
) -> list[KernelsJob]:
    """What finds the walks along `sides` ("rows", "columns") of a mask, as jobs for other processes; nothing where operators find them."""
    if graph.mask is None:
        return []
    try:
        compiled = compiled_for(graph, block, tensors, title)
    except UnsupportedError:
        return []
    blocks = [-(-length // size) for length, size in zip(lengths, block)]
    numbers = dict(zip([captured(graph, s.name) for s in graph.scalars], scalars, strict=True))

    def call(name: str) -> tuple[str, tuple, dict[str, int]]:
        types = block_signature(getattr(compiled.module, name).arg_names, graph, compiled.text.tables)
        coarse = is_coarse(blocks[name.startswith("rows")])
        arguments = [
            [_DTYPES[kind]] if kind.startswith("*") else coarse if kind == "constexpr" else numbers.get(each, 1.0 if kind == "fp32" else 1)
            for each, kind in types.items()
        ]
        warps, stages = compiled.module.LAUNCH[name]
        return name, tuple(arguments), {"num_warps": warps, "num_stages": stages}

    path, source = str(compiled.module.__file__), compiled.text.source
    jobs = [KernelsJob(path, source, capability, (call(f"{side}_kernel"),)) for side in sorted(sides)]
    shared = [launch for table in compiled.text.tables if len(table.dims) == 1 for launch in table_launches(tensors[table.slot], table)]
    jobs.append(KernelsJob(str(load_shared().__file__), emit_tables(), capability, (*shared, ORDER_LAUNCH)))
    return jobs
