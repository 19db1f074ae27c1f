"""A first call's machine code, compiled side by side: that of the attention kernels in threads of their own, while the call's own thread
finds the blocks of the mask, whose kernels have to be compiled, too. Compilers give Python's lock away for most of their time.

The threads fill caches and do nothing else. What they could not compile is compiled where it is launched, and an error is raised there.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from flexc import backends
from flexc.backends import Shapes
from flexc.ir.graph import inputs_of
from flexc.map_making import is_capturing
from flexc.pipeline import Artifact
from flexc.runtime.cute_compile import CuteJob
from flexc.runtime.triton_ahead import Job, StandIn

FORWARD = ("forward_kernel", "schedule_kernel", "split_kernel", "combine_kernel")


def begin(
    artifact: Artifact,
    direction: str,
    shapes: Shapes,
    tensors: Sequence[torch.Tensor],
    scalars: tuple[int | float, ...],
    device: torch.device,
) -> list[threading.Thread]:
    """Threads to wait for before the kernels of a direction, "forward" or "backward", are launched for the first time.

    None where the module's machine code may be on the disk, where no map has to be found meanwhile, and while a CUDA graph is captured.
    """
    if direction not in artifact.unlaunched:
        return []
    artifact.unlaunched.discard(direction)
    if device.type != "cuda" or backends.is_interpreted() or not artifact.map_blocks or is_capturing():
        return []
    if artifact.backend is backends.TRITON:
        names = [name for name in artifact.module.LAUNCH if (name in FORWARD) == (direction == "forward")]
        jobs: list[Any] = [job_for(artifact, shapes, artifact.target.capability, tensors, scalars, (name,)) for name in names]
    elif artifact.backend in (backends.CUTE, backends.CUTE_BACKWARD):
        jobs = [cute_job_for(artifact)]
    else:
        return []
    threads = [
        threading.Thread(target=_compile, args=(artifact.module, job, device), name=f"flexc compiles {job.kernels[0]}") for job in jobs
    ]
    for thread in threads:
        thread.start()
    return threads


def _compile(module: Any, job: Job | CuteJob, device: torch.device) -> None:
    with contextlib.suppress(Exception), torch.cuda.device(device):  # whoever launches the kernel meets the error again
        job.compile(module)


def job_for(
    artifact: Artifact,
    shapes: Shapes,
    capability: int,
    tensors: Sequence[torch.Tensor],
    scalars: tuple[int | float, ...],
    kernels: Sequence[str],
    walked: Shapes | None = None,
) -> Job:
    """Kernels of a module of Triton's as a call launches them; `walked` has the sizes as block maps see them, where those are others."""
    walked = walked or shapes
    mask = artifact.mask_alone.graph.mask
    reads = frozenset() if mask is None else inputs_of(mask)
    entries = (walked.batch if "batch" in reads else 1, walked.heads_q if "head" in reads else 1)
    maps = {}
    for name, (rows, columns) in artifact.map_blocks.items():
        count = math.ceil(walked.q_len / rows), math.ceil(walked.kv_len / columns)
        maps[name] = (*entries, *(reversed(count) if name == "dkv" else count))
    return Job(
        path=str(artifact.path),
        capability=capability,
        kernels=tuple(kernels),
        q=(shapes.batch, shapes.heads_q, shapes.q_len, shapes.head_dim),
        k=(shapes.batch, shapes.heads_kv, shapes.kv_len, shapes.head_dim),
        v=(shapes.batch, shapes.heads_kv, shapes.kv_len, shapes.head_dim_v),
        dtype_name=shapes.dtype_name,
        tensors=tuple(map(StandIn.of, tensors)),
        scalars=scalars,
        maps=maps,
    )


def cute_job_for(artifact: Artifact) -> CuteJob:
    """All kernels of a module of the cute backend, which look at nothing of a call."""
    return CuteJob(str(artifact.path), tuple(artifact.module.LAUNCHERS))
