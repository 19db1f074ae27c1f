"""Prints nodes of a graph as Triton statements, each at the level of a kernel where it changes.

A kernel has four levels. `tile` values are scalars of the whole tile, `row` values are [rows] and change with q_idx, `column` values are
[columns] and change with kv_idx, `element` values are the two-dimensional tile. A node is printed once, at the level of its rate; a lower
value used at the element level is spread by `[:, None]` or `[None, :]`, whichever way round the kernel holds its tile.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured, rate_levels
from flexc.codegen.triton.rows import TRITON_DTYPES, spell
from flexc.ir.bounds import anything, bounds
from flexc.ir.collisions import is_diagonal
from flexc.ir.graph import BOOL, FLOAT32, INT32, LEAVES, Graph, Node, const_value, input_node, topological
from flexc.ir.interval import Interval
from flexc.ir.ops import feeding_steps

LEVELS = (TILE, ROW, COLUMN, ELEMENT)


def has_weight_past_the_end(graph: Graph, max_tokens: int) -> bool:
    """Whether the logit of a query past the end, whose raw product is 0, may be NaN or +inf: its weight is then not 0.

    Captured values count as moderate: such a row reads what the last row reads, and a value that overflows spoils that one too.
    """
    position, moderate = Interval.of(0.0, float(max_tokens - 1)), Interval.of(-1e6, 1e6)
    inputs = {name: position for name in ("q_idx", "kv_idx", "batch", "head")}
    inputs |= {"raw": Interval.of(0.0, 0.0), "scale": Interval.of(0.0, 1e30)}
    roots = [node for node in (graph.get("logit2"), graph.get("outer")) if node is not None]
    scalars = [moderate if s.dtype == FLOAT32 else anything(s.dtype) for s in graph.scalars]
    found = bounds(roots, inputs, scalars, lambda node, indices: moderate if node.dtype == FLOAT32 else anything(node.dtype))
    return any(found[root].nan or bool((found[root].hi == math.inf).any()) for root in roots)


@dataclass
class Body:
    """The statements of one kernel, collected by level.

    Attributes:
        graph: what is printed.
        known: bounds of its nodes.
        tanh: which form of it, see `Plan`.
        interpreted: libdevice and inline assembly are missing.
        transposed: the tile is held as [columns, rows].
        is_flat: there is no tile: q_idx and kv_idx are vectors of the same pairs, and both at the level `row`.
        mark: what tells names of values from those of another body in the same kernel.
        tile: rows and columns, of a kernel that computes values of diagonals once for each; None where each pair has its own.
        levels, lines, names, uses, stepped: of each node its level, the statements printed, the name of its value; helpers that the text
            calls; nodes that a step function reads.
    """

    graph: Graph
    known: dict[Node, Interval]
    tanh: str
    interpreted: bool
    transposed: bool = False
    is_flat: bool = False
    mark: str = ""
    tile: tuple[int, int] | None = None
    levels: dict[Node, str] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=lambda: {level: [] for level in LEVELS})
    names: dict[Node, str] = field(default_factory=dict)
    uses: set[str] = field(default_factory=set)
    stepped: Collection[Node] = ()
    _comment: object = None
    _along: Body | None = None
    _spreads: dict[Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = rate_levels(self.graph, self.is_flat)
        self.stepped = feeding_steps([node for _, node in self.graph.outputs])

    # --- facts for rows.py ---

    def must_be_exact(self, node: Node) -> bool:
        """Whether a step function reads the node, so that a last bit could change the result by a whole step."""
        return node in self.stepped

    def is_non_negative(self, node: Node) -> bool:
        """Whether bounds prove node >= 0."""
        interval = self.known.get(node)
        return interval is not None and interval.within(0, math.inf)

    def need(self, helper: str) -> str:
        """Record that the text uses a helper function of the module; returns its name."""
        self.uses.add(helper)
        return helper

    # --- printing ---

    def take(self) -> dict[str, list[str]]:
        """The statements printed since the last call, by level."""
        taken, self.lines = self.lines, {level: [] for level in LEVELS}
        return taken

    def add(self, root: Node) -> None:
        """Print everything that `root` needs and that is not printed yet."""
        order, needed = topological([root]), {root}
        for node in reversed(order):
            if node in needed and not self._is_spread(node):
                needed.update(node.args)
        for node in order:
            if node in needed:
                self._print(node)

    def at(self, node: Node, level: str) -> str:
        """How a printed node is written in a statement of `level`."""
        if node.op == "const":
            return literal(node)
        name = self.names[node]
        return self.spread(name, self.levels[node], level)

    def spread(self, name: str, source: str, level: str) -> str:
        """A value of level `source` as an operand at `level`."""
        if source in (level, TILE):
            return name
        along_first = (source == ROW) != self.transposed
        return f"{name}[:, None]" if along_first else f"{name}[None, :]"

    def _print(self, node: Node) -> None:
        if node in self.names or node.op == "const":
            return
        if node.op == "input":
            self.names[node] = node.attrs[0]
        elif node.op == "scalar":
            self.names[node] = captured(self.graph, self.graph.scalars[node.attrs[0]].name)
        elif self._is_spread(node):
            self.names[node] = self._spread_over_tile(node)
        elif node.op == "gather":
            self.names[node] = self._gather(node)
        else:
            level = self.levels[node]
            name = f"x{self.mark}{len(self.names)}"
            operands = [self.at(a, level) for a in node.args]
            self._assign(level, name, _cast(node, operands[0]) if node.op == "cast" else spell(node, operands, self), node)
            self.names[node] = name

    def _assign(self, level: str, name: str, expression: str, node: Node) -> None:
        comment = ""
        where = self.graph.lines.get(node)
        if where is not None and where != self._comment:
            comment = f"  # {where}"
            self._comment = where
        self.lines[level].append(f"{name} = {expression}{comment}")

    # --- values of diagonals ---

    def _is_spread(self, node: Node) -> bool:
        """Whether the node is computed for each diagonal of the tile: it reads a captured tensor by q_idx - kv_idx."""
        if self.tile is None or node.op in LEAVES or self.levels[node] != ELEMENT or node.dtype not in (FLOAT32, INT32):
            return False
        if node not in self._spreads:
            reads = any(below.op == "gather" and self.levels[below] == ELEMENT for below in topological([node]))
            self._spreads[node] = reads and is_diagonal(node)
        return self._spreads[node]

    def _spread_over_tile(self, node: Node) -> str:
        """Print the node for a vector of diagonals, by a pair of positions on each, and spread it over the tile.

        A query past the end reads what the last one does: it might read no number, where the mask forbids others to.
        """
        assert self.tile is not None
        rows, columns = self.tile
        if self._along is None:
            self._along = Body(self.graph, self.known, self.tanh, self.interpreted, uses=self.uses, mark="along", is_flat=True)
            self._along.names |= {input_node("q_idx"): "along_q", input_node("kv_idx"): "along_kv"}
            self.lines[ELEMENT] += [
                f"along = first_row - first_column - {columns - 1} + tl.arange(0, {2 * max(rows, columns)})  # q_idx - kv_idx",
                "along_q = tl.minimum(tl.maximum(along, 0), q_len - 1)",
                "along_kv = tl.minimum(tl.maximum(-along, 0), kv_len - 1)",
            ]
        self._along.add(node)
        lines = self._along.take()
        self.lines[TILE] += lines[TILE]
        self.lines[ELEMENT] += lines[ROW]
        name = f"x{self.mark}{len(self.names)}"
        spread = self.need("spread_transposed" if self.transposed else "spread")
        self._assign(ELEMENT, name, f"{spread}({self._along.at(node, ROW)}, q_len - 1 - first_row, {rows}, {columns})", node)
        return name

    # --- captured tensors ---

    def _gather(self, node: Node) -> str:
        tensor = self.graph.tensors[node.attrs[0]]
        given = captured(self.graph, tensor.name)
        name = f"{given}_{self.mark}{len(self.names)}"
        pointer, guard = self.address(node, f"{given}_ptr", f"{given}_stride", name)
        level = self.levels[node]
        mask = f", mask={guard}, other=0" if guard else ""
        load = f"tl.load({pointer}{mask})"
        if tensor.dtype not in ("bool", "int32", "int64", "float32"):
            load += f".to({TRITON_DTYPES[node.dtype]})"
        self._assign(level, name, load, node)
        return name

    def address(self, node: Node, pointer: str, stride: str, name: str) -> tuple[str, str]:
        """Pointer and guard expressions, at the gather's level, of the element it reads; prints what they need.

        Offsets are 64-bit at every level but the tile's innermost, where an index that varies by element is added last.
        Negative indices count from the end; an index outside is guarded, not read.
        """
        tensor = self.graph.tensors[node.attrs[0]]
        level = self.levels[node]
        offsets: dict[str, list[str]] = {}
        guards: dict[str, list[str]] = {}
        for axis, index in enumerate(node.args):
            where = self.levels[index]
            text = self.at(index, where)
            size = f"{captured(self.graph, tensor.name)}_size{axis}"
            if not self.is_non_negative(index):
                wrapped = f"{name}_i{axis}"
                self.lines[where].append(f"{wrapped} = tl.where({text} < 0, {text} + {size}, {text})")
                guards.setdefault(where, []).append(f"({wrapped} >= 0)")
                text = wrapped
            guards.setdefault(where, []).append(f"({text} < {size})")
            offsets.setdefault(where, []).append(f"{_wide(text, index)} * {stride}{axis}")
        address, conditions = [pointer], []
        for where in LEVELS:
            if where in offsets:
                address.append(self._named(where, level, f"{name}_at_{where}", " + ".join(offsets[where])))
            if where in guards:
                conditions.append(self._named(where, level, f"{name}_in_{where}", " & ".join(guards[where])))
        return " + ".join(address), " & ".join(conditions)

    def _named(self, source: str, level: str, name: str, expression: str) -> str:
        if source == level:
            return f"({expression})"
        self.lines[source].append(f"{name} = {expression}")
        return self.spread(name, source, level)


def _cast(node: Node, operand: str) -> str:
    if node.dtype == BOOL:
        return f"{operand} != 0"
    dtype = TRITON_DTYPES[node.dtype]
    return f"tl.cast({operand}, {dtype})" if node.args[0].op == "const" else f"{operand}.to({dtype})"


def _wide(text: str, index: Node) -> str:
    """An index in 64 bits, so that its product with a stride is."""
    if index.op == "const" and not text.isidentifier():
        return text if const_value(index) in (0, 1) else f"tl.cast({text}, tl.int64)"
    return f"{text}.to(tl.int64)" if text.isidentifier() else f"({text}).to(tl.int64)"


def literal(node: Node) -> str:
    """A constant as Triton source. float32 constants print with the digits that give their bits back."""
    value = const_value(node)
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, int):
        return str(value) if value >= 0 else f"({value})"
    if math.isinf(value) or math.isnan(value):
        return f'float("{value}")'
    text = repr(float(f"{value:.9g}"))
    return text if value >= 0 and not text.startswith("-") else f"({text})"
