"""Tiles of the Triton kernels: which are worth trying on a class of architectures, and the shared memory that one needs.

The tables are what ptxas says of compiled kernels (Triton 3.6; dense, causal, and causal with soft capping in bfloat16; strides that are
multiples of 16): a tile is listed up to the head dim where registers begin to spill. Of what neither spills nor overflows shared memory,
the tables prefer what was timed (Hopper), else the most reuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexc.target import KIB, Target

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MOST_CANDIDATES = 6
_HOPELESS = 8  # a tile with this fraction of the work of another one that fits is not worth timing
_BUSY_WARPS = 8  # of an SM: two for each of its four schedulers, so that one computes while the other waits


@dataclass(frozen=True)
class Tile:
    """One kernel's tile: `rows` query tokens by `columns` key tokens, warps of its block, stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, {self.warps} warps, {self.stages} stages"

    def kept(self, kind: str) -> int:
        """Tokens that a block of threads keeps; it streams the others."""
        return self.columns if kind == "dkv" else self.rows

    def streamed(self, kind: str) -> int:
        """Tokens of one round of the loop."""
        return self.rows if kind == "dkv" else self.columns


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


_Table = dict[tuple[int, int, int, int], tuple[int, int, int]]

# (rows, columns, warps, stages) → the widest head dim, (D + Dv) / 2, of one, two and three pieces that the tile is for; best first.
# The last of each table is the last resort, for whatever remains.

# mma.sync: products read registers, where the streamed side of a tile takes most of the room. On consumer parts, whose products are slow,
# the tile matters less than that nothing spills.
_MMA_SYNC: dict[str, _Table] = {
    "forward": {
        (128, 64, 4, 3): (64, 0, 0),  # 32 rows a warp: each key that is read serves twice as many queries
        (128, 64, 8, 3): (128, 160, 112),
        (128, 64, 8, 2): (128, 160, 112),
        (64, 64, 4, 2): (128, 160, 112),
        (64, 64, 8, 2): (256, 160, 224),
        (64, 32, 8, 2): (256, 384, 224),
        (64, 32, 4, 3): (128, 160, 112),
        (32, 32, 8, 2): (512, 512, 512),
    },
    "dq": {
        (64, 64, 4, 3): (128, 96, 0),
        (64, 64, 4, 2): (128, 96, 0),
        (64, 64, 8, 2): (256, 96, 112),
        (128, 64, 8, 2): (64, 96, 112),
        (128, 32, 8, 2): (128, 96, 112),
        (64, 32, 8, 2): (256, 96, 112),
        (64, 32, 4, 2): (128, 96, 112),
        (32, 64, 4, 2): (128, 192, 0),
        (32, 32, 8, 2): (512, 384, 112),
        (32, 16, 8, 2): (512, 512, 512),
    },
    "dkv": {
        (64, 64, 4, 2): (64, 0, 0),
        (64, 128, 8, 2): (64, 0, 0),
        (64, 64, 8, 2): (256, 0, 0),
        (32, 64, 8, 2): (256, 96, 0),
        (32, 64, 4, 2): (128, 96, 0),
        (64, 32, 4, 2): (128, 0, 0),
        (32, 32, 8, 2): (256, 384, 0),
        (32, 32, 4, 2): (128, 320, 0),
        (16, 32, 8, 2): (512, 384, 112),
        (16, 16, 8, 2): (512, 512, 512),
    },
}

# wgmma works on 64 kept tokens for each four warps. Two blocks of four warps on an SM overlap one's softmax with the other's products
# better than one block of eight (benchmarks/results, H200, D 64 to 128). Fewer kept tokens fall back to mma.sync.
_HOPPER: dict[str, _Table] = {
    "forward": {
        (64, 64, 4, 3): (256, 192, 224),
        (128, 64, 8, 3): (128, 192, 224),
        (128, 128, 8, 2): (128, 160, 112),
        (128, 64, 8, 2): (256, 192, 224),
        (64, 64, 8, 2): (256, 320, 224),
        (64, 64, 4, 2): (256, 320, 224),
        (64, 32, 8, 2): (256, 320, 224),
        (64, 16, 8, 3): (512, 384, 448),
        (32, 32, 8, 2): (512, 512, 512),
    },
    "dq": {
        (64, 64, 4, 2): (128, 192, 112),
        (128, 64, 8, 3): (128, 160, 0),
        (128, 64, 8, 2): (128, 192, 112),
        (64, 64, 8, 2): (256, 192, 224),
        (64, 32, 8, 2): (256, 320, 224),
        (64, 32, 4, 2): (256, 192, 224),
        (64, 16, 8, 2): (256, 384, 224),
        (32, 32, 8, 2): (512, 384, 112),
        (32, 16, 8, 2): (512, 512, 512),
    },
    "dkv": {
        (64, 64, 4, 2): (128, 96, 112),  # three pieces spill up to 56 bytes, and are fast all the same
        (64, 128, 8, 2): (128, 96, 112),
        (64, 64, 8, 2): (128, 192, 112),
        (32, 128, 8, 2): (128, 160, 112),
        (32, 64, 8, 2): (256, 320, 224),
        (32, 64, 4, 2): (128, 160, 112),
        (16, 64, 8, 2): (256, 320, 224),
        (16, 32, 8, 2): (512, 384, 0),
        (16, 16, 8, 2): (512, 512, 512),
    },
}

# tcgen05 works on 128 kept tokens at once, and on 64 at half the rate. Its accumulators live in tensor memory, 512 columns of an SM: a tile
# that would need more is not listed.
_BLACKWELL: dict[str, _Table] = {
    "forward": {
        (128, 64, 4, 3): (64, 96, 0),
        (128, 64, 8, 3): (128, 192, 224),
        (128, 128, 8, 2): (128, 160, 0),
        (128, 32, 8, 2): (256, 192, 224),
        (64, 64, 4, 3): (128, 192, 112),
        (64, 64, 8, 2): (256, 320, 224),
        (64, 32, 8, 2): (256, 384, 224),
        (64, 32, 8, 1): (256, 384, 448),
        (32, 32, 8, 2): (512, 512, 512),
    },
    "dq": {
        (128, 64, 4, 2): (64, 0, 0),
        (128, 64, 8, 2): (128, 160, 0),
        (64, 64, 4, 2): (128, 160, 112),
        (64, 64, 8, 2): (256, 192, 112),
        (128, 32, 8, 2): (128, 192, 112),
        (64, 32, 8, 2): (256, 192, 112),
        (64, 16, 8, 1): (256, 320, 224),
        (32, 32, 8, 2): (512, 384, 112),
        (32, 16, 8, 2): (512, 512, 512),
    },
    "dkv": {
        (64, 128, 8, 2): (128, 0, 0),
        (32, 128, 8, 2): (128, 160, 0),
        (64, 64, 8, 2): (128, 160, 0),
        (64, 64, 4, 2): (128, 0, 0),
        (32, 64, 8, 2): (256, 192, 112),
        (16, 64, 8, 2): (256, 192, 112),
        (16, 64, 8, 1): (256, 192, 224),
        (16, 32, 8, 2): (512, 384, 0),
        (16, 16, 8, 2): (512, 512, 512),
    },
}

# True float32 products run on FMA units: large tiles compile for minutes, and spill. The 8-token tiles are for D above 400 where shared
# memory is small.
_FLOAT32: dict[str, _Table] = {
    "forward": {
        (32, 32, 4, 1): (64, 0, 0),
        (32, 32, 8, 1): (128, 96, 112),
        (16, 32, 8, 1): (512, 384, 448),
        (16, 16, 8, 1): (512, 512, 512),
    },
    "dq": {
        (32, 32, 8, 1): (64, 0, 0),
        (16, 32, 8, 1): (64, 0, 0),
        (16, 16, 8, 1): (512, 384, 448),
        (8, 16, 8, 1): (512, 512, 512),
    },
    "dkv": {
        (32, 32, 8, 1): (64, 0, 0),
        (16, 32, 8, 1): (64, 0, 0),
        (16, 16, 8, 1): (512, 384, 448),
        (16, 8, 8, 1): (512, 512, 512),
    },
}


def is_asynchronous(kind: str, tile: Tile, target: Target, dtype: str) -> bool:
    """Whether the tile's matrix products read shared memory by themselves (wgmma, tcgen05); mma.sync and FMA read registers.

    Bulk copies pay only then. Where a product reads registers, Triton 3.6 moves what a bulk copy brought through more of them than there
    are: dq_kernel spills 1296 bytes instead of none on sm_120 (64x64, 8 warps, D 128, causal).
    """
    return target.capability // 10 in (9, 10) and dtype != "float32" and tile.kept(kind) >= 64 and tile.warps % 4 == 0


def smem_bytes(kind: str, tile: Tile, target: Target, dtype: str, head_dim: int, head_dim_v: int, precision: str = "fast") -> int:
    """Shared memory of a kernel ("forward", "dq" or "dkv") with this tile: what Triton 3.6 allocates, or somewhat more."""
    chunks, chunks_v = chunked(head_dim), chunked(head_dim_v)
    both = sum(chunks) + sum(chunks_v)
    kept = tile.kept(kind) * (sum(chunks) if kind == "forward" else both)
    streamed = tile.streamed(kind) * both
    if is_asynchronous(kind, tile, target, dtype):
        copies = _copies_on_blackwell(kind, tile, chunks, chunks_v) if target.capability >= 100 else 0
        elements, barriers = kept + tile.stages * streamed + copies, KIB
    else:
        pipelined, in_turn = _elements_for_registers(kind, tile, chunks, chunks_v, dtype, precision)
        elements, barriers = kept + max((tile.stages - 1) * streamed + pipelined if tile.stages > 1 else 0, in_turn), 256
    statistics = 8 * tile.rows * tile.stages if kind == "dkv" else 0  # lse and row sum of each query
    return elements * ELEMENT_BYTES[dtype] + statistics + barriers


def _copies_on_blackwell(kind: str, tile: Tile, chunks: tuple[int, ...], chunks_v: tuple[int, ...]) -> int:
    """Elements besides what is kept and streamed."""
    both, pieces = sum(chunks) + sum(chunks_v), max(len(chunks), len(chunks_v))
    if kind == "forward":  # groups of warps exchange parts of a tile
        return KIB * tile.warps if tile.warps > 4 else 0
    if kind == "dq":  # keys a second time, for the product that reads them along the other axis
        return tile.columns * (sum(chunks) if pieces == 1 else (pieces - 1) * both)
    return tile.rows * pieces * both  # likewise queries and output gradients


def _elements_for_registers(
    kind: str, tile: Tile, chunks: tuple[int, ...], chunks_v: tuple[int, ...], dtype: str, precision: str
) -> tuple[int, int]:
    """Elements besides those kept: of a pipelined loop, besides the streamed ones; and where the rows are no multiples of 16 bytes, all.

    Weights change from the layout of one product to that of the next through shared memory, but in a pipelined loop not where both divide
    the warps alike. Without pipelining, keys and values of a forward round take turns, and dkv_kernel turns queries over by a copy; 32-bit
    ones as well, for TF32.
    """
    width, width_v = sum(chunks), sum(chunks_v)
    widest_piece = max({"forward": chunks_v, "dq": chunks, "dkv": chunks + chunks_v}[kind])
    weights = tile.rows * tile.columns * (2 if kind == "dkv" else 1)
    pipelined = weights if tile.kept(kind) < widest_piece else 0
    if kind == "forward":
        return pipelined, tile.columns * max(width, width_v) + weights
    in_turn = tile.streamed(kind) * (width + width_v)
    if kind == "dq" or (dtype == "float32" and precision != "tf32"):
        return pipelined, in_turn + weights
    turned = tile.rows * max(width, width_v)
    return pipelined, in_turn + (weights + turned if dtype == "float32" else max(weights, turned))


def candidates(
    kind: str,
    target: Target,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    precision: str = "fast",
    scratch: Callable[[Tile], int] = lambda tile: 0,
) -> list[Tile]:
    """Tiles of "forward", "dq" or "dkv" that fit the target, best guess first, at most `MOST_CANDIDATES`.

    `scratch` is the shared memory that a score function takes besides.

    Those that keep too few warps on an SM, because shared memory has no room for a second block, come last.
    """
    pieces = max(len(chunked(head_dim)), len(chunked(head_dim_v)))
    listed = [
        Tile(*numbers) for numbers, widest in _table(target, dtype)[kind].items() if (head_dim + head_dim_v) / 2 <= widest[pieces - 1]
    ]
    needed = {tile: smem_bytes(kind, tile, target, dtype, head_dim, head_dim_v, precision) + scratch(tile) for tile in listed}
    fitting = [tile for tile in listed if needed[tile] <= target.smem_bytes]
    fitting.sort(key=lambda tile: target.smem_bytes_per_sm // (needed[tile] + KIB) * tile.warps < _BUSY_WARPS)
    largest = max((tile.rows * tile.columns for tile in fitting), default=0)
    return [tile for tile in fitting if tile.rows * tile.columns > largest // _HOPELESS][:MOST_CANDIDATES]


def known_tiles(kind: str, target: Target, dtype: str) -> int:
    """How many tiles `candidates` chooses from: those that it leaves out would spill registers, overflow shared memory, or lose."""
    return len(_table(target, dtype)[kind])


def _table(target: Target, dtype: str) -> dict[str, _Table]:
    if dtype == "float32":
        return _FLOAT32
    return {9: _HOPPER, 10: _BLACKWELL}.get(target.capability // 10, _MMA_SYNC)
