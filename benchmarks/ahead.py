"""Fill the caches on the disk from several processes, so that what is measured afterwards in one process finds its kernels there."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def run_ahead(function: Callable[..., Any], jobs: Sequence[tuple], processes: int) -> None:
    """Call the function with the arguments of each job, in so many processes of their own; 0 for not at all.

    A job that raises is none of ours: the same call raises again where it is measured, and is reported there.
    """
    if not processes or not jobs:
        return
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(function, *arguments) for arguments in jobs]:
            job.exception()
