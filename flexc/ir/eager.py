"""A graph evaluated in PyTorch: what every backend must agree with. Differentiable by autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flexc.errors import IndexRangeError, InternalError
from flexc.ir.graph import BOOL, FLOAT32, Location, Node, const_value, topological
from flexc.ir.ops import TABLE, TORCH_DTYPES, cast_eager, gather_eager, has_trait, wrap_indices
from flexc.ir.text import format_node

Tensor = torch.Tensor


@dataclass(frozen=True)
class Environment:
    """What the leaves of a graph are during one evaluation.

    Attributes:
        inputs: score, batch, head, q_idx, kv_idx: as many as the graph reads, of shapes that broadcast.
        tensors: the captured tensors, by slot.
        scalars: the run-time numbers, by slot.
        float_dtype: what float32 nodes are computed in; float64 gives a reference.
        check: raise IndexRangeError where a captured tensor is read outside its bounds and the value is needed.
        needed: with `check`, where the roots' values are needed (bool, broadcasts with the inputs); None for everywhere.
        names: the captured tensors' names, for messages.
        lines: the user's lines (`Graph.lines`), for messages.
    """

    inputs: dict[str, Tensor]
    tensors: Sequence[Tensor] = ()
    scalars: Sequence[int | float | Tensor] = ()
    float_dtype: torch.dtype = torch.float32
    check: bool = False
    needed: Tensor | None = None
    names: Sequence[str] = ()
    lines: Mapping[Node, Location] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where constants are made."""
        for tensor in (*self.inputs.values(), *self.tensors):
            return tensor.device
        return torch.device("cpu")

    def dtype(self, node: Node) -> torch.dtype:
        """The torch dtype that the node has in this evaluation."""
        return self.float_dtype if node.dtype == FLOAT32 else TORCH_DTYPES[node.dtype]


def evaluate(roots: Sequence[Node], env: Environment) -> list[Tensor]:
    """The roots' values, of the shape that their inputs broadcast to (0-d for what reads none). Every node is computed once.

    Raises:
        IndexRangeError: with `env.check`, a captured tensor is read outside its bounds where the value is needed.
    """
    values: dict[Node, Tensor] = {}
    for node in topological(roots):
        values[node] = _value(node, [values[a] for a in node.args], env)
    if env.check:
        _check_indices(roots, values, env)
    return [values[root] for root in roots]


def _value(node: Node, operands: list[Tensor], env: Environment) -> Tensor:
    if node.op == "const":
        return torch.tensor(const_value(node), dtype=env.dtype(node), device=env.device)
    if node.op == "input":
        if node.attrs[0] not in env.inputs:
            raise InternalError(f"evaluation needs {node.attrs[0]}, which was not given")
        return env.inputs[node.attrs[0]].to(env.dtype(node))
    if node.op == "scalar":
        return torch.as_tensor(env.scalars[node.attrs[0]], dtype=env.dtype(node), device=env.device)
    if node.op == "gather":
        return gather_eager(env.tensors[node.attrs[0]], operands, env.float_dtype)
    if node.op == "cast":
        return cast_eager(operands[0], node.dtype, env.float_dtype)
    return TABLE[node.op].eager(*operands)


def _check_indices(roots: Sequence[Node], values: dict[Node, Tensor], env: Environment) -> None:
    """Walk from the roots to the leaves with the places where each value is needed: a branch not taken needs nothing.

    `a and b` needs b only where a holds, as in Python.
    """
    everywhere = torch.ones((), dtype=torch.bool, device=env.device)
    start = everywhere if env.needed is None else env.needed
    needed: dict[Node, Tensor] = dict.fromkeys(roots, start)
    for node in reversed(topological(roots)):
        here = needed[node]
        wanted = [here] * len(node.args)
        if has_trait(node, "select"):
            condition = values[node.args[0]]
            wanted = [here, here & condition, here & ~condition]
        elif node.dtype == BOOL and node.op in ("and", "or"):
            first = values[node.args[0]]
            wanted = [here, here & (first if node.op == "and" else ~first)]
        elif node.op == "gather":
            _check_gather(node, [values[a] for a in node.args], here, env)
        for operand, places in zip(node.args, wanted, strict=True):
            needed[operand] = needed[operand] | places if operand in needed else places


def _check_gather(node: Node, indices: list[Tensor], here: Tensor, env: Environment) -> None:
    shape = env.tensors[node.attrs[0]].shape
    for dimension, (size, index) in enumerate(zip(shape, indices, strict=True)):
        _, inside = wrap_indices([size], [index])
        if inside is None:
            continue
        outside = here & ~inside
        if bool(outside.any()):
            found = int(index.expand(outside.shape)[outside][0])
            expression = format_node(node, env.names)
            raise IndexRangeError(
                f"index {found} of `{format_node(node.args[dimension], env.names)}` is out of range: expected -{size} <= index < {size}\n"
                f"  at {env.lines.get(node, node.where) or expression}\n"
                f"  why: `{expression}` reads dimension {dimension} of a tensor of shape {tuple(shape)}\n"
                f"  instead: flexc.where(index < {size}, ..., 0) around the read, or a larger tensor"
            )
