"""Block maps by generated kernels: a mask's bounds, printed into kernels that write the walks of `sparsity` without asking the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured, position_bounds
from flexc.codegen.plans import Listed
from flexc.codegen.templates import header_of, render
from flexc.codegen.triton.blocks_program import Program, Table, bounds_program
from flexc.codegen.triton.blocks_text import HELPERS, Statements, statements
from flexc.codegen.triton.body import Body
from flexc.codegen.triton.emit import HELPERS as MASK_HELPERS
from flexc.codegen.triton.emit import captured_arguments, tidy
from flexc.codegen.triton.plan import MAX_TOKENS
from flexc.codegen.triton.signature import POINTERS
from flexc.ir.graph import FLOAT32, INT64, Graph, inputs_of, topological
from flexc.sparsity.facts import SMALL_TABLE, SPARSE_CELLS, cell_length, counts_tokens, is_wide

TEMPLATE, TABLES_TEMPLATE, ORDER_TEMPLATE = "triton/blocks.py.j2", "triton/blocks_tables.py.j2", "triton/blocks_order.py.j2"
COUNTED = {
    "work": "tl.where(fits, partial_count + full_count, reach)",
    "partial": "partial_count",
    "full": "full_count",
    "sampled": "sampled",
    "evaluated": "evaluated",
    "undecided": "undecided",
    "overflowed": "1 - fits.to(tl.int32)",
}
"""What a kernel counts for its block row: the work of walking it, blocks by kind and by how they were decided, whether it overflowed."""

_SPAN = 64  # blocks decided together by one vector, and along a square that is decided before its blocks are


@dataclass(frozen=True)
class BlocksPlan(Listed):
    """What the kernels of a block map are made for; sizes and values are arguments.

    Attributes:
        block: tokens per block (Bq, Bkv).
        exact: blocks that bounds leave open are evaluated: on samples, then on all their pairs.
        cells: of each table that the mask needs, by (slot, dimensions whose indices are ranges): elements along a cell.
        is_sorted: of each captured tensor, whether it was declared sorted.
        span: blocks of a vector; a square has as many along its side.
        samples: along each side of a block.
        slab: of a block, what is evaluated at once: tokens along the side of the block row, and along the other.
        warps: of a program, which walks one block row.
        interpreted: for TRITON_INTERPRET=1.
    """

    block: tuple[int, int]
    exact: bool
    cells: tuple[tuple[tuple[int, tuple[int, ...]], int], ...]
    is_sorted: tuple[bool, ...]
    span: int = _SPAN
    samples: int = 4
    slab: tuple[int, int] = (8, 128)
    warps: int = 4
    interpreted: bool = False


def plan_blocks(
    graph: Graph, block: tuple[int, int], granule: int, elements: Sequence[int], is_sorted: Sequence[bool], exact: bool, interpreted: bool
) -> BlocksPlan:
    """Every choice for the mask of `graph`.

    Args:
        granule: greatest common divisor of the block's sides.
        elements: of each captured tensor. Only the order of magnitude reaches the plan.
        is_sorted: of each captured tensor.
    """
    cells: dict[tuple[int, tuple[int, ...]], int] = {}
    for node in topological([graph.mask] if graph.mask is not None else []):
        if node.op == "gather":
            slot, wide = node.attrs[0], tuple(d for d, index in enumerate(node.args) if is_wide(index))
            if not wide or (is_sorted[slot] and wide == (len(node.args) - 1,)):
                continue
            limit = {"most_cells": SPARSE_CELLS} if len(wide) == 1 else {}
            is_aligned = all(node.args[d].op == "input" for d in wide)  # cells of a block answer exactly, however small the table is
            size = max(elements[slot], SMALL_TABLE + 1) if is_aligned else elements[slot]
            cell = cell_length(size, granule if counts_tokens(node, wide) else 1, len(wide), **limit)
            # Two reads of one tensor share a table; the finer cells serve both.
            cells[slot, wide] = min(cell, cells.get((slot, wide), cell))
    return BlocksPlan(block, exact, tuple(sorted(cells.items())), tuple(is_sorted), interpreted=interpreted)


@dataclass
class Side:
    """A kernel that stays on one side of the mask and walks along the other.

    Attributes:
        name: of the kernel.
        own, other: "q" or "kv".
        own_block, other_block: tokens of a block.
        bounds: statements of the mask's bounds.
        passed: what those of each tile need besides the tile's ends.
    """

    name: str
    own: str
    other: str
    own_block: int
    other_block: int
    bounds: Statements
    passed: str = ""


@dataclass
class MaskText:
    """The mask itself on a tile of positions, for exact evaluation: statements by level, and the expression of the mask."""

    lines: list[str] = field(default_factory=list)
    value: str = "True"


@dataclass(frozen=True)
class BlocksText:
    """A module's text, and the tables that its kernels take, in order."""

    source: str
    tables: tuple[Table, ...]


def program_of(graph: Graph, plan: BlocksPlan) -> Program:
    """The bounds of the mask as a program, with the plan's tables."""
    cells = dict(plan.cells)
    return bounds_program(graph, lambda slot, wide: cells[slot, wide], plan.is_sorted)


def emit_blocks(graph: Graph, plan: BlocksPlan, title: str = "") -> BlocksText:
    """The module that maps the blocks of `graph.mask`.

    Args:
        title: what the user calls the mask.

    Raises:
        UnsupportedError: bounds of the mask need a function that is not printed.
    """
    program = program_of(graph, plan)
    sides, helpers = [], set()
    for name, own, other, (own_block, other_block) in (("rows", "q", "kv", plan.block), ("columns", "kv", "q", plan.block[::-1])):
        printed = statements([program.certain, program.possible], f"{own}_idx", plan.interpreted)
        sides.append(Side(name, own, other, own_block, other_block, printed))
        helpers |= printed.helpers
    arguments, _ = captured_arguments(graph)
    for table in program.tables:
        ends = [f"{table.name}_lo_ptr", f"{table.name}_hi_ptr"]
        arguments.append(", ".join([*ends, *table.numbers(graph.tensors[table.slot].rank)]) + ",")
    names = [name for line in arguments for name in line.rstrip(",").split(", ")]
    for side in sides:
        side.passed = ", ".join([f"{side.own}_lo", f"{side.own}_hi", "batch", "head", *side.bounds.live, *names])
    numbers, pointers = ("".join(f', "{name}"' for name in names if name.endswith("_ptr") is is_pointer) for is_pointer in (False, True))
    used: set[str] = set()
    mask = _mask_text(graph, plan, used) if plan.exact else MaskText()
    reads = ", ".join(sorted(inputs_of(graph.mask))) if graph.mask is not None else ""
    text = render(
        TEMPLATE,
        header=header_of("Block map", title, graph, plan, f" The mask reads {reads or 'no position'}."),
        plan=plan,
        sides=sides,
        mask=mask,
        helpers=[HELPERS[name] for name in sorted(helpers)] + [MASK_HELPERS[name] for name in sorted(used) if name in MASK_HELPERS],
        needs_libdevice="libdevice" in used,
        arguments=arguments,
        mask_passed=", ".join(["batch", "head", *names]),
        fixed_arguments=numbers,
        fixed_pointers=pointers,
        square_lanes=2 * plan.span,
        counted=list(COUNTED.values()),
    )
    return BlocksText(tidy(text), program.tables)


def emit_tables() -> str:
    """The module with what the maps of all masks share: sparse tables of facts, the order of block rows."""
    return tidy(render(TABLES_TEMPLATE))


def block_signature(names: Sequence[str], graph: Graph, tables: Sequence[Table]) -> dict[str, str]:
    """Triton's type of each argument of the kernels, by name, for compiling them ahead of time."""
    given = {f"{captured(graph, t.name)}_ptr": POINTERS[t.dtype] for t in graph.tensors}
    given |= {captured(graph, s.name): "fp32" if s.dtype == FLOAT32 else "i64" if s.dtype == INT64 else "i32" for s in graph.scalars}
    given |= {f"{table.name}_{end}_ptr": POINTERS[table.dtype] for table in tables for end in ("lo", "hi")}
    return {name: given.get(name, "constexpr" if name.isupper() else "*i32" if name.endswith("_ptr") else "i32") for name in names}


def _mask_text(graph: Graph, plan: BlocksPlan, used: set[str]) -> MaskText:
    assert graph.mask is not None
    body = Body(graph, position_bounds(graph, MAX_TOKENS), tanh="libdevice", interpreted=plan.interpreted, uses=used)
    body.add(graph.mask)
    lines = body.take()
    return MaskText([line for level in (TILE, ROW, COLUMN, ELEMENT) for line in lines[level]], body.at(graph.mask, ELEMENT))
