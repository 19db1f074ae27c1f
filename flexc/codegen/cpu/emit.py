"""Print a graph as the source of a CPU module. Makes no choice: those are the plan's."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from dataclasses import asdict

from flexc.codegen.cpu.plan import Plan, Rates
from flexc.codegen.cpu.rows import FLOAT, IN_PLACE, TORCH_NAMES, is_operator, lifted, literal, spell
from flexc.codegen.templates import render
from flexc.ir.graph import FLOAT32, POSITIONS, Graph, Location, Node, input_node, make, topological

TEMPLATE = "cpu/attention.py.j2"
_ALIGNED = 90  # a longer line does not push the others' comments aside
_NESTED_LENGTH = 60  # an expression longer than this gets a line and a name
_AXES = {"batch": 0, "head": 1, "q_idx": 2, "kv_idx": 3}
_SLICES = ("b", "h", "r", "c")
_HELPERS = (
    "_load",
    "_window",
    "_add_window",
    "_scatter",
    "_diagonal",
    "_along_diagonals",
    "_clear",
)  # functions that emitted code may call
_RESERVED = {
    *_HELPERS,
    *"torch math SimpleNamespace slice FLOAT ALL at b h r c score tensors scalars q k factors grads dscores draw blocked".split(),
    *"difference q_on kv_on q_len".split(),
}
_ONCE = {"row": "row", "column": "column", "diagonal": "diagonal", "head": "batch and head", "uniform": "call"}


def emit(graph: Graph, plan: Plan) -> str:
    """The module's source. The same graph and plan give the same text."""
    printer = _Printer(graph, plan)
    holes = {
        "origin": _origin(graph),
        "values_code": printer.values(),
        "score_code": printer.score(),
        "mask_code": printer.mask(),
        "factors_code": printer.factors(),
        "gradients_code": printer.gradients(),
        "accumulate_code": printer.accumulate(),
        "finish_code": printer.finish(),
    }
    body = "".join(text for text in holes.values() if isinstance(text, str))
    uses = [name for name in _HELPERS if f"{name}(" in body]
    return render(TEMPLATE, **asdict(plan), **holes, uses=uses)


def _origin(graph: Graph) -> list[str]:
    """The user's lines behind each output, for the header."""
    lines = []
    for title, root in (("score", graph.score), ("mask", graph.mask)):
        if root is None:
            lines.append(f"{title}: {'scale * q.k' if title == 'score' else 'every key is allowed'}")
            continue
        found = [graph.lines[node] for node in topological([root]) if node in graph.lines]
        places = {(place.file, place.line): str(place) for place in found}
        lines += [f"{title}: {text}" for _, text in sorted(places.items())] or [f"{title}: built without source lines"]
    return lines


class _Printer:
    """The code of one graph. Values that no tile changes get names in the namespace `at`; tile functions read slices of them."""

    def __init__(self, graph: Graph, plan: Plan):
        self.graph, self.plan = graph, plan
        self.rates = Rates(graph)
        self.taken = set(_RESERVED) | set(POSITIONS)
        self.tensor_names = [self.fresh(tensor.name) for tensor in graph.tensors]
        self.scalar_names = [self.fresh(scalar.name) for scalar in graph.scalars]
        self.gathers = self._captured_gradients() if plan.has_captured_gradients else []
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

    def _captured_gradients(self) -> list[tuple[int, Node, Node]]:
        """(number, gather, factor) of every captured value that needs a gradient."""
        found = []
        for key, factor in self.graph.outputs:
            if key.startswith("dgather:"):
                gather = self.graph.get(key.removeprefix("d"))
                assert gather is not None, f"{key} without its gather"
                found.append((int(key.removeprefix("dgather:")), gather, factor))
        return found

    def _dscore(self) -> Node:
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
        parts = [s if name in reads else ":" for name, s in zip(_AXES, _SLICES, strict=True)]
        if self.rate(node) == "diagonal":
            parts[2] = parts[3] = ":"
        while parts and parts[-1] == ":":
            parts.pop()
        return f"[{', '.join(parts)}]" if parts else ""

    def windowed(self, node: Node) -> str:
        """The arguments after the view that name a tile of a window."""
        reads = self.rates.reads[node]
        return ", ".join(["at", *(s if name in reads else "ALL" for name, s in zip(_AXES, _SLICES, strict=True))])

    def tile_text(self, node: Node) -> str:
        """The tile of a value computed outside."""
        name = f"at.{self.names[node]}"
        if self.is_window(node):
            return f"_window({name}, {self.windowed(node)})"
        text = f"{name}{self.index(node)}"
        return f"_diagonal({text}, r, c)" if self.rate(node) == "diagonal" else text

    def laid_out(self, node: Node, name: str) -> str:
        """A tensor indexed by positions as a view [batch, head, q, kv], 1 where the position is not read."""
        axes = [_AXES[a.attrs[0]] for a in node.args]
        order = sorted(range(len(axes)), key=axes.__getitem__)
        text = name if order == list(range(len(axes))) else f"{name}.permute({', '.join(map(str, order))})"
        missing = [axis for axis in (0, 1) if axis not in axes]
        return text + {(): "", (0,): "[None]", (1,): "[:, None]", (0, 1): "[None, None]"}[tuple(missing)]

    # --- functions of the module ---

    def values(self) -> str:
        """`_values`: everything that no tile changes."""
        lines: list[tuple[str, Node | None]] = []
        known: dict[Node, str] = {}
        inside = topological(self.outside)
        used = {n.attrs[0] for n in inside if n.op == "gather"} | {gather.attrs[0] for _, gather, _ in self.gathers}
        for slot, tensor in enumerate(self.tensor_names):
            if slot in used:
                lines.append((f"{tensor} = tensors[{slot}]", None))
        for node in inside:
            if node.op == "scalar":
                slot = node.attrs[0]
                known[node] = self.scalar_names[slot]
                lines.append((f"{known[node]} = torch.as_tensor(scalars[{slot}], dtype={TORCH_NAMES[node.dtype]})", None))
        for rate in ("uniform", "head", "row", "column", "diagonal"):
            roots = [n for n in self.outside if self.rate(n) == rate]
            if not roots:
                continue
            local = dict(known) if rate in ("row", "column", "diagonal") else known
            header: list[tuple[str, Node | None]] = [(f"# once a {_ONCE[rate]}", None)]
            positions = {n.attrs[0] for n in topological(roots) if n.op == "input"}
            for name in ("batch", "head"):
                node = input_node(name)
                if name in positions and node not in known:
                    axis = _AXES[name]
                    shape = ["1"] * 4
                    shape[axis] = "-1"
                    header.append((f"{name} = torch.arange(q.shape[{axis}], dtype=torch.int32).view({', '.join(shape)})", None))
                    known[node] = local[node] = name
            local.update(self._position_lines(rate, positions, header))
            section = _Section(self, local, named=roots)
            section.run(roots)
            lines += [*header, *section.lines]
            if rate in ("uniform", "head"):
                known.update({n: local[n] for n in topological(roots) if n in local})
        windows = [n for n in self.outside if self.is_window(n)]
        for node in windows:
            lines.append((f"{self.names[node]} = {self.laid_out(node, self.tensor_names[node.attrs[0]])}", node))
        fields = ["tensors=tensors", "q_len=q.shape[2]", *(f"{self.names[n]}={self.names[n]}" for n in self.outside)]
        lines.append((f"return SimpleNamespace({', '.join(fields)})", None))
        return self.function("_values(tensors, scalars, q, k)", "What no tile changes, each value at its own rate.", lines)

    def _position_lines(self, rate: str, positions: set[str], header: list[tuple[str, Node | None]]) -> dict[Node, str]:
        q_idx, kv_idx = input_node("q_idx"), input_node("kv_idx")
        if rate == "row":
            rows = (
                "torch.arange(q.shape[2] - 1, -1, -1, dtype=torch.int32)"
                if self.plan.is_descending
                else "torch.arange(q.shape[2], dtype=torch.int32)"
            )
            header.append((f"q_idx = {rows}.view(1, 1, -1, 1)", None))
            return {q_idx: "q_idx"}
        if rate == "column":
            header.append(("kv_idx = torch.arange(k.shape[2], dtype=torch.int32).view(1, 1, 1, -1)", None))
            return {kv_idx: "kv_idx"}
        if rate == "diagonal":
            header.append(
                ("difference = torch.arange(q.shape[2] - 1, -k.shape[2], -1, dtype=torch.int32).view(1, 1, 1, -1)  # q_idx - kv_idx", None)
            )
            header.append(
                ("q_on, kv_on = difference.clamp(min=0), (-difference).clamp(min=0)  # a pair of positions on each diagonal", None)
            )
            return {q_idx: "q_on", kv_idx: "kv_on"}
        return {}

    def tile_section(self, roots: Sequence[Node], score: bool) -> _Section:
        """Code of a tile function for the roots, with values from outside as slices."""
        known = {node: self.tile_text(node) for node in self.outside}
        if score:
            known[input_node("score")] = "score"
        section = _Section(self, known, frontier=set(self.outside))
        section.run(roots)
        return section

    def score(self) -> str:
        """`_score`: the user's score function on a tile."""
        root = self.graph.score
        if root is None:
            return ""
        section = self.tile_section([root], score=True)
        section.returns([root], self)
        return self.function("_score(score, at, b, h, r, c)", "The score function on a tile; overwrites its argument.", section.lines)

    def _factors(self) -> list[Node]:
        """What accumulating needs from the score function's tile: element factors, and element indices of captured values."""
        found: dict[Node, None] = {}
        for _, gather, factor in self.gathers:
            indices = () if self.is_window(gather) else gather.args
            found.update((node, None) for node in (factor, *indices) if node.op != "const" and self.rate(node) == "element")
        return list(found)

    def mask(self) -> str:
        """`_allowed`: the user's mask function on a tile."""
        root = self.graph.mask
        if root is None:
            return ""
        section = self.tile_section([root], score=False)
        text = section.text(root) if root.op != "const" else lifted(root)
        return self.function("_allowed(at, b, h, r, c)", "The mask function on a tile.", [*section.lines, (f"return {text}", root)])

    def factors(self) -> str:
        """`_score_and_factors`: the score, its derivative and the factors of the captured values on a tile."""
        if self.graph.score is None or not self.plan.has_backward:
            return ""
        roots = [self.graph.score]
        if self.plan.derivative == "computed":
            roots.append(self._dscore())
        inner = self._factors()
        section = self.tile_section([*roots, *inner], score=True)
        section.returns(roots, self, factors=inner)
        doc = "The score function on a tile, its derivative where it is not constant, and its derivatives by captured values."
        return self.function("_score_and_factors(score, at, b, h, r, c)", doc, section.lines)

    def function(self, signature: str, doc: str, lines: Sequence[tuple[str, Node | None]]) -> str:
        """A function whose lines end in the user's line, aligned."""
        notes = [_note(self.graph.lines.get(node)) if node is not None else "" for _, node in lines]
        width = max((len(text) for (text, _), note in zip(lines, notes, strict=True) if note and len(text) <= _ALIGNED), default=0)
        body = [f"    {text.ljust(width)}  # {note}" if note else f"    {text}" for (text, _), note in zip(lines, notes, strict=True)]
        return "\n".join([f"def {signature}:", f'    """{doc}"""', *body])

    # --- gradients of captured tensors ---

    def gradients(self) -> str:
        """`_gradients`: a sum for each captured value, at the rate of the value."""
        if not self.gathers:
            return ""
        lines: list[tuple[str, Node | None]] = []
        for slot in self._slots():
            lines.append((f"{self.tensor_names[slot]} = torch.zeros(tensors[{slot}].shape, dtype={FLOAT})", None))
        fields = [self.tensor_names[slot] for slot in self._slots()]
        for number, gather, _ in self.gathers:
            name = self.sums[number]
            if self.is_window(gather):
                lines.append((f"{name} = {self.laid_out(gather, self.tensor_names[gather.attrs[0]])}  # a view", gather))
            elif self.rate(gather) == "element":
                continue
            else:
                reads = self.rates.reads[gather]
                sizes = ["q.shape[0]", "q.shape[1]", "q.shape[2]", "k.shape[2]"]
                shape = [size if axis in reads else "1" for size, axis in zip(sizes, _AXES, strict=True)]
                if self.rate(gather) == "diagonal":
                    shape[2:] = ["1", "q.shape[2] + k.shape[2] - 1"]
                lines.append((f"{name} = torch.zeros({', '.join(shape)}, dtype={FLOAT})", gather))
            fields.append(name)
        lines.append((f"return SimpleNamespace({', '.join(f'{f}={f}' for f in fields)})", None))
        return self.function(
            "_gradients(tensors, q, k)", "Sums for the gradients of captured values, each at the rate of the value.", lines
        )

    def _slots(self) -> list[int]:
        return sorted({gather.attrs[0] for _, gather, _ in self.gathers})

    def accumulate(self) -> str:
        """`_accumulate`: a tile's share of each captured value's gradient, summed over what the value does not read."""
        if not self.gathers:
            return ""
        lines: list[tuple[str, Node | None]] = []
        inner = self._factors()
        products: dict[Node, str] = {} if self.plan.derivative != "computed" else {self._dscore(): "draw"}
        known = {node: self.tile_text(node) for node in self.outside}
        for number, gather, factor in self.gathers:
            name = f"grads.{self.sums[number]}"
            reads = self.rates.reads[gather]
            rate = self.rate(gather)
            text = self._given(factor, known, inner)
            one = factor.op == "const" and text == "1.0"
            tokens = [] if rate in ("diagonal", "element") else [axis for axis, key in ((2, "q_idx"), (3, "kv_idx")) if key not in reads]
            others = [axis for axis, key in ((0, "batch"), (1, "head")) if key not in reads and "score" not in reads]
            if one:
                share = _summed("dscores", [*others, *tokens])
            elif not self.rates.reads.get(factor, frozenset()) & {"q_idx", "kv_idx", "score"}:
                share = _summed(f"{_summed('dscores', tokens)} * {_wrapped(text)}", others)
            else:
                if factor not in products:
                    product = f"dscores * {_wrapped(text)}"
                    if self.plan.has_mask and not self.plan.mask_adds:
                        product = f"_clear({product}, blocked)"
                    products[factor] = f"share_{len(products)}"
                    lines.append((f"{products[factor]} = {product}", factor))
                share = _summed(products[factor], [*others, *tokens])
            if self.is_window(gather):
                lines.append((f"_add_window({name}, {share}, {self.windowed(gather)})", gather))
            elif rate == "element":
                indices = ", ".join(lifted(a) if a.op == "const" else self._given(a, known, inner) for a in gather.args)
                lines.append((f"_scatter(grads.{self.tensor_names[gather.attrs[0]]}, {share}, {indices})", gather))
            elif rate == "diagonal":
                where = self.index(gather).strip("[]")
                parts = (where.split(", ") if where else []) + [":"] * 2
                along = ", ".join([*parts[:2], ":", "r.start + c.start : r.stop + c.stop - 1"])
                lines.append((f"{name}[{along}] += _along_diagonals({share})", gather))
            else:
                lines.append((f"{name}{self.index(gather) or '[:]'} += {share}", gather))
        doc = "Add a tile's share to the gradients of captured values, summed over what a value does not read."
        return self.function("_accumulate(grads, dscores, draw, factors, blocked, at, b, h, r, c)", doc, lines)

    @staticmethod
    def _given(node: Node, known: dict[Node, str], factors: list[Node]) -> str:
        if node.op == "const":
            return literal(node)
        return f"factors[{factors.index(node)}]" if node in factors else known[node]

    def finish(self) -> str:
        """`_finish`: from captured values to the tensors they were read from."""
        if not self.gathers:
            return ""
        lines: list[tuple[str, Node | None]] = [("if at is not None:", None)]
        for number, gather, _ in self.gathers:
            if self.is_window(gather) or self.rate(gather) == "element":
                continue
            indices = [f"at.{self.names[a]}" if a.op != "const" else lifted(a) for a in gather.args]
            arguments = ", ".join([f"grads.{self.tensor_names[gather.attrs[0]]}", f"grads.{self.sums[number]}", *indices])
            lines.append((f"    _scatter({arguments})", gather))
        if len(lines) == 1:
            lines = []
        slots = set(self._slots())
        parts = [f"grads.{n}.to(tensors[{slot}].dtype)" if slot in slots else "None" for slot, n in enumerate(self.tensor_names)]
        lines.append((f"return ({', '.join(parts)}{',' if len(parts) == 1 else ''})", None))
        return self.function("_finish(grads, tensors, at)", "The gradients of the captured tensors; None for one that needs none.", lines)


class _Section:
    """Straight-line code for some nodes: each computed once; what is used once and short is nested into its user."""

    def __init__(
        self,
        printer: _Printer,
        known: dict[Node, str],
        *,
        named: Sequence[Node] = (),
        frontier: set[Node] | None = None,
    ):
        self.printer, self.known, self.named = printer, known, set(named)
        self.in_tile = frontier is not None
        self.frontier = frontier or set()
        self.lines: list[tuple[str, Node | None]] = []
        self.owned: set[Node] = set()  # nodes whose tile may be overwritten once nobody needs it
        self.left: dict[Node, int] = {}

    def text(self, node: Node) -> str:
        """The expression for a node that was computed, or a number."""
        return literal(node) if node.op == "const" else self.known[node]

    def run(self, roots: Sequence[Node]) -> None:
        """Emit what the roots need and is not known."""
        order = self._needed(roots)
        self.left = {node: 0 for node in order}
        for node in order:
            for operand in node.args if not self._is_given(node) else ():
                self.left[operand] = self.left.get(operand, 0) + 1
        for root in roots:
            self.left[root] = self.left.get(root, 0) + 1
        score = input_node("score")
        if score in self.known and score in self.left:
            self.owned.add(score)
        for node in order:
            if self._is_given(node):
                if (
                    node in self.frontier
                    and self.left[node] > 1
                    and node not in roots
                    and self.known[node] != f"at.{self.printer.names[node]}"
                ):
                    name = self.printer.names[node]
                    self.lines.append((f"{name} = {self.known[node]}", node))
                    self.known[node] = name
            elif node.op != "const":
                self._emit(node)

    def _needed(self, roots: Sequence[Node]) -> list[Node]:
        """Nodes below the roots, not looking into what is known."""
        order: list[Node] = []
        seen: set[Node] = set()

        def visit(node: Node) -> None:
            stack: list[tuple[Node, int]] = [(node, 0)]
            while stack:
                top, position = stack.pop()
                if position == 0 and top in seen:
                    continue
                seen.add(top)
                operands = () if self._is_given(top) else top.args
                if position < len(operands):
                    stack.append((top, position + 1))
                    stack.append((operands[position], 0))
                else:
                    order.append(top)

        for root in roots:
            visit(root)
        return order

    def _is_given(self, node: Node) -> bool:
        return node in self.known or (node.op == "input")

    def _emit(self, node: Node) -> None:
        printer = self.printer
        operands = [self.text(a) for a in node.args]
        if node.op == "gather":
            tensor = f"at.tensors[{node.attrs[0]}]" if self.in_tile else printer.tensor_names[node.attrs[0]]
            operands = [tensor, *(lifted(a) if a.op == "const" else self.text(a) for a in node.args)]
        for operand in node.args:
            self.left[operand] -= 1
        place = self._in_place(node)
        if place is not None:
            target, order = place
            spelled = spell(node if order == [0, 1][: len(order)] else _swapped(node), [operands[i] for i in order], in_place=True)
            self.owned.discard(target)
            self.owned.add(node)
            self.lines.append((spelled, node))
            self.known[node] = self.known[target]
            return
        spelled = spell(node, operands)
        is_tile = "score" in printer.rates.reads[node]
        if self.left[node] == 1 and node not in self.named and not is_tile and node.op != "gather" and len(spelled) <= _NESTED_LENGTH:
            self.known[node] = spelled
            return
        name = printer.names[node] if node in self.named else printer.name(node)
        self.lines.append((f"{name} = {spelled}", node))
        self.known[node] = name
        if is_tile:
            self.owned.add(node)

    def _in_place(self, node: Node) -> tuple[Node, list[int]] | None:
        """The operand whose tile this node may overwrite, and the order of operands that puts it first."""
        if node.op not in IN_PLACE or node.dtype != FLOAT32:
            return None
        commutes = node.op in ("add", "mul", "minimum", "maximum")
        for position, operand in enumerate(node.args):
            if position and not commutes:
                break
            if operand in self.owned and operand.dtype == FLOAT32 and self.left[operand] == 0 and node.args.count(operand) == 1:
                return operand, [position, *(i for i in range(len(node.args)) if i != position)]
        return None

    def returns(self, roots: Sequence[Node], printer: _Printer, factors: Sequence[Node] | None = None) -> None:
        """The return line: the first root is a tile of its own that the caller may overwrite."""
        score, *others = roots
        if "score" not in printer.rates.reads[score]:
            text = lifted(score) if score.op == "const" else self.text(score)
            self.lines.append((f"score = score.copy_({text})", score))
            first = "score"
        else:
            first = self.text(score)
        texts = [self.text(node) for node in others]
        given = [self.text(node) for node in factors or ()]
        if first in texts or first in given:
            first = f"{first}.clone()"
        parts = [first, *texts]
        if factors is not None:
            parts.append(f"({', '.join(given)}{',' if len(given) == 1 else ''})")
        self.lines.append((f"return {', '.join(parts)}", None))


def _swapped(node: Node) -> Node:
    """The commutative node with its operands in the other order, for spelling only."""
    return make(node.op, (node.args[1], node.args[0]), node.attrs, node.dtype, node.where)


def _wrapped(text: str) -> str:
    return f"({text})" if is_operator(text) else text


def _summed(text: str, axes: Sequence[int]) -> str:
    if not axes:
        return text
    return f"{_wrapped(text)}.sum(({', '.join(map(str, sorted(axes)))}{',' if len(axes) == 1 else ''}), keepdim=True)"


def _note(place: Location | None) -> str:
    return f"{place.file.rsplit('/', 1)[-1]}:{place.line}" if place is not None else ""
