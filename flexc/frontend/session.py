"""One tracing of one pair of functions: whose line is running, which inputs were met, which way the path goes."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, NoReturn

import torch

from flexc.errors import TraceError
from flexc.frontend.fork import Path
from flexc.frontend.guards import Guards, Source
from flexc.ir.graph import FLOAT32, INPUTS, INT32, INT64, Location, Node, ScalarInput, TensorInput, loaded_dtype, scalar, topological

_RESERVED = {*INPUTS, "scale", "q", "k", "v"}


class Retrace(BaseException):
    """Python itself needs the value of run-time numbers: trace again with `pinned` as constants. Not an error; users never see it."""

    def __init__(self, pinned: set[Source]):
        self.pinned = pinned


@dataclass(frozen=True)
class Slot:
    """A captured tensor that the graph reads: where it comes from and what the graph knows of it."""

    source: Source
    input: TensorInput


class Session:
    """State of one tracing.

    Attributes:
        guards: what must hold for the trace to be used again.
        tensors, scalars: the captured inputs so far, by slot.
        runs_numbers: whether captured numbers become run-time scalars (they are constants otherwise).
        pinned: numbers that stay constants all the same.
        path: the decisions of the run in progress.
        default_location: where the function in hand is defined, for what is met before it runs.
        made: tensors that the traced function itself made from nothing: constants.
    """

    def __init__(self, runs_numbers: bool, pinned: set[Source]):
        self.guards = Guards()
        self.runs_numbers = runs_numbers
        self.pinned = pinned
        self.path = Path()
        self.tensors: list[Slot] = []
        self.scalars: list[tuple[Source, ScalarInput]] = []
        self.scalar_values: list[int | float] = []
        self.made: dict[int, torch.Tensor] = {}
        self.user_codes: dict[int, CodeType] = {}
        self.default_location: Location | None = None
        self._slots: dict[Source, int] = {}
        self._scalar_slots: dict[Source, int] = {}
        self._names: set[str] = set()
        self._locations: dict[tuple[int, int], Location] = {}

    # --- where we are ---------------------------------------------------------------------------------------------------------------

    def add_code(self, code: CodeType) -> None:
        """Count the code, and all code inside it, as the user's."""
        self.user_codes[id(code)] = code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add_code(constant)

    def location(self) -> Location | None:
        """The innermost line of the user's that is running."""
        frame: Any = sys._getframe(1)
        codes = self.user_codes
        while frame is not None:
            if id(frame.f_code) in codes:
                key = (id(frame.f_code), frame.f_lineno)
                found = self._locations.get(key)
                if found is None:
                    found = self._locations[key] = line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
                return found
            frame = frame.f_back
        return self.default_location

    # --- inputs ---------------------------------------------------------------------------------------------------------------------

    def tensor_slot(self, source: Source, tensor: torch.Tensor) -> int:
        """The slot of a captured tensor; the same one for the same source."""
        if source not in self._slots:
            dtype = str(tensor.dtype).removeprefix("torch.")
            needs_grad = tensor.requires_grad and loaded_dtype(dtype) == FLOAT32
            self._slots[source] = len(self.tensors)
            self.tensors.append(Slot(source, TensorInput(self._unique(source.name), dtype, tensor.ndim, needs_grad)))
        return self._slots[source]

    def scalar_node(self, source: Source, value: int | float) -> Node:
        """The leaf for a run-time number. `source` must yield a Python number."""
        if source not in self._scalar_slots:
            if isinstance(value, float):
                dtype = FLOAT32
            else:
                dtype = INT32 if -(2**31) <= value < 2**31 else INT64
                self.guards.fits(source, 32 if dtype == INT32 else 64)
            self._scalar_slots[source] = len(self.scalars)
            self.scalars.append((source, ScalarInput(self._unique(source.name), dtype)))
            self.scalar_values.append(value)
        slot = self._scalar_slots[source]
        return scalar(slot, self.scalars[slot][1].dtype)

    def _unique(self, name: str) -> str:
        base = re.sub(r"\W", "_", name).strip("_") or "captured"
        base = f"_{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self._names or name in _RESERVED:
            count += 1
            name = f"{base}_{count}"
        self._names.add(name)
        return name

    # --- numbers that Python needs ---------------------------------------------------------------------------------------------------

    def pin(self, *nodes: Node) -> None:
        """Start again with the run-time numbers below `nodes` as constants. Returns if there is none."""
        slots = {n.attrs[0] for n in topological(nodes) if n.op == "scalar"}
        if slots:
            raise Retrace({self.scalars[slot][0] for slot in slots})


_running = threading.local()


def current() -> Session | None:
    """The tracing in progress in this thread."""
    return getattr(_running, "session", None)


def run(session: Session, body: Callable[[], Any]) -> Any:
    """`body()` with `session` as the tracing in progress."""
    before, _running.session = current(), session
    try:
        return body()
    finally:
        _running.session = before


def refuse(what: str, *, why: str = "", instead: str = "", where: Location | None = None) -> NoReturn:
    """Raise a TraceError at the user's line."""
    session = current()
    if where is None and session is not None:
        where = session.location()
    raise TraceError(what, where=where, why=why, instead=instead)


def line_of(file: str, line: int, module_globals: dict[str, Any] | None = None) -> Location:
    """The location with its text, as far as the file can be read."""
    return Location(file, line, linecache.getline(file, line, module_globals).strip())


def location_of(code: CodeType) -> Location:
    """Where a function is defined."""
    return line_of(code.co_filename, code.co_firstlineno)


def is_scalar_only(node: Node) -> bool:
    """Whether the value is the same for every score: it reads run-time numbers and constants, no input and no tensor."""
    return all(n.op not in ("input", "gather") for n in topological([node]))
