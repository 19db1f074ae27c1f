"""A variant as text: the graph in the form of `ir.text`, and the options. What the operators (`flexc.operators`) take in place of a kernel.

There is no table of live kernels, so nothing has to be kept alive for a compiled program: kernels may be collected, copied and pickled, an
exported program may be saved, and runs wherever `import flexc` ran. `variant_of` and `variant_from` keep what was made of recent texts, and
make it again where it was dropped.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from flexc import frontend
from flexc.errors import UnsupportedError
from flexc.ir.graph import FLOAT32, Graph, inputs_of, loaded_dtype
from flexc.ir.text import parse_graph

if TYPE_CHECKING:
    from flexc.api import Kernel
    from flexc.launch import Launch

Tensor = torch.Tensor

_MOST_VARIANTS = 1024


@dataclass(eq=False)
class Variant:
    """A graph with the options that it is run with.

    Attributes:
        text: all of it, as the operators take it.
        trace: the graph.
        runner: a kernel with these options; its own functions are never asked.
        users: kernels that were traced to it, weakly: what ran last is theirs to show.
    """

    text: str
    trace: frontend.Trace
    runner: Kernel
    users: list[weakref.ref[Kernel]] = field(default_factory=list)

    def serve(self, kernel: Kernel) -> None:
        """Have the kernel show what runs."""
        self.users[:] = [user for user in self.users if user() not in (None, kernel)] + [weakref.ref(kernel)]

    def ran(self, launch: Launch, tensors: tuple[Tensor, ...], device: torch.device) -> None:
        """Show it to the users."""
        for user in self.users:
            kernel = user()
            if kernel is not None:
                kernel._last = (launch, tensors, device)

    @property
    def graph(self) -> Graph:
        """What is computed, before the passes."""
        return self.trace.graph

    @cached_property
    def gradient_slots(self) -> tuple[int, ...]:
        """The captured tensors that the backward operator returns a gradient of."""
        return tuple(slot for slot, tensor in enumerate(self.graph.tensors) if tensor.needs_grad)

    @cached_property
    def reads_batch(self) -> bool:
        """Whether a batch entry is computed otherwise for being at another index."""
        return any("batch" in inputs_of(node) for _, node in self.graph.outputs)

    def numbers(self, ints: Sequence[int], floats: Sequence[Tensor]) -> tuple[tuple[int | float, ...], float | None]:
        """The scalars in the order of the graph, and the scale if it is among them."""
        if not floats and not self.graph.scalars:
            return (), None
        whole, real = list(ints), [x.item() for x in floats]
        scalars = tuple(real.pop(0) if s.dtype == FLOAT32 else whole.pop(0) for s in self.graph.scalars)
        for spec, value in zip(self.graph.scalars, scalars):
            if spec.dtype != FLOAT32 and not -(2**31) <= value < 2**31 and spec.dtype != "int64":
                raise UnsupportedError(f"the captured integer {spec.name} was compiled for 32 bits, got {value}: on every backend")
        return scalars, real[0] if real else None


_variants: OrderedDict[Any, Variant] = OrderedDict()  # by text, and by what the text was made from
_lock = threading.RLock()


def _kept(key: Any, make: Any) -> Variant:
    with _lock:
        found = _variants.get(key)
        if found is None:
            found = make()
            _variants[key] = _variants[found.text] = found
            while len(_variants) > _MOST_VARIANTS:
                _variants.popitem(last=False)
        else:
            _variants.move_to_end(key)
        return found


def variant_of(kernel: Kernel, trace: frontend.Trace, *, every_gradient: bool = False) -> Variant:
    """The variant of a kernel and of the trace of its functions.

    Args:
        every_gradient: ask for the gradients of all captured tensors of floats: a functorch transform may want them, which `requires_grad`
            does not tell.
    """
    options = (*(getattr(kernel, f"_{name}") for name in _OPTIONS[:-1]), kernel.__name__)

    def make() -> Variant:
        described = _with_every_gradient(trace) if every_gradient else trace
        lasting: dict[str, Any] = dict(zip(_OPTIONS, options))
        graph = re.sub(r" *#.*", "", str(described.graph))  # without the user's lines: where they stand in a file is no matter here
        text = json.dumps({**lasting, "graph": graph})
        made, older = Variant(text, described, _runner(lasting)), _variants.get(text)
        if older is not None:  # of another trace: programs that hold the text go on with this one, which eager calls have compiled
            made.users = older.users
        return made

    return _kept((trace, options, every_gradient), make)


def variant_from(text: str) -> Variant:
    """The variant that a text says."""
    return _variants.get(text) or _kept(text, lambda: _parsed(text))


_OPTIONS = ("backend", "autotune", "precision", "deterministic", "batch_invariant", "title")


def _parsed(text: str) -> Variant:
    options = json.loads(text)
    graph = parse_graph(options.pop("graph"))
    return Variant(text, trace_of_graph(graph), _runner(options))


def trace_of_graph(graph: Graph) -> frontend.Trace:
    """A graph as a trace that no function is known for."""
    return frontend.Trace(graph, True, frontend.Captures(), _reads_nothing, _reads_nothing, frozenset())


def _reads_nothing(score_mod: Any, mask_mod: Any) -> None:
    return None


def _runner(options: dict[str, Any]) -> Kernel:
    from flexc.api import Kernel

    made = Kernel(None, None, **{name: value for name, value in options.items() if name != "title"})
    made.__name__ = options["title"]
    return made


def _with_every_gradient(trace: frontend.Trace) -> frontend.Trace:
    graph = trace.graph
    tensors = tuple(replace(t, needs_grad=loaded_dtype(t.dtype) == FLOAT32) for t in graph.tensors)
    return trace if tensors == graph.tensors else trace_of_graph(Graph(graph.outputs, tensors, graph.scalars, graph.lines))
