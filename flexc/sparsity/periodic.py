"""Conditions that hold for some pairs and fail for others in every block: dilation, strides, checkerboards.

Intervals cannot see that (q_idx - kv_idx) % 2 == 0 is undecided in a square of blocks because each of its blocks is mixed, and would have
every one of them looked at. A condition that repeats with a period of few tokens is the same in all blocks at the same phase, and there are
few phases: each is evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from flexc.ir.affine import Affine, affine_form
from flexc.ir.graph import BOOL, INT32, INT64, Node, const_value, inputs_of, topological
from flexc.ir.interval import Interval
from flexc.sparsity.tokens import TokenMask

Tensor = torch.Tensor

_MOST_PHASES = 64  # blocks evaluated for one condition
_MOST_TOKENS = 2**24  # positions are below it

Period = tuple[int, int]  # of q_idx and of kv_idx, in tokens


@dataclass(frozen=True)
class Mixed:
    """The conditions below a mask that are mixed in every block."""

    conditions: frozenset[Node]

    @staticmethod
    def of(tokens: TokenMask) -> Mixed:
        """Those of the mask."""
        nodes = topological([tokens.mask])
        periods: dict[Node, Period | None] = {}
        for node in nodes:
            periods[node] = _period(node, periods)
        candidates = [n for n in nodes if n.dtype == BOOL and inputs_of(n) and periods[n] is not None]
        return Mixed(frozenset(n for n in candidates if _is_mixed(replace(tokens, mask=n), periods[n] or (1, 1))))

    def everywhere(self, node: Node, known: Mapping[Node, Interval]) -> Tensor:
        """Whether every block of a tile holds both allowed and forbidden pairs, from the bounds of the tile's nodes."""
        if not self.conditions:
            return torch.zeros((), dtype=torch.bool, device=known[node].lo.device)
        return self._everywhere(node, known)

    def _everywhere(self, node: Node, known: Mapping[Node, Interval]) -> Tensor:
        if node in self.conditions:
            return torch.ones((), dtype=torch.bool, device=known[node].lo.device)
        if node.dtype == BOOL and node.op in _RULES:
            return _RULES[node.op]([self._everywhere(a, known) for a in node.args], [known[a] for a in node.args])
        return torch.zeros((), dtype=torch.bool, device=known[node].lo.device)


# A tile of `x and y` is mixed where one is mixed and the other true all over it, and so on.
_RULES = {
    "not": lambda mixed, of: mixed[0],
    "and": lambda mixed, of: (mixed[0] & of[1].is_true) | (of[0].is_true & mixed[1]),
    "or": lambda mixed, of: (mixed[0] & of[1].is_false) | (of[0].is_false & mixed[1]),
    "xor": lambda mixed, of: (mixed[0] & (of[1].is_true | of[1].is_false)) | (mixed[1] & (of[0].is_true | of[0].is_false)),
    "where": lambda mixed, of: (of[0].is_true & mixed[1]) | (of[0].is_false & mixed[2]),
}


def _is_mixed(condition: TokenMask, period: Period) -> bool:
    """Whether the condition holds somewhere and fails somewhere in a block of every phase."""
    phases = [p // math.gcd(p, size) for p, size in zip(period, condition.block)]
    if math.prod(phases) > _MOST_PHASES:
        return False
    first = torch.arange(math.prod(phases), device=condition.device)
    rows = (first // phases[1])[:, None, None] * condition.block[0] + torch.arange(condition.block[0], device=condition.device)[:, None]
    columns = (first % phases[1])[:, None, None] * condition.block[1] + torch.arange(condition.block[1], device=condition.device)
    zero = torch.zeros((), dtype=torch.int32, device=condition.device)
    holds = condition.at(zero, zero, rows.int(), columns.int()).expand(len(first), *condition.block)
    return bool((holds.any(-1).any(-1) & ~holds.all(-1).all(-1)).all())


def _period(node: Node, periods: Mapping[Node, Period | None]) -> Period | None:
    """After how many tokens the node's value repeats, in q_idx and in kv_idx; None if never."""
    if node.op in ("const", "scalar"):
        return 1, 1
    if node.op == "input":
        return None
    divisor = _divisor(node)
    if divisor is not None:
        return _period_of_rest(affine_form(node.args[0]), divisor, node.args[0].dtype, periods)
    return _common([periods[a] for a in node.args])


def _divisor(node: Node) -> int | None:
    """The constant n of `x % n`, or of `x & (n - 1)` with n a power of two."""
    if node.dtype not in (INT32, INT64) or len(node.args) != 2 or node.args[1].op != "const":
        return None
    value = int(const_value(node.args[1]))
    if node.op == "floormod" and value != 0:
        return abs(value)
    if node.op == "and" and value >= 0 and value & (value + 1) == 0:
        return value + 1
    return None


def _period_of_rest(form: Affine, divisor: int, dtype: str, periods: Mapping[Node, Period | None]) -> Period | None:
    """The period of a sum modulo `divisor`."""
    found: list[Period | None] = []
    largest = abs(form.constant)
    for term, factor in form.terms.items():
        steps = divisor // math.gcd(divisor, factor)
        if term.op == "input" and term.attrs[0] in ("q_idx", "kv_idx"):
            found.append((steps, 1) if term.attrs[0] == "q_idx" else (1, steps))
            largest += abs(factor) * _MOST_TOKENS
        else:
            found.append(periods.get(term))
    # A sum of positions that wraps around repeats otherwise; sums of other terms repeat as the terms do.
    wraps = largest >= (2**31 if dtype == INT32 else 2**63)
    return None if wraps else _common(found)


def _common(periods: list[Period | None]) -> Period | None:
    known = [p for p in periods if p is not None]
    if len(known) < len(periods):
        return None
    return math.lcm(*(p[0] for p in known)), math.lcm(*(p[1] for p in known))
