"""Launchers compile once, keep the object on disk, and are described for what they take; without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexc import settings
from flexc.errors import InternalError, NoCompileError, ToolchainError
from flexc.runtime import cute_compile, cute_objects
from flexc.runtime.cache import cache_of
from flexc.runtime.cute_compile import CuteJob, Launcher, compile_module, number, tensor
from flexc.runtime.cute_module import LaterFunction, load_cute_module
from flexc.runtime.machine_code import CompiledKernel, CompiledModule
from flexc.runtime.module import load_module

TEXT = """
import cutlass
import cutlass.cute as cute
from cutlass import Float32
from flexc.runtime.cute_compile import Launcher, number, tensor


@cute.kernel
def scale_kernel(x, y, factor):
    i, _, _ = cute.arch.thread_idx()
    if i < x.shape[0]:
        y[i] = x[i] * factor


@cute.jit
def launch(x, y, factor, stream):
    scale_kernel(x, y, factor).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


SCALE = Launcher(
    launch,
    arch="sm_90a",
    arguments=(tensor("x", "float32", ("n",)), tensor("y", "float32", ("n",), compact=True), number("factor", "float32")),
)
LAUNCHERS = {"scale_kernel": SCALE}
"""
needs_dsl = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("cutlass") is None, reason="needs the package nvidia-cutlass-dsl"
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))
    return cache_of(settings.current())


def launcher(folder) -> Launcher:
    return load_module(TEXT, folder / "scale.py").SCALE


@needs_dsl
def test_a_kernel_compiles_without_a_gpu(tmp_path):
    module = compile_module(load_module(TEXT, tmp_path / "scale.py"))
    (kernel,) = module.kernels
    assert kernel.name == "scale_kernel" and kernel.cubin[:4] == b"\x7fELF" and ".target sm_90a" in kernel.ptx
    assert kernel.registers > 0 and kernel.spill_bytes == 0 and kernel.threads == 128 and kernel.remarks == ()
    assert "scale_kernel" in module.resources() and "FMUL" in module.sass()
    assert module.only(["scale_kernel"]).kernels == module.kernels and module.only([]).kernels == ()


@needs_dsl
def test_the_object_is_kept_on_disk(tmp_path, store, monkeypatch):
    """Another process, here another launcher, loads it and compiles nothing."""
    launcher(tmp_path).prepare()
    assert store.info().entries == 1
    monkeypatch.setattr(Launcher, "compiled", lambda self, *options: pytest.fail("compiled again"))
    again = launcher(tmp_path)
    assert again.prepare() is again.prepare()
    assert store.info().entries == 1


@needs_dsl
def test_another_text_is_another_object(tmp_path, store):
    launcher(tmp_path / "a").prepare()
    load_module(TEXT.replace("x[i] * factor", "x[i] + factor"), tmp_path / "b" / "scale.py").SCALE.prepare()
    assert store.info().entries == 2


@needs_dsl
def test_changed_building_blocks_are_another_object(tmp_path, store, monkeypatch):
    launcher(tmp_path).prepare()
    monkeypatch.setattr(cute_compile, "_source_digest", lambda function: "changed")
    launcher(tmp_path).prepare()
    assert store.info().entries == 2


@needs_dsl
def test_a_damaged_object_is_compiled_again(tmp_path, store):
    launcher(tmp_path).prepare()
    (file,) = store.root.rglob("launch.o")
    file.chmod(0o600)
    file.write_bytes(b"damaged")
    launcher(tmp_path).prepare()
    assert (file.read_bytes()[:4] if file.exists() else b"\x7fELF") == b"\x7fELF"


@needs_dsl
def test_arguments_are_checked(tmp_path, store):
    torch = pytest.importorskip("torch")
    launcher(tmp_path).prepare()
    with pytest.raises(Exception, match="cuda"):
        launcher(tmp_path)(torch.zeros(4), torch.zeros(4), 1.0)


def test_a_missing_package_is_named(monkeypatch):
    cute_compile._cute.cache_clear()
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    with pytest.raises(
        ToolchainError, match=r"the cute backend needs the packages nvidia-cutlass-dsl >= 4\.8 and apache-tvm-ffi: pip install"
    ):
        cute_compile._cute()
    cute_compile._cute.cache_clear()


def test_output_of_the_compiler_is_caught_and_given_back():
    with cute_compile._captured_output() as said:
        os.write(2, b"remark C7510\n")
        os.write(1, b"and more\n")
        print("and from Python", file=sys.stderr)
    assert said() == "remark C7510\nand more\nand from Python\n"


def test_resources_are_a_table():
    kernel = CompiledKernel("forward_kernel", "", b"", 168, 0, 1024, 384, ("C7510 serialised",))
    assert CompiledModule((kernel,)).resources().splitlines() == [
        "kernel             registers spill bytes smem bytes warps",
        "forward_kernel           168           0       1024    12",
        "forward_kernel: C7510 serialised",
    ]


# --- who is told of compilations; a stand-in for the DSL writes the object ---------------------------------------------------------------


class Observer:
    def __init__(self, forbids=False):
        self.seen, self.forbids = [], forbids

    def missing(self, kernel):
        self.seen.append(("missing", kernel))
        if self.forbids:
            raise NoCompileError("forbidden")

    def ready(self, kernel, compiled, seconds):
        self.seen.append((kernel, compiled))
        assert seconds >= 0


@pytest.fixture
def module(tmp_path, store, monkeypatch):
    """A module of one launcher whose compiler writes three bytes."""

    def launch(x, stream):
        raise AssertionError("is not run")

    class Compiled:
        def export_to_c(self, file, function_name):
            Path(file).write_bytes(b"obj")

    monkeypatch.setattr(Launcher, "compiled", lambda self, *options: Compiled())
    made = Launcher(launch, arch="sm_90a", arguments=(tensor("x", "float32", ("n",)),))
    return SimpleNamespace(LAUNCHERS={"scale_kernel": made})


def test_compilations_are_told(module):
    first, second = Observer(), Observer()
    cute_compile.watch(module, first)
    assert module.LAUNCHERS["scale_kernel"].entry().path("launch.o").read_bytes() == b"obj"
    cute_compile.watch(module, second)
    module.LAUNCHERS["scale_kernel"].entry()
    assert first.seen == [("missing", "scale_kernel"), ("scale_kernel", True)]
    assert second.seen == [("scale_kernel", False)]


def test_a_compilation_that_is_forbidden_leaves_nothing(module, store):
    observer = Observer(forbids=True)
    cute_compile.watch(module, observer)
    with pytest.raises(NoCompileError):
        module.LAUNCHERS["scale_kernel"].prepare()
    assert observer.seen == [("missing", "scale_kernel")]
    cute_compile.watch(module, Observer())
    module.LAUNCHERS["scale_kernel"].entry()


def test_a_job_fills_the_cache(module, tmp_path):
    (tmp_path / "kernel.py").write_text("text")
    job = CuteJob(str(tmp_path / "kernel.py"), ("scale_kernel",))
    assert json.loads(job.to_json()) == {"path": str(tmp_path / "kernel.py"), "launchers": ["scale_kernel"]} and job.source == "text"
    observer = Observer()
    cute_compile.watch(module, observer)
    job.compile(module)
    assert observer.seen[-1] == ("scale_kernel", True)


def test_arguments_are_data():
    assert tensor("q", "bfloat16", ("b", 64), bulk=True) == tensor("q", "bfloat16", ("b", 64), bulk=True)
    assert repr(number("scale", "float32")) == "NumberArgument(name='scale', dtype='float32')"


# --- without the DSL -------------------------------------------------------------------------------------------------------------------

SECOND_PROCESS = """
import sys
from tests.runtime.test_cute_compile import TEXT
from flexc.runtime.cute_compile import Launcher
from flexc.runtime.cute_module import load_cute_module

launcher = load_cute_module(TEXT, sys.argv[1]).SCALE
launcher.compiled = None
try:
    launcher.prepare()(1)
except TypeError as error:
    print(str(error)[:40])
print([name for name in ("cutlass", "sympy", "jinja2") if name in sys.modules])
"""


@needs_dsl
def test_a_second_process_loads_the_library_without_the_dsl(tmp_path, store):
    """Whichever folder the cache was moved to; what is called is the compiled launcher, which knows its arguments."""
    launcher(tmp_path).prepare()
    store.root.rename(tmp_path / "shipped")
    environment = {**os.environ, "FLEXC_CACHE_DIR": str(tmp_path / "shipped"), "PYTHONPATH": "."}
    command = [sys.executable, "-c", SECOND_PROCESS, str(tmp_path / "scale.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Expects 3 parameters when calling: `laun", "[]"]


@needs_dsl
@pytest.mark.parametrize("lacks", ["compiler", "runtime", "symbols"])
def test_the_dsl_loads_the_object_file_where_there_is_no_library(tmp_path, store, monkeypatch, lacks):
    if lacks == "compiler":
        monkeypatch.setattr(cute_objects.shutil, "which", lambda name: None)
    elif lacks == "runtime":
        monkeypatch.setattr(cute_objects, "_loads_runtime", lambda place: False)
    else:
        monkeypatch.setattr(cute_compile, "linked", lambda compiled: b"no library")
    made = launcher(tmp_path)
    assert ("launch.so" in made.entry().files) is (lacks != "compiler")
    monkeypatch.setattr(Launcher, "compiled", lambda self, *options: pytest.fail("compiled again"))
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        made.prepare()(1)


def test_libraries_with_the_same_names_inside_keep_to_themselves(tmp_path):
    """As those of two launchers, which both have __tvm_ffi_flexc_forward and what it calls."""
    if cute_objects.linked(b"") is None and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    found = []
    for value in (1, 2):
        source, target = tmp_path / f"{value}.c", tmp_path / f"{value}.so"
        source.write_text(f"int inner(void) {{ return {value}; }} int outer(void) {{ return inner(); }}")
        subprocess.run(["cc", "-c", "-fPIC", "-o", tmp_path / "launch.o", source], check=True)
        library = cute_objects.linked((tmp_path / "launch.o").read_bytes())
        assert library is not None
        target.write_bytes(library)
        found.append(ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL).outer())
    assert found == [1, 2]


def test_an_object_that_does_not_link_has_no_library():
    assert cute_objects.linked(b"no object file") is None


@needs_dsl
def test_kernels_are_run_when_they_must_be_compiled(tmp_path):
    made = load_cute_module(TEXT, tmp_path / "scale.py")
    later = made.SCALE.function
    assert isinstance(later, LaterFunction) and made.SCALE._place == (str(tmp_path / "scale.py"), "launch")
    assert not hasattr(made, "cute")
    function = later.made()
    assert function is made.launch and function is later.made() and made.cute is sys.modules["cutlass.cute"]
    plain = load_module(TEXT, tmp_path / "scale.py").SCALE
    assert plain._place == made.SCALE._place
    (kernel,) = compile_module(made).kernels
    assert kernel.cubin[:4] == b"\x7fELF"


def test_text_without_a_launcher_is_refused(tmp_path):
    with pytest.raises(InternalError, match="has no launcher"):
        load_cute_module("x = 1\n", tmp_path / "kernel.py")
