"""Who makes a block map: generated kernels on a GPU, PyTorch operators elsewhere and where there is no kernel for a mask.

Kernels wait for nothing. Operators read from the device how far they have come.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from flexc import settings, sparsity
from flexc.errors import UnsupportedError
from flexc.ir.graph import Graph
from flexc.sparsity import BlockMap, Proof, Walk
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor

KERNEL_DEVICES = frozenset(["cuda"])


@dataclass(frozen=True)
class MapSizes:
    """How large a map is.

    Attributes:
        q_len, kv_len: tokens.
        batch, heads: how many the map covers; it has one entry for all where the mask does not read them.
        block: tokens per block, (Bq, Bkv).
    """

    q_len: int
    kv_len: int
    batch: int
    heads: int
    block: tuple[int, int]


@dataclass(frozen=True)
class MapMaker:
    """Makes the maps of one mask for given lengths. What does not depend on the contents of tensors is found out once.

    Attributes:
        plan: of the kernels that make the maps; None where PyTorch operators do.
        why: why they do, empty where that is as it should be.
    """

    graph: Graph
    sizes: MapSizes
    device: torch.device
    title: str
    plan: Any
    why: str

    @staticmethod
    def of(
        graph: Graph,
        sizes: MapSizes,
        *,
        tensors: Sequence[Tensor],
        device: torch.device,
        title: str = "",
        by_kernels: bool = False,
    ) -> MapMaker:
        """For tensors as large as these, that are as sorted.

        Args:
            graph, tensors, device: as for `sparsity.classify`.
            title: what the user calls the mask.
            by_kernels: whatever FLEXC_DEVICE_MAPS says.
        """
        plan, why = None, _why_not(graph, sizes, device, by_kernels)
        if why is None:
            from flexc.block_kernels import plan_on_gpu

            try:
                plan = plan_on_gpu(graph, sizes, tensors=tensors, device=device, title=title)
            except UnsupportedError as error:
                why = str(error)
        return MapMaker(graph, sizes, device, title, plan, why or "")

    def map(self, tensors: Sequence[Tensor], scalars: Sequence[int | float]) -> BlockMap:
        """The map of what the tensors contain. On a GPU its walks are made at first need, and until then they must stay as they are.

        Raises:
            UnsupportedError: a CUDA graph is being captured, and finding the blocks would have to wait for the GPU.
        """
        sizes = self.sizes
        if self.plan is not None:
            mask = self.graph.mask
            assert mask is not None
            tensors, scalars = tuple(tensors), tuple(scalars)
            tokens = TokenMask(mask, sizes.q_len, sizes.kv_len, sizes.block, tensors, scalars, self.device, self.graph)
            return BlockMap.of_walks(_KernelMap(self, tensors, scalars), sizes.batch, sizes.heads, tokens)
        _refuse_waiting(self.device, self.why)
        captured = {"tensors": tensors, "scalars": scalars, "device": self.device}
        with torch.no_grad():
            blocks = sparsity.classify(self.graph, **vars(sizes), **captured)
        blocks.waited = self.why
        return blocks


def _why_not(graph: Graph, sizes: MapSizes, device: torch.device, by_kernels: bool) -> str | None:
    """Why operators make the map, None if kernels do; empty where that is as it should be."""
    if device.type not in KERNEL_DEVICES or graph.mask is None or not (sizes.q_len and sizes.kv_len):
        return ""
    if not (by_kernels or settings.current().device_maps):
        return "FLEXC_DEVICE_MAPS=0"
    if not _has_triton():
        return "Triton is not installed"
    return None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _KernelMap:
    """What a map made by kernels stands on: `sparsity.walk.MadeWalks`. Its walks are made at first need."""

    def __init__(self, maker: MapMaker, tensors: tuple[Tensor, ...], scalars: tuple[int | float, ...]):
        self.maker, self.tensors, self.scalars = maker, tensors, scalars
        self.walks = maker.plan.map(tensors, scalars)
        self.device, self.shape = self.walks.device, self.walks.shape
        self.versions = tuple(map(version_of, tensors))

    @property
    def size_bytes(self) -> int:
        """Memory of the walks made so far."""
        return self.walks.size_bytes

    def has_walk(self, side: str) -> bool:
        """Whether the walk along "rows" or "columns" is made."""
        return self.walks.has(side)

    def make_rows(self) -> None:
        """Launches what makes the walk along rows, if it is not made."""
        self.walks.written("rows")

    def row_walk(self) -> Walk:
        """For each query block the key blocks to visit."""
        return self.walks.row_walk()

    def column_walk(self) -> Walk | None:
        """For each key block the query blocks to visit; None if it is not made yet and the tensors have changed since the rows were."""
        if not self.walks.has("columns") and self.walks.has("rows") and not is_capturing():
            versions = tuple(map(version_of, self.tensors))
            if None in versions or versions != self.versions:
                return None
        return self.walks.column_walk()

    def proof(self) -> Proof:
        """How the blocks were decided."""
        return self.walks.counts().proof

    def overflowed(self) -> int:
        """Block rows that are walked from end to end."""
        return self.walks.counts().overflowed

    def with_lengths(self, q_len: int, kv_len: int) -> BlockMap:
        """The map of the same mask for other lengths, with the tensors' present contents."""
        maker = self.maker
        sizes = replace(maker.sizes, q_len=q_len, kv_len=kv_len)
        anew = MapMaker.of(maker.graph, sizes, tensors=self.tensors, device=self.device, title=maker.title)
        made = anew.map(self.tensors, self.scalars)
        made.make_rows()
        return made


def version_of(tensor: Tensor) -> Any:
    """What changes when the tensor is written to in place or given other memory; None where PyTorch does not count."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def number_on(number: Tensor, device: torch.device) -> Tensor:
    """A tensor of one number on the device. From the CPU it goes there with a launch, which waits for nothing; a copy would."""
    if number.device.type != "cpu" or device.type != "cuda" or number.is_complex():
        return number.to(device)
    return torch.full((), number.item(), dtype=number.dtype, device=device)


@cache
def is_numbered_gpu(device: torch.device) -> bool:
    """Whether it is one GPU, not whichever is current. Remembered, as PyTorch makes the text of a device's type anew at each look."""
    return device.type == "cuda" and device.index is not None


def stream_of(device: torch.device) -> int:
    """Which stream of the device is current; 0 elsewhere."""
    return torch._C._cuda_getCurrentRawStream(device.index) if is_numbered_gpu(device) else 0


def is_capturing() -> bool:
    """Whether what is launched is captured in a CUDA graph instead of run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _refuse_waiting(device: torch.device, why: str) -> None:
    if device.type == "cuda" and is_capturing():
        raise UnsupportedError(
            "a CUDA graph is being captured, and the blocks of the mask are not known yet: finding them waits for the GPU "
            f"({why or 'there is no mask'}). Call the kernel once before the capture if the mask's tensors do not change"
        )
