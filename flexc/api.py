"""What users call: `kernel`, `attention`, and the Kernel that they return."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from flexc import backends, frontend, operators, pipeline, settings
from flexc.algebra import Mask
from flexc.autograd import attend
from flexc.backends import Options, Shapes
from flexc.errors import FlexcError, InputError, ShapeError, UnsupportedError
from flexc.extents import Extent, extents_of, refuse_wrong_sizes
from flexc.inference.decode import decoding
from flexc.inference.paged import PagedKV, attend_paged, attend_quantized
from flexc.inference.places import Positions, positions_of
from flexc.inference.quantized import DTYPES as QUANTIZED
from flexc.inference.varlen import Sequences
from flexc.ir.graph import Graph
from flexc.launch import MAPS, Launch
from flexc.map_making import number_on
from flexc.operators import PLAIN, is_watched
from flexc.pickling import held_at
from flexc.pipeline import Artifact
from flexc.ready import LARGEST_SCALE, Ready, ReadyLaunches, likeness_of
from flexc.sinks import refuse_bad_sink, with_sink
from flexc.sparsity import BlockMap
from flexc.sparsity.facts import verify_facts

if TYPE_CHECKING:
    from flexc.explain import Explanation

Tensor = torch.Tensor
Function = Callable[..., Any]

_OPTION_NAMES = ("backend", "autotune", "precision", "deterministic", "batch_invariant")
_PRECISIONS = ("fast", "exact", "tf32")
MAX_TOKENS = 2**24  # positions are exact in float32 below it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        from flexc import dynamo

        return dynamo.arity(function)
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
        if is_dynamo_compiling():  # made inside a compiled region: `flexc.dynamo` makes the real one, and checks there
            self.score_mod, self.mask_mod = score_mod, mask_mod
            return
        if backend != "auto" and backend not in backends.BACKENDS and backend != "cute":
            backends.choose(backend, None)  # raises, naming the known ones
        if precision not in _PRECISIONS:
            raise InputError(f"unknown precision {precision!r}: expected " + ", ".join(f'"{known}"' for known in _PRECISIONS))
        for name, switch in (("autotune", autotune), ("deterministic", deterministic), ("batch_invariant", batch_invariant)):
            if not isinstance(switch, bool):
                raise InputError(f"{name} is a {type(switch).__name__}; expected True or False")
        score_mod = _function_in(score_mod, "score_mod")
        mask_mod = _function_in(mask_mod, "mask_mod")
        _refuse_arity(score_mod, 5, "score_mod", "(score, batch, head, q_idx, kv_idx)")
        _refuse_arity(mask_mod, 4, "mask_mod", "(batch, head, q_idx, kv_idx)")
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self._options = Options(precision=precision, deterministic=deterministic, batch_invariant=batch_invariant)
        self._ready = ReadyLaunches()
        self._last: tuple[Launch, tuple[Tensor, ...], torch.device] | None = None
        function = score_mod if score_mod is not None else mask_mod
        self.__name__ = pipeline.title_of(score_mod, mask_mod)
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", None) or __name__

    def __getattr__(self, name: str) -> Any:
        # A kernel made inside a compiled region has nothing but its arguments until someone outside asks for more.
        if name in ("_options", "_ready", "_last", "__name__") and "_batch_invariant" in vars(self):
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
        if isinstance(k, PagedKV) or k_scale is not None or v_scale is not None or getattr(k, "dtype", None) in QUANTIZED:
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
        if is_dynamo_compiling():
            from flexc import dynamo

            return dynamo.call(self, q, k, v, scale, max_scores)
        current = settings.current()
        if current.eager:
            return self._eager(q, k, v, scale, max_scores)
        if is_watched(q, k, v):
            return self._watched(q, k, v, scale, None, max_scores)
        launch, q, k, v, tensors = self._launch(q, k, v, scale, current, None, max_scores)
        if current.check:
            self._check(launch, q, k, tensors)
        launch = decoding(launch, q, k, v, tensors)
        self._last = (launch, tensors, q.device)
        return attend(launch, q, k, v, tensors)

    def _attend_cache(
        self, q: Tensor, k: Any, v: Any, scale: float | None, q_offset: int | Tensor | None, kv_len: Any, scales: tuple
    ) -> tuple[Tensor, Tensor]:
        """out and lse of a paged cache, or one of eight bits."""
        if is_dynamo_compiling():
            from flexc import dynamo

            return dynamo.call_cache(self, q, k, v, scale, q_offset, kv_len, scales)
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
        if is_dynamo_compiling():
            from flexc import dynamo

            return dynamo.call_at(self, q, k, v, scale, q_offset, kv_len, max_scores)
        _refuse_what_is_no_input(q, k, v)
        _shapes_of(q, k, v)
        positions, k, v = positions_of(q_offset, kv_len, q, k, v)
        if positions is None:
            return self._attend(q, k, v, scale, max_scores)
        return self._attend_placed(q, k, v, scale, positions, max_scores)

    def _attend_placed(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, places: Positions | Sequences, max_scores: bool = False
    ) -> tuple[Tensor, ...]:
        """out and lse where the functions see other places than those in the tensors, and the largest scores if asked for."""
        _refuse_what_is_no_input(q, k, v)
        _shapes_of(q, k, v)
        current = settings.current()
        if current.eager:
            score_mod, mask_mod, options = places.in_python(self.score_mod, self.mask_mod)
            return Kernel(score_mod, mask_mod)._eager(q, k, v, scale, max_scores, **options)
        if is_watched(q, k, v):
            return self._watched(q, k, v, scale, places, max_scores)
        if current.check:
            places.refuse_values(q.shape[2], k.shape[2])
        traced = places.placed(*frontend.trace(self.score_mod, self.mask_mod))
        launch, q, k, v, tensors = self._launch(q, k, v, scale, current, traced, max_scores)
        if current.check:
            self._check(launch, q, k, tensors)
        ordinary, launch = launch, decoding(launch, q, k, v, tensors)
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
        return _forward_map(launch, tensors, device)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Explanation:
        """What the variant is as mathematics, its work and roofline on this device, its tiles, what is loaded at which rate, and why this
        backend. Runs no kernel."""
        launch, *rows, tensors = self._launch(q, k, v, scale, settings.current())
        copied = [name for name, given, x in zip("qkv", (q, k, v), rows) if given.stride(-1) != x.stride(-1)]
        if scale is None:
            scale = launch.scale
        from flexc.explain import explain

        explanation = explain(launch, _forward_map(launch, tensors, q.device), float(scale), copied, self.__name__, tensors)
        ran = decoding(launch, q, k, v, tensors).artifact
        return replace(explanation, backend=ran.backend.name, reason=ran.reason, plan=str(ran.plan))

    def captured(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The captured tensors that require a gradient in a call on q, k and v, by the name that the graph gives them."""
        _refuse_what_is_no_input(q, k, v)
        _shapes_of(q, k, v)
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
        _refuse_what_is_no_input(q, k, v)
        if scale is not None:
            scale = _finite(scale)
        if operators.is_distributed(q, k, v):
            from flexc import sharding

            if places is not None:
                what = "q_offset, kv_len and packed sequences with DTensors"
                raise UnsupportedError(f"{what}, on every backend: call the kernel on each rank's local tensors")
            return sharding.call(self, q, k, v, scale, max_scores)
        return operators.call(self, q, k, v, scale, places, max_scores)

    def _check(self, launch: Launch, q: Tensor, k: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """FLEXC_CHECK=1: what kernels would not notice."""
        from flexc.index_check import Scores, check_indices

        scores = Scores(q.detach(), k.detach(), launch.scale)
        check_indices(launch.artifact.traced, launch.shapes, tensors, launch.scalars, q.device, scores)
        verify_facts(tensors, [read.name for read in launch.artifact.traced.tensors])

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        current: settings.Settings,
        traced: tuple[frontend.Trace, frontend.Binding] | None = None,
        max_scores: bool = False,
    ) -> tuple[Launch, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """The launch for these inputs, and the inputs as kernels take them: q, k, v and the captured tensors.

        Args:
            traced: what to run in place of the kernel's own functions.
            max_scores: the launch also gives the largest scores.
        """
        likeness = likeness_of(q, k, v, max_scores, _wants_determinism(), current.device_maps, current.dump, current.override)
        known = self._ready.like(likeness) if likeness is not None else None
        if known is not None and (scale is None or (type(scale) is float and 0.0 < scale <= LARGEST_SCALE)):
            trace, binding = frontend.trace(self.score_mod, self.mask_mod) if traced is None else traced
            ready = known.get(trace)
            if ready is not None:
                tensors = _taken(binding.tensors, trace.graph, q.device) if binding.tensors else ()
                if ready.extents:
                    shapes = ready.launch.shapes
                    refuse_wrong_sizes(ready.extents, trace.graph, tensors, shapes.batch, shapes.heads_q, "q has")
                launch = ready.at(scale, binding.scalars)
                return self._tuned(launch, trace, q, k, v, tensors) if self._autotune else launch, q, k, v, tensors
        _refuse_what_is_no_input(q, k, v)
        taken = q, k, v
        if scale is not None:
            q, scale = _positive_scale(q, scale)
        q, k, v = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(v)
        shapes = _shapes_of(q, k, v)
        trace, binding = frontend.trace(self.score_mod, self.mask_mod) if traced is None else traced
        tensors = _taken(binding.tensors, trace.graph, q.device)
        artifact, extents, options = self._prepared(trace, tensors, shapes, q.device, max_scores)
        default = 1.0 / math.sqrt(shapes.head_dim)
        launch = Launch(artifact, shapes, default, binding.scalars, options, self.__name__)
        ready = Ready(launch, extents)
        if likeness is not None and q is taken[0] and k is taken[1] and v is taken[2]:  # the launch is for copies otherwise
            self._ready.keep(likeness, trace, ready)
        launch = ready.at(scale, binding.scalars)
        return self._tuned(launch, trace, q, k, v, tensors) if self._autotune else launch, q, k, v, tensors

    def _tuned(self, launch: Launch, trace: frontend.Trace, q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...]) -> Launch:
        from flexc.autotune import tuned

        return tuned(launch, trace, q, k, v, tensors)

    def _prepared(
        self, trace: frontend.Trace, tensors: tuple[Tensor, ...], shapes: Shapes, device: torch.device, max_scores: bool
    ) -> tuple[Artifact, tuple[Extent, ...], Options]:
        extents = _extents.get(trace)
        if extents is None:
            extents = _extents[trace] = extents_of(trace.graph)
        refuse_wrong_sizes(extents, trace.graph, tensors, shapes.batch, shapes.heads_q, "q has")  # before anything is compiled
        backend, reason = backends.choose(self._backend, device)
        target = pipeline.target_of(device)
        options = self._options
        if max_scores or _wants_determinism():
            options = replace(options, max_scores=max_scores, deterministic=options.deterministic or _wants_determinism())
        return pipeline.artifact_for(trace, shapes, target, backend, reason, options, self.__name__), extents, options

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, max_scores: bool, **positions: Any) -> tuple[Tensor, ...]:
        """FLEXC_EAGER=1: the user's own functions on dense tensors, where print and breakpoint work."""
        from flexc.reference import eager, largest_scores

        _refuse_what_is_no_input(q, k, v)
        _shapes_of(q, k, v)
        named = {"scale": None if scale is None else _finite(scale), **positions}
        results = eager(self.score_mod, self.mask_mod, q, k, v, **named)
        return (*results, largest_scores(self.score_mod, self.mask_mod, q, k, **named).float()) if max_scores else results


_extents: WeakKeyDictionary[frontend.Trace, tuple[Extent, ...]] = WeakKeyDictionary()


def _wants_determinism() -> bool:
    """`torch.use_deterministic_algorithms(True)` asks every kernel for it. With warn_only=True a kernel that cannot be so is let be."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _forward_map(launch: Launch, tensors: tuple[Tensor, ...], device: torch.device) -> BlockMap:
    return MAPS.blocks(launch, launch.artifact.map_blocks.get("forward", (128, 128)), tensors, device)


def _given(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("precision", "deterministic", "batch_invariant")}


# --- validation ---------------------------------------------------------------------------------------------------------------------


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


def _refuse_arity(function: Any, expected: int, name: str, arguments: str) -> None:
    if function is None:
        return
    if not callable(function):
        raise InputError(f"{name} is a {type(function).__name__}; expected a function {arguments}")
    found = frontend.arity(function)
    if found != expected:
        meant = " (this looks like a mask: pass it as mask_mod)" if (found, expected) == (4, 5) else ""
        meant = " (this looks like a score function: pass it as score_mod)" if (found, expected) == (5, 4) else meant
        raise InputError(f"{name} takes {found} positional arguments, expected {expected}: {arguments}{meant}")


def _refuse_what_is_no_input(q: Any, k: Any, v: Any) -> None:
    """Each alone: a dense tensor of four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.is_nested:
            raise InputError(f"{name} is a nested tensor; expected a dense one: pack the sequences and mask with flexc.masks.document")
        if x.layout is not torch.strided:
            raise InputError(f"{name} has layout {x.layout}; expected a dense tensor: convert it with {name}.to_dense()")
        if x.dim() != 4:
            raise ShapeError(f"{name} has {x.dim()} dimensions, {_shape(x)}; expected 4: [batch, heads, tokens, head_dim]")


def refuse_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse tensors that cannot be q, k and v, whether their sizes are numbers or symbols."""
    _refuse_what_is_no_input(q, k, v)
    _shapes.__wrapped__(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, True)


def _shapes_of(q: Tensor, k: Tensor, v: Tensor) -> Shapes:
    return _shapes(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, _in_bulk(q, k, v))


@lru_cache(maxsize=4096)
def _shapes(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    q_device: torch.device,
    k_device: torch.device,
    v_device: torch.device,
    in_bulk: bool,
) -> Shapes:
    """All three together. Kept, because most calls repeat one before."""
    if q_dtype not in _DTYPES:
        raise InputError(f"q has dtype {q_dtype}; expected float16, bfloat16 or float32: convert it with q.to(torch.bfloat16)")
    if not q_dtype == k_dtype == v_dtype:
        raise InputError(f"q, k and v must have one dtype, got {q_dtype}, {k_dtype} and {v_dtype}")
    if not q_device == k_device == v_device:
        raise InputError(f"q, k and v must be on one device, got {q_device}, {k_device} and {v_device}")
    batch, heads_q, q_len, head_dim = q_shape
    heads_kv, kv_len, head_dim_v = k_shape[1], k_shape[2], v_shape[3]
    if not batch == k_shape[0] == v_shape[0]:
        raise ShapeError(f"q, k and v must have one batch size, got {batch}, {k_shape[0]} and {v_shape[0]}")
    if k_shape[3] != head_dim:
        raise ShapeError(f"q and k must have one head_dim, got {head_dim} and {k_shape[3]}")
    if v_shape[1] != heads_kv:
        raise ShapeError(f"k and v must have as many heads, got {heads_kv} and {v_shape[1]}")
    if v_shape[2] != kv_len:
        raise ShapeError(f"k and v must have as many tokens, got {kv_len} and {v_shape[2]}")
    if heads_q == 0 or heads_kv == 0 or heads_q % heads_kv:
        raise ShapeError(f"the heads of q must be a multiple of the heads of k and v, and not 0, got {heads_q} and {heads_kv}")
    if head_dim == 0 or head_dim_v == 0:
        raise ShapeError(f"head_dim must be at least 1, got {head_dim} for q and k, {head_dim_v} for v")
    if max(q_len, kv_len) >= MAX_TOKENS:
        raise UnsupportedError(f"expected fewer than {MAX_TOKENS} tokens on every backend, got {max(q_len, kv_len)}")
    return Shapes(batch, heads_q, heads_kv, q_len, kv_len, head_dim, head_dim_v, q_dtype, in_bulk)


def _in_bulk(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.is_cuda and backends.reads_in_bulk((q, k, v))


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def _finite(scale: Any) -> float:
    if isinstance(scale, Tensor):
        if scale.requires_grad:
            raise InputError("scale requires a gradient, which would be lost; multiply q by it, or capture it in the score function")
        if scale.numel() != 1:
            raise InputError(f"scale is a tensor of shape {_shape(scale)}; expected one number")
        scale = scale.item()
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise InputError(f"scale is a {type(scale).__name__}; expected a number")
    scale = float(scale)
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise InputError(f"scale must be finite in float32, got {scale}")
    return scale


def _positive_scale(q: Tensor, scale: Any) -> tuple[Tensor, float]:
    """Kernels take a positive scale: a negative one turns q around, zero makes it zero."""
    scale = _finite(scale)
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)


def as_kernels_take(
    kernel: Kernel, q: Tensor, scale: float | None, positions: Positions | None
) -> tuple[Tensor, float, tuple[Tensor, ...], frontend.Trace, frontend.Binding]:
    """q, the scale, the captured tensors, and the trace at positions with its binding, for a call that makes its own launch."""
    if scale is not None:
        q, scale = _positive_scale(q, scale)
    trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    if positions is not None:
        trace, binding = positions.placed(trace, binding)
    tensors = _taken(binding.tensors, trace.graph, q.device)
    refuse_wrong_sizes(extents_of(trace.graph), trace.graph, tensors, q.shape[0], q.shape[1], "q has")
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    return _contiguous_rows(q), scale, tensors, trace, binding


def _taken(tensors: tuple[Tensor, ...], graph: Graph, device: torch.device) -> tuple[Tensor, ...]:
    """Captured tensors as kernels take them."""
    for slot, tensor in enumerate(tensors):
        if type(tensor) not in PLAIN:
            operators.refuse_distributed(tensor, graph.tensors[slot].name)
        if tensor.device != device:
            moved = _on_device(tensor, graph.tensors[slot].name, device)
            tensors = (*tensors[:slot], moved, *tensors[slot + 1 :])
    return tensors


def _contiguous_rows(x: Tensor) -> Tensor:
    """The same tensor if its last dimension is contiguous, else one copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


_on_gpu: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _on_device(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """A captured tensor as kernels read it: on q's device; a single number may come from the CPU, and is copied whenever it changes."""
    if tensor.dim() or tensor.device.type != "cpu":
        raise InputError(f"the captured tensor {name} is on {tensor.device} and q on {device}: move it with {name}.to({str(device)!r})")
    if tensor.requires_grad or tensor.is_inference():
        return tensor.to(device)
    version = (tensor._version, tensor.data_ptr(), device)
    found = _on_gpu.get(tensor)
    if found is None or found[0] != version:
        # One copy while the number stays: block maps are kept for as long as the tensors that they were made from.
        found = _on_gpu[tensor] = version, number_on(tensor, device)
    return found[1]
