"""Gradients of captured tensors in the backward kernel: what a pair of positions contributes, from which registers, and where it goes.

With p the weight of a pair, dP its gradient and delta that of the row, a pair adds p * (dP - delta) * f to the gradient of what the score
depends on by the factor f: the raw score, and each captured element that is read. One register of a pair holds p times a factor that
depends on the raw score, and 16 bits more hold p alone, for the values' gradient. So all factors that depend on the raw score must be
multiples of one of them, by numbers that depend on positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexc.codegen.cute.body import BLOCK, BLOCK_ROW, Body
from flexc.codegen.cute.kernel import Kernel, bases_of, take_rows
from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured
from flexc.errors import UnsupportedError
from flexc.ir.collisions import ARBITRARY, DIAGONAL, UNIQUE, GradientTerm, gradient_terms
from flexc.ir.collisions import ROW as QUERY
from flexc.ir.graph import Graph, Node, const, const_value, inputs_of, is_const

HELD, WEIGHTS = "scores", "weights"  # the registers of a pair: weight times what is held, and the rounded weight
_REFUSED = {
    QUERY: "by the query",
    DIAGONAL: "by q_idx - kv_idx",
    UNIQUE: "for each pair of positions",
    ARBITRARY: "at indices that may meet anywhere",
}


@dataclass(frozen=True)
class Factors:
    """How the factors of a graph are made from what a pair's registers hold.

    Attributes:
        held: what the weights are multiplied by before anything else; None for 1.
        dscore: (registers, what they are multiplied by for the raw score).
        terms: the same for each captured element that is read.
    """

    held: Node | None
    dscore: tuple[str, Node]
    terms: tuple[tuple[GradientTerm, str, Node], ...]


@dataclass(frozen=True)
class Term:
    """What the pairs add to one captured tensor's gradient by one gather.

    Attributes:
        name: of the sum in registers, of one number, or one for each of a thread's two keys if by_key.
        buffer: of the gradient.
        registers: HELD or WEIGHTS; times: "" or " * factor".
        guard: the factor may be infinite or NaN where a pair has no weight.
        offset, inside: of the element in the buffer.
    """

    name: str
    buffer: str
    by_key: bool
    registers: str
    times: str
    guard: bool
    offset: str
    inside: str


@dataclass
class Contributions:
    """All that a step adds to gradients of captured tensors.

    Attributes:
        block, block_row, column, element, bases, shared: as of `Kernel`, for what is printed here.
        registers, times: of the raw score's gradient, as of a term.
        reads_columns: a statement names the position of a column.
    """

    terms: list[Term] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    block_row: list[str] = field(default_factory=list)
    column: list[str] = field(default_factory=list)
    element: list[str] = field(default_factory=list)
    bases: list[tuple[str, str]] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    registers: str = HELD
    times: str = ""
    reads_columns: bool = False

    @property
    def reads_weights(self) -> bool:
        """Something is made from the rounded weights."""
        return WEIGHTS in (self.registers, *(term.registers for term in self.terms))


def factors_of(graph: Graph) -> Factors:
    """How the kernel finds the factors of a differentiated graph.

    Raises:
        UnsupportedError: it cannot, or cannot add up what they give.
    """
    terms = gradient_terms(graph)
    dscore = graph.get("dscore") or const(1.0)
    if not terms:
        return Factors(None if is_const(dscore, 1.0) else dscore, (HELD, const(1.0)), ())
    for term in terms:
        if term.collisions in _REFUSED:
            name = graph.tensors[term.slot].name
            raise UnsupportedError(f"a gradient of {name}, read {_REFUSED[term.collisions]}, in the backward kernel of the cute backend")
    wanted = [dscore, *(term.factor for term in terms)]
    for held in [node for node in wanted if _reads_score(node)] or [None]:
        found = [_from_registers(node, held) for node in wanted]
        if None not in found:
            return Factors(held, found[0], tuple((t, *f) for t, f in zip(terms, found[1:], strict=True)))  # type: ignore[misc, arg-type]
    names = ", ".join(dict.fromkeys(graph.tensors[term.slot].name for term in terms))
    raise UnsupportedError(
        f"gradients of {names} in the backward kernel of the cute backend: several derivatives depend on the score, each in its own way"
    )


def gradient_slots(graph: Graph) -> list[int]:
    """The captured tensors that pairs add to the gradients of."""
    return sorted({term.slot for term in gradient_terms(graph)})


def _reads_score(node: Node) -> bool:
    return bool({"raw", "score"} & inputs_of(node))


def _from_registers(node: Node, held: Node | None) -> tuple[str, Node] | None:
    """(registers, factor) whose product with a pair's dP - delta is what the node contributes; None if there are none."""
    if not _reads_score(node):
        return (HELD if held is None else WEIGHTS), node
    if held is None:
        return None
    rest = _parts(node)
    for part in _parts(held):
        if part not in rest:
            return None
        rest.remove(part)
    quotient = const(1.0)
    for part in rest:
        quotient = part if is_const(quotient, 1.0) else quotient * part
    return None if _reads_score(quotient) else (HELD, quotient)


def _parts(node: Node) -> list[Node]:
    """Numbers whose product the node is."""
    if node.op == "mul":
        return [part for a in node.args for part in _parts(a)]
    if node.op == "neg":
        return [const(-1.0), *_parts(node.args[0])]
    if node.op == "add" and node.args[1].op == "const" and const_value(node.args[1]) < 0:
        return [const(-1.0), const(-const_value(node.args[1])) - node.args[0]]  # t * t - 1 and 1 - t * t are multiples of each other
    return [node]


def outputs_of(factors: Factors) -> dict[str, Node]:
    """What must be printed: the nodes in `factors`, by name."""
    found = {"times": factors.dscore[1]}
    for term, _, times in factors.terms:
        found |= {f"times:{term.number}": times, f"gather:{term.number}": term.gather}
    return found


def print_contributions(graph: Graph, body: Body, kernel: Kernel, factors: Factors, finite: Sequence[bool]) -> Contributions:
    """Print the outputs that `outputs_of` names; `graph` has them, and `body` has printed the rest of it into `kernel`.

    Statements of the tile and of rows go there, too. `finite`: whether each term's factor is.
    """
    body.begin_function()
    found = Contributions(registers=factors.dscore[0])
    times = _node(graph, "times")
    body.add(times)
    found.times = _product(body, times)
    for (term, registers, _), is_finite in zip(factors.terms, finite, strict=True):
        times, gather = _node(graph, f"times:{term.number}"), _node(graph, f"gather:{term.number}")
        for node in (times, *gather.args):
            body.add(node)
        name = f"{captured(graph, graph.tensors[term.slot].name)}_grad"
        place = body.level(gather)
        offset, inside = body.address(gather, name, f"{name}{term.number}", place)
        found.terms.append(
            Term(f"{name}{term.number}", name, place == ROW, registers, _product(body, times), not is_finite, offset, inside)
        )
    lines = body.take()
    kernel.tile, kernel.row = kernel.tile + lines[TILE], kernel.row + lines[ROW]
    take_rows(body, kernel)
    found.block, found.block_row, found.column, found.element = (lines[place] for place in (BLOCK, BLOCK_ROW, COLUMN, ELEMENT))
    found.bases, found.shared = bases_of(body), list(body.shared)
    found.reads_columns = body.reads_columns
    return found


def _node(graph: Graph, name: str) -> Node:
    node = graph.get(name)
    assert node is not None
    return node


def _product(body: Body, times: Node) -> str:
    return "" if is_const(times, 1.0) else f" * {body.at(times, ELEMENT)}"


__all__ = ["Contributions", "Factors", "Term", "factors_of", "gradient_slots", "outputs_of", "print_contributions"]
