"""The CPU backend, for machines without a GPU: a graph becomes a Python module of blockwise PyTorch.

    plan(graph, q_len=..., kv_len=..., head_dim=..., head_dim_v=..., dtype=...) -> Plan
    emit(graph, plan) -> text of a module with

        forward(q, k, v, scale, tensors, scalars, rows, block) -> (out, lse)
        backward(q, k, v, out, lse, dout, dlse, scale, tensors, scalars, rows, block) -> (dq, dk, dv, dtensors)

`rows` are the block map's runs of key blocks for each block of queries (`BlockMap.rows()`), or None: every block is then computed, with
the mask if there is one. `block` is the block map's (block_q, block_kv). lse is float32 (float64 for float64 inputs). dtensors has an
entry for each captured tensor, None where no gradient was asked for.

How it is fast on a few cores: a tile of scores stays in the caches and is overwritten in place; neighbouring blocks are joined into one
wide matrix product, in which the mask is evaluated only in the columns of partial blocks; heads that share keys fold into the rows of
that product; the exponential is exp2. Memory is O(S): a tile, and float32 sums of the size of q, k and v. Sums are made in a fixed order,
so a second run is bitwise equal.
"""

from flexc.codegen.cpu.emit import emit
from flexc.codegen.cpu.plan import Plan, block_sizes, plan

__all__ = ["Plan", "block_sizes", "emit", "plan"]
