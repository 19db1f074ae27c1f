"""Bounds as a program: symbols against tensors, and facts about the printed text."""

from __future__ import annotations

import dataclasses
import math
import re

import jinja2.meta
import pytest
import torch
from hypothesis import given

from flexc.codegen.templates import _environment, template_source
from flexc.codegen.triton.blocks import TEMPLATE, BlocksPlan, block_signature, emit_blocks, plan_blocks, program_of
from flexc.codegen.triton.blocks_symbols import COMPARISONS, REAL, TRUTH, WHOLE, Recorder, Symbol, do
from flexc.codegen.triton.blocks_text import statements
from flexc.errors import UnsupportedError
from flexc.ir.bounds import bounds
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Graph, Node, ScalarInput, TensorInput, input_node, scalar
from flexc.ir.interval import Interval
from flexc.ir.ops import apply, gather
from flexc.sparsity.facts import Facts, SparseTable
from tests.sparsity.test_classify import TABLES, masks
from tests.strategies import quick

Q, K, HEAD = (input_node(name) for name in ("q_idx", "kv_idx", "head"))
CAUSAL = apply("ge", Q, K)


def graph_of(mask: Node, *tensors: TensorInput, scalars: tuple[ScalarInput, ...] = ()) -> Graph:
    return Graph((("mask", mask),), tensors, scalars)


def planned(graph: Graph, *, elements: int = 2**20, is_sorted: bool = False, exact: bool = False) -> BlocksPlan:
    count = len(graph.tensors)
    return plan_blocks(graph, (128, 128), 128, [elements] * count, [is_sorted] * count, exact, interpreted=False)


def printed(graph: Graph, own: str = "q_idx", **options):
    program = program_of(graph, planned(graph, **options))
    return statements([program.certain, program.possible], own)


# --- values ---------------------------------------------------------------------------------------------------------------------------

_TORCH = {
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "where": torch.where, "truediv": torch.true_divide,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"), "lshift": lambda x, y: x * torch.exp2(y),
    "rshift": lambda x, y: torch.floor(x / torch.exp2(y)), "scaled": torch.mul, "integer": lambda x: x,
    "floor_log2": lambda x: torch.frexp(x).exponent.double() - 1, "bit_length": lambda x: torch.frexp(x).exponent.double(),
}  # fmt: skip


def evaluated(roots: list[Symbol], arguments: dict[str, torch.Tensor], memory: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What the program computes, in float64 throughout."""
    values: dict[Symbol, torch.Tensor] = {}

    def value(symbol: Symbol) -> torch.Tensor:
        if symbol not in values:
            operands = [value(a) for a in symbol.args]
            if symbol.op == "const":
                known = symbol.attrs[0]
                values[symbol] = torch.tensor(
                    known if isinstance(known, bool) else float(known), dtype=torch.bool if symbol.kind == TRUTH else torch.float64
                )
            elif symbol.op == "argument":
                values[symbol] = arguments[symbol.attrs[0]].double()
            elif symbol.op == "load":
                values[symbol] = memory[symbol.attrs[0]].flatten()[operands[0].long()].double()
            else:
                values[symbol] = _TORCH.get(symbol.op, getattr(torch, symbol.op, None))(*operands)
            found = values[symbol]
            if symbol.kind == WHOLE:
                assert (found == found.floor()).all(), symbol.op
            if symbol.kind != TRUTH:
                assert ((symbol.least <= found) & (found <= symbol.most) | found.isnan()).all(), (
                    symbol.op,
                    symbol.least,
                    symbol.most,
                    found,
                )
        return values[symbol]

    return [value(root) for root in roots]


@quick
@given(mask=masks())
def test_the_program_computes_the_bounds_of_random_masks(mask):
    """On symbols as on tensors, with the facts about captured tensors looked up in the same tables; ranges of symbols hold."""
    tensors = tuple(TensorInput(f"t{i}", str(t.dtype).removeprefix("torch."), t.dim()) for i, t in enumerate(TABLES))
    graph = graph_of(mask, *tensors)
    plan = plan_blocks(graph, (8, 8), 8, [t.numel() for t in TABLES], [False] * len(TABLES), False, interpreted=False)
    program = program_of(graph, plan)
    first = torch.arange(0, 64, 8).double()
    q_lo, kv_lo = first[:, None], first[None, :]
    entry = torch.tensor([[[1.0]]]).double()
    inputs = {
        "q_idx": Interval.positions(q_lo, q_lo + 7, 2**24), "kv_idx": Interval.positions(kv_lo, kv_lo + 7, 2**24),
        "batch": Interval.positions(entry, entry, 2), "head": Interval.positions(entry + 1, entry + 1, 3),
    }  # fmt: skip
    expected = bounds([mask], inputs, (), Facts(TABLES, 8).gather)[mask]
    arguments = {"q_lo": q_lo, "q_hi": q_lo + 7, "kv_lo": kv_lo, "kv_hi": kv_lo + 7, "batch": entry, "head": entry + 1}
    memory = {}
    for slot, tensor in enumerate(TABLES):
        memory[f"u_t{slot}_ptr"] = tensor
        arguments |= {f"u_t{slot}_size{d}": torch.tensor(size) for d, size in enumerate(tensor.shape)}
        arguments |= {f"u_t{slot}_stride{d}": torch.tensor(stride) for d, stride in enumerate(tensor.stride())}
    for table in program.tables:
        found = tables_of(TABLES[table.slot], table)
        memory |= {f"{table.name}_lo_ptr": found.lo, f"{table.name}_hi_ptr": found.hi}
        numbers = found.lo.stride()[:-1] if len(table.dims) == 1 else (*found.lo.stride(), *found.spans)
        arguments |= dict(zip(table.numbers(TABLES[table.slot].dim()), map(torch.tensor, numbers), strict=True))
    certain, possible = evaluated([program.certain, program.possible], arguments, memory)
    shape = torch.broadcast_shapes(expected.lo.shape, certain.shape, (1, 8, 8))
    assert torch.equal(certain.expand(shape), expected.lo.expand(shape))
    assert torch.equal(possible.expand(shape), expected.hi.expand(shape))


def tables_of(tensor: torch.Tensor, table):
    from flexc.sparsity.facts import Cells

    return (SparseTable if len(table.dims) == 1 else Cells).of(tensor, table.dims, table.cell)


def test_constants_are_folded_and_equal_symbols_are_one():
    recorder = Recorder()
    x, y = (recorder.argument(name, WHOLE, 0.0, 100.0) for name in "xy")
    assert x + y is x + y and x + y is not y + x
    assert (x + 0) is x and (x * 1) is x and (x * 0).attrs == (0,) and (x - x).attrs == (0,)
    assert (x.abs()) is x and torch.floor(x) is x and x.double() is x
    assert do("floordiv", recorder.const(7), 2).attrs == (3,)
    assert torch.isnan(x).attrs == (False,) and (x >= 0).attrs == (True,) and (x > 100).attrs == (False,)
    assert (x == x).attrs == (True,) and (x < x).attrs == (False,) and (x + 101 == y).attrs == (False,)
    assert torch.minimum(x, x + 200) is x and torch.maximum(x, y).op == "maximum"
    assert torch.where(x > y, x, x) is x and (~(x > y)) is (x <= y) and ~~(x > y) is (x > y)
    assert ((x > y) & True) is (x > y) and ((x > y) | True).attrs == (True,)
    assert torch.exp(recorder.const(0.0)).attrs == (1,)


def test_a_comparison_with_what_may_be_nan_is_not_decided():
    recorder = Recorder()
    x = recorder.argument("x", REAL, 0.0, 1.0)
    assert (x < 2.0).op == "lt" and (x == x).op == "eq" and (~(x < 2.0)).op == "not"


@pytest.mark.parametrize(("most", "bits"), [(2.0**31 - 1, 32), (2.0**31, 64)])
def test_integers_have_as_many_bits_as_they_need(most, bits):
    x = Recorder().argument("x", WHOLE, 0.0, most)
    assert x.bits == bits and do("maximum", x, 5).bits == bits
    assert (x + 1).bits == 64 and (x * 2.0**40).kind == (WHOLE if most * 2.0**40 <= 2.0**62 else REAL)


def test_a_symbol_has_no_value_to_decide_by():
    with pytest.raises(TypeError, match="a symbol of the program has no value yet"):
        bool(Recorder().argument("x", WHOLE, 0.0, 1.0) > 0)


def test_a_function_without_a_row_is_named():
    x = Recorder().argument("x", REAL, 0.0, 1.0)
    with pytest.raises(UnsupportedError, match="triton: the bounds of this mask need digamma"):
        torch.digamma(x)
    with pytest.raises(UnsupportedError, match=r"need torch\.int32"):
        x.to(torch.int32)


# --- text -------------------------------------------------------------------------------------------------------------------------------


def test_causal_is_two_comparisons():
    text = printed(graph_of(CAUSAL))
    assert text.own == [] and [line.split(" = ")[1] for line in text.each] == ["q_lo >= kv_hi", "q_hi >= kv_lo"]


def test_what_belongs_to_one_side_is_computed_once():
    docs = TensorInput("docs", "int32", 1)
    mask = apply("eq", gather(0, INT32, [Q]), gather(0, INT32, [K]))
    for own, other in (("q_idx", "kv"), ("kv_idx", "q")):
        text = printed(graph_of(mask, docs), own)
        assert sum("tl.load" in line for line in text.own) == 4
        assert not any(f"{other}_lo" in line or f"{other}_hi" in line for line in text.own)
        assert set(text.live) <= {line.split(" = ")[0] for line in text.own}
        used = set(re.findall(r"\bv\d+\b", " ".join(line.split(" = ", 1)[1] for line in text.each)))
        assert used <= set(text.live) | {line.split(" = ")[0] for line in text.each}


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "uint8"])
def test_integers_are_computed_as_integers(dtype):
    ids = TensorInput("ids", dtype, 1)
    loaded = {"int64": INT64, "bool": BOOL}.get(dtype, INT32)
    mask = apply("and", apply("eq", gather(0, loaded, [Q]), gather(0, loaded, [K])), apply("lt", Q - K, scalar(0, INT32)))
    text = printed(graph_of(mask, ids, scalars=(ScalarInput("w", INT32),)))
    assert not any("float64" in line for line in text.own + text.each)


def test_a_declared_order_needs_no_table():
    docs = TensorInput("docs", "int64", 1)
    graph = graph_of(apply("eq", gather(0, INT64, [Q]), gather(0, INT64, [K])), docs)
    assert [table.dims for table in program_of(graph, planned(graph)).tables] == [(0,)]
    assert program_of(graph, planned(graph, is_sorted=True)).tables == ()


def test_cells_are_as_long_as_ranges_allow():
    docs = TensorInput("docs", "int64", 1)
    by_token = graph_of(apply("eq", gather(0, INT64, [Q]), 3), docs)
    by_block = graph_of(apply("eq", gather(0, INT64, [apply("floordiv", Q, 128)]), 3), docs)
    assert planned(by_token).cells == (((0, (0,)), 128),)
    assert planned(by_token, elements=1000).cells == (((0, (0,)), 128),), "cells of a block answer exactly, however small the table is"
    assert planned(by_block, elements=2**13).cells == (((0, (0,)), 1),)
    assert planned(by_block, elements=2**20).cells == (((0, (0,)), 32),)
    both = graph_of(apply("and", by_token.mask, by_block.mask), docs)
    assert planned(both, elements=2**14).cells == (((0, (0,)), 1),)


def test_sizes_and_numbers_reach_no_text():
    docs = TensorInput("docs", "int64", 1)
    graph = graph_of(
        apply("and", apply("eq", gather(0, INT64, [Q]), 3), apply("lt", K, scalar(0, INT32))), docs, scalars=(ScalarInput("n", INT32),)
    )
    assert emit_blocks(graph, planned(graph, elements=2**19)) == emit_blocks(graph, planned(graph, elements=2**20))


def test_only_exact_kernels_hold_the_mask():
    assert "def mask_at" not in emit_blocks(graph_of(CAUSAL), planned(graph_of(CAUSAL))).source
    assert "q_idx[:, None] >= kv_idx[None, :]" in emit_blocks(graph_of(CAUSAL), planned(graph_of(CAUSAL), exact=True)).source


def test_every_argument_has_a_type():
    docs, flags = TensorInput("docs", "int64", 1), TensorInput("flags", "bool", 2)
    mask = apply("and", apply("eq", gather(0, INT64, [Q]), gather(0, INT64, [K])), gather(1, BOOL, [HEAD, K]))
    mask = apply("and", mask, apply("lt", apply("mul", Q, 0.5), scalar(0, FLOAT32)))
    graph = graph_of(mask, docs, flags, scalars=(ScalarInput("w", FLOAT32),))
    text = emit_blocks(graph, planned(graph))
    (arguments,) = re.findall(r"def rows_kernel\(\n(.*?)\n\):", text.source, re.S)
    names = [name for name in re.split(r",\s*", arguments.strip().replace(": tl.constexpr", "")) if name]
    types = block_signature(names, graph, text.tables)
    assert types["u_docs_ptr"] == "*i64" and types["u_flags_ptr"] == "*i1" and types["u_w"] == "fp32" and types["COARSE"] == "constexpr"
    assert types["u_docs_table0_lo_ptr"] == "*i64" and types["u_flags_table1_hi_ptr"] == "*u8" and types["records_ptr"] == "*i32"
    assert types["q_len"] == "i32"


def test_holes_of_the_template_are_those_that_it_lists():
    source = template_source(TEMPLATE)
    found = jinja2.meta.find_undeclared_variables(_environment().parse(source))
    listed = source[: source.index("#}")]
    assert all(re.search(rf"\b{hole}\b", listed) for hole in found), found
    fields = {field.name for field in dataclasses.fields(BlocksPlan)}
    assert set(re.findall(r"\bplan\.(\w+)", source)) <= fields


def test_every_operation_of_the_bounds_is_printed():
    """A row that only random graphs reach would fail where a user meets it first."""
    x = Recorder().argument("x", REAL, -math.inf, math.inf)
    n = x.recorder.argument("n", WHOLE, 0.0, 50.0)
    functions = ["exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf"]
    for name in [*functions, "floor", "ceil", "trunc", "round", "sign"]:
        assert statements([do(name, x) > 0.5], "q_idx").roots[0].startswith("v"), name
    for name in ("add", "sub", "mul", "truediv", "minimum", "maximum", "pow", "floordiv", *COMPARISONS):
        assert statements([do("gt", do(name, x, n), 0.5) if name not in COMPARISONS else do(name, x, n)], "q_idx").roots
