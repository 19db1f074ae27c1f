"""Every case of the contract on every backend: the CPU here, Triton with `-m gpu`. Triton's interpreter: test_interpreted.py."""

import pytest

from tests.contract.suite import combinations, run


@pytest.mark.parametrize(("name", "dtype"), combinations("cpu"))
def test_cpu(name, dtype):
    run(name, "cpu", "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), combinations("triton"))
def test_triton(name, dtype):
    run(name, "triton", "cuda", dtype, large=True)
