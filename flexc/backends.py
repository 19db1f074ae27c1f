"""The backends behind one interface: what each takes, how it plans and prints, which blocks it walks, how its modules are called."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flexc.errors import InputError, InternalError, ToolchainError, UnsupportedError
from flexc.ir.graph import Graph
from flexc.later import Later
from flexc.target import Target

Tensor = torch.Tensor

# Only a compilation needs these.
cpu_codegen: Any = Later("flexc.codegen.cpu")
cute_codegen: Any = Later("flexc.codegen.cute")
triton_codegen: Any = Later("flexc.codegen.triton")
_base2: Any = Later("flexc.passes.base2")
_derivative: Any = Later("flexc.passes.derivative")


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call. What of them reaches the generated code: `Backend.reads`.

    Attributes:
        batch, heads_q, heads_kv: B, Hq, Hkv.
        q_len, kv_len: Sq, Skv, in tokens.
        head_dim, head_dim_v: D, Dv.
        dtype: of q, k, v and the output.
        bulk: q, k and v lie so that hardware bulk copies (TMA) can read them: 16-byte aligned base and strides.
        page: tokens of a page of the cache, 0 for keys that lie one after another.
        ragged: queries of all batch entries are packed one after another; q_len is their mean.
        cache: dtype of k and v where it is another, of eight bits; token_scales: each of their tokens has a scale of its own.
    """

    batch: int
    heads_q: int
    heads_kv: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    bulk: bool = True
    page: int = 0
    ragged: bool = False
    cache: str = ""
    token_scales: bool = False

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def dtype_name(self) -> str:
        """The dtype without "torch."."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Options:
    """What a user can ask of a kernel: all of it is part of the key.

    Attributes:
        precision: "fast" (hardware approximations within the accuracy rule), "exact" (none), "tf32" (fast, float32 products in TF32).
        deterministic: gradients of captured tensors must not depend on the order of atomic additions.
        batch_invariant: a row's bits must not depend on what else is in the batch, on padding or on pages.
        tiles: (kernel, tile) pairs that replace the computed tiles; how autotuning hands over its winners.
        max_scores: the forward pass also returns the largest score of each row.
    """

    precision: str = "fast"
    deterministic: bool = False
    batch_invariant: bool = False
    tiles: tuple[tuple[str, Any], ...] = ()
    max_scores: bool = False


@dataclass(slots=True)
class Call:
    """The values of one call, as a generated module takes them: last dimensions contiguous, scale > 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    tensors: tuple[Tensor, ...]
    scalars: tuple[int | float, ...]


Maps = Mapping[str, Any]  # name of a map → something with row_walk() and column_walk(), for the CPU a BlockMap


@dataclass(frozen=True)
class Backend:
    """One way to run attention.

    Attributes:
        name: "cpu", "cute" or "triton".
        templates: files below templates/ that its modules are made from; they are part of the key.
        lower: graph after the passes → what `plan` and `emit` take.
        plan: (graph, shapes, target, options) → frozen dataclass.
        reads: shapes → what `plan` takes from them. Calls with equal ones share a module, so lengths that grow compile nothing.
        emit: (graph, plan, target, title) → module text.
        blocks: plan → block size of each map that the module's kernels walk, by name; empty where they walk none.
        forward: (module, call, maps) → out, lse, and the largest scores if the options ask for them.
        backward: (module, call, maps, out, lse, dout, dlse) → dq, dk, dv, gradients of the captured tensors.
        packages: distributions whose versions are part of the key.
        workspace_bytes: (plan, shapes, how many pairs of batch and head have a block map of their own) → what its backward pass
            allocates besides results and sums for captured tensors; two float32 numbers a query where nothing else is said.
        backward_by: backends whose module runs the backward pass, from this one's out and lse: the first that can; empty for this one.
        otherwise: the backend that takes the requests which `plan` refuses; None: they are refused.
        record: as `forward`, which also returns a function (q, k, v, scale, tensors, scalars, walk) that launches the same again with less
            work for the host, or None; its result is None where the call is not of that kind. None where `forward` costs little.
        gradient_bytes: (lowered graph, deterministic, elements of each captured tensor) → bytes of what a backward pass adds the gradients
            of captured tensors up in, by the tensor's name.
    """

    name: str
    templates: tuple[str, ...]
    lower: Callable[[Graph], Graph]
    plan: Callable[[Graph, Shapes, Target, Options], Any]
    reads: Callable[[Shapes], tuple]
    emit: Callable[[Graph, Any, Target, str], str]
    blocks: Callable[[Any], dict[str, tuple[int, int]]]
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Sequence[Tensor | None]]]
    packages: tuple[str, ...]
    backward_by: tuple[Backend, ...] = ()
    workspace_bytes: Callable[[Any, Shapes, int], int] = lambda plan, s, maps: 8 * s.batch * s.heads_q * s.q_len
    otherwise: Backend | None = None
    record: Callable[..., Any] | None = None
    gradient_bytes: Callable[[Graph, bool, Sequence[int]], dict[str, int]] = lambda graph, deterministic, elements: {}


def _plan_cpu(graph: Graph, shapes: Shapes, target: Target, options: Options) -> Any:
    if options.batch_invariant:
        raise UnsupportedError("batch_invariant=True on the cpu backend, whose matrix products depend on their sizes: expected a GPU")
    return cpu_codegen.plan(
        graph,
        q_len=shapes.q_len,
        kv_len=shapes.kv_len,
        head_dim=shapes.head_dim,
        head_dim_v=shapes.head_dim_v,
        dtype=shapes.dtype_name,
        max_scores=options.max_scores,
    )


def _sizes(shapes: Shapes) -> dict[str, Any]:
    """What every plan of a GPU kernel takes of the sizes."""
    return {"dtype": shapes.dtype_name, "head_dim": shapes.head_dim, "head_dim_v": shapes.head_dim_v, "group": shapes.group}


def _plan_triton(graph: Graph, shapes: Shapes, target: Target, options: Options) -> Any:
    return triton_codegen.make_plan(
        graph,
        target,
        **_sizes(shapes),
        tma=shapes.bulk,
        precision=options.precision,
        deterministic=options.deterministic,
        interpreted=is_interpreted(),
        max_scores=options.max_scores,
        tiles=dict(options.tiles),
    )


def _decode_rows(shapes: Shapes) -> int:
    return triton_codegen.tile_rows(shapes.group * shapes.q_len, shapes.head_dim + shapes.head_dim_v, shapes.dtype_name)


def _plan_decode(graph: Graph, shapes: Shapes, target: Target, options: Options) -> Any:
    return triton_codegen.plan_decode(
        graph,
        target,
        **_sizes(shapes),
        rows=_decode_rows(shapes),
        page=shapes.page,
        ragged=shapes.ragged,
        cache=shapes.cache,
        token_scales=shapes.token_scales,
        batch_invariant=options.batch_invariant,
        precision=options.precision,
        interpreted=is_interpreted(),
        tile=dict(options.tiles).get("decode"),
    )


def _plan_cute(graph: Graph, shapes: Shapes, target: Target, options: Options) -> Any:
    return cute_codegen.make_plan(
        graph,
        target,
        **_sizes(shapes),
        bulk=shapes.bulk,
        precision=options.precision,
        tile=dict(options.tiles).get("forward"),
        max_scores=options.max_scores,
    )


def _plan_hopper(graph: Graph, shapes: Shapes, target: Target, options: Options) -> Any:
    if cute_codegen.reads_pairs(graph):
        raise UnsupportedError("captured values that are read for each pair of positions, which kernels of the cute backend do one by one")
    return _plan_cute(graph, shapes, target, options)


def _plan_cute_backward(graph: Graph, shapes: Shapes, target: Target, options: Options) -> Any:
    if cute_codegen.reads_pairs(graph, diagonals=False):
        raise UnsupportedError("captured values of pairs of positions, which the backward kernel of the cute backend reads one by one")
    return cute_codegen.make_backward_plan(
        graph,
        target,
        **_sizes(shapes),
        bulk=shapes.bulk,
        precision=options.precision,
        deterministic=options.deterministic,
        tile=dict(options.tiles).get("backward"),
    )


def _walked(maps: Maps) -> tuple[Any, tuple[int, int]]:
    """The runs of each row of blocks, and the block size; without a map all keys for every row, in steps of a size that suits any plan."""
    found = maps.get("forward")
    return (None, (128, 128)) if found is None else (found.rows(), found.block)


def _forward_cpu(module: Any, call: Call, maps: Maps) -> tuple[Tensor, ...]:
    rows, block = _walked(maps)
    return module.forward(call.q, call.k, call.v, call.scale, call.tensors, call.scalars, rows, block)


def _backward_cpu(module: Any, call: Call, maps: Maps, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
    rows, block = _walked(maps)
    return module.backward(call.q, call.k, call.v, out, lse, dout, dlse, call.scale, call.tensors, call.scalars, rows, block)


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device: make it the tensors'."""
    # With tensors of a GPU at hand CUDA is initialised: nothing needs PyTorch's look at that.
    return _HERE if device.type != "cuda" or device.index == torch._C._cuda_getDevice() else torch.cuda.device(device)


def _forward_on_gpu(module: Any, call: Call, maps: Maps) -> tuple[Tensor, ...]:
    rows = maps["forward"].row_walk() if maps else None
    with on_device(call.q.device):
        return module.forward(call.q, call.k, call.v, call.scale, call.tensors, call.scalars, rows)


def _record(again: Any, module: Any, call: Call, maps: Maps) -> tuple[tuple[Tensor, ...], Callable[..., Any] | None]:
    if call.q.device.type != "cuda":
        return _forward_on_gpu(module, call, maps), None
    rows = maps["forward"].row_walk() if maps else None
    with on_device(call.q.device):
        return again.record(module, call.q, call.k, call.v, call.scale, call.tensors, call.scalars, rows)


def _backward_triton(module: Any, call: Call, maps: Maps, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
    rows, columns = (maps["dq"].row_walk(), maps["dkv"].column_walk()) if maps else (None, None)
    if not reads_in_bulk([dout]):
        dout = dout.contiguous()
    if dlse is not None:
        dlse = dlse.contiguous()
    with on_device(call.q.device):
        return module.backward(call.q, call.k, call.v, out, lse, dout, dlse, call.scale, call.tensors, call.scalars, rows, columns)


def _backward_cute(module: Any, call: Call, maps: Maps, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
    columns = maps["backward"].column_walk() if maps else None
    if not reads_in_bulk([dout]):
        dout = dout.clone(memory_format=torch.contiguous_format)  # also where only the base is not aligned
    if dlse is not None:
        dlse = dlse.contiguous()
    with on_device(call.q.device):
        return module.backward(call.q, call.k, call.v, out, lse, dout, dlse, call.scale, call.tensors, call.scalars, columns)


def _no_forward(module: Any, call: Call, maps: Maps) -> tuple[Tensor, Tensor]:
    raise InternalError("this module has backward kernels only")


def _no_backward(module: Any, call: Call, maps: Maps, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
    raise InternalError("this module has no backward kernel: Launch.backward takes that of backward_by, and decoding has none")


CPU = Backend(
    name="cpu",
    templates=("cpu/attention.py.j2",),
    lower=lambda graph: _derivative.differentiate(graph),
    plan=_plan_cpu,
    reads=lambda s: (s.dtype, cpu_codegen.block_sizes(s.q_len, s.kv_len)),
    emit=lambda graph, plan, target, title: cpu_codegen.emit(graph, plan),
    blocks=lambda plan: {"forward": plan.block} if plan.has_mask else {},
    forward=_forward_cpu,
    backward=_backward_cpu,
    packages=("torch",),
)
TRITON = Backend(
    name="triton",
    templates=("triton/attention.py.j2", "triton/host.py.j2"),
    lower=lambda graph: _base2.lower_to_base2(_derivative.differentiate(graph)),
    plan=_plan_triton,
    reads=lambda s: (s.dtype, s.head_dim, s.head_dim_v, s.group, s.bulk),
    emit=lambda graph, plan, target, title: triton_codegen.emit(graph, plan, target, title=title),
    blocks=lambda plan: triton_codegen.map_blocks(plan),
    forward=_forward_on_gpu,
    backward=_backward_triton,
    packages=("torch", "triton"),
    record=partial(_record, Later("flexc.runtime.triton_again")),
    gradient_bytes=lambda *given: triton_codegen.gradient_bytes(*given),
)
CUTE_BACKWARD = Backend(
    name="cute",
    templates=(
        "cute/backward.py.j2",
        "cute/backward_queue.py.j2",
        "cute/backward_each.py.j2",
        "cute/backward_host.py.j2",
        "cute/sections.py.j2",
    ),
    lower=lambda graph: _base2.lower_to_base2(_derivative.differentiate(graph)),
    plan=_plan_cute_backward,
    reads=lambda s: ("backward", s.dtype, s.head_dim, s.head_dim_v, s.group, s.bulk),
    emit=lambda graph, plan, target, title: cute_codegen.emit_backward(graph, plan, target, title=title),
    blocks=lambda plan: cute_codegen.backward_map_blocks(plan),
    forward=_no_forward,
    backward=_backward_cute,
    packages=("torch", "nvidia-cutlass-dsl"),
    workspace_bytes=lambda plan, s, maps: cute_codegen.backward_workspace_bytes(plan, s.batch * s.heads_q, s.q_len, s.kv_len, maps),
    gradient_bytes=lambda graph, deterministic, elements: cute_codegen.backward_gradient_bytes(graph, elements),
)
CUTE = Backend(
    name="cute",
    templates=("cute/forward.py.j2", "cute/host.py.j2", "cute/sections.py.j2"),
    lower=lambda graph: _base2.lower_to_base2(_derivative.differentiate(graph)),
    plan=_plan_cute,
    reads=lambda s: (s.dtype, s.head_dim, s.head_dim_v, s.group, s.bulk),
    emit=lambda graph, plan, target, title: cute_codegen.emit(graph, plan, target, title=title),
    blocks=lambda plan: cute_codegen.map_blocks(plan),
    forward=_forward_on_gpu,
    backward=_no_backward,
    packages=("torch", "nvidia-cutlass-dsl"),
    backward_by=(CUTE_BACKWARD, TRITON),
    record=partial(_record, Later("flexc.runtime.cute_again")),
)
DECODE = Backend(  # the triton backend's way for short queries against many keys: a packed graph, forward only
    name="triton",
    templates=("triton/decode.py.j2", "triton/decode_host.py.j2"),
    lower=lambda graph: _base2.lower_to_base2(graph),
    plan=_plan_decode,
    reads=lambda s: ("decode", s.dtype, s.head_dim, s.head_dim_v, s.group, s.page, s.ragged, s.cache, s.token_scales, _decode_rows(s)),
    emit=lambda graph, plan, target, title: triton_codegen.emit_decode(graph, plan, title=title),
    blocks=lambda plan: triton_codegen.map_blocks(plan),
    forward=_forward_on_gpu,
    backward=_no_backward,
    packages=("torch", "triton"),
)
HOPPER = replace(CUTE, plan=_plan_hopper, otherwise=TRITON)  # what "auto" takes there
BACKENDS = {backend.name: backend for backend in (TRITON, CPU, CUTE)}


def backward_of(backend: Backend, graph: Graph, shapes: Shapes, target: Target, options: Options) -> tuple[Backend, str]:
    """The backend whose module runs the backward pass, and why it is not the first that might; the graph is lowered.

    Raises:
        UnsupportedError: none of them can.
    """
    why = ""
    for other in backend.backward_by[:-1]:
        try:
            other.plan(graph, shapes, target, options)
        except UnsupportedError as error:
            why = str(error)
        else:
            return other, why
    return (backend.backward_by or (backend,))[-1], why


def is_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def refuse_unknown(name: Any) -> None:
    """Refuse what is neither "auto" nor a backend's name."""
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise InputError(f'unknown backend {name!r}: expected "auto", ' + ", ".join(f'"{known}"' for known in BACKENDS))


def choose(name: str, device: torch.device | None, arch: str = "") -> tuple[Backend, str]:
    """The backend to use and why.

    Args:
        name: "auto" or a backend's name.
        device: where the tensors are; None if code is only compiled, for a target of this `arch`.

    Raises:
        InputError: no such backend.
        UnsupportedError: the backend cannot run on this device.
        ToolchainError: a package is missing.
    """
    refuse_unknown(name)
    if name == "auto":
        if device is None or device.type == "cuda":
            _need_triton()
            if (arch if device is None else Target.of(device).arch) not in cute_codegen.ARCHITECTURES:
                return TRITON, "a CUDA device: triton, the fastest backend that supports every request there"
            try:
                _need_cute()
            except ToolchainError as error:
                return TRITON, f"a Hopper GPU, but {error}"
            return HOPPER, "a Hopper GPU: cute, the fastest backend there"
        if device.type == "cpu":
            return CPU, "the tensors are on the CPU: blockwise PyTorch"
        raise UnsupportedError(f"device {device.type}: expected cuda or cpu")
    backend = BACKENDS[name]
    if backend is CUTE:
        _need_cute()
        if device is not None and (device.type != "cuda" or Target.of(device).arch not in cute_codegen.ARCHITECTURES):
            raise UnsupportedError(f'the cute backend needs tensors on a Hopper GPU, got {device}: use backend="triton", or "auto"')
    elif backend is TRITON:
        _need_triton()
        if device is not None and device.type != "cuda" and not is_interpreted():
            raise UnsupportedError(
                f"the triton backend needs CUDA tensors, got {device.type}: move q, k and v to a GPU, "
                "or set TRITON_INTERPRET=1 to debug there"
            )
    elif device is not None and device.type != "cpu":
        raise UnsupportedError(f"the cpu backend needs CPU tensors, got {device.type}")
    return backend, f"asked for by backend={name!r}"


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ToolchainError("the triton backend needs the package triton >= 3.5: pip install triton")


def _need_cute() -> None:
    _need_triton()  # for the backward pass, and for the tools that read machine code
    for module, package in (("cutlass", "nvidia-cutlass-dsl[cu13] >= 4.8"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            raise ToolchainError(f"the cute backend needs the package {package}: pip install it")


def reads_in_bulk(tensors: Sequence[Tensor]) -> bool:
    """Whether hardware bulk copies can read these tensors: 16-byte aligned base and strides, last dimension contiguous, none repeated."""
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.data_ptr() % 16 or tensor.stride(-1) != 1:
            return False
        if any(stride == 0 or stride * size % 16 for stride in tensor.stride()[:-1]):
            return False
    return True
