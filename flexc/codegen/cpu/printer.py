"""What all functions of a CPU module are printed with: which values are computed where, and what they are called."""

from __future__ import annotations

import keyword
from collections.abc import Sequence

from flexc.codegen.cpu.plan import Plan, Rates
from flexc.ir.graph import POSITIONS, Graph, Location, Node, topological

Line = tuple[str, Node | None]  # of a function, and the node whose place in the user's file it ends in

_ALIGNED = 90  # a longer line does not push the others' comments aside
AXES = {"batch": 0, "head": 1, "q_idx": 2, "kv_idx": 3}
_SLICES = ("b", "h", "r", "c")
HELPERS = (
    "_load",
    "_window",
    "_add_window",
    "_scatter",
    "_diagonal",
    "_along_diagonals",
    "_clear",
)  # functions that emitted code may call
_RESERVED = {
    *HELPERS,
    *"torch math SimpleNamespace slice FLOAT ALL at b h r c score tensors scalars q k factors grads dscores draw blocked".split(),
    *"difference q_on kv_on q_len".split(),
}


class Printer:
    """The code of one graph. Values that no tile changes get names in the namespace `at`; tile functions read slices of them."""

    def __init__(self, graph: Graph, plan: Plan):
        self.graph, self.plan = graph, plan
        self.rates = Rates(graph)
        self.taken = set(_RESERVED) | set(POSITIONS)
        self.tensor_names = [self.fresh(tensor.name) for tensor in graph.tensors]
        self.scalar_names = [self.fresh(scalar.name) for scalar in graph.scalars]
        self.gathers = self._captured() if plan.has_captured_gradients else []
        self.sums = {number: self.fresh(f"{self.tensor_names[gather.attrs[0]]}_sum") for number, gather, _ in self.gathers}
        self.names: dict[Node, str] = {}
        self.outside = self._outside()
        for node in self.outside:
            self.names[node] = self.name(node)

    # --- what is where ---

    def rate(self, node: Node) -> str:
        """The node's rate under this plan."""
        return self.rates.rate(node, self.plan.is_descending)

    def is_window(self, node: Node) -> bool:
        """Whether the node is a captured tensor indexed by both token positions themselves: read as slices, not gathered."""
        if node.op != "gather" or not {"q_idx", "kv_idx"} <= self.rates.reads[node] or self.rate(node) != "element":
            return False
        return all(a.op == "input" and a.attrs[0] != "score" for a in node.args) and len(set(node.args)) == len(node.args)

    def _captured(self) -> list[tuple[int, Node, Node]]:
        """(number, gather, factor) of every captured value that needs a gradient."""
        found = []
        for key, factor in self.graph.outputs:
            if key.startswith("dgather:"):
                gather = self.graph.get(key.removeprefix("d"))
                assert gather is not None, f"{key} without its gather"
                found.append((int(key.removeprefix("dgather:")), gather, factor))
        return found

    def dscore(self) -> Node:
        """The derivative by the score."""
        node = self.graph.get("dscore")
        assert node is not None, "the plan computes a derivative that the graph does not have"
        return node

    def _tile_roots(self) -> list[Node]:
        keys = ("score", "mask", *(("dscore",) if self.plan.has_backward else ()))
        roots = [node for key, node in self.graph.outputs if key in keys]
        for _, gather, factor in self.gathers:
            roots += [factor, *([] if self.is_window(gather) else gather.args)]
        return roots

    def _outside(self) -> list[Node]:
        """The values that tile functions read and that are computed once a call, in the order of the graph."""
        frontier: set[Node] = set()
        seen: set[Node] = set()
        stack = list(self._tile_roots())
        while stack:
            node = stack.pop()
            if node in seen or node.op == "const":
                continue
            seen.add(node)
            if self.rate(node) != "element" or self.is_window(node):
                frontier.add(node)
            else:
                stack += [a for a in node.args if not (a.op == "input" and a.attrs[0] == "score")]
        return [node for node in topological(self.graph.get(key) or node for key, node in self.graph.outputs) if node in frontier]

    # --- names and texts ---

    def fresh(self, wish: str) -> str:
        """A name that nothing else has."""
        name, number = wish, 1
        while name in self.taken or keyword.iskeyword(name):
            number += 1
            name = f"{wish}_{number}"
        self.taken.add(name)
        return name

    def name(self, node: Node) -> str:
        """What a value is called: positions by their own names, captured values by tensor and index, others by their op."""
        if node.op == "input":
            return node.attrs[0]
        if node.op == "scalar":
            return self.scalar_names[node.attrs[0]]
        if node.op == "gather":
            tensor = self.tensor_names[node.attrs[0]]
            plain = all(a.op == "input" for a in node.args)
            return self.fresh(
                f"{tensor}_at_{'_'.join(a.attrs[0].removesuffix('_idx') for a in node.args)}" if plain and node.args else f"{tensor}_value"
            )
        return self.fresh({"and": "both", "or": "either", "not": "negated", "lt": "less", "gt": "greater"}.get(node.op, node.op))

    def index(self, node: Node) -> str:
        """The subscript that takes a tile out of a value computed outside, for what the value reads."""
        reads = self.rates.reads[node]
        parts = [s if name in reads else ":" for name, s in zip(AXES, _SLICES, strict=True)]
        if self.rate(node) == "diagonal":
            parts[2] = parts[3] = ":"
        while parts and parts[-1] == ":":
            parts.pop()
        return f"[{', '.join(parts)}]" if parts else ""

    def windowed(self, node: Node) -> str:
        """The arguments after the view that name a tile of a window."""
        reads = self.rates.reads[node]
        return ", ".join(["at", *(s if name in reads else "ALL" for name, s in zip(AXES, _SLICES, strict=True))])

    def tile_text(self, node: Node) -> str:
        """The tile of a value computed outside."""
        name = f"at.{self.names[node]}"
        if self.is_window(node):
            return f"_window({name}, {self.windowed(node)})"
        text = f"{name}{self.index(node)}"
        return f"_diagonal({text}, r, c)" if self.rate(node) == "diagonal" else text

    def laid_out(self, node: Node, name: str) -> str:
        """A tensor indexed by positions as a view [batch, head, q, kv], 1 where the position is not read."""
        axes = [AXES[a.attrs[0]] for a in node.args]
        order = sorted(range(len(axes)), key=axes.__getitem__)
        text = name if order == list(range(len(axes))) else f"{name}.permute({', '.join(map(str, order))})"
        missing = [axis for axis in (0, 1) if axis not in axes]
        return text + {(): "", (0,): "[None]", (1,): "[:, None]", (0, 1): "[None, None]"}[tuple(missing)]

    def tile_factors(self) -> list[Node]:
        """What accumulating needs from the score function's tile: element factors, and element indices of captured values."""
        found: dict[Node, None] = {}
        for _, gather, factor in self.gathers:
            indices = () if self.is_window(gather) else gather.args
            found.update((node, None) for node in (factor, *indices) if node.op != "const" and self.rate(node) == "element")
        return list(found)

    # --- functions of the module ---

    def function(self, signature: str, doc: str, lines: Sequence[Line]) -> str:
        """A function whose lines end in the user's line, aligned."""
        notes = [_note(self.graph.lines.get(node)) if node is not None else "" for _, node in lines]
        width = max((len(text) for (text, _), note in zip(lines, notes, strict=True) if note and len(text) <= _ALIGNED), default=0)
        body = [f"    {text.ljust(width)}  # {note}" if note else f"    {text}" for (text, _), note in zip(lines, notes, strict=True)]
        return "\n".join([f"def {signature}:", f'    """{doc}"""', *body])


def _note(place: Location | None) -> str:
    return f"{place.file.rsplit('/', 1)[-1]}:{place.line}" if place is not None else ""
