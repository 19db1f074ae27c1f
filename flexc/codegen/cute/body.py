"""Prints nodes of a graph as statements of the CuTe DSL, each where its value changes.

A thread of a consumer warpgroup owns two rows of a tile, eight apart, and of each block two neighbouring columns out of every eight. So
there are six places: `tile` (once), `row` (for both rows, before the blocks), `block` and `block_row` (once a block, before its columns),
`column` (each of the thread's columns) and `element` (each of its scores). A value is printed once, at the place of its rate. Row values
live in register tensors of two, `x[half]`; the others are scalars.

Two forms save work for each element. A float that is linear in kv_idx, such as the bias of ALiBi, becomes one multiply-add of the
column's number in the block, which is a constant of the unrolled code, with a base formed once a block. A comparison of integers that is
linear in kv_idx becomes one comparison of that constant with a limit of the row.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from flexc.codegen.cute.rows import CUTE_DTYPES, spell
from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured, level_of, rate_levels
from flexc.errors import InternalError
from flexc.ir import ops
from flexc.ir.affine import affine_form
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Graph, Node, const, const_value, input_node, is_const, topological
from flexc.ir.interval import Interval
from flexc.ir.ops import feeding_steps, has_trait

BLOCK, BLOCK_ROW = "block", "block_row"
LEVELS = (TILE, ROW, BLOCK, BLOCK_ROW, COLUMN, ELEMENT)

_KEY = input_node("kv_idx")
_LIMIT = 2.0**30
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
_SIDE = {"lt": "stop", "le": "stop", "gt": "first", "ge": "first"}
_SIGN = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


@dataclass(frozen=True)
class Linear:
    """A float: times * (start + sign * kv_idx) + plus. All but `sign` change with the row at most; None stands for 1, or for 0."""

    sign: int
    start: Node | None = None
    times: Node | None = None
    plus: Node | None = None


class Diagonals(Protocol):
    """What works out the values of diagonals, see `diagonals.Along`."""

    def takes(self, node: Node) -> bool:
        """Whether it works out this one."""
        ...

    def value(self, node: Node, body: Body) -> str:
        """The name of its value."""
        ...


@dataclass
class Body:
    """The statements of a kernel, collected by place.

    Attributes:
        graph: what is printed.
        known: bounds of its nodes.
        approximate: the hardware approximation of tanh is allowed.
        exact: no approximation at all is.
        levels, lines, names, stepped: of each node its rate, the statements printed, the name of its value; nodes that a step reads.
        linear: nodes that are linear in kv_idx as floats.
        shared: names that statements inside a block take from outside, in order of use.
        reads_columns: whether a statement names kv_idx.
        row_dtypes: register tensors of row values, name → IR dtype.
        row_bases: register tensors that a block fills, name → IR dtype.
        exported: values of a column that statements of an element take, name → IR dtype.
        along: prints values of diagonals, once for each; None where every pair has its own.
    """

    graph: Graph
    known: dict[Node, Interval]
    approximate: bool
    exact: bool
    levels: dict[Node, str] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=lambda: {level: [] for level in LEVELS})
    names: dict[Node, str] = field(default_factory=dict)
    stepped: Collection[Node] = ()
    linear: dict[Node, Linear] = field(default_factory=dict)
    shared: dict[str, None] = field(default_factory=dict)
    reads_columns: bool = False
    row_dtypes: dict[str, str] = field(default_factory=dict)
    row_bases: dict[str, str] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    along: Diagonals | None = None
    _count: int = 0
    _comment: object = None

    def __post_init__(self) -> None:
        self.levels = rate_levels(self.graph)
        self.stepped = feeding_steps([node for _, node in self.graph.outputs])
        for node in self.graph.nodes():
            form = self._linear(node)
            if form is not None:
                self.linear[node] = form

    # --- facts for rows.py ---

    def must_be_exact(self, node: Node) -> bool:
        """Whether a step function reads the node, so that a last bit could change the result by a whole step."""
        return node in self.stepped

    def is_non_negative(self, node: Node) -> bool:
        """Whether bounds prove node >= 0."""
        interval = self.known.get(node)
        return interval is not None and interval.within(0, math.inf)

    # --- printing ---

    def take(self) -> dict[str, list[str]]:
        """The statements printed since the last call, by place."""
        taken, self.lines = self.lines, {level: [] for level in LEVELS}
        return taken

    def begin_function(self) -> None:
        """What follows is of another function of a block: what the last one worked out inside it has to be printed again."""
        self.names = {node: name for node, name in self.names.items() if self.level(node) in (TILE, ROW)}
        self.lines, self.shared, self.row_bases, self.exported = {level: [] for level in LEVELS}, {}, {}, {}
        self.reads_columns = False

    def add(self, root: Node) -> str:
        """Print everything that `root` needs and that is not printed yet; returns the place of its value."""
        pending = [root]
        while pending:
            node = pending[-1]
            waiting = [] if node in self.names or node.op == "const" else [a for a in self._operands(node) if not self._is_printed(a)]
            if waiting:
                pending.extend(waiting)
                continue
            pending.pop()
            self._print(node)
        return self.level(root)

    def level(self, node: Node) -> str:
        """Where the node changes. Nodes that printing makes are placed when they are first asked about."""
        if node not in self.levels:
            for each in topological([node]):
                if each not in self.levels:
                    self.levels[each] = level_of(each, self.levels)
        return self.levels[node]

    def at(self, node: Node, place: str) -> str:
        """How a printed node is written in a statement of `place`."""
        if node.op == "const":
            return literal(node)
        name, source = self.names[node], self.level(node)
        if place not in (TILE, ROW) and source in (TILE, ROW):
            self.shared[name] = None
        if node is _KEY:
            self.reads_columns = True
        elif source == COLUMN and place == ELEMENT:
            self.exported[name] = node.dtype
        return f"{name}[half]" if source == ROW else name

    def _is_printed(self, node: Node) -> bool:
        return node.op == "const" or node in self.names

    def _operands(self, node: Node) -> list[Node]:
        """What must be printed before the node."""
        if self.along is not None and self.along.takes(node):
            return []
        if node in self.linear and node is not _KEY:
            form = self.linear[node]
            return [part for part in (form.start, form.times, form.plus) if part is not None]
        limit = self._limit(node)
        return [limit[1]] if limit is not None else list(node.args)

    def _print(self, node: Node) -> None:
        if self._is_printed(node):
            return
        limit = self._limit(node)
        if node.op == "input":
            self.names[node] = node.attrs[0]
        elif node.op == "scalar":
            self.names[node] = captured(self.graph, self.graph.scalars[node.attrs[0]].name)
        elif self.along is not None and self.along.takes(node):
            self.names[node] = self.along.value(node, self)
        elif node.op == "gather":
            self.names[node] = self._gather(node)
        elif node in self.linear:
            self.names[node] = self._multiply_add(node, self.linear[node])
        elif limit is not None:
            self.names[node] = self._comparison(node, *limit)
        else:
            place = self.level(node)
            operands = [self.at(a, place) for a in node.args]
            name = self._new()
            self._assign(place, name, _cast(node, operands[0]) if node.op == "cast" else spell(node, operands, self), node)
            self.names[node] = name

    def _new(self, prefix: str = "x") -> str:
        self._count += 1
        return f"{prefix}{self._count - 1}"

    def _assign(self, place: str, name: str, expression: str, node: Node, dtype: str | None = None) -> None:
        comment = ""
        where = self.graph.lines.get(node)
        if where is not None and where != self._comment:
            comment = f"  # {where}"
            self._comment = where
        if place == ROW:
            self.row_dtypes[name] = dtype or node.dtype
            name = f"{name}[half]"
        self.lines[place].append(f"{name} = {expression}{comment}")

    # --- linear in kv_idx ---

    def _is_low(self, node: Node) -> bool:
        return self.level(node) in (TILE, ROW)

    def _linear(self, node: Node) -> Linear | None:
        """The node's form, if it is a float that changes with kv_idx in a straight line and no step reads it."""
        if node.dtype != FLOAT32 or node in self.stepped or self._is_low(node):
            return None
        if node.op == "cast":
            return Linear(1) if node.args[0] is _KEY else None
        if node.op == "neg":
            form = self.linear.get(node.args[0])
            if form is None:
                return None
            if form.times is None and form.plus is None:
                return Linear(-form.sign, None if form.start is None else -form.start)
            times = const(-1.0) if form.times is None else -form.times
            return Linear(form.sign, form.start, times, None if form.plus is None else -form.plus)
        if node.op not in ("add", "sub", "mul"):
            return None
        left, right = node.args
        form, other = (self.linear.get(left), right) if left in self.linear else (self.linear.get(right), left)
        if form is None or not self._is_low(other):
            return None
        if node.op == "mul":
            plus = None if form.plus is None else form.plus * other
            return Linear(form.sign, form.start, other if form.times is None else form.times * other, plus)
        if node.op == "sub" and left is other:  # other - form
            if form.times is None:
                return Linear(-form.sign, other if form.start is None else other - form.start)
            return Linear(form.sign, form.start, -form.times, other if form.plus is None else other - form.plus)
        signed = -other if node.op == "sub" else other
        if form.times is None:
            return Linear(form.sign, signed if form.start is None else form.start + signed)
        return Linear(form.sign, form.start, form.times, signed if form.plus is None else form.plus + signed)

    def _multiply_add(self, node: Node, form: Linear) -> str:
        """Prints the base of a block and the step of a column; returns the name of the value at its own place."""
        by_row = self._changes_by_row(form)
        block, place = (BLOCK_ROW, ELEMENT) if by_row else (BLOCK, COLUMN)
        half = "[half]" if by_row else ""
        name = self._new()
        if by_row:
            self.row_bases[f"{name}_base"] = FLOAT32
        self.lines[block].append(f"{name}_base{half} = {self._base(form, block)}")
        self._assign(place, name, f"{name}_base{half} {self._step(form, place)}", node)
        return name

    def _changes_by_row(self, form: Linear) -> bool:
        return any(part is not None and self.level(part) == ROW for part in (form.start, form.times, form.plus))

    def _base(self, form: Linear, place: str) -> str:
        """The form at the thread's first column of a block."""
        base = "Float32(key)" if form.sign > 0 else "-Float32(key)"
        if form.start is not None:
            base = f"{self.at(form.start, place)} {'+' if form.sign > 0 else '-'} Float32(key)"
        if form.times is not None and not is_const(form.times, 1.0):
            base = f"{self.at(form.times, place)} * ({base})"
        return base if form.plus is None else f"{base} + {self.at(form.plus, place)}"

    def _step(self, form: Linear, place: str) -> str:
        """What a later column adds, with its sign in front."""
        is_plain = form.times is None or is_const(form.times, 1.0)
        step = "Float32(offset)" if is_plain else f"{self.at(form.times, place)} * Float32(offset)"  # type: ignore[arg-type]
        return f"{'+' if form.sign > 0 else '-'} {step}"

    def peel(self, root: Node) -> str | None:
        """Prints a score that adds something linear in kv_idx, such as the bias of ALiBi, as two parts; None for other scores.

        What changes with the row alone goes into `shifts[half]`, which a block's maximum and exponents take into account once a row; what
        is left of the linear part changes with the column alone. Returns the rest of the score.
        """
        if root.op not in ("add", "sub") or root in self.names:
            return None
        left, right = root.args
        for node, other in ((right, left), (left, right)):
            form = self.linear.get(node)
            users = sum(a is node for user in topological([root]) for a in user.args)
            if form is None or node in self.names or users > 1 or self.level(other) != ELEMENT or not self._changes_by_row(form):
                continue
            if form.times is not None and self.level(form.times) == ROW:
                continue
            for part in (*self._operands(node), other):
                self.add(part)
            minus = "-" if root.op == "sub" and node is right else ""
            base = self._base(form, BLOCK_ROW)
            self.lines[BLOCK_ROW].append(f"shifts[half] = {f'-({base})' if minus else base}")
            name = self._new()
            step = self._step(form, COLUMN)
            self._assign(COLUMN, name, step.removeprefix("+ ") if step[0] == "+" else f"-({step[2:]})", node)
            texts = [name if part is node else self.at(part, ELEMENT) for part in root.args]
            return f"{texts[0]} {'-' if root.op == 'sub' else '+'} {texts[1]}"
        return None

    def _limit(self, node: Node) -> tuple[str, Node] | None:
        """(op, limit) such that a comparison of integers is `kv_idx op limit` with a limit that changes with the row at most."""
        if not has_trait(node, "compare") or node.args[0].dtype not in (INT32, INT64) or self._is_low(node):
            return None
        if any(not self._fits(a) for a in node.args if not self._is_low(a)):
            return None  # a sum that may wrap around is compared as it is
        left, right = (affine_form(a, through_casts=True) for a in node.args)
        difference = left.plus(right, -1)
        factor = difference.coefficient("kv_idx")
        if abs(factor) != 1 or any(term is not _KEY and not self._is_low(term) for term in difference.terms):
            return None
        if any(self._is_low(a) and a.op not in ("const", "input", "scalar", "gather") and not self._fits(a) for a in node.args):
            return None
        # factor * kv_idx + rest op 0, so kv_idx op' -factor * rest
        terms = {term: -factor * times for term, times in difference.terms.items() if term is not _KEY}
        constant = -factor * difference.constant
        ends = [(float(self.known[t].lo.min()) * f, float(self.known[t].hi.max()) * f) for t, f in terms.items() if t in self.known]
        low, high = (constant + sum(pick(pair) for pair in ends) for pick in (min, max))
        is_small = len(ends) == len(terms) and low >= -_LIMIT and high <= _LIMIT and all(t.dtype == INT32 for t in terms)
        dtype = INT32 if is_small else INT64
        limit = const(constant, dtype)
        for term, times in terms.items():
            limit = limit + ops.cast(term, dtype) * const(times, dtype)
        return (node.op if factor > 0 else _FLIPPED[node.op]), _without_zero(limit)

    def _fits(self, node: Node) -> bool:
        """Bounds prove that the integer stays well inside 32 bits."""
        interval = self.known.get(node)
        return interval is not None and interval.within(-_LIMIT, _LIMIT)

    def _comparison(self, node: Node, op: str, limit: Node) -> str:
        by_row = self.level(limit) == ROW
        block, place, half = (BLOCK_ROW, ELEMENT, "[half]") if by_row else (BLOCK, COLUMN, "")
        name = self._new()
        if by_row:
            self.row_bases[f"{name}_left"] = INT32
        self.lines[block].append(f"{name}_left{half} = {self._bounded(limit, node)} - key")
        self.lines[place].append(f"{name} = Int32(offset) {_SIGN[op]} {name}_left{half}")
        return name

    def limited_side(self, node: Node) -> str | None:
        """The side of the columns that `kv_idx op limit` bounds, "stop" or "first", if the limit is the row's or the tile's; else None."""
        limit = self._limit(node)
        return _SIDE.get(limit[0]) if limit is not None else None

    def row_limit(self, node: Node) -> tuple[str, str]:
        """(op, limit) of such a comparison; prints the limit."""
        limit = self._limit(node)
        if limit is None:
            raise InternalError(f"{node} bounds no columns")
        self.add(limit[1])
        return limit[0], self._bounded(limit[1], node)

    def _bounded(self, limit: Node, node: Node) -> str:
        """A printed limit of a comparison as an Int32, in a statement of a block."""
        if limit.dtype == INT32:
            return self.at(limit, BLOCK)
        source = self.level(limit)
        name = self._new() + "_limit"
        self._assign(source, name, f"tiles.bound({self.at(limit, source)})", node, INT32)
        self.shared[name] = None
        return f"{name}[half]" if source == ROW else name

    # --- captured tensors ---

    def _gather(self, node: Node) -> str:
        """A load guarded by the tensor's sizes."""
        given = captured(self.graph, self.graph.tensors[node.attrs[0]].name)
        place = self.level(node)
        name = f"{given}_{self._new('')}"
        offset, inside = self.address(node, given, name, place)
        if place not in (TILE, ROW):
            self.shared[given] = None
        self._assign(place, name, f"tiles.element({given}, {offset}, {inside}, {CUTE_DTYPES[node.dtype]})", node)
        return name

    def address(self, node: Node, given: str, name: str, place: str) -> tuple[str, str]:
        """Where the element of a gather is in a tensor called `given`, and whether it is inside, for a statement of `place`.

        Its indices are printed. Offsets are 64-bit; each index adds to them at its own place. Names of parts begin with `name`.
        """
        offsets: dict[str, list[str]] = {}
        guards: dict[str, list[str]] = {}
        for axis, index in enumerate(node.args):
            where = self.level(index)
            text = self.at(index, where)
            size = f"{given}.shape[{axis}]"
            if not self.is_non_negative(index):
                wrapped = f"{name}_i{axis}"
                dtype = CUTE_DTYPES[index.dtype]
                chosen = f"tiles.choose({dtype}({text}) < 0, {dtype}({text} + {size}), {dtype}({text}))"
                self._assign_part(where, wrapped, chosen, index.dtype)
                text = f"{wrapped}[half]" if where == ROW else wrapped
                guards.setdefault(where, []).append(f"({text} >= 0)")
            guards.setdefault(where, []).append(f"({text} < {size})")
            offsets.setdefault(where, []).append(f"Int64({text}) * {given}.stride[{axis}]")
        if not node.args:
            return "Int64(0)", "Boolean(True)"
        address, conditions = [], []
        for where in (TILE, ROW, COLUMN, ELEMENT):
            if where in offsets:
                address.append(self._part(where, place, f"{name}_at_{where}", " + ".join(offsets[where]), INT64))
                conditions.append(self._part(where, place, f"{name}_in_{where}", " & ".join(guards[where]), BOOL))
        return " + ".join(address), " & ".join(conditions)

    def _assign_part(self, place: str, name: str, expression: str, dtype: str) -> None:
        if place == ROW:
            self.row_dtypes[name] = dtype
        self.lines[place].append(f"{name}{'[half]' if place == ROW else ''} = {expression}")

    def _part(self, source: str, place: str, name: str, expression: str, dtype: str) -> str:
        """An expression of `source` for a statement of `place`: named if it changes more slowly."""
        if source == place:
            return f"({expression})"
        self._assign_part(source, name, expression, dtype)
        if source in (TILE, ROW) and place not in (TILE, ROW):
            self.shared[name] = None
        if source == COLUMN:
            self.exported[name] = dtype
        return f"{name}[half]" if source == ROW else name


def _without_zero(node: Node) -> Node:
    """A sum of products without + 0 and * 1."""
    if node.op == "add":
        left, right = (_without_zero(a) for a in node.args)
        if is_const(left, 0):
            return right
        return left if is_const(right, 0) else left + right
    if node.op == "mul" and is_const(node.args[1], 1):
        return node.args[0]
    return node


def _cast(node: Node, operand: str) -> str:
    if node.dtype == BOOL:
        return f"{operand} != 0"
    dtype = CUTE_DTYPES[node.dtype]
    return f"{dtype}({operand})" if node.args[0].op == "const" else f"{operand}.to({dtype})"


def literal(node: Node) -> str:
    """A constant as source. float32 constants print with the digits that give their bits back; integers past 32 bits carry their type."""
    value = const_value(node)
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, int):
        text = str(value) if value >= 0 else f"({value})"
        return text if -(2**31) <= value < 2**31 else f"Int64({value})"
    if math.isinf(value) or math.isnan(value):
        return f'float("{value}")'
    text = repr(float(f"{value:.9g}"))
    return text if value >= 0 and not text.startswith("-") else f"({text})"
