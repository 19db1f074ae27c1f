"""kernel_options: what is honoured, what warns once, what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch

import flexc
from flexc import compat
from flexc.compat import options
from tests.accuracy import qkv
from tests.compat.beside import torchs


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())


def call(kernel_options, **more):
    return compat.flex_attention(*qkv(1, 2, 2, 20, dim=8), kernel_options=kernel_options, **more)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("BLOCK_M", "flexc computes its tiles"),
        ("fwd_BLOCK_N", "flexc computes its tiles"),
        ("bwd_BLOCK_M1", "flexc computes its tiles"),
        ("num_warps", "flexc computes its tiles"),
        ("ROWS_GUARANTEED_SAFE", "flexc proves what it needs to know"),
        ("PRESCALE_QK", "flexc folds the scale"),
        ("USE_TMA", "flexc has no such option"),
        ("anything", "flexc has no such option"),
    ],
)
def test_other_options_warn_once_by_name(name, why):
    with pytest.warns(UserWarning, match=f"flexc ignores the kernel option {name}: {why}") as caught:
        call({name: 64})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call({name: 32})


def test_every_name_warns_on_its_own():
    with pytest.warns(UserWarning) as caught:
        call({"BLOCK_M": 64, "BLOCK_N": 64})
    assert len(caught) == 2


@pytest.mark.parametrize("kernel_options", [None, {}, {"BACKEND": "AUTO"}, {"FLOAT32_PRECISION": "'ieee'"}])
def test_honoured_options_warn_of_nothing(kernel_options):
    assert call(kernel_options).shape == (1, 2, 20, 8)


@pytest.mark.parametrize(
    ("kernel_options", "on_cpu", "expected"),
    [
        (None, False, ("auto", "fast")),
        ({"BACKEND": "AUTO"}, False, ("auto", "fast")),
        ({"BACKEND": "TRITON"}, False, ("triton", "fast")),
        ({"BACKEND": "TRITON_DECODE"}, False, ("triton", "fast")),
        ({"BACKEND": "FLASH"}, False, ("cute", "fast")),
        ({"BACKEND": "FLASH"}, True, ("auto", "fast")),
        ({"BACKEND": "TRITON"}, True, ("auto", "fast")),
        ({"FLOAT32_PRECISION": "tf32"}, False, ("auto", "tf32")),
        ({"FLOAT32_PRECISION": "'tf32'", "BACKEND": "TRITON"}, False, ("triton", "tf32")),
        ({"FORCE_USE_FLEX_ATTENTION": False, "BACKEND": "TRITON"}, False, ("triton", "fast")),
    ],
)
def test_backend_and_precision(kernel_options, on_cpu, expected):
    assert options.backend_and_precision(kernel_options, on_cpu) == expected


def test_the_kernel_runs_with_them(monkeypatch):
    made = []
    monkeypatch.setattr(compat.attention, "Kernel", Recorded := type("Recorded", (flexc.Kernel,), {}))
    monkeypatch.setattr(Recorded, "__init__", lambda self, *a, **k: made.append(k) or flexc.Kernel.__init__(self, *a, **k))
    for precision in ("tf32", "ieee", "tf32"):
        options_of_call = {"FLOAT32_PRECISION": precision}
        compat.flex_attention(*qkv(1, 2, 2, 20, dim=8), lambda s, b, h, q, kv: s + h, kernel_options=options_of_call)
    assert made == [{"backend": "auto", "precision": "tf32"}, {"backend": "auto", "precision": "fast"}]


@pytest.mark.parametrize(
    ("kernel_options", "error", "message"),
    [
        ({"BACKEND": "CUDNN"}, ValueError, 'invalid BACKEND \'CUDNN\': expected "AUTO", "TRITON"'),
        ({"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}, RuntimeError, "cannot be combined with FORCE_USE_FLEX_ATTENTION"),
        ({"OUTPUT_LOGSUMEXP": True}, AssertionError, "OUTPUT_LOGSUMEXP is no kernel option"),
        ({"OUTPUT_MAX": True}, AssertionError, "OUTPUT_MAX is no kernel option"),
    ],
)
def test_refused_as_torch_refuses(kernel_options, error, message):
    with pytest.raises(error, match=message):
        call(kernel_options)
    with pytest.raises(error):
        torchs(*qkv(1, 2, 2, 20, dim=8), kernel_options=kernel_options)


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match='invalid FLOAT32_PRECISION \'tf64\': expected "ieee", "tf32"'):
        call({"FLOAT32_PRECISION": "tf64"})


def test_options_are_not_changed():
    given = {"BACKEND": "AUTO"}
    call(given)
    assert given == {"BACKEND": "AUTO"} and torch.is_tensor(call(given))
