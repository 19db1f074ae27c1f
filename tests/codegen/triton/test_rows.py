"""Every op has a row, and what the row prints agrees with the op's eager column: in a stand-in for Triton, interpreted, and compiled."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch

from flexc.codegen.triton.emit import HELPERS
from flexc.codegen.triton.rows import TRITON_ROWS, spell
from flexc.ir.graph import FLOAT32, INT32, scalar
from flexc.ir.ops import TABLE, apply
from tests.codegen.triton.row_kernel import COUNT, Facts, differing, kernel_text, run, variants
from tests.codegen.triton.stand_in import NAMESPACE, Array, evaluated

FACTS = {
    "libdevice": Facts(),
    "hardware": Facts("hardware"),
    "exp2": Facts("exp2"),
    "interpreted": Facts(interpreted=True),
    "exact": Facts("hardware", exact=True),
}


def test_every_op_has_a_row():
    assert set(TRITON_ROWS) == set(TABLE)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_row_agrees_with_eager(name, facts):
    """Negative operands and every choice of literals among them."""
    for variant in variants([name]):
        operands = {f"x{i}": Array(v.double() if v.is_floating_point() else v) for i, v in enumerate(variant.values)}
        found = evaluated(spell(variant.node, variant.texts, facts), **operands)
        assert not differing(variant, found.double().expand(COUNT))


@pytest.mark.parametrize("name", ["floordiv", "floormod"])
def test_division_is_plain_only_where_nothing_is_negative(name):
    x, y = scalar(0, INT32), scalar(1, INT32)
    plain = spell(apply(name, x, y), ["a", "b"], Facts(non_negative=True))
    assert plain == {"floordiv": "a // b", "floormod": "a % b"}[name]
    a, b = torch.arange(0, 50), torch.arange(1, 51)
    assert torch.equal(evaluated(plain, a=Array(a), b=Array(b)), TABLE[name].eager(a, b))
    assert "tl.where" in spell(apply(name, x, y), ["a", "b"], Facts())


def test_quotients_that_a_step_reads_are_rounded_to_nearest():
    """Triton's / on float32 is off by up to two units: 49 / 49 may come out below 1, whose floor is 0."""
    x, y = scalar(0, FLOAT32), scalar(1, FLOAT32)
    assert spell(x / y, ["a", "b"], Facts(exact=True)) == "tl.div_rn(a, b)"
    assert spell(x / y, ["a", "b"], Facts()) == "a / b"
    for name in ("floordiv", "floormod"):
        text = spell(apply(name, x, y), ["a", "b"], Facts())
        assert text == {"floordiv": "floor_quotient(a, b)", "floormod": "floor_rest(a, b)"}[name]
    for helper in ("floor_quotient", "floor_rest"):
        assert "tl.div_rn(x, y)" in HELPERS[helper] and "x / y)" not in HELPERS[helper].split('"""')[2]


def test_what_a_step_reads_is_not_approximated():
    tanh = apply("tanh", scalar(0, FLOAT32))
    for form, text in (("hardware", "tanh_approx(a)"), ("exp2", "tanh_exp2(a)"), ("libdevice", "libdevice.tanh(a)")):
        assert spell(tanh, ["a"], Facts(form)) == text
        assert spell(tanh, ["a"], Facts(form, exact=True)) == "libdevice.tanh(a)"


def test_small_values_of_sigmoid_keep_their_digits():
    """log(sigmoid(x)) is x for large negative x; from 0.5 + 0.5 * tanh(x / 2), approximated, it would be off by 1 at -8 and -inf below."""
    text = spell(apply("sigmoid", scalar(0, FLOAT32)), ["a"], Facts("hardware"))
    assert "approx" not in text
    x = torch.linspace(-60, 10, 101, dtype=torch.float64)
    torch.testing.assert_close(evaluated(text, a=Array(x)).log(), torch.nn.functional.logsigmoid(x))


def test_helpers_are_asked_for():
    """Every helper that a row names is among the module's, and libdevice is asked for where it is called."""
    for facts in FACTS.values():
        for variant in variants():
            one = Facts(facts.tanh, facts.interpreted, facts.exact)
            text = spell(variant.node, variant.texts, one)
            called = set(re.findall(r"(?<![\w.])([a-z_]\w*)[.(]", text)) - {"tl", "float"} - {f"x{i}" for i in range(3)}
            assert called == one.uses and called <= {*HELPERS, "libdevice"}, text
            assert not (one.interpreted and called & {"libdevice", "tanh_approx", "tanh_exp2"}), text


def helper(name: str):
    """A helper of the module, in the stand-in; quotients are rounded to float32 and multiply-adds are exact, as on a GPU."""
    scope = dict(NAMESPACE)
    rounded = {"div_rn": lambda x, y: Array((x.value.float() / y.value.float()).double()), "fma": lambda x, y, z: x * y + z}
    exec(HELPERS[name].removeprefix("@triton.jit\n"), scope | {"tl": SimpleNamespace(**{**vars(scope["tl"]), **rounded})}, scope)
    return scope[name]


@pytest.mark.parametrize("name, op", [("floor_quotient", "floordiv"), ("floor_rest", "floormod")])
def test_floats_are_divided_with_floor_exactly(name, op):
    """1.0 / 0.1 rounds to 10, but 10 times the float32 next to 0.1 is more than 1: the floor is 9."""
    x = torch.cat([torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0]), torch.arange(-60, 60) * 0.1])
    y = torch.cat([torch.tensor([0.1, 0.1, -0.1, -0.1, 0.1]), torch.full((60,), 0.1), torch.full((60,), -0.7)])
    found = helper(name)(Array(x.double()), Array(y.double())).value
    torch.testing.assert_close(found.float(), TABLE[op].eager(x, y), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name, function", [("round_even", torch.round), ("truncate", torch.trunc), ("tanh_interpreted", torch.tanh)])
def test_helpers_mean_what_they_say(name, function):
    x = torch.cat([torch.arange(-20, 21) / 2, torch.linspace(-5, 5, 40), torch.tensor([1e8, -1e8, math.inf, -math.inf, math.nan])]).double()
    torch.testing.assert_close(helper(name)(Array(x)).value, function(x), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_rows_in_the_interpreter(interpreter, tmp_path):
    assert interpreter(run, str(tmp_path), "cpu", True) == []


@pytest.mark.gpu
@pytest.mark.parametrize("tanh", ["libdevice", "exp2", "hardware"])
def test_rows_on_the_gpu(tmp_path, tanh):
    assert run(str(tmp_path), "cuda", False, tanh) == []


def test_rows_compile(tmp_path):
    """All of them in one kernel, with literals on either side: Triton's own types accept what the table's do."""
    from flexc.runtime.module import load_module
    from flexc.runtime.triton_compile import compile_module

    for tanh, names in (("libdevice", ()), ("hardware", ("tanh",)), ("exp2", ("tanh",))):
        module = load_module(kernel_text(variants(names), Facts(tanh, exact=tanh == "libdevice")), tmp_path / f"{tanh}.py")
        compiled = compile_module(module, 80, lambda names: dict.fromkeys(names, "*fp64"))
        assert len(compiled.kernels) == 1
