"""Compile ahead of the first call: `kernel.warmup(specs)`.

    local.warmup([{"heads": 16, "heads_kv": 4, "head_dim": 128, "q_len": 1, "kv_len": 8192}, Spec(target="sm_90a", dtype="float16")])

No tensors are made. Sources and machine code go into flexc's disk cache; machine code, which takes the time, is compiled by worker
processes side by side. Afterwards a process with the same folder runs those calls under FLEXC_NO_COMPILE=1. Lengths, batch and heads are
arguments of a kernel: one spec serves all of them, as long as head dims, dtype and the ratio of heads stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexc import backends, frontend, pipeline, settings
from flexc.backends import Options, Shapes
from flexc.compile_log import BinaryLog, CompileLog, compile_log, refuse_if_forbidden
from flexc.errors import InputError, ShapeError, ToolchainError
from flexc.inference.decode import of_decoding
from flexc.pipeline import Artifact
from flexc.runtime.cache import cache_of
from flexc.runtime.cute_compile import CuteJob
from flexc.runtime.triton_ahead import Job, KernelsJob, compile_ahead, job_of, pretend_to_have
from flexc.side_by_side import FORWARD, cute_job_for, job_for
from flexc.target import Target

AnyJob = Job | KernelsJob | CuteJob

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One call to compile for.

    Attributes:
        batch, heads, heads_kv: B, Hq, Hkv; heads_kv defaults to heads.
        q_len, kv_len: tokens; kv_len defaults to q_len.
        head_dim, head_dim_v: D, Dv; head_dim_v defaults to head_dim.
        dtype: of q, k and v; default bfloat16 on a GPU, float32 on the CPU.
        device: of this machine; default the first GPU, else the CPU. Its kernels are also loaded into memory.
        target: such as "sm_90a", in place of a device: it need not be here.
        backward: whether the kernels of the backward pass are compiled too.
    """

    batch: int = 1
    heads: int = 8
    heads_kv: int | None = None
    q_len: int = 1024
    kv_len: int | None = None
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    target: Target | str | None = None
    backward: bool = True


@dataclass(frozen=True)
class _Resolved:
    """A spec with its defaults filled in, as the pipeline takes it."""

    shapes: Shapes
    device: torch.device | None
    target: Target
    backward: bool


def warm_up(
    score_mod: Any,
    mask_mod: Any,
    specs: Spec | Mapping[str, Any] | Iterable[Spec | Mapping[str, Any]],
    *,
    backend: str,
    options: Options,
    title: str,
    processes: int | None = None,
) -> CompileLog:
    """Compile for every spec; returns what was compiled, or found on the disk.

    Args:
        specs: one or many, each a Spec or a dict of its attributes.
        processes: how many compile machine code side by side; default: one for each core.

    Raises:
        InputError, ShapeError: a spec is not what Spec says.
        TraceError, UnsupportedError: as in a call.
        ToolchainError: machine code cannot be compiled.
        NoCompileError: something would be compiled under FLEXC_NO_COMPILE=1.
    """
    if processes is not None and (isinstance(processes, bool) or not isinstance(processes, int) or processes < 1):
        raise InputError(f"expected processes to be a number from 1, got {processes!r}")
    trace, binding = frontend.trace(score_mod, mask_mod)
    before = len(compile_log())
    jobs: list[tuple[Artifact, AnyJob]] = []
    here: list[tuple[Artifact, Job, torch.device]] = []
    for spec in [_resolve(number, spec) for number, spec in enumerate(specs_of(specs))]:
        first = _artifact(trace, spec, backend, options, title)
        for artifact, walked in filter(None, ((first, spec.shapes), of_decoding(first, spec.shapes, options))):
            if artifact.backend.name == "triton" and not backends.is_interpreted():
                job = _job(artifact, spec, binding, walked)
                jobs += [(artifact, part) for part in _parts(job)]
                if spec.device is not None:
                    here.append((artifact, job, spec.device))
            elif artifact.backend.name == "cute":
                jobs += _cute_jobs(artifact, spec, binding, options)
            elif spec.device is not None:
                artifact.module  # noqa: B018  (loads it)
            if spec.target.is_gpu and not backends.is_interpreted() and settings.current().device_maps:
                jobs += [(artifact, job) for job in _map_jobs(artifact, spec, binding, walked)]
    if jobs:
        _compile_all(jobs, processes or os.cpu_count() or 1)
    for artifact, job, device in here:
        with torch.cuda.device(device):
            compile_ahead(artifact.module, job)
    return compile_log()[before:]


def artifact_of(score_mod: Any, mask_mod: Any, spec: Spec | Mapping[str, Any], *, backend: str, options: Options, title: str) -> Artifact:
    """What a call that a spec describes would run."""
    trace, _ = frontend.trace(score_mod, mask_mod)
    return _artifact(trace, _resolve(0, specs_of(spec)[0]), backend, options, title)


def _artifact(trace: frontend.Trace, spec: _Resolved, backend: str, options: Options, title: str) -> Artifact:
    chosen, reason = _backend_for(spec, backend)
    return pipeline.artifact_for(trace, spec.shapes, spec.target, chosen, reason, options, title)


# --- specs ----------------------------------------------------------------------------------------------------------------------------


def specs_of(given: Any) -> list[Spec]:
    """One spec or many, as a list.

    Raises:
        InputError: neither a Spec nor a dict of its attributes.
    """
    many = [given] if isinstance(given, Spec | Mapping) else given
    if isinstance(many, str) or not isinstance(many, Iterable):
        raise InputError(f"expected specs to be a flexc.Spec, a dict, or a list of them, got {given!r}")
    found = [_spec(number, spec) for number, spec in enumerate(many)]
    if not found:
        raise InputError("expected at least one spec, got none")
    return found


def _spec(number: int, given: Any) -> Spec:
    if isinstance(given, Spec):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"spec {number} is a {type(given).__name__}; expected a flexc.Spec, or a dict such as {{'head_dim': 128}}")
    known = [field.name for field in dataclasses.fields(Spec)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(known)
            raise InputError(f"spec {number} has no attribute {name!r}; {hint}")
    return Spec(**given)


def _resolve(number: int, spec: Spec) -> _Resolved:
    sizes = dataclasses.asdict(spec) | {
        "heads_kv": spec.heads if spec.heads_kv is None else spec.heads_kv,
        "kv_len": spec.q_len if spec.kv_len is None else spec.kv_len,
        "head_dim_v": spec.head_dim if spec.head_dim_v is None else spec.head_dim_v,
    }
    for name in ("batch", "heads", "heads_kv", "q_len", "kv_len", "head_dim", "head_dim_v"):
        if isinstance(sizes[name], bool) or not isinstance(sizes[name], int):
            raise InputError(f"spec {number}: expected {name} to be an integer, got {sizes[name]!r}")
        if sizes[name] < 1:
            raise ShapeError(f"spec {number}: expected {name} >= 1, got {sizes[name]}")
    if sizes["heads"] % sizes["heads_kv"]:
        raise ShapeError(f"spec {number}: expected heads to be a multiple of heads_kv, got {sizes['heads']} and {sizes['heads_kv']}")
    if spec.device is not None and spec.target is not None:
        raise InputError(
            f"spec {number} has a device and a target; expected one: a device of this machine, or a target that need not be here"
        )
    device, target = _place(number, spec)
    dtype = _dtype(number, spec.dtype, target)
    inputs = (("heads", "q_len", "head_dim"), ("heads_kv", "kv_len", "head_dim"), ("heads_kv", "kv_len", "head_dim_v"))
    q, k, v = (torch.empty([sizes[name] for name in ("batch", *names)], dtype=dtype, device="meta") for names in inputs)
    shapes = Shapes(
        batch=sizes["batch"],
        heads_q=sizes["heads"],
        heads_kv=sizes["heads_kv"],
        q_len=sizes["q_len"],
        kv_len=sizes["kv_len"],
        head_dim=sizes["head_dim"],
        head_dim_v=sizes["head_dim_v"],
        dtype=dtype,
        bulk=target.is_gpu and backends.reads_in_bulk((q, k, v)),
    )
    return _Resolved(shapes, device, target, bool(spec.backward))


def _place(number: int, spec: Spec) -> tuple[torch.device | None, Target]:
    if spec.target is not None:
        return None, spec.target if isinstance(spec.target, Target) else Target.parse(spec.target)
    try:
        device = torch.device(spec.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        raise InputError(f"spec {number}: expected a device such as 'cuda:0' or 'cpu', got {spec.device!r}") from None
    return device, pipeline.target_of(device)


def _dtype(number: int, given: Any, target: Target) -> torch.dtype:
    if given is None:
        return torch.bfloat16 if target.is_gpu and not backends.is_interpreted() else torch.float32
    name = str(given).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"spec {number}: expected dtype to be one of {', '.join(_DTYPES)}, got {given!r}")
    return getattr(torch, name)


def _backend_for(spec: _Resolved, name: str) -> tuple[backends.Backend, str]:
    if spec.device is not None:
        return backends.choose(name, spec.device)
    chosen, reason = backends.choose("cpu" if name == "auto" and not spec.target.is_gpu else name, None, spec.target.arch)
    if (chosen is backends.CPU) == spec.target.is_gpu:
        raise InputError(f"the {chosen.name} backend does not compile for {spec.target.arch}")
    return chosen, reason


# --- machine code ---------------------------------------------------------------------------------------------------------------------


def _job(artifact: Artifact, spec: _Resolved, binding: frontend.Binding, walked: Shapes | None = None) -> Job:
    kernels = tuple(name for name in artifact.module.LAUNCH if spec.backward or name in FORWARD)
    return job_for(artifact, spec.shapes, spec.target.capability, binding.tensors, binding.scalars, kernels, walked)


def _map_jobs(artifact: Artifact, spec: _Resolved, binding: frontend.Binding, walked: Shapes) -> list[KernelsJob]:
    """The kernels that find the blocks which the artifact's kernels walk."""
    from flexc.block_ahead import jobs_of_map

    alone = artifact.mask_alone
    captured = [binding.tensors[slot] for slot in alone.tensor_slots], [binding.scalars[slot] for slot in alone.scalar_slots]
    sides: dict[tuple[int, int], set[str]] = {}
    for name, block in artifact.map_blocks.items():
        if spec.backward or name == "forward":
            sides.setdefault(block, set()).add("columns" if name == "dkv" else "rows")
    lengths = walked.q_len, walked.kv_len
    jobs = [
        jobs_of_map(alone.graph, block, walks, lengths, *captured, spec.target.capability, artifact.title) for block, walks in sides.items()
    ]
    return [job for some in jobs for job in some]


def _cute_jobs(artifact: Artifact, spec: _Resolved, binding: frontend.Binding, options: Options) -> list[tuple[Artifact, AnyJob]]:
    """The forward kernel, and what runs the backward pass: kernels of this backend's own, or Triton's."""
    jobs: list[tuple[Artifact, AnyJob]] = [(artifact, cute_job_for(artifact))]
    if not spec.backward:
        return jobs
    other = artifact.for_backward(spec.shapes, options)
    if other.backend.name == "cute":
        return [*jobs, (other, cute_job_for(other))]
    parts = _parts(_job(other, spec, binding))
    return [*jobs, *((other, part) for part in parts if part.kernels[0] not in FORWARD)]


def _parts(job: Job) -> list[Job]:
    """One for each kernel, longest first as far as that is known."""
    order = ("dkv_kernel", "dq_kernel", "forward_kernel", "split_kernel", "row_sums_kernel", "schedule_kernel", "combine_kernel")
    return [dataclasses.replace(job, kernels=(name,)) for name in sorted(job.kernels, key=order.index)]


def _compile_all(jobs: Sequence[tuple[Artifact, AnyJob]], processes: int) -> None:
    """Hand the jobs to worker processes as they become free, and write what they report into the log."""
    waiting: queue.SimpleQueue[tuple[Artifact, AnyJob]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failures: list[Exception] = []

    def feed() -> None:
        try:
            with _Worker() as worker:
                while not failures:
                    artifact, job = waiting.get_nowait()
                    _log(artifact, job, worker.compile(artifact, job))
        except queue.Empty:
            pass
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=feed) for _ in range(min(processes, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _log(artifact: Artifact, job: AnyJob, binaries: list[dict[str, Any]]) -> None:
    for binary in binaries:
        log = BinaryLog(artifact.title, _compiler_of(job), artifact.target.arch, "warm-up", artifact.key)
        log.ready(binary["kernel"], binary["compiled"], binary["seconds"])


def _compiler_of(job: AnyJob) -> str:
    return "cute" if isinstance(job, CuteJob) else "triton"  # kernels that find blocks are Triton's for every backend


class _Worker:
    """A process that compiles one job a line. It runs nothing of the user's program, so a script needs no `if __name__ == "__main__"`."""

    def __enter__(self) -> _Worker:
        self._errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-c", "from flexc.warmup import serve; serve()"]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        environment["FLEXC_CACHE_DIR"] = str(cache_of(settings.current()).root)  # the parent's own, where that ends with the parent
        environment.pop("FLEXC_NO_DISK_CACHE", None)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # closing writes what a process that has ended never read
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()

    def compile(self, artifact: Artifact, job: AnyJob) -> list[dict[str, Any]]:
        """The binaries of a job: name, seconds, and whether they were compiled or found."""
        assert self._process.stdin is not None and self._process.stdout is not None
        what = f"machine code of {', '.join(job.kernels)} of {artifact.title}"
        try:
            self._process.stdin.write(f"{job.to_json()}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._errors.seek(0)
            raise ToolchainError(f"the process that compiled {what} ended: {self._errors.read()[-2000:].strip() or 'it said nothing'}")
        reply = json.loads(answer)
        if "error" in reply:
            refuse_if_forbidden(what, "the cache has no binary", _compiler_of(job), artifact.target.arch, artifact.key)
            raise ToolchainError(f"{what} cannot be compiled for {artifact.target.arch}: {reply['error']}")
        return reply["binaries"]


@dataclass(frozen=True)
class _Noted(BinaryLog):
    """Notes binaries for the parent."""

    binaries: list[dict[str, Any]]

    def ready(self, kernel: str, compiled: bool, seconds: float) -> None:
        """It was compiled, or found."""
        self.binaries.append({"kernel": kernel, "compiled": compiled, "seconds": seconds})


def serve() -> None:
    """What a worker process does: jobs in, one JSON a line; what was compiled out."""
    from flexc.runtime import cute_compile, triton_binaries
    from flexc.runtime.module import load_module

    answers, sys.stdout = sys.stdout, sys.stderr  # Triton may print
    for line in sys.stdin:
        given = json.loads(line)
        job: AnyJob = CuteJob(given["path"], tuple(given["launchers"])) if "launchers" in given else job_of(line)
        binaries: list[dict[str, Any]] = []
        try:
            if not isinstance(job, CuteJob):
                pretend_to_have(job.capability)
            module = load_module(job.source, job.path)
            watch = cute_compile.watch if isinstance(job, CuteJob) else triton_binaries.watch
            watch(module, _Noted("", _compiler_of(job), "the target", "warm-up", "", binaries))
            job.compile(module)
            reply: dict[str, Any] = {"binaries": binaries}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(f"{json.dumps(reply)}\n")
        answers.flush()
