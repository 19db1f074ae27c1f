"""One kernel on one set of shapes: the artifact, its block maps, and the calls into the generated module."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc import sparsity
from flexc.backends import Call, Options, Shapes
from flexc.ir.graph import topological
from flexc.pipeline import Artifact
from flexc.sparsity import BlockMap

Tensor = torch.Tensor


@dataclass
class Launch:
    """Everything that stays the same between the forward and the backward pass of a call."""

    artifact: Artifact
    shapes: Shapes
    scale: float
    scalars: tuple[int | float, ...]
    maps: MapCache
    options: Options
    title: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq]."""
        call = self._call(q, k, v, tensors)
        return self.artifact.backend.forward(self.artifact.module, call, self.block_maps(tensors, q.device, ("forward",)))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, tensors: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and each captured tensor, in their dtypes; None for a captured tensor without one."""
        call = self._call(q, k, v, tensors)
        maps = self.block_maps(tensors, q.device)
        dq, dk, dv, gradients = self.artifact.backend.backward(self.artifact.module, call, maps, out, lse, dout, dlse)
        return dq, dk, dv, *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, tensors, strict=True))

    def block_maps(self, tensors: Sequence[Tensor], device: torch.device, kernels: Sequence[str] | None = None) -> dict[str, BlockMap]:
        """The maps that the module's kernels (or those named) walk, classified at first need."""
        blocks = self.artifact.backend.blocks(self.artifact.plan)
        return {name: self.maps.get(self, block, tensors, device) for name, block in blocks.items() if kernels is None or name in kernels}

    def _call(self, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor]) -> Call:
        return Call(q, k, v, self.scale, tuple(tensors), self.scalars)


@dataclass
class MapCache:
    """Block maps by mask, lengths and the *contents* of the captured tensors that the mask reads, as far as PyTorch counts versions.

    A tensor written to in place, or another tensor at the same address, is a miss.
    """

    most: int = 32
    _kept: OrderedDict[tuple, tuple[tuple, BlockMap]] = field(default_factory=OrderedDict)

    def get(self, launch: Launch, block: tuple[int, int], tensors: Sequence[Tensor], device: torch.device) -> BlockMap:
        """The map for a launch, with `block` = (query tokens, key tokens) per block."""
        graph, shapes = launch.artifact.graph, launch.shapes
        slots = _mask_slots(launch.artifact)
        read = [tensors[slot] for slot in slots]
        versions = tuple(_version(tensor) for tensor in read)
        key = (launch.artifact.key, block, shapes.batch, shapes.heads_q, shapes.q_len, shapes.kv_len, launch.scalars, device, tuple(map(id, read)))
        found = self._kept.get(key)
        if found is not None and None not in versions:
            (references, old), blocks = found
            if old == versions and all(reference() is tensor for reference, tensor in zip(references, read, strict=True)):
                self._kept.move_to_end(key)
                return blocks
        with torch.no_grad():
            blocks = sparsity.classify(
                graph,
                shapes.q_len,
                shapes.kv_len,
                batch=shapes.batch,
                heads=shapes.heads_q,
                block=block,
                tensors=[t.detach() for t in tensors],
                scalars=launch.scalars,
                device=device,
            )
        self._kept[key] = ((tuple(weakref.ref(tensor) for tensor in read), versions), blocks)
        if len(self._kept) > self.most:
            self._kept.popitem(last=False)
        return blocks


def _mask_slots(artifact: Artifact) -> tuple[int, ...]:
    """Which captured tensors the mask reads."""
    mask = artifact.graph.mask
    if mask is None:
        return ()
    return tuple(sorted({node.attrs[0] for node in topological([mask]) if node.op == "gather"}))


def _version(tensor: Tensor) -> Any:
    return None if tensor.is_inference() else tensor._version
