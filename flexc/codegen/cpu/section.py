"""Straight-line code for a part of a graph, such as the body of a tile function."""

from __future__ import annotations

from collections.abc import Sequence

from flexc.codegen.cpu.printer import Line, Printer
from flexc.codegen.cpu.rows import IN_PLACE, lifted, literal, spell
from flexc.ir.graph import FLOAT32, Node, input_node, make

_NESTED_LENGTH = 60  # an expression longer than this gets a line and a name


class Section:
    """Straight-line code for some nodes: each computed once; what is used once and short is nested into its user."""

    def __init__(
        self,
        printer: Printer,
        known: dict[Node, str],
        *,
        named: Sequence[Node] = (),
        frontier: set[Node] | None = None,
    ):
        self.printer, self.known, self.named = printer, known, set(named)
        self.in_tile = frontier is not None
        self.frontier = frontier or set()
        self.lines: list[Line] = []
        self.owned: set[Node] = set()  # nodes whose tile may be overwritten once nobody needs it
        self.left: dict[Node, int] = {}

    @staticmethod
    def of_tile(printer: Printer, roots: Sequence[Node], *, score: bool) -> Section:
        """Code of a tile function for the roots, with values from outside as slices."""
        known = {node: printer.tile_text(node) for node in printer.outside}
        if score:
            known[input_node("score")] = "score"
        section = Section(printer, known, frontier=set(printer.outside))
        section.run(roots)
        return section

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

    def returns(self, roots: Sequence[Node], factors: Sequence[Node] | None = None) -> None:
        """The return line: the first root is a tile of its own that the caller may overwrite."""
        score, *others = roots
        if "score" not in self.printer.rates.reads[score]:
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
