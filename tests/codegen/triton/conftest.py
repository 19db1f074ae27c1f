"""Triton's interpreter as a worker process, and golden texts."""

import pytest

from tests.contract.interpreter import interpreting_workers


@pytest.fixture(scope="session")
def interpreter():
    """Calls a module-level function in a process where kernels are interpreted: `interpreter(function, *args)`."""
    pool = interpreting_workers()
    yield lambda function, *args: pool.submit(function, *args).result()
    pool.shutdown()
