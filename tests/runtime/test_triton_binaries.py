"""Machine code of Triton kernels: who is told, where it is kept, and that of many processes one compiles. All compile, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexc import settings
from flexc.runtime.cache import cache_of
from flexc.runtime.triton_ahead import StandIn, pretend_to_have
from flexc.runtime.triton_binaries import watch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def doubled(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))


class Observer:
    def __init__(self, refuses=False):
        self.told, self.refuses = [], refuses

    def missing(self, kernel):
        self.told.append(("missing", kernel))
        if self.refuses:
            raise RuntimeError("not allowed")

    def ready(self, kernel, compiled, seconds):
        self.told.append(("ready", kernel, compiled))
        assert seconds >= 0


COMPILED = [("missing", "doubled"), ("ready", "doubled", True)]
FOUND = [("ready", "doubled", False)]


def kernel(observer=None):
    """A kernel that this process has no machine code of."""
    made = triton.JITFunction(doubled)
    if observer is not None:
        watch(SimpleNamespace(LAUNCH={"doubled": (4, 1)}, doubled=made), observer)
    return made


def compile_for(made, block=16, **options):
    return made.warmup(StandIn((block,), (1,), "float32", 0), block, grid=(1,), **options)


def told(observer=None, **options):
    """What an observer is told of a kernel that is needed."""
    observer = observer or Observer()
    compile_for(kernel(observer), **options)
    return observer.told


@pytest.fixture(autouse=True)
def hopper(monkeypatch, tmp_path):
    """Triton compiles for sm_90, with caches of the test alone; its hooks are as they were afterwards."""
    from triton import knobs

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "flexc"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    hook, manager = knobs.runtime.jit_cache_hook, knobs.cache.manager_class
    monkeypatch.setattr(triton.runtime.driver, "_active", triton.runtime.driver._active)
    pretend_to_have(90)
    yield knobs
    knobs.runtime.jit_cache_hook, knobs.cache.manager_class = hook, manager


def files(folder):
    return sorted(path.name for path in Path(folder).rglob("doubled*")) if Path(folder).exists() else []


# --- who is told -----------------------------------------------------------------------------------------------------------------------


def test_compiled_binary_is_told_before_and_after():
    made = kernel(observer := Observer())
    for block in (16, 32, 16):  # another specialisation of the same kernel; the third is in memory
        assert "st.global" in compile_for(made, block).asm["ptx"]
    assert observer.told == COMPILED * 2


def test_binary_in_the_cache_is_no_compilation():
    assert told() == COMPILED
    assert told(Observer(refuses=True)) == FOUND


def test_refusal_ends_the_launch_before_anything_is_compiled(tmp_path):
    observer = Observer(refuses=True)
    with pytest.raises(RuntimeError, match="not allowed"):
        told(observer)
    assert observer.told == [("missing", "doubled")]
    assert files(tmp_path) == []


def test_hook_that_was_there_is_still_called(hopper):
    seen = []
    hopper.runtime.jit_cache_hook = lambda **given: seen.append(given["fn"].jit_function) or None
    made = kernel(observer := Observer())
    compile_for(made)
    assert seen == [made] and observer.told == COMPILED


def test_one_hook_serves_all_modules(hopper):
    first, second = Observer(), Observer()
    kernel(first)
    ours = hopper.runtime.jit_cache_hook
    made = kernel(second)
    assert hopper.runtime.jit_cache_hook is ours
    compile_for(made)
    assert first.told == [] and second.told == COMPILED


# --- where it is kept ------------------------------------------------------------------------------------------------------------------


def test_machine_code_is_an_entry_of_our_cache_and_triton_keeps_none(tmp_path):
    told()
    assert files(tmp_path / "flexc") == ["doubled.cubin", "doubled.json", "doubled.ptx"]
    assert files(tmp_path / "triton") == []
    assert cache_of(settings.current()).info().entries == 1 and cache_of(settings.current()).verify() == []


def test_kernels_of_others_stay_in_tritons_cache(tmp_path, hopper):
    """Also after ours were compiled, and with a class of caches that somebody set."""
    told()
    compile_for(kernel())
    assert files(tmp_path / "flexc") == ["doubled.cubin", "doubled.json", "doubled.ptx"] and "doubled.cubin" in files(tmp_path / "triton")
    asked = []

    class Theirs(triton.runtime.cache.FileCacheManager):
        def __init__(self, key, **purpose):
            asked.append(key)
            super().__init__(key, **purpose)

    hopper.cache.manager_class = Theirs
    assert told(block=32) == COMPILED and asked == []
    compile_for(kernel(), 64)
    assert len(asked) == 1


def test_cache_may_be_moved(tmp_path, monkeypatch):
    told()
    (tmp_path / "flexc").rename(tmp_path / "shipped")
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "shipped"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert told(Observer(refuses=True)) == FOUND


def test_damaged_machine_code_is_compiled_again(tmp_path):
    told()
    (cubin,) = (tmp_path / "flexc").rglob("doubled.cubin")
    whole = cubin.read_bytes()
    cubin.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert told() == COMPILED
    assert cubin.read_bytes() == whole
    assert told() == FOUND


def test_what_machine_code_depends_on_is_in_the_key(monkeypatch):
    assert told() == COMPILED
    assert told(num_warps=8) == COMPILED
    for name, value in (("DISABLE_PTXAS_OPT", "1"), ("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas.path)):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert told() == COMPILED
    pretend_to_have(80)
    assert told() == COMPILED
    pretend_to_have(90)
    assert told() == FOUND


@pytest.mark.parametrize("variable", ["TRITON_ALWAYS_COMPILE", "TRITON_KERNEL_DUMP"])
def test_who_asks_triton_to_show_its_work_gets_it(monkeypatch, variable, tmp_path):
    told()
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path / "dump"))
    assert told() == COMPILED
    assert "doubled.cubin" in files(tmp_path / "dump" if "DUMP" in variable else tmp_path / "triton")


EIGHT = """
import os, sys, time
import tests.runtime.test_triton_binaries as here
import triton.compiler

here.pretend_to_have(90)
start = time.time() + 0.3
children = []
for _ in range(8):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        time.sleep(max(0, start - time.time()))
        os.write(writer, repr(here.told()[-1][-1]).encode())
        os._exit(0)
    os.close(writer)
    children.append((child, reader))
for child, reader in children:
    print(os.read(reader, 100).decode())
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_eight_processes_that_start_at_once_compile_once():
    done = subprocess.run([sys.executable, "-c", EIGHT], env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["False"] * 7 + ["True"]
