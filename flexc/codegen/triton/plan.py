"""Every choice of the Triton backend as plain data: tiles, loads, walk, and the forms of operations."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from flexc.codegen.plans import Listed
from flexc.codegen.triton.tiles import ELEMENT_BYTES, Tile, candidates, chunked, is_asynchronous
from flexc.errors import UnsupportedError
from flexc.ir.collisions import DIAGONAL, gradient_terms, is_diagonal
from flexc.ir.graph import Graph
from flexc.target import Target

MAX_HEAD_DIM = 512
MAX_TOKENS = 2**24  # positions are exact in float32 below it


@dataclass(frozen=True)
class Plan(Listed):
    """What `emit` needs to know; two equal plans of equal graphs give the same text.

    Attributes:
        arch: for example "sm_90a".
        dtype: of q, k, v: "float16", "bfloat16" or "float32".
        head_dim, head_dim_v: D and Dv.
        chunks, chunks_v: widths of the power-of-two pieces of D and Dv that matrix products work on; only the last may be ragged.
        group: query heads of a key/value head.
        forward, dq, dkv: tiles of the three main kernels.
        walk: "runs" of a block map, or "dense" where every block is visited and only a ragged end is masked.
        tma: tensor descriptors (bulk copies by hardware) in place of pointers.
        tanh: its form: "hardware" (relative error 2^-11), "exp2" (2^-18), or "libdevice" (to the last bits of float32).
        input_precision: of matrix products on float32: "ieee" or "tf32".
        deterministic: gradients of captured tensors do not depend on the order of additions.
        overlap: dkv_kernel starts while the last blocks of dq_kernel run (programmatic dependent launch, from Hopper on).
        interpreted: for TRITON_INTERPRET=1, where libdevice and inline assembly are missing.
        max_scores: the forward kernel also writes the largest score of each row.
    """

    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    chunks: tuple[int, ...]
    chunks_v: tuple[int, ...]
    group: int
    forward: Tile
    dq: Tile
    dkv: Tile
    walk: str
    tma: bool
    tanh: str
    input_precision: str
    deterministic: bool = False
    overlap: bool = False
    interpreted: bool = False
    max_scores: bool = False


def refuse_unsupported(dtype: str, head_dim: int) -> None:
    """Refuse what no Triton kernel has; `head_dim` is the larger of the two.

    Raises:
        UnsupportedError: the dtype or head dimension.
    """
    if dtype not in ELEMENT_BYTES:
        raise UnsupportedError(f"dtype {dtype} on the triton backend: expected float16, bfloat16 or float32")
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"head dimension on the triton backend: expected at most {MAX_HEAD_DIM}, got {head_dim}")


def make_plan(
    graph: Graph,
    target: Target,
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    tma: bool,
    precision: str = "fast",
    deterministic: bool = False,
    interpreted: bool = False,
    max_scores: bool = False,
    tiles: dict[str, Tile] | None = None,
) -> Plan:
    """The default plan.

    Args:
        graph: decides whether a block map is walked.
        target: a GPU architecture.
        dtype: of q, k and v.
        group: Hq / Hkv.
        tma: the tensors allow bulk copies (16-byte aligned base and strides).
        precision: "fast", "exact" (no hardware approximations) or "tf32" (fast, and float32 products in TF32).
        deterministic: gradients of captured tensors must not depend on the order of additions.
        max_scores: also return the largest score of each row.
        tiles: replaces the computed tile of "forward", "dq" or "dkv".

    Raises:
        UnsupportedError: the dtype or head dimension has no Triton kernel.
    """
    refuse_unsupported(dtype, max(head_dim, head_dim_v))
    chosen: dict[str, Tile] = dict(tiles or {})
    for kind in ("forward", "dq", "dkv"):
        if kind not in chosen:
            scratch = functools.partial(scratch_bytes, graph, kind)
            fitting = candidates(kind, target, dtype, head_dim, head_dim_v, precision, scratch)
            if not fitting:
                raise UnsupportedError(
                    f"head dimensions ({head_dim}, {head_dim_v}) in {dtype} on the triton backend for {target.arch}: "
                    f"no tile fits {target.smem_bytes} bytes of shared memory"
                )
            wide = Tile(128, 64, 8, 3)
            # Where every row visits every block, a taller dQ tile pays (7 % on an H200); uneven rows want more and smaller tiles.
            chosen[kind] = wide if kind == "dq" and graph.mask is None and wide in fitting else fitting[0]
    return Plan(
        arch=target.arch,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        chunks=chunked(head_dim),
        chunks_v=chunked(head_dim_v),
        group=group,
        forward=chosen["forward"],
        dq=chosen["dq"],
        dkv=chosen["dkv"],
        walk="dense" if graph.mask is None else "runs",
        tma=tma and not interpreted and all(is_asynchronous(kind, tile, target, dtype) for kind, tile in chosen.items()),
        tanh=tanh_form(dtype, precision),
        input_precision="tf32" if precision == "tf32" else "ieee",
        deterministic=deterministic and any(t.needs_grad for t in graph.tensors),
        overlap=target.capability >= 90 and not interpreted,
        interpreted=interpreted,
        max_scores=max_scores,
    )


def tanh_form(dtype: str, precision: str) -> str:
    """The cheapest form whose error is below what rounding q·k costs eager PyTorch: 2^-9 relative in bfloat16, 2^-12 in float16.

    The hardware's is not below 2^-12, and where tanh saturates eager PyTorch rounds less still.
    """
    if precision == "exact":
        return "libdevice"
    return {"bfloat16": "hardware", "float16": "exp2"}.get(dtype, "libdevice")


def scratch_bytes(graph: Graph, kind: str, tile: Tile) -> int:
    """Shared memory for values of diagonals: of a vector that is spread over the tile, or a tile whose rows are turned round."""
    is_summed = kind == "dq" and any(term.collisions == DIAGONAL for term in gradient_terms(graph))
    reads = any(node.op == "gather" and is_diagonal(node) for node in graph.nodes())
    return 4 * tile.rows * tile.columns if is_summed else 16 * max(tile.rows, tile.columns) if reads else 0


def map_blocks(plan: Any) -> dict[str, tuple[int, int]]:
    """Tokens per block of the maps that the kernels of a plan walk, by kernel; none where they walk no map."""
    if plan.walk != "runs":
        return {}
    tiles = {kind: getattr(plan, kind) for kind in ("forward", "dq", "dkv") if hasattr(plan, kind)}
    return {kind: (tile.rows, tile.columns) for kind, tile in tiles.items()}
