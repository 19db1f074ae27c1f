"""Every case of the contract on every backend: the CPU here, Triton with `-m gpu`. Triton's interpreter: test_interpreted.py."""

import pytest
import torch

from tests.contract.suite import combinations, run


@pytest.mark.parametrize(("name", "dtype"), combinations("cpu"))
def test_cpu(name, dtype):
    run(name, "cpu", "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), combinations("triton"))
def test_triton(name, dtype):
    run(name, "triton", "cuda", dtype, large=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), combinations("cute"))
def test_cute(name, dtype):
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    run(name, "cute", "cuda", dtype, large=True)
