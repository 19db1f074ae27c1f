"""What users call: `kernel`, `attention`, and the Kernel that they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from flexc import backends, frontend, operator_calls, pipeline, settings
from flexc.algebra import Mask
from flexc.arguments import (
    finite_scale,
    refuse_arity,
    refuse_bad_switch,
    refuse_what_is_no_input,
    shapes_of,
)
from flexc.autograd import attend
from flexc.backends import Options
from flexc.errors import FlexcError, InputError, UnsupportedError
from flexc.inference.decode import decoding
from flexc.inference.paged import PagedKV, attend_paged, attend_quantized
from flexc.inference.places import Positions, positions_of
from flexc.inference.quantized import DTYPES as QUANTIZED
from flexc.inference.varlen import Sequences
from flexc.ir.graph import Graph
from flexc.launch import MAPS, Launch
from flexc.pickling import held_at
from flexc.pipeline import Artifact
from flexc.prepare import launch_for
from flexc.ready import ReadyLaunches
from flexc.sinks import refuse_bad_sink, with_sink
from flexc.sparsity import BlockMap
from flexc.sparsity.statements import verify_facts
from flexc.watched import is_distributed, is_watched

if TYPE_CHECKING:
    from flexc.explain import Explanation

Tensor = torch.Tensor
Function = Callable[..., Any]

_OPTION_NAMES = ("backend", "autotune", "precision", "deterministic", "batch_invariant")
_PRECISIONS = ("fast", "exact", "tf32")


@dataclass(frozen=True)
class AuxOutput:
    """What attention can return besides its output.

    Attributes:
        lse: float32 [B, Hq, Sq], natural logarithm of the sum of exponentials of a row's scores, differentiable; -inf for a row without
            keys.
        max_scores: float32 [B, Hq, Sq], the largest score of a row after the score function, without a gradient; -inf for a row without
            keys. None where it was not asked for.
    """

    lse: Tensor
    max_scores: Tensor | None = None


def kernel(function: Function) -> Kernel:
    """Make an attention kernel of one function.

    Args:
        function: with five arguments (score, batch, head, q_idx, kv_idx) a score function: one score and its position in, the new score
            out. With four (batch, head, q_idx, kv_idx) a mask function: may this query see this key? A kernel is returned as it is.

    Raises:
        InputError: another number of arguments.
        TraceError: not a Python function, or any number of arguments.
    """
    if isinstance(function, Kernel):
        return function
    arity = _arity(function)
    if arity == 5:
        return attention(score_mod=function)
    if arity == 4:
        return attention(mask_mod=function)
    raise InputError(
        f"{getattr(function, '__name__', function)!r} takes {arity} positional arguments: expected 5 (score, batch, head, q_idx, kv_idx) "
        "for a score function or 4 (batch, head, q_idx, kv_idx) for a mask function"
    )


def _arity(function: Function) -> int:
    if is_dynamo_compiling():
        from flexc.dynamo import arity

        return arity(function)
    return frontend.arity(function)


def attention(
    score_mod: Function | None = None,
    mask_mod: Function | Mask | None = None,
    *,
    backend: str = "auto",
    autotune: bool = False,
    precision: str = "fast",
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Kernel:
    """Make an attention kernel of a score function and a mask function; None for plain scores, for no mask.

    Args:
        score_mod: (score, batch, head, q_idx, kv_idx) → score, float32; or a kernel that `flexc.kernel` made of such a function.
        mask_mod: (batch, head, q_idx, kv_idx) → bool, a Mask, or a kernel that `flexc.kernel` made of such a function.
        backend: "auto", "triton", "cute" (Hopper) or "cpu".
        autotune: time the plausible tiles on the first call's shapes and block structure, and keep the fastest.
        precision: "fast" (hardware approximations where they stay within twice eager PyTorch's error), "exact" (none), or "tf32" (fast, and
            products of float32 tensors in TF32; otherwise float32 means float32).
        deterministic: equal bits from equal calls, gradients of captured tensors included.
        batch_invariant: the output bits of a query do not depend on what else is in the batch, on room behind kv_len, or on pages. Decoding
            then cuts the keys at places of each sequence's own, which costs a few percent. Not on the CPU.

    Raises:
        InputError: an unknown option, or a function with the wrong number of arguments.
    """
    named = {"precision": precision, "deterministic": deterministic, "batch_invariant": batch_invariant}
    return Kernel(score_mod, mask_mod, backend=backend, autotune=autotune, **named)


class Kernel:
    """Attention with a score and a mask function. Call it on q, k, v; look inside it afterwards.

    It can be copied and pickled as far as its functions can; what it compiled and what ran last stay behind.

    Attributes:
        score_mod, mask_mod: the functions, or None.
    """

    def __init__(
        self,
        score_mod: Function | None,
        mask_mod: Function | Mask | None,
        *,
        backend: str = "auto",
        autotune: bool = False,
        precision: str = "fast",
        deterministic: bool = False,
        batch_invariant: bool = False,
    ):
        self._backend, self._autotune, self._precision, self._deterministic = backend, autotune, precision, deterministic
        self._batch_invariant = batch_invariant
        self._asked = ""  # all options in one, for Dynamo's guards; of a kernel made inside a compiled region it looks at each
        if is_dynamo_compiling():  # made inside a compiled region: `flexc.dynamo` makes the real one, and checks there
            self.score_mod, self.mask_mod = score_mod, mask_mod
            return
        backends.refuse_unknown(backend)
        if precision not in _PRECISIONS:
            raise InputError(f"unknown precision {precision!r}: expected " + ", ".join(f'"{known}"' for known in _PRECISIONS))
        for name, switch in (("autotune", autotune), ("deterministic", deterministic), ("batch_invariant", batch_invariant)):
            refuse_bad_switch(name, switch)
        score_mod = _function_in(score_mod, "score_mod")
        mask_mod = _function_in(mask_mod, "mask_mod")
        refuse_arity(score_mod, 5, "score_mod", "(score, batch, head, q_idx, kv_idx)")
        refuse_arity(mask_mod, 4, "mask_mod", "(batch, head, q_idx, kv_idx)")
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self._asked = f"{backend} {autotune} {precision} {deterministic} {batch_invariant}"
        self._options = Options(precision=precision, deterministic=deterministic, batch_invariant=batch_invariant)
        self._ready = ReadyLaunches()
        self._last: tuple[Launch, tuple[Tensor, ...], torch.device] | None = None
        self._traced: frontend.Trace | None = None
        function = score_mod if score_mod is not None else mask_mod
        self.__name__ = pipeline.title_of(score_mod, mask_mod)
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", None) or __name__

    def __getattr__(self, name: str) -> Any:
        # A kernel made inside a compiled region has nothing but its arguments until someone outside asks for more.
        if name in ("_options", "_ready", "_last", "_traced", "__name__") and "_batch_invariant" in vars(self):
            options = {option: vars(self)[f"_{option}"] for option in _OPTION_NAMES}
            Kernel.__init__(self, self.score_mod, self.mask_mod, **options)
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<flexc kernel {self.__name__}>"

    def __reduce__(self) -> str | tuple:
        name = getattr(self.score_mod if self.score_mod is not None else self.mask_mod, "__qualname__", "")
        if held_at(self.__module__, name) is self:
            return name  # where a decorated function was, there is the kernel: pickle cannot find the function
        make = partial(Kernel, backend=self._backend, autotune=self._autotune, **_given(self._options))
        return make, (self.score_mod, self.mask_mod)

    def __call__(
        self,
        q: Tensor,
        k: Tensor | PagedKV,
        v: Tensor | None = None,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        sink: Tensor | None = None,
        q_offset: int | Tensor | None = None,
        kv_len: int | Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        return_max_scores: bool = False,
    ) -> Tensor | tuple[Tensor, AuxOutput]:
        """Attention of q to k and v.

        Args:
            q: [B, Hq, Sq, D], float16, bfloat16 or float32 (float64 on the CPU), any strides.
            k: [B, Hkv, Skv, D]. Hq is a multiple of Hkv: query head h reads key/value head h // (Hq / Hkv). Or a PagedKV, in place of k, v
                and kv_len.
            v: [B, Hkv, Skv, Dv].
            scale: on q·k before the score function, any finite number; default 1 / sqrt(D).
            return_lse: also return AuxOutput.
            sink: [Hq], a learnable logit for each query head that takes part in the softmax of its rows and has no value. It counts in
                lse, and costs one more pass over the output.
            q_offset: position of the first query row in its sequence, a number or an integer tensor [B]: the functions see
                q_idx = q_offset + row. Default: 0; of a PagedKV such that the queries are the last tokens in it.
            kv_len: how many of the keys are there, a number or an integer tensor [B]: no query sees those past it, whatever they hold.
                Neither of the two compiles anything when its value changes.
            k_scale, v_scale: factors of k and v of float8_e4m3fn or int8, float32: one [], or [Hkv], or [B, Hkv, Skv]; default 1. q is
                float16 or bfloat16 then, and nothing requires a gradient.
            return_max_scores: also return AuxOutput, with the largest score of each row (the sink is none); by a kernel of its own.

        Returns:
            out [B, Hq, Sq, Dv] in q's dtype, or (out, AuxOutput). A row that may see no key is 0, with lse -inf and zero gradients.
            Scores and sums are float32 (float64 for float64 inputs); autocast changes nothing, the dtype of q decides.

        Raises:
            ShapeError, InputError: sizes, dtypes or devices do not fit.
            TraceError: a function cannot be compiled.
            UnsupportedError: the backend has no kernel for this.
        """
        if return_lse is not False or return_max_scores is not False:
            refuse_bad_switch("return_lse", return_lse)
            refuse_bad_switch("return_max_scores", return_max_scores)
        if is_dynamo_compiling():
            from flexc.dynamo import call

            out, lse, *largest = call(self, q, k, v, scale, q_offset, kv_len, k_scale, v_scale, return_max_scores)
        elif isinstance(k, PagedKV) or k_scale is not None or v_scale is not None or getattr(k, "dtype", None) in QUANTIZED:
            if return_max_scores:
                raise UnsupportedError("return_max_scores on a paged cache or one of eight bits, on every backend: expected return_lse")
            (out, lse), largest = self._attend_cache(q, k, v, scale, q_offset, kv_len, (k_scale, v_scale)), ()
        elif q_offset is kv_len is None:
            out, lse, *largest = self._attend(q, k, v, scale, return_max_scores)  # pyright: ignore[reportArgumentType]  (refused there)
        else:
            out, lse, *largest = self._attend_at(q, k, v, scale, q_offset, kv_len, return_max_scores)  # pyright: ignore[reportArgumentType]
        if sink is not None:
            refuse_bad_sink(sink, q)
            out, lse = with_sink(out, lse, sink)
        return (out, AuxOutput(lse, *largest)) if return_lse or return_max_scores else out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, max_scores: bool) -> tuple[Tensor, ...]:
        """out and lse, and the largest scores if asked for."""
        current = settings.current()
        if current.eager:
            return self._eager(q, k, v, scale, max_scores)
        if is_watched(q, k, v):
            return self._watched(q, k, v, scale, None, max_scores)
        launch, q, k, v, tensors = launch_for(self, q, k, v, scale, current, None, max_scores)
        if current.check:
            self._check(launch, q, k, tensors)
        launch = decoding(launch, q, k, v, tensors)
        self._last = (launch, tensors, q.device)
        return attend(launch, q, k, v, tensors)

    def _attend_cache(
        self, q: Tensor, k: Any, v: Any, scale: float | None, q_offset: int | Tensor | None, kv_len: Any, scales: tuple
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a paged cache, or one of eight bits."""
        if isinstance(k, PagedKV):
            return attend_paged(self, q, k, v, scale, q_offset, kv_len, scales)
        return attend_quantized(self, q, k, v, scale, q_offset, kv_len, scales)

    def _attend_at(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        q_offset: int | Tensor | None,
        kv_len: int | Tensor | None,
        max_scores: bool,
    ) -> tuple[Tensor, ...]:
        """out and lse at positions, and the largest scores if asked for."""
        refuse_what_is_no_input(q, k, v)
        shapes_of(q, k, v)
        positions, k, v = positions_of(q_offset, kv_len, q, k, v)
        if positions is None:
            return self._attend(q, k, v, scale, max_scores)
        return self._attend_placed(q, k, v, scale, positions, max_scores)

    def _attend_placed(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, places: Positions | Sequences, max_scores: bool = False
    ) -> tuple[Tensor, ...]:
        """out and lse where the functions see other places than those in the tensors, and the largest scores if asked for."""
        refuse_what_is_no_input(q, k, v)
        shapes_of(q, k, v)
        current = settings.current()
        if current.eager:
            score_mod, mask_mod, options = places.in_python(self.score_mod, self.mask_mod)
            return Kernel(score_mod, mask_mod)._eager(q, k, v, scale, max_scores, **options)
        if is_watched(q, k, v):
            return self._watched(q, k, v, scale, places, max_scores)
        if current.check:
            places.refuse_values(q.shape[2], k.shape[2])
        traced = places.placed(*frontend.trace(self.score_mod, self.mask_mod))
        launch, q, k, v, tensors = launch_for(self, q, k, v, scale, current, traced, max_scores)
        if current.check:
            self._check(launch, q, k, tensors)
        ordinary, launch = launch, decoding(launch, q, k, v, tensors, places.hides_rest)
        if launch is ordinary:  # the split kernel makes sure of both itself
            k, v = places.without_rest(k, v)
            launch = replace(launch, maps_by_kernels=True)
        self._last = (launch, tensors, q.device)
        return attend(launch, q, k, v, tensors)

    # --- looking inside ---

    @property
    def graph(self) -> Graph:
        """The variant as a graph, after the passes."""
        from flexc import passes

        if self._last is not None:
            return self._last[0].artifact.graph
        return passes.run(frontend.trace(self.score_mod, self.mask_mod)[0].graph)

    @property
    def source(self) -> str:
        """The generated module that ran last."""
        return self.artifact.source

    @property
    def plan(self) -> Any:
        """Every choice made for the module that ran last; prints as a table."""
        return self.artifact.plan

    @property
    def backend(self) -> str:
        """Which backend ran last."""
        return self.artifact.backend.name

    @property
    def reason(self) -> str:
        """Why that backend."""
        return self.artifact.reason

    @property
    def key(self) -> str:
        """Digest of everything that the module depends on."""
        return self.artifact.key

    @property
    def artifact(self) -> Artifact:
        """All stages of the module that ran last."""
        return self._ran()[0].artifact

    @property
    def blocks(self) -> BlockMap:
        """Which blocks of the last call's mask are empty, partial or full, at the forward kernel's block size; prints as a picture."""
        launch, tensors, device = self._ran()
        if launch.shapes.ragged:
            raise UnsupportedError(
                "the blocks of packed queries on a paged cache, on the triton backend, which walks ranges of keys: expected "
                "flexc.block_map(mask, q_len, kv_len), which needs no call"
            )
        return _forward_map(launch, tensors, device)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Explanation:
        """What the variant is as mathematics, its work and roofline on this device, its tiles, what is loaded at which rate, and why this
        backend. Runs no kernel."""
        launch, *rows, tensors = launch_for(self, q, k, v, scale, settings.current())
        copied = [name for name, given, x in zip("qkv", (q, k, v), rows) if given.stride(-1) != x.stride(-1)]
        if scale is None:
            scale = launch.scale
        from flexc.explain import explain

        explanation = explain(launch, _forward_map(launch, tensors, q.device), float(scale), copied, self.__name__, tensors)
        ran = decoding(launch, q, k, v, tensors).artifact
        return replace(explanation, backend=ran.backend.name, reason=ran.reason, plan=str(ran.plan))

    def captured(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The captured tensors that require a gradient in a call on q, k and v, by the name that the graph gives them."""
        refuse_what_is_no_input(q, k, v)
        shapes_of(q, k, v)
        trace, binding = frontend.trace(self.score_mod, self.mask_mod)
        return {i.name: t for i, t in zip(trace.graph.tensors, binding.tensors, strict=True) if t.requires_grad}

    # --- ahead of a call, and without flexc ---

    def warmup(self, specs: Any, *, processes: int | None = None) -> Any:
        """Compile ahead for calls that specs describe, in parallel processes, with no tensors; see `flexc.Spec`.

        Args:
            specs: one or many, each a `flexc.Spec` or a dict of its attributes.
            processes: how many compile side by side; default: one for each core.

        Returns:
            CompileLog: what was compiled, or found on the disk.
        """
        from flexc.warmup import warm_up

        named = {"backend": self._backend, "options": self._options, "title": self.__name__}
        return warm_up(self.score_mod, self.mask_mod, specs, processes=processes, **named)

    def export(self, path: Any, spec: Any = None) -> Any:
        """Write one Python file that runs this kernel without flexc: `from FILE import attention`.

        Args:
            path: of the file, ending in .py.
            spec: which call it is for, a `flexc.Spec` or a dict of its attributes; default: what ran last.

        Returns:
            The path.
        """
        import flexc
        from flexc.export import export

        if spec is None:
            return export(self.artifact, path, flexc.__version__)
        from flexc.warmup import artifact_of

        named = {"backend": self._backend, "options": self._options, "title": self.__name__}
        return export(artifact_of(self.score_mod, self.mask_mod, spec, **named), path, flexc.__version__)

    # --- steps of a call ---

    def _ran(self) -> tuple[Launch, tuple[Tensor, ...], torch.device]:
        if self._last is None:
            raise FlexcError(
                f"{self.__name__} has not run yet: call it on q, k, v first, or compile it with `python -m flexc show FILE.py:NAME`"
            )
        return self._last

    def _watched(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, places: Positions | Sequences | None, max_scores: bool
    ) -> tuple[Tensor, ...]:
        """out and lse where PyTorch must see an operator, or q, k and v are distributed."""
        refuse_what_is_no_input(q, k, v)
        if scale is not None:
            scale = finite_scale(scale)
        if is_distributed(q, k, v):
            from flexc import sharding

            if places is not None:
                what = "q_offset, kv_len and packed sequences with DTensors"
                raise UnsupportedError(f"{what}, on every backend: call the kernel on each rank's local tensors")
            return sharding.call(self, q, k, v, scale, max_scores)
        return operator_calls.call(self, q, k, v, scale, places, max_scores)

    def _check(self, launch: Launch, q: Tensor, k: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """FLEXC_CHECK=1: what kernels would not notice."""
        from flexc.index_check import Scores, check_indices

        scores = Scores(q.detach(), k.detach(), launch.scale)
        check_indices(launch.artifact.traced, launch.shapes, tensors, launch.scalars, q.device, scores)
        verify_facts(tensors, [read.name for read in launch.artifact.traced.tensors])

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, max_scores: bool, **positions: Any) -> tuple[Tensor, ...]:
        """FLEXC_EAGER=1: the user's own functions on dense tensors, where print and breakpoint work."""
        from flexc.reference import eager, largest_scores

        refuse_what_is_no_input(q, k, v)
        shapes_of(q, k, v)
        named = {"scale": None if scale is None else finite_scale(scale), **positions}
        results = eager(self.score_mod, self.mask_mod, q, k, v, **named)
        return (*results, largest_scores(self.score_mod, self.mask_mod, q, k, **named).float()) if max_scores else results


def _forward_map(launch: Launch, tensors: tuple[Tensor, ...], device: torch.device) -> BlockMap:
    return MAPS.blocks(launch, launch.artifact.map_blocks.get("forward", (128, 128)), tensors, device)


def _given(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("precision", "deterministic", "batch_invariant")}


def _function_in(function: Any, name: str) -> Any:
    """The function that a kernel was made of; anything else as it is."""
    if not isinstance(function, Kernel):
        return function
    other = {"score_mod": "mask_mod", "mask_mod": "score_mod"}[name]
    inner, outer = getattr(function, name), getattr(function, other)
    if inner is not None and outer is not None:
        raise InputError(f"{name} is a flexc kernel of two functions, {function.__name__}; expected one: pass its .score_mod and .mask_mod")
    if outer is not None:
        raise InputError(f"{name} is a flexc kernel of the {other.removesuffix('_mod')} function {function.__name__}: pass it as {other}")
    if inner is None:
        raise InputError(f"{name} is a flexc kernel without functions; expected a function, or None")
    return inner
