"""`if`, `and`, `or`, `not` on traced values: the function runs once for each outcome, and the results are merged with `where`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexc.errors import FlexcError, TraceError
from flexc.ir.graph import BOOL, FLOAT32, Location, Node, Rewriter, const, const_value, is_const, make
from flexc.ir.ops import apply

MOST_PATHS = 64

Decision = tuple[Node, bool, Location | None]

_OPPOSITE = {"ge": "lt", "le": "gt", "ne": "eq"}


class Path:
    """The decisions of one run: first those of `planned`, then True for every new condition."""

    def __init__(self, planned: Sequence[Decision] = ()):
        self.planned = list(planned)
        self.taken: list[Decision] = []
        self._decided: dict[Node, bool] = {}

    def decide(self, condition: Node, where: Location | None) -> bool:
        """The outcome of bool(condition) on this path."""
        condition, outcome_if_true = _without_not(condition)
        if condition.op == "const":
            return bool(const_value(condition)) is outcome_if_true
        canonical, same = _canonical(condition)
        if canonical in self._decided:
            outcome = self._decided[canonical] is same
        else:
            outcome = self._next(condition, where)
            self._decided[canonical] = outcome is same
        return outcome is outcome_if_true

    def simplify(self, result: Node) -> Node:
        """The result with every condition that this path has decided replaced by its outcome: `a and b` is b where a holds."""
        if not self.taken:
            return result

        def rule(node: Node) -> Node:
            if node.dtype == BOOL:
                canonical, same = _canonical(node)
                if canonical in self._decided:
                    return const(self._decided[canonical] is same, where=node.where)
            if node.op == "where" and node.args[0].op == "const":
                return node.args[1 if const_value(node.args[0]) else 2]
            return node

        return Rewriter(rule)(result)

    def _next(self, condition: Node, where: Location | None) -> bool:
        position = len(self.taken)
        if position < len(self.planned):
            expected, outcome, _ = self.planned[position]
            if expected is not condition:
                raise TraceError(
                    f"the function took other steps when it was run again: bool({condition!r})",
                    where=where,
                    why="it is run once for each outcome of a condition, and must do the same until they part",
                    instead="a function that depends only on its arguments and on captured values that it does not change",
                )
        else:
            outcome = True
        if position >= MOST_PATHS:
            raise too_many_paths(where)
        self.taken.append((condition, outcome, where))
        return outcome


def too_many_paths(where: Location | None) -> TraceError:
    """The error for a function that decides too much."""
    return TraceError(
        f"more than {MOST_PATHS} paths through the function",
        where=where,
        why="every `if`, `and`, `or`, `not`, `while` on a traced value runs the function once for each outcome",
        instead="flexc.where(condition, a, b), and &, |, ~ in place of `and`, `or`, `not`; a loop with a fixed number of rounds",
    )


def explore(run: Callable[[Path], Node]) -> Node:
    """The node that equals `run` on every path. `run` calls the function with decisions from the given path."""
    count = 0

    def below(planned: list[Decision]) -> Node:
        nonlocal count
        count += 1
        path = Path(planned)
        if count > MOST_PATHS:
            raise too_many_paths(planned[-1][2])
        try:
            result = path.simplify(run(path))
        except FlexcError:
            raise
        except Exception as error:
            if not path.taken:
                raise
            condition, outcome, where = path.taken[-1]
            raise TraceError(
                f"{type(error).__name__} on the path where {condition!r} is {outcome}: {error}",
                where=where,
                why="which elements take that path is unknown while tracing",
                instead="return a score (or a truth value) on every path",
            ) from error
        for depth in reversed(range(len(planned), len(path.taken))):
            condition, outcome, where = path.taken[depth]
            other = below([*path.taken[:depth], (condition, not outcome, where)])
            result = merge(condition, result, other, where)
        return result

    return below([])


def merge(condition: Node, if_true: Node, if_false: Node, where: Location | None) -> Node:
    """where(condition, if_true, if_false); logic where one of two truth values is a constant."""
    if if_true is if_false:
        return if_true
    if if_true.dtype == BOOL:
        if is_const(if_true, True):
            return condition if is_const(if_false, False) else apply("or", condition, if_false, where=where)
        if is_const(if_false, False):
            return apply("and", condition, if_true, where=where)
        if is_const(if_true, False):
            opposite = apply("not", condition, where=where)
            return opposite if is_const(if_false, True) else apply("and", opposite, if_false, where=where)
        if is_const(if_false, True):
            return apply("or", apply("not", condition, where=where), if_true, where=where)
    return apply("where", condition, if_true, if_false, where=where)


def _without_not(node: Node) -> tuple[Node, bool]:
    outcome = True
    while node.op == "not":
        node, outcome = node.args[0], not outcome
    return node, outcome


def _canonical(node: Node) -> tuple[Node, bool]:
    """A condition and its opposite under one name. With NaN, a >= b is not the opposite of a < b; a != b is that of a == b."""
    opposite = _OPPOSITE.get(node.op)
    if opposite is None or (node.op != "ne" and node.args[0].dtype == FLOAT32):
        return node, True
    return make(opposite, node.args, node.attrs, node.dtype, node.where), False
