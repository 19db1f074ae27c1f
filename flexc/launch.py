"""One kernel on one set of shapes: the artifact, its block maps, and the calls into the generated module."""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from flexc import settings, sparsity
from flexc.backends import Call, Options, Shapes, is_interpreted
from flexc.errors import UnsupportedError
from flexc.pipeline import Artifact
from flexc.sparsity import BlockMap, Walk

Tensor = torch.Tensor


@dataclass(slots=True)
class Launch:
    """Everything that stays the same between the forward and the backward pass of a call."""

    artifact: Artifact
    shapes: Shapes
    scale: float
    scalars: tuple[int | float, ...]
    options: Options
    title: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq]."""
        if self.has_no_pairs:
            out = q.new_zeros((*q.shape[:3], v.shape[3]))
            return out, torch.full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        call = self._call(q, k, v, tensors)
        return self.artifact.backend.forward(self.artifact.module, call, self.block_maps(tensors, q.device, ("forward",)))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and each captured tensor, in their dtypes; None for a captured tensor without one."""
        if self.has_no_pairs:
            return tuple(torch.zeros_like(x) for x in (q, k, v, *tensors))
        call = self._call(q, k, v, tensors)
        artifact = self.artifact.for_backward(self.shapes, self.options)
        maps = self.block_maps(tensors, q.device, artifact=artifact)
        dq, dk, dv, gradients = artifact.backend.backward(artifact.module, call, maps, out, lse, dout, dlse)
        return dq, dk, dv, *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))

    @property
    def has_no_pairs(self) -> bool:
        """No batch, no query or no key: there is nothing to launch."""
        return not (self.shapes.batch and self.shapes.q_len and self.shapes.kv_len)

    def block_maps(
        self, tensors: Sequence[Tensor], device: torch.device, kernels: Sequence[str] | None = None, artifact: Artifact | None = None
    ) -> dict[str, WalkedMap]:
        """The maps that the module's kernels (or those named) walk, classified at first need; of another artifact's module if given."""
        blocks = (artifact or self.artifact).map_blocks
        return {name: MAPS.walked(self, block, tensors, device) for name, block in blocks.items() if kernels is None or name in kernels}

    def _call(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Call:
        return Call(q, k, v, self.scale, tuple(tensors), self.scalars)


class WalkedMap(Protocol):
    """What kernels need of a block map."""

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit."""
        ...

    def column_walk(self) -> Walk:
        """For each key block the query blocks to visit."""
        ...

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        ...


_FEW_BLOCKS = 2**16  # with no more of them, what bounds leave open is evaluated in the same launch


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
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def blocks(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device) -> BlockMap:
        """The map for a launch, to look at: with `block` = (query tokens, key tokens) per block."""
        return self._found(launch, block, tensors, device, False)

    def walked(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device) -> WalkedMap:
        """The map for a launch as its kernels walk it: from generated kernels on a GPU, if FLEXC_DEVICE_MAPS says so.

        Raises:
            UnsupportedError: a CUDA graph is being captured, and finding the blocks would have to wait for the GPU.
        """
        by_kernels = settings.current().device_maps and (device.type == "cuda" or is_interpreted())
        return self._found(launch, block, tensors, device, by_kernels)

    def _found(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device, by_kernels: bool) -> Any:
        alone, shapes = launch.artifact.mask_alone, launch.shapes
        read = [tensors[slot] for slot in alone.tensor_slots]
        scalars = [launch.scalars[slot] for slot in alone.scalar_slots]
        lengths = (shapes.batch, shapes.heads_q, shapes.q_len, shapes.kv_len)
        # Numbers as text: 0.0 == -0.0, and NaN is not NaN.
        key = (alone.graph.mask, block, lengths, tuple(map(repr, scalars)), device, by_kernels, tuple(map(id, read)))
        versions = tuple(map(_version, read))
        # What a graph replays must find the blocks of what the tensors hold then, not now.
        follows = bool(read) and device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            found = self._kept.get(key)
            if found is not None and not follows and found.holds_for(read, versions):
                self._kept.move_to_end(key)
                return found.blocks
        sizes = {"batch": shapes.batch, "heads": shapes.heads_q, "block": block}
        captured = {"tensors": [tensor.detach() for tensor in read], "scalars": scalars, "device": device}
        with torch.no_grad():
            if by_kernels:
                from flexc.block_kernels import build_on_gpu

                exact = math.ceil(shapes.q_len / block[0]) * math.ceil(shapes.kv_len / block[1]) <= _FEW_BLOCKS
                blocks = build_on_gpu(alone.graph, shapes.q_len, shapes.kv_len, **sizes, **captured, exact=exact, title=launch.title)
            else:
                _refuse_waiting(device)
                blocks = sparsity.classify(alone.graph, shapes.q_len, shapes.kv_len, **sizes, **captured)
        if not follows:
            with self._lock:
                self._kept[key] = _Kept(tuple(map(weakref.ref, read)), versions, blocks)
                self._evict()
        return blocks

    def clear(self) -> None:
        """Forget every map."""
        with self._lock:
            self._kept.clear()

    def _evict(self) -> None:
        """Drop the maps of tensors that are gone, then the oldest down to the limits, but never the newest."""
        for key in [key for key, kept in self._kept.items() if not kept.is_alive]:
            del self._kept[key]
        size_bytes = sum(kept.size_bytes for kept in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > self.most or size_bytes > self.most_bytes):
            _, dropped = self._kept.popitem(last=False)
            size_bytes -= dropped.size_bytes


@dataclass(slots=True)
class _Kept:
    """A map and the tensors it was made from, as they were then."""

    references: tuple[weakref.ref[Tensor], ...]
    versions: tuple
    blocks: WalkedMap

    def holds_for(self, read: Sequence[Tensor], versions: tuple) -> bool:
        if None in versions or self.versions != versions:
            return False
        return all([reference() is tensor for reference, tensor in zip(self.references, read)])

    @property
    def is_alive(self) -> bool:
        return all(reference() is not None for reference in self.references)

    @property
    def size_bytes(self) -> int:
        return self.blocks.size_bytes


MAPS = MapCache()


def _refuse_waiting(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a CUDA graph is being captured, and the blocks of the mask are not known yet: finding them waits for the GPU. Call the kernel "
            "once before the capture if the mask's tensors do not change, or set FLEXC_DEVICE_MAPS=1"
        )


def _version(tensor: Tensor) -> Any:
    """What changes when the tensor is written to in place or given other memory; None where PyTorch does not count."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())
