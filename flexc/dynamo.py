"""A call of a kernel as torch.compile sees it: one operator, whose captured tensors and numbers are values of Dynamo's own.

Dynamo runs `call` symbolically. It must not go into the tracer, which is not made of tensor operations, and it must not take what a
function captures for constants: captured tensors carry gradients and change, numbers change. So `_bind`, which Dynamo calls while it
traces (`comptime`, its interface for that), does the work in between:

1. The score and the mask function are found as real Python functions. Those that exist outside the compiled region are taken as they are;
   those that the region itself makes exist only symbolically, and are built from their code, with stand-ins for the tensors in their cells.
2. The frontend traces them, as in an eager call. The graph becomes the text that the operator takes (`flexc.operators`).
3. The trace knows the path to each value that it depends on: closure cell, global, attribute, item. Dynamo follows the same paths, which
   gives the captured values as graph inputs or intermediate results, and leaves Dynamo's guards on everything that was read.

`allow_in_graph` and `nonstrict_trace` would take functions and what they capture for constants; a flexc call as a higher-order operator
would have Dynamo trace the user's function, which may branch on scores where Dynamo cannot.

This file and `flexc.dynamo_values` are the only ones that know Dynamo's inner types. What they use is the same from PyTorch 2.9 to 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.comptime import comptime as _comptime
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.utils._python_dispatch import _disable_current_modes

from flexc import frontend, operators, passes, settings
from flexc.dynamo_values import Functions, NotCompiled, Reader, run
from flexc.errors import FlexcError, InputError, UnsupportedError
from flexc.ir.graph import inputs_of
from flexc.operator_calls import is_differentiated
from flexc.variants import variant_of
from flexc.watched import is_distributed

Tensor = torch.Tensor

ATTENTION, ATTENTION_WITH_MAX = operators.ATTENTION, operators.ATTENTION_WITH_MAX
comptime: Any = _comptime

# --- what Dynamo runs ------------------------------------------------------------------------------------------------------------------


def call(
    kernel: Any, q: Tensor, k: Any, v: Any, scale: Any, q_offset: Any, kv_len: Any, k_scale: Any, v_scale: Any, max_scores: bool
) -> tuple[Tensor, ...]:
    """out and lse (and largest scores) of a kernel; for Dynamo alone, which runs this line by line, and guards each name that it reads."""
    score_mod, mask_mod, asked = kernel.score_mod, kernel.mask_mod, kernel._asked  # noqa: F841 - `_bind` reads them
    bound: Any = None
    comptime(_bind)
    if bound is None:  # not while Dynamo traces, but where it gave up and Python runs this
        return _plainly(kernel, q, k, v, scale, q_offset, kv_len, k_scale, v_scale, max_scores)
    if bound == "cache":
        return call_cache(kernel, q, k, v, scale, q_offset, kv_len, k_scale, v_scale, max_scores)
    if bound == "positions":
        return call_at(kernel, q, k, v, scale, q_offset, kv_len, k_scale, v_scale, max_scores)
    text, fixed_scale, tensors, ints, numbers = bound
    # A symbolic float reaches an operator only inside a tensor. A sum is what Dynamo knows how to keep symbolic.
    floats = [torch.zeros((), dtype=torch.float64) + number for number in numbers] if numbers else []
    if max_scores:
        out, lse, largest = ATTENTION_WITH_MAX(q, k, v, tensors, text, fixed_scale, ints, floats)
        return out, lse.float(), largest.float()
    out, lse = ATTENTION(q, k, v, tensors, text, fixed_scale, ints, floats)
    return out, lse.float()


def _called(
    kernel: Any, q: Tensor, k: Any, v: Any, scale: Any, q_offset: Any, kv_len: Any, k_scale: Any, v_scale: Any, max_scores: bool
) -> tuple[Tensor, ...]:
    """The same by Python."""
    named = {"scale": scale, "q_offset": q_offset, "kv_len": kv_len, "k_scale": k_scale, "v_scale": v_scale}
    out, aux = kernel(q, k, v, **named, return_lse=True, return_max_scores=max_scores)
    return (out, aux.lse, aux.max_scores) if max_scores else (out, aux.lse)


_plainly: Any = torch._dynamo.disable(_called)
call_at: Any = torch._dynamo.disable(_called, reason="flexc: q_offset and kv_len run outside of compiled regions")
"""At positions: a graph break, or with fullgraph=True Dynamo's error with the reason."""
call_cache: Any = torch._dynamo.disable(
    _called, reason="flexc: paged caches, and those of eight bits, are read outside of compiled regions"
)
"""On a cache, likewise."""


@torch._dynamo.disable(reason="flexc: varlen_attention runs outside of compiled regions")
def call_varlen(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, kernel: Any, scale: Any, return_lse: bool, q_offset: Any) -> Any:
    """`flexc.varlen_attention`, likewise."""
    from flexc.inference.varlen import varlen_attention

    return varlen_attention(q, k, v, cu_q, cu_k, kernel, scale=scale, return_lse=return_lse, q_offset=q_offset)


def arity(function: Any) -> Any:
    """`frontend.arity`, for Dynamo alone."""
    count: Any = None
    comptime(_count)
    return frontend.arity(function) if count is None else count


def reads(rule: Any) -> Any:
    """Which of batch, head, q_idx and kv_idx a mask function reads, for Dynamo alone."""
    names: Any = None
    comptime(_name)
    return ("batch", "head", "q_idx", "kv_idx") if names is None else names


# --- what Dynamo calls while it traces -------------------------------------------------------------------------------------------------


def _count(context: Any) -> None:
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    found = frontend.arity(Functions(tx).real(tx.symbolic_locals["function"]))
    tx.symbolic_locals["count"] = ConstantVariable.create(found)


def _name(context: Any) -> None:
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    with _disable_current_modes():
        mask = passes.run(frontend.trace(None, Functions(tx).real(tx.symbolic_locals["rule"]))[0].graph).mask
    found = () if mask is None else tuple(sorted(inputs_of(mask)))
    tx.symbolic_locals["names"] = TupleVariable([ConstantVariable.create(name) for name in found])


def _bind(context: Any) -> None:
    """Set `bound` in the frame of `call`."""
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    try:
        _bind_in(tx)
    except NotCompiled as limit:
        context.graph_break(f"flexc: {limit}")
    except FlexcError as error:
        raise _of_the_user(error) from None


def _of_the_user(error: FlexcError) -> Exception:
    """The error as one that Dynamo hands on to the user as it is, in place of calling it an internal one of its own."""
    try:
        kind = type(type(error).__name__, (ShortenTraceback, type(error)), {"__module__": type(error).__module__})
    except TypeError:  # builtin bases that cannot be combined
        kind = ShortenTraceback
    made: Any = kind.__new__(kind)
    ShortenTraceback.__init__(made, str(error), first_useful_frame=None)
    return made


def _bind_in(tx: Any) -> None:
    from flexc.api import Kernel

    frame = tx.symbolic_locals
    way = _way(frame)
    if way is not None:
        frame["bound"] = ConstantVariable.create(way)
        return
    if settings.current().eager:
        raise NotCompiled("FLEXC_EAGER=1 runs score and mask functions in Python, which torch.compile cannot: expected it to be unset")
    if is_differentiated():
        raise UnsupportedError(
            "torch.func.grad and the like around attention inside torch.compile: expected the transform in eager code, or .backward() or "
            "torch.autograd.grad outside of the compiled function"
        )
    _refuse_inputs([(name, frame[name].realize()) for name in "qkv"])
    functions = Functions(tx)
    roots = {"score": _inside(tx, frame["score_mod"], "score_mod"), "mask": _inside(tx, frame["mask_mod"], "mask_mod")}
    score_mod, mask_mod = (functions.real(root) for root in roots.values())
    options = _options(tx, functions)
    with _disable_current_modes():
        kernel = Kernel(score_mod, mask_mod, **options)
        trace, _ = frontend.trace(kernel.score_mod, kernel.mask_mod)
        reader = Reader(tx, trace, roots)
        if reader.has_symbolic_constants():
            # Dynamo knows already that a number changes: as a constant it would compile anew for each.
            trace, _ = frontend.trace(kernel.score_mod, kernel.mask_mod, runs_numbers=True)
            reader = Reader(tx, trace, roots)
    variant = variant_of(kernel, trace)
    outside = getattr(frame["kernel"].realize(), "value", None)
    if isinstance(outside, Kernel) and frame["kernel"].realize().source is not None:
        variant.serve(outside)
    reader.check()
    tensors = [reader.tensor(slot) for slot in range(len(trace.graph.tensors))]
    ints, floats = reader.scalars()
    scale = frame["scale"].realize()
    if isinstance(scale, TensorVariable):
        raise NotCompiled("scale is a tensor, whose value torch.compile does not know: expected a number, or capture it in score_mod")
    if isinstance(scale, SymNodeVariable):
        floats.append(scale)
        scale = ConstantVariable.create(None)
    elif scale.as_python_constant() is not None:
        from flexc.arguments import finite_scale

        scale = ConstantVariable.create(finite_scale(scale.as_python_constant()))
    parts = [ConstantVariable.create(variant.text), scale, ListVariable(tensors), ListVariable(ints), ListVariable(floats)]
    frame["bound"] = TupleVariable(parts)


def _way(frame: dict[str, Any]) -> str | None:
    """Which calls are not compiled: None for those that are."""
    from flexc.inference.paged import PagedKV
    from flexc.inference.quantized import DTYPES

    def is_given(name: str) -> bool:
        value = frame[name].realize()
        return not (isinstance(value, ConstantVariable) and value.as_python_constant() is None)

    k = frame["k"].realize()
    if isinstance(k, TensorVariable):
        is_cache = k.as_proxy().node.meta["example_value"].dtype in DTYPES
    else:
        is_cache = isinstance(k, UserDefinedObjectVariable) and issubclass(k.python_type(), PagedKV)
    if is_cache or is_given("k_scale") or is_given("v_scale"):
        return "cache"
    return "positions" if is_given("q_offset") or is_given("kv_len") else None


def _inside(tx: Any, function: Any, name: str) -> Any:
    """The function of a kernel that was given in place of one."""
    from flexc.api import Kernel

    function = function.realize()
    is_kernel = isinstance(function, UserDefinedObjectVariable) and issubclass(function.python_type(), Kernel)
    return run(tx, f"v.{name}", function) if is_kernel else function


def _options(tx: Any, functions: Functions) -> dict[str, Any]:
    """What the kernel was made with: one guard where it was made outside of a compiled region, one for each option where not."""
    kernel, names = tx.symbolic_locals["kernel"].realize(), ("backend", "autotune", "precision", "deterministic", "batch_invariant")
    if tx.symbolic_locals["asked"].realize().as_python_constant():
        return {name: getattr(kernel.value, f"_{name}") for name in names}
    return {name: functions.real(run(tx, f"v._{name}", kernel)) for name in names}


def _refuse_inputs(named: list[tuple[str, Any]]) -> None:
    """Refuse here, by a clear error, what the operator would refuse."""
    from flexc.arguments import refuse_inputs

    for name, value in named:
        if not isinstance(value, TensorVariable):
            raise InputError(f"{name} is a {value.python_type().__name__}; expected a torch.Tensor")
    examples = [value.as_proxy().node.meta["example_value"] for _, value in named]
    if is_distributed(*examples):
        raise NotCompiled(
            "q, k and v are DTensors, which attention inside torch.compile does not take: expected the tensors of this rank, x.to_local(), "
            "or a call in eager code"
        )
    refuse_inputs(*examples)
