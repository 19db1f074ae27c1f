"""Fills the CuTe template: prints the graph at its rates and hands the plan through. Makes no choice of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexc.codegen.cute.kernel import print_kernel
from flexc.codegen.cute.plan import Plan
from flexc.codegen.cute.rows import CUTE_DTYPES
from flexc.codegen.levels import captured
from flexc.codegen.templates import header_of, render
from flexc.ir.graph import Graph, loaded_dtype
from flexc.target import Target


def emit(graph: Graph, plan: Plan, target: Target, *, title: str = "") -> str:
    """The module's text: the kernel, its launch, and the host function `forward`.

    Args:
        graph: after `passes.run`, `differentiate` and `lower_to_base2`: outputs logit2, outer and mask are read.
        plan: from `make_plan`.
        target: for the number of its SMs and the size of its L2 cache.
        title: what the user calls the variant.
    """
    kernel = print_kernel(
        graph,
        approximate=plan.approximate,
        exact=plan.exact,
        shifts=plan.shift is None,
        diagonals=True,
        votes=plan.forward.votes,
    )
    tensors = [(captured(graph, t.name), t.dtype, t.rank, loaded_dtype(t.dtype)) for t in graph.tensors]
    scalars = [(captured(graph, s.name), CUTE_DTYPES[s.dtype]) for s in graph.scalars]
    text = render(
        "cute/forward.py.j2",
        header=header_of("Attention", title, graph, plan),
        plan=plan,
        kernel=kernel,
        captured=tensors,
        scalars=scalars,
        signature=_signature(plan, tensors, scalars),
        l2_bytes=target.l2_bytes,
        sm_count=target.sm_count,
    )
    return tidy(text)


def _signature(plan: Plan, tensors: list[tuple[str, str, int, str]], scalars: list[tuple[str, str]]) -> list[str]:
    """What each argument of `launch` is, in order. Equal names of sizes are equal sizes."""
    own = f'"{plan.dtype}"'
    dim, dim_v = (-(-width // 8) * 8 for width in (plan.head_dim, plan.head_dim_v))  # the host makes rows of whole 16 bytes
    lines = [
        f'tensor("q", {own}, ("batch", "heads", "q_len", {dim}), bulk=True)',
        f'tensor("k", {own}, ("batch", "kv_heads", "kv_len", {dim}), bulk=True)',
        f'tensor("v", {own}, ("batch", "kv_heads", "kv_len", {dim_v}), bulk=True)',
        f'tensor("out", {own}, ("batch", "heads", "q_len", {dim_v}), bulk=True)',
        'tensor("lse", "float32", ("batch", "heads", "q_len"), compact=True)',
    ]
    if plan.max_scores:
        lines.append('tensor("largest", "float32", ("batch", "heads", "q_len"), compact=True)')
    counter = ['tensor("counter", "int32", (1,), compact=True)'] if plan.forward.scheduler == "dynamic" else []
    return lines + argument_lines(plan.walk == "runs", tensors, scalars, "row_blocks", counter)


def argument_lines(
    has_map: bool,
    tensors: list[tuple[str, str, int, str]],
    scalars: list[tuple[str, str]],
    blocks: str,
    counter: Sequence[str] = (),
) -> list[str]:
    """What follows the tensors of a kernel: map over `blocks`, `counter`, captured tensors, scale, section, scalars."""
    lines = [*(map_lines(blocks) if has_map else []), *counter]
    for name, dtype, rank, _ in tensors:
        sizes = ", ".join(f'"{name}_size{i}"' for i in range(max(rank, 1)))
        lines.append(f'tensor("{name}", "{"uint8" if dtype == "bool" else dtype}", ({sizes},))')
    lines += ['number("scale", "float32")', 'number("section", "int32")']
    return lines + [f'number("{name}", "{dtype.lower()}")' for name, dtype in scalars]


def map_lines(blocks: str) -> list[str]:
    """The tensors of a walk over `blocks`."""
    return [
        f'tensor("map_rows", "int32", ("map_batch", "map_heads", "{blocks}", 4), compact=True, align=16)',
        'tensor("map_partial", "int32", ("partial_blocks",), compact=True)',
        'tensor("map_full", "int32", ("full_runs", 2), compact=True)',
        f'tensor("map_order", "int32", ("{blocks}",), compact=True)',
    ]


def tidy(text: str) -> str:
    """Blank lines only where a reader wants them: two between functions, at most one elsewhere, none after what opens a block."""
    lines = [line.rstrip() for line in text.splitlines()]
    result: list[str] = []
    for line in lines:
        if not line and (not result or not result[-1] or result[-1].endswith((":", "(", ","))):
            continue
        if re.match(r"@cute\.|def |(?:FORWARD|ROW_SUMS) = ", line) and result and not result[-1].startswith("@"):
            while result and not result[-1]:
                result.pop()
            result += ["", ""]
        if line.lstrip().startswith(")") and result and not result[-1]:
            result.pop()
        result.append(line)
    return re.sub(r"\n+$", "", "\n".join(result)) + "\n"
