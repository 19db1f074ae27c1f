"""At which rate each node changes: what lets a kernel compute and load it once a tile, a row, a column or a diagonal.

    uniform     the same everywhere
    head        reads batch or head only
    row         reads q_idx, perhaps batch and head
    column      reads kv_idx, perhaps batch and head
    diagonal    reads q_idx and kv_idx only through q_idx - kv_idx, perhaps batch and head
    element     everything else: the score, or both positions apart

Decided from the integer sums below (`ir.affine`), so (q_idx + 3) - kv_idx and 2 * kv_idx - 2 * q_idx are diagonals, as is
everything computed from diagonals and nothing faster. A fact, not a rewrite: the graph is left alone.
"""

from __future__ import annotations

from flexc.ir.affine import Affine, affine_form
from flexc.ir.graph import INT32, INT64, Graph, Node, topological

UNIFORM, HEAD, ROW, COLUMN, DIAGONAL, ELEMENT = "uniform", "head", "row", "column", "diagonal", "element"
RATES = (UNIFORM, HEAD, ROW, COLUMN, DIAGONAL, ELEMENT)

_INPUT_RATES = {"batch": HEAD, "head": HEAD, "q_idx": ROW, "kv_idx": COLUMN, "score": ELEMENT, "raw": ELEMENT, "scale": UNIFORM}


def rates(graph: Graph) -> dict[Node, str]:
    """The rate of every node of the graph."""
    return _rates(graph.nodes())


def rate_of(node: Node) -> str:
    """The rate of one node."""
    return _rates(topological([node]))[node]


def joined(*parts: str) -> str:
    """The rate of a function of values that have these rates."""
    rate = UNIFORM
    for part in parts:
        if rate in (UNIFORM, HEAD) or part in (UNIFORM, HEAD):
            rate = max(rate, part, key=RATES.index)
        elif rate != part:
            return ELEMENT
    return rate


def _rates(nodes: list[Node]) -> dict[Node, str]:
    found: dict[Node, str] = {}
    forms: dict[Node, Affine] = {}
    for node in nodes:
        if node.op == "input":
            found[node] = _INPUT_RATES[node.attrs[0]]
            continue
        rate = joined(*(found[a] for a in node.args))
        if rate not in (UNIFORM, HEAD) and node.dtype in (INT32, INT64):
            form = affine_form(node, through_casts=True, known=forms)
            if node not in form.terms:
                rate = min(rate, _rate_of_sum(form, found), key=RATES.index)
        found[node] = rate
    return found


def _rate_of_sum(form: Affine, found: dict[Node, str]) -> str:
    """A sum whose q_idx and kv_idx have opposite coefficients moves along diagonals."""
    rows, columns = form.coefficient("q_idx"), form.coefficient("kv_idx")
    parts = [found[term] for term in form.rest]
    if form.coefficient("batch") or form.coefficient("head"):
        parts.append(HEAD)
    if rows and rows == -columns:
        parts.append(DIAGONAL)
    else:
        parts.extend([ROW] * bool(rows) + [COLUMN] * bool(columns))
    return joined(*parts)
