"""Running a case of the contract on a backend. Importable on its own, so that a worker process can do it."""

from __future__ import annotations

import traceback

import pytest
import torch

import flexc
from flexc.check import compare
from flexc.errors import UnsupportedError
from tests.contract.cases import BY_NAME, CASES, UNSUPPORTED, Maker

DTYPES = {
    "cpu": [torch.float32, torch.bfloat16, torch.float16],
    "triton": [torch.bfloat16, torch.float16, torch.float32],
    "cute": [torch.bfloat16, torch.float16],
    "interpreter": [torch.float32, torch.float16],
}


def combinations(backend):
    """(name, dtype) with a readable id; cases that are not for every dtype run in the backend's first."""
    return [
        pytest.param(c.name, dtype, id=f"{c.name}-{str(dtype).removeprefix('torch.')}")
        for c in CASES
        for dtype in (DTYPES[backend] if c.every_dtype else DTYPES[backend][:1])
    ]


def run(name: str, backend: str, device: str, dtype: torch.dtype, large: bool = False) -> None:
    """Fails unless the case is right on this backend, or refused if the backend declares so."""
    case = BY_NAME[name]
    problem = case.build(Maker(device, dtype, large))
    kernel = flexc.attention(problem.score_mod, problem.mask_mod, backend=backend)
    missing = case.needs & UNSUPPORTED[backend]
    if missing:
        with pytest.raises(UnsupportedError, match=backend):
            kernel(problem.q, problem.k, problem.v, scale=problem.scale, **problem.positions)
        return
    report = compare(kernel, problem.q, problem.k, problem.v, problem.captured, scale=problem.scale, **problem.positions)
    assert kernel.backend == backend, f"ran on {kernel.backend}: {kernel.reason}"
    assert report.ok, f"\n{report}"


def failure_of(name: str, backend: str, device: str, dtype: torch.dtype) -> str:
    """Empty if all is well; exceptions as text, because not all of them travel between processes."""
    try:
        run(name, backend, device, dtype)
    except BaseException:
        return traceback.format_exc()
    return ""
