"""The stages in order, from a Python function to a loaded kernel; what is kept between calls, and what FLEXC_DUMP shows of them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flexc import backends, frontend, settings
from flexc.backends import Backend, Options, Shapes
from flexc.codegen.templates import template_source
from flexc.compile_log import BinaryLog, Compilation, Request, forget_history, reason_for, record, refuse_if_forbidden
from flexc.errors import InputError, SettingError, UnsupportedError
from flexc.inference.places import packed
from flexc.ir.graph import Graph, Node, Rewriter, make, topological
from flexc.later import Later
from flexc.runtime.cache import cache_of
from flexc.runtime.cute_module import load_cute_module
from flexc.runtime.key import key_of
from flexc.runtime.module import load_module
from flexc.target import KNOWN, Target

__all__ = ["Artifact", "Options", "Shapes", "compile_attention", "compile_for"]

ModuleFunction = Callable[..., Any]

passes: Any = Later("flexc.passes")  # for a compilation


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
        seconds: time spent on passes, plan and text.
        title: what the user calls the variant.
        because: why it was compiled, in words.
        unlaunched: of "forward" and "backward" what has not been launched yet, of a module that was printed just now: no cache has its
            machine code.
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
    title: str
    because: str
    unlaunched: set[str] = field(default_factory=set, repr=False)
    _module: ModuleType | None = field(default=None, repr=False)
    _backward: Artifact | None = field(default=None, repr=False)
    _decoding: dict[tuple, Artifact] = field(default_factory=dict, repr=False)

    @property
    def module(self) -> ModuleType:
        """The generated module, loaded at first use from the file at `path`."""
        if self._module is None:
            self._module = self.fresh_module()
        return self._module

    def fresh_module(self) -> ModuleType:
        """The generated module, loaded once more. Machine code that its launches compile is in the log."""
        module = (load_cute_module if self.backend.name == "cute" else load_module)(self.source, self.path)
        if self.backend.name == "triton" and not backends.is_interpreted():
            from flexc.runtime.triton_binaries import watch

            watch(module, BinaryLog(self.title, self.backend.name, self.target.arch, self.because, self.key))
        if self.backend.name == "cute":
            from flexc.runtime.cute_compile import watch as watch_cute

            watch_cute(module, BinaryLog(self.title, self.backend.name, self.target.arch, self.because, self.key))
        return module

    @cached_property
    def map_blocks(self) -> dict[str, tuple[int, int]]:
        """Block size of each map that the module's kernels walk."""
        return self.backend.blocks(self.plan)

    @cached_property
    def mask_alone(self) -> MaskAlone:
        """The mask without the score."""
        return MaskAlone.of(self.graph)

    def ptx(self) -> str:
        """PTX of all kernels. Needs no GPU."""
        return self._compiled().ptx()

    def sass(self) -> str:
        """Machine code of all kernels, disassembled. Needs no GPU."""
        return self._compiled().sass()

    def resources(self) -> str:
        """Registers, stack, shared memory and tile of each kernel, one line each. Needs no GPU."""
        return self._compiled().resources()

    def for_backward(self, shapes: Shapes, options: Options) -> Artifact:
        """The artifact whose module runs the backward pass: this one, or that of the first backend which does it for this one."""
        if not self.backend.backward_by:
            return self
        with _lock:
            if self._backward is None:
                target = _as_code_sees(self.target)
                other, _ = backends.backward_of(self.backend, self.lowered, shapes, target, options)
                because = f"the backward pass of {self.backend.name}"
                if other.name != self.backend.name:
                    options = dataclasses.replace(options, tiles=())
                self._backward = compile_attention(self.traced, shapes, self.target, other, because, options, self.title, because)
            return self._backward

    def for_decoding(self, shapes: Shapes, options: Options) -> Artifact:
        """The artifact of the split kernel, for few queries against many keys. It has no backward pass."""
        kind = backends.DECODE.reads(shapes)
        found = self._decoding.get(kind)
        if found is None:
            with _lock:
                because = "few queries against many keys: the split kernel"
                reason = "few queries against many keys and no gradient: triton, split over the keys, query heads packed; otherwise "
                reason += f"{self.backend.name}: {self.reason}"
                options = dataclasses.replace(options, tiles=tuple(pair for pair in options.tiles if pair[0] == "decode"))
                graph = packed(self.traced, shapes.group)
                found = compile_attention(graph, shapes, self.target, backends.DECODE, reason, options, self.title, because)
                self._decoding[kind] = found
        return found

    def _compiled(self) -> Any:
        if self.backend.name == "cute":
            from flexc.runtime.cute_compile import compile_module as compile_cute

            return compile_cute(self.module)
        if self.backend.name != "triton":
            raise InputError(f"the {self.backend.name} backend has no machine code: expected --emit ir or --emit source")
        from flexc.codegen.triton import signature
        from flexc.runtime.triton_compile import compile_module

        return compile_module(self.module, self.target.capability, lambda names: signature(names, self.lowered, self.plan))


@dataclass(frozen=True, eq=False)
class MaskAlone:
    """A mask apart from the score that it was traced with: equal masks have one node, whatever else their graphs read.

    Attributes:
        graph: its only output, if there is a mask, is "mask".
        tensor_slots, scalar_slots: what the mask reads, in the order of `graph`, as slots of the whole graph.
    """

    graph: Graph
    tensor_slots: tuple[int, ...]
    scalar_slots: tuple[int, ...]

    @staticmethod
    def of(whole: Graph) -> MaskAlone:
        """The mask of a graph."""
        if whole.mask is None:
            return MaskAlone(Graph(()), (), ())
        nodes = topological([whole.mask])
        slots = {op: tuple(dict.fromkeys(n.attrs[0] for n in nodes if n.op == op)) for op in ("gather", "scalar")}

        def renumber(node: Node) -> Node:
            if node.op not in slots:
                return node
            return make(node.op, node.args, (slots[node.op].index(node.attrs[0]),), node.dtype, node.where)

        mask = Rewriter(renumber)(whole.mask)
        tensors = tuple(whole.tensors[slot] for slot in slots["gather"])
        scalars = tuple(whole.scalars[slot] for slot in slots["scalar"])
        return MaskAlone(Graph((("mask", mask),), tensors, scalars), slots["gather"], slots["scalar"])


def compile_attention(
    traced: Graph, shapes: Shapes, target: Target, backend: Backend, reason: str, options: Options, title: str, because: str = "asked for"
) -> Artifact:
    """A traced graph through every stage. See the module for the order.

    Args:
        reason: why this backend; because: why anything is compiled, for the log.

    Raises:
        NoCompileError: it is not in the disk cache, and FLEXC_NO_COMPILE=1.
    """
    started = time.perf_counter()
    claim_lines(traced)
    graph = passes.run(traced)  #                       graph → graph, verified after every pass
    lowered = backend.lower(graph)  #                   derivative factors; the backend's own domain
    code_target = _as_code_sees(target)
    try:
        plan = backend.plan(lowered, shapes, code_target, options)  # every choice, as plain data
    except UnsupportedError as error:
        if backend.otherwise is None:
            raise
        reason = f"a {target.arch} GPU: {backend.otherwise.name}, because of {error}"
        return compile_attention(traced, shapes, target, backend.otherwise, reason, options, title, because)
    if backend.backward_by:
        other, why = backends.backward_of(backend, lowered, shapes, code_target, options)
        reason = f"{reason}; {other.name} runs the backward pass: {why}" if other.name != backend.name else reason
    key = _key(traced, lowered, plan, code_target, backend, title)
    is_printed = False

    def emit() -> str:
        nonlocal is_printed
        is_printed = True
        return backend.emit(lowered, plan, code_target, title)

    def missing(damage: str | None) -> None:
        nonlocal because
        because = f"{because}; the entry in the disk cache is damaged: {damage}" if damage else because
        refuse_if_forbidden(title, because, backend.name, target.arch, key)

    # kernel source: the cache's; the backend prints it if the cache has none
    source, path = _kept(key, missing, emit, plan, target, backend)
    if settings.current().override is not None:
        reason = f"{reason}; FLEXC_OVERRIDE replaces its source by {path}"
    seconds = time.perf_counter() - started
    record(Compilation("source", title, backend.name, target.arch, because, not is_printed, seconds, key))
    artifact = Artifact(traced, graph, lowered, plan, source, backend, reason, target, key, path, seconds, title, because)
    if is_printed:
        artifact.unlaunched |= {"forward", "backward"}
    _dump(artifact)
    return artifact


def _as_code_sees(target: Target) -> Target:
    """The target without its name and rates, which no code depends on; machines of one architecture share what was compiled for it.

    A part with the figures that are published for its architecture is the published one. Its L2 cache may differ by a quarter: drivers
    count it in several ways, and it only guides the order of work.
    """
    known = KNOWN.get(target.arch, target)
    figures = ("sm_count", "smem_bytes", "regs_per_sm")
    is_known = all(getattr(target, name) == getattr(known, name) for name in figures)
    if is_known and 4 * abs(target.l2_bytes - known.l2_bytes) <= known.l2_bytes:
        target = known
    return dataclasses.replace(target, name="", peak_tflops=0.0, dram_gb_per_s=0.0)


def _because(trace: Any, shapes: Shapes, target: Target, backend: Backend, options: Options) -> str:
    request = Request(trace.captures, backend.name, target.arch, shapes, options, backend.reads)
    return reason_for(request)


def claim_lines(traced: Graph) -> None:
    """Passes hand on the lines that nodes hold, and a function traced since may have given its own to nodes that both have."""
    for node, line in traced.lines.items():
        make(node.op, node.args, node.attrs, node.dtype, line)


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
    if direction not in _KERNELS:
        raise InputError(f"unknown direction {direction!r}: expected " + ", ".join(f'"{known}"' for known in _KERNELS))
    if backend == "auto" and not target.is_gpu:
        backend = "cpu"
    chosen, reason = backends.choose(backend, None, target.arch)
    if chosen is backends.TRITON and not target.is_gpu:
        raise InputError(f'the triton backend compiles for a GPU: expected a target such as "sm_90a", got {target.arch!r}')
    if chosen is backends.CPU and target.is_gpu:
        raise InputError(f'the cpu backend compiles for the CPU: expected the target "cpu", got {target.arch!r}')
    trace, _ = frontend.trace(score_mod, mask_mod)
    options = options or Options()
    because = _because(trace, shapes, target, chosen, options)
    artifact = compile_attention(trace.graph, shapes, target, chosen, reason, options, title_of(score_mod, mask_mod), because)
    if direction == "bwd":
        artifact = artifact.for_backward(shapes, options)
    return _Directed(**{f.name: getattr(artifact, f.name) for f in dataclasses.fields(artifact)}, kernels=_KERNELS[direction])


_KERNELS = {
    "fwd": ("forward_kernel",),
    "bwd": ("row_sums_kernel", "dq_kernel", "dkv_kernel", "ranks_kernel", "backward_kernel", "convert_kernel", "sum_bins_kernel"),
}


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
    current = settings.current()
    key = (trace, backend.name, reason, target, backend.reads(shapes), options, current.dump, current.override)
    found = _artifacts.get(key)
    if found is None:
        with _lock:
            found = _artifacts.get(key)
            if found is None:
                because = _because(trace, shapes, target, backend, options)
                found = compile_attention(trace.graph, shapes, target, backend, reason, options, title, because)
                _artifacts[key] = found
                if len(_artifacts) > _MOST_ARTIFACTS:
                    _artifacts.popitem(last=False)
    return found


def clear_cache() -> None:
    """Forget every trace and artifact in memory. The disk cache stays."""
    with _lock:
        _artifacts.clear()
    frontend.clear_cache()
    forget_history()


# --- on disk ------------------------------------------------------------------------------------------------------------------------


def _key(traced: Graph, lowered: Graph, plan: Any, target: Target, backend: Backend, title: str) -> str:
    return key_of(
        title=title,
        graph=text_without_lines(lowered),
        lines=lines_of(traced),
        plan=dataclasses.asdict(plan),
        target=dataclasses.asdict(target),
        backend=backend.name,
        generator=generator_digest(backend),
        versions={name: _version(name) for name in backend.packages},
        settings=settings.current().key(),
    )


def text_without_lines(graph: Graph) -> str:
    """For a cache key, the graph without the user's file and line of each node, which `lines_of` has."""
    return re.sub(" *  # .*", "", str(graph))


def lines_of(graph: Graph) -> list[str]:
    """The user's lines that a graph was made from: texts that are printed from it quote them."""
    return sorted({str(location) for location in graph.lines.values()})


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def generator_digest(backend: Backend) -> str:
    """Digest of the templates and of the code that fills them: a changed generator never meets an old text."""
    package = Path(__file__).parent
    rooms = (package / "codegen" / backend.name, package / "codegen", package / "passes", package / "ir")
    files = sorted(file for room in rooms for file in room.glob("*.py"))
    digest = hashlib.sha256()
    for name in backend.templates:
        digest.update(template_source(name).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _kept(
    key: str, missing: Callable[[str | None], None], emit: Callable[[], str], plan: Any, target: Target, backend: Backend
) -> tuple[str, Path]:
    """The text and the file to load it from: the cache's, made by `emit` if it has none, or under FLEXC_OVERRIDE the user's.

    `missing` is told before anything is made or locked, with what is wrong with the entry if there is one; it may raise.
    """
    current = settings.current()
    if current.override is not None:
        file = current.override / _OVERRIDDEN
        if not file.is_file():
            raise SettingError(f"FLEXC_OVERRIDE: expected {file}, which FLEXC_DUMP writes")
        return file.read_text(encoding="utf-8"), file
    store = cache_of(current)
    entry = store.get(key)
    if entry is None:
        missing(store.damage(key))
        with store.lock(key):
            entry = store.get(key) or store.put(
                key, {"kernel.py": emit()}, {"plan": str(plan), "target": target.arch, "backend": backend.name}
            )
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
