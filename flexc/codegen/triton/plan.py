"""Every choice of the Triton backend as plain data: tile shapes from a shared-memory and register model of the target, loads, forms.

The model (Triton 3.6, checked against compiled kernels): a kernel keeps its own rows in shared memory once and the rows it streams
`stages` times; accumulators and score tiles live in registers, spread over 32 · warps threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph
from flexc.target import Target

MAX_HEAD_DIM = 512
MAX_TOKENS = 2**24  # positions are exact in float32 below it

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_REGISTERS_PER_THREAD = 255
_ADDRESS_REGISTERS = 40


@dataclass(frozen=True)
class Tile:
    """One kernel's tile: `rows` query tokens by `columns` key tokens, warps of its block, stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True)
class Plan:
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
        approximate: hardware approximations for tanh and sigmoid.
        input_precision: of matrix products on float32: "ieee" or "tf32".
        interpreted: for TRITON_INTERPRET=1, where libdevice and inline assembly are missing.
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
    approximate: bool
    input_precision: str
    interpreted: bool = False

    def __str__(self) -> str:
        from dataclasses import fields

        return "\n".join(f"{f.name:16} {getattr(self, f.name)}" for f in fields(self))


def chunked(head_dim: int) -> tuple[int, ...]:
    """Power-of-two widths, at least 16, largest first, that cover head_dim with the least padding: 96 → (64, 32), 80 → (64, 16).

    At most three pieces: each one is a matrix product of its own.
    """
    widths: list[int] = []
    left = head_dim
    while left > 0:
        width = 1 << (left.bit_length() - 1)
        if len(widths) == 2 or width < 16:
            width = max(16, 1 << (left - 1).bit_length())
        widths.append(width)
        left -= width
    # 31 → (16, 16) costs as much as one product of 32.
    if len(widths) > 1 and sum(widths) == 1 << (head_dim - 1).bit_length():
        return (sum(widths),)
    return tuple(widths)


def _registers(products: Iterable[tuple[int, int]], warps: int) -> int:
    """Registers a thread needs for float32 tiles of these shapes."""
    return _ADDRESS_REGISTERS + sum(rows * columns for rows, columns in products) // (32 * warps)


def smem_bytes(kind: str, tile: Tile, width: int, width_v: int, element: int) -> int:
    """Shared memory of a kernel ("forward", "dq" or "dkv") with this tile; `width` and `width_v` are the padded D and Dv."""
    if kind == "forward":
        own = tile.rows * width
        streamed = tile.columns * (width + width_v)
    elif kind == "dq":
        own = tile.rows * (width + width_v)
        streamed = tile.columns * (width + width_v)
    else:
        own = tile.columns * (width + width_v)
        streamed = tile.rows * (width + width_v)
    score = tile.rows * tile.columns if kind != "forward" else 0
    return (own + tile.stages * streamed + score) * element + 1024


def registers(kind: str, tile: Tile, width: int, width_v: int) -> int:
    """Registers a thread of a kernel needs, by the model."""
    score = (tile.rows, tile.columns)
    if kind == "forward":
        return _registers([score, (tile.rows, width_v)], tile.warps)
    if kind == "dq":
        return _registers([score, score, (tile.rows, width)], tile.warps)
    return _registers([score, score, (tile.columns, width), (tile.columns, width_v)], tile.warps)


# Tiles in order of preference, (rows, columns, warps, stages). Two blocks of four warps to an SM overlap one's softmax with the other's
# products better than one block of eight (benchmarks/results, H200); large head dims leave room for one block only.
_PREFERRED: dict[str, Sequence[tuple[int, int, int, int]]] = {
    "forward": [
        (64, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 64, 4, 2),
        (128, 64, 8, 2),
        (64, 64, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 8, 2),
        (64, 32, 8, 1),
        (32, 32, 4, 1),
        (16, 32, 4, 1),
        (16, 16, 4, 1),
    ],
    "dq": [
        (64, 64, 4, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 64, 8, 2),
        (64, 32, 4, 3),
        (64, 32, 4, 2),
        (64, 32, 8, 2),
        (64, 32, 8, 1),
        (32, 32, 4, 1),
        (16, 32, 4, 1),
        (16, 16, 4, 1),
    ],
    "dkv": [
        (64, 64, 4, 2),
        (64, 128, 8, 2),
        (32, 64, 4, 3),
        (64, 64, 8, 2),
        (32, 64, 8, 2),
        (32, 64, 8, 1),
        (32, 32, 4, 1),
        (32, 32, 8, 1),
        (16, 32, 8, 1),
        (16, 16, 8, 1),
        (16, 16, 4, 1),
    ],
}
_FLOAT32_LIMIT = 32  # true float32 products run on FMA units: larger ones compile for minutes and spill


def candidates(kind: str, target: Target, dtype: str, head_dim: int, head_dim_v: int) -> list[Tile]:
    """Tiles that fit the target, best guess first."""
    width, width_v = sum(chunked(head_dim)), sum(chunked(head_dim_v))
    element = ELEMENT_BYTES[dtype]
    found = []
    for numbers in _PREFERRED[kind]:
        tile = Tile(*numbers)
        if dtype == "float32" and max(tile.rows, tile.columns) > _FLOAT32_LIMIT:
            continue
        if tile.warps == 4 and tile.rows >= 64 and max(width, width_v) > 128:
            continue  # one warpgroup's registers hold a 64 x 128 accumulator with room to spare, not a wider one
        if smem_bytes(kind, tile, width, width_v, element) > target.smem_bytes:
            continue
        if registers(kind, tile, width, width_v) > _REGISTERS_PER_THREAD:
            continue
        found.append(tile)
    return found


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
    interpreted: bool = False,
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
        tiles: replaces the computed tile of "forward", "dq" or "dkv".

    Raises:
        UnsupportedError: the dtype or head dimension has no Triton kernel.
    """
    if dtype not in ELEMENT_BYTES:
        raise UnsupportedError(f"dtype {dtype} on the triton backend: expected float16, bfloat16 or float32")
    if max(head_dim, head_dim_v) > MAX_HEAD_DIM:
        raise UnsupportedError(f"head dimension on the triton backend: expected at most {MAX_HEAD_DIM}, got {max(head_dim, head_dim_v)}")
    chosen: dict[str, Tile] = dict(tiles or {})
    for kind in ("forward", "dq", "dkv"):
        if kind not in chosen:
            fitting = candidates(kind, target, dtype, head_dim, head_dim_v)
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
        tma=tma and target.capability >= 90 and not interpreted,
        approximate=precision != "exact" and dtype == "bfloat16" and not interpreted,
        input_precision="tf32" if precision == "tf32" else "ieee",
        interpreted=interpreted,
    )


def map_blocks(plan: Plan) -> dict[str, tuple[int, int]]:
    """Tokens per block of the maps that the kernels walk, by kernel; none where every block is visited."""
    if plan.walk == "dense":
        return {}
    return {kind: (tile.rows, tile.columns) for kind, tile in (("forward", plan.forward), ("dq", plan.dq), ("dkv", plan.dkv))}
