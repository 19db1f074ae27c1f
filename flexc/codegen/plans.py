"""What all plans have in common: they are data, and print as a table."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Listed:
    """Prints a line for each field."""

    def __str__(self) -> str:
        return "\n".join(f"{f.name:16} {getattr(self, f.name)}" for f in fields(self))
