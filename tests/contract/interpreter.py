"""Processes whose Triton interprets. The first thing that one does is here, so nothing is imported here that could import Triton."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor


def become_interpreter() -> None:
    """Make Triton interpret in this process."""
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def interpreting_workers(count: int = 1) -> ProcessPoolExecutor:
    """Worker processes that interpret."""
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), initializer=become_interpreter)
