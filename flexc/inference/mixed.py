"""Packed queries against a paged cache: prefill of some sequences and decoding of others in one call, as serving engines issue them.

On a GPU the split kernel runs tiles of packed rows, each of one sequence, which a table names. The table is made on the device from the
boundaries, so that one CUDA graph serves other boundaries and lengths with as many tokens. On the CPU the pages are gathered, and the
sequences are those of `varlen_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flexc import frontend, settings
from flexc.errors import InputError, ShapeError
from flexc.extents import extents_of, refuse_wrong_sizes
from flexc.inference.paged import PagedKV, attend_cache, refuse_queries
from flexc.inference.places import Positions, refuse_bad_position
from flexc.inference.varlen import Sequences, Tokens, kept_for, moved_by, refuse_bad_boundaries, refuse_boundary_values, tokens_of
from flexc.map_making import version_of

if TYPE_CHECKING:
    from flexc.api import Kernel

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class PackedQueries:
    """Queries of several sequences one after another.

    Attributes:
        cu: int32 or int64 [B + 1]: where each sequence begins, and where the last ends.
        total: tokens of all together, those after the last sequence included.
    """

    cu: Tensor
    total: int

    @property
    def count(self) -> int:
        """Of sequences."""
        return len(self.cu) - 1

    def tiles(self, group: int, rows: int) -> Tensor:
        """int32 [n, 4], what each tile of the split kernel has: sequence, first packed row in it, first token of it, packed rows of it.

        There are as many tiles as any boundaries can need; those left over begin behind the last row of a sequence. Boundaries that cannot
        be lead to no token outside of the queries.
        """
        return kept_for(self.cu, ("tiles", self.total, group, rows), lambda: self._tiles(group, rows))

    def _tiles(self, group: int, rows: int) -> Tensor:
        cu = self.cu.clamp(0, self.total)
        length = cu.diff().clamp(min=0) * group
        needed = (length + rows - 1) // rows
        ends = needed.cumsum(0)
        number = torch.arange(self.total * group // rows + self.count, dtype=ends.dtype, device=cu.device)
        sequence = torch.searchsorted(ends, number, right=True).clamp(max=self.count - 1)
        first = (number - (ends - needed)[sequence]) * rows
        return torch.stack([sequence, first, cu[sequence], length[sequence]], 1).int()

    def positions(self, lengths: Tensor | None, q_offset: int | Tensor | None) -> Positions:
        """Of the first query of each sequence, and how many keys it has."""
        assert lengths is not None
        return Positions(last_tokens(lengths, self.cu) if q_offset is None else q_offset, lengths)

    def sequences(self, lengths: Tensor, capacity: int, q_offset: int | Tensor | None) -> Sequences:
        """Where the tokens belong, with keys [B * capacity] of which each sequence has so many."""
        return Sequences(self.count, (self.cu, self.cu), self._placed(lengths, q_offset), self._keys(lengths, capacity))

    def _placed(self, lengths: Tensor, q_offset: int | Tensor | None) -> Tokens:
        if q_offset is not None:
            return moved_by(q_offset, tokens_of(self.cu, self.total, self.count), self.count)
        # All layers of a step bring the same boundaries and lengths.
        state = version_of(lengths), version_of(self.cu), self.total
        found = _placed_last.get(lengths)
        if found is not None and found[0] == state and None not in state:
            return found[1]
        tokens = moved_by(last_tokens(lengths, self.cu), tokens_of(self.cu, self.total, self.count), self.count)
        _placed_last[lengths] = state, tokens, self.cu  # held, so that no other boundaries come to lie there
        return tokens

    def _keys(self, lengths: Tensor, capacity: int) -> Tokens:
        def make() -> Tokens:
            places = torch.arange(capacity, device=lengths.device, dtype=torch.int32)
            number = torch.arange(self.count, device=lengths.device, dtype=torch.int32)[:, None]
            of_none = self.count + 1  # as queries past the last sequence are of `count`
            return Tokens(torch.where(places < lengths[:, None], number, of_none).flatten(), places.repeat(self.count))

        return kept_for(lengths, ("keys", capacity), make)


_placed_last: WeakIdKeyDictionary = WeakIdKeyDictionary()  # lengths → the state of lengths and boundaries, tokens, boundaries


def last_tokens(lengths: Tensor, cu: Tensor) -> Tensor:
    """Positions from which on queries are the last tokens of their sequences."""
    return torch.clamp(lengths - cu.diff().int(), min=0)


def attend_mixed(
    kernel: Kernel, q: Tensor, cache: PagedKV, v: Any, cu_q: Any, cu_k: Any, scale: float | None, q_offset: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """out [1, Hq, total, Dv] and lse of packed queries on a paged cache; `varlen_attention` says what the arguments are."""
    for name, value in (("v", v), ("cu_seqlens_k", cu_k)):
        if value is not None:
            raise InputError(f"{name} was given beside a PagedKV, which has its own; expected varlen_attention(q, cache, cu_seqlens_q=...)")
    if not isinstance(q, Tensor) or q.dim() != 3:
        raise ShapeError(f"q is {list(q.shape) if isinstance(q, Tensor) else type(q).__name__}; expected [total, heads, head_dim]")
    refuse_bad_boundaries("cu_seqlens_q", cu_q, q.device)
    packed, q = PackedQueries(cu_q, q.shape[0]), q.transpose(0, 1)[None]
    refuse_queries(q, cache, 1)
    if packed.count != len(cache.lengths):
        raise ShapeError(f"cu_seqlens_q has {packed.count} sequences and the cache {len(cache.lengths)}; expected equally many")
    refuse_bad_position("q_offset", q_offset, packed.count, q.device)
    trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    sizes = (packed.count, q.shape[1])
    refuse_wrong_sizes(extents_of(trace.graph), trace.graph, binding.tensors, *sizes, "cu_seqlens_q and q have")
    if settings.current().check:
        cache.refuse_values()
        refuse_boundary_values("cu_seqlens_q", cu_q, packed.total)
        if q_offset is None:
            cache.refuse_overlaps(cu_q.diff())
    return attend_cache(kernel, q, cache, scale, q_offset, "a paged cache", packed)
