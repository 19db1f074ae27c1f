"""Which backend "auto" takes."""

import importlib.util

import pytest
import torch

from flexc import backends, pipeline
from flexc.backends import Options, Shapes
from flexc.target import Target

HOPPER = Target.parse("sm_90a")


def causal(b, h, q, k):
    return q >= k


def pair_distance(score, b, h, q, k):
    return score - abs(q - k)


def shapes(dtype: str = "bfloat16", head_dim: int = 64) -> Shapes:
    return Shapes(
        batch=1, heads_q=2, heads_kv=2, q_len=128, kv_len=128, head_dim=head_dim, head_dim_v=head_dim, dtype=getattr(torch, dtype)
    )


def compiled(backend: str = "auto", target: Target = HOPPER, options: Options | None = None, **sizes):
    return pipeline.compile_for(pair_distance, causal, shapes=shapes(**sizes), target=target, backend=backend, options=options)


@pytest.fixture
def packages(monkeypatch):
    """Pretends that these packages are missing."""
    missing: set[str] = set()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))
    return missing


def test_auto_takes_cute_on_hopper():
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    artifact = compiled()
    assert artifact.backend.name == "cute" and artifact.reason == "a Hopper GPU: cute, the fastest backend there"


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_auto_takes_triton_on_other_gpus(arch):
    assert compiled(target=Target.parse(arch)).backend is backends.TRITON


@pytest.mark.parametrize(
    ("sizes", "options", "why"),
    [
        ({"dtype": "float32"}, None, "because of dtype float32 on the cute backend: expected float16 or bfloat16"),
        ({"head_dim": 320}, None, "because of head dimension on the cute backend: expected at most 256, got 320"),
        ({}, Options(max_scores=True), "because of the cute backend returns no largest scores"),
    ],
)
def test_auto_takes_triton_for_what_cute_refuses_and_says_so(sizes, options, why):
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    artifact = compiled(options=options, **sizes)
    assert artifact.backend is backends.TRITON and artifact.reason.startswith("a sm_90a GPU: triton, ") and why in artifact.reason


def test_auto_takes_triton_for_values_of_pairs():
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    table = torch.zeros(64)
    relative = pipeline.compile_for(lambda s, b, h, q, k: s + table[(q - k) % 64], causal, shapes=shapes(), target=HOPPER)
    assert relative.backend is backends.TRITON and "because of captured values that are read for each pair" in relative.reason
    assert pipeline.compile_for(lambda s, b, h, q, k: s + table[k % 64], causal, shapes=shapes(), target=HOPPER).backend.name == "cute"


@pytest.mark.parametrize("package", ["cutlass", "tvm_ffi"])
def test_auto_takes_triton_without_a_package_and_says_so(package, packages):
    packages.add(package)
    artifact = compiled()
    assert artifact.backend is backends.TRITON
    assert artifact.reason.startswith("a Hopper GPU, but the cute backend needs the package ") and "pip install it" in artifact.reason
