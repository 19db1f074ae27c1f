"""Compile the machine code of a call that is not made: no tensors, no launch, and for a target that need not be here.

The generated module's own host functions run on stand-ins that have sizes and addresses but no memory, and each launch becomes Triton's
`warmup`: so the binaries are those that the call will ask for, down to which arguments are multiples of 16.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StandIn:
    """What a kernel's specialisation sees of a captured tensor."""

    shape: Shape
    strides: Shape
    dtype_name: str
    address: int  # modulo 16

    @staticmethod
    def of(tensor: torch.Tensor) -> StandIn:
        """Of a real tensor."""
        return StandIn(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."), tensor.data_ptr() % 16)

    @property
    def dtype(self) -> torch.dtype:
        """As a tensor has it."""
        return getattr(torch, self.dtype_name)

    def stride(self) -> Shape:
        """In elements."""
        return self.strides

    def data_ptr(self) -> int:
        """Aligned as the tensor's; nothing is there."""
        return self.address


@dataclass(frozen=True)
class Job:
    """One call, as plain data that JSON can carry to another process.

    Attributes:
        path: of the generated module.
        capability: of the target, for example 90.
        kernels: which of the module's kernels to compile.
        q, k, v: shapes; contiguous.
        dtype_name: of q, k and v.
        tensors, scalars: captured values, in the order of the graph.
        maps: by kernel, shape of the block map that it walks: (B or 1, Hq or 1, block rows, block columns), rows transposed for "dkv".
    """

    path: str
    capability: int
    kernels: tuple[str, ...]
    q: Shape
    k: Shape
    v: Shape
    dtype_name: str
    tensors: tuple[StandIn, ...] = ()
    scalars: tuple[int | float, ...] = ()
    maps: Mapping[str, Shape] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(line: str) -> Job:
        """What `to_json` wrote."""
        given = json.loads(line)
        for name in ("kernels", "q", "k", "v", "scalars"):
            given[name] = tuple(given[name])
        stand_ins = (StandIn(tuple(t["shape"]), tuple(t["strides"]), t["dtype_name"], t["address"]) for t in given["tensors"])
        maps = {name: tuple(shape) for name, shape in given["maps"].items()}
        return Job(**{**given, "tensors": tuple(stand_ins), "maps": maps})

    @property
    def source(self) -> str:
        """Of the generated module."""
        return Path(self.path).read_text(encoding="utf-8")

    def compile(self, module: ModuleType) -> None:
        """See `compile_ahead`."""
        compile_ahead(module, self)


@dataclass(frozen=True)
class KernelsJob:
    """Launches of kernels that look at nothing but the types of their arguments, as plain data that JSON can carry to another process.

    Attributes:
        path, source: of the generated module; the file may be gone since the module was loaded.
        capability: of the target.
        calls: (kernel, arguments, options): each argument a number, a constant, or the dtype of a tensor as ["int32"].
    """

    path: str
    source: str
    capability: int
    calls: tuple[tuple[str, tuple, dict[str, int]], ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names."""
        return tuple(name for name, _, _ in self.calls)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    def compile(self, module: ModuleType) -> None:
        """Fill the cache."""
        for name, arguments, options in self.calls:
            given = [StandIn((1,), (1,), a[0], 0) if isinstance(a, list | tuple) else a for a in arguments]
            getattr(module, name).warmup(*given, grid=(1,), **options)


def job_of(line: str) -> Job | KernelsJob:
    """What `to_json` wrote."""
    given = json.loads(line)
    return KernelsJob(**given) if "calls" in given else Job.from_json(line)


def compile_ahead(module: ModuleType, job: Job) -> None:
    """Fill the cache, and this process's memory of the module's kernels, for Triton's active driver."""
    host = _host_of(module, {name: _Ahead(getattr(module, name) if name in job.kernels else None) for name in module.LAUNCH})
    dtype = getattr(torch, job.dtype_name)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in (job.q, job.k, job.v))
    given = 1 / math.sqrt(q.shape[3]), job.tensors, job.scalars
    out, lse = host["forward"](q, k, v, *given, _walk(job.maps.get("forward")))
    if "backward" in host and set(job.kernels) - {"forward_kernel"}:
        for dlse in (None, lse):
            host["backward"](q, k, v, out, lse, out, dlse, *given, _walk(job.maps.get("dq")), _walk(job.maps.get("dkv")))


def pretend_to_have(capability: int) -> None:
    """Make Triton of this process compile for a GPU that is not here. Nothing can be launched afterwards."""
    import triton.runtime
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: torch.device("meta"),
    )
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType]


class _Ahead:
    """Stands for a kernel: a launch compiles it, or does nothing if it was not asked for."""

    def __init__(self, function: Any):
        self.function = function

    def __getitem__(self, grid: Sequence[int]) -> Any:
        if self.function is None:
            return lambda *args, **options: None
        return lambda *args, **options: self.function.warmup(*args, grid=grid, **options)


def _host_of(module: ModuleType, stand_ins: dict[str, _Ahead]) -> dict[str, Any]:
    """The module's names with stand-ins for its kernels, which every host function sees: those that host functions call, too.

    A kernel that one of them launched all the same would be handed addresses at which nothing is.
    """
    names = {**vars(module), **stand_ins}
    for name, found in vars(module).items():
        if isinstance(found, FunctionType) and found.__globals__ is vars(module):
            names[name] = FunctionType(found.__code__, names, name, found.__defaults__)
            names[name].__kwdefaults__ = found.__kwdefaults__
    return names


def _walk(shape: Shape | None) -> SimpleNamespace | None:
    """The tensors of a walk over a block map of this shape, without memory."""
    if shape is None:
        return None
    sizes = {"rows": (*shape[:3], 4), "partial": (shape[3],), "full": (1, 2), "order": (shape[2],)}
    return SimpleNamespace(**{name: torch.empty(size, dtype=torch.int32, device="meta") for name, size in sizes.items()})
