"""Targets: published figures without a GPU, real ones from a device's properties."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flexc.errors import InputError, UnsupportedError
from flexc.target import KIB, KNOWN, Target, from_properties


@pytest.mark.parametrize(
    ("text", "arch", "smem_kib", "sm_count"),
    [
        ("sm_80", "sm_80", 163, 108),
        ("sm_86", "sm_86", 99, 82),
        ("sm_89", "sm_89", 99, 128),
        ("sm_90", "sm_90a", 227, 132),
        ("sm_90a", "sm_90a", 227, 132),
        ("sm_100", "sm_100a", 227, 148),
        ("SM_100A", "sm_100a", 227, 148),
        ("sm_120", "sm_120", 99, 170),
    ],
)
def test_published_figures(text, arch, smem_kib, sm_count):
    target = Target.parse(text)
    assert (target.arch, target.smem_bytes, target.sm_count) == (arch, smem_kib * KIB, sm_count)
    assert target.regs_per_sm == 65536
    assert target.smem_bytes_per_sm == (smem_kib + 1) * KIB
    assert target.is_gpu


@pytest.mark.parametrize(("text", "capability"), [("sm_80", 80), ("sm_90a", 90), ("sm_100a", 100), ("sm_120", 120), ("cpu", 0)])
def test_capability(text, capability):
    assert Target.parse(text).capability == capability


def test_cpu_is_a_target():
    assert Target.parse("cpu") is Target.of("cpu") is Target.of(torch.empty(0).device)
    assert not Target.parse("cpu").is_gpu


def test_targets_are_values():
    assert Target.parse("sm_90") == Target.parse("sm_90a") != Target.parse("sm_80")
    assert len({Target.parse("sm_90"), Target.parse("sm_90a")}) == 1


@pytest.mark.parametrize("text", ["sm_70", "h100", "", "sm_90b"])
def test_unknown_target_lists_the_known_ones(text):
    with pytest.raises(UnsupportedError, match=f"unknown target '{text}'; known: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_120, cpu"):
        Target.parse(text)


def test_other_kinds_of_device_are_refused():
    with pytest.raises(InputError, match="expected a CPU or CUDA device, got meta"):
        Target.of("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_device_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="expected a device of this machine, got cuda:0"):
        Target.of("cuda:0")


def properties(**changes):
    figures = {
        "major": 9,
        "minor": 0,
        "name": "NVIDIA H100 PCIe",
        "multi_processor_count": 114,
        "shared_memory_per_block_optin": 227 * KIB,
        "regs_per_multiprocessor": 65536,
        "L2_cache_size": 52428800,
    }
    return SimpleNamespace(**(figures | changes))


def test_a_device_gives_its_own_figures():
    target = from_properties(properties())
    assert (target.arch, target.name, target.sm_count) == ("sm_90a", "NVIDIA H100 PCIe", 114)
    assert target.peak_tflops == pytest.approx(KNOWN["sm_90a"].peak_tflops * 114 / 132)
    assert target.dram_gb_per_s == KNOWN["sm_90a"].dram_gb_per_s


def test_bandwidth_is_read_from_the_device_where_it_tells():
    assert from_properties(properties(memory_clock_rate=2_619_000, memory_bus_width=5120)).dram_gb_per_s == pytest.approx(3352.3, abs=0.1)


def test_a_device_outside_the_table_is_taken_as_it_is():
    target = from_properties(properties(major=8, minor=7, shared_memory_per_block_optin=163 * KIB))
    assert (target.arch, target.capability, target.smem_bytes, target.peak_tflops) == ("sm_87", 87, 163 * KIB, 0.0)


@pytest.mark.gpu
def test_this_device():
    target = Target.of("cuda")
    assert target == Target.of(torch.device("cuda", torch.cuda.current_device()))
    assert target.sm_count == torch.cuda.get_device_properties(0).multi_processor_count
    assert target.smem_bytes >= 48 * KIB
