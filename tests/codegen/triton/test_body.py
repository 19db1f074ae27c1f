"""Statements mean what the graph means, each is printed once and at the level where it changes, and names cannot collide."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexc import passes
from flexc.codegen.levels import COLUMN, ELEMENT, ROW, TILE, captured, position_bounds
from flexc.codegen.triton.body import LEVELS, Body, literal
from flexc.codegen.triton.plan import MAX_TOKENS
from flexc.ir.eager import evaluate
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Graph, Node, ScalarInput, TensorInput, const, input_node, scalar
from flexc.ir.ops import apply, cast, gather
from flexc.passes.derivative import differentiate
from tests.codegen.triton.stand_in import Array, Pointer, executed, lifted
from tests.strategies import environment, graphs, quick

pytestmark = pytest.mark.usefixtures("nodes_without_lines")

S, B, H, Q, K = (input_node(name) for name in ("score", "batch", "head", "q_idx", "kv_idx"))
SLOPES = TensorInput("slopes", "float32", 1)
DOCUMENTS = TensorInput("doc", "int64", 1)


def body_of(graph: Graph, *, transposed: bool = False, tanh: str = "libdevice") -> Body:
    """With all outputs printed."""
    body = Body(graph, position_bounds(graph, MAX_TOKENS), tanh, False, transposed)
    for _, node in graph.outputs:
        body.add(node)
    return body


def text_of(body: Body) -> str:
    """All statements."""
    return "\n".join(line for level in LEVELS for line in body.lines[level])


def of_score(node: Node, *tensors: TensorInput, scalars: tuple[ScalarInput, ...] = ()) -> Body:
    """A body for one score."""
    return body_of(Graph((("score", node),), tensors, scalars))


def arguments(graph: Graph, env, batch: int, head: int, transposed: bool) -> dict:
    """What a kernel's arguments and tile are in the stand-in."""
    score = env.inputs["score"][batch, head]
    names = {
        "score": Array(score.T if transposed else score),
        "batch": Array(torch.tensor(batch, dtype=torch.int32)),
        "head": Array(torch.tensor(head, dtype=torch.int32)),
        "q_idx": Array(torch.arange(5, dtype=torch.int32)),
        "kv_idx": Array(torch.arange(7, dtype=torch.int32)),
    }
    for tensor, value in zip(graph.tensors, env.tensors, strict=True):
        name = captured(graph, tensor.name)
        names[f"{name}_ptr"] = Pointer(value)
        for axis in range(value.dim()):
            names[f"{name}_size{axis}"] = Array(torch.tensor(value.shape[axis], dtype=torch.int32))
            names[f"{name}_stride{axis}"] = Array(torch.tensor(value.stride(axis), dtype=torch.int32))
    for given_scalar, value in zip(graph.scalars, env.scalars, strict=True):
        names[captured(graph, given_scalar.name)] = Array(
            torch.as_tensor(value, dtype=torch.float64 if given_scalar.dtype == FLOAT32 else torch.int32)
        )
    return names


@pytest.mark.parametrize("transposed", [False, True])
@quick
@given(graph=graphs(), seed=st.integers(0, 100))
def test_statements_mean_what_the_graph_means(transposed, graph, seed):
    """Random programs and their derivatives, over captured tensors of every kind, with indices of both signs and out of range."""
    graph = differentiate(passes.run(graph))
    body = body_of(graph, transposed=transposed)
    env = environment(seed)
    batch, head = seed % 2, seed % 3
    scope = arguments(graph, env, batch, head, transposed)
    for level in LEVELS:  # a statement reads its own level and those before it, but a row reads no column
        visible = {ROW: (TILE, ROW), COLUMN: (TILE, COLUMN)}.get(level, LEVELS[: LEVELS.index(level) + 1])
        known = (
            dict(scope) if level == ELEMENT else {n: v for n, v in scope.items() if not n.startswith("_") and made_at(n, body) in visible}
        )
        scope |= executed(body.lines[level], known)
    for name, node in graph.outputs:
        (expected,) = evaluate([node], env)
        expected = expected.expand(2, 3, 5, 7)[batch, head]
        found = lifted(eval(body.at(node, ELEMENT), {}, scope))
        found = found.expand(7, 5).T if transposed else found.expand(5, 7)
        torch.testing.assert_close(
            found.to(expected.dtype), expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda m: f"{name}: {m}\n{graph}"
        )


def made_at(name: str, body: Body) -> str:
    """The level whose statements make a name; arguments belong to the tile."""
    for level in LEVELS:
        if any(line.startswith(f"{name} = ") for line in body.lines[level]):
            return level
    return {"q_idx": ROW, "kv_idx": COLUMN, "score": ELEMENT}.get(name, TILE)


def test_each_value_is_printed_once_at_its_own_level():
    """ALiBi's slope once a tile, a query's document once a row, a key's once a column."""
    slope, query, key = gather(0, FLOAT32, [H]), gather(1, INT64, [Q]), gather(1, INT64, [K])
    score = S - slope * cast(Q - K, FLOAT32) + slope * 2.0
    graph = Graph((("score", score), ("mask", apply("eq", query, key))), (SLOPES, DOCUMENTS))
    lines = body_of(graph).lines
    loads = {level: [line for line in lines[level] if "tl.load" in line] for level in LEVELS}
    assert [len(loads[level]) for level in LEVELS] == [1, 1, 1, 0]
    assert "u_slopes_ptr" in loads[TILE][0] and "u_doc_ptr" in loads[ROW][0] and "u_doc_ptr" in loads[COLUMN][0]
    names = [line.split(" = ")[0] for level in LEVELS for line in lines[level]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("transposed, row, column", [(False, "[:, None]", "[None, :]"), (True, "[None, :]", "[:, None]")])
def test_rows_and_columns_are_spread_whichever_way_the_tile_is_held(transposed, row, column):
    body = body_of(Graph((("mask", apply("ge", Q, K)),)), transposed=transposed)
    assert body.lines[ELEMENT] == [f"x2 = q_idx{row} >= kv_idx{column}"]


def test_a_position_is_not_wrapped_and_a_difference_is():
    assert not any("_i0" in line for level in LEVELS for line in of_score(S + gather(0, FLOAT32, [Q]), SLOPES).lines[level])
    assert not any(
        "_i0" in line for level in LEVELS for line in of_score(S + gather(0, FLOAT32, [apply("maximum", Q - K, 0)]), SLOPES).lines[level]
    )
    (wrapped,) = [line for line in of_score(S + gather(0, FLOAT32, [Q - K]), SLOPES).lines[ELEMENT] if "_i0 =" in line]
    assert re.fullmatch(r"(\w+)_i0 = tl\.where\((\w+) < 0, \2 \+ u_slopes_size0, \2\)", wrapped)


@pytest.mark.parametrize("index", [Q, Q - K, gather(1, INT64, [K]), const(2), const(-1), H], ids=str)
def test_every_read_is_guarded(index):
    """An index outside reads nothing, whatever is known of its sign."""
    body = of_score(S + gather(0, FLOAT32, [index]), SLOPES, DOCUMENTS)
    for level in LEVELS:
        for line in body.lines[level]:
            if "tl.load(u_slopes" in line:
                assert "mask=" in line and "other=0" in line and "< u_slopes_size0" in text_of(body)


def test_offsets_are_64_bit():
    """A table of over 2^31 elements: no product of an index and a stride is taken in 32 bits."""
    bias = TensorInput("bias", "float32", 4)
    body = of_score(S + gather(0, FLOAT32, [const(3), H, Q, K]), bias)
    products = re.findall(r"(\S+(?: \S+)?) \* u_bias_stride(\d)", text_of(body))
    assert sorted(axis for _, axis in products) == ["0", "1", "2", "3"]
    assert all("int64" in index for index, _ in products), products


def test_a_pair_bias_adds_one_offset_for_each_row_and_column():
    body = of_score(S + gather(0, FLOAT32, [H, Q, K]), TensorInput("bias", "float32", 3))
    assert not any("stride" in line for line in body.lines[ELEMENT] if "tl.load" not in line)
    (load,) = [line for line in body.lines[ELEMENT] if "tl.load" in line]
    assert "_at_row[:, None]" in load and "_at_column" not in load.split("mask=")[0].split("_at_row")[0]


CONVERTED = {
    "": ("bool", "int32", "float32"),
    ".to(tl.int32)": ("uint8", "int16", "int8"),
    ".to(tl.float32)": ("bfloat16", "float16", "float64"),
}


@pytest.mark.parametrize("dtype, converted", [(dtype, converted) for converted, dtypes in CONVERTED.items() for dtype in dtypes])
def test_loads_become_the_graphs_dtype(dtype, converted):
    kind = BOOL if dtype == "bool" else INT32 if "int" in dtype else FLOAT32
    graph = Graph(
        (("mask", apply("ne", gather(0, kind, [K]), const(1, kind) if kind != BOOL else const(True))),), (TensorInput("t", dtype, 1),)
    )
    (load,) = [line for line in body_of(graph).lines[COLUMN] if "tl.load" in line]
    assert load.endswith(f"other=0){converted}")


def test_the_users_line_stands_beside_what_it_made():
    from flexc.ir.graph import Location

    where = Location("/home/user/alibi.py", 12, "return score - slopes[head] * (q_idx - kv_idx)")
    body = of_score(apply("sub", S, apply("mul", gather(0, FLOAT32, [H], where), 2.0, where=where), where=where), SLOPES)
    text = text_of(body)
    assert text.count("# alibi.py:12: return score - slopes[head] * (q_idx - kv_idx)") == 1 and "/home" not in text


def test_names_are_prefixed_and_never_run_into_each_other():
    """A tensor's name with an ending is never what another captured value is called."""
    tensors = ("w", "w_2", "w_2_3", "w_grad", "w_ptr", "w_size0", "ww", "rows", "tl", "x1")
    scalars = ("w_1", "w_grad0", "w_stride0", "w_at_row", "head_", "scale")
    graph = Graph((), tuple(TensorInput(n, "float32", 2, True) for n in tensors), tuple(ScalarInput(n, INT64) for n in scalars))
    made = []
    for name in tensors:
        given_name = captured(graph, name)
        made += [
            f"{given_name}_{ending}"
            for ending in ("ptr", "size0", "size1", "stride0", "grad_ptr", "grad_stride0", "grad0", "grad0_part", "grad0_i0")
        ]
        made += [f"{given_name}_{n}{ending}" for n in range(5) for ending in ("", "_i0", "_at_row", "_in_row")]
    for name in scalars:
        made.append(captured(graph, name))
    assert len(made) == len(set(made))
    assert captured(graph, "w") == "u_w" and captured(graph, "rows") == "u_rows" and captured(graph, "w_2") == "u1_w_2"
    assert all(re.match(r"u\d*_", name) for name in made)


@pytest.mark.parametrize("value", [0.1, -1e-30, 3.4e38, 1 / 3, -0.0, 2.0**-126, float("inf"), float("-inf"), float("nan")])
def test_a_literal_is_the_constant_bit_for_bit(value):
    shown = torch.tensor(eval(literal(const(value))), dtype=torch.float32)
    assert torch.equal(shown.view(torch.int32), torch.tensor(value, dtype=torch.float32).view(torch.int32))


def test_negative_literals_stand_in_brackets():
    assert literal(const(-3)) == "(-3)" and literal(const(-0.5)) == "(-0.5)" and literal(const(True)) == "True"


def test_a_cast_of_a_number_is_a_call():
    """An infinity stays a cast: `float("inf").to(...)` is no Triton."""
    body = of_score(S + cast(make_infinite_index(), FLOAT32))
    assert 'tl.cast(float("inf"), tl.int32)' in body.lines[TILE][0]


def make_infinite_index() -> Node:
    """A cast that cannot be folded."""
    node = cast(const(float("inf")), INT32)
    assert node.op == "cast"
    return node


def test_division_by_a_captured_number_is_exact_below_a_floor():
    """See `ir.ops.feeding_steps`."""
    temperature = scalar(0, FLOAT32)
    exact = of_score(S + apply("floor", cast(Q - K, FLOAT32) / temperature), scalars=(ScalarInput("t", FLOAT32),))
    plain = of_score(S / temperature, scalars=(ScalarInput("t", FLOAT32),))
    assert any("tl.div_rn(" in line for line in exact.lines[ELEMENT])
    assert not any("tl.div_rn(" in line for level in LEVELS for line in plain.lines[level])


def test_an_approximation_is_not_read_by_a_step():
    body = body_of(Graph((("score", S + apply("floor", apply("tanh", S) * 8.0)),)), tanh="hardware")
    assert body.uses == {"libdevice"}
    assert body_of(Graph((("score", apply("tanh", S)),)), tanh="hardware").uses == {"tanh_approx"}
