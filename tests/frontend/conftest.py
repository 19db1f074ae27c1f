"""Every test of the frontend starts with no traces."""

import pytest

from flexc import frontend


@pytest.fixture(autouse=True)
def no_traces():
    """Functions of equal code in other tests would turn captured numbers into run-time scalars."""
    frontend.clear_cache()
