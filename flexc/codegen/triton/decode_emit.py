"""Fills the template of the split kernel."""

from __future__ import annotations

from dataclasses import dataclass

from flexc.codegen.levels import ROW, TILE, position_bounds
from flexc.codegen.templates import header_of, render
from flexc.codegen.triton.body import Body
from flexc.codegen.triton.decode_plan import DecodePlan
from flexc.codegen.triton.decode_range import key_range
from flexc.codegen.triton.emit import HELPERS, captured_arguments, print_kernel, tidy
from flexc.codegen.triton.plan import MAX_TOKENS
from flexc.ir.graph import Graph, input_node
from flexc.ir.ops import apply


@dataclass(frozen=True)
class Ends:
    """Of the keys of a row, and of a gap in them, the first and the one past the last: statements on one vector of rows, and expressions.

    "" for no end.

    Attributes:
        apart: rows of a tile that have the same ends stand together, this many from a multiple of it on.
    """

    statements: tuple[str, ...] = ()
    first: str = ""
    stop: str = ""
    gap_first: str = ""
    gap_stop: str = ""
    apart: int = 1


def _ends(graph: Graph, plan: DecodePlan, used: set[str]) -> Ends:
    found = key_range(graph, partly=plan.ragged)
    assert found is not None
    alone = found.graph(graph)
    body = Body(alone, position_bounds(alone, MAX_TOKENS), plan.tanh, plan.interpreted, uses=used)
    for _, node in alone.outputs:
        body.add(node)
    lines = body.take()
    # What is uniform in a tile is a vector here as well, of many tiles.
    ends = ("" if node is None else body.at(node, ROW) for node in (found.first, found.stop, found.gap_first, found.gap_stop))
    return Ends((*lines[TILE], *lines[ROW]), *ends, apart=_apart(alone, plan))


def _apart(ends: Graph, plan: DecodePlan) -> int:
    """The heads of a group stand together; where the ends read a row as the token that it is of, they have the same."""
    row = input_node("q_idx")
    token = apply("floordiv", row, plan.group)
    reads_row = any(row in node.args and node is not token for node in ends.nodes())
    return 1 if reads_row or plan.forward.rows % plan.group else plan.group


def emit_decode(graph: Graph, plan: DecodePlan, *, title: str = "") -> str:
    """The module's text: kernels and the host function `forward`.

    Args:
        graph: after packing, `passes.run` and `lower_to_base2`: outputs logit2, outer, mask.
        title: what the user calls the variant.
    """
    used: set[str] = set()
    kernel = print_kernel(graph, plan, position_bounds(graph, MAX_TOKENS), "forward", used)
    ends = _ends(graph, plan, used) if plan.walk == "range" else Ends()
    arguments, fixed = captured_arguments(graph)
    text = render(
        "triton/decode.py.j2",
        header=header_of("Attention of short queries", title, graph, plan),
        plan=plan,
        helpers=[HELPERS[name] for name in sorted(used) if name in HELPERS],
        needs_libdevice="libdevice" in used,
        arguments=arguments,
        fixed_arguments="".join(f', "{name}"' for name in fixed),
        captured=[(t.name, t.rank) for t in graph.tensors],
        kernel=kernel,
        ends=ends,
    )
    return tidy(text)
