"""Launching again: Triton looks at arguments once for each kind of them."""

from types import SimpleNamespace

import pytest
import torch

from flexc.runtime import triton_launch
from flexc.runtime.triton_launch import Launcher


class Kernel:
    """Stands in for Triton's: remembers launches through Triton, and those of the binaries that they find."""

    def __init__(self):
        self.through_triton, self.direct = [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.through_triton.append((grid, arguments, options))
            number = len(self.through_triton)
            run = lambda *given: self.direct.append((number, given))
            return SimpleNamespace(run=run, function="f", packed_metadata="m")

        return launch


@pytest.fixture
def kernel(monkeypatch):
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(triton_launch, "_hooks", lambda: hooks)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    made = Kernel()
    made.hooks = hooks
    return made


def launcher_of(kernel, **options):
    return Launcher(SimpleNamespace(LAUNCH={"k": (4, 2)}, k=kernel), "k", **options)


def test_each_kind_is_looked_at_once(kernel):
    launch = launcher_of(kernel, num_warps=8)
    for kind, address in (("a", 1), ("a", 2), ("b", 3), ("a", 4)):
        launch.of_kind(kind)((5, 1), 1, [address, 7], lambda: ["tensor", 7])
    assert kernel.through_triton == [((5, 1), ("tensor", 7), {"num_warps": 8, "num_stages": 2})] * 2
    assert kernel.direct == [(1, (5, 1, 1, 101, "f", "m", None, None, None, address, 7)) for address in (2, 4)]


@pytest.mark.parametrize(("scratch", "is_direct"), [(0, True), (16, False)])
def test_the_function_in_c_is_called_where_no_memory_is_needed(scratch, is_direct):
    """Arguments are in the order in which Triton's own launcher passes them."""
    from triton.backends.nvidia.driver import CudaLauncher

    run = object.__new__(CudaLauncher)
    seen = []
    run.launch = lambda *given: seen.append(given)
    run.global_scratch_size, run.global_scratch_align = scratch, 16
    run.profile_scratch_size, run.profile_scratch_align, run.num_ctas = 0, 1, 1
    run.launch_cooperative_grid, run.launch_pdl = "cooperative", "pdl"
    launch, function, settings = triton_launch._launch_of(SimpleNamespace(run=run, function="f", packed_metadata="m"))
    assert (launch is run.launch) is is_direct
    if is_direct:
        launch(5, 6, 1, 100, function, *settings, None, None, None, "a", 7)
        run(5, 6, 1, 100, "f", "m", None, None, None, "a", 7)
        assert seen[0] == seen[1]


def test_grids_of_two_dimensions(kernel):
    launch = launcher_of(kernel)
    launch.of_kind("a")((5, 6), 0, [1], lambda: ["tensor"])
    launch.of_kind("a")((5, 6), 0, [1], lambda: ["tensor"])
    assert kernel.direct[0][1][:4] == (5, 6, 1, 100)


def test_a_profiler_sees_every_launch(kernel):
    launch = launcher_of(kernel)
    launch.of_kind("a")((5, 1), 0, [1], lambda: ["tensor"])
    kernel.hooks.launch_exit_hook.calls.append(print)
    launch.of_kind("a")((5, 1), 0, [1], lambda: ["tensor"])
    kernel.hooks.launch_exit_hook, kernel.hooks.launch_enter_hook = None, print
    launch.of_kind("a")((5, 1), 0, [1], lambda: ["tensor"])
    assert len(kernel.through_triton) == 3 and not kernel.direct


def test_the_interpreter_has_no_binaries(kernel):
    launches = []
    interpreted = SimpleNamespace(LAUNCH={"k": (1, 1)}, k={(5, 1): lambda *arguments, **options: launches.append(arguments)})
    launch = Launcher(interpreted, "k")
    for _ in range(2):
        launch.of_kind("a")((5, 1), 0, [1], lambda: ["tensor"])
    assert launches == [("tensor",)] * 2
