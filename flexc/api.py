"""What users call: `kernel`, `attention`, and the Kernel that they return."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexc import backends, frontend, pipeline, settings
from flexc.algebra import Mask
from flexc.autograd import Attention
from flexc.backends import Options, Shapes
from flexc.errors import FlexcError, InputError, ShapeError, UnsupportedError
from flexc.explain import Explanation, explain
from flexc.ir.graph import Graph, topological
from flexc.launch import Launch, MapCache
from flexc.pipeline import Artifact
from flexc.sparsity import BlockMap

Tensor = torch.Tensor
Function = Callable[..., Any]

_PRECISIONS = ("fast", "exact", "tf32")
MAX_TOKENS = 2**24  # positions are exact in float32 below it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AuxOutput:
    """What attention can return besides its output.

    Attributes:
        lse: float32 [B, Hq, Sq], natural logarithm of the sum of exponentials of a row's scores, differentiable; -inf for a row without
            keys.
    """

    lse: Tensor


def kernel(function: Function) -> Kernel:
    """Make an attention kernel of one function.

    Args:
        function: with five arguments (score, batch, head, q_idx, kv_idx) a score function: one score and its position in, the new score
            out. With four (batch, head, q_idx, kv_idx) a mask function: may this query see this key?

    Raises:
        TraceError: another number of arguments.
    """
    arity = frontend.arity(function)
    if arity == 5:
        return attention(score_mod=function)
    if arity == 4:
        return attention(mask_mod=function)
    raise InputError(
        f"{getattr(function, '__name__', function)!r} takes {arity} positional arguments: expected 5 (score, batch, head, q_idx, kv_idx) "
        "for a score function or 4 (batch, head, q_idx, kv_idx) for a mask function"
    )


def attention(
    score_mod: Function | None = None,
    mask_mod: Function | Mask | None = None,
    *,
    backend: str = "auto",
    autotune: bool = False,
    precision: str = "fast",
    deterministic: bool = False,
) -> Kernel:
    """Make an attention kernel of a score function and a mask function; None for plain scores, for no mask.

    Args:
        score_mod: (score, batch, head, q_idx, kv_idx) → score, float32.
        mask_mod: (batch, head, q_idx, kv_idx) → bool, or a Mask.
        backend: "auto", "triton" or "cpu".
        autotune: time the plausible tiles on the first call's shapes and block structure, and keep the fastest.
        precision: "fast" (hardware approximations where they stay within twice eager PyTorch's error), "exact" (none), or "tf32" (fast, and
            products of float32 tensors in TF32; otherwise float32 means float32).
        deterministic: equal bits from equal calls, gradients of captured tensors included.

    Raises:
        InputError: an unknown option, or a function with the wrong number of arguments.
    """
    return Kernel(score_mod, mask_mod, backend=backend, autotune=autotune, precision=precision, deterministic=deterministic)


class Kernel:
    """Attention with a score and a mask function. Call it on q, k, v; look inside it afterwards.

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
    ):
        if backend != "auto" and backend not in backends.BACKENDS and backend != "cute":
            backends.choose(backend, None)  # raises, naming the known ones
        if precision not in _PRECISIONS:
            raise InputError(f"unknown precision {precision!r}: expected " + ", ".join(f'"{known}"' for known in _PRECISIONS))
        _refuse_arity(score_mod, 5, "score_mod", "(score, batch, head, q_idx, kv_idx)")
        _refuse_arity(mask_mod, 4, "mask_mod", "(batch, head, q_idx, kv_idx)")
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self._backend = backend
        self._autotune = autotune
        self._options = Options(precision=precision, deterministic=deterministic)
        self._maps = MapCache()
        self._last: tuple[Launch, tuple[Tensor, ...], torch.device] | None = None
        self.__name__ = pipeline.title_of(score_mod, mask_mod)
        self.__doc__ = getattr(score_mod if score_mod is not None else mask_mod, "__doc__", None)

    def __repr__(self) -> str:
        return f"<flexc kernel {self.__name__}>"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, AuxOutput]:
        """Attention of q to k and v.

        Args:
            q: [B, Hq, Sq, D], float16, bfloat16 or float32 (float64 on the CPU), any strides.
            k: [B, Hkv, Skv, D]. Hq is a multiple of Hkv: query head h reads key/value head h // (Hq / Hkv).
            v: [B, Hkv, Skv, Dv].
            scale: on q·k before the score function; default 1 / sqrt(D).
            return_lse: also return AuxOutput.

        Returns:
            out [B, Hq, Sq, Dv] in q's dtype, or (out, AuxOutput). A row that may see no key is 0, with lse -inf and zero gradients.

        Raises:
            ShapeError, InputError: sizes, dtypes or devices do not fit.
            TraceError: a function cannot be compiled.
            UnsupportedError: the backend has no kernel for this.
        """
        shapes = _checked(q, k, v)
        if settings.current().eager:
            return self._eager(q, k, v, scale, return_lse)
        q, scale = _positive_scale(q, scale)
        launch, tensors = self._launch(q, k, v, shapes, scale)
        if settings.current().check:
            from flexc.index_check import check_indices

            check_indices(launch.artifact.traced, shapes, tensors, launch.scalars, q.device)
        q, k, v = (_contiguous_rows(x) for x in (q, k, v))
        self._last = (launch, tensors, q.device)
        out, lse = Attention.apply(launch, q, k, v, *tensors)
        return (out, AuxOutput(lse)) if return_lse else out

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
        maps = launch.block_maps(tensors, device, ("forward",))
        return maps["forward"] if maps else self._maps.get(launch, (128, 128), tensors, device)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Explanation:
        """What the variant is as mathematics, its work and roofline on this device, its tiles, what is loaded at which rate, and why this
        backend. Runs no kernel."""
        shapes = _checked(q, k, v)
        copied = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.stride(-1) != 1]
        q, scale = _positive_scale(q, scale)
        launch, tensors = self._launch(q, k, v, shapes, scale)
        maps = launch.block_maps(tensors, q.device, ("forward",))
        blocks = maps["forward"] if maps else self._maps.get(launch, (128, 128), tensors, q.device)
        return explain(launch, blocks, scale, copied, self.__name__)

    def captured(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The captured tensors that require a gradient, by the name that the graph gives them."""
        trace, binding = frontend.trace(self.score_mod, self.mask_mod)
        return {i.name: t for i, t in zip(trace.graph.tensors, binding.tensors, strict=True) if t.requires_grad}

    # --- steps of a call ---

    def _ran(self) -> tuple[Launch, tuple[Tensor, ...], torch.device]:
        if self._last is None:
            raise FlexcError(
                f"{self.__name__} has not run yet: call it on q, k, v first, or use `python -m flexc show FILE.py:NAME` to compile for a target"
            )
        return self._last

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, shapes: Shapes, scale: float) -> tuple[Launch, tuple[Tensor, ...]]:
        trace, binding = frontend.trace(self.score_mod, self.mask_mod)
        tensors = tuple(_on_device(tensor, given.name, q.device) for given, tensor in zip(trace.graph.tensors, binding.tensors, strict=True))
        _refuse_wrong_sizes(trace.graph, tensors, shapes)
        backend, reason = backends.choose(self._backend, q.device)
        target = pipeline.target_of(q.device)
        artifact = pipeline.artifact_for(trace, shapes, target, backend, reason, self._options, self.__name__)
        launch = Launch(artifact, shapes, scale, binding.scalars, self._maps, self._options, self.__name__)
        if self._autotune:
            from flexc.autotune import tuned

            launch = tuned(launch, trace, q, k, v, tensors)
        return launch, tensors

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, return_lse: bool) -> Tensor | tuple[Tensor, AuxOutput]:
        """FLEXC_EAGER=1: the user's own functions on dense tensors, where print and breakpoint work."""
        from flexc.reference import eager

        out, lse = eager(self.score_mod, self.mask_mod, q, k, v, scale=scale)
        return (out, AuxOutput(lse)) if return_lse else out


# --- validation ---------------------------------------------------------------------------------------------------------------------


def _refuse_arity(function: Any, expected: int, name: str, arguments: str) -> None:
    if function is None:
        return
    if isinstance(function, Kernel):
        raise InputError(f"{name} is a flexc kernel; expected the plain function: pass {name}={function.__name__}.{name}")
    if not callable(function):
        raise InputError(f"{name} is a {type(function).__name__}; expected a function {arguments}")
    found = frontend.arity(function)
    if found != expected:
        meant = " (this looks like a mask: pass it as mask_mod)" if (found, expected) == (4, 5) else ""
        meant = " (this looks like a score function: pass it as score_mod)" if (found, expected) == (5, 4) else meant
        raise InputError(f"{name} takes {found} positional arguments, expected {expected}: {arguments}{meant}")


def _checked(q: Any, k: Any, v: Any) -> Shapes:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.dim() != 4:
            raise ShapeError(f"{name} has {x.dim()} dimensions, {_shape(x)}; expected 4: [batch, heads, tokens, head_dim]")
    if q.dtype not in _DTYPES:
        raise InputError(f"q has dtype {q.dtype}; expected float16, bfloat16 or float32: convert it with q.to(torch.bfloat16)")
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    batch, heads_q, q_len, head_dim = q.shape
    heads_kv, kv_len, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ShapeError(f"q, k and v must have one batch size, got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[3] != head_dim:
        raise ShapeError(f"q and k must have one head_dim, got {head_dim} and {k.shape[3]}")
    if v.shape[1] != heads_kv:
        raise ShapeError(f"k and v must have as many heads, got {heads_kv} and {v.shape[1]}")
    if v.shape[2] != kv_len:
        raise ShapeError(f"k and v must have as many tokens, got {kv_len} and {v.shape[2]}")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ShapeError(f"the heads of q must be a multiple of the heads of k and v, got {heads_q} and {heads_kv}")
    if head_dim == 0 or head_dim_v == 0:
        raise ShapeError(f"head_dim must be at least 1, got {head_dim} for q and k, {head_dim_v} for v")
    if max(q_len, kv_len) >= MAX_TOKENS:
        raise UnsupportedError(f"expected fewer than {MAX_TOKENS} tokens, got {max(q_len, kv_len)}")
    return Shapes(batch, heads_q, heads_kv, q_len, kv_len, head_dim, head_dim_v, q.dtype, _in_bulk(q, k, v))


def _in_bulk(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.device.type == "cuda" and backends.reads_in_bulk([q, k, v])


def _shape(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def _positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Kernels take a positive scale: a negative one turns q around, zero makes it zero."""
    if scale is None:
        return q, 1.0 / math.sqrt(q.shape[-1])
    scale = float(scale)
    if not math.isfinite(scale):
        raise InputError(f"scale must be finite, got {scale}")
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)


def _contiguous_rows(x: Tensor) -> Tensor:
    """The same tensor if its last dimension is contiguous, else one copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 and x.stride(-1) == 1 else x.contiguous()


def _on_device(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """A captured tensor as kernels read it: on q's device; a single number may come from the CPU."""
    if tensor.device == device:
        return tensor
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        return tensor.to(device)
    raise InputError(f"the captured tensor {name} is on {tensor.device} and q on {device}: move it with {name}.to({str(device)!r})")


def _refuse_wrong_sizes(graph: Graph, tensors: tuple[Tensor, ...], shapes: Shapes) -> None:
    """A table indexed by `batch` or `head` itself has one entry for each, or the function was written for other sizes."""
    extents = {"batch": shapes.batch, "head": shapes.heads_q}
    for node in topological(node for _, node in graph.outputs):
        if node.op != "gather":
            continue
        for axis, index in enumerate(node.args):
            name = index.attrs[0] if index.op == "input" else None
            if name in extents:
                size = tensors[node.attrs[0]].shape[axis]
                if size != extents[name]:
                    tensor = graph.tensors[node.attrs[0]].name
                    raise ShapeError(
                        f"the captured tensor {tensor} has {size} entries along dimension {axis}, which `{name}` indexes; "
                        f"q has {extents[name]} {'batch entries' if name == 'batch' else 'heads'}"
                    )

