"""A call as two ordinary PyTorch operators, `flexc::attention` (or `flexc::attention_with_max`, which also returns the largest scores) and
`flexc::attention_backward`, for everything that looks at operators:
torch.compile, torch.export, make_fx, torch.func, selective checkpointing, profilers.

Eager calls on plain tensors do not come here: `flexc.autograd.Attention` computes the same with less work for the host. `Kernel.__call__`
turns here when something is watching (a dispatch mode, a functorch transform, a tensor subclass), `flexc.dynamo` when Dynamo traces.

A variant enters the operator as *text*: the graph in the form of `ir.text`, and the options. There is no table of live kernels, so nothing
has to be kept alive for a compiled program: kernels may be collected, copied and pickled, an exported program may be saved, and runs
wherever `import flexc` ran. `variant_of` and `variant_from` keep what was made of recent texts, and make it again where it was dropped.
Captured tensors are a `Tensor[]` argument, so that autograd, functionalisation and CUDA graphs see them; captured numbers are `SymInt[]`
and, because PyTorch has no list of symbolic floats, 0-d float64 tensors on the CPU, of which reading one waits for nothing.

`scale` may be any finite number, or None for 1 / sqrt(D); if there is one float more than the graph has, that one is the scale.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.utils._python_dispatch import _disable_current_modes

from flexc import frontend, settings
from flexc.autograd import refuse_forward_mode, refuse_second_derivative, run
from flexc.errors import InputError, InternalError, UnsupportedError
from flexc.inference.decode import decoding
from flexc.ir.graph import BOOL, FLOAT32, Graph, inputs_of, loaded_dtype
from flexc.ir.text import parse_graph

if TYPE_CHECKING:
    from flexc.api import Kernel
    from flexc.inference.places import Positions
    from flexc.inference.varlen import Sequences
    from flexc.launch import Launch

Tensor = torch.Tensor

_MOST_VARIANTS = 1024

# --- variants as text ----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Variant:
    """A graph with the options that it is run with.

    Attributes:
        text: all of it, as the operators take it.
        trace: the graph.
        runner: a kernel with these options; its own functions are never asked.
        users: kernels that were traced to it: what ran last is theirs to show.
    """

    text: str
    trace: frontend.Trace
    runner: Kernel
    users: weakref.WeakSet[Kernel] = field(default_factory=weakref.WeakSet)

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


# --- the operators -------------------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("flexc", "DEF")
_INPUTS = "Tensor q, Tensor k, Tensor v"
_VARIANT = "Tensor[] tensors, str variant, float? scale, SymInt[] ints, Tensor[] floats"
_LIBRARY.define(f"attention({_INPUTS}, {_VARIANT}) -> (Tensor out, Tensor lse)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"attention_with_max({_INPUTS}, {_VARIANT}) -> (Tensor out, Tensor lse, Tensor max_scores)", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_VARIANT}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
ATTENTION = torch.ops.flexc.attention.default
ATTENTION_WITH_MAX = torch.ops.flexc.attention_with_max.default
ATTENTION_BACKWARD = torch.ops.flexc.attention_backward.default


def _launched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    text: str,
    scale: float | None,
    ints: Sequence[int],
    floats: Sequence[Tensor],
    *,
    max_scores: bool = False,
) -> tuple[Variant, float | None, Launch, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """What a call needs, as `Kernel.__call__` has it."""
    variant, current = variant_from(text), settings.current()
    scalars, among = variant.numbers(ints, floats)
    scale = among if scale is None else scale
    binding = frontend.Binding(tuple(tensors), scalars)
    launch, q, k, v, taken = variant.runner._launch(q, k, v, scale, current, (variant.trace, binding), max_scores)
    if current.check:
        variant.runner._check(launch, q, k, taken)
    return variant, scale, launch, q, k, v, taken


@torch.library.impl(_LIBRARY, "attention", "CompositeExplicitAutograd")
def _attention(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, ...]:
    variant, _, launch, q, k, v, tensors = _launched(q, k, v, *captured)
    launch = decoding(launch, q, k, v, tensors)
    for kernel in variant.users:
        kernel._last = (launch, tensors, q.device)
    return run(launch, q, k, v, tensors)


@torch.library.impl(_LIBRARY, "attention_with_max", "CompositeExplicitAutograd")
def _attention_with_max(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, ...]:
    variant, _, launch, q, k, v, tensors = _launched(q, k, v, *captured, max_scores=True)
    for kernel in variant.users:
        kernel._last = (launch, tensors, q.device)
    return run(launch, q, k, v, tensors)


@torch.library.register_fake("flexc::attention_with_max", lib=_LIBRARY)
def _attention_with_max_fake(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, ...]:
    out, lse = _attention_fake(q, k, v, *captured)
    return out, lse, torch.empty_like(lse)


@torch.library.register_fake("flexc::attention", lib=_LIBRARY)
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *captured: Any) -> tuple[Tensor, Tensor]:
    from flexc.arguments import refuse_inputs

    refuse_inputs(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.impl(_LIBRARY, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    *captured: Any,
) -> list[Tensor]:
    variant, scale, launch, *rows, taken = _launched(q, k, v, tensors, *captured)
    given: tuple[Any, ...] = tuple(rows)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = None if dlse is None else dlse.to(lse.dtype)
        dq, dk, dv, *gradients = launch.backward(*given, out=out, lse=lse, dout=dout, dlse=dlse, tensors=taken)
        if scale is not None and scale <= 0:
            dq = None if dq is None or scale == 0 else -dq
        found = [dq, dk, dv, *(gradients[slot] for slot in variant.gradient_slots)]
        likes = [q, k, v, *(tensors[slot] for slot in variant.gradient_slots)]
        return [_as_promised(gradient, like) for gradient, like in zip(found, likes, strict=True)]


def _as_promised(gradient: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or zeros, as the fake implementation says: contiguous, dtype and device of what it is the gradient of."""
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return gradient.to(device=like.device, dtype=like.dtype).contiguous()


@torch.library.register_fake("flexc::attention_backward", lib=_LIBRARY)
def _attention_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    text: str,
    *captured: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, *(tensors[slot] for slot in variant_from(text).gradient_slots))]


# --- autograd ------------------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    q, k, v, tensors, text, scale, ints, floats = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output[:2], *tensors, *floats)
    ctx.counts, ctx.rest = (len(tensors), len(floats)), (text, scale, ints)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
    (count, float_count), (text, scale, ints) = ctx.counts, ctx.rest
    q, k, v, out, lse, *rest = ctx.saved_tensors
    of_tensors: list[Tensor | None] = [None] * count
    if dout is None and dlse is None:
        dq = dk = dv = None
    else:
        tensors, floats = rest[:count], rest[count:]
        dq, dk, dv, *gradients = ATTENTION_BACKWARD(dout, dlse, q, k, v, out, lse, tensors, text, scale, ints, floats)
        for slot, gradient in zip(variant_from(text).gradient_slots, gradients, strict=True):
            of_tensors[slot] = gradient
    # PyTorch compares the structure: a list of numbers counts as one value, an empty list as a list of tensors.
    return dq, dk, dv, of_tensors, None, None, None if ints else [], [None] * float_count


def _differentiable(operator: Any, kernel: Any) -> Any:
    """What `torch.library.register_autograd` registers, but where nobody differentiates or watches, the kernel at once: half the way."""
    recording = make_autograd_impl(operator, Info(_differentiate, _save))

    def attend(keyset: Any, q: Tensor, k: Tensor, v: Tensor, tensors: Sequence[Tensor], *rest: Any) -> Any:
        is_plain = not is_watched(q, k, v) and all([type(x) in PLAIN for x in tensors])
        if is_plain and not (torch.is_grad_enabled() and torch._C._any_requires_grad(q, k, v, tensors)):
            return kernel(q, k, v, tensors, *rest)
        return recording(keyset, q, k, v, tensors, *rest)

    return attend


_LIBRARY.impl("attention", _differentiable(ATTENTION, _attention), "Autograd", with_keyset=True)
_LIBRARY.impl("attention_with_max", _differentiable(ATTENTION_WITH_MAX, _attention_with_max), "Autograd", with_keyset=True)
torch.library.register_autograd("flexc::attention_backward", refuse_second_derivative, lib=_LIBRARY)


# --- torch.func ----------------------------------------------------------------------------------------------------------------------
# PyTorch's own autograd of operators refuses functorch transforms; an autograd function with a `setup_context` is what they take.


class _Transformed(torch.autograd.Function):
    """The operator under transforms of torch.func: (text, scale, ints, number of captured tensors, q, k, v, *tensors, *floats)."""

    @staticmethod
    def forward(text: str, scale: float | None, ints: list[int], count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rest = inputs
        return ATTENTION(q, k, v, rest[:count], text, scale, ints, rest[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*inputs[4:7], *output[:2], *inputs[7:])
        ctx.rest = inputs[:4]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple:
        slots = variant_from(ctx.rest[0]).gradient_slots
        of_inputs: list[Tensor | None] = [None] * (len(ctx.saved_tensors) - 2)
        if dout is not None or dlse is not None:
            found = _TransformedBackward.apply(*ctx.rest, dout, dlse, *ctx.saved_tensors)
            for index, gradient in zip((0, 1, 2, *(3 + slot for slot in slots)), found, strict=True):
                of_inputs[index] = gradient
        return None, None, None, None, *of_inputs

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _many(_Transformed.apply, info, in_dims, args)


class _TransformedWithMax(_Transformed):
    """The same with the largest scores."""

    @staticmethod
    def forward(text: str, scale: float | None, ints: list[int], count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rest = inputs
        return ATTENTION_WITH_MAX(q, k, v, rest[:count], text, scale, ints, rest[count:])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _many(_TransformedWithMax.apply, info, in_dims, args)


class _TransformedBackward(torch.autograd.Function):
    """Its backward: the same leading arguments, then dout, dlse and what was saved. It has no derivative itself."""

    @staticmethod
    def forward(
        text: str, scale: float | None, ints: list[int], count: int, dout: Tensor | None, dlse: Tensor | None, *saved: Tensor
    ) -> tuple[Tensor, ...]:
        (q, k, v, out, lse), rest = saved[:5], saved[5:]
        return tuple(ATTENTION_BACKWARD(dout, dlse, q, k, v, out, lse, rest[:count], text, scale, ints, rest[count:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        return _one_by_one(_TransformedBackward.apply, info, in_dims, args)


def _many(call: Any, info: Any, in_dims: tuple, args: tuple) -> tuple:
    """The arguments of `_Transformed` with a dimension more, on which problems are independent."""
    if not info.batch_size:
        raise UnsupportedError("torch.func.vmap of flexc attention over no problems, on any backend: expected at least one")
    variant = variant_from(args[0])
    if variant.reads_batch or any(d is not None for d in _dims_of(args, in_dims)[7:]):
        return _one_by_one(call, info, in_dims, args)
    # No problem knows its batch index: one call with a larger batch.
    together = [_repeated(x, d, info.batch_size).flatten(0, 1) for x, d in zip(args[4:7], in_dims[4:7])]
    results = call(*args[:4], *together, *args[7:])
    return tuple(x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) for x in results), (0,) * len(results)


def _one_by_one(call: Any, info: Any, in_dims: tuple, args: tuple) -> tuple:
    """One call for each problem, results stacked."""
    results, dims = [], _dims_of(args, in_dims)
    for index in range(info.batch_size):
        results.append(call(*(x if d is None else x.select(d, index) for x, d in zip(args, dims, strict=True))))
    return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])


def _dims_of(args: tuple, in_dims: tuple) -> list[int | None]:
    """The batched dimension of each argument; of a list of numbers PyTorch says it for each number."""
    return [d if isinstance(x, Tensor) else None for x, d in zip(args, in_dims, strict=True)]


def _repeated(x: Tensor, dim: int | None, count: int) -> Tensor:
    return x.unsqueeze(0).expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _vmap_of(call: Any) -> Any:
    """For the operator itself, as torch.compile meets it below vmap."""

    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        q, k, v, tensors, text, scale, ints, floats = args
        dims = (None, None, None, None, *in_dims[:3], *in_dims[3], *in_dims[7])
        return _many(call, info, dims, (text, scale, ints, len(tensors), q, k, v, *tensors, *floats))

    return vmap


torch.library.register_vmap("flexc::attention", _vmap_of(_Transformed.forward), lib=_LIBRARY)
torch.library.register_vmap("flexc::attention_with_max", _vmap_of(_TransformedWithMax.forward), lib=_LIBRARY)

# --- calls that come here ------------------------------------------------------------------------------------------------------------

_count_of_modes = torch._C._len_torch_dispatch_stack
_is_transformed = torch._C._are_functorch_transforms_active
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # tensors that are their memory and no more


def is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call must be an operator: someone watches operators, or tensors are more than their memory."""
    if _count_of_modes() or _is_transformed():
        return True
    return not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN)


def is_distributed(*tensors: Tensor) -> bool:
    """Whether any is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor without it
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def refuse_distributed(tensor: Tensor, name: str) -> None:
    """Refuse a captured DTensor where q, k and v are plain: a kernel would read this rank's part for the whole."""
    if is_distributed(tensor):
        raise InputError(
            f"the captured tensor {name} is a DTensor and q, k and v are plain tensors; expected all to be DTensors, "
            f"or {name}.full_tensor()"
        )


def call(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    places: Positions | Sequences | None = None,
    max_scores: bool = False,
) -> tuple[Tensor, ...]:
    """out and lse, and largest scores if asked for, by the operator, in eager Python."""
    with _disable_current_modes():  # tracing computes constants, which are nobody's operators
        trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    if places is not None:
        trace, binding = places.placed(trace, binding)
        k, v = places.without_rest(k, v, may_look=False)
    variant = variant_of(kernel, trace, every_gradient=is_differentiated())
    variant.users.add(kernel)
    return call_variant(variant, q, k, v, scale, binding, max_scores)


def call_variant(
    variant: Variant, q: Tensor, k: Tensor, v: Tensor, scale: float | None, binding: frontend.Binding, max_scores: bool = False
) -> tuple[Tensor, ...]:
    """out and float32 lse (and largest scores) of a variant with these captured values."""
    ints, floats = split_numbers(variant.graph, binding.scalars)
    tensors = binding.tensors
    if torch._C._are_functorch_transforms_active():
        transformed = _TransformedWithMax if max_scores else _Transformed
        out, *rows = transformed.apply(variant.text, scale, ints, len(tensors), q, k, v, *tensors, *floats)
    else:
        operator = ATTENTION_WITH_MAX if max_scores else ATTENTION
        out, *rows = operator(q, k, v, list(tensors), variant.text, scale, ints, floats)
    return out, *(x.float() for x in rows)


def split_numbers(graph: Graph, scalars: Sequence[int | float]) -> tuple[list[int], list[Tensor]]:
    """Scalars as the operators take them."""
    if any(s.dtype == BOOL for s in graph.scalars):
        raise InternalError(f"a truth value as a run-time scalar\n{graph}")
    pairs = list(zip(graph.scalars, scalars, strict=True))
    floats = [torch.tensor(float(x), dtype=torch.float64) for s, x in pairs if s.dtype == FLOAT32]
    return [int(x) for s, x in pairs if s.dtype != FLOAT32], floats


def is_differentiated() -> bool:
    """Whether a transform of torch.func takes gradients here.

    Raises:
        UnsupportedError: it takes them in forward mode.
    """
    from torch._C._functorch import TransformType, get_interpreter_stack  # pyright: ignore[reportMissingImports]

    kinds = {level.key() for level in get_interpreter_stack() or ()}
    if TransformType.Jvp in kinds:
        refuse_forward_mode()
    return TransformType.Grad in kinds
