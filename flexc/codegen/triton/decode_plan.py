"""Every choice of the split kernel as plain data: its tile, how many programs share the keys, the forms of operations."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.levels import COLUMN, ELEMENT, rate_levels
from flexc.codegen.plans import Listed
from flexc.codegen.triton.decode_range import key_range
from flexc.codegen.triton.plan import refuse_unsupported, tanh_form
from flexc.codegen.triton.tiles import ELEMENT_BYTES, Tile, chunked
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph, topological
from flexc.target import KIB, Target

_REGISTERS = 224  # of a thread of the split kernel, about, with any score and mask function
_FIXED_KEYS = 2048  # of a part that is cut at places of its own: its output is a hundredth of the keys and values read
_ROWS = (16, 32, 64)  # the least that a matrix product takes; what a warp group multiplies at once


@dataclass(frozen=True)
class Part:
    """Of D or Dv what one matrix product works on: `width` numbers from `first` on, each `step` further.

    Attributes:
        name: of its operands, behind a letter.
    """

    name: str
    first: int
    width: int
    step: int

    @property
    def stop(self) -> int:
        """Past the last number, if the widths of all were those of whole tiles."""
        return self.first + (self.width - 1) * self.step + 1


@dataclass(frozen=True)
class DecodePlan(Listed):
    """What `emit_decode` needs to know; two equal plans of equal graphs give the same text.

    Attributes:
        arch: for example "sm_90a".
        dtype: of q, k, v: "float16", "bfloat16" or "float32".
        head_dim, head_dim_v: D and Dv.
        chunks, chunks_v: widths of the power-of-two pieces of D and Dv that are loaded at once; only the last may be ragged. They count
            pairs of numbers where `pairs`, else numbers.
        group: query heads of a key/value head: row r of a tile is query token r // group of head r % group.
        forward: the tile: rows of packed queries by keys of one step.
        stages: what Triton is told, so that the keys are as many steps ahead as the tile says.
        programs: how many share the work at most: all that are resident at once.
        least_steps: of a program; fewer are not worth a part of their own.
        share: steps of each part of an entry, so that a row's bits do not depend on the rest of the batch; 0 for equal parts of all work.
        walk: "range" of keys that expressions of the row give, "runs" of a block map, or "dense" where every key is visited.
        one_loop: partial and full blocks of a map take turns in one loop, all masked: for masks that load nothing for each key.
        overlapped: the combining kernel is launched before the split kernel ends.
        page: tokens of a page of the cache, 0 where keys lie one after another.
        ragged: queries of all sequences are packed one after another, and a table says where each tile's are.
        cache: dtype of keys and values where it is not `dtype`: "float8_e4m3fn", "int8", or "".
        token_scales: each token and head of such a cache has a scale of its own; else one serves a head.
        pairs: numbers of such a cache are read two at a time, and a product takes the first or the second of each two: shared memory
            hands them to products as fast as numbers of sixteen bits.
        tanh, input_precision, interpreted: as in `Plan`.
    """

    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    chunks: tuple[int, ...]
    chunks_v: tuple[int, ...]
    group: int
    forward: Tile
    stages: int
    programs: int
    least_steps: int
    share: int
    walk: str
    one_loop: bool
    overlapped: bool
    page: int
    ragged: bool
    cache: str
    token_scales: bool
    pairs: bool
    tanh: str
    input_precision: str
    interpreted: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of the head dim of queries and keys."""
        return _parts(self.chunks, self.pairs)

    @property
    def parts_v(self) -> tuple[Part, ...]:
        """Of the head dim of values."""
        return _parts(self.chunks_v, self.pairs)


def _parts(chunks: tuple[int, ...], pairs: bool) -> tuple[Part, ...]:
    halves = (("_even", 0), ("_odd", 1)) if pairs else (("", 0),)
    return tuple(
        Part(f"{place}{name}", len(halves) * sum(chunks[:place]) + half, width, len(halves))
        for place, width in enumerate(chunks)
        for name, half in halves
    )


def tile_rows(packed_rows: int, width: int, dtype: str) -> int:
    """Rows of the tile for so many packed queries of a key/value head; wide ones, D + Dv, and those of float32 take more room.

    It is all that a plan knows of the number of queries.
    """
    most = 64 if width <= 256 else 32 if width <= 512 else 16
    if dtype == "float32":
        most //= 2
    return max(16, next((rows for rows in _ROWS if packed_rows <= rows and rows <= most), most))


def plan_decode(
    graph: Graph,
    target: Target,
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    rows: int,
    page: int = 0,
    ragged: bool = False,
    cache: str = "",
    token_scales: bool = False,
    batch_invariant: bool = False,
    precision: str = "fast",
    interpreted: bool = False,
    tile: Tile | None = None,
) -> DecodePlan:
    """The plan.

    Args:
        graph: decides whether a block map is walked.
        rows: of the tile, from `tile_rows`.
        page: tokens of a page, 0 for none.
        ragged, cache, token_scales: as in the plan. Ragged queries have no block map: keys outside of the ranges that parts of the mask
            give are skipped, and the whole mask decides about those inside.
        batch_invariant: cut the keys of a row at places of its own.
        tile: replaces the computed one.

    Raises:
        UnsupportedError: the dtype or head dimension has no Triton kernel.
    """
    refuse_unsupported(dtype, max(head_dim, head_dim_v))
    if cache and dtype == "float32":
        raise UnsupportedError("keys and values of eight bits with float32 queries, on every GPU: expected float16 or bfloat16 queries")
    if cache == "float8_e4m3fn" and target.capability < 89 and not interpreted:
        raise UnsupportedError(f"keys and values of float8_e4m3fn on {target.arch}: expected sm_89 or later, or int8")
    pairs = _reads_pairs(head_dim, head_dim_v, cache)
    walk = "dense" if graph.mask is None else "runs" if key_range(graph, partly=ragged) is None else "range"
    tile = tile or _tile(rows, head_dim, head_dim_v, target, dtype, cache)
    by_smem = target.smem_bytes_per_sm // (smem_bytes(tile, head_dim, head_dim_v, dtype, cache) + KIB)
    resident = max(1, min(by_smem, _by_registers(tile.warps, target)))
    return DecodePlan(
        arch=target.arch,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        chunks=chunked(head_dim // 2 if pairs else head_dim),
        chunks_v=chunked(head_dim_v // 2 if pairs else head_dim_v),
        group=group,
        forward=tile,
        stages=_stages(tile, page, walk),
        programs=3 if interpreted else target.sm_count * resident,
        least_steps=1 if interpreted or batch_invariant else max(1, 256 // tile.columns),
        share=0 if not batch_invariant else 3 if interpreted else max(1, _FIXED_KEYS // tile.columns),
        walk=walk,
        one_loop=graph.mask is not None and not _loads_in_loop(graph),
        overlapped=target.capability >= 90 and not interpreted,
        page=page,
        ragged=ragged,
        cache=cache,
        token_scales=token_scales,
        pairs=pairs,
        tanh=tanh_form(dtype, precision),
        input_precision="tf32" if precision == "tf32" else "ieee",
        interpreted=interpreted,
    )


def _stages(tile: Tile, page: int, walk: str) -> int:
    """Where a step reads its own page numbers, Triton shares the stages between them and the keys that they lead to."""
    return 2 * tile.stages - 1 if page and walk != "range" else tile.stages


def _loads_in_loop(graph: Graph) -> bool:
    """Whether the mask reads a captured tensor for each key or pair."""
    assert graph.mask is not None
    levels = rate_levels(graph)
    return any(node.op == "gather" and levels[node] in (COLUMN, ELEMENT) for node in topological([graph.mask]))


def _tile(rows: int, head_dim: int, head_dim_v: int, target: Target, dtype: str, cache: str) -> Tile:
    """As many bytes on their way as shared memory has room for, in two programs of an SM if that is possible."""
    width = head_dim + head_dim_v
    is_wide = dtype == "float32"  # its products are on FMA units, whose operands are registers
    warps = 8 if rows * width >= 32 * 256 or (is_wide and width > 128) else 4
    for resident in sorted({min(2, _by_registers(warps, target)), 1}, reverse=True):
        for columns in (32, 16) if is_wide or width > 512 else (128, 64, 32, 16) if cache and rows < 64 else (64, 32, 16):
            for stages in (4, 3) if columns > 64 else (4, 3, 2):
                tile = Tile(rows, columns, warps, stages)
                if resident * (smem_bytes(tile, head_dim, head_dim_v, dtype, cache) + KIB) <= target.smem_bytes_per_sm:
                    return tile
    return Tile(rows, 16, warps, 1)


def _by_registers(warps: int, target: Target) -> int:
    """Programs of an SM that have room for their registers."""
    return target.regs_per_sm // (_REGISTERS * 32 * warps)


def smem_bytes(tile: Tile, head_dim: int, head_dim_v: int, dtype: str, cache: str = "") -> int:
    """Shared memory of a program, or somewhat more: keys and values on their way, the queries, and weights between two products."""
    per_load = 2 if _reads_pairs(head_dim, head_dim_v, cache) else 1
    keys, values = (per_load * sum(chunked(dim // per_load)) for dim in (head_dim, head_dim_v))
    of_a_key = keys + values + 2 * ELEMENT_BYTES["float32"] if cache else ELEMENT_BYTES[dtype] * (keys + values)  # with scales
    on_their_way = max(1, tile.stages - 1) * tile.columns * of_a_key
    return on_their_way + ELEMENT_BYTES[dtype] * tile.rows * (keys + tile.columns) + KIB


def _reads_pairs(head_dim: int, head_dim_v: int, cache: str) -> bool:
    return bool(cache) and head_dim % 2 == head_dim_v % 2 == 0
