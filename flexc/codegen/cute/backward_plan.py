"""Every choice of the CuTe backend's backward kernels as plain data: the tile, who computes which part of it, shared memory, registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexc.codegen.cute.backward_kernel import BackwardKernel, print_backward
from flexc.codegen.cute.backward_terms import gradient_slots
from flexc.codegen.cute.plan import refuse_unsupported
from flexc.codegen.plans import Listed
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph
from flexc.target import KIB, Target

GROUPS = 2  # warpgroups that compute; one more loads, and adds to the gradient of the queries
REGISTERS = (240, 24)  # of a thread that computes, of the others
_ELEMENT_BYTES = 2
_BARRIER_BYTES = 256  # with slots and orders of the queue


@dataclass(frozen=True)
class BackwardTile:
    """The tile of the backward kernel: scores are held transposed, [keys, queries].

    Attributes:
        rows: query tokens of one step.
        columns: key tokens of a block of threads.
        split: how the two warpgroups share a step. "keys": 64 keys each, weights stay in registers. "dims": the same 64 keys, half of the
            queries' scores each and half of every gradient's dimensions; weights go through shared memory.
        stages: buffers of queries and of the output's gradients.
        queue: one block of threads for each SM, tiles from a counter; otherwise one for each tile. Gradients of keys and values are handed
            over in the queries' gradient's buffer, which 48 queries of 192 dimensions are too few for.
        direct: computing threads add to the gradient of the queries from their registers; otherwise they hand it, in shared memory, to a
            warp that adds it, which is faster where there is room for both. Not together with a queue, nor in a fixed order.
        apart: gradients of values leave through a buffer and a warp of their own, so that nothing waits for those of keys. With a queue.
    """

    rows: int
    columns: int
    split: str = "keys"
    stages: int = 2
    queue: bool = False
    direct: bool = False
    apart: bool = False

    @property
    def flips_dq(self) -> bool:
        """The queries' gradient is made transposed, [dims, queries], from score gradients in shared memory as [queries, keys].

        Otherwise queries are rows of its product, which has 64 for each warpgroup, or for both.
        """
        return self.rows % 64 != 0

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.columns} by {self.split}", f"{self.stages} stages"]
        return ", ".join([*words, *(name for name in ("queue", "direct", "apart") if getattr(self, name))])


@dataclass(frozen=True)
class BackwardPlan(Listed):
    """What `emit_backward` needs to know; two equal plans of equal graphs give the same text.

    Attributes:
        arch: "sm_90a".
        dtype: of q, k, v: "float16" or "bfloat16".
        head_dim, head_dim_v: D and Dv.
        padded_dim, padded_dim_v: what products work on.
        group: query heads of a key/value head.
        by_head: each query head has tiles of its own, which add to float32 sums of the gradients of keys and values; in a fixed order each
            has sums of its own. Otherwise a tile visits all heads of the group. With a mask: tiles of a group, being uneven, drift apart,
            and what they share falls out of the L2 cache.
        backward: tile of the kernel.
        walk: "runs" of a transposed block map, or "dense" where every block is visited and only ragged keys are masked.
        bulk: q, k and v allow bulk copies as they are; otherwise the host copies them first.
        approximate: the hardware approximation of tanh.
        exact: no approximation of functions and quotients at all.
        deterministic: blocks of keys add to the queries' gradient in a fixed order, that of their tiles.
        smem_bytes: shared memory of a block of threads.
        registers: of a computing thread, of another one.
    """

    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    padded_dim: int
    padded_dim_v: int
    group: int
    by_head: bool
    backward: BackwardTile
    walk: str
    bulk: bool
    approximate: bool
    exact: bool
    deterministic: bool
    smem_bytes: int
    registers: tuple[int, int]

    @property
    def has_ranks(self) -> bool:
        """Which turn a block of keys has at a block of queries is looked up: in a fixed order with a mask, where not all visit all."""
        return self.deterministic and self.walk == "runs"

    @property
    def counts_tiles(self) -> bool:
        """Blocks of threads take their tiles from a counter: from a queue, or because a tile with ranks waits for those before it."""
        return self.backward.queue or self.has_ranks


# (D, Dv) after padding → tiles, best first, without a mask and with one, whose tiles are of uneven length. A warpgroup's share of the
# dimensions must be whole rows of a swizzled buffer, 64 numbers or 32. At D = 64 the registers do not suffice for a queue as well; nor do
# they at D = 128 for 80 queries and a mask, or a kernel that is not `is_light`. At (192, 128) the gradients of 128 keys take 160 registers
# of 240, and 48 queries what is left.
_WIDE = (BackwardTile(64, 64, "dims", 2, direct=True), BackwardTile(64, 64, "dims", 2), BackwardTile(64, 64, "dims", 1))
_NARROW = (BackwardTile(48, 128), *_WIDE)
_UNEVEN = (BackwardTile(64, 128, queue=True, apart=True), BackwardTile(64, 128, queue=True), BackwardTile(64, 128))
_TILES: dict[tuple[int, int], tuple[tuple[BackwardTile, ...], tuple[BackwardTile, ...]]] = {
    (64, 64): ((BackwardTile(128, 128),), (BackwardTile(128, 128),)),
    (128, 128): ((BackwardTile(80, 128), BackwardTile(64, 128)), _UNEVEN),
    (192, 128): (_NARROW, _NARROW),
    (128, 192): (_NARROW, _NARROW),
}


def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dimensions that products work on."""
    widths = [next(width for width in (64, 128, 192, 256) if width >= dim) for dim in (head_dim, head_dim_v)]
    return (64, 64) if max(widths) == 64 else (max(widths[0], 128), max(widths[1], 128))


def backward_smem_bytes(tile: BackwardTile, padded_dim: int, padded_dim_v: int, column_bytes: int = 0) -> int:
    """Shared memory of a block of threads; `column_bytes` of values that a warpgroup shares for each query of a step, twice."""
    streamed = tile.stages * tile.rows * (padded_dim + padded_dim_v)
    kept = tile.columns * (padded_dim + padded_dim_v)
    exchanged = 2 * tile.rows * tile.columns * (2 if tile.split == "dims" else 1)
    handed = 0 if tile.direct else tile.rows * padded_dim
    apart = tile.columns * padded_dim_v if tile.apart else 0
    first = _BARRIER_BYTES + 4 * tile.stages * (2 * tile.rows + 4) + 2 * GROUPS * tile.rows * column_bytes
    return -(-first // KIB) * KIB + 4 * handed + _ELEMENT_BYTES * (streamed + kept + exchanged + apart)


def backward_candidates(
    kernel: BackwardKernel, target: Target, padded_dim: int, padded_dim_v: int, *, has_mask: bool = False, deterministic: bool = False
) -> list[BackwardTile]:
    """Tiles that fit the target and what the kernel prints, best guess first."""
    listed = _TILES.get((padded_dim, padded_dim_v), (_WIDE, _WIDE))[int(has_mask)]
    fitting = [tile for tile in listed if (kernel.is_light or tile.rows != 80) and not (deterministic and tile.direct)]
    if kernel.lines > 4 or kernel.sums > 1 or (deterministic and has_mask):
        fitting = [tile for tile in fitting if tile.rows != 48]  # ptxas serialises products, or spills 100 bytes and more
    fitting = [tile for tile in fitting if kernel.sums <= 1 or not tile.apart]  # ptxas spills 128 bytes instead of 32
    return [tile for tile in fitting if backward_smem_bytes(tile, padded_dim, padded_dim_v, kernel.column_bytes) <= target.smem_bytes]


def make_backward_plan(
    graph: Graph,
    target: Target,
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    bulk: bool = True,
    precision: str = "fast",
    deterministic: bool = False,
    tile: BackwardTile | None = None,
) -> BackwardPlan:
    """The default plan; arguments as of `make_plan`.

    Raises:
        UnsupportedError: the architecture, dtype, head dimension or a gradient that is asked for has no kernel, or none of a fixed order.
    """
    refuse_unsupported(target, dtype, max(head_dim, head_dim_v))
    has_mask = graph.mask is not None
    if deterministic and gradient_slots(graph):
        names = ", ".join(graph.tensors[slot].name for slot in gradient_slots(graph))
        raise UnsupportedError(f"deterministic=True with gradients of captured tensors ({names}) in a backward kernel of the cute backend")
    if deterministic and tile is not None and tile.direct:
        raise UnsupportedError(f"deterministic=True with the tile {tile} in the backward kernel of the cute backend: expected another")
    wide, wide_v = padded_dims(head_dim, head_dim_v)
    exact = precision == "exact"
    approximate = not exact and dtype == "bfloat16"
    kernel = print_backward(graph, approximate=approximate, exact=exact)
    column_bytes = kernel.column_bytes
    if tile is None:
        fitting = backward_candidates(kernel, target, wide, wide_v, has_mask=has_mask, deterministic=deterministic)
    else:
        fitting = [tile]
    by_head = group > 1 and has_mask
    if by_head:
        fitting = [replace(tile, apart=False) for tile in fitting]  # what is added up is not stored
    if not fitting or backward_smem_bytes(fitting[0], wide, wide_v, column_bytes) > target.smem_bytes:
        raise UnsupportedError(
            f"head dimensions ({head_dim}, {head_dim_v}) with {column_bytes} bytes of captured values a query in the backward kernel of "
            f"the cute backend: no tile fits {target.smem_bytes} bytes of shared memory"
        )
    return BackwardPlan(
        arch=target.arch,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        padded_dim=wide,
        padded_dim_v=wide_v,
        group=group,
        by_head=by_head,
        backward=fitting[0],
        walk="runs" if has_mask else "dense",
        bulk=bulk and head_dim % 8 == head_dim_v % 8 == 0,
        approximate=approximate,
        exact=exact,
        deterministic=deterministic,
        smem_bytes=backward_smem_bytes(fitting[0], wide, wide_v, column_bytes),
        registers=REGISTERS,
    )


def backward_map_blocks(plan: BackwardPlan) -> dict[str, tuple[int, int]]:
    """Tokens per block of the map whose transposed runs the kernel walks; none where every block is visited."""
    return {} if plan.walk == "dense" else {"backward": (plan.backward.rows, plan.backward.columns)}


def backward_gradient_bytes(graph: Graph, elements: Sequence[int]) -> dict[str, int]:
    """Bytes of what gradients of captured tensors are added up in, by the tensor's name; `elements` of each captured tensor."""
    return {graph.tensors[slot].name: 4 * elements[slot] for slot in gradient_slots(graph)}


def backward_workspace_bytes(plan: BackwardPlan, entries: int, q_len: int, kv_len: int, map_entries: int) -> int:
    """What the host function allocates besides dq, dk and dv; `entries` is B x Hq, `map_entries` how many of these have a map of their own.

    Float32 sums for dq, and what each query is known by. A deterministic kernel also keeps whose turn it is to add, and where there is a
    mask, at which turn each block of keys adds to each block of queries. Where each query head has its own tiles, there are float32 sums
    for dk and dv, in a fixed order those of each query head.
    """
    rows = plan.backward.rows
    blocks = -(-q_len // rows)
    turns = 4 * GROUPS * entries * blocks if plan.deterministic else 0
    key_blocks = -(-kv_len // plan.backward.columns)
    owners = entries if plan.deterministic else entries // plan.group
    key_sums = 4 * owners * key_blocks * plan.backward.columns * (plan.padded_dim + plan.padded_dim_v) if plan.by_head else 0
    ranks = 4 * map_entries * blocks * key_blocks if plan.has_ranks else 0
    return 4 * entries * blocks * (rows * plan.padded_dim + 2 * rows + 4) + turns + key_sums + ranks
