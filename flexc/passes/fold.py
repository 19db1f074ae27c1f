"""Constant folding, canonical form, and the algebra that float32 allows.

Guarantees: a NaN or an infinity never becomes a number (x * 0 stays for floats, x - x too), integers wrap as int32 does, and a value
that decides something (see `ir.ops.feeding_steps`) is computed exactly as written. Elsewhere a result may differ in its last bits, by the
sign of a zero, or by an overflow on the way that is gone. Canonical: constants last, `x - c` as `x + (-c)`, no `not` on a comparison of
integers, no selection by a negated or constant condition, truth values by and/or instead of selection. Outputs that say nothing (a score
that is the raw score, a mask that is true) are dropped. Leaves alone: gathers, the order of two operands that are not constants, and order
comparisons (a > b does not become b < a).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flexc.errors import InternalError
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, POSITIONS, Graph, Node, const, const_value, input_node, is_const, make
from flexc.ir.ops import TABLE, TORCH_DTYPES, apply, cast, cast_eager, feeding_steps, has_trait

_FLOAT32 = torch.finfo(torch.float32)


def fold_constants(graph: Graph) -> Graph:
    """The graph in canonical form; the same object if it has it already."""
    for _ in range(8):
        exact = feeding_steps(node for _, node in graph.outputs)
        folded: dict[Node, Node] = {}
        for node in graph.nodes():
            args = tuple(folded[a] for a in node.args)
            rebuilt = node if args == node.args else make(node.op, args, node.attrs, node.dtype, node.where)
            folded[node] = _simplified(rebuilt, node in exact)
        simpler = _without_idle_outputs(graph.with_outputs(**{name: folded[node] for name, node in graph.outputs}))
        if simpler is graph:
            return graph
        graph = simpler
    return graph


def _without_idle_outputs(graph: Graph) -> Graph:
    if graph.score is input_node("score"):
        graph = graph.with_outputs(score=None)
    if graph.mask is not None and is_const(graph.mask, True):
        graph = graph.with_outputs(mask=None)
    return graph


# A rule gets a node whose operands are canonical and `op`, which builds canonical nodes at the user's line; None: nothing to do.
Builder = Callable[..., Node]
Rule = Callable[[Node, Builder], "Node | None"]


def _simplified(node: Node, exact: bool) -> Node:
    def build(name: str, *operands: Node | int | float | bool) -> Node:
        return _simplified(apply(name, *operands, where=node.where), exact)

    rules: list[Rule] = [_fold_values, _order_operands, *_RULES.get(node.op, ())]
    if not exact:
        rules += _INEXACT_RULES.get(node.op, ())
    if has_trait(node, "compare"):
        rules += _COMPARE_RULES
    if has_trait(node, "idempotent"):
        rules.append(_idempotent)
    for rule in rules:
        simpler = rule(node, build)
        if simpler is not None and simpler is not node:
            if simpler.dtype != node.dtype:
                raise InternalError(f"folding {node} made {node.dtype} into {simpler.dtype}")
            return _simplified(simpler, exact)
    return node


# --- every op -----------------------------------------------------------------------------------------------------------------------


def _fold_values(node: Node, op: Builder) -> Node | None:
    if not node.args or any(a.op != "const" for a in node.args) or node.op == "gather":
        return None
    values = [torch.tensor(const_value(a), dtype=TORCH_DTYPES[a.dtype]) for a in node.args]
    if node.op == "cast":
        value = values[0].double()
        limit = 2.0**31 if node.dtype == INT32 else 2.0**63
        if node.args[0].dtype == FLOAT32 and node.dtype in (INT32, INT64) and not bool(value.abs() < limit):
            return None  # no meaning that hardware agrees on
        return const(cast_eager(values[0], node.dtype).item(), node.dtype, node.where)
    if node.op in ("floordiv", "floormod") and node.dtype != FLOAT32 and is_const(node.args[1], 0):
        return None
    value = TABLE[node.op].eager(*values).item()
    return const(math.nan if value != value else value, node.dtype, node.where)


def _order_operands(node: Node, op: Builder) -> Node | None:
    if len(node.args) == 2 and node.args[0].op == "const":
        if has_trait(node, "commutative"):
            return op(node.op, node.args[1], node.args[0])
        if node.op in _MIRRORED:
            return op(_MIRRORED[node.op], node.args[1], node.args[0])
    return None


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


def _idempotent(node: Node, op: Builder) -> Node | None:
    """f(f(x)) = f(x) for one operand, f(x, x) = x and f(f(x, y), y) = f(x, y) for two."""
    if len(node.args) == 1:
        return node.args[0] if node.args[0].op == node.op else None
    x, y = node.args
    if x is y:
        return x
    for inner, outer in ((x, y), (y, x)):
        if inner.op == node.op and outer in inner.args:
            return inner
    return None


def _regrouped(node: Node, op: Builder) -> Node | None:
    """(x ∘ c1) ∘ c2 = x ∘ (c1 ∘ c2)."""
    x, c = node.args
    if c.op == "const" and x.op == node.op and x.args[1].op == "const":
        return op(node.op, x.args[0], op(node.op, x.args[1], c))
    return None


# --- arithmetic ---------------------------------------------------------------------------------------------------------------------


def _negative(c: Node) -> Node:
    """The constant with its sign changed; integers wrap."""
    value = -const_value(c)
    if (c.dtype == INT32 and value == 2**31) or (c.dtype == INT64 and value == 2**63):
        return c
    return const(value, c.dtype, c.where)


def _is_whole(node: Node) -> bool:
    return node.dtype != FLOAT32


def _add(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if is_const(y, 0):
        return x
    if y.op == "neg":
        return op("sub", x, y.args[0])
    if x.op == "neg":
        return op("sub", y, x.args[0])
    if _is_whole(node):
        if y.op == "const" and x.op == "sub" and x.args[0].op == "const":
            return op("sub", op("add", x.args[0], y), x.args[1])
        return _regrouped(node, op)
    return None


def _sub(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if y.op == "const":
        return op("add", x, _negative(y))
    if y.op == "neg":
        return op("add", x, y.args[0])
    if is_const(x, 0):
        return op("neg", y)
    if _is_whole(node):
        if x is y:
            return const(0, node.dtype)
        if x.op == "const" and y.op == "add" and y.args[1].op == "const":
            return op("sub", op("sub", x, y.args[1]), y.args[0])
        if x.op == "const" and y.op == "sub" and y.args[0].op == "const":
            return op("add", y.args[1], op("sub", x, y.args[0]))
    elif all(a.op == "cast" and _is_position(a.args[0]) for a in node.args):
        # The difference of two positions fits int32, and rounds once instead of twice.
        return cast(op("sub", x.args[0], y.args[0]), FLOAT32)
    return None


def _mul(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if is_const(y, 1):
        return x
    if is_const(y, -1):
        return op("neg", x)
    if x.op == "neg" and y.op == "const":
        return op("mul", x.args[0], _negative(y))
    if x.op == "neg" and y.op == "neg":
        return op("mul", x.args[0], y.args[0])
    if _is_whole(node):
        return const(0, node.dtype) if is_const(y, 0) else _regrouped(node, op)
    return None


def _mul_inexact(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if _is_whole(node) or y.op != "const":
        return None
    if x.op == "mul" and x.args[1].op == "const":
        product = const_value(x.args[1]) * const_value(y)
        if all(map(_is_ordinary, (const_value(x.args[1]), const_value(y), product))):
            return op("mul", x.args[0], const(product))
    return None


def _is_ordinary(value: float) -> bool:
    """Neither zero, denormal, infinite nor NaN in float32."""
    return _FLOAT32.tiny <= abs(value) <= _FLOAT32.max


def _truediv(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if is_const(y, 1):
        return x
    if y.op == "const" and _is_ordinary(const_value(y)) and abs(math.frexp(const_value(y))[0]) == 0.5:
        inverse = 1.0 / const_value(y)  # of a power of two: exact
        return op("mul", x, const(inverse)) if _is_ordinary(inverse) else None
    return None


def _truediv_inexact(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if y.op == "const" and _is_ordinary(const_value(y)) and _is_ordinary(1.0 / const_value(y)):
        return op("mul", x, const(1.0 / const_value(y)))
    if is_const(x, 1) and y.op == "sqrt":
        return op("rsqrt", y.args[0])
    return None


def _floordiv(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if _is_whole(node):
        if is_const(y, 1):
            return x
        if is_const(y, -1):
            return op("neg", x)
    return None


def _floormod(node: Node, op: Builder) -> Node | None:
    return const(0, node.dtype) if _is_whole(node) and is_const(node.args[1], 1) else None


def _neg(node: Node, op: Builder) -> Node | None:
    (x,) = node.args
    if x.op == "neg":
        return x.args[0]
    if x.op == "mul" and x.args[1].op == "const":
        return op("mul", x.args[0], _negative(x.args[1]))
    if x.op == "sub" and (_is_whole(node) or x.args[0].op == "const"):
        return op("sub", x.args[1], x.args[0])
    if x.op == "add" and x.args[1].op == "const":
        return op("sub", _negative(x.args[1]), x.args[0])
    return None


def _abs(node: Node, op: Builder) -> Node | None:
    (x,) = node.args
    if _is_position(x):
        return x
    return op("abs", x.args[0]) if x.op == "neg" else None


def _is_position(node: Node) -> bool:
    """One of batch, head, q_idx, kv_idx: never negative."""
    return node.op == "input" and node.attrs[0] in POSITIONS


def _extreme(node: Node, op: Builder) -> Node | None:
    if node.op == "maximum" and _is_position(node.args[0]) and node.args[1].op == "const" and const_value(node.args[1]) <= 0:
        return node.args[0]
    neutral = math.inf if node.op == "minimum" else -math.inf
    return node.args[0] if node.dtype == FLOAT32 and is_const(node.args[1], neutral) else _regrouped(node, op)


_WHOLE_FLOATS = ("floor", "ceil", "round", "trunc", "sign", "floordiv")


def _round(node: Node, op: Builder) -> Node | None:
    (x,) = node.args
    return x if x.op in _WHOLE_FLOATS or (x.op == "cast" and x.args[0].dtype != FLOAT32) else None


def _pow(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if is_const(y, 0):
        return const(1.0)
    if is_const(y, 1):
        return x
    if is_const(y, 2):
        return op("mul", x, x)
    if is_const(y, -1):
        return op("truediv", 1.0, x)
    return None


def _pow_inexact(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if is_const(y, 0.5):
        return op("sqrt", x)
    if is_const(y, -0.5):
        return op("rsqrt", x)
    if is_const(y, 3):
        return op("mul", op("mul", x, x), x)
    return op("exp2", y) if is_const(x, 2) else None


def _shift(node: Node, op: Builder) -> Node | None:
    return node.args[0] if is_const(node.args[1], 0) else None


# --- casts --------------------------------------------------------------------------------------------------------------------------


def _cast(node: Node, op: Builder) -> Node | None:
    (x,) = node.args
    if node.dtype == BOOL:
        return op("ne", x, cast(const(0), x.dtype))
    if x.op == "cast":
        source = x.args[0]
        if source.dtype == BOOL or (source.dtype == INT32 and x.dtype == INT64):
            return cast(source, node.dtype)
    return None


# --- logic and bits -----------------------------------------------------------------------------------------------------------------


def _opposed(x: Node, y: Node) -> bool:
    """Whether exactly one of the two truth values holds, as far as syntax tells."""
    if (x.op == "not" and x.args[0] is y) or (y.op == "not" and y.args[0] is x):
        return True
    can_flip = x.op in ("eq", "ne") or (x.op in _OPPOSITE and x.args[0].dtype != FLOAT32)
    return can_flip and _OPPOSITE[x.op] == y.op and x.args == y.args


def _logic(node: Node, decided: Node, dual: str, op: Builder) -> Node | None:
    """a and not a; a and (b and a); a and (a or b): and the same with `and` and `or` exchanged."""
    x, y = node.args
    left, right = _members(x, node.op), _members(y, node.op)
    if any(_opposed(a, b) for a in left for b in right):
        return decided
    if all(b in left or any(a in left for a in _members(b, dual)) for b in right):
        return x
    if all(a in right or any(b in right for b in _members(a, dual)) for a in left):
        return y
    return _regrouped(node, op)


def _and(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    none, every = (False, True) if node.dtype == BOOL else (0, -1)
    if is_const(y, none):
        return y
    if is_const(y, every):
        return x
    if node.dtype == BOOL:
        return _logic(node, const(False), "or", op)
    return _regrouped(node, op)


def _or(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    none, every = (False, True) if node.dtype == BOOL else (0, -1)
    if is_const(y, none):
        return x
    if is_const(y, every):
        return y
    if node.dtype == BOOL:
        return _logic(node, const(True), "and", op)
    return _regrouped(node, op)


def _xor(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if x is y:
        return const(False if node.dtype == BOOL else 0, node.dtype)
    if is_const(y, 0):
        return x
    if node.dtype == BOOL and is_const(y, True):
        return op("not", x)
    return _regrouped(node, op)


def _not(node: Node, op: Builder) -> Node | None:
    (x,) = node.args
    if x.op == "not":
        return x.args[0]
    # `not a < b` is not `a >= b` where one of them is NaN.
    if x.op in ("eq", "ne") or (x.op in _OPPOSITE and x.args[0].dtype != FLOAT32):
        return op(_OPPOSITE[x.op], *x.args)
    return None


def _invert(node: Node, op: Builder) -> Node | None:
    return node.args[0].args[0] if node.args[0].op == "invert" else None


def _members(node: Node, name: str) -> list[Node]:
    """The operands of a chain of one associative op."""
    return [m for a in node.args for m in _members(a, name)] if node.op == name else [node]


def _compare(node: Node, op: Builder) -> Node | None:
    x, y = node.args
    if _is_position(x) and y.op == "const" and const_value(y) <= 0:
        if node.op == "ge" or (const_value(y) < 0 and node.op in ("gt", "ne")):
            return const(True)
        if node.op == "lt" or (const_value(y) < 0 and node.op in ("le", "eq")):
            return const(False)
    if x is y:
        if node.op in ("lt", "gt"):
            return const(False)
        if x.dtype != FLOAT32:
            return const(node.op != "ne")
    if node.op in ("eq", "ne") and y.op == "const":
        truth = x.args[0] if x.op == "cast" and x.args[0].dtype == BOOL else x
        if truth.dtype == BOOL:
            value = const_value(y)
            if value not in (0, 1):
                return const(node.op == "ne")
            return truth if (value == 1) == (node.op == "eq") else op("not", truth)
    return None


# --- selection ----------------------------------------------------------------------------------------------------------------------


def _where(node: Node, op: Builder) -> Node | None:
    c, x, y = node.args
    if c.op == "const":
        return x if const_value(c) else y
    if x is y:
        return x
    if c.op == "not":
        return op("where", c.args[0], y, x)
    if node.dtype == BOOL:
        logic = _where_truth(c, x, y, op)
        if logic is not None:
            return logic
    if x.op == "where":
        if x.args[0] is c:
            return op("where", c, x.args[1], y)
        if _opposed(x.args[0], c):
            return op("where", c, x.args[2], y)
        if x.args[2] is y:
            return op("where", op("and", c, x.args[0]), x.args[1], y)
        if x.args[1] is y:
            return op("where", op("and", c, op("not", x.args[0])), x.args[2], y)
    if y.op == "where":
        if y.args[0] is c:
            return op("where", c, x, y.args[2])
        if _opposed(y.args[0], c):
            return op("where", c, x, y.args[1])
        if y.args[1] is x:
            return op("where", op("or", c, y.args[0]), x, y.args[2])
        if y.args[2] is x:
            return op("where", op("or", c, op("not", y.args[0])), x, y.args[1])
    return None


def _where_truth(c: Node, x: Node, y: Node, op: Builder) -> Node | None:
    if x is c or is_const(x, True):
        return op("or", c, y)
    if y is c or is_const(y, False):
        return op("and", c, x)
    if is_const(x, False):
        return op("and", op("not", c), y)
    if is_const(y, True):
        return op("or", op("not", c), x)
    return None


_RULES: dict[str, tuple[Rule, ...]] = {
    "add": (_add,),
    "sub": (_sub,),
    "mul": (_mul,),
    "truediv": (_truediv,),
    "floordiv": (_floordiv,),
    "floormod": (_floormod,),
    "neg": (_neg,),
    "abs": (_abs,),
    "minimum": (_extreme,),
    "maximum": (_extreme,),
    "floor": (_round,),
    "ceil": (_round,),
    "round": (_round,),
    "trunc": (_round,),
    "pow": (_pow,),
    "shl": (_shift,),
    "shr": (_shift,),
    "cast": (_cast,),
    "and": (_and,),
    "or": (_or,),
    "xor": (_xor,),
    "not": (_not,),
    "invert": (_invert,),
    "where": (_where,),
}
_INEXACT_RULES: dict[str, tuple[Rule, ...]] = {"mul": (_mul_inexact,), "truediv": (_truediv_inexact,), "pow": (_pow_inexact,)}
_COMPARE_RULES: tuple[Rule, ...] = (_compare,)
