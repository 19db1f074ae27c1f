"""Compiling ahead launches nothing: neither from a module's own host functions nor from those that they call."""

from __future__ import annotations

import pytest
import torch

from flexc import backends, frontend, pipeline
from flexc.backends import Options, Shapes
from flexc.runtime.triton_ahead import compile_ahead
from flexc.side_by_side import job_for
from flexc.target import Target

SHAPES = Shapes(2, 4, 2, 300, 300, 64, 64, torch.float16)


class Kernel:
    """Stands for a kernel of the module."""

    def __init__(self, name, compiled):
        self.name, self.compiled = name, compiled

    def __getitem__(self, grid):
        raise AssertionError(f"{self.name} is launched")

    def warmup(self, *args, grid, **options):
        self.compiled.add(self.name)


def causal(b, h, i, j):
    return i >= j


def learned():
    """Captured tensors whose gradients meet in every way."""
    tensors = [torch.randn(shape, requires_grad=True) for shape in ((4,), (600,), (2, 300), (300, 300), (150,))]
    w, r, c, pairs, table = tensors
    return lambda s, b, h, i, j: s * w[h] + r[i - j + 300] + c[b, j] + pairs[i, j] * s + table[(i + j) // 4]


@pytest.mark.parametrize("options", [Options(), Options(deterministic=True)], ids=["any order", "deterministic"])
@pytest.mark.parametrize("learns", [False, True], ids=["no score function", "captured tensors"])
def test_every_kernel_is_compiled_and_none_launched(tmp_path, monkeypatch, options, learns):
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path))
    trace, binding = frontend.trace(learned() if learns else None, causal)
    pipeline.clear_cache()
    artifact = pipeline.compile_attention(trace.graph, SHAPES, Target.parse("sm_90a"), backends.TRITON, "asked for", options, "a test")
    module, compiled = artifact.module, set()
    for name in module.LAUNCH:
        monkeypatch.setattr(module, name, Kernel(name, compiled))
    compile_ahead(module, job_for(artifact, SHAPES, 90, binding.tensors, binding.scalars, tuple(module.LAUNCH)))
    assert compiled == set(module.LAUNCH)
    assert ("sum_bins_kernel" in compiled) == (learns and options.deterministic)
