"""Fills the CuTe template of the backward kernels. Makes no choice of its own."""

from __future__ import annotations

from flexc.codegen.cute.backward_kernel import print_backward
from flexc.codegen.cute.backward_plan import GROUPS, BackwardPlan
from flexc.codegen.cute.backward_terms import gradient_slots
from flexc.codegen.cute.emit import argument_lines, map_lines, tidy
from flexc.codegen.cute.rows import CUTE_DTYPES
from flexc.codegen.levels import captured
from flexc.codegen.templates import header_of, render
from flexc.ir.graph import Graph, loaded_dtype
from flexc.target import Target


def emit_backward(graph: Graph, plan: BackwardPlan, target: Target, *, title: str = "") -> str:
    """The module's text: its kernels, their launches, and the host function `backward`.

    Args:
        graph: after `passes.run`, `differentiate` and `lower_to_base2`: outputs logit2, outer, dscore and mask are read.
        plan: from `make_backward_plan`.
        target: for the size of its L2 cache.
        title: what the user calls the variant.
    """
    tensors = [(captured(graph, t.name), t.dtype, t.rank, loaded_dtype(t.dtype)) for t in graph.tensors]
    scalars = [(captured(graph, s.name), CUTE_DTYPES[s.dtype]) for s in graph.scalars]
    gradients = {slot: f"{tensors[slot][0]}_grad" for slot in gradient_slots(graph)}
    text = render(
        "cute/backward.py.j2",
        header=header_of("Gradients of attention", title, graph, plan),
        plan=plan,
        kernel=print_backward(graph, approximate=plan.approximate, exact=plan.exact),
        captured=tensors,
        gradients=gradients,
        scalars=scalars,
        signatures=_signatures(plan, tensors, gradients, scalars),
        l2_bytes=target.l2_bytes,
        sm_count=target.sm_count,
    )
    return tidy(text)


def _signatures(
    plan: BackwardPlan, tensors: list[tuple[str, str, int, str]], gradients: dict[int, str], scalars: list[tuple[str, str]]
) -> dict[str, list[str]]:
    """What each argument of the launch functions is, in order. Equal names of sizes are equal sizes."""
    own, scale = f'"{plan.dtype}"', 'number("scale", "float32")'
    dim, dim_v = (-(-width // 8) * 8 for width in (plan.head_dim, plan.head_dim_v))  # the host makes rows of whole 16 bytes

    def given(name: str, heads: str, tokens: str, width: int) -> str:
        return f'tensor("{name}", {own}, ("batch", "{heads}", "{tokens}", {width}), bulk=True)'

    def of_rows(name: str) -> str:
        return f'tensor("{name}", "float32", ("batch", "heads", "q_len"), compact=True)'

    def by_blocks(name: str, numbers: int) -> str:
        return f'tensor("{name}", "float32", ("all_query_blocks", {numbers}), compact=True, align=16)'

    rows = plan.backward.rows
    row_sums, dq_sums = by_blocks("row_sums", 2 * rows + 4), by_blocks("dq_sums", rows * plan.padded_dim)

    first = ['tensor("counter", "int32", (1,), compact=True)'] if plan.counts_tiles else []
    if plan.deterministic:
        first.append(f'tensor("turns", "int32", ("all_query_blocks", {GROUPS}), compact=True)')
    ranks = 'tensor("ranks", "int32", ("map_batch", "map_heads", "key_blocks", "query_blocks"), compact=True)'
    if plan.has_ranks:
        first.append(ranks)
    for slot, name in gradients.items():
        sizes = ", ".join(f'"{tensors[slot][0]}_size{i}"' for i in range(max(tensors[slot][2], 1)))
        first.append(f'tensor("{name}", "float32", ({sizes},), compact=True)')
    dk, dv = given("dk", "kv_heads", "kv_len", dim), given("dv", "kv_heads", "kv_len", dim_v)
    numbers = plan.backward.columns * (plan.padded_dim + plan.padded_dim_v)
    key_sums = f'tensor("key_sums", "float32", ("all_key_blocks", {numbers}), compact=True, align=16)'
    return {
        "row_sums": [
            given("out", "heads", "q_len", dim_v),
            given("dout", "heads", "q_len", dim_v),
            of_rows("lse"),
            of_rows("dlse"),
            'number("has_dlse", "int32")',
            row_sums,
            dq_sums,
        ],
        **({"ranks": [*map_lines("key_blocks"), ranks]} if plan.has_ranks else {}),
        "backward": [
            given("q", "heads", "q_len", dim),
            given("k", "kv_heads", "kv_len", dim),
            given("v", "kv_heads", "kv_len", dim_v),
            given("dout", "heads", "q_len", dim_v),
            *([key_sums] if plan.by_head else [dk, dv]),
            row_sums,
            dq_sums,
            *argument_lines(plan.walk == "runs", tensors, scalars, "key_blocks", first),
        ],
        "convert": [dq_sums, given("dq", "heads", "q_len", dim), scale],
        **({"convert_keys": [key_sums, dk, dv, scale]} if plan.by_head else {}),
    }
