"""Every choice of the CuTe backend as plain data: the tile, who computes what, how tiles are handed out, which softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexc.codegen.cute.kernel import MAX_TOKENS, Kernel, print_kernel
from flexc.codegen.plans import Listed
from flexc.errors import UnsupportedError
from flexc.ir.bounds import bounds
from flexc.ir.graph import FLOAT32, Graph, const_value, inputs_of, topological
from flexc.ir.interval import Interval
from flexc.ir.ops import has_trait
from flexc.target import KIB, Target

ARCHITECTURES = ("sm_90a",)
MAX_HEAD_DIM = 256  # a wgmma product is at most 256 wide
GROUP_ROWS = 64  # query tokens of one consumer warpgroup: the height of wgmma
GROUP_THREADS = 128
_PADDED = (64, 96, 128, 192, 256)
_ELEMENT_BYTES = 2
_BARRIER_BYTES = KIB  # barriers, the queue's slots and alignment of the buffers

# Registers of a thread that computes and of one that loads, by consumer warpgroups. The sum over all threads is at most 64 Ki; one step
# more for two warpgroups (248) does not fit, and the kernel would wait for registers forever.
REGISTERS = {1: (240, 56), 2: (240, 24), 3: (160, 32)}

SCHEDULERS = ("grid", "static", "dynamic")
_CLUSTERS = (2,)  # larger ones than 1 that have been run


@dataclass(frozen=True)
class Tile:
    """The tile of the forward kernel.

    Attributes:
        rows: query tokens of a block of threads, 64 for each consumer warpgroup.
        columns: key tokens of one step.
        stages: buffers of keys and of values.
        turns: the warpgroups take turns at starting their products, so that one computes its softmax under the other's products.
        scheduler: "grid": one block of threads for each tile, longest first; the hardware hands them out. "static": one block for each
            SM, tiles in fixed strides: no start-up between tiles, for tiles of equal work. "dynamic": one block for each SM, tiles from a
            counter, longest first; what is next is known before it begins.
        cluster: blocks of threads that work on tiles of the same keys side by side; each loads its part of keys and values for all.
        votes: which columns rows see in a masked block is worked out under its products, and where captured values of keys are compared
            with those of queries, or are truth values, by votes of a warp.
        eager: the next tile's first product starts before this one's output is stored: its queries and first keys come early, and a warp of
            its own finds out which tile it is. For "static" without a mask and "dynamic" with one, and an output with memory of its own.
        pinned: weights are worked out before the wait for the output. ptxas moves most of their powers behind it, which is better, except
            where other statements of a score wait with them.
    """

    rows: int
    columns: int
    stages: int = 2
    turns: bool = True
    scheduler: str = "grid"
    cluster: int = 1
    votes: bool = False
    eager: bool = False
    pinned: bool = False

    def __str__(self) -> str:
        turns, cluster = ", turns" if self.turns else "", f", clusters of {self.cluster}" if self.cluster > 1 else ""
        options = "".join(f", {name}" for name in ("votes", "eager", "pinned") if getattr(self, name))
        return f"{self.rows}x{self.columns}, {self.stages} stages{turns}, {self.scheduler}{cluster}{options}"

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.rows // GROUP_ROWS

    @property
    def diagonals(self) -> int:
        """How many a warpgroup works out in a step: those that its rows and the columns meet, and the same number for each thread."""
        return -(-(GROUP_ROWS + self.columns - 1) // GROUP_THREADS) * GROUP_THREADS


@dataclass(frozen=True)
class Plan(Listed):
    """What `emit` needs to know; two equal plans of equal graphs give the same text.

    Attributes:
        arch: "sm_90a".
        dtype: of q, k, v: "float16" or "bfloat16".
        head_dim, head_dim_v: D and Dv.
        padded_dim, padded_dim_v: what products work on; the difference is filled with zeros on the way into shared memory.
        group: query heads of a key/value head.
        forward: tile of the kernel.
        walk: "runs" of a block map, or "dense" where every block is visited and only a ragged end is masked.
        out_buffer: where output tiles are staged: "own" memory, or that of the "queries" they belong to.
        shift: what scores in base 2 are taken relative to where bounds prove them close to it; None for the running maximum of each row.
        slack: by how much, in base 2, a row's scores outgrow the maximum kept of it before the output is rescaled; 0: at all.
        polynomial: of every eight weights how many are computed by multiply-adds in place of the special-function unit, in full blocks.
        bulk: the tensors allow bulk copies as they are; otherwise the host copies them first, to rows of whole 16 bytes.
        approximate: the hardware approximation of tanh.
        exact: no approximation of functions and quotients at all.
        code_by_group: each computing warpgroup has code of its own.
        smem_bytes: shared memory of a block of threads.
        registers: of a computing thread, of a loading thread.
        max_scores: the kernel also writes the largest score of each row.
    """

    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    padded_dim: int
    padded_dim_v: int
    group: int
    forward: Tile
    walk: str
    out_buffer: str
    shift: float | None
    slack: float
    polynomial: int
    bulk: bool
    approximate: bool
    exact: bool
    code_by_group: bool
    smem_bytes: int
    registers: tuple[int, int]
    max_scores: bool = False


def padded(head_dim: int) -> int:
    """The head dimension that products work on."""
    return next(width for width in _PADDED if width >= head_dim)


def smem_bytes(tile: Tile, padded_dim: int, padded_dim_v: int, out_buffer: str, column_bytes: int = 0, diagonal_bytes: int = 0) -> int:
    """Shared memory of a block of threads; `column_bytes` and `diagonal_bytes` of values that a warpgroup shares for each, twice."""
    own_out = tile.rows * padded_dim_v if out_buffer == "own" else 0
    streamed = tile.stages * tile.columns * (padded_dim + padded_dim_v)
    shared = 2 * tile.groups * (tile.columns * column_bytes + tile.diagonals * diagonal_bytes)
    shared = -(-shared // KIB) * KIB  # the next buffer is aligned
    return _BARRIER_BYTES + shared + _ELEMENT_BYTES * (tile.rows * padded_dim + streamed + own_out)


def out_buffer_for(
    tile: Tile, padded_dim: int, padded_dim_v: int, target: Target, column_bytes: int = 0, diagonal_bytes: int = 0
) -> str | None:
    """Where the output is staged: in its own memory if there is room, so that the next queries can arrive meanwhile; None: nothing fits."""
    values = column_bytes, diagonal_bytes
    if smem_bytes(tile, padded_dim, padded_dim_v, "own", *values) <= target.smem_bytes:
        return "own"
    fits = padded_dim_v <= padded_dim and smem_bytes(tile, padded_dim, padded_dim_v, "queries", *values) <= target.smem_bytes
    return "queries" if fits else None


_Sizes = tuple[tuple[int, int], ...]

# (D, Dv) after padding → (rows, columns), best first: of a kernel without mask and score function, with a mask only, with a score function.
# All compile without spills and without serialised products. The order follows timings on an H200, see docs/hopper-forward.md.
_TILES: dict[tuple[int, int], tuple[_Sizes, _Sizes, _Sizes]] = {
    (64, 64): (((192, 128), (128, 192), (128, 128)), ((192, 128), (128, 128), (128, 64)), ((128, 128), (192, 112), (128, 64))),
    (96, 96): (((128, 192), (128, 128)), ((128, 128), (128, 160)), ((128, 128), (128, 64))),
    (128, 128): (((128, 160), (128, 176), (128, 128)), ((128, 128), (128, 160), (128, 64)), ((128, 128), (128, 144), (128, 64))),
    (192, 128): (((128, 128), (128, 112), (128, 96)), ((128, 112), (128, 96), (128, 64)), ((128, 112), (128, 96), (128, 64))),
    (192, 192): (((128, 112), (128, 96)), ((128, 96), (128, 64)), ((128, 96), (128, 64))),
    (256, 256): (((128, 80), (128, 64)), ((128, 64),), ((128, 64),)),
}
# The same where rows see keys from the first one to a limit of theirs, so that few blocks are partial: with a mask only, with a score
# function, with one that takes the special-function unit.
_WIDE = {(128, 128): (((128, 160), (128, 128)), ((128, 160), (128, 144), (128, 128)), ((128, 144), (128, 160), (128, 128)))}
_ONE_BY_ONE = ((128, 64), (128, 32))  # an element's own load holds registers until it arrives; past _WIDEST_WITH_TURNS, the other way round
_LAST_RESORT = ((128, 128), (128, 96), (128, 64), (128, 32))
_MOST_FRAGMENTS = 180  # registers of a thread for scores, weights and output; what is left of 240 is for all else
_MOST_FRAGMENTS_OF_EAGER = 160  # the same where elements take statements and scores of the next tile are on their way
_MOST_COLUMNS_BY_DIAGONAL = 128
_MOST_STATEMENTS = 4  # of an element, in the 160 registers of a thread of three warpgroups
_WIDEST_WITH_TURNS = 128  # of Dv; beyond, products of weights and values are long enough to hide a softmax by themselves
_WIDEST_WITH_SHARED_CODE = 128  # beyond, ptxas works out each product's addresses in registers of threads, unless they are constants
# Of a maximum kept for longer weights are up to 2^8, of which 16 bits and float32 sums hold as many digits as of 1. A test and a branch pay
# where there is much to rescale beside few scores, or where the softmax is the bottleneck; at Dv = 128 they lose 1 %.
_SLACK = {64: 8.0, 256: 8.0}
# Of a kernel without mask whose neighbouring tiles are heads of one key/value head, by (D, Dv).
_IN_CLUSTERS = {(128, 128): (Tile(128, 160, 2, True, "static", 2),)}


def reads_pairs(graph: Graph, diagonals: bool = True) -> bool:
    """Whether a captured tensor is read for each element of a block by itself; `diagonals`: values of those are read once."""
    return print_kernel(graph, approximate=False, exact=False, diagonals=diagonals).loads_elements


def candidates(graph: Graph, target: Target, padded_dim: int, padded_dim_v: int, group: int = 1) -> list[Tile]:
    """Tiles worth timing, best guess first, for `group` query heads of a key/value head. All fit the target's shared memory."""
    has_mask = graph.mask is not None
    kernel = print_kernel(graph, approximate=False, exact=False, diagonals=True, votes=has_mask)
    without_votes = print_kernel(graph, approximate=False, exact=False, diagonals=True) if kernel.matches else kernel
    if kernel.loads_elements:
        sizes = _ONE_BY_ONE if max(padded_dim, padded_dim_v) <= _WIDEST_WITH_TURNS else _ONE_BY_ONE[::-1]
    else:
        listed = _TILES.get((padded_dim, padded_dim_v))
        sizes = listed[2 if kernel.modifies else 1 if has_mask else 0] if listed is not None else _small(_LAST_RESORT, padded_dim_v)
        if has_mask and kernel.stop and not (kernel.first or kernel.matches or kernel.allowed):
            wide = _WIDE.get((padded_dim, padded_dim_v))
            sizes = wide[kernel.modifies + _costs_special_functions(graph)] if wide is not None else sizes
        if kernel.diagonals:  # they are in registers while the scores are modified
            sizes = tuple(size for size in sizes if size[0] <= 2 * GROUP_ROWS and size[1] <= _MOST_COLUMNS_BY_DIAGONAL)
    found = list(_IN_CLUSTERS.get((padded_dim, padded_dim_v), ())) if not has_mask and not kernel.modifies and group % 2 == 0 else []
    for rows, columns in sizes:
        turns = padded_dim_v <= _WIDEST_WITH_TURNS and rows > GROUP_ROWS
        # Three warpgroups lack the registers for the votes of one condition beside the statements of another.
        votes = has_mask and not (rows > 2 * GROUP_ROWS and kernel.matches and kernel.allowed)
        tile, printed = Tile(rows, columns, 2, turns, "static", votes=votes), kernel if votes else without_votes
        out_buffer = out_buffer_for(tile, padded_dim, padded_dim_v, target, printed.column_bytes, printed.diagonal_bytes)
        if out_buffer is None or (tile.groups == 3 and kernel.statements > _MOST_STATEMENTS):
            continue
        # A tile that waits until its queries' memory is free again gains nothing from being known before.
        scheduler = "static" if not has_mask else "dynamic" if out_buffer == "own" else "grid"
        eager = out_buffer == "own" and padded_dim <= padded_dim_v and _begins_early(printed, columns, padded_dim_v)
        found.append(
            replace(tile, scheduler=scheduler, eager=eager, pinned=(padded_dim, padded_dim_v) == (128, 128) and _is_pinned(graph, printed))
        )
    return sorted(found, key=lambda tile: tile.scheduler == "grid")  # a queue is worth more than columns


def _begins_early(kernel: Kernel, columns: int, padded_dim_v: int) -> bool:
    """Whether the next tile's first product may start before this one's output is stored: nothing is late for it, and nothing spills."""
    if (
        kernel.staged or kernel.diagonals or kernel.loads_elements
    ):  # worked out after that product, not under it; or one load for each score
        return False
    return not (kernel.modifies or kernel.allowed) or _fragments(columns, padded_dim_v) <= _MOST_FRAGMENTS_OF_EAGER


def _is_pinned(graph: Graph, kernel: Kernel) -> bool:
    """Whether weights of D = 128 are better worked out early: scores take statements, but none of the special functions' unit."""
    return kernel.modifies and not (kernel.diagonals or kernel.loads_elements or _costs_special_functions(graph))


def _fragments(columns: int, padded_dim_v: int) -> float:
    """Registers of a thread for scores, weights and output."""
    return columns / 2 + columns / 4 + padded_dim_v / 2


def _small(sizes: _Sizes, padded_dim_v: int) -> _Sizes:
    """Those whose fragments leave a thread of two warpgroups enough registers."""
    return tuple((rows, columns) for rows, columns in sizes if _fragments(columns, padded_dim_v) <= _MOST_FRAGMENTS)


def refuse_unsupported(target: Target, dtype: str, head_dim: int) -> None:
    """Refuse what neither the forward nor the backward kernel has; `head_dim` is the larger of the two.

    Raises:
        UnsupportedError: the architecture, dtype or head dimension.
    """
    if target.arch not in ARCHITECTURES:
        raise UnsupportedError(f"target {target.arch} on the cute backend: expected {' or '.join(ARCHITECTURES)} (Hopper)")
    if dtype not in ("float16", "bfloat16"):
        raise UnsupportedError(f"dtype {dtype} on the cute backend: expected float16 or bfloat16")
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"head dimension on the cute backend: expected at most {MAX_HEAD_DIM}, got {head_dim}")


def make_plan(
    graph: Graph,
    target: Target,
    *,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    group: int,
    bulk: bool = True,
    precision: str = "fast",
    tile: Tile | None = None,
    max_scores: bool = False,
) -> Plan:
    """The default plan.

    Args:
        graph: lowered to base 2; decides whether a block map is walked, and which softmax is enough.
        target: must be Hopper.
        dtype: of q, k and v.
        group: Hq / Hkv.
        bulk: the tensors allow bulk copies (16-byte aligned base and strides).
        precision: "fast", "tf32" (the same here) or "exact" (no hardware approximations).
        tile: replaces the computed one.
        max_scores: also return the largest score of each row, which then keeps a running maximum whatever bounds prove.

    Raises:
        UnsupportedError: the architecture, dtype or head dimension has no kernel.
    """
    refuse_unsupported(target, dtype, max(head_dim, head_dim_v))
    wide, wide_v = padded(head_dim), padded(head_dim_v)
    exact = precision == "exact"
    approximate = not exact and dtype == "bfloat16"
    fitting = candidates(graph, target, wide, wide_v, group) if tile is None else [tile]
    votes = fitting[0].votes if fitting else graph.mask is not None
    kernel = print_kernel(graph, approximate=approximate, exact=exact, diagonals=True, votes=votes)
    shared = kernel.column_bytes, kernel.diagonal_bytes
    if not fitting:
        raise UnsupportedError(
            f"head dimensions ({head_dim}, {head_dim_v}) with {sum(shared)} bytes of captured values a key on the cute backend: "
            f"no tile fits {target.smem_bytes} bytes of shared memory"
        )
    tile = fitting[0]
    out_buffer = out_buffer_for(tile, wide, wide_v, target, *shared)
    if out_buffer is None or tile.rows % GROUP_ROWS or tile.groups not in REGISTERS or tile.scheduler not in SCHEDULERS:
        raise UnsupportedError(
            f"tile {tile} on the cute backend: it does not fit {target.arch} at head dimensions ({head_dim}, {head_dim_v})"
        )
    if tile.cluster > 1 and not (
        tile.cluster in _CLUSTERS and group % tile.cluster == 0 and graph.mask is None and tile.scheduler == "static"
    ):
        raise UnsupportedError(
            f"tile {tile} on the cute backend: clusters are of 2, static, and for kernels without a mask whose tiles side by side are "
            f"heads of one key/value head; this one {'has a mask' if graph.mask is not None else f'has {group} of them'}"
        )
    refused = _refused(tile, graph.mask is not None, out_buffer)
    if refused:
        raise UnsupportedError(f"tile {tile} on the cute backend: {refused}")
    shift = None if exact or max_scores else shift_of(graph, dtype)
    return Plan(
        arch=target.arch,
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        padded_dim=wide,
        padded_dim_v=wide_v,
        group=group,
        forward=tile,
        walk="dense" if graph.mask is None else "runs",
        out_buffer=out_buffer,
        shift=shift,
        slack=_SLACK.get(wide_v, 0.0) if shift is None and not max_scores else 0.0,
        polynomial=2 if shift is not None and _costs_special_functions(graph) else 0,
        bulk=bulk and head_dim % 8 == head_dim_v % 8 == 0,
        approximate=approximate,
        exact=exact,
        code_by_group=max(wide, wide_v) > _WIDEST_WITH_SHARED_CODE and tile.groups > 1,
        smem_bytes=smem_bytes(tile, wide, wide_v, out_buffer, *shared),
        registers=REGISTERS[tile.groups],
        max_scores=max_scores,
    )


def _refused(tile: Tile, has_mask: bool, out_buffer: str) -> str:
    """What the tile's options lack; empty if nothing."""
    if tile.eager and out_buffer != "own":
        return "queries leave early where the output has memory of its own"
    if tile.eager and not (tile.cluster == 1 and tile.scheduler == ("dynamic" if has_mask else "static")):
        return "the next tile begins early where it is known: from a queue with a mask, static without one, and outside clusters"
    return ""


def map_blocks(plan: Plan) -> dict[str, tuple[int, int]]:
    """Tokens per block of the map that the kernel walks; none where every block is visited."""
    return {} if plan.walk == "dense" else {"forward": (plan.forward.rows, plan.forward.columns)}


# Weights relative to a fixed shift need its range on either side in the 16-bit type, and float32 sums need it too.
_WIDEST_RANGE = {"bfloat16": 80.0, "float16": 14.0}


def shift_of(graph: Graph, dtype: str) -> float | None:
    """The middle of the scores in base 2, if bounds prove that none is further from it than weights may be from 1."""
    logit, outer = graph.get("logit2"), graph.get("outer")
    if logit is None or outer is None or outer.op != "const":
        return None
    position = Interval.of(0.0, float(MAX_TOKENS - 1))
    inputs = {name: position for name in ("q_idx", "kv_idx", "batch", "head")}
    inputs |= {"raw": Interval.everything(nan=False), "scale": Interval.of(0.0, 1e30)}
    found = bounds([logit], inputs, [Interval.everything() for _ in graph.scalars], None)[logit]
    factor = float(const_value(outer))
    low, high = float(found.lo.min()) * factor, float(found.hi.max()) * factor
    # NaN reaches the result as it would with a maximum, so bounds may leave it open.
    return (low + high) / 2 if high - low <= 2 * _WIDEST_RANGE[dtype] else None


def _costs_special_functions(graph: Graph) -> bool:
    """Whether each score takes the special-function unit besides its weight."""
    logit = graph.get("logit2")
    if logit is None:
        return False
    return any(n.dtype == FLOAT32 and has_trait(n, "costly") and "raw" in inputs_of(n) for n in topological([logit]))
