"""From a pair of Python functions to a graph, and from equal functions to the same trace."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flexc.errors import TraceError
from flexc.frontend.callables import arity, code_of, inner_function, name_of, where_defined
from flexc.frontend.fork import Path, explore
from flexc.frontend.functions import is_random, refuse_random
from flexc.frontend.guards import Guards, Source
from flexc.frontend.rebuild import Rebuilder
from flexc.frontend.session import Retrace, Session, refuse, run
from flexc.frontend.symbol import Symbol, Traced, cast, node_of
from flexc.frontend.vector import Elementwise, elements_of
from flexc.frontend.whole import tensor_of
from flexc.ir.graph import BOOL, FLOAT32, INPUTS, Graph, Node, input_node, make, rewrite_graph, topological

Function = Callable[..., Any]

_MOST_TRACES = 64  # of one pair of functions
_MOST_FUNCTIONS = 1024


class Binding(NamedTuple):
    """The captured values of one call: tensors in the order of `graph.tensors`, numbers in that of `graph.scalars`."""

    tensors: tuple[torch.Tensor, ...] = ()
    scalars: tuple[int | float, ...] = ()


@dataclass(frozen=True)
class Captures:
    """What a trace met in its functions, for people: by the path that leads to a value, what the user calls it and what it was.

    Attributes:
        functions: equal for functions of the same code.
        constants, arguments: numbers that are compiled in, and numbers that are given at run time, as they were while tracing.
        tensors: dtype and the like, in words.
    """

    functions: tuple = ()
    constants: dict[str, tuple[str, int | float]] = field(default_factory=dict)
    arguments: dict[str, tuple[str, int | float]] = field(default_factory=dict)
    tensors: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Paths:
    """Where a trace reads its captured values, for those who must read them by other means than Python (`flexc.dynamo`).

    Attributes:
        guards: what must hold of the values.
        tensors, scalars: those that the graph takes, in its order.
        numbers: what the guards' predicates call s0, s1, ….
    """

    guards: Guards
    tensors: tuple[Source, ...]
    scalars: tuple[Source, ...]
    numbers: tuple[Source, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """A graph and the captured values that it holds for.

    Attributes:
        graph: outputs "score" (float32) and/or "mask" (bool).
        runs_numbers: whether captured numbers are run-time scalars (else they are constants).
        captures: what was met while tracing.
        paths: None for a graph that no function is known for.
    """

    graph: Graph
    runs_numbers: bool
    captures: Captures
    _read: Callable[..., Any] = field(repr=False)
    _matches_structure: Callable[..., Any] = field(repr=False)
    _pinned: frozenset[Source] = field(repr=False)
    paths: Paths | None = field(default=None, repr=False)

    def bind(self, score_mod: Function | None, mask_mod: Function | None) -> Binding | None:
        """The captured values of these functions, read without tracing; None if the graph does not hold for them."""
        values = self._read(score_mod, mask_mod)
        return None if values is None else Binding(*values)


_traces: OrderedDict[tuple, list[Trace]] = OrderedDict()
_lock = threading.RLock()


def clear_cache() -> None:
    """Forget every trace."""
    with _lock:
        _traces.clear()


def trace(score_mod: Function | None = None, mask_mod: Function | None = None, *, runs_numbers: bool = False) -> tuple[Trace, Binding]:
    """The graph of a score function and a mask function, and their captured values.

    Functions with the same code whose captured values the graph holds for share one Trace object. Captured numbers are constants at first;
    when the same functions come back with other numbers, theirs become run-time scalars.

    Args:
        score_mod: (score, batch, head, q_idx, kv_idx) → number, or None for the plain score.
        mask_mod: (batch, head, q_idx, kv_idx) → truth value, or None where everything is allowed.
        runs_numbers: make captured numbers run-time scalars even at first sight: they are known to change.

    Raises:
        TraceError: the function cannot become a graph; says where, why, and what to write instead.
    """
    key = (_key(score_mod), _key(mask_mod))
    with _lock:
        traces = _traces.setdefault(key, [])
        _traces.move_to_end(key)
        # Constants come before run-time scalars, which hold for more values.
        for candidate in traces:
            binding = candidate.bind(score_mod, mask_mod) if candidate.runs_numbers or not runs_numbers else None
            if binding is not None:
                return candidate, binding
        similar = next((t for t in reversed(traces) if t._matches_structure(score_mod, mask_mod)), None)
        pinned = set() if similar is None else set(similar._pinned)
        made = _trace(score_mod, mask_mod, runs_numbers or similar is not None, pinned)
        binding = made.bind(score_mod, mask_mod)
        if binding is None:
            raise TraceError(
                f"{name_of(score_mod or mask_mod)} captures something that changes each time it is read",
                where=where_defined(score_mod or mask_mod),
                why="a trace is used again only if reading the captured values again gives the same",
                instead="captured values that are stored, in place of properties that compute new ones",
            )
        traces.append(made)
        del traces[:-_MOST_TRACES]
        while len(_traces) > _MOST_FUNCTIONS:
            _traces.popitem(last=False)
        return made, binding


def _key(function: Function | None) -> Any:
    """What equal functions have in common, quickly: their code, or class. By identity: traces keep both alive."""
    if isinstance(function, types.FunctionType):
        return id(function.__code__)
    if function is None:
        return None
    if isinstance(function, types.MethodType):
        return "method", _key(function.__func__)
    if isinstance(function, functools.partial):
        return "partial", _key(function.func)
    inner = inner_function(function)
    return ("inside", _key(inner[1])) if inner is not None else id(type(function))


def _trace(score_mod: Function | None, mask_mod: Function | None, runs_numbers: bool, pinned: set[Source]) -> Trace:
    _check_arguments(score_mod, mask_mod)
    while True:
        session = Session(runs_numbers, pinned)
        try:
            graph = run(session, functools.partial(_graph, session, score_mod, mask_mod))
            break
        except Retrace as again:
            pinned = pinned | again.pinned
        except Exception:
            # Something takes Python's numbers but no traced ones (an option of a torch function, say). If that is not the reason, the
            # error comes again.
            numbers = {source for source, _ in session.scalars}
            if not runs_numbers or numbers <= pinned:
                raise
            pinned = pinned | numbers
    graph, tensors, scalars = _without_unused(session, graph)
    numbers = [source for source, _ in session.scalars]
    read, matches_structure = session.guards.compile(tensors, scalars, numbers)
    paths = Paths(session.guards, tuple(tensors), tuple(scalars), tuple(numbers))
    return Trace(graph, runs_numbers, _captures(session, score_mod, mask_mod), read, matches_structure, frozenset(pinned), paths)


def _captures(session: Session, score_mod: Function | None, mask_mod: Function | None) -> Captures:
    met, guards = zip(session.scalars, session.scalar_values), session.guards
    arguments = {str(source): (source.name, value) for (source, _), value in met}
    constants = {str(source): (source.name, value) for source, value in guards.numbers.items()}
    tensors = {str(source): (source.name, kind) for source, kind in guards.kinds.items()}
    return Captures((_key(score_mod), _key(mask_mod)), constants, arguments, tensors)


def _check_arguments(score_mod: Function | None, mask_mod: Function | None) -> None:
    for function, kind, count in ((score_mod, "score", 5), (mask_mod, "mask", 4)):
        if function is None:
            continue
        taken = arity(function)
        expected = "(score, batch, head, q_idx, kv_idx)" if kind == "score" else "(batch, head, q_idx, kv_idx)"
        if taken != count:
            other = {5: "a score function: pass it as score_mod", 4: "a mask function: pass it as mask_mod"}.get(taken)
            raise TraceError(
                f"{name_of(function)} takes {taken} arguments, but a {kind} function takes {count}: {expected}",
                where=where_defined(function),
                why=f"{taken} arguments make {other}" if other else "the arguments are given by position",
                instead=f"def {name_of(function).split('.')[-1].strip('<>')}{expected}",
            )
        code = code_of(function)
        # CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR
        if code is not None and code.co_flags & (0x20 | 0x80 | 0x200):
            raise TraceError(
                f"{name_of(function)} is a {'generator' if code.co_flags & 0x20 else 'coroutine'} function",
                where=where_defined(function),
                why="its call computes nothing",
                instead="a plain function with `return`",
            )


def _graph(session: Session, score_mod: Function | None, mask_mod: Function | None) -> Graph:
    rebuilder = Rebuilder(session)
    outputs: list[tuple[str, Node]] = []
    for name, function, inputs in (("score", score_mod, INPUTS), ("mask", mask_mod, INPUTS[1:])):
        source = Source(None, name)
        if function is None:
            session.guards.identical(source, None)
            continue
        session.default_location = where_defined(function)
        with _TorchCalls(session):
            rebuilt = rebuilder.wrap(function, source)

            def once(path: Path, rebuilt: Any = rebuilt, inputs: Any = inputs, name: str = name, function: Any = function) -> Node:
                session.path = path
                return _result(name, function, rebuilt(*(Symbol(input_node(i)) for i in inputs)), session)

            outputs.append((name, explore(once)))
    return Graph(tuple(outputs), tuple(slot.input for slot in session.tensors), tuple(s for _, s in session.scalars))


def _result(kind: str, function: Function, value: Any, session: Session) -> Node:
    """The node for what the user's function returned: float32 for a score, bool for a mask."""
    where = session.default_location
    called = name_of(function)
    if value is None:
        refuse(f"{called} returns nothing on some path", why="every path needs a result", instead=_WANTED[kind], where=where)
    if isinstance(value, Elementwise) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim):
        elements = elements_of(value)
        if elements.size != 1:
            refuse(f"{called} returns {elements.size} values", why="it is asked for one score", instead=_WANTED[kind], where=where)
        value = elements.reshape(-1)[0]
    if not isinstance(value, Symbol | bool | int | float | np.generic | torch.Tensor):
        refuse(f"{called} returns a {type(value).__name__}", why="it is asked for one score", instead=_WANTED[kind], where=where)
    node = node_of(value, where)
    if kind == "score":
        if node.dtype == BOOL:
            refuse(
                f"{called} returns a truth value: this looks like a mask",
                why="as a score it would count as 0 or 1, which masks nothing",
                instead="a mask function (batch, head, q_idx, kv_idx), or flexc.where(condition, score, float('-inf'))",
                where=node.where or where,
            )
        return cast(value, FLOAT32).node
    if node.dtype != BOOL:
        what = "a float" if node.dtype == FLOAT32 else "an integer"
        refuse(
            f"{called} returns {what}, but a mask function returns a truth value",
            why="True means that the query may see the key",
            instead="a comparison, such as x > 0" if node.dtype == FLOAT32 else "a comparison, such as x != 0",
            where=node.where or where,
        )
    return node


_WANTED = {"score": "a number on every path", "mask": "True or False on every path"}


class _TorchCalls(TorchFunctionMode):
    """Sees every torch call of the traced function: tensors made from nothing are constants, random ones are refused."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if is_random(name):
            refuse_random(f"torch.{name}")
        if name in ("tensor", "as_tensor", "scalar_tensor", "asarray") and args and _holds_traced(args[0]):
            result = tensor_of(args[0])
            dtype = kwargs.get("dtype")
            return result if dtype is None else result.to(dtype)
        result = func(*args, **kwargs)
        made = self.session.made
        if isinstance(result, torch.Tensor) and all(made.get(id(a)) is a for a in args if isinstance(a, torch.Tensor)):
            made[id(result)] = result
        return result


def _holds_traced(data: Any) -> bool:
    return isinstance(data, Traced) or (isinstance(data, list | tuple) and any(map(_holds_traced, data)))


def _without_unused(session: Session, graph: Graph) -> tuple[Graph, list[Source], list[Source]]:
    """The graph with only the inputs that it reads, and where they come from."""
    nodes = topological([node for _, node in graph.outputs])
    tensor_slots = sorted({n.attrs[0] for n in nodes if n.op == "gather"})
    scalar_slots = sorted({n.attrs[0] for n in nodes if n.op == "scalar"})
    new = {"gather": {s: i for i, s in enumerate(tensor_slots)}, "scalar": {s: i for i, s in enumerate(scalar_slots)}}

    def renumber(node: Node) -> Node:
        if node.op not in new:
            return node
        return make(node.op, node.args, (new[node.op][node.attrs[0]],), node.dtype, node.where)

    graph = rewrite_graph(graph, renumber)
    tensors = [session.tensors[s] for s in tensor_slots]
    scalars = [session.scalars[s] for s in scalar_slots]
    kept = Graph(graph.outputs, tuple(t.input for t in tensors), tuple(s for _, s in scalars))
    return kept, [t.source for t in tensors], [source for source, _ in scalars]
