"""Base-2 domain: the score in the units of `exp2`, with scale and log2(e) folded into neighbouring multiplications.

Guarantees: for every position, `logit2 * outer` equals the score times log2(e), up to float32 rounding, where the score is taken at
`raw * scale` (raw is the plain product q·k). `outer` is uniform and proved positive, so that a row maximum may be taken of `logit2`
before the multiplication, and the multiplication joins the subtraction of the maximum in one FMA. Position differences that are only used
as floats are formed in float32: exact below 2^24 tokens, and one FADD instead of an integer subtraction and a conversion. A captured
number that is added to the score stays finite, beyond ±2.36e38 as that number: the least float32, which stands for -inf in some biases,
would overflow when multiplied by log2(e), and a row of it alone would have no key where eager PyTorch gives the mean of all. Such a score
has no `outer`: an FMA that skips the rounding of a huge product, which the maximum has, makes weights of infinity.
Leaves alone: the mask, which never sees a score; products of positions that a step function reads (see `ir.ops.feeding_steps`), which are
rounded as the user wrote them. Those of the raw product are not exact to the last bit in any order.
"""

from __future__ import annotations

import math

from flexc.ir import ops
from flexc.ir.addends import adds_wide_capture, hands_on, wide_captures
from flexc.ir.bounds import bounds
from flexc.ir.collisions import is_diagonal
from flexc.ir.dependence import DIAGONAL, ELEMENT, rate_of
from flexc.ir.graph import FLOAT32, INPUTS, INT32, Graph, Node, Rewriter, const, const_value, input_node, inputs_of, substitute, topological
from flexc.ir.interval import Interval
from flexc.ir.ops import feeding_steps

LOG2E = math.log2(math.e)
_FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
RAW = input_node("raw")  # q·k before the scale
SCALE = input_node("scale")  # uniform, positive
_LIMIT = _FLOAT32_MAX / LOG2E * (1 - 2.0**-20)  # times log2(e), and a moderate score added, it is still finite
_MODERATE = 1e30


def lower_to_base2(graph: Graph) -> Graph:
    """Adds the outputs "logit2" and "outer" for a graph's score (the plain score if it has none), and rewrites its derivative factors.

    The outputs "dscore", "gather:k" and "dgather:k" are expressed in `raw` and `scale`, too; they stay factors in natural units.
    """
    score = graph.score if graph.score is not None else input_node("score")
    scaled = {input_node("score"): RAW * SCALE}
    roots = {name: substitute(node, scaled) for name, node in graph.outputs if name not in ("mask", "score")}
    root = substitute(_finite_addends(score, graph), scaled)
    stepped = [node for node in feeding_steps([root, *roots.values()]) if "raw" not in inputs_of(node)]
    exact = Rewriter(_float_positions)
    lower = Rewriter(_lowered, {node: exact(node) for node in stepped})
    outputs: dict[str, Node | None] = {name: lower(node) for name, node in roots.items()}
    lowered = lower(root)
    body, outer = (lowered, None) if adds_wide_capture(score, graph) else _split_positive_factor(lowered)
    if outer is None:
        body, outer = _push(const(LOG2E), lowered), const(1.0)
    else:
        outer = outer * LOG2E
    outputs |= {"score": None, "logit2": _fold(body), "outer": _fold(outer)}
    return graph.with_outputs(**outputs)


def _finite_addends(score: Node, graph: Graph) -> Node:
    """The score with captured values that are added to it, or to each other, limited to what log2(e) can multiply; infinities stay.

    A captured value that multiplies the score or a position is left alone: there an overflow is the user's own.
    """
    if not adds_wide_capture(score, graph):
        return score
    huge = wide_captures(score, graph)
    known = bounds([score], {name: Interval.of(-_MODERATE, _MODERATE) for name in INPUTS})

    def limited(node: Node) -> Node:
        if node.dtype != FLOAT32 or bool((known[node].lo >= -_LIMIT).all() & (known[node].hi <= _LIMIT).all()):
            return node
        if node in huge:
            inside = ops.apply("minimum", ops.apply("maximum", node, const(-_LIMIT)), const(_LIMIT))
            return ops.apply("where", ops.apply("lt", ops.apply("abs", node), const(math.inf)), inside, node)
        if node.op == "where":
            return ops.apply("where", node.args[0], *map(limited, node.args[1:]))
        return ops.apply(node.op, *map(limited, node.args)) if hands_on(node) else node

    return limited(score)


def _lowered(node: Node) -> Node:
    return _float_positions(node) if node.op == "cast" else _joined_factors(node)


def _joined_factors(node: Node) -> Node:
    """(x * a) * b → x * (a * b) where only x changes with every element: one multiplication for each element."""
    if node.op != "mul" or node.dtype != FLOAT32:
        return node
    for inner, factor in (node.args, node.args[::-1]):
        if inner.op == "mul" and not _is_element(factor):
            for element, low in (inner.args, inner.args[::-1]):
                if _is_element(element) and not _is_element(low):
                    return element * _fold(low * factor)
    return node


def _float_positions(node: Node) -> Node:
    """float(i - j) → float(i) - float(j), and likewise for sums: exact for positions, and each side is converted at its own rate."""
    if node.op == "cast" and node.dtype == FLOAT32 and node.args[0].dtype == INT32:
        inner = node.args[0]
        if inner.op in ("add", "sub") and all(_small_integer(a) for a in inner.args):
            left, right = (_float_positions(ops.cast(a, FLOAT32)) for a in inner.args)
            return ops.apply(inner.op, left, right)
        if inner.op in ("abs", "neg") and _small_integer(inner.args[0]):
            return ops.apply(inner.op, _float_positions(ops.cast(inner.args[0], FLOAT32)))
    return node


def _small_integer(node: Node) -> bool:
    """A sum of positions and small constants: below 2^25 in magnitude, so float32 holds its terms exactly."""
    if node.op == "input":
        return True
    if node.op == "const":
        return abs(const_value(node)) < 2**23
    return node.op in ("add", "sub", "neg", "abs") and all(_small_integer(a) for a in node.args)


def _uniform_positive(node: Node) -> bool:
    if node is SCALE:
        return True
    if node.op == "const":
        return node.dtype == FLOAT32 and 0 < const_value(node) < math.inf
    return node.op == "mul" and all(_uniform_positive(a) for a in node.args)


def _split_positive_factor(node: Node) -> tuple[Node, Node | None]:
    """node = body * outer with outer uniform and positive; outer is None if there is none."""
    outer: Node | None = None
    while node.op == "mul":
        left, right = node.args
        if _uniform_positive(right):
            node, factor = left, right
        elif _uniform_positive(left):
            node, factor = right, left
        else:
            break
        outer = factor if outer is None else outer * factor
    return node, outer


def _is_element(node: Node) -> bool:
    return rate_of(node) in (ELEMENT, DIAGONAL)


def _is_read_by_diagonal(node: Node) -> bool:
    """Whether it comes from a captured tensor and depends on q_idx - kv_idx alone: GPU kernels work it out once for each diagonal."""
    return any(below.op == "gather" and _is_element(below) for below in topological([node])) and is_diagonal(node)


def _absorbs(node: Node) -> bool:
    """Whether a uniform factor can be pushed into the node without a multiplication for each element."""
    if not _is_element(node) or _is_read_by_diagonal(node):
        return True
    if node.op == "mul":
        return any(_absorbs(a) for a in node.args)
    if node.op in ("add", "sub"):
        return all(_absorbs(a) for a in node.args)
    if node.op == "where":
        return all(_absorbs(a) for a in node.args[1:])
    return node.op == "neg" and _absorbs(node.args[0])


def _push(factor: Node, node: Node) -> Node:
    """factor * node, with the factor moved into parts of lower rate where that saves a multiplication for each element."""
    if not _is_element(node) or not _absorbs(node) or _is_read_by_diagonal(node):
        return _fold(node * factor)
    if node.op == "mul":
        left, right = node.args
        if not _is_element(right):
            return left * _push(factor, right)
        if not _is_element(left):
            return _push(factor, left) * right
        return _push(factor, left) * right if _absorbs(left) else left * _push(factor, right)
    if node.op in ("add", "sub", "neg"):
        return ops.apply(node.op, *(_push(factor, a) for a in node.args))
    return ops.apply("where", node.args[0], *(_push(factor, a) for a in node.args[1:]))


def _fold(node: Node) -> Node:
    """Products of constants at the top of a product become one constant."""
    if node.op != "mul":
        return node
    value, rest, constants = 1.0, [], []
    stack = [node]
    while stack:
        item = stack.pop()
        if item.op == "mul" and not _is_element(item):
            stack.extend(item.args)
        elif item.op == "const":
            constants.append(item)
            value *= const_value(item)
        else:
            rest.append(item)
    if len(rest) == 1 and rest[0] is node:
        return node
    if abs(value) > _FLOAT32_MAX and not any(math.isinf(const_value(c)) for c in constants):
        value = math.copysign(_FLOAT32_MAX, value)  # the least float32, which stands for -inf in some masks, must not become it
    result: Node | None = None
    for item in sorted(rest, key=lambda n: n.op):
        result = item if result is None else result * item
    if result is None:
        return const(value)
    return result if value == 1.0 else result * const(value)
