"""Target: what a kernel is compiled for. A value, built without a GPU.

Figures: shared memory and registers from the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability";
SM counts, L2 and peak rates from NVIDIA's architecture white papers of the part named in `name`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flexc.errors import InputError, UnsupportedError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Target:
    """An architecture and the sizes that a plan depends on.

    Attributes:
        arch: "cpu", or as ptxas spells it: "sm_80", "sm_90a" (with the features that only this architecture has).
        name: the part whose figures these are.
        sm_count: streaming multiprocessors (1 on the CPU).
        smem_bytes: the most shared memory that one block can ask for.
        regs_per_sm: 32-bit registers of one SM.
        l2_bytes: second-level cache.
        peak_tflops: dense fp16/bf16 matrix products with float32 accumulation, 0.0 if unknown. For rooflines only.
        dram_gb_per_s: memory bandwidth, 0.0 if unknown. For rooflines only.
    """

    arch: str
    name: str
    sm_count: int
    smem_bytes: int
    regs_per_sm: int
    l2_bytes: int
    peak_tflops: float = 0.0
    dram_gb_per_s: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """A CUDA architecture, not the CPU."""
        return self.arch != "cpu"

    @property
    def capability(self) -> int:
        """Compute capability as one number, 90 for sm_90a; 0 for the CPU."""
        return int(re.sub(r"\D", "", self.arch)) if self.is_gpu else 0

    @property
    def smem_bytes_per_sm(self) -> int:
        """Shared memory of one SM; every resident block costs 1 KiB more than it asked for."""
        return self.smem_bytes + KIB if self.is_gpu else 0

    @staticmethod
    def parse(text: str) -> Target:
        """The published figures of an architecture: "sm_90", "sm_90a", "cpu", …

        Raises:
            InputError: not a text.
            UnsupportedError: not a known target; lists those that are.
        """
        if not isinstance(text, str):
            raise InputError(f'expected the name of a target, such as "sm_90a", got {text!r}')
        arch = text.strip().lower()
        arch = _SPELLINGS.get(arch, arch)
        if arch not in KNOWN:
            raise UnsupportedError(f"unknown target {text!r}; known: {', '.join(KNOWN)}")
        return KNOWN[arch]

    @staticmethod
    def of(device: Any) -> Target:
        """The target of a device of this machine (anything `torch.device` takes, or a tensor's `.device`).

        Raises:
            InputError: a device that is neither CPU nor CUDA, or a CUDA device on a machine without one.
        """
        import torch

        device = named_device(device)
        if device.type == "cpu":
            return KNOWN["cpu"]
        if device.type != "cuda" or torch.version.hip is not None:
            raise InputError(f"expected a CPU or CUDA device, got {device}")
        if not torch.cuda.is_available():
            raise InputError(f"expected a device of this machine, got {device}: PyTorch finds no CUDA device here")
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)


def named_device(device: Any) -> Any:
    """What `torch.device` makes of a name, a number or a device.

    Raises:
        InputError: it names none.
    """
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"expected device to name a device, such as 'cuda:0', got {device!r}") from error


@cache
def _of_cuda(index: int) -> Target:
    import torch

    return from_properties(torch.cuda.get_device_properties(index))


def from_properties(properties: Any) -> Target:
    """The target that `torch.cuda.get_device_properties` describes; rates come from the table where the architecture is in it."""
    number = f"{properties.major}{properties.minor}"
    arch = _SPELLINGS.get(f"sm_{number}", f"sm_{number}")
    known = KNOWN.get(arch)
    measured = Target(
        arch=arch,
        name=properties.name,
        sm_count=properties.multi_processor_count,
        smem_bytes=properties.shared_memory_per_block_optin,
        regs_per_sm=properties.regs_per_multiprocessor,
        l2_bytes=properties.L2_cache_size,
    )
    if known is None:
        return measured
    peak = known.peak_tflops * measured.sm_count / known.sm_count
    return replace(measured, peak_tflops=peak, dram_gb_per_s=_bandwidth(properties) or known.dram_gb_per_s)


def _bandwidth(properties: Any) -> float:
    """GB/s from clock (kHz) and bus width (bits); two transfers a clock. 0.0 where this PyTorch does not tell."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 / 1e9


def _gpu(arch: str, name: str, sm_count: int, smem_kib: int, l2_mib: int, peak_tflops: float, dram_gb_per_s: float) -> Target:
    return Target(arch, name, sm_count, smem_kib * KIB, 65536, l2_mib * MIB, peak_tflops, dram_gb_per_s)


KNOWN: dict[str, Target] = {
    target.arch: target
    for target in (
        _gpu("sm_80", "A100", 108, 163, 40, 312.0, 2039.0),
        _gpu("sm_86", "RTX 3090", 82, 99, 6, 71.0, 936.0),
        _gpu("sm_89", "RTX 4090", 128, 99, 72, 165.2, 1008.0),
        _gpu("sm_90a", "H200", 132, 227, 50, 989.4, 4800.0),
        _gpu("sm_100a", "B200", 148, 227, 126, 2250.0, 8000.0),
        _gpu("sm_120", "RTX 5090", 170, 99, 96, 209.5, 1792.0),
        Target("cpu", "CPU", 1, 0, 0, 0),
    )
}

_SPELLINGS = {"sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120a": "sm_120"}
