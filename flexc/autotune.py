"""`autotune=True`: time the plausible tiles of each kernel on the real shapes and block structure, and keep the fastest.

Winners are kept in memory and in the disk cache, by everything that can change them: graph, target, head dims, dtype, ratio of heads,
lengths by powers of two, share of blocks visited in tenths, versions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flexc import backends, pipeline, settings
from flexc.backends import Options
from flexc.codegen.triton import Tile, candidates
from flexc.errors import FlexcError
from flexc.launch import Launch
from flexc.pipeline import Artifact
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of
from flexc.sparsity import BlockMap

Tensor = torch.Tensor

KERNELS = ("forward", "dq", "dkv")
_tuned: WeakKeyDictionary[Artifact, dict[tuple[int, ...], tuple[Artifact, Options]]] = WeakKeyDictionary()
_visited_tenths: WeakKeyDictionary[BlockMap, int] = WeakKeyDictionary()


def tuned(launch: Launch, trace: Any, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Launch:
    """The launch with the fastest tiles; the same launch where there is nothing to choose (the CPU, the interpreter, no pairs)."""
    if launch.artifact.backend is not backends.TRITON or q.device.type != "cuda":
        return launch
    if launch.has_no_pairs:
        return launch
    sizes = _sizes(launch, tensors, q.device)
    known = _tuned.setdefault(launch.artifact, {})
    if sizes not in known:
        key = key_of(kind="autotune", artifact=launch.artifact.key, sizes=sizes)
        tiles = _stored(key)
        if tiles is None:
            tiles = _search(launch, trace, q.detach(), k.detach(), v.detach(), [t.detach() for t in tensors])
            cache_of(settings.current()).put(key, {}, {"tiles": [[name, dataclasses.astuple(tile)] for name, tile in tiles]})
        winner = _with_tiles(launch, trace, dict(tiles))
        known[sizes] = winner.artifact, winner.options
    artifact, options = known[sizes]
    return dataclasses.replace(launch, artifact=artifact, options=options)


def _sizes(launch: Launch, tensors: Sequence[Tensor], device: torch.device) -> tuple[int, ...]:
    """What of a call's sizes decides the winner: lengths by powers of two, and the share of blocks visited, in tenths."""
    shapes = launch.shapes
    maps = launch.block_maps(tensors, device, ("forward",))
    visited = _tenths(maps["forward"]) if maps else 10
    return *(math.ceil(math.log2(n)) for n in (shapes.q_len, shapes.kv_len, shapes.batch * shapes.heads_q)), visited


def _tenths(blocks: BlockMap) -> int:
    """Counted once for each map: counting waits for the device."""
    if blocks not in _visited_tenths:
        _visited_tenths[blocks] = round(10 * blocks.visited_share())
    return _visited_tenths[blocks]


def _stored(key: str) -> tuple[tuple[str, Tile], ...] | None:
    entry = cache_of(settings.current()).get(key)
    return None if entry is None else tuple((name, Tile(*numbers)) for name, numbers in entry.meta["tiles"])


def _with_tiles(launch: Launch, trace: Any, tiles: dict[str, Tile]) -> Launch:
    artifact = launch.artifact
    options = Options(
        precision=launch.options.precision,
        deterministic=launch.options.deterministic,
        tiles=tuple(sorted(tiles.items())),
    )
    tuned_artifact = pipeline.artifact_for(trace, launch.shapes, artifact.target, artifact.backend, artifact.reason, options, launch.title)
    return dataclasses.replace(launch, artifact=tuned_artifact, options=options)


def _search(launch: Launch, trace: Any, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor]) -> tuple[tuple[str, Tile], ...]:
    """Each kernel's tile alone, the others at their defaults: their times do not depend on each other."""
    shapes, target = launch.shapes, launch.artifact.target
    best: dict[str, Tile] = {}
    for kernel in KERNELS:
        choices = candidates(kernel, target, shapes.dtype_name, shapes.head_dim, shapes.head_dim_v, launch.options.precision)
        times: dict[Tile, float] = {}
        for tile in choices:
            trial = _with_tiles(launch, trace, {kernel: tile})
            try:
                times[tile] = _milliseconds(_call(trial, kernel, q, k, v, tensors))
            except FlexcError:
                raise
            except Exception as error:
                # A tile that the compiler or the device refuses is no candidate; anything else is a bug and must be seen.
                if not _is_refusal(error):
                    raise
        if times:
            best[kernel] = min(times, key=lambda tile: times[tile])
    return tuple(sorted(best.items()))


def _call(trial: Launch, kernel: str, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor]) -> Callable[[], object]:
    if kernel == "forward":
        return lambda: trial.forward(q, k, v, tensors)
    out, lse = trial.forward(q, k, v, tensors)
    dout = torch.randn_like(out)
    return lambda: trial.backward(q, k, v, out, lse, dout, None, tensors)


def _milliseconds(call: Callable[[], object]) -> float:
    import triton.testing

    median: Any = triton.testing.do_bench(call, warmup=5, rep=30, return_mode="median")
    return float(median)


def _is_refusal(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources) or "PTXASError" in type(error).__name__
