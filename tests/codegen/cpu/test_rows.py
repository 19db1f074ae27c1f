"""Every op has a row, and what the row prints agrees with the op's eager column: on tensors, with numbers, and in place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flexc.codegen.cpu.rows import CPU_ROWS, IN_PLACE, is_operator, literal, spell
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node, const, input_node, scalar
from flexc.ir.ops import STRUCTURAL, TABLE, TORCH_DTYPES, Op, apply, cast, cast_eager

OPS = sorted(TABLE)


def evaluated(text: str, **names: torch.Tensor) -> torch.Tensor:
    """The value of a printed expression."""
    return eval(text, {"torch": torch, "math": math, "FLOAT": torch.float32}, names)


def drawn(row: Op, seed: int) -> list[tuple[torch.Tensor, str]]:
    """Operands from the row's domains, and their IR dtypes. Negative integers are among them."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for domain in row.domain:
        if domain.kind == "float":
            found.append((torch.rand(50, generator=random) * (domain.hi - domain.lo) + domain.lo, FLOAT32))
        elif domain.kind == "int":
            found.append((torch.randint(int(domain.lo), int(domain.hi) + 1, (50,), generator=random, dtype=torch.int32), INT32))
        else:
            found.append((torch.randint(0, 2, (50,), generator=random).bool(), BOOL))
    return found


def test_every_op_has_a_row():
    assert set(CPU_ROWS) == {*TABLE, *STRUCTURAL}
    assert set(IN_PLACE) <= set(TABLE)


@pytest.mark.parametrize("name", OPS)
def test_a_row_agrees_with_eager_whichever_operands_are_numbers(name):
    """Every choice of operands as constants; those become Python numbers in the text."""
    row = TABLE[name]
    operands = drawn(row, 1)
    for constant in itertools.product([False, True], repeat=row.arity):
        nodes, texts, values, names = [], [], [], {}
        for index, ((value, dtype), fixed) in enumerate(zip(operands, constant, strict=True)):
            if fixed:
                nodes.append(const(value[3].item(), dtype))
                texts.append(literal(nodes[-1]))
                values.append(value[3])
            else:
                nodes.append(scalar(index, dtype))
                texts.append(f"x{index}")
                values.append(value)
                names[f"x{index}"] = value
        node = apply(name, *nodes)
        assert node.args == tuple(nodes), "the domain needs no promotion"
        result = evaluated(spell(node, texts), **names)
        expected = row.eager(*values)
        assert result.dtype == TORCH_DTYPES[node.dtype], constant
        torch.testing.assert_close(result, expected.to(result.dtype), rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", sorted(IN_PLACE))
def test_an_in_place_row_agrees_with_eager_and_overwrites(name):
    row = TABLE[name]
    values = [value for value, _ in drawn(row, 2)]
    for number in (False, True) if row.arity == 2 else (False,):
        nodes: list[Node] = [scalar(index, FLOAT32) for index in range(row.arity)]
        texts = [f"x{index}" for index in range(row.arity)]
        operands = list(values)
        if number:
            nodes[1] = const(values[1][3].item())
            texts[1], operands[1] = literal(nodes[1]), values[1][3]
        target = values[0].clone()
        expected = row.eager(*operands)
        result = evaluated(spell(apply(name, *nodes), texts, in_place=True), x0=target, x1=values[-1])
        assert result.data_ptr() == target.data_ptr()
        torch.testing.assert_close(target, expected)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "floordiv", "floormod", "minimum", "maximum", "neg", "abs", "lt", "eq", "and", "shr", "where"]
)
@pytest.mark.parametrize("dtype", [INT32, INT64])
def test_rows_on_integers(name, dtype):
    """Negative numerators and divisors: division floors."""
    a = torch.arange(-12, 12, dtype=TORCH_DTYPES[dtype])
    b = torch.tensor([-7, -3, -1, 1, 2, 5], dtype=TORCH_DTYPES[dtype]).repeat(4)
    if name in ("and", "shr"):
        b = b.abs()
    operands = [a > 3, a, b][-TABLE[name].arity :]
    nodes = [scalar(index, BOOL if operand.dtype == torch.bool else dtype) for index, operand in enumerate(operands)]
    result = evaluated(spell(apply(name, *nodes), ["x0", "x1", "x2"][: len(nodes)]), **{f"x{i}": x for i, x in enumerate(operands)})
    expected = TABLE[name].eager(*operands)
    assert result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("name", ["floordiv", "floormod"])
def test_division_by_zero_counts_as_division_by_one(name):
    a, b = torch.tensor([5, -5, 6], dtype=torch.int32), torch.tensor([0, 0, 4], dtype=torch.int32)
    x, y = scalar(0, INT32), scalar(1, INT32)
    assert torch.equal(evaluated(spell(apply(name, x, y), ["a", "b"]), a=a, b=b), TABLE[name].eager(a, b))
    assert torch.equal(evaluated(spell(apply(name, x, const(0)), ["a", "0"]), a=a), TABLE[name].eager(a, torch.zeros_like(a)))


@pytest.mark.parametrize("source", [BOOL, INT32, INT64, FLOAT32])
@pytest.mark.parametrize("target", [BOOL, INT32, INT64, FLOAT32])
def test_casts(source, target):
    x = torch.tensor([-2.7, -1.0, 0.0, 0.4, 1.0, 3.9]).to(TORCH_DTYPES[source])
    node = cast(scalar(0, source), target)
    if node.op == "cast":
        assert torch.equal(evaluated(spell(node, ["x"]), x=x), cast_eager(x, target))


@pytest.mark.parametrize("value", [0.1, -1e-30, 1e30, math.pi, math.inf, -math.inf, math.nan, -0.0])
def test_a_literal_is_the_constant_bit_for_bit(value):
    text = literal(const(value))
    shown = torch.tensor(evaluated(text), dtype=torch.float32)
    assert torch.equal(shown.view(torch.int32), torch.tensor(value, dtype=torch.float32).view(torch.int32))


def test_literals_are_short():
    assert literal(const(0.1)) == "0.1"
    assert literal(const(3)) == "3" and literal(const(True)) == "True"


def test_compound_operands_get_parentheses():
    x = input_node("score")
    assert spell(x * 2.0, ["a + b", "2.0"]) == "(a + b) * 2.0"
    assert spell(apply("tanh", x), ["a + b"]) == "torch.tanh(a + b)"
    assert spell(x - const(-1.0), ["a", "-1.0"]) == "a - (-1.0)"
    assert spell(apply("maximum", x, const(0.0)), ["a + b", "0.0"]) == "(a + b).clamp(min=0.0)"
    assert not is_operator("f(a + b)[c, d]") and is_operator("-a") and is_operator("a(b) & c")
