"""The user's functions as the backward kernel prints them: with queries and keys exchanged, because its tiles are [keys, queries].

`Body` places statements by the rows and columns of a fragment. In the backward kernel a row is a key and a column is a query, so the
graph is printed with its two positions exchanged, and the names in the text are exchanged back.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from flexc.codegen.cute.backward_terms import Contributions, factors_of, outputs_of, print_contributions
from flexc.codegen.cute.body import Body
from flexc.codegen.cute.kernel import MAX_TOKENS, Kernel, Staged, print_kernel
from flexc.codegen.levels import position_bounds
from flexc.ir.bounds import anything, bounds
from flexc.ir.graph import FLOAT32, Graph, Node, Rewriter, input_node
from flexc.ir.interval import Interval

_EXCHANGED = {input_node("q_idx"): input_node("kv_idx"), input_node("kv_idx"): input_node("q_idx")}
_NAMES = {"q_idx": "kv_idx", "kv_idx": "q_idx", "key": "query"}


@dataclass
class BackwardKernel(Kernel):
    """As `Kernel`, with rows for keys and columns for queries.

    Attributes:
        factor: the derivative of the score by the raw score, of an element; empty where it is 1.
        guards_factor: it may be infinite or NaN where an element has no weight.
        guards_queries: the score of a query past the end may be NaN or infinite, and its weight must be set to 0.
        contributions: to the gradients of captured tensors; None where none is asked for.
    """

    guards_factor: bool = False
    guards_queries: bool = False
    contributions: Contributions | None = None

    @property
    def lines(self) -> int:
        """Statements for each element."""
        return len(self.element) + (len(self.contributions.element) if self.contributions else 0)

    @property
    def is_light(self) -> bool:
        """The derivative of the score is 1 and little is worked out for an element: registers suffice for more queries in a step."""
        return not self.factor and not self.loads_elements and self.lines <= 2

    @property
    def sums(self) -> int:
        """Registers of a thread that hold sums for captured tensors."""
        return sum(2 if term.by_key else 1 for term in self.contributions.terms) if self.contributions else 0


def print_backward(graph: Graph, *, approximate: bool, exact: bool) -> BackwardKernel:
    """The statements of a graph that is differentiated and lowered to base 2.

    Raises:
        UnsupportedError: a gradient that is asked for is not of those that the kernel works out.
    """
    factors = factors_of(graph)
    wanted = {"dscore": factors.held, **(outputs_of(factors) if factors.terms else {})}
    kept = {name: node for name, node in graph.outputs if name in ("logit2", "outer", "mask")}
    exchange = Rewriter(lambda node: _EXCHANGED.get(node, node))
    outputs = {name: exchange(node) for name, node in (kept | wanted).items() if node is not None}
    lines = {exchange(node): line for node, line in graph.lines.items()}
    exchanged = Graph(tuple(outputs.items()), graph.tensors, graph.scalars, lines)
    body = Body(exchanged, position_bounds(exchanged, MAX_TOKENS), approximate, exact)
    kernel = print_kernel(exchanged, approximate=approximate, exact=exact, derivative=factors.held is not None, body=body)
    contributions = None
    if factors.terms:
        finite = [_is_finite(graph, times) for _, _, times in factors.terms]
        contributions = print_contributions(exchanged, body, kernel, factors, finite)
    given = {field.name: _renamed(getattr(kernel, field.name)) for field in dataclasses.fields(Kernel)}
    return BackwardKernel(
        **given,
        guards_factor=factors.held is not None and not _is_finite(graph, factors.held),
        guards_queries=_is_wild_past_the_end(graph),
        contributions=_renamed(contributions),
    )


def _renamed(value: Any) -> Any:
    """Texts with the names of positions exchanged; comments stay."""
    if isinstance(value, str):
        text, *comment = value.split("  # ", 1)
        return "  # ".join([re.sub(r"\b(q_idx|kv_idx|key)\b", lambda found: _NAMES[found[0]], text), *comment])
    if isinstance(value, (list, tuple)):
        return type(value)(_renamed(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: _renamed(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _is_finite(graph: Graph, node: Node) -> bool:
    known = position_bounds(graph.with_outputs(asked=node), MAX_TOKENS)[node]
    return not known.nan and known.within(-1e30, 1e30)


def _is_wild_past_the_end(graph: Graph) -> bool:
    """Whether the logit of a query past the end, whose raw product is 0, may be NaN or +inf, moderate captured values taken for granted."""
    position, moderate = Interval.of(0.0, float(MAX_TOKENS - 1)), Interval.of(-1e6, 1e6)
    inputs = {name: position for name in ("q_idx", "kv_idx", "batch", "head")}
    inputs |= {"raw": Interval.of(0.0, 0.0), "scale": Interval.of(0.0, 1e30)}
    roots = [node for node in (graph.get("logit2"), graph.get("outer")) if node is not None]
    scalars = [moderate if s.dtype == FLOAT32 else anything(s.dtype) for s in graph.scalars]
    found = bounds(roots, inputs, scalars, lambda node, indices: moderate if node.dtype == FLOAT32 else anything(node.dtype))
    return any(found[root].nan or bool((found[root].hi == math.inf).any()) for root in roots)


__all__ = ["BackwardKernel", "Staged", "print_backward"]
