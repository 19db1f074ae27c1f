"""Print a graph as the source of a CPU module. Makes no choice: those are the plan's."""

from __future__ import annotations

from dataclasses import asdict

from flexc.codegen.cpu import gradients
from flexc.codegen.cpu.plan import Plan
from flexc.codegen.cpu.printer import AXES, HELPERS, Line, Printer
from flexc.codegen.cpu.rows import TORCH_NAMES, lifted
from flexc.codegen.cpu.section import Section
from flexc.codegen.templates import render
from flexc.ir.graph import Graph, Node, input_node, topological

TEMPLATE = "cpu/attention.py.j2"
_ONCE = {"row": "row", "column": "column", "diagonal": "diagonal", "head": "batch and head", "uniform": "call"}


def emit(graph: Graph, plan: Plan) -> str:
    """The module's source. The same graph and plan give the same text."""
    printer = Printer(graph, plan)
    holes = {
        "origin": _origin(graph),
        "values_code": _values(printer),
        "score_code": _score(printer),
        "mask_code": _mask(printer),
        "factors_code": _factors(printer),
        "gradients_code": gradients.gradients(printer),
        "accumulate_code": gradients.accumulate(printer),
        "finish_code": gradients.finish(printer),
    }
    body = "".join(text for text in holes.values() if isinstance(text, str))
    uses = [name for name in HELPERS if f"{name}(" in body]
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


def _values(printer: Printer) -> str:
    """`_values`: everything that no tile changes."""
    lines: list[Line] = []
    known: dict[Node, str] = {}
    inside = topological(printer.outside)
    used = {n.attrs[0] for n in inside if n.op == "gather"} | {gather.attrs[0] for _, gather, _ in printer.gathers}
    for slot, tensor in enumerate(printer.tensor_names):
        if slot in used:
            lines.append((f"{tensor} = tensors[{slot}]", None))
    for node in inside:
        if node.op == "scalar":
            slot = node.attrs[0]
            known[node] = printer.scalar_names[slot]
            lines.append((f"{known[node]} = torch.as_tensor(scalars[{slot}], dtype={TORCH_NAMES[node.dtype]})", None))
    for rate in ("uniform", "head", "row", "column", "diagonal"):
        roots = [n for n in printer.outside if printer.rate(n) == rate]
        if not roots:
            continue
        local = dict(known) if rate in ("row", "column", "diagonal") else known
        header: list[Line] = [(f"# once a {_ONCE[rate]}", None)]
        positions = {n.attrs[0] for n in topological(roots) if n.op == "input"}
        for name in ("batch", "head"):
            node = input_node(name)
            if name in positions and node not in known:
                axis = AXES[name]
                shape = ["1"] * 4
                shape[axis] = "-1"
                header.append((f"{name} = torch.arange(q.shape[{axis}], dtype=torch.int32).view({', '.join(shape)})", None))
                known[node] = local[node] = name
        local.update(_position_lines(printer, rate, positions, header))
        section = Section(printer, local, named=roots)
        section.run(roots)
        lines += [*header, *section.lines]
        if rate in ("uniform", "head"):
            known.update({n: local[n] for n in topological(roots) if n in local})
    windows = [n for n in printer.outside if printer.is_window(n)]
    for node in windows:
        lines.append((f"{printer.names[node]} = {printer.laid_out(node, printer.tensor_names[node.attrs[0]])}", node))
    fields = ["tensors=tensors", "q_len=q.shape[2]", *(f"{printer.names[n]}={printer.names[n]}" for n in printer.outside)]
    lines.append((f"return SimpleNamespace({', '.join(fields)})", None))
    return printer.function("_values(tensors, scalars, q, k)", "What no tile changes, each value at its own rate.", lines)


def _position_lines(printer: Printer, rate: str, positions: set[str], header: list[Line]) -> dict[Node, str]:
    q_idx, kv_idx = input_node("q_idx"), input_node("kv_idx")
    if rate == "row":
        rows = (
            "torch.arange(q.shape[2] - 1, -1, -1, dtype=torch.int32)"
            if printer.plan.is_descending
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
        header.append(("q_on, kv_on = difference.clamp(min=0), (-difference).clamp(min=0)  # a pair of positions on each diagonal", None))
        return {q_idx: "q_on", kv_idx: "kv_on"}
    return {}


def _score(printer: Printer) -> str:
    """`_score`: the user's score function on a tile."""
    root = printer.graph.score
    if root is None:
        return ""
    section = Section.of_tile(printer, [root], score=True)
    section.returns([root])
    return printer.function("_score(score, at, b, h, r, c)", "The score function on a tile; overwrites its argument.", section.lines)


def _mask(printer: Printer) -> str:
    """`_allowed`: the user's mask function on a tile."""
    root = printer.graph.mask
    if root is None:
        return ""
    section = Section.of_tile(printer, [root], score=False)
    text = section.text(root) if root.op != "const" else lifted(root)
    return printer.function("_allowed(at, b, h, r, c)", "The mask function on a tile.", [*section.lines, (f"return {text}", root)])


def _factors(printer: Printer) -> str:
    """`_score_and_factors`: the score, its derivative and the factors of the captured values on a tile."""
    if printer.graph.score is None or not printer.plan.has_backward:
        return ""
    roots = [printer.graph.score]
    if printer.plan.derivative == "computed":
        roots.append(printer.dscore())
    inner = printer.tile_factors()
    section = Section.of_tile(printer, [*roots, *inner], score=True)
    section.returns(roots, factors=inner)
    doc = "The score function on a tile, its derivative where it is not constant, and its derivatives by captured values."
    return printer.function("_score_and_factors(score, at, b, h, r, c)", doc, section.lines)
