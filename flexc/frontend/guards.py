"""Where captured values come from, and what must hold of them for a trace to be used again.

A `Source` is a path from the user's function to a captured value: closure cell, global, default, attribute, item. `Guards` collects, while
tracing, the checks on such paths and the leaves that become inputs. Both are printed as one Python function per trace, so that binding a
trace to new functions costs about a tenth of a microsecond for each path.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Source:
    """One step of a path: `read` is Python text in which {0} stands for the parent's value and {1} for the key."""

    parent: Source | None
    read: str
    key: Any = None

    def attribute(self, name: str) -> Source:
        """The attribute `name` of the value."""
        return Source(self, f"{{0}}.{name}") if name.isidentifier() else Source(self, "getattr({0}, {1})", name)

    def item(self, key: Any) -> Source:
        """The element `key` of a list, tuple, dict or object with `__getitem__`."""
        return Source(self, "{0}[{1}]", key)

    def cell(self, index: int, name: str) -> Source:
        """The content of closure cell `index`, which the user calls `name`."""
        return Source(self, f"{{0}}.__closure__[{index}].cell_contents", name)

    def apply(self, text: str) -> Source:
        """Something computed from the value, such as "{0}.item()"."""
        return Source(self, text)

    @property
    def name(self) -> str:
        """What the user calls the value, as far as the path tells."""
        if self.parent is None:
            return self.read
        if isinstance(self.key, str):
            return self.key
        if isinstance(self.key, int):
            return f"{self.parent.name}_{self.key}"
        last = self.read.rpartition(".")[2]
        return last if last.isidentifier() and not last.startswith("__") else self.parent.name

    def __str__(self) -> str:
        return self.read.format(self.parent, repr(self.key)) if self.parent is not None else self.read


@dataclass(frozen=True)
class _Check:
    """`text` is a condition on {v} that means "does not hold"; {c} is `constant`, {w} the value of `other`."""

    source: Source
    text: str
    constant: Any
    about_number: bool = False
    other: Source | None = None


class Guards:
    """The checks of one trace, in the order in which the captured values were met.

    Attributes:
        numbers: captured numbers that must be these, by source.
        kinds: what must hold of captured tensors, in words, by source.
    """

    def __init__(self) -> None:
        self.numbers: dict[Source, int | float] = {}
        self.kinds: dict[Source, str] = {}
        self._checks: dict[tuple, _Check] = {}
        self._predicates: list[str] = []

    @property
    def checks(self) -> tuple[_Check, ...]:
        """The conditions on single values."""
        return tuple(self._checks.values())

    @property
    def predicates(self) -> tuple[str, ...]:
        """The conditions on run-time numbers, as Python text over s0, s1, …."""
        return tuple(self._predicates)

    def _add(self, check: _Check) -> None:
        key = (check.source, check.text, id(check.constant), check.other)
        self._checks.setdefault(key, check)

    def identical(self, source: Source, value: Any) -> None:
        """The value is this very object."""
        self._add(_Check(source, "{v} is not {c}", value))

    def same(self, source: Source, other: Source) -> None:
        """Both paths lead to one object."""
        if source != other:
            self._add(_Check(source, "{v} is not {w}", None, other=other))

    def has_type(self, source: Source, kind: type) -> None:
        """The value is of exactly this type."""
        self._add(_Check(source, "{v}.__class__ is not {c}", kind))

    def equals(self, source: Source, value: Any) -> None:
        """The value equals this one (of the same type, checked apart)."""
        self._add(_Check(source, "{v} != {c}", value))

    def runs(self, source: Source, code: types.CodeType) -> None:
        """The value is a Python function with this code."""
        self._add(_Check(source, "{v}.__code__ is not {c}", code))

    def has_length(self, source: Source, length: int) -> None:
        """The container has this many elements."""
        self._add(_Check(source, "len({v}) != {c}", length))

    def has_keys(self, source: Source, keys: tuple) -> None:
        """The dict has these keys in this order."""
        self._add(_Check(source, "tuple({v}) != {c}", keys))

    def contains(self, source: Source, key: Any, present: bool) -> None:
        """Whether the dict has the key."""
        self._add(_Check(source, "{c} not in {v}" if present else "{c} in {v}", key))

    def lacks_attribute(self, source: Source, name: str) -> None:
        """The object has no attribute of this name."""
        self._add(_Check(source, "hasattr({v}, {c})", name))

    def truth(self, source: Source, truth: bool) -> None:
        """bool() of the value."""
        self._add(_Check(source, "bool({v}) is not {c}", truth))

    def number(self, source: Source, value: int | float) -> None:
        """The number is this one; NaN equals itself and -0.0 is not 0.0."""
        self.numbers[source] = value
        if isinstance(value, float) and math.isnan(value):
            self._add(_Check(source, "{v} == {v}", None, True))
        elif isinstance(value, float) and value == 0.0:
            text = "({v} != 0.0 or copysign(1.0, {v}) != {c})"
            self._add(_Check(source, text, math.copysign(1.0, value), True))
        else:
            self._add(_Check(source, "{v} != {c}", value, True))

    def fits(self, source: Source, bits: int) -> None:
        """The integer is representable in so many bits, and not in half of them where that was promised."""
        limit = 2 ** (bits - 1)
        self._add(_Check(source, f"not {-limit} <= {{v}} < {limit}", None, True))
        if bits == 64:
            self._add(_Check(source, f"{-(2**31)} <= {{v}} < {2**31}", None, True))

    def tensor(self, source: Source, tensor: torch.Tensor) -> None:
        """The tensor has this dtype, rank, kind of device and need of a gradient."""
        constant = (tensor.dtype, tensor.ndim, tensor.device.type, tensor.requires_grad)
        dtype, gradient = str(tensor.dtype).removeprefix("torch."), ", requires a gradient" if tensor.requires_grad else ""
        self.kinds[source] = f"{dtype}, {tensor.ndim} dimensions, {tensor.device.type}{gradient}"
        self._add(_Check(source, "not isinstance({v}, Tensor)", None))
        self._add(_Check(source, "({v}.dtype, {v}.ndim, {v}.device.type, {v}.requires_grad) != {c}", constant))

    def array(self, source: Source, array: np.ndarray) -> None:
        """The NumPy array has these contents."""
        constant = (array.dtype, array.shape, array.tobytes())
        self._add(_Check(source, "({v}.dtype, {v}.shape, {v}.tobytes()) != {c}", constant))

    def predicate(self, text: str) -> None:
        """A condition on run-time numbers, as Python text over s0, s1, …, that must hold."""
        if text not in self._predicates:
            self._predicates.append(text)

    def compile(
        self, tensors: list[Source], scalars: list[Source], all_scalars: list[Source]
    ) -> tuple[Callable[..., Any], Callable[..., bool]]:
        """The reader and the matcher of structure, as functions of (score_mod, mask_mod).

        The reader returns (tensors, scalars) or None; the matcher says whether everything holds but the values of numbers.

        Args:
            tensors, scalars: what the graph reads.
            all_scalars: the numbers that predicates call s0, s1, ….
        """
        return self._text(tensors, scalars, all_scalars, True), self._text([], [], [], False)

    def _text(self, tensors: list[Source], scalars: list[Source], all_scalars: list[Source], exact: bool) -> Callable[..., Any]:
        lines: list[str] = []
        constants: list[Any] = []
        known: dict[Source, str] = {}

        def literal(value: Any) -> str:
            if value is None or type(value) in (bool, int, str):
                return repr(value)
            constants.append(value)
            return f"c[{len(constants) - 1}]"

        def variable(source: Source) -> str:
            if source.parent is None:
                return source.read
            if source not in known:
                text = source.read.format(variable(source.parent), literal(source.key))
                known[source] = f"v{len(known)}"
                lines.append(f"{known[source]} = {text}")
            return known[source]

        for check in self._checks.values():
            if check.about_number and not exact:
                continue
            other = "" if check.other is None else variable(check.other)
            condition = check.text.format(v=variable(check.source), c=literal(check.constant), w=other)
            lines.append(f"if {condition}: return None")
        if exact:
            for slot, source in enumerate(all_scalars):
                if self._predicates:
                    lines.append(f"s{slot} = {variable(source)}")
            lines += [f"if not ({text}): return None" for text in self._predicates]
            tuples = ["(" + "".join(f"{variable(source)}, " for source in sources) + ")" for sources in (tensors, scalars)]
            lines.append(f"return {tuples[0]}, {tuples[1]}")
        else:
            lines.append("return True")
        body = "\n        ".join(lines)
        text = f"def read(score, mask):\n    try:\n        {body}\n    except ERRORS:\n        return None\n"
        namespace: dict[str, Any] = {
            "c": constants,
            "copysign": math.copysign,
            "math": math,
            "Tensor": torch.Tensor,
            "from_numpy": torch.from_numpy,
            # What reading a path that has gone can raise; ValueError is an empty closure cell.
            "ERRORS": (AttributeError, LookupError, TypeError, ValueError, ArithmeticError),
        }
        exec(compile(text, "<guards>", "exec"), namespace)
        return namespace["read"]
