"""Every op has a row, and what the row prints agrees with the op's eager column: in a stand-in for the DSL, compiled, and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from flexc.codegen.cute.rows import CUTE_ROWS, spell
from flexc.ir.graph import FLOAT32, INT32, scalar
from flexc.ir.ops import TABLE, apply
from flexc.runtime.cute_compile import compile_module
from flexc.runtime.module import load_module
from tests.codegen.cute.row_kernel import COUNT, Facts, differing, kernel_text, run, variants
from tests.codegen.cute.stand_in import Boolean, Float32, Int32, Int64, Num, evaluated, tile_library

FACTS = {
    "fast": Facts(),
    "approximate": Facts(approximate=True),
    "exact": Facts(exact=True),
    "stepped": Facts(approximate=True, stepped=True),
}
KINDS = {torch.bool: Boolean, torch.int32: Int32, torch.int64: Int64, torch.float32: Float32}


def number(x: torch.Tensor) -> Num:
    """As many lanes as there are values."""
    return KINDS[x.dtype](x.numpy())


def found(variant, text: str) -> torch.Tensor:
    operands = {f"x{i}": number(v) for i, v in enumerate(variant.values) if v.dim()}
    value = evaluated(text, operands)
    return torch.as_tensor(value.value).double().expand(COUNT)


def test_every_op_has_a_row():
    assert set(CUTE_ROWS) == set(TABLE)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_row_agrees_with_eager(name, facts):
    """Negative operands and every choice of literals among them."""
    for variant in variants([name]):
        text = spell(variant.node, variant.texts, facts)
        assert not differing(variant, found(variant, text), 4e-6), text


def test_the_remainder_is_plain_only_where_nothing_is_negative():
    """`%` of the DSL truncates; its `//` floors."""
    x, y = scalar(0, INT32), scalar(1, INT32)
    node = apply("floormod", x, y)
    assert spell(node, ["a", "b"], Facts(non_negative=True)) == "a % b"
    assert spell(node, ["a", "b"], Facts()) == "a - (a // b) * b"
    assert spell(apply("floordiv", x, y), ["a", "b"], Facts()) == "a // b"
    assert int(evaluated("a % b", {"a": Int32(-7), "b": Int32(4)})) == -3
    assert int(evaluated("a - (a // b) * b", {"a": Int32(-7), "b": Int32(4)})) == 1


def test_what_a_step_reads_is_not_approximated():
    x, y = scalar(0, FLOAT32), scalar(1, FLOAT32)
    assert spell(apply("tanh", x), ["a"], Facts(approximate=True)) == "tiles.tanh_approx(a)"
    assert "approx" not in spell(apply("tanh", x), ["a"], Facts(approximate=True, stepped=True))
    assert spell(x / y, ["a", "b"], Facts()) == "a * tiles.reciprocal(b)"
    assert spell(x / y, ["a", "b"], Facts(stepped=True)) == "Float32(a) / Float32(b)"


@pytest.mark.parametrize("name", sorted(TABLE))
def test_exact_means_no_approximate_instruction(name):
    for variant in variants([name]):
        text = spell(variant.node, variant.texts, Facts(exact=True))
        assert not any(word in text for word in ("fastmath", "approx", "reciprocal")), text


def test_small_values_of_sigmoid_keep_their_digits():
    """log(sigmoid(x)) is x for large negative x."""
    x = torch.linspace(-60, 10, 101)
    text = spell(apply("sigmoid", scalar(0, FLOAT32)), ["a"], Facts(approximate=True))
    value = torch.as_tensor(evaluated(text, {"a": number(x)}).value)
    torch.testing.assert_close(value.log(), torch.nn.functional.logsigmoid(x), rtol=1e-5, atol=1e-5)


def test_small_arguments_keep_their_digits():
    x = torch.logspace(-12, 0, 50)
    x = torch.cat([x, -x[:-1], torch.tensor([0.0, 90.0, math.inf])])
    for name, function in (("expm1", torch.expm1), ("log1p", torch.log1p)):
        value = torch.as_tensor(evaluated(f"tiles.{name}(a)", {"a": number(x)}).value)
        torch.testing.assert_close(value, function(x), rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("name, op", [("floor_quotient", "floordiv"), ("floor_rest", "floormod")])
def test_floats_are_divided_with_floor_exactly(name, op):
    """1.0 / 0.1 rounds to 10, but 10 times the float32 next to 0.1 is more than 1: the floor is 9."""
    x = torch.cat([torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0]), torch.arange(-60, 60) * 0.1])
    y = torch.cat([torch.tensor([0.1, 0.1, -0.1, -0.1, 0.1]), torch.full((60,), 0.1), torch.full((60,), -0.7)])
    value = torch.as_tensor(evaluated(f"tiles.{name}(a, b)", {"a": number(x), "b": number(y)}).value)
    torch.testing.assert_close(value, TABLE[op].eager(x, y), rtol=1e-6, atol=1e-7)


def test_the_polynomial_is_close_to_the_power_of_two():
    """Far below the rounding of weights to bfloat16 (2^-9) and to float16 (2^-12)."""
    x = torch.linspace(-125, 125, 40001)
    value = torch.as_tensor(tile_library().exp2_polynomial(Float32(x.numpy())).value)
    assert ((value.double() / torch.exp2(x.double())) - 1).abs().max() < 8e-5


def test_limits_of_comparisons_are_bounded():
    values = torch.tensor([-(2**40), -(2**30) - 1, -5, 7, 2**30 + 1, 2**62], dtype=torch.int64)
    bounded = tile_library().bound(number(values))
    assert type(bounded) is Int32 and bounded.value.tolist() == [-(2**30), -(2**30), -5, 7, 2**30, 2**30]


@pytest.mark.slow
@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_rows_compile(tmp_path, facts):
    """All of them in one kernel, with literals on either side: the DSL's types are those of the table."""
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    compiled = compile_module(load_module(kernel_text(variants(), facts), tmp_path / "rows.py"))
    assert [kernel.spill_bytes for kernel in compiled.kernels] == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_rows_on_the_gpu(tmp_path, facts):
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    assert run(tmp_path, facts) == []
