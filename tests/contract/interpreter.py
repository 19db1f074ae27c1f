"""The first thing a worker process does, so nothing is imported here that could import Triton."""

import os


def become_interpreter() -> None:
    """Make Triton interpret in this process."""
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
