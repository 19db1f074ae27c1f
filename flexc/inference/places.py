"""Where a pair really is: graphs whose `batch`, `head`, `q_idx` and `kv_idx` are computed from places in the tensors of a call.

Score and mask functions stay what they were in training. A call that starts in the middle of a sequence gives them the sequence's positions
by rewriting the graph, so every backend, derivative and block map follows without knowing of it. All numbers are arguments at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.frontend import Binding, Trace
from flexc.ir.graph import INT32, Graph, Node, ScalarInput, TensorInput, input_node, loaded_dtype, scalar, substitute
from flexc.ir.ops import apply, cast, gather

Tensor = torch.Tensor

MAX_POSITION = 2**24 - 1  # positions are exact in float32 up to it
_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Positions:
    """Where the rows of a call are in their sequences, and how much of the keys is there. None for 0, and for all keys.

    Attributes:
        q_offset: position of the first query row: a number, or an integer tensor [B].
        kv_len: keys that are there, from the first on: an integer tensor [B].
    """

    q_offset: int | Tensor | None = None
    kv_len: Tensor | None = None

    def placed(self, trace: Trace, binding: Binding) -> tuple[Trace, Binding]:
        """The trace and the captured values of the same functions at these positions."""
        given = [x for x in (self.q_offset, self.kv_len) if x is not None]
        tensors = tuple(x for x in given if isinstance(x, Tensor))
        scalars = tuple(x for x in given if not isinstance(x, Tensor))
        return _placed(trace, _kind(self.q_offset), _kind(self.kv_len)), Binding(binding.tensors + tensors, binding.scalars + scalars)

    @property
    def hides_rest(self) -> bool:
        """Whether there may be keys that no query sees, whatever they hold."""
        return self.kv_len is not None

    def refuse_values(self, q_len: int, kv_len: int) -> None:
        """Refuse tensors that say what cannot be. Waits for the device.

        Raises:
            InputError: names the first batch entry that is wrong.
        """
        for name, value, most in (("q_offset", self.q_offset, MAX_POSITION - q_len), ("kv_len", self.kv_len, kv_len)):
            if isinstance(value, Tensor):
                for entry, number in enumerate(value.tolist()):
                    if not 0 <= number <= most:
                        raise InputError(f"{name}[{entry}] is {number}; expected a number from 0 to {most}")

    def in_python(self, score_mod: Any, mask_mod: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The functions for plain PyTorch, and the options that `reference` takes with them."""
        return score_mod, mask_mod, {"q_offset": self.q_offset, "kv_len": self.kv_len}

    def without_rest(self, k: Tensor, v: Tensor, *, may_look: bool = True) -> tuple[Tensor, Tensor]:
        """k and v with zeros past kv_len, where a cache may hold anything: a weight of 0 times NaN would be NaN.

        Args:
            may_look: whether values on the CPU may be read, which saves the copy of a cache that is full.
        """
        if self.kv_len is None:
            return k, v
        is_there = torch.arange(k.shape[2], device=k.device) < self.kv_len[:, None]
        if may_look and k.device.type == "cpu" and bool(is_there.all()):
            return k, v
        is_there = is_there[:, None, :, None]
        return torch.where(is_there, k, 0.0), torch.where(is_there, v, 0.0)


def positions_of(
    q_offset: int | Tensor | None, kv_len: int | Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Positions | None, Tensor, Tensor]:
    """What a call asks for (None if nothing), and k and v down to `kv_len` if that is a number.

    Raises:
        InputError: neither a number nor a tensor of integers, on another device, or out of range.
        ShapeError: a tensor of another shape than [B].
    """
    for name, value in (("q_offset", q_offset), ("kv_len", kv_len)):
        refuse_bad_position(name, value, q.shape[0], q.device)
    if isinstance(q_offset, int) and q_offset + q.shape[2] > MAX_POSITION:
        raise UnsupportedError(
            f"expected positions up to {MAX_POSITION} on every backend, got q_offset {q_offset} and {q.shape[2]} queries"
        )
    if isinstance(kv_len, int):
        if kv_len > k.shape[2]:
            raise InputError(f"kv_len is {kv_len} and k has {k.shape[2]} tokens; expected at most as many")
        k, v, kv_len = k[:, :, :kv_len], v[:, :, :kv_len], None
    if q_offset is None and kv_len is None:
        return None, k, v
    return Positions(q_offset, kv_len), k, v


def refuse_bad_position(name: str, value: int | Tensor | None, batch: int, device: torch.device) -> None:
    """Refuse what is neither None, a number, nor a tensor of one integer for each batch entry."""
    expected = f"expected an int, or an int32 or int64 tensor of shape [{batch}] (one for each batch entry)"
    if value is None:
        return
    if not isinstance(value, Tensor):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{name} is a {type(value).__name__}; {expected}")
        if value < 0:
            raise InputError(f"{name} is {value}; expected a number from 0")
        return
    if value.dtype not in _DTYPES:
        raise InputError(f"{name} has dtype {value.dtype}; {expected}")
    if value.shape != (batch,):
        raise ShapeError(f"{name} has shape {list(value.shape)}; {expected}")
    if value.device != device:
        raise InputError(f"{name} is on {value.device} and q on {device}: move it with {name}.to({str(device)!r})")


def _kind(value: int | Tensor | None) -> str:
    """What of a value reaches the graph: that it is there, and the dtype of a tensor."""
    if value is None:
        return ""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "number"


def packed(graph: Graph, group: int) -> Graph:
    """The graph of one key/value head's queries: row r is query token r // group of its head r % group, `head` the key/value head."""
    if group == 1:
        return graph
    row, head = input_node("q_idx"), input_node("head")
    member = apply("floormod", row, group)
    moved = {row: apply("floordiv", row, group), head: apply("add", apply("mul", head, group), member)}
    return graph.with_outputs(**{name: substitute(node, moved) for name, node in graph.outputs})


@lru_cache(maxsize=1024)
def _placed(trace: Trace, offset_kind: str, length_kind: str) -> Trace:
    graph = trace.graph
    if offset_kind:
        graph, offset = _with_number(graph, "q_offset", offset_kind)
        q_idx = input_node("q_idx")
        moved = {q_idx: apply("add", q_idx, offset)}
        graph = graph.with_outputs(**{name: substitute(node, moved) for name, node in graph.outputs})
    if length_kind:
        graph, length = _with_number(graph, "kv_len", length_kind)
        is_there = apply("lt", input_node("kv_idx"), length)
        graph = graph.with_outputs(mask=is_there if graph.mask is None else apply("and", graph.mask, is_there))
    return replace(trace, graph=graph)


def _with_number(graph: Graph, name: str, kind: str) -> tuple[Graph, Node]:
    """The graph with one more captured value, and its node: of this batch entry, from 0 to MAX_POSITION, so that bounds know it."""
    taken = {x.name for x in (*graph.tensors, *graph.scalars)}
    while name in taken:
        name += "_"
    if kind == "number":
        node = scalar(len(graph.scalars), INT32)
        graph = replace(graph, scalars=(*graph.scalars, ScalarInput(name, INT32)))
    else:
        node = gather(len(graph.tensors), loaded_dtype(kind), [input_node("batch")])
        graph = replace(graph, tensors=(*graph.tensors, TensorInput(name, kind, 1)))
    return graph, cast(apply("minimum", apply("maximum", node, 0), MAX_POSITION), INT32)
