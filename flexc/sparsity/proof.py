"""How the blocks of a map were decided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Proof:
    """What decided the blocks of a map, as numbers of blocks.

    Attributes:
        bounds: bounds alone.
        mixed: partial, because a periodic condition is mixed in every block.
        sampled: partial, by one allowed and one forbidden pair.
        evaluated: all their pairs.
        undecided: nothing; they are partial until something is proved.
    """

    bounds: int = 0
    mixed: int = 0
    sampled: int = 0
    evaluated: int = 0
    undecided: int = 0

    def __str__(self) -> str:
        named = ("by bounds", self.bounds), ("by a period", self.mixed), ("by samples", self.sampled), ("by evaluation", self.evaluated)
        return ", ".join(f"{count:,} {how}" for how, count in (*named, ("undecided", self.undecided)))
