"""Tables of facts, kept for as long as the tensors that they tell of are unchanged."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor


def place_of(tensor: Tensor) -> Hashable:
    """What tells this view of a storage from others. Two views at one place are equal for as long as the storage lives."""
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class TableCache:
    """Tables of facts by the tensor they were made from and its version, for as long as its storage lives.

    Views of one storage that look alike, such as a tensor and what `detach` makes of it, share their tables. Not kept: tables of tensors
    whose versions PyTorch does not count, and those made while a CUDA graph is captured, which has to make them again at every replay.

    Attributes:
        most, most_bytes: past one of them the tables used least recently are dropped.
    """

    most: int = 64
    most_bytes: int = 2**28
    _bytes: int = 0
    _kept: OrderedDict[Hashable, _Kept] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # garbage collection may call `_forget` at any point

    def get(self, tensor: Tensor, kind: tuple, make: Callable[[], Any], again: Callable[[Any], bool] | None = None) -> Any:
        """The table of this kind, made at first need. It has `tensors`.

        Args:
            again: writes a table of what the tensor held before anew, in the table's own memory; says whether it did. Whoever was given
                the table must be done with it by then, as kernels are that were launched before on the same stream.
        """
        if tensor.is_inference() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return make()
        storage, version = tensor.untyped_storage(), (tensor._version, tensor.data_ptr())
        key = place_of(tensor), kind
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.storage() is storage:
                self._kept.move_to_end(key)
                if kept.version == version:
                    return kept.table
            else:
                kept = None
        if kept is not None and again is not None and again(kept.table):
            kept.version = version  # last: whoever sees it launches what reads the table after what writes it
            return kept.table
        table = make()
        made = _Kept(weakref.ref(storage, lambda _: self._forget(key)), version, table, sum([t.nbytes for t in table.tensors]))
        with self._lock:
            kept = self._kept.pop(key, None)
            self._kept[key] = made
            self._bytes += made.size_bytes - (0 if kept is None else kept.size_bytes)
            while len(self._kept) > 1 and (len(self._kept) > self.most or self._bytes > self.most_bytes):
                self._bytes -= self._kept.popitem(last=False)[1].size_bytes
        return table

    def clear(self) -> None:
        """Forget every table."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept.storage() is None:
                del self._kept[key]
                self._bytes -= kept.size_bytes


@dataclass(slots=True, eq=False)
class _Kept:
    storage: weakref.ref
    version: tuple[int, int]
    table: Any
    size_bytes: int


TABLES = TableCache()
