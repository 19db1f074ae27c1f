"""DTensor inputs: each rank computes its own batch entries and heads, which need nothing of the others.

q, k and v must lie in one way: replicated, or sharded on batch (Shard(0)) or heads (Shard(1)), on any mesh. Score and mask functions still
see the batch and head indices of the whole tensors: the graph gets the offset of the rank's part as a run-time number. Captured tensors
are given whole: as plain tensors, or as replicated DTensors, whose gradient is then summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flexc import frontend
from flexc.errors import InputError, UnsupportedError
from flexc.ir.graph import INT32, Graph, Node, ScalarInput, inputs_of, make, rewrite_graph, scalar
from flexc.operator_calls import call_variant
from flexc.variants import Variant, trace_of_graph, variant_of

if TYPE_CHECKING:
    from flexc.api import Kernel

Tensor = torch.Tensor

_DIMENSIONS = {0: "batch", 1: "head"}
_TAKEN = "expected Replicate(), Shard(0) (batch) or Shard(1) (heads): redistribute it, such as x.redistribute(placements=[Shard(1)])"


@dataclass(frozen=True)
class _Layout:
    """How q, k and v lie on a mesh.

    Attributes:
        inputs: q, k and v.
        offsets: index of the first batch entry and of the first query head that this rank has.
        sharded: which of "batch" and "head" this concerns.
    """

    inputs: tuple[DTensor, DTensor, DTensor]
    mesh: Any
    placements: tuple[Any, ...]
    offsets: dict[str, int]
    sharded: frozenset[str]


def call(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float | None, max_scores: bool = False) -> tuple[Tensor, ...]:
    """out and lse (and largest scores if asked for) as DTensors that lie as q does."""
    layout = _layout_of(q, k, v)
    trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    tensors = tuple(_whole(t, spec.name, layout) for t, spec in zip(binding.tensors, trace.graph.tensors, strict=True))
    variant, offsets = _variant(kernel, trace, layout)
    binding = frontend.Binding(tensors, binding.scalars + offsets)
    local = [x.to_local() for x in layout.inputs]
    out, *rows = call_variant(variant, local[0], local[1], local[2], scale, binding, max_scores)
    shape = (*q.shape[:3], v.shape[3])
    return _distributed(out, layout, shape), *(_distributed(x, layout, shape[:3]) for x in rows)


def _variant(kernel: Kernel, trace: frontend.Trace, layout: _Layout) -> tuple[Variant, tuple[int, ...]]:
    """The variant whose `batch` and `head` count from the rank's first, and those."""
    graph = trace.graph
    read = {name for _, node in graph.outputs for name in inputs_of(node)}
    names = tuple(name for name in ("batch", "head") if name in read & layout.sharded)
    if names:
        trace = _shifted(graph, names)
    variant = variant_of(kernel, trace)
    variant.serve(kernel)
    return variant, tuple(layout.offsets[name] for name in names)


_traces: dict[tuple[Graph, tuple[str, ...]], frontend.Trace] = {}
_MOST_TRACES = 256


def _shifted(graph: Graph, names: tuple[str, ...]) -> frontend.Trace:
    found = _traces.get((graph, names))
    if found is None:
        first = len(graph.scalars)
        specs = tuple(ScalarInput(f"first_{name}", INT32) for name in names)

        def rule(node: Node) -> Node:
            if node.op != "input" or node.attrs[0] not in names:
                return node
            return make("add", (node, scalar(first + names.index(node.attrs[0]), INT32)), (), INT32, node.where)

        outputs = rewrite_graph(graph, rule).outputs
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        found = _traces[graph, names] = trace_of_graph(Graph(outputs, graph.tensors, graph.scalars + specs))
    return found


def _layout_of(q: Tensor, k: Tensor, v: Tensor) -> _Layout:
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        if not isinstance(x, DTensor):
            raise InputError(f"{name} is a plain tensor and not all of q, k and v are; expected three DTensors: use distribute_tensor")
    assert isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)
    for name, x in (("k", k), ("v", v)):
        if x.device_mesh != q.device_mesh:
            raise InputError(f"{name} is on the mesh {x.device_mesh} and q on {q.device_mesh}: expected one mesh")
    for name, x in (("q", q), ("k", k), ("v", v)):
        for placement in x.placements:
            _refuse_placement(name, placement)
        if x.placements != q.placements:
            raise UnsupportedError(
                f"{name} lies as {_text(x.placements)} and q as {_text(q.placements)}, on every backend: expected q, k and v to lie alike, "
                f"as a rank's query heads read its own key heads. Redistribute {name}"
            )
    return _layout(q, k, v)


def _refuse_placement(name: str, placement: Any) -> None:
    if type(placement) is Replicate or (type(placement) is Shard and placement.dim in _DIMENSIONS):
        return
    reason = {2: "a query needs keys of other ranks", 3: "a score needs all of head_dim"}.get(getattr(placement, "dim", -1))
    if isinstance(placement, Partial):
        reason = "the scores of a sum are not the sum of scores"
    raise UnsupportedError(f"{name} lies as {placement}, on every backend ({reason or 'unknown here'}): {_TAKEN}")


def _layout(q: DTensor, k: DTensor, v: DTensor) -> _Layout:
    mesh, coordinate = q.device_mesh, q.device_mesh.get_coordinate()
    sizes, offsets, sharded = {0: q.shape[0], 1: q.shape[1]}, {0: 0, 1: 0}, set()
    for index, placement in enumerate(q.placements):
        if isinstance(placement, Replicate):
            continue
        dimension, count = placement.dim, mesh.size(index)  # type: ignore[attr-defined]
        sharded.add(_DIMENSIONS[dimension])
        if dimension == 1 and (sizes[1] % count or _heads(k, q, sizes[1]) % count):
            raise UnsupportedError(
                f"{q.shape[1]} query heads and {k.shape[1]} key heads over {count} ranks, on every backend: expected both to divide "
                "evenly, so that a rank has the key heads of its query heads. Replicate them, or shard fewer ways"
            )
        # As DTensor splits: equal parts, rounded up, as far as they go.
        part = -(-sizes[dimension] // count)
        begin = min(part * (coordinate[index] if coordinate is not None else 0), sizes[dimension])
        offsets[dimension] += begin
        sizes[dimension] = min(part, sizes[dimension] - begin)
    return _Layout((q, k, v), mesh, tuple(q.placements), {"batch": offsets[0], "head": offsets[1]}, frozenset(sharded))


def _heads(k: DTensor, q: DTensor, left: int) -> int:
    """Key heads that are left where `left` query heads are."""
    return k.shape[1] * left // q.shape[1]


def _whole(tensor: Tensor, name: str, layout: _Layout) -> Tensor:
    """A captured tensor as every rank has it."""
    splits = bool(layout.sharded)
    if not isinstance(tensor, DTensor):
        if tensor.requires_grad and splits:
            raise UnsupportedError(
                f"the captured tensor {name} requires a gradient and is a plain tensor, where q, k and v are sharded, on every backend: "
                "each rank would have its own part of the gradient. Expected a replicated DTensor: "
                f"distribute_tensor({name}, mesh, [Replicate()])"
            )
        return tensor
    if tensor.device_mesh != layout.mesh or not all(type(p) is Replicate for p in tensor.placements):
        raise UnsupportedError(
            f"the captured tensor {name} lies as {_text(tensor.placements)} on {tensor.device_mesh}, on every backend: expected it "
            f"replicated on the mesh of q, as a function may read any element: {name}.redistribute(placements=[Replicate()])"
        )
    parts = [Replicate() if isinstance(p, Replicate) else Partial() for p in layout.placements]
    return tensor.to_local(grad_placements=parts)


def _distributed(local: Tensor, layout: _Layout, shape: tuple[int, ...]) -> Tensor:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * size)
    return DTensor.from_local(
        local, layout.mesh, layout.placements, run_check=False, shape=torch.Size(shape), stride=tuple(reversed(stride))
    )


def _text(placements: Any) -> str:
    return "[" + ", ".join(map(str, placements)) + "]"
