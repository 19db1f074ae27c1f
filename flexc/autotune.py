"""`autotune=True`: time the plausible tiles of each kernel on the real shapes and block structure, and keep the fastest.

Winners are kept in memory and in the disk cache, by everything that can change them: graph, target, head dims, dtype, ratio of heads,
lengths by powers of two, share of blocks visited in tenths, versions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexc import backends, pipeline, settings
from flexc.backends import Options
from flexc.codegen.triton import Tile, candidates
from flexc.errors import FlexcError
from flexc.launch import Launch
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of

Tensor = torch.Tensor

KERNELS = ("forward", "dq", "dkv")
_winners: dict[str, tuple[tuple[str, Tile], ...]] = {}


def tuned(launch: Launch, trace: Any, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Launch:
    """The launch with its tiles replaced by the fastest ones; the same launch where there is nothing to choose (the CPU, the interpreter)."""
    if launch.artifact.backend is not backends.TRITON or q.device.type != "cuda":
        return launch
    key = _key(launch, tensors, q.device)
    tiles = _winners.get(key) or _stored(key)
    if tiles is None:
        tiles = _search(launch, trace, q.detach(), k.detach(), v.detach(), [t.detach() for t in tensors])
        cache_of(settings.current()).put(key, {}, {"tiles": [[name, dataclasses.astuple(tile)] for name, tile in tiles]})
    _winners[key] = tiles
    return _with_tiles(launch, trace, dict(tiles))


def _key(launch: Launch, tensors: Sequence[Tensor], device: torch.device) -> str:
    shapes = launch.shapes
    maps = launch.block_maps(tensors, device, ("forward",))
    visited = round(10 * (1 - maps["forward"].sparsity())) if maps else 10
    lengths = [math.ceil(math.log2(max(n, 1))) for n in (shapes.q_len, shapes.kv_len, shapes.batch * shapes.heads_q)]
    return key_of(kind="autotune", artifact=launch.artifact.key, lengths=lengths, visited=visited)


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
    tuned_artifact = pipeline.artifact_for(
        trace, launch.shapes, artifact.target, artifact.backend, artifact.reason, options, launch.title
    )
    return dataclasses.replace(launch, artifact=tuned_artifact, options=options)


def _search(launch: Launch, trace: Any, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor]) -> tuple[tuple[str, Tile], ...]:
    """Each kernel's tile alone, the others at their defaults: their times do not depend on each other."""
    shapes, target = launch.shapes, launch.artifact.target
    best: dict[str, Tile] = {}
    for kernel in KERNELS:
        choices = candidates(kernel, target, shapes.dtype_name, shapes.head_dim, shapes.head_dim_v)
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

    return float(triton.testing.do_bench(call, warmup=5, rep=30, return_mode="median"))


def _is_refusal(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources) or "PTXASError" in type(error).__name__
