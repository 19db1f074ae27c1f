"""Fills the Triton templates: prints the graph at its rates and hands the plan through. Makes no choice of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured, position_bounds
from flexc.codegen.templates import header_of, render
from flexc.codegen.triton.body import Body, has_weight_past_the_end
from flexc.codegen.triton.gradients import BINS, Buffer, Term, print_gradients
from flexc.codegen.triton.gradients import HELPERS as GRADIENT_HELPERS
from flexc.codegen.triton.plan import MAX_TOKENS, Plan
from flexc.ir.addends import adds_wide_capture
from flexc.ir.graph import Graph, Node, inputs_of, is_const
from flexc.target import Target

# No branch, where libdevice.tanh has one for each element. Triton's division would scale divisors near infinity, whose quotient is 0 here.
_TANH = '''@triton.jit
def {name}(x):
    """tanh from 2^x: absolute error 2^-21, relative error 2^-18."""
    grown = 1.0 + tl.exp2(x * 2.88539008)  # e^2x
    far = 1.0 - 2.0 * ({inverse})
    near = x - x * x * x * 0.333333333  # where that difference loses its digits
    return tl.where(tl.abs(x) < 0.0625, near, far)'''
_RECIPROCAL = 'tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=tl.float32, is_pure=True, pack=1)'

HELPERS = {
    "tanh_approx": '''@triton.jit
def tanh_approx(x):
    """tanh by the special-function unit: relative error 2^-11."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x.to(tl.float32)], dtype=tl.float32, is_pure=True, pack=1)''',
    "floor_quotient": '''@triton.jit
def floor_quotient(x, y):
    """floor(x / y): the rounded quotient may be an integer that x / y does not reach, which the sign of the rest tells."""
    whole = tl.floor(tl.div_rn(x, y))
    rest = tl.fma(-whole, y, x)
    return tl.where((rest != 0) & ((rest < 0) ^ (y < 0)), whole - 1.0, whole)''',
    "floor_rest": '''@triton.jit
def floor_rest(x, y):
    """x - floor(x / y) * y, of the sign of y."""
    rest = tl.fma(-tl.floor(tl.div_rn(x, y)), y, x)
    return tl.where((rest != 0) & ((rest < 0) ^ (y < 0)), rest + y, rest)''',
    "round_even": '''@triton.jit
def round_even(x):
    """To the nearest integer, halves to the even one."""
    down = tl.floor(x)
    rest = x - down
    odd = down - 2.0 * tl.floor(down * 0.5)
    return down + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), 1.0, 0.0)''',
    "truncate": '''@triton.jit
def truncate(x):
    """Towards zero."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))''',
    "tanh_exp2": _TANH.format(name="tanh_exp2", inverse=_RECIPROCAL),
    "tanh_interpreted": _TANH.format(name="tanh_interpreted", inverse="1.0 / grown"),
    "spread": '''@triton.jit
def spread(values, last_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of each pair of the tile the value of its diagonal, where the first value is that of the last column's first row."""
    row, column = tl.minimum(tl.arange(0, ROWS), last_row)[:, None], tl.arange(0, COLUMNS)[None, :]
    return tl.gather(values, (row - column + (COLUMNS - 1)).reshape(ROWS * COLUMNS), 0).reshape(ROWS, COLUMNS)''',
    "spread_transposed": '''@triton.jit
def spread_transposed(values, last_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of each pair of the tile [COLUMNS, ROWS] the value of its diagonal, where the first value is that of the last column's first row."""
    row, column = tl.minimum(tl.arange(0, ROWS), last_row)[None, :], tl.arange(0, COLUMNS)[:, None]
    return tl.gather(values, (row - column + (COLUMNS - 1)).reshape(ROWS * COLUMNS), 0).reshape(COLUMNS, ROWS)''',
    **GRADIENT_HELPERS,
}


@dataclass
class Kernel:
    """Everything that the template prints into one kernel: statements by level, those of the mask apart, and expressions.

    Attributes:
        columns: keys of its tile.
        logit, times_outer, mask: the score in base 2 is logit * outer; mask ends in " & ".
        reads_rows, reads_columns, …: which positions the statements name.
        guard_rows: the weight of a query past the end must be set to 0, where it would reach a sum.
        times_dscore, guard_dscore: factor of the raw score's gradient.
        terms: gradients of captured tensors; gradient_arguments, buffers: what they are added to.
        shared: inputs among "batch" and "head" that the block of threads goes through in turn.
        also: what the docstring says of the gradients.
    """

    columns: int = 0
    tile: list[str] = field(default_factory=list)
    row: list[str] = field(default_factory=list)
    column: list[str] = field(default_factory=list)
    element: list[str] = field(default_factory=list)
    mask_row: list[str] = field(default_factory=list)
    mask_column: list[str] = field(default_factory=list)
    mask_element: list[str] = field(default_factory=list)
    logit: str = "raw"
    times_outer: str = ""
    mask: str = ""
    reads_rows: bool = False
    reads_columns: bool = False
    mask_reads_rows: bool = False
    mask_reads_columns: bool = False
    guard_rows: bool = False
    times_dscore: str = ""
    guard_dscore: bool = False
    terms: tuple[Term, ...] = ()
    gradient_arguments: list[str] = field(default_factory=list)
    buffers: tuple[Buffer, ...] = ()
    shared: frozenset[str] = frozenset()
    also: str = ""

    @property
    def sums(self) -> list[Term]:
        """Terms with an accumulator."""
        return [t for t in self.terms if t.kind == "sum"]

    @property
    def members(self) -> str:
        """What the block of threads goes through in turn, "" for nothing."""
        return "_and_".join(sorted(self.shared))


def emit(graph: Graph, plan: Plan, target: Target, *, title: str = "") -> str:
    """The module's text: kernels and the host functions `forward` and `backward`.

    Args:
        graph: after `passes.run`, `differentiate` and `lower_to_base2`: outputs logit2, outer, mask, dscore, gather:k, dgather:k.
        plan: from `make_plan`.
        target: for the size of its L2 cache.
        title: what the user calls the variant.
    """
    known = position_bounds(graph, MAX_TOKENS)
    used: set[str] = set()
    kernels = {kind: print_kernel(graph, plan, known, kind, used) for kind in ("forward", "dq", "dkv")}
    arguments, fixed = captured_arguments(graph)
    host = render(
        "triton/host.py.j2",
        plan=plan,
        captured=[(t.name, t.rank, t.needs_grad) for t in graph.tensors],
        dq_buffers=kernels["dq"].buffers,
        dkv_buffers=kernels["dkv"].buffers,
        members=kernels["dq"].members,
        places=2 * target.sm_count,
        bins=BINS,
        l2_bytes=target.l2_bytes,
    )
    text = render(
        "triton/attention.py.j2",
        header=header_of("Attention", title, graph, plan),
        plan=plan,
        helpers=[HELPERS[name] for name in sorted(used) if name in HELPERS],
        needs_libdevice="libdevice" in used,
        arguments=arguments,
        fixed_arguments="".join(f', "{name}"' for name in fixed),
        host=host,
        bins=BINS,
        has_bins=any(buffer.dtype == "bins" for kernel in kernels.values() for buffer in kernel.buffers),
        **kernels,
    )
    return tidy(text)


def captured_arguments(graph: Graph) -> tuple[list[str], list[str]]:
    """Argument lines for captured tensors and run-time scalars; and the names of sizes and scalars, which must not be specialised."""
    lines, fixed = [], []
    for tensor in graph.tensors:
        name = captured(graph, tensor.name)
        sizes = [f"{name}_size{i}" for i in range(tensor.rank)]
        strides = [f"{name}_stride{i}" for i in range(tensor.rank)]
        lines.append(", ".join([f"{name}_ptr", *sizes, *strides]) + ",")
        fixed += sizes
    if graph.scalars:
        names = [captured(graph, s.name) for s in graph.scalars]
        lines.append(", ".join(names) + ",")
        fixed += names
    return lines, fixed


def print_kernel(graph: Graph, plan: Any, known: dict, kind: str, used: set[str]) -> Kernel:
    """Statements of the kernel "forward", "dq" or "dkv"; the plan has its tile under that name. Adds the helpers it calls to `used`."""
    tile = plan.forward if kind == "forward" else plan.dq if kind == "dq" else plan.dkv
    body = Body(graph, known, plan.tanh, plan.interpreted, transposed=kind == "dkv", tile=(tile.rows, tile.columns), uses=used)
    kernel = Kernel(columns=tile.columns)
    logit, outer = _output(graph, "logit2"), _output(graph, "outer")
    roots = [logit, outer]
    body.add(logit)
    body.add(outer)
    shape = f"[{tile.columns}, {tile.rows}]" if kind == "dkv" else f"[{tile.rows}, {tile.columns}]"
    kernel.logit = body.at(logit, ELEMENT)
    if logit.op == "const" or body.levels[logit] != ELEMENT or "raw" not in inputs_of(logit):
        kernel.logit = f"(tl.zeros({shape}, tl.float32) + {kernel.logit})"
    if not is_const(outer, 1.0):
        kernel.times_outer = f" * {body.at(outer, TILE)}"
    if kind == "forward" and logit.op in ("mul", "neg") and adds_wide_capture(logit, graph):
        # An FMA of the product and the maximum, which is rounded, would differ from 0 by the last digit of 1e38.
        kernel.logit = f"tl.fma({kernel.logit}, 1.0, 0.0)"
    if kind != "forward":
        dscore = graph.get("dscore")
        if dscore is not None and not is_const(dscore, 1.0):
            body.add(dscore)
            roots.append(dscore)
            kernel.times_dscore = f" * {body.at(dscore, ELEMENT)}"
            kernel.guard_dscore = not _is_finite(body, dscore)
        found = print_gradients(graph, plan, kind, body, lambda factor: _is_finite(body, factor))
        roots += found.roots
        kernel.terms, kernel.buffers, kernel.shared = found.terms, found.buffers, found.shared
        for buffer in found.buffers:
            strides = "".join(f", {buffer.arguments}_stride{i}" for i in range(buffer.rank))
            step = f", {buffer.arguments}_step" if buffer.dtype == "bins" else ""
            kernel.gradient_arguments.append(f"{buffer.arguments}_ptr{step}{strides},")
        if found.buffers:
            names = dict.fromkeys(graph.tensors[buffer.slot].name for buffer in found.buffers)
            kernel.also = " and what they add to the gradients of " + ", ".join(names)
        kernel.guard_rows = (kind == "dkv" or bool(kernel.terms)) and has_weight_past_the_end(graph, MAX_TOKENS)
    lines = body.take()
    kernel.tile, kernel.row, kernel.column, kernel.element = (lines[level] for level in (TILE, ROW, COLUMN, ELEMENT))
    read = frozenset[str]().union(*(inputs_of(r) for r in roots))
    kernel.reads_rows, kernel.reads_columns = "q_idx" in read, "kv_idx" in read
    mask = graph.mask
    if mask is not None:
        body.add(mask)
        lines = body.take()
        kernel.tile += lines[TILE]
        kernel.mask_row, kernel.mask_column, kernel.mask_element = lines[ROW], lines[COLUMN], lines[ELEMENT]
        kernel.mask = f"{body.at(mask, ELEMENT)} & "
        kernel.mask_reads_rows, kernel.mask_reads_columns = "q_idx" in inputs_of(mask), "kv_idx" in inputs_of(mask)
    # What the kernel's own rows (in dkv: its columns) need stands before the loop, where both kinds of block share it.
    if kind == "dkv":
        kernel.column, kernel.mask_column = kernel.column + kernel.mask_column, []
    else:
        kernel.row, kernel.mask_row = kernel.row + kernel.mask_row, []
        kernel.reads_rows = kernel.reads_rows or kernel.mask_reads_rows
    return kernel


def _is_finite(body: Body, factor: Node) -> bool:
    """Bounds prove it, or one value serves the whole tile: NaN there is NaN everywhere."""
    if factor.op == "const" or body.levels[factor] == TILE:
        return True
    interval = body.known[factor]
    return not interval.nan and not interval.is_infinite


def _output(graph: Graph, name: str) -> Node:
    node = graph.get(name)
    if node is None:
        from flexc.errors import InternalError

        raise InternalError(f"the graph has no output {name}:\n{graph}")
    return node


def tidy(text: str) -> str:
    """Blank lines only where a reader wants them: two between functions, at most one elsewhere, none among arguments."""
    lines = [line.rstrip() for line in text.splitlines()]
    result: list[str] = []
    for line in lines:
        if not line and (not result or not result[-1] or result[-1].endswith((":", "(", ","))):
            continue
        if line.startswith(("@triton.jit", "def ", "LAUNCH = ")) and result and not result[-1].startswith("@"):
            while result and not result[-1]:
                result.pop()
            result += ["", ""]
        if line.lstrip().startswith(")") and result and not result[-1]:
            result.pop()
        result.append(line)
    return re.sub(r"\n+$", "", "\n".join(result)) + "\n"
