"""One kernel on one set of shapes: the artifact, its block maps, and the calls into the generated module."""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc import settings
from flexc.backends import Call, Options, Shapes
from flexc.gradient_sums import refuse_large_sums
from flexc.map_making import MapMaker, MapSizes, is_capturing, stream_of, version_of
from flexc.pipeline import Artifact
from flexc.runtime.graph_pools import outside_of_pools
from flexc.sparsity import BlockMap

Tensor = torch.Tensor


@dataclass(slots=True)
class Launch:
    """Everything that stays the same between the forward and the backward pass of a call.

    Attributes:
        maps_by_kernels: find the blocks on the device whatever FLEXC_DEVICE_MAPS says: positions and lengths change with every step.
    """

    artifact: Artifact
    shapes: Shapes
    scale: float
    scalars: tuple[int | float, ...]
    options: Options
    title: str
    maps_by_kernels: bool = False
    remembered: Remembered = field(default_factory=lambda: Remembered(), init=False, compare=False, repr=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq]; and the largest scores, like lse, if the options ask for them."""
        if self.has_no_pairs:
            out = q.new_zeros((*q.shape[:3], v.shape[3]))
            lse = torch.full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
            return (out, lse, lse.clone()) if self.options.max_scores else (out, lse)
        device = q.device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():  # rare; `backends.on_device` would cost every call
            with torch.cuda.device(device):
                return self.forward(q, k, v, tensors)
        artifact = self.artifact
        compiling = self._compiling(artifact, "forward", tensors, device) if "forward" in artifact.unlaunched else ()
        maps = self._walked_forward(tensors, device) if artifact.map_blocks else {}
        again = self.remembered.again
        if again is not None:
            results = again(q, k, v, self.scale, tensors, self.scalars, maps["forward"].row_walk() if maps else None)
            if results is not None:
                return results
        for thread in compiling:
            thread.join()
        call = Call(q, k, v, self.scale, tuple(tensors), self.scalars)
        if artifact.backend.record is not None and self.remembered.is_worth_recording() and settings.current().override is None:
            results, self.remembered.again = artifact.backend.record(artifact.module, call, maps)
            return results
        return artifact.backend.forward(artifact.module, call, maps)

    def _walked_forward(self, tensors: Sequence[Tensor], device: torch.device) -> dict[str, BlockMap]:
        """What the forward kernel walks. A map that no captured value decides is remembered for as long as `MAPS` keeps it."""
        known = self.remembered.map
        if known is not None and known[1] == stream_of(device) and not (known[1] and is_capturing()):
            kept = known[0]
            blocks = kept.blocks
            if blocks is not None:
                kept.is_used = True
                return {"forward": blocks}
        maps = self._walked(self.block_maps(tensors, device, ("forward",)), device)
        alone = self.artifact.mask_alone
        if "forward" in maps and not alone.tensor_slots and not alone.scalar_slots:
            kept = MAPS.kept(self, self.artifact.map_blocks["forward"], device)
            self.remembered.map = None if kept is None else (kept, stream_of(device))
        return maps

    @staticmethod
    def _walked(maps: dict[str, BlockMap], device: torch.device) -> dict[str, BlockMap]:
        """The maps, with what GPU kernels walk of them made: it is kept, too."""
        if device.type == "cuda":
            for name, blocks in maps.items():
                side, walk = ("rows", blocks.row_walk) if name in ("forward", "dq") else ("columns", blocks.column_walk)
                if not blocks.has_walk(side):
                    outside_of_pools(walk, device)
        return maps

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and each captured tensor, in their dtypes; None for a captured tensor without one."""
        if self.has_no_pairs:
            return tuple(torch.zeros_like(x) for x in (q, k, v, *tensors))
        call = self._call(q, k, v, tensors)
        artifact = self.artifact.for_backward(self.shapes, self.options)
        if self.options.deterministic:
            refuse_large_sums(artifact, tensors)
        compiling = self._compiling(artifact, "backward", tensors, q.device) if "backward" in artifact.unlaunched else ()
        maps = self._walked(self.block_maps(tensors, q.device, artifact=artifact), q.device)
        for thread in compiling:
            thread.join()
        dq, dk, dv, gradients = artifact.backend.backward(artifact.module, call, maps, out, lse, dout, dlse)
        return dq, dk, dv, *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))

    def _compiling(self, artifact: Artifact, direction: str, tensors: Sequence[Tensor], device: torch.device) -> Sequence[threading.Thread]:
        from flexc.side_by_side import begin

        return begin(artifact, direction, self.shapes, tensors, self.scalars, device)

    @property
    def has_no_pairs(self) -> bool:
        """No batch, no query or no key: there is nothing to launch."""
        return not (self.shapes.batch and self.shapes.q_len and self.shapes.kv_len)

    def block_maps(
        self, tensors: Sequence[Tensor], device: torch.device, kernels: Sequence[str] | None = None, artifact: Artifact | None = None
    ) -> dict[str, BlockMap]:
        """The maps that the module's kernels (or those named) walk, classified at first need; of another artifact's module if given."""
        blocks = (artifact or self.artifact).map_blocks
        return {name: MAPS.walked(self, block, tensors, device) for name, block in blocks.items() if kernels is None or name in kernels}

    def _call(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Call:
        return Call(q, k, v, self.scale, tuple(tensors), self.scalars)


@dataclass(slots=True, eq=False)
class Remembered:
    """What launches of one artifact, with inputs of the same sizes, strides and alignment, keep for the next one.

    Attributes:
        map: the forward kernel's map in `MAPS` and its stream, if no captured value decides it.
        again: launches the forward kernel without describing it anew, if the backend can; see `Backend.record`.
    """

    map: tuple[_Kept, int] | None = None
    again: Any = None
    _calls: int = 0

    def is_worth_recording(self) -> bool:
        """Whether a call that was not like the recorded one is recorded: never the first, which may stay the only one, and not for ever."""
        self._calls += 1
        return 1 < self._calls < 10


_FEW_KEPT = 16


@dataclass
class MapCache:
    """Block maps by mask, lengths and the *contents* of the captured tensors that the mask reads, as far as PyTorch counts versions.

    A tensor written to in place, or another tensor at the same address, is a miss. Kernels that share a mask share its maps.

    Attributes:
        most, most_bytes: past one of them the maps used least recently are dropped.
    """

    most: int = 256
    most_bytes: int = 2**28
    _kept: OrderedDict[tuple, _Kept] = field(default_factory=OrderedDict)
    _pinned: dict[tuple, BlockMap] = field(default_factory=dict)
    _made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def blocks(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device) -> BlockMap:
        """The map for a launch, to look at: with `block` = (query tokens, key tokens) per block."""
        found = self.walked(launch, block, tensors, device)
        found.make_rows()
        return found

    def walked(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device) -> BlockMap:
        """The map for a launch, for its kernels to walk. On a GPU each walk is made at first need, and nothing waits for the device.

        Raises:
            UnsupportedError: a CUDA graph is being captured, and finding the blocks would have to wait for the GPU.
        """
        alone, shapes = launch.artifact.mask_alone, launch.shapes
        read = [tensors[slot] for slot in alone.tensor_slots]
        scalars = [launch.scalars[slot] for slot in alone.scalar_slots]
        key = self.key_of(launch, block, read, device)
        versions = tuple(map(version_of, read))
        # What a graph replays must find the blocks of what the tensors hold then, not now; and what it writes is not there before.
        is_captured = device.type == "cuda" and is_capturing()
        with self._lock:
            found = self._captured_map(key) if is_captured else self._kept_map((key, stream_of(device)), read, versions)
        if found is not None:
            return found
        sizes = MapSizes(shapes.q_len, shapes.kv_len, shapes.batch, shapes.heads_q, block)
        how = {"device": device, "title": launch.title, "by_kernels": launch.maps_by_kernels}
        maker = MapMaker.of(alone.graph, sizes, tensors=read, **how)
        blocks = outside_of_pools(lambda: maker.map([tensor.detach() for tensor in read], scalars), device)
        if not is_captured:
            with self._lock:
                # Work on another stream does not wait for this one: each has maps of its own.
                self._kept[key, stream_of(device)] = _Kept(tuple(map(weakref.ref, read)), versions, blocks)
                self._evict()
        return blocks

    @staticmethod
    def key_of(launch: Launch, block: tuple[int, int], read: Sequence[Tensor], device: torch.device) -> tuple:
        """What tells its maps from others, with the tensors that the mask reads; equal to another's where its maps serve, too."""
        alone, shapes = launch.artifact.mask_alone, launch.shapes
        lengths = (shapes.batch, shapes.heads_q, shapes.q_len, shapes.kv_len)
        # Numbers as text: 0.0 == -0.0, and NaN is not NaN.
        scalars = tuple([repr(launch.scalars[slot]) for slot in alone.scalar_slots])
        by_kernels = launch.maps_by_kernels or settings.current().device_maps
        return alone.graph.mask, block, lengths, scalars, device, by_kernels, tuple(map(id, read))

    def kept(self, launch: Launch, block: tuple[int, int], device: torch.device) -> _Kept | None:
        """The map of a mask that reads nothing, on the current stream. Whoever holds it says when it is used."""
        with self._lock:
            return self._kept.get((self.key_of(launch, block, (), device), stream_of(device)))

    def _kept_map(self, key: tuple, read: Sequence[Tensor], versions: tuple) -> BlockMap | None:
        found = self._kept.get(key)
        if found is None or not found.holds_for(read, versions):
            return None
        self._kept.move_to_end(key)
        return found.blocks

    def _captured_map(self, key: tuple) -> BlockMap | None:
        """The map of a mask without tensors, whichever stream it was made on before the capture; kept for as long as the graph may live."""
        if key[-1]:
            return None
        if key not in self._pinned:
            made = [kept.blocks for (kept_key, _), kept in self._kept.items() if kept_key == key and kept.blocks is not None]
            if not made:
                return None
            self._pinned[key] = made[0]
        return self._pinned[key]

    def clear(self) -> None:
        """Forget every map."""
        with self._lock:
            while self._kept:
                self._drop(next(iter(self._kept)))

    def _evict(self) -> None:
        """Drop the maps of tensors that are gone, then the oldest down to the limits, but never the newest.

        To look at many of them takes longer than to make one, so that is done once in a while.
        """
        while len(self._kept) > max(self.most, 1):
            self._drop(self._oldest())
        self._made += 1
        if len(self._kept) > _FEW_KEPT and self._made % _FEW_KEPT:
            return
        for key in [key for key, kept in self._kept.items() if not kept.is_alive]:
            self._drop(key)
        size_bytes = sum(kept.size_bytes for kept in self._kept.values())
        while len(self._kept) > 1 and size_bytes > self.most_bytes:
            oldest = self._oldest()
            size_bytes -= self._kept[oldest].size_bytes
            self._drop(oldest)

    def _oldest(self) -> tuple:
        """The key of one that nobody has used since it was the oldest before."""
        newest = next(reversed(self._kept))
        while True:
            key, kept = next(iter(self._kept.items()))
            if not kept.is_used and key is not newest:
                return key
            kept.is_used = False
            self._kept.move_to_end(key)
            self._kept.move_to_end(newest)

    def _drop(self, key: tuple) -> None:
        self._kept.pop(key).blocks = None


@dataclass(slots=True)
class _Kept:
    """A map and the tensors it was made from, as they were then.

    Attributes:
        blocks: None for those who still hold it where `MapCache` has dropped it.
        is_used: since it was last thought of for dropping, by someone who holds it.
    """

    references: tuple[weakref.ref[Tensor], ...]
    versions: tuple
    blocks: BlockMap | None
    is_used: bool = False

    def holds_for(self, read: Sequence[Tensor], versions: tuple) -> bool:
        if None in versions or self.versions != versions:
            return False
        return all([reference() is tensor for reference, tensor in zip(self.references, read)])

    @property
    def is_alive(self) -> bool:
        return all(reference() is not None for reference in self.references)

    @property
    def size_bytes(self) -> int:
        return 0 if self.blocks is None else self.blocks.size_bytes


MAPS = MapCache()
