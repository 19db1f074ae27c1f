"""Compile a generated Triton module ahead of time, for any target and without a GPU, and read what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from flexc.errors import ToolchainError
from flexc.runtime.machine_code import CompiledKernel, CompiledModule, tool, tool_path


def compile_module(
    module: ModuleType, capability: int, types_of: Callable[[Sequence[str]], dict[str, str]], names: Sequence[str] | None = None
) -> CompiledModule:
    """Compile the kernels of a generated module.

    Args:
        module: with `LAUNCH`: kernel name → (num_warps, num_stages).
        capability: for example 90.
        types_of: argument names → Triton types.
        names: which kernels; default all.
    """
    return CompiledModule(tuple(_compile(module, name, capability, types_of) for name in names or module.LAUNCH))


def is_aligned(argument: str, kind: str) -> bool:
    """Whether an argument counts as a multiple of 16, as it is in a call with contiguous tensors of a usual head dim.

    Pointers, and the strides of q, k, v, out and their gradients: without them no copy is asynchronous, which is not what runs.
    """
    return kind.startswith("*") or re.fullmatch(r"(q|k|v|out|dout)_stride_[bhs]", argument) is not None


def _compile(module: ModuleType, name: str, capability: int, types_of: Callable[[Sequence[str]], dict[str, str]]) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function: Any = getattr(module, name)
    if not hasattr(function, "arg_names") or "Interpreted" in type(function).__name__:
        raise ToolchainError("machine code cannot be shown under TRITON_INTERPRET=1: unset it")
    types = types_of(function.arg_names)
    constants = {argument: True for argument, kind in types.items() if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, argument in enumerate(function.arg_names) if is_aligned(argument, types[argument])}
    warps, stages = module.LAUNCH[name]
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages})
    usage = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", compiled.asm["cubin"], "-res-usage"))
    registers, spill = (int(usage[1]), int(usage[2])) if usage else (0, 0)
    remarks = _remarks(compiled.asm["ptx"], capability)
    return CompiledKernel(name, compiled.asm["ptx"], compiled.asm["cubin"], registers, spill, compiled.metadata.shared, 32 * warps, remarks)


def _remarks(ptx: str, capability: int) -> tuple[str, ...]:
    """ptxas's remarks on performance, which Triton drops."""
    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
        command = [tool_path(name), "-v", f"--gpu-name={arch}", str(file), "-o", str(file.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return tuple(sorted(set(re.findall(r"\(C75\d\d\).*?(?= in the function|$)", done.stderr, flags=re.MULTILINE))))
