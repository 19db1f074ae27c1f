"""What outlives a call must not lie in the memory pool of a CUDA graph.

`torch.compile(mode="reduce-overhead")` runs a graph once before it captures it, with every allocation of the thread in the pool of the
graphs, and refuses what is still there afterwards. Block maps and counters are kept for later calls: another thread allocates them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


def outside_of_pools(make: Callable[[], Made], device: torch.device) -> Made:
    """What `make` returns, launched on the current stream as ever. While a graph is captured, what it captures is left to the graph."""
    if device.type != "cuda" or "torch._inductor.cudagraph_trees" not in sys.modules or torch.cuda.is_current_stream_capturing():
        return make()
    return _in_a_thread(make, device)


def _in_a_thread(make: Callable[[], Made], device: torch.device) -> Made:
    found: list[Any] = []
    stream = torch.cuda.current_stream(device)

    def work() -> None:
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                found.extend((make(), None))
        except BaseException as error:
            found.extend((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if found[1] is not None:
        raise found[1]
    return found[0]
