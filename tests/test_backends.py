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
    ("sizes", "why"),
    [
        ({"dtype": "float32"}, "because of dtype float32 on the cute backend: expected float16 or bfloat16"),
        ({"head_dim": 320}, "because of head dimension on the cute backend: expected at most 256, got 320"),
    ],
)
def test_auto_takes_triton_for_what_cute_refuses_and_says_so(sizes, why):
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    artifact = compiled(**sizes)
    assert artifact.backend is backends.TRITON and artifact.reason.startswith("a sm_90a GPU: triton, ") and why in artifact.reason


def test_auto_takes_triton_for_values_of_pairs():
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    table, pairs = torch.zeros(64), torch.zeros(64, 64)
    of_pairs = pipeline.compile_for(lambda s, b, h, q, k: s + pairs[q % 64, k % 64], causal, shapes=shapes(), target=HOPPER)
    assert of_pairs.backend is backends.TRITON and "because of captured values that are read for each pair" in of_pairs.reason
    for score in (lambda s, b, h, q, k: s + table[k % 64], lambda s, b, h, q, k: s + table[(q - k) % 64]):
        assert pipeline.compile_for(score, causal, shapes=shapes(), target=HOPPER).backend.name == "cute"


def test_triton_runs_the_backward_pass_for_values_of_diagonals():
    """Its kernels work them out once for each diagonal; that of the cute backend reads them for each pair."""
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    table = torch.zeros(64)
    for score, name in ((lambda s, b, h, q, k: s + table[k % 64], "cute"), (lambda s, b, h, q, k: s + table[(q - k) % 64], "triton")):
        artifact = pipeline.compile_for(score, causal, shapes=shapes(), target=HOPPER)
        backend, why = backends.backward_of(artifact.backend, artifact.lowered, shapes(), HOPPER, Options())
        assert backend.name == name and ("reads one by one" in why) == (name == "triton")


@pytest.mark.parametrize("package", ["cutlass", "tvm_ffi"])
def test_auto_takes_triton_without_a_package_and_says_so(package, packages):
    packages.add(package)
    artifact = compiled()
    assert artifact.backend is backends.TRITON
    assert artifact.reason.startswith("a Hopper GPU, but the cute backend needs the package ") and "pip install it" in artifact.reason
