"""A kernel that waits for itself must not hold up everything else: tests on a GPU end after a while, with what every thread was doing."""

import faulthandler
from contextlib import contextmanager

import pytest

from tests.contract.interpreter import interpreting_workers

SECONDS = 300  # compiling included


@contextmanager
def watchdog(seconds):
    """Past so many seconds the process prints its threads and ends: who waits for a device can be ended in no other way."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def worker():
    """A process whose Triton interprets."""
    with interpreting_workers() as pool:
        yield pool


@pytest.fixture(autouse=True)
def ends_in_time(request):
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with watchdog(SECONDS):
        yield
