# pyright: reportMissingImports=false
"""Compile generated CuTe modules: at the first call for the GPU of this machine, or ahead of time for a target and without a GPU.

A generated module holds `Launcher` objects. One compiles its host function once per process from the declared arguments (fake tensors:
symbolic sizes and strides), keeps the object file in the disk cache, and calls it through TVM-FFI, which takes PyTorch tensors and the
current stream as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from flexc import settings
from flexc.errors import ToolchainError
from flexc.runtime.cache import Entry, cache_of
from flexc.runtime.cute_module import LaterFunction
from flexc.runtime.cute_objects import LIBRARY, OBJECT, linked, loaded, runtime_place
from flexc.runtime.key import key_of
from flexc.runtime.machine_code import CompiledKernel, CompiledModule, tool

PACKAGE = "nvidia-cutlass-dsl"
_compiling = threading.RLock()  # the DSL keeps the options of a compilation in one shared object
_ENTRY = "flexc_forward"


@dataclass(frozen=True)
class TensorArgument:
    """A tensor of a launch function.

    Attributes:
        sizes: numbers are fixed, names are equal where they are equal.
        bulk: the last dimension is contiguous; base and the other strides are multiples of 16 bytes.
        compact: contiguous. Otherwise any strides.
        align: of the base, in bytes; 0 for that of an element.
    """

    name: str
    dtype: str
    sizes: tuple[int | str, ...]
    bulk: bool = False
    compact: bool = False
    align: int = 0


@dataclass(frozen=True)
class NumberArgument:
    """A run-time number of a launch function: "float32", "int32" or "int64"."""

    name: str
    dtype: str


def tensor(
    name: str, dtype: str, sizes: tuple[int | str, ...], *, bulk: bool = False, compact: bool = False, align: int = 0
) -> TensorArgument:
    """See `TensorArgument`."""
    return TensorArgument(name, dtype, sizes, bulk, compact, align)


def number(name: str, dtype: str) -> NumberArgument:
    """See `NumberArgument`."""
    return NumberArgument(name, dtype)


Argument = TensorArgument | NumberArgument


@dataclass
class Launcher:
    """A `cute.jit` host function that launches kernels, and the arguments it is compiled for. Calling it compiles at the first call.

    Attributes:
        function: tensors and numbers in the order of `arguments`, then the stream.
        arch: for example "sm_90a".
        smem_bytes: shared memory of a block of threads, at most.
    """

    function: Callable[..., Any] | LaterFunction
    arch: str
    arguments: tuple[Argument, ...]
    smem_bytes: int = 0
    _ready: Callable[..., Any] | None = field(default=None, repr=False)
    _observed: tuple[str, Any] | None = field(default=None, repr=False)  # its name, and who is told: see `watch`

    def __call__(self, *values: Any) -> None:
        """Launch on the current stream. Tensors are PyTorch's, without gradient; the sizes and strides are checked."""
        ready = self._ready
        if ready is None:
            ready = self.prepare()
        ready(*values)

    def prepare(self) -> Callable[..., Any]:
        """The compiled function: from memory, from the disk cache, or compiled."""
        with _compiling:
            if self._ready is None:
                self._ready = self._kept()
            return self._ready

    def _kept(self) -> Callable[..., Any]:
        # Also where it was compiled just now: the DSL's own object passes a call through Python, the loaded one does not.
        entry = self.entry()
        found = loaded(entry, _ENTRY)
        return found or getattr(_cute().runtime.load_module(str(entry.path(OBJECT)), enable_tvm_ffi=True), _ENTRY)

    def entry(self) -> Entry:
        """The object file in the cache, compiled if it has none. FLEXC_CACHE_DIR and the like apply as to texts."""
        started, is_compiled = time.perf_counter(), False
        name, observer = self._observed or ("", None)
        store = cache_of(settings.current())
        key = key_of(
            source=_source_digest(self._place[0]),
            function=self._place[1],
            arguments=repr(self.arguments),
            arch=self.arch,
            version=_version(),
            environment=sorted((name, value) for name, value in os.environ.items() if name.startswith("CUTE_DSL_COMPILER")),
        )
        entry = store.get(key)
        if entry is None:
            if observer is not None:
                observer.missing(name)
            with store.lock(key):
                entry = store.get(key)
                if entry is None:
                    compiled, is_compiled = self.compiled(), True
                    entry = store.put(key, *_as_entry(compiled, self.arch))
        if observer is not None:
            observer.ready(name, is_compiled, time.perf_counter() - started)
        return entry

    @property
    def _place(self) -> tuple[str, str]:
        """File and name of the function."""
        if isinstance(self.function, LaterFunction):
            return self.function.path, self.function.name
        plain = _unwrapped(self.function)
        return plain.__code__.co_filename, plain.__name__

    def compiled(self, *options: str) -> Any:
        """The DSL's compiled object, made anew."""
        cute = _cute()
        function = self.function.made() if isinstance(self.function, LaterFunction) else self.function
        with _compiling, _architecture(self.arch), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the DSL's advice on long unrolled loops and its old names: not the user's concern
            stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
            text = " ".join(("--enable-tvm-ffi", f"--gpu-arch {self.arch}", *options))
            return cute.compile(function, *_fake(self.arguments), stream, options=text)


def watch(module: ModuleType, observer: Any) -> None:
    """Tell a `triton_binaries.Observer` of every object file of the module's launchers: before one is compiled, and when it is there."""
    for name, launcher in module.LAUNCHERS.items():
        launcher._observed = name, observer


@dataclass(frozen=True)
class CuteJob:
    """A module whose launchers are compiled into the disk cache, as plain data that JSON can carry to another process.

    Attributes:
        path: of the generated module; kernels: names of launchers.
    """

    path: str
    kernels: tuple[str, ...]

    @property
    def source(self) -> str:
        """Of the generated module."""
        return Path(self.path).read_text(encoding="utf-8")

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"path": self.path, "launchers": self.kernels})

    def compile(self, module: ModuleType) -> None:
        """Fill the disk cache. Needs no GPU."""
        for name in self.kernels:
            module.LAUNCHERS[name].entry()


def compile_module(module: ModuleType, names: Sequence[str] | None = None) -> CompiledModule:
    """Compile the launchers of a generated module for what they are declared for. Needs no GPU.

    Args:
        module: with `LAUNCHERS`: kernel name → Launcher.
        names: which kernels; default all.
    """
    return CompiledModule(tuple(_compile(name, module.LAUNCHERS[name]) for name in names or module.LAUNCHERS))


def _compile(name: str, launcher: Launcher) -> CompiledKernel:
    with tempfile.TemporaryDirectory() as folder, _captured_output() as said:
        # The wrapper of remarks prints ptxas's report, which says where products are serialised.
        compiled = launcher.compiled("--keep-ptx", "--keep-cubin", f"--dump-dir {folder}", "remarks{ptx}")
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    report = said()
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", tool("cuobjdump", cubin, "-res-usage"))
    registers, stack, local = (int(usage[i]) for i in (1, 2, 3)) if usage else (0, 0, 0)
    threads = re.search(r"\.(?:max|req)ntid (\d+)", ptx)
    remarks = sorted(set(re.findall(r"\(?C75\d\d\)?[^\n]*?(?= in (?:the )?function|\n|$)", report)))
    return CompiledKernel(
        name=name,
        ptx=ptx,
        cubin=cubin,
        registers=registers,
        spill_bytes=stack + local,
        smem_bytes=launcher.smem_bytes,
        threads=int(threads[1]) if threads else 0,
        remarks=tuple(remarks),
    )


# --- the DSL ----------------------------------------------------------------------------------------------------------------------------


@cache
def _cute() -> Any:
    try:
        import cutlass.cute as cute
        import cutlass.cute.runtime  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError as error:
        raise ToolchainError(
            f"the cute backend needs the packages {PACKAGE} >= 4.8 and apache-tvm-ffi: "
            f'pip install "{PACKAGE}[cu13]" apache-tvm-ffi ({error})'
        ) from None
    return cute


def _version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "none"


@contextlib.contextmanager
def _architecture(arch: str) -> Iterator[None]:
    """CUTE_DSL_ARCH while compiling: some constructors ask the DSL for its own architecture, not for the option's."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before


def _fake(arguments: Sequence[Argument]) -> list[Any]:
    """Stand-ins with symbolic sizes and strides, and numbers."""
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    cute = _cute()
    types = {
        "float16": cutlass.Float16,
        "bfloat16": cutlass.BFloat16,
        "float32": cutlass.Float32,
        "float64": cutlass.Float64,
        "int8": cutlass.Int8,
        "uint8": cutlass.Uint8,
        "int16": cutlass.Int16,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
    }
    symbols: dict[str, Any] = {}
    made: list[Any] = []
    for argument in arguments:
        kind = types[argument.dtype]
        if isinstance(argument, NumberArgument):
            made.append(kind(1))
            continue
        sizes = tuple(size if isinstance(size, int) else symbols.setdefault(size, cute.sym_int()) for size in argument.sizes)
        rank = len(sizes)
        if argument.compact:
            order = tuple(reversed(range(rank)))
            made.append(make_fake_compact_tensor(kind, sizes, stride_order=order, assumed_align=argument.align or kind.width // 8))
        elif argument.bulk:
            step = 16 * 8 // kind.width
            strides = (*(cute.sym_int64(divisibility=step) for _ in range(rank - 1)), 1)
            made.append(make_fake_tensor(kind, sizes, strides, assumed_align=16))
        else:
            strides = tuple(cute.sym_int64() for _ in range(rank))
            made.append(make_fake_tensor(kind, sizes, strides, assumed_align=argument.align or kind.width // 8))
    return made


def _as_entry(compiled: Any, arch: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Files and meta of the DSL's compiled object in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / OBJECT
        compiled.export_to_c(str(file), function_name=_ENTRY)
        files = {OBJECT: file.read_bytes()}
    library = linked(files[OBJECT])
    if library is not None:
        files[LIBRARY] = library
    return files, {"arch": arch, "backend": "cute", "runtime": runtime_place()}


def _source_digest(path: str) -> str:
    """Digest of a generated module and of the building blocks that it is made from."""
    digest = hashlib.sha256()
    for file in (Path(path), *sorted(Path(__file__).parent.glob("cute_*tiles.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@contextlib.contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """What is written to stdout and stderr meanwhile, by Python or by a library; afterwards the function given tells."""
    texts: list[str] = []
    printed = io.StringIO()
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(descriptor) for descriptor in (1, 2)]
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield lambda: texts[0]
        finally:
            for descriptor, copy in zip((1, 2), kept):
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            texts.append(file.read().decode(errors="replace") + printed.getvalue())
