"""When a call is a decoding step, and the launch that runs it: few queries against many keys, split over the keys.

The query heads that share a key/value head become rows of one tile, as a rewriting of the graph: packed row r is query token r // group of
head r % group. Every function of `head` and `q_idx` then follows, at its own rate, and so does the block map.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flexc import backends

if TYPE_CHECKING:
    from flexc.backends import Options, Shapes
    from flexc.launch import Launch
    from flexc.pipeline import Artifact

Tensor = torch.Tensor

MOST_QUERIES = 128  # tokens; past that a tile of the ordinary kernel is full
LEAST_KEYS = 256  # fewer are one program's work in any case
_LEAST_RATIO = 4  # keys for each query
_TALL = 64  # packed rows past which the ordinary kernel's products are as large, and its copies faster
_TALLER = 4 * _TALL  # past which the ordinary kernel and a copy of all keys take less time


def is_decoding(shapes: Shapes, sm_count: int, batch_invariant: bool = False, hides_rest: bool = False) -> bool:
    """Whether splitting the keys is worth a second kernel.

    Args:
        batch_invariant: decide by the queries alone: the number of keys may be that of another sequence.
        hides_rest: keys past some length may hold anything, which the ordinary kernel is spared by a copy of all of them.
    """
    q_len, kv_len = shapes.q_len, shapes.kv_len
    if batch_invariant:
        return 1 <= q_len <= MOST_QUERIES
    if not 1 <= q_len <= MOST_QUERIES or kv_len < max(LEAST_KEYS, _LEAST_RATIO * q_len):
        return False
    tiles = shapes.batch * shapes.heads_q * -(-q_len // _TALL)
    return shapes.group * q_len <= (_TALLER if hides_rest else _TALL) or tiles < 2 * sm_count


def of_decoding(artifact: Artifact, shapes: Shapes, options: Options, hides_rest: bool = False) -> tuple[Artifact, Shapes] | None:
    """What runs calls of these sizes that need no gradient, and the sizes as its block map sees them; None for what runs others as well."""
    if artifact.backend is not backends.TRITON and artifact.backend is not backends.HOPPER:
        return None
    if options.max_scores:  # the split kernel keeps no largest scores
        return None
    if not is_decoding(shapes, artifact.target.sm_count, options.batch_invariant, hides_rest):
        return None
    return artifact.for_decoding(shapes, options), rows_of(shapes)


@lru_cache(maxsize=4096)
def rows_of(shapes: Shapes) -> Shapes:
    """The sizes of a call whose query heads are packed, as its block map sees them."""
    return replace(shapes, heads_q=shapes.heads_kv, q_len=shapes.q_len * shapes.group)


def decoding(launch: Launch, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...], hides_rest: bool = False) -> Launch:
    """The launch for a call that needs no gradient, of the split kernel where it is a decoding step; else the same launch."""
    if launch.shapes.q_len > MOST_QUERIES:  # most calls: no more is looked at
        return launch
    if torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v, *tensors)]):
        return launch
    found = of_decoding(launch.artifact, launch.shapes, launch.options, hides_rest)
    return launch if found is None else replace(launch, artifact=found[0], shapes=found[1], maps_by_kernels=True)
