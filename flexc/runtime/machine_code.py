"""Machine code of compiled kernels, what it uses, and NVIDIA's tools that read it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexc.errors import ToolchainError


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel's machine code and what it uses.

    Attributes:
        registers: per thread at launch; warpgroups of CuTe kernels then trade them (`setmaxnreg`).
        spill_bytes: stack and local memory per thread.
        smem_bytes: shared memory of a block, at most.
        remarks: what ptxas says of lost performance, such as serialised matrix products (C7510 to C7519).
    """

    name: str
    ptx: str
    cubin: bytes
    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    remarks: tuple[str, ...]

    @property
    def warps(self) -> int:
        """Of a block of threads."""
        return self.threads // 32


@dataclass(frozen=True)
class CompiledModule:
    """All kernels of a module, for one target."""

    kernels: tuple[CompiledKernel, ...]

    def only(self, names: Sequence[str]) -> CompiledModule:
        """The kernels with these names."""
        return CompiledModule(tuple(k for k in self.kernels if k.name in names))

    def ptx(self) -> str:
        """PTX of each kernel."""
        return "\n".join(k.ptx for k in self.kernels)

    def sass(self) -> str:
        """Each cubin, disassembled."""
        return "\n".join(tool("cuobjdump", k.cubin, "-sass") for k in self.kernels)

    def resources(self) -> str:
        """One line a kernel."""
        rows = [f"{'kernel':18} {'registers':>9} {'spill bytes':>11} {'smem bytes':>10} {'warps':>5}"]
        rows += [f"{k.name:18} {k.registers:9} {k.spill_bytes:11} {k.smem_bytes:10} {k.warps:5}" for k in self.kernels]
        rows += [f"{k.name}: {remark}" for k in self.kernels for remark in k.remarks]
        return "\n".join(rows)


# NVIDIA's cubin tools come with Triton; the DSL has none.
@cache
def tool_path(name: str) -> Path:
    """Where a tool is.

    Raises:
        ToolchainError: it is missing.
    """
    import triton

    path = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise ToolchainError(f"{name} is missing from the triton package, where it is expected at {path}: reinstall triton")
    return path


def tool(name: str, cubin: bytes, *options: str) -> str:
    """What a tool prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool_path(name), *options, file.name], capture_output=True, text=True, check=False)
    return done.stdout
