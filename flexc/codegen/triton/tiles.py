"""Tiles of the Triton kernels: which are worth trying on a class of architectures, and the shared memory that one needs.

The tables are what ptxas says of compiled kernels (Triton 3.6; dense, causal, and causal with soft capping in bfloat16; strides that are
multiples of 16): a tile is listed up to the head dim where registers begin to spill. Of what neither spills nor overflows shared memory,
the tables prefer what was timed (Hopper), else the most reuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexc.target import KIB, Target

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
MOST_CANDIDATES = 6
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
