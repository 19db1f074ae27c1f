"""The counter from which the blocks of threads of a persistent kernel take their tiles."""

from __future__ import annotations

import torch

from flexc.runtime.graph_pools import outside_of_pools

_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_counters: dict[tuple[int, int, int], torch.Tensor] = {}


def tile_counter(device: torch.device, count: int = 1) -> torch.Tensor:
    """int32 [count] that holds 0 when the next kernel on the current stream begins; kernels leave it so.

    Kernels of one stream run one after the other and share it. A CUDA graph may be replayed beside anything, so what is captured has its
    own, set to 0 inside the graph.
    """
    if device.type != "cuda" or _is_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    if index is None:
        index = torch.cuda.current_device()
    key = index, torch._C._cuda_getCurrentRawStream(index), count
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = outside_of_pools(lambda: torch.zeros(count, dtype=torch.int32, device=device), device)
    return found
