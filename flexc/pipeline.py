"""The stages in order, from a Python function to a loaded kernel; what is kept between calls, and what FLEXC_DUMP shows of them."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flexc import backends, frontend, passes, settings
from flexc.backends import Backend, Options, Shapes
from flexc.codegen.templates import template_source
from flexc.errors import InputError, SettingError
from flexc.ir.graph import Graph
from flexc.runtime.cache import cache_of
from flexc.runtime.key import key_of
from flexc.runtime.module import load_module
from flexc.target import Target

__all__ = ["Artifact", "Options", "Shapes", "compile_attention", "compile_for"]

ModuleFunction = Callable[..., Any]


@dataclass(eq=False)
class Artifact:
    """One compiled variant: every stage, as attributes that print as text.

    Attributes:
        traced: the graph as the frontend made it; `graph`: after the passes; `lowered`: as the backend prints it.
        plan: every choice, as data.
        source: text of the generated module.
        backend, reason: who generated it, and why that one.
        target: what it is for.
        key: digest of everything that the module depends on.
        path: the file that the module was loaded from.
        seconds: time spent on passes, plan, text and loading.
    """

    traced: Graph
    graph: Graph
    lowered: Graph
    plan: Any
    source: str
    backend: Backend
    reason: str
    target: Target
    key: str
    path: Path
    seconds: float
    _module: ModuleType | None = field(default=None, repr=False)

    @property
    def module(self) -> ModuleType:
        """The generated module, loaded at first use from the file at `path`."""
        if self._module is None:
            self._module = load_module(self.source, self.path)
        return self._module

    def ptx(self) -> str:
        """PTX of all kernels. Needs no GPU."""
        return self._compiled().ptx()

    def sass(self) -> str:
        """Machine code of all kernels, disassembled. Needs no GPU."""
        return self._compiled().sass()

    def resources(self) -> str:
        """Registers, stack, shared memory and tile of each kernel, one line each. Needs no GPU."""
        return self._compiled().resources()

    def _compiled(self) -> Any:
        if self.backend is not backends.TRITON:
            raise InputError(f"the {self.backend.name} backend has no machine code: expected --emit ir or --emit source")
        from flexc.codegen.triton import signature
        from flexc.runtime.triton_compile import compile_module

        return compile_module(self.module, self.target.capability, lambda names: signature(names, self.lowered, self.plan))


def compile_attention(traced: Graph, shapes: Shapes, target: Target, backend: Backend, reason: str, options: Options, title: str) -> Artifact:
    """A traced graph through every stage. See the module for the order."""
    started = time.perf_counter()
    graph = passes.run(traced)  #                       graph → graph, verified after every pass
    lowered = backend.lower(graph)  #                   derivative factors; the backend's own domain
    plan = backend.plan(lowered, shapes, target, options)  # every choice, as plain data
    key = _key(lowered, plan, target, backend)
    source = backend.emit(lowered, plan, target, title)  # kernel source
    source, path = _kept(key, source, plan, target, backend)
    artifact = Artifact(traced, graph, lowered, plan, source, backend, reason, target, key, path, time.perf_counter() - started)
    _dump(artifact)
    return artifact


def compile_for(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    *,
    shapes: Shapes,
    target: Target,
    backend: str = "auto",
    direction: str = "fwd",
    options: Options | None = None,
) -> Artifact:
    """Compile for a target that need not be in this machine.

    Args:
        direction: "fwd" or "bwd"; a module holds both, machine code is shown of the one asked for.

    Raises:
        InputError, UnsupportedError, TraceError: as for a call.
    """
    if backend == "auto" and not target.is_gpu:
        backend = "cpu"
    chosen, reason = backends.choose(backend, None)
    if chosen is backends.TRITON and not target.is_gpu:
        raise InputError(f'the triton backend compiles for a GPU: expected a target such as "sm_90a", got {target.arch!r}')
    trace, _ = frontend.trace(score_mod, mask_mod)
    artifact = compile_attention(trace.graph, shapes, target, chosen, reason, options or Options(), title_of(score_mod, mask_mod))
    artifact_kernels = {"fwd": ("forward_kernel",), "bwd": ("row_sums_kernel", "dq_kernel", "dkv_kernel")}
    return _Directed(**{f.name: getattr(artifact, f.name) for f in dataclasses.fields(artifact)}, kernels=artifact_kernels[direction])


@dataclass(eq=False)
class _Directed(Artifact):
    kernels: tuple[str, ...] = ()

    def _compiled(self) -> Any:
        return super()._compiled().only(self.kernels)


def title_of(score_mod: Any, mask_mod: Any) -> str:
    """What the user calls a variant, for the head of its source."""
    names = [getattr(f, "__name__", type(f).__name__) for f in (score_mod, mask_mod) if f is not None]
    return " with mask ".join(names) if names else "plain attention"


# --- in memory ----------------------------------------------------------------------------------------------------------------------

_MOST_ARTIFACTS = 1024
_artifacts: OrderedDict[tuple, Artifact] = OrderedDict()
_lock = threading.RLock()


def artifact_for(trace: Any, shapes: Shapes, target: Target, backend: Backend, reason: str, options: Options, title: str) -> Artifact:
    """The artifact for a trace, compiled at the first call with these shapes as far as they reach the code."""
    lengths = (shapes.q_len, shapes.kv_len) if backend is backends.CPU else ()
    key = (trace, backend.name, target.arch, shapes.dtype, shapes.head_dim, shapes.head_dim_v, shapes.group, shapes.bulk, lengths, options)
    found = _artifacts.get(key)
    if found is None:
        with _lock:
            found = _artifacts.get(key)
            if found is None:
                found = compile_attention(trace.graph, shapes, target, backend, reason, options, title)
                _artifacts[key] = found
                if len(_artifacts) > _MOST_ARTIFACTS:
                    _artifacts.popitem(last=False)
    return found


def clear_cache() -> None:
    """Forget every trace and artifact in memory. The disk cache stays."""
    with _lock:
        _artifacts.clear()
    frontend.clear_cache()


# --- on disk ------------------------------------------------------------------------------------------------------------------------


def _key(lowered: Graph, plan: Any, target: Target, backend: Backend) -> str:
    return key_of(
        graph=str(lowered),
        lines=sorted({str(location) for location in lowered.lines.values()}),
        plan=dataclasses.asdict(plan),
        target=dataclasses.asdict(target),
        backend=backend.name,
        generator=_generator_digest(backend),
        versions={name: _version(name) for name in backend.packages},
        settings=settings.current().key(),
    )


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _generator_digest(backend: Backend) -> str:
    """Digest of the templates and of the code that fills them: a changed generator never meets an old text."""
    package = Path(__file__).parent
    files = sorted([*(package / "codegen" / backend.name).glob("*.py"), *(package / "passes").glob("*.py"), *(package / "ir").glob("*.py")])
    digest = hashlib.sha256()
    for name in backend.templates:
        digest.update(template_source(name).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _kept(key: str, source: str, plan: Any, target: Target, backend: Backend) -> tuple[str, Path]:
    """The text and the file to load it from: the cache's, or under FLEXC_OVERRIDE the user's."""
    current = settings.current()
    if current.override is not None:
        file = current.override / _OVERRIDDEN
        if not file.is_file():
            raise SettingError(f"FLEXC_OVERRIDE: expected {file}, which FLEXC_DUMP writes")
        return file.read_text(encoding="utf-8"), file
    store = cache_of(current)
    entry = store.get(key)
    if entry is None:
        with store.lock(key):
            entry = store.get(key) or store.put(key, {"kernel.py": source}, {"plan": str(plan), "target": target.arch, "backend": backend.name})
    return entry.text("kernel.py"), entry.path("kernel.py")


_OVERRIDDEN = "5-kernel.py"


def _dump(artifact: Artifact) -> None:
    folder = settings.current().dump
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "1-trace.ir": artifact.traced,
        "2-passes.ir": artifact.graph,
        "3-lowered.ir": artifact.lowered,
        "4-plan.txt": artifact.plan,
        _OVERRIDDEN: artifact.source,
    }
    for name, text in texts.items():
        (folder / name).write_text(f"{text}\n" if not str(text).endswith("\n") else str(text), encoding="utf-8")


def target_of(device: torch.device) -> Target:
    """The target of a device; for Triton's interpreter, a Hopper part stands in for the CPU."""
    if device.type == "cpu" and backends.is_interpreted():
        return Target.parse("sm_90a")
    return Target.of(device)
