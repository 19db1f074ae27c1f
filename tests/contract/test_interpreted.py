"""Every case of the contract on Triton's interpreter, which needs no GPU.

`TRITON_INTERPRET=1` changes what `@triton.jit` makes, for the whole process: so the cases run in worker processes, one for each core, and
the tests of this process still see the compiler. All cases that were selected start at once; each test waits for its own. Where
pytest-xdist hands out the tests, a process does not know which will be its own: then a case starts with its test, and none runs twice.
float16 and float32 only: in bfloat16 the interpreter's `tl.dot` multiplies bit patterns.
"""

import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.contract.interpreter import interpreting_workers
from tests.contract.suite import combinations, failure_of

pytestmark = pytest.mark.interpret


@pytest.fixture(scope="module")
def failures(request):
    """(name, dtype) → a call that waits for the case and says what failed."""
    sharing = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    pool = interpreting_workers(max(1, (os.cpu_count() or 1) // sharing))
    own = [] if "PYTEST_XDIST_WORKER" in os.environ else request.session.items
    selected = [item.callspec.params for item in own if item.fspath == request.node.fspath]
    running = {(p["name"], p["dtype"]): pool.submit(failure_of, p["name"], "triton", "cpu", p["dtype"]) for p in selected}

    def wait(name, dtype):
        try:
            started = running.get((name, dtype)) or pool.submit(failure_of, name, "triton", "cpu", dtype)
            return started.result()
        except BrokenProcessPool:
            pass
        # Some case killed its process, and with it all that were waiting: was it this one?
        alone = interpreting_workers(1)
        try:
            return alone.submit(failure_of, name, "triton", "cpu", dtype).result()
        except BrokenProcessPool:
            return "the worker process died"
        finally:
            alone.shutdown()

    yield wait
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("name", "dtype"), combinations("interpreter"))
def test_triton_interpreted(name, dtype, failures):
    failure = failures(name, dtype)
    assert not failure, f"\n{failure}"
