"""The functions of a CPU module that add up the gradients of captured tensors: a sum for each captured value, at the rate of the value."""

from __future__ import annotations

from collections.abc import Sequence

from flexc.codegen.cpu.printer import AXES, Line, Printer
from flexc.codegen.cpu.rows import FLOAT, is_operator, lifted, literal
from flexc.ir.graph import Node


def gradients(printer: Printer) -> str:
    """`_gradients`: a sum for each captured value, at the rate of the value."""
    if not printer.gathers:
        return ""
    lines: list[Line] = []
    for slot in _slots(printer):
        lines.append((f"{printer.tensor_names[slot]} = torch.zeros(tensors[{slot}].shape, dtype={FLOAT})", None))
    fields = [printer.tensor_names[slot] for slot in _slots(printer)]
    for number, gather, _ in printer.gathers:
        name = printer.sums[number]
        if printer.is_window(gather):
            lines.append((f"{name} = {printer.laid_out(gather, printer.tensor_names[gather.attrs[0]])}  # a view", gather))
        elif printer.rate(gather) == "element":
            continue
        else:
            reads = printer.rates.reads[gather]
            sizes = ["q.shape[0]", "q.shape[1]", "q.shape[2]", "k.shape[2]"]
            shape = [size if axis in reads else "1" for size, axis in zip(sizes, AXES, strict=True)]
            if printer.rate(gather) == "diagonal":
                shape[2:] = ["1", "q.shape[2] + k.shape[2] - 1"]
            lines.append((f"{name} = torch.zeros({', '.join(shape)}, dtype={FLOAT})", gather))
        fields.append(name)
    lines.append((f"return SimpleNamespace({', '.join(f'{f}={f}' for f in fields)})", None))
    return printer.function("_gradients(tensors, q, k)", "Sums for the gradients of captured values, each at the rate of the value.", lines)


def _slots(printer: Printer) -> list[int]:
    return sorted({gather.attrs[0] for _, gather, _ in printer.gathers})


def accumulate(printer: Printer) -> str:
    """`_accumulate`: a tile's share of each captured value's gradient, summed over what the value does not read."""
    if not printer.gathers:
        return ""
    lines: list[Line] = []
    inner = printer.tile_factors()
    products: dict[Node, str] = {} if printer.plan.derivative != "computed" else {printer.dscore(): "draw"}
    known = {node: printer.tile_text(node) for node in printer.outside}
    for number, gather, factor in printer.gathers:
        name = f"grads.{printer.sums[number]}"
        reads = printer.rates.reads[gather]
        rate = printer.rate(gather)
        text = _given(factor, known, inner)
        one = factor.op == "const" and text == "1.0"
        tokens = [] if rate in ("diagonal", "element") else [axis for axis, key in ((2, "q_idx"), (3, "kv_idx")) if key not in reads]
        others = [axis for axis, key in ((0, "batch"), (1, "head")) if key not in reads and "score" not in reads]
        if one:
            share = _summed("dscores", [*others, *tokens])
        elif not printer.rates.reads.get(factor, frozenset()) & {"q_idx", "kv_idx", "score"}:
            share = _summed(f"{_summed('dscores', tokens)} * {_wrapped(text)}", others)
        else:
            if factor not in products:
                product = f"dscores * {_wrapped(text)}"
                if printer.plan.has_mask and not printer.plan.mask_adds:
                    product = f"_clear({product}, blocked)"
                products[factor] = f"share_{len(products)}"
                lines.append((f"{products[factor]} = {product}", factor))
            share = _summed(products[factor], [*others, *tokens])
        if printer.is_window(gather):
            lines.append((f"_add_window({name}, {share}, {printer.windowed(gather)})", gather))
        elif rate == "element":
            indices = ", ".join(lifted(a) if a.op == "const" else _given(a, known, inner) for a in gather.args)
            lines.append((f"_scatter(grads.{printer.tensor_names[gather.attrs[0]]}, {share}, {indices})", gather))
        elif rate == "diagonal":
            where = printer.index(gather).strip("[]")
            parts = (where.split(", ") if where else []) + [":"] * 2
            along = ", ".join([*parts[:2], ":", "r.start + c.start : r.stop + c.stop - 1"])
            lines.append((f"{name}[{along}] += _along_diagonals({share})", gather))
        else:
            lines.append((f"{name}{printer.index(gather) or '[:]'} += {share}", gather))
    doc = "Add a tile's share to the gradients of captured values, summed over what a value does not read."
    return printer.function("_accumulate(grads, dscores, draw, factors, blocked, at, b, h, r, c)", doc, lines)


def _given(node: Node, known: dict[Node, str], factors: list[Node]) -> str:
    if node.op == "const":
        return literal(node)
    return f"factors[{factors.index(node)}]" if node in factors else known[node]


def finish(printer: Printer) -> str:
    """`_finish`: from captured values to the tensors they were read from."""
    if not printer.gathers:
        return ""
    lines: list[Line] = [("if at is not None:", None)]
    for number, gather, _ in printer.gathers:
        if printer.is_window(gather) or printer.rate(gather) == "element":
            continue
        indices = [f"at.{printer.names[a]}" if a.op != "const" else lifted(a) for a in gather.args]
        arguments = ", ".join([f"grads.{printer.tensor_names[gather.attrs[0]]}", f"grads.{printer.sums[number]}", *indices])
        lines.append((f"    _scatter({arguments})", gather))
    if len(lines) == 1:
        lines = []
    slots = set(_slots(printer))
    parts = [f"grads.{n}.to(tensors[{slot}].dtype)" if slot in slots else "None" for slot, n in enumerate(printer.tensor_names)]
    lines.append((f"return ({', '.join(parts)}{',' if len(parts) == 1 else ''})", None))
    return printer.function("_finish(grads, tensors, at)", "The gradients of the captured tensors; None for one that needs none.", lines)


def _wrapped(text: str) -> str:
    return f"({text})" if is_operator(text) else text


def _summed(text: str, axes: Sequence[int]) -> str:
    if not axes:
        return text
    return f"{_wrapped(text)}.sum(({', '.join(map(str, sorted(axes)))}{',' if len(axes) == 1 else ''}), keepdim=True)"
