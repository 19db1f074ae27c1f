"""Graphs, plans and texts to look at, as the Triton backend makes them from a user's functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flexc import frontend, passes
from flexc.backends import TRITON
from flexc.codegen.triton import Plan, emit, make_plan
from flexc.ir.graph import Graph
from flexc.target import Target

HOPPER = Target.parse("sm_90a")
KERNELS = ("forward_kernel", "row_sums_kernel", "dq_kernel", "dkv_kernel")


def lowered(score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None) -> Graph:
    """The graph that is printed."""
    trace, _ = frontend.trace(score_mod, mask_mod)
    return TRITON.lower(passes.run(trace.graph))


def planned(graph: Graph, target: Target = HOPPER, **changes: Any) -> Plan:
    """A plan for bfloat16 and a small head."""
    given: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "group": 1, "tma": True, **changes}
    return make_plan(graph, target, **given)


def text_of(score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, **changes: Any) -> str:
    """The module for a user's functions."""
    graph = lowered(score_mod, mask_mod)
    return emit(graph, planned(graph, **changes), HOPPER, title="test")


def function(text: str, name: str) -> str:
    """One function of a module, without its decorator."""
    found = re.search(rf"^def {name}\(.*?(?=\n\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no function {name}"
    return found.group(0).rstrip() + "\n"


def loop(text: str, kernel: str, which: str) -> str:
    """The loop over `which` ("partial" or "full") blocks, or over the "ragged" end, of a kernel, without the other."""
    body = function(text, kernel)
    starts = {"partial": "# partial blocks: ", "full": "# full blocks: ", "ragged": "# a ragged end"}
    assert starts[which] in body, f"no loop over {which} blocks in {kernel}"
    first, *rest = [line for line in body.split(starts[which], 1)[1].splitlines()[1:] if line.strip()]
    lines = [first]
    for line in rest:
        if _indent(line) <= _indent(first):
            break
        lines.append(line)
    return "\n".join(lines)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
