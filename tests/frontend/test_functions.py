"""torch functions, tensor methods, `math` and NumPy on traced values."""

from __future__ import annotations

import math
from math import sqrt

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import flexc.frontend
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64
from flexc.ir.ops import TABLE
from tests.frontend.truth import assert_same, traced, values_of_function, values_of_graph

TORCH = {
    "unary": lambda s, b, h, q, k: torch.exp(s) + torch.tanh(s) + torch.sin(s) + torch.cos(s) + torch.expm1(s) + torch.erf(s),
    "of a whole number": lambda s, b, h, q, k: torch.sqrt(q + 1) + torch.log1p(k) + torch.rsqrt(k + 1) + torch.log2(q + 1),
    "rounding": lambda s, b, h, q, k: torch.floor(s) + torch.ceil(s) + torch.round(s) + torch.trunc(s) + torch.floor(q),
    "methods": lambda s, b, h, q, k: s.exp().add(1).log().mul(2).sub(q).div(3).neg().abs().sqrt(),
    "exp2": lambda s, b, h, q, k: torch.exp2(s),
    "sign": lambda s, b, h, q, k: torch.sign(s) * torch.abs(q - k),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "where method": lambda s, b, h, q, k: s.where(q >= k, -s),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -1e9),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -1, 1) + s.clamp(min=0.5) + torch.clip(s, max=q) + s.clamp_min(1) + s.clamp_max(0),
    "two-sided max and min": lambda s, b, h, q, k: torch.max(s, q.float()) + torch.minimum(s, k.float()),
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=2) - torch.sub(s, k, alpha=3) + torch.rsub(s, 2.0),
    "rounding_mode": lambda s, b, h, q, k: torch.div(q - k, 2, rounding_mode="floor") + torch.div(q - k, 2, rounding_mode="trunc"),
    "rounded quotient": lambda s, b, h, q, k: torch.div(s, 0.7, rounding_mode="trunc") + torch.div(s, 0.7, rounding_mode="floor"),
    "fmod": lambda s, b, h, q, k: torch.fmod(s, 0.7) + torch.fmod(q - k, 3) + torch.remainder(q - k, 3),
    "pow": lambda s, b, h, q, k: torch.pow(s, 2) + torch.pow(2.0, s) + s.pow(3) + s.square(),
    "logical": lambda s, b, h, q, k: (
        s + torch.logical_and(q, k > 1).int() + torch.logical_or(q > 1, h).int() + torch.logical_xor(q, k).int()
    ),
    "logical not": lambda s, b, h, q, k: s + torch.logical_not(q).float(),
    "bitwise": lambda s, b, h, q, k: s + torch.bitwise_and(q, k) + torch.bitwise_not(q) + torch.bitwise_left_shift(q, h),
    "isinf": lambda s, b, h, q, k: s + torch.isinf(s / q).int() + torch.isnan((s * 0) / q).int() + torch.isfinite(s / k).int(),
    "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num((s * 0) / q, nan=5.0),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, q.float(), 0.25),
    "addcmul": lambda s, b, h, q, k: torch.addcmul(s, q.float(), k.float(), value=0.5),
    "activations": lambda s, b, h, q, k: F.relu(s) + F.leaky_relu(s, 0.1) + F.elu(s) + F.silu(s) + F.sigmoid(s) + F.hardtanh(s),
    "softplus": lambda s, b, h, q, k: F.softplus(s * 20) + F.logsigmoid(s),
    "gelu": lambda s, b, h, q, k: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "casts": lambda s, b, h, q, k: (s * 3).to(torch.int32) + s.long() + q.float() / 2 + (q > k).int() + s.double() + s.type(torch.int64),
    "to a device": lambda s, b, h, q, k: s + (q.to("cpu") & 1) + (q.to(s.device) & 2),
    "to another's dtype": lambda s, b, h, q, k: q.to(s) / 2 + k.type_as(s),
    "bool": lambda s, b, h, q, k: s + q.bool().float() + s.to(torch.bool),
    "new": lambda s, b, h, q, k: (
        s + s.new_zeros(()) + q.new_ones(()) * s.new_full((), 3.5) + s.new_tensor(2) + b.new_ones((), dtype=torch.bool)
    ),
    "likes": lambda s, b, h, q, k: s + torch.zeros_like(s) + torch.ones_like(q) * torch.full_like(s, 3.5),
    "own constants": lambda s, b, h, q, k: torch.tensor(0.5) * s + s * torch.tensor(2) - torch.tensor(1.0, dtype=torch.float32),
    "a number made traced": lambda s, b, h, q, k: torch.tensor(3.0) - torch.as_tensor(s),
    "special": lambda s, b, h, q, k: torch.special.expit(s),
    "logaddexp": lambda s, b, h, q, k: torch.logaddexp(s, q.float()),
    "hypot": lambda s, b, h, q, k: torch.hypot(s, q.float()) + torch.tan(s) + torch.sinh(s) + torch.cosh(s) + torch.log10(q + 1.0),
    "copysign": lambda s, b, h, q, k: torch.copysign(s, q.float() - 1.5),
    "dtype of a value": lambda s, b, h, q, k: s.to(dtype=torch.int32 if q.dtype == torch.int32 else torch.bool),
    "constant beside a value": lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(float("-inf"), dtype=s.dtype, device=s.device)),
    "finfo": lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo(torch.float32).min),
    "no axes": lambda s, b, h, q, k: s.clone().contiguous().squeeze() + s.dim() + s.numel() + len(s.shape) + s.ndim,
    "isclose": lambda s, b, h, q, k: s + torch.isclose(s, s + 1e-7).int(),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch(name):
    assert_same(TORCH[name])


MATH = {
    "roots": lambda s, b, h, q, k: math.sqrt(q + 1) + sqrt(k) + math.hypot(s, q),
    "exponentials": lambda s, b, h, q, k: (
        math.exp(s) + math.log(q + 1) + math.log(q + 1, 3) + math.log2(k + 1) + math.log10(k + 1) + math.log1p(q)
    ),
    "circles": lambda s, b, h, q, k: math.sin(s) + math.cos(s) + math.tanh(s) + math.tan(s) + math.radians(s),
    "whole": lambda s, b, h, q, k: math.floor(s) // 2 + math.ceil(s) % 3 + math.trunc(s) + math.fabs(s),
    "pow": lambda s, b, h, q, k: math.pow(q + 1.0, 1.5),
    "erf": lambda s, b, h, q, k: math.erf(s) + math.erfc(s),
    "fmod": lambda s, b, h, q, k: math.fmod(s, 0.7) + math.copysign(1.5, s),
    "plain numbers": lambda s, b, h, q, k: s * math.sqrt(64) + math.pi,
    "test": lambda s, b, h, q, k: 0.0 if math.isinf(s) or math.isnan(s) else s,
}


@pytest.mark.parametrize("name", MATH)
def test_math(name):
    assert_same(MATH[name], as_tensors=False)


NUMPY = {
    "functions": lambda s, b, h, q, k: np.tanh(s) + np.sqrt(q + 1.0) + np.abs(q - k) + np.power(s, 2) + np.exp2(s),
    "scalars": lambda s, b, h, q, k: np.float32(0.5) * s + np.int64(3) - s / np.float64(7),
    "where": lambda s, b, h, q, k: np.where(q >= k, s, -np.inf),
    "minimum": lambda s, b, h, q, k: np.minimum(np.maximum(s, -1.0), 1.0) + np.clip(s, -0.5, 0.5),
    "logic": lambda s, b, h, q, k: np.where(np.logical_and(q > 1, np.logical_not(k > 1)), s, 0.0),
    "division": lambda s, b, h, q, k: np.true_divide(s, 3) + np.floor_divide(q - k, 2) + np.remainder(q - k, 3),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy(name):
    assert_same(NUMPY[name], as_tensors=False)


def test_flexc_where_takes_traced_values_tensors_and_numbers():
    assert_same(lambda s, b, h, q, k: flexc.frontend.where(q >= k, s, -1.0))
    assert_same(lambda s, b, h, q, k: flexc.frontend.where(2 > 1, s, -1.0))
    assert flexc.frontend.where(False, 1, 2) == 2
    assert flexc.frontend.where(torch.tensor([True, False]), 1.0, 2.0).tolist() == [1.0, 2.0]


def test_where_takes_a_python_truth_value():
    """`not` and `and` on traced values give one, on each path."""
    graph = traced(lambda s, b, h, q, k: torch.where(not q >= k, s, 0.0))
    assert [node.op for node in graph.nodes()].count("where") == 1


SPELLINGS = [(op.name, s) for op in TABLE.values() for s in op.spelled if not isinstance(s, str)]


@pytest.mark.parametrize(("op", "function"), SPELLINGS, ids=[f"{op}-{f.__name__}" for op, f in SPELLINGS])
def test_every_torch_spelling_of_the_op_table(op, function):
    kinds = [domain.kind for domain in TABLE[op].domain]

    def operands(s, h, q, k):
        choices = {"float": (s, q - 1.5, k * 0.5), "int": (q - k, h + 1, k + 1), "bool": (q > k, h > 1, k == 2)}
        return [choices[kind][i] for i, kind in enumerate(kinds)]

    if TABLE[op].dtype(*({"float": FLOAT32, "int": INT32, "bool": BOOL}[kind] for kind in kinds)) == BOOL:
        assert_same(lambda b, h, q, k: function(*operands(None, h, q, k)))
    else:
        assert_same(lambda s, b, h, q, k: function(*operands(s, h, q, k)))


WITH_NUMBERS = {
    "minimum": (lambda s, b, h, q, k: torch.minimum(s, 1) + torch.maximum(q, 2), lambda s, b, h, q, k: min(s, 1) + max(q, 2)),
    "clamp": (lambda s, b, h, q, k: torch.clamp(s, -1, q), lambda s, b, h, q, k: min(max(s, -1), q)),
    "where": (lambda s, b, h, q, k: torch.where(2 > 1, s, 0), lambda s, b, h, q, k: s),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_torch_functions_take_python_numbers_for_tensors(name):
    traced_function, plain = WITH_NUMBERS[name]
    assert torch.allclose(values_of_graph(traced_function), values_of_function(plain, as_tensors=False))


CORNERS = {
    "relu": lambda s, b, h, q, k: F.relu(s),
    "leaky_relu": lambda s, b, h, q, k: F.leaky_relu(s, 0.25),
    "elu": lambda s, b, h, q, k: F.elu(s),
    "clamp from below": lambda s, b, h, q, k: s.clamp(min=0),
    "clamp from above": lambda s, b, h, q, k: torch.clamp(s, max=0.0),
    "abs": lambda s, b, h, q, k: s.abs(),
    "maximum": lambda s, b, h, q, k: torch.maximum(s, torch.zeros_like(s)),
    "softplus": lambda s, b, h, q, k: F.softplus(s),
    "logsigmoid": lambda s, b, h, q, k: F.logsigmoid(s),
}


@pytest.mark.parametrize("name", CORNERS)
def test_the_gradient_at_a_corner_is_pytorchs(name):
    """A query of zeros gives scores of exactly 0 by the row."""
    function = CORNERS[name]
    score = torch.tensor([0.0, -0.5, 0.5], requires_grad=True)
    graph = traced(function)
    (out,) = evaluate([graph.score], Environment({"score": score}))
    (found,) = torch.autograd.grad(out.sum(), score)
    (expected,) = torch.autograd.grad(torch.stack([function(x, 0, 0, 0, 0) for x in score]).sum(), score)
    torch.testing.assert_close(found, expected)


def test_int_float_and_bool_serve_as_dtypes():
    table = [1, 2, 3, 4]
    assert_same(lambda s, b, h, q, k: s + torch.tensor(np.array(table, dtype=float))[h] + np.zeros(4, dtype=int)[0], as_tensors=True)
    assert_same(lambda s, b, h, q, k: s + s.to(int) + q.to(dtype=float) / 2)


def test_every_spelling_of_the_op_table_is_known():
    from flexc.frontend.functions import NAMED

    for op in TABLE.values():
        for spelling in op.spelled:
            name = spelling if isinstance(spelling, str) else spelling.__name__
            if not name.startswith("__"):
                assert name.removeprefix("special_") in NAMED, f"{op.name}: {name}"


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5, 8, 16])
def test_small_whole_powers_multiply(exponent):
    graph = traced(lambda s, b, h, q, k: s**exponent)
    assert "pow" not in {node.op for node in graph.nodes()}
    assert_same(lambda s, b, h, q, k: s**exponent)


def test_powers_of_two_of_positions_are_whole_numbers():
    graph = traced(lambda b, h, q, k: (q >> 1) % 2**h == 0)
    assert "shl" in {node.op for node in graph.nodes()}
    assert_same(lambda b, h, q, k: (q >> 1) % 2**h == 0)


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [(lambda x: x.int(), INT32), (lambda x: x.long(), INT64), (lambda x: x.half(), FLOAT32), (lambda x: x.to(torch.bfloat16), FLOAT32)],
)
def test_casts_have_the_dtypes_of_the_kernel(cast, dtype):
    graph = traced(lambda s, b, h, q, k: cast(s + q) + 0 * h)
    assert dtype in {node.dtype for node in graph.nodes()}
    assert graph.score is not None and graph.score.dtype == FLOAT32


def test_large_whole_constants_are_int64():
    graph = traced(lambda b, h, q, k: q + 2**40 > k)
    assert INT64 in {node.dtype for node in graph.nodes()}
    assert bool(values_of_graph(lambda b, h, q, k: q + 2**40 > k).all())


def test_constants_beyond_int64_are_floats():
    assert bool(values_of_graph(lambda b, h, q, k: q < 10**30).all())
