"""What this machine offers: versions, devices, and for each backend whether it runs here and why not. `python -m flexc env` prints it."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

import flexc
from flexc import settings
from flexc.errors import FlexcError
from flexc.runtime.cache import cache_of
from flexc.target import KIB, MIB, Target

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "numpy", "sympy", "jinja2")
CUTE_TARGETS = ("sm_90a",)


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend runs, and whether it can at least print and compile code for a target that is not here.

    Attributes:
        name: "cute", "triton" or "cpu".
        runs: on a device of this machine.
        compiles: for a given target, without its device.
        reason: why it does not run, or what it runs on.
    """

    name: str
    runs: bool
    compiles: bool
    reason: str


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[Target]:
    """The targets of this machine: its CUDA devices in order, then the CPU."""
    return [Target.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())] + [Target.of("cpu")]


def backends() -> list[BackendStatus]:
    """Every backend, fastest first."""
    gpus = [target for target in devices() if target.is_gpu]
    return [_cute(gpus), _triton(gpus), BackendStatus("cpu", True, True, f"{torch.get_num_threads()} threads")]


def _cute(gpus: list[Target]) -> BackendStatus:
    if not (Path(__file__).parent / "codegen" / "cute" / "emit.py").is_file():
        return BackendStatus("cute", False, False, "this version of flexc has no CuTe templates")
    if importlib.util.find_spec("cutlass") is None:
        return BackendStatus("cute", False, False, "CuTe DSL is not installed: pip install 'nvidia-cutlass-dsl>=4.8'")
    if not gpus:
        return BackendStatus("cute", False, True, "no CUDA device")
    fitting = [target for target in gpus if target.arch in CUTE_TARGETS]
    if not fitting:
        return BackendStatus("cute", False, True, f"needs {' or '.join(CUTE_TARGETS)}, this machine has {gpus[0].arch}")
    return BackendStatus("cute", True, True, f"{fitting[0].name}, {fitting[0].arch}")


def _triton(gpus: list[Target]) -> BackendStatus:
    if importlib.util.find_spec("triton") is None:
        return BackendStatus("triton", False, False, "Triton is not installed: pip install 'triton>=3.5' (Linux only)")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return BackendStatus("triton", True, False, "interpreted on the CPU, TRITON_INTERPRET=1")
    if not gpus:
        return BackendStatus("triton", False, True, "no CUDA device")
    if gpus[0].capability < 80:
        return BackendStatus("triton", False, True, f"needs sm_80 or later, this machine has {gpus[0].arch}")
    return BackendStatus("triton", True, True, f"{gpus[0].name}, {gpus[0].arch}")


def report() -> str:
    """All of it as text."""
    python = f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    lines = ["versions", f"  flexc {flexc.__version__}", f"  {python}"]
    lines += [f"  {package} {version_of(package) or '(not installed)'}" for package in PACKAGES]
    lines += [f"  CUDA of PyTorch {torch.version.cuda or '(none)'}", "", "devices"]
    lines += [f"  {_describe(target)}" for target in devices()]
    lines += ["", "backends"]
    for backend in backends():
        state = "runs" if backend.runs else "compiles only" if backend.compiles else "unavailable"
        lines.append(f"  {backend.name:<7}{state}: {backend.reason}")
    lines += ["", "settings"]
    try:
        current = settings.current()
        lines += [f"  {row.variable}={_value(getattr(current, row.field))}{_origin(row.variable)}" for row in settings.TABLE]
        lines += ["", "cache", f"  {_cache_line(current)}"]
    except FlexcError as error:
        lines.append(f"  {error}")
    return "\n".join(lines)


def _describe(target: Target) -> str:
    if not target.is_gpu:
        return f"cpu: {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return (
        f"{target.arch}: {target.name}, {target.sm_count} SMs, {target.smem_bytes // KIB} KiB shared memory a block, "
        f"{target.l2_bytes // MIB} MiB L2"
    )


def _value(value: object) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _origin(variable: str) -> str:
    return "" if os.environ.get(variable) else "  (default)"


def _cache_line(current: settings.Settings) -> str:
    if current.no_disk_cache:
        return "off"
    if not current.cache_dir.exists():
        return "empty"
    info = cache_of(current).info()
    return f"{info.entries} entries, {info.size_bytes / MIB:.1f} of {current.cache_size_bytes / MIB:.0f} MiB"
