"""What this process compiled, why, and how long it took; and the refusal to compile any more under FLEXC_NO_COMPILE=1.

    print(flexc.compile_log())

A compilation is a generated module (kind "source": passes, plan, text), on a GPU the module that makes its block maps (kind "map"), or
machine code of one kernel of either (kind "binary"). All may be found on the disk instead: then nothing is compiled, and the log says so.
Nothing here runs in a call that finds its kernel in memory.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from flexc import settings
from flexc.errors import NoCompileError

_MOST_ENTRIES = 10_000
_MOST_VARIANTS = 1_000


@dataclass(frozen=True)
class Compilation:
    """One line of the log.

    Attributes:
        kind: "source", a generated module; "map", one that makes block maps; or "binary", machine code of one kernel.
        variant: what the user calls it; for a binary also the kernel.
        backend, target: who generated it, for which architecture.
        reason: why, in words, by comparison with what this process has compiled of the same functions before.
        loaded: it was found on the disk: nothing was compiled.
        seconds: of compiling, or of reading.
        key: of the module in the disk cache.
    """

    kind: str
    variant: str
    backend: str
    target: str
    reason: str
    loaded: bool
    seconds: float
    key: str


class CompileLog(Sequence[Compilation]):
    """Compilations in the order in which they happened; prints as a table."""

    def __init__(self, entries: Iterable[Compilation]):
        self._entries = tuple(entries)

    @property
    def compiled(self) -> CompileLog:
        """Those that compiled something, without what was found on the disk."""
        return CompileLog(e for e in self._entries if not e.loaded)

    def of(self, kind: str) -> CompileLog:
        """Those of one kind: "source", "map" or "binary"."""
        return CompileLog(e for e in self._entries if e.kind == kind)

    @property
    def seconds(self) -> float:
        """Time of all of them together."""
        return sum(e.seconds for e in self._entries)

    @overload
    def __getitem__(self, index: int) -> Compilation: ...
    @overload
    def __getitem__(self, index: slice) -> CompileLog: ...
    def __getitem__(self, index: int | slice) -> Compilation | CompileLog:
        return CompileLog(self._entries[index]) if isinstance(index, slice) else self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Compilation]:
        return iter(self._entries)

    def __repr__(self) -> str:
        return f"<{len(self)} compilations, {self.seconds:.2f} s>"

    def __str__(self) -> str:
        if not self._entries:
            return "nothing compiled"
        rows = [("#", "kind", "variant", "backend", "target", "ms", "key", "from", "reason")]
        for number, e in enumerate(self._entries, 1):
            origin = "disk" if e.loaded else "compiled"
            rows.append((str(number), e.kind, e.variant, e.backend, e.target, f"{e.seconds * 1e3:.1f}", e.key[:8], origin, e.reason))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(_aligned(cell, width, i in (0, 5)) for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
        compiled = self.compiled
        return "\n".join([*lines, f"{len(compiled)} compiled in {compiled.seconds:.2f} s, {len(self) - len(compiled)} from the disk"])


def _aligned(cell: str, width: int, is_number: bool) -> str:
    return cell.rjust(width) if is_number else cell.ljust(width)


_entries: deque[Compilation] = deque(maxlen=_MOST_ENTRIES)


def compile_log(*, reset: bool = False) -> CompileLog:
    """Every compilation of this process, or since the last reset (the last 10,000 of them).

    Args:
        reset: begin a new log after this one.
    """
    found = CompileLog(_entries)
    if reset:
        _entries.clear()
    return found


def record(entry: Compilation) -> None:
    """Add a line."""
    _entries.append(entry)


def refuse_if_forbidden(what: str, reason: str, backend: str, target: str, key: str) -> None:
    """Called before anything is compiled.

    Raises:
        NoCompileError: FLEXC_NO_COMPILE=1.
    """
    if settings.current().no_compile:
        raise NoCompileError(
            f"{what} would have to be compiled for {target} by the {backend} backend\n"
            f"  why: {reason}; the disk cache does not have it (key {key[:12]}), and FLEXC_NO_COMPILE=1 forbids to compile it\n"
            "  instead: compile it ahead with kernel.warmup(specs) under the same FLEXC_CACHE_DIR, or ship a cache that has it"
        )


@dataclass(frozen=True)
class BinaryLog:
    """Writes the machine code of one module into the log, or refuses it: what `runtime.triton_binaries.watch` tells of binaries.

    Attributes:
        as in Compilation.
    """

    variant: str
    backend: str
    target: str
    reason: str
    key: str

    def missing(self, kernel: str) -> None:
        """It would be compiled next."""
        what = f"machine code of {kernel} of {self.variant}"
        refuse_if_forbidden(what, "there is no binary for these arguments", self.backend, self.target, self.key)

    def ready(self, kernel: str, compiled: bool, seconds: float) -> None:
        """It was compiled, or found."""
        variant = f"{self.variant}: {kernel}"
        record(Compilation("binary", variant, self.backend, self.target, self.reason, not compiled, seconds, self.key))


# --- reasons --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What one compilation was asked for, as far as reasons speak of it.

    Attributes:
        captures: what the trace met (`frontend.Captures`).
        shapes, options: dataclasses.
        reads: what of the shapes reaches the code.
    """

    captures: Any
    backend: str
    target: str
    shapes: Any
    options: Any
    reads: Callable[[Any], tuple]


_history: OrderedDict[tuple, list[Request]] = OrderedDict()
_lock = threading.Lock()


def forget_history() -> None:
    """The next compilation of every function is a first one again."""
    with _lock:
        _history.clear()


def reason_for(request: Request) -> str:
    """Why this is compiled: how it differs from the nearest earlier request for the same functions. Remembers the request."""
    if not request.captures.functions:
        return "a compiled or exported program"
    with _lock:
        earlier = _history.setdefault(request.captures.functions, [])
        _history.move_to_end(request.captures.functions)
        if len(_history) > _MOST_VARIANTS:
            _history.popitem(last=False)
        found = [_differences(old, request) for old in reversed(earlier)]
        earlier.append(request)
        del earlier[:-64]
    if not found:
        return "first call"
    nearest = min(found, key=len)
    return "; ".join(nearest) if nearest else "no longer in memory"


def _differences(old: Request, new: Request) -> list[str]:
    found = _of_captures(old.captures, new.captures)
    if old.backend != new.backend:
        found.append(f"another backend: {new.backend}")
    elif old.reads(old.shapes) != new.reads(new.shapes):
        found += _of_shapes(old, new)
    if old.target != new.target:
        found.append(f"another target: {new.target}")
    return found + _of_options(old.options, new.options)


def _of_captures(old: Any, new: Any) -> list[str]:
    found = []
    before = {**old.arguments, **old.constants}
    for path, (name, value) in {**new.constants, **new.arguments}.items():
        was = before.get(path)
        if was is None:
            found.append(f"{name} is captured as a number")
        elif path in new.arguments:
            if path in old.constants:
                changed = "" if repr(was[1]) == repr(value) else f" changed from {was[1]} to {value}:"
                found.append(f"{name}{changed} becomes a run-time number")
        elif repr(was[1]) != repr(value):
            found.append(f"{name} changed from {was[1]} to {value}, and is compiled in: Python itself needs it, or it is a flexc.constant")
    for path, (name, kind) in new.tensors.items():
        was = old.tensors.get(path)
        if was is None:
            found.append(f"{name} is captured as a tensor")
        elif was[1] != kind:
            found.append(f"{name} was {was[1]}; is {kind}")
    if not found and new is not old:
        found.append("what the functions capture changed")
    return found


def _of_shapes(old: Request, new: Request) -> list[str]:
    if old.shapes.dtype != new.shapes.dtype:
        dtype = [f"another dtype: {new.shapes.dtype_name}"]
    else:
        dtype = []
    found = []
    reads = new.reads(new.shapes)
    for field in dataclasses.fields(new.shapes):
        before, after = getattr(old.shapes, field.name), getattr(new.shapes, field.name)
        # A size matters if the code for the new sizes would be another one without its change.
        if field.name != "dtype" and before != after and new.reads(dataclasses.replace(new.shapes, **{field.name: before})) != reads:
            words = f"q, k and v can {'' if after else 'no longer '}be read in bulk"
            found.append(words if field.name == "bulk" else f"{field.name} {before} → {after}")
    return dtype + found or ["other sizes"]


def _of_options(old: Any, new: Any) -> list[str]:
    found = []
    for field in dataclasses.fields(new):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before == after:
            continue
        if field.name == "tiles":
            tiles = ", ".join(f"{kernel} {tile}" for kernel, tile in after)
            found.append(f"other tiles: {tiles}" if tiles else "the computed tiles")
        else:
            found.append(f"{field.name} {before} → {after}")
    return found
