"""`autotune=True`: time the plausible tiles of each kernel, alone, on the real shapes and block structure, and keep the fastest.

Which tiles are plausible the model of resources says (`codegen.triton.tiles`), or the table in `codegen.cute.plan`; one that the compiler
or the device refuses all the same is skipped and counted. `kernel.reason` tells what was timed, left out and refused. Winners are kept in
memory and in the disk cache, by everything that can change them: graph, target, head dims, dtype, ratio of heads, lengths by powers of two,
share of blocks visited in tenths, versions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flexc import backends, pipeline, settings
from flexc.backends import Options
from flexc.codegen import cute as cute_codegen
from flexc.codegen.triton import Tile, candidates, known_tiles
from flexc.errors import FlexcError, ToolchainError
from flexc.launch import MAPS, Launch
from flexc.pipeline import Artifact
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of
from flexc.sparsity import BlockMap

Tensor = torch.Tensor
Timer = Callable[[Launch, str], float]  # milliseconds of one kernel of a launch

KERNELS = ("forward", "dq", "dkv")
_tuned: WeakKeyDictionary[Artifact, dict[tuple[int, ...], tuple[Artifact, Options]]] = WeakKeyDictionary()
_first_tenths: WeakKeyDictionary[Artifact, dict[tuple[int, ...], int]] = WeakKeyDictionary()
_visited_tenths: WeakKeyDictionary[BlockMap, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Space:
    """The tiles of one kernel that may be the fastest.

    Attributes:
        kernel: as the options name its tile.
        tiles: best guess first; left_out: how many the model of resources ruled out before they were compiled.
        kind: their class.
    """

    kernel: str
    tiles: tuple[Any, ...]
    left_out: int
    kind: type


def spaces(launch: Launch) -> list[Space]:
    """What there is to choose, kernel by kernel."""
    artifact, shapes = launch.artifact, launch.shapes
    target = artifact.target
    if artifact.backend.name == "triton":
        sizes = (target, shapes.dtype_name, shapes.head_dim, shapes.head_dim_v, launch.options.precision)
        listed = {kernel: tuple(candidates(kernel, *sizes)) for kernel in KERNELS}
        return [Space(k, tiles, known_tiles(k, target, shapes.dtype_name) - len(tiles), Tile) for k, tiles in listed.items()]
    plan, backward = artifact.plan, artifact.for_backward(shapes, launch.options)
    tiles = cute_codegen.candidates(artifact.lowered, target, plan.padded_dim, plan.padded_dim_v, plan.group)
    found = [Space("forward", tuple(tiles), 0, cute_codegen.Tile)]
    if backward.backend.name == "cute":
        plan = backward.plan
        kernel = cute_codegen.print_backward(backward.lowered, approximate=plan.approximate, exact=plan.exact)
        asked = {"has_mask": plan.walk == "runs", "deterministic": plan.deterministic}
        tiles = cute_codegen.backward_candidates(kernel, target, plan.padded_dim, plan.padded_dim_v, **asked)
        found.append(Space("backward", tuple(tiles), 0, cute_codegen.BackwardTile))
    return found


@dataclass(frozen=True)
class Search:
    """What was found for one kernel.

    Attributes:
        kernel: "forward", "dq" or "dkv" of triton, "forward" or "backward" of cute.
        times: of each tile that ran, in milliseconds.
        refused: tiles that the compiler or the device refused, and what it said.
        left_out: tiles that the model of resources ruled out before they were compiled.
    """

    kernel: str
    times: tuple[tuple[Any, float], ...]
    refused: tuple[tuple[Any, str], ...]
    left_out: int

    @property
    def best(self) -> Any:
        """The fastest."""
        return min(self.times, key=lambda pair: pair[1])[0]

    def __str__(self) -> str:
        counts = f"{len(self.times)} timed, {self.left_out} left out" + (f", {len(self.refused)} refused" if self.refused else "")
        return f"{self.kernel} {self.best} ({counts})"


def tuned(launch: Launch, trace: Any, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Launch:
    """The launch with the fastest tiles; the same launch where there is nothing to choose (the CPU, the interpreter, no pairs)."""
    if launch.artifact.backend not in (backends.TRITON, backends.HOPPER, backends.CUTE) or q.device.type != "cuda":
        return launch
    if launch.has_no_pairs:
        return launch
    return chosen(launch, trace, tensors, q.device, lambda: _Stopwatch(launch, q, k, v, tensors))


def chosen(launch: Launch, trace: Any, tensors: Sequence[Tensor], device: torch.device, timer: Callable[[], Timer]) -> Launch:
    """The launch with the fastest tiles, from memory, from disk, or by a timer made for the purpose."""
    sizes = _sizes(launch, tensors, device)
    known = _tuned.setdefault(launch.artifact, {})
    if sizes not in known:
        searches = _searched(launch, trace, sizes, timer)
        winner = with_tiles(launch, trace, {s.kernel: s.best for s in searches}, "; ".join(map(str, searches)))
        known[sizes] = winner.artifact, winner.options
    artifact, options = known[sizes]
    return dataclasses.replace(launch, artifact=artifact, options=options)


def _searched(launch: Launch, trace: Any, sizes: tuple[int, ...], timer: Callable[[], Timer]) -> list[Search]:
    store = cache_of(settings.current())
    key = key_of(kind="autotune", artifact=launch.artifact.key, sizes=sizes)
    entry = store.get(key)
    if entry is not None:
        kinds = {space.kernel: space.kind for space in spaces(launch)}
        return [_from_json(saved, kinds[saved["kernel"]]) for saved in entry.meta["searches"]]
    time = timer()
    found = [search(launch, trace, space.kernel, time) for space in spaces(launch)]
    store.put(key, {}, {"searches": [dataclasses.asdict(s) for s in found]})
    return found


def search(launch: Launch, trace: Any, kernel: str, time: Timer) -> Search:
    """Each plausible tile of one kernel, the others at their defaults: their times do not depend on each other.

    Raises:
        ToolchainError: every tile is refused; says why, for each.
    """
    space = next(space for space in spaces(launch) if space.kernel == kernel)
    times: list[tuple[Any, float]] = []
    refused: list[tuple[Any, str]] = []
    for tile in space.tiles:
        try:
            times.append((tile, time(with_tiles(launch, trace, {kernel: tile}), kernel)))
        except Exception as error:
            if not _is_refusal(error):
                raise
            refused.append((tile, _first_line(error)))
    if not times:
        reasons = "".join(f"\n  {tile}: {reason}" for tile, reason in refused)
        arch = launch.artifact.target.arch
        raise ToolchainError(f"no tile of the {kernel} kernel of {launch.title} compiles for {arch}, of {len(space.tiles)}:{reasons}")
    return Search(kernel, tuple(times), tuple(refused), space.left_out)


def with_tiles(launch: Launch, trace: Any, tiles: dict[str, Any], tuning: str = "") -> Launch:
    """The launch with other tiles; `tuning` becomes part of the reason."""
    artifact = launch.artifact
    options = dataclasses.replace(launch.options, tiles=tuple(sorted(tiles.items())))
    reason = f"{artifact.reason}; tiles: {tuning}" if tuning else artifact.reason
    made = pipeline.artifact_for(trace, launch.shapes, artifact.target, artifact.backend, reason, options, launch.title)
    return dataclasses.replace(launch, artifact=made, options=options)


def alone(launch: Launch, kernel: str) -> Launch:
    """The launch with a module of its own, in which the other main kernels do nothing, and are not compiled; cute's are alone as they are.

    The row sums, which both kernels of the backward pass read, still run: they cost little, and the same beside every tile.
    """
    artifact = launch.artifact
    if artifact.backend.name != "triton":
        return launch
    module = artifact.fresh_module()
    for other in set(KERNELS) - {kernel}:
        setattr(module, f"{other}_kernel", _Skipped())
    return dataclasses.replace(launch, artifact=dataclasses.replace(artifact, _module=module))


class _Skipped:
    """A kernel whose launch does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


class _Stopwatch:
    """Times kernels on the inputs of a call. The backward kernels get the output of the launch as it was."""

    def __init__(self, launch: Launch, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]):
        self.launch, self.inputs, self.tensors = launch, (q.detach(), k.detach(), v.detach()), [t.detach() for t in tensors]
        self.results: tuple[Tensor, Tensor, Tensor] | None = None  # out, lse, the gradient of out

    def __call__(self, trial: Launch, kernel: str) -> float:
        import triton.testing

        median: Any = triton.testing.do_bench(self.call(alone(trial, kernel), kernel), warmup=5, rep=30, return_mode="median")
        return float(median)

    def call(self, trial: Launch, kernel: str) -> Callable[[], object]:
        """What to time."""
        if kernel == "forward":
            return lambda: trial.forward(*self.inputs, self.tensors)
        if self.results is None:
            out, lse = self.launch.forward(*self.inputs, self.tensors)
            self.results = out, lse, torch.randn_like(out)
        out, lse, dout = self.results
        return lambda: trial.backward(*self.inputs, out, lse, dout, None, self.tensors)


def _sizes(launch: Launch, tensors: Sequence[Tensor], device: torch.device) -> tuple[int, ...]:
    """What of a call's sizes decides the winner: lengths by powers of two, and the share of blocks visited, in tenths."""
    shapes = launch.shapes
    block = launch.artifact.map_blocks.get("forward")
    lengths = tuple(math.ceil(math.log2(n)) for n in (shapes.q_len, shapes.kv_len, shapes.batch * shapes.heads_q))
    if block is None:
        return *lengths, 10
    if device.type != "cuda":
        return *lengths, _tenths(MAPS.blocks(launch, block, tensors, device))
    # Counting waits for the device: what the first call of these lengths saw decides for those whose captured tensors change.
    known = _first_tenths.setdefault(launch.artifact, {})
    if lengths not in known:
        known[lengths] = _tenths(MAPS.blocks(launch, block, tensors, device))
    return *lengths, known[lengths]


def _tenths(blocks: BlockMap) -> int:
    """Counted once for each map."""
    if blocks not in _visited_tenths:
        _visited_tenths[blocks] = round(10 * blocks.visited_share())
    return _visited_tenths[blocks]


def _from_json(saved: dict[str, Any], kind: type) -> Search:
    def pairs(listed: Any) -> tuple:
        return tuple((kind(**tile), value) for tile, value in listed)

    return Search(saved["kernel"], pairs(saved["times"]), pairs(saved["refused"]), saved["left_out"])


def _is_refusal(error: Exception) -> bool:
    """Whether the compiler or the launch refused one tile, for which they raise whatever they like; not so for faults of the device."""
    device_faults = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return not isinstance(error, (FlexcError, *device_faults)) and "CUDA error" not in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")
