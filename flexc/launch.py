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

from flexc import sparsity
from flexc.backends import Call, Options, Shapes
from flexc.pipeline import Artifact
from flexc.sparsity import BlockMap

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
        maps = self.block_maps(tensors, q.device)
        dq, dk, dv, gradients = self.artifact.backend.backward(self.artifact.module, call, maps, out, lse, dout, dlse)
        return dq, dk, dv, *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))

    @property
    def has_no_pairs(self) -> bool:
        """No batch, no query or no key: there is nothing to launch."""
        return not (self.shapes.batch and self.shapes.q_len and self.shapes.kv_len)

    def block_maps(self, tensors: Sequence[Tensor], device: torch.device, kernels: Sequence[str] | None = None) -> dict[str, BlockMap]:
        """The maps that the module's kernels (or those named) walk, classified at first need."""
        blocks = self.artifact.map_blocks
        return {name: MAPS.get(self, block, tensors, device) for name, block in blocks.items() if kernels is None or name in kernels}

    def _call(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Call:
        return Call(q, k, v, self.scale, tuple(tensors), self.scalars)


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

    def get(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device) -> BlockMap:
        """The map for a launch, with `block` = (query tokens, key tokens) per block."""
        alone, shapes = launch.artifact.mask_alone, launch.shapes
        read = [tensors[slot] for slot in alone.tensor_slots]
        scalars = [launch.scalars[slot] for slot in alone.scalar_slots]
        lengths = (shapes.batch, shapes.heads_q, shapes.q_len, shapes.kv_len)
        # Numbers as text: 0.0 == -0.0, and NaN is not NaN.
        key = (alone.graph.mask, block, lengths, tuple(map(repr, scalars)), device, tuple(map(id, read)))
        versions = tuple(map(_version, read))
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found.holds_for(read, versions):
                self._kept.move_to_end(key)
                return found.blocks
        with torch.no_grad():
            blocks = sparsity.classify(
                alone.graph,
                shapes.q_len,
                shapes.kv_len,
                batch=shapes.batch,
                heads=shapes.heads_q,
                block=block,
                tensors=[tensor.detach() for tensor in read],
                scalars=scalars,
                device=device,
            )
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
    blocks: BlockMap

    def holds_for(self, read: Sequence[Tensor], versions: tuple) -> bool:
        if None in versions or self.versions != versions:
            return False
        return all([reference() is tensor for reference, tensor in zip(self.references, read)])

    @property
    def is_alive(self) -> bool:
        return all(reference() is not None for reference in self.references)

    @property
    def size_bytes(self) -> int:
        return self.blocks.kind.numel()


MAPS = MapCache()


def _version(tensor: Tensor) -> Any:
    """What changes when the tensor is written to in place or given other memory; None where PyTorch does not count."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())
