"""Triton's interpreter as a worker process, and golden texts."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.contract.interpreter import become_interpreter


@pytest.fixture(scope="session")
def interpreter():
    """Calls a module-level function in a process where kernels are interpreted: `interpreter(function, *args)`."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=become_interpreter)
    yield lambda function, *args: pool.submit(function, *args).result()
    pool.shutdown()
