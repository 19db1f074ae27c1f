"""Mask graphs written by hand, and the dense masks they must agree with."""

from __future__ import annotations

from typing import Any

import torch

from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import POSITIONS, Graph, Node, TensorInput, input_node, loaded_dtype
from flexc.ir.ops import apply, gather
from flexc.sparsity import EMPTY, FULL, PARTIAL, BlockMap, classify

batch, head, q_idx, kv_idx = (input_node(name) for name in POSITIONS)


def op(name: str, *operands: Any) -> Node:
    return apply(name, *operands)


def both(*masks: Node) -> Node:
    result = masks[0]
    for mask in masks[1:]:
        result = apply("and", result, mask)
    return result


causal = apply("ge", q_idx, kv_idx)


def read(slot: int, tensor: torch.Tensor, *indices: Node) -> Node:
    return gather(slot, loaded_dtype(str(tensor.dtype).removeprefix("torch.")), indices)


def graph_of(mask: Node | None, tensors: tuple[torch.Tensor, ...] = ()) -> Graph:
    inputs = tuple(TensorInput(f"table_{i}", str(t.dtype).removeprefix("torch."), t.dim()) for i, t in enumerate(tensors))
    return Graph((("mask", mask),) if mask is not None else (), inputs)


def dense_mask(mask: Node, b: int, h: int, q_len: int, kv_len: int, tensors: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
    """Every pair, at once."""
    sizes = {"batch": b, "head": h, "q_idx": q_len, "kv_idx": kv_len}
    inputs = {}
    for position, (name, size) in enumerate(sizes.items()):
        shape = [1, 1, 1, 1]
        shape[position] = size
        inputs[name] = torch.arange(size, dtype=torch.int32).view(shape)
    return evaluate([mask], Environment(inputs, tensors))[0].expand(b, h, q_len, kv_len)


def kinds_of(dense: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Brute force: the kind of every block of a dense mask, one Python loop round each."""
    b, h, q_len, kv_len = dense.shape
    rows, columns = -(-q_len // block[0]), -(-kv_len // block[1])
    kinds = torch.zeros(b, h, rows, columns, dtype=torch.uint8)
    for i in range(rows):
        for j in range(columns):
            tile = dense[:, :, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].flatten(2)
            full = tile.all(-1) & ((j + 1) * block[1] <= kv_len)
            kinds[:, :, i, j] = torch.where(full, FULL, torch.where(tile.any(-1), PARTIAL, EMPTY)).to(torch.uint8)
    return kinds


def classified(mask: Node | None, q_len: int, kv_len: int, block=(8, 8), *, b: int = 1, h: int = 1, tensors=(), **options: Any) -> BlockMap:
    return classify(graph_of(mask, tensors), q_len, kv_len, batch=b, heads=h, block=block, tensors=tensors, **options)


def assert_agrees(mask: Node, q_len: int, kv_len: int, block=(8, 8), *, b: int = 1, h: int = 1, tensors=()) -> BlockMap:
    """With exact evaluation the kinds are those of brute force; by bounds alone empty and full are still true."""
    expected = kinds_of(dense_mask(mask, b, h, q_len, kv_len, tensors), block)
    exact = classified(mask, q_len, kv_len, block, b=b, h=h, tensors=tensors, exact=True)
    assert torch.equal(exact.kind.expand_as(expected), expected)
    proved = classified(mask, q_len, kv_len, block, b=b, h=h, tensors=tensors, exact=False)
    decided = proved.kind != PARTIAL
    assert torch.equal(proved.kind.expand_as(expected)[decided.expand_as(expected)], expected[decided.expand_as(expected)])
    return exact
