"""How the gradients of captured tensors collide: which pairs of positions add to one element, as far as the index expression tells.

    uniform     one element for all pairs
    head        one element for each batch element or head
    row         one for each query
    column      one for each key
    diagonal    one for each difference q_idx - kv_idx: relative bias, also clamped, scaled or in buckets
    unique      one for each pair, which no other pair of the same batch element and head adds to: a pair bias
    arbitrary   anything else

A kernel can add up what collides before it writes, and needs no atomic addition for what never does. A tensor may be indexed any number
of times: each gather is a term with a class of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexc.errors import InternalError
from flexc.ir import ops
from flexc.ir.affine import Affine, affine_form
from flexc.ir.dependence import COLUMN, DIAGONAL, ELEMENT, HEAD, ROW, UNIFORM, joined, rate_of
from flexc.ir.graph import FLOAT32, INT32, Graph, Node, Rewriter, inputs_of

UNIQUE, ARBITRARY = "unique", "arbitrary"
CLASSES = (UNIFORM, HEAD, ROW, COLUMN, DIAGONAL, UNIQUE, ARBITRARY)


@dataclass(frozen=True)
class GradientTerm:
    """What one gather of a captured tensor contributes to the tensor's gradient.

    Attributes:
        number: k of the outputs gather:k and dgather:k.
        gather, factor: the element that is read, and d score / d element.
        slot: of the tensor.
        collisions: one of CLASSES.
        shared: of a unique term, the inputs among "batch" and "head" that the index does not read: entries that differ only in them add to
            the same elements.
        repeats: of a diagonal term, whether several diagonals may add to one element, as where far distances share a bucket.
    """

    number: int
    gather: Node
    factor: Node
    slot: int
    collisions: str
    shared: frozenset[str] = frozenset()
    repeats: bool = False


def gradient_terms(graph: Graph) -> tuple[GradientTerm, ...]:
    """The terms of a differentiated graph, lowered to base 2 or not, in the order of their numbers."""
    terms: list[GradientTerm] = []
    while (gather := graph.get(f"gather:{len(terms)}")) is not None:
        factor = graph.get(f"dgather:{len(terms)}")
        if factor is None:
            raise InternalError(f"the graph has no output dgather:{len(terms)}:\n{graph}")
        indices = [Rewriter(_integer_sum)(index) for index in gather.args]
        collisions, shared = _classify(indices)
        repeats = collisions == DIAGONAL and not any(map(_follows_diagonals, indices))
        terms.append(GradientTerm(len(terms), gather, factor, gather.attrs[0], collisions, shared, repeats))
    return tuple(terms)


def is_diagonal(node: Node) -> bool:
    """Whether the node is the same for all pairs with the same q_idx - kv_idx, batch and head, and may differ for others."""
    return rate_of(Rewriter(_integer_sum)(node)) == DIAGONAL


def _follows_diagonals(index: Node) -> bool:
    """Whether the index is a multiple of q_idx - kv_idx, and something that is the same for all pairs of a batch element and head."""
    form = affine_form(index, through_casts=True)
    return form.coefficient("q_idx") != 0 and all(rate_of(term) in (UNIFORM, HEAD) for term in form.rest)


def _classify(indices: list[Node]) -> tuple[str, frozenset[str]]:
    rate = joined(*map(rate_of, indices))
    if rate != ELEMENT:
        return rate, frozenset()
    read = frozenset[str]().union(*map(inputs_of, indices))
    shared = frozenset({"batch", "head"}) - read
    return (UNIQUE, shared) if _tells_apart(indices, shared) else (ARBITRARY, frozenset())


def _integer_sum(node: Node) -> Node:
    """float(i) - float(j) → float(i - j), which lowering to base 2 takes apart: the difference is what has a rate."""
    if node.op in ("add", "sub") and node.dtype == FLOAT32:
        operands = [a.args[0] for a in node.args if a.op == "cast" and a.args[0].dtype == INT32]
        if len(operands) == 2:
            return ops.cast(ops.apply(node.op, *operands), FLOAT32)
    return node


def _tells_apart(indices: list[Node], given: frozenset[str]) -> bool:
    """Whether the indices say which batch element, head, query and key they are of, once the `given` ones are known.

    An index tells a position apart if it is a multiple of that position alone plus what is known already and not negative: one below 0
    counts from the end, and two such may meet.
    """
    known, forms = set(given), [affine_form(index) for index in indices]
    found = True
    while found:
        found = {name for form in forms if (name := _only_unknown(form, known))}
        known |= found
    return known == {"batch", "head", "q_idx", "kv_idx"}


def _only_unknown(form: Affine, known: set[str]) -> str:
    """The one position that the sum depends on besides known ones; "" if there is none or the sum may be negative."""
    if form.rest or form.constant < 0 or any(coefficient < 0 for coefficient in form.terms.values()):
        return ""
    unknown = {term.attrs[0] for term in form.terms} - known
    return unknown.pop() if len(unknown) == 1 else ""


__all__ = [
    "ARBITRARY",
    "CLASSES",
    "COLUMN",
    "DIAGONAL",
    "HEAD",
    "ROW",
    "UNIFORM",
    "UNIQUE",
    "GradientTerm",
    "gradient_terms",
    "is_diagonal",
]
