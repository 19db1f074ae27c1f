"""A namespace in which the text of generated CuTe kernels runs on NumPy: one warp at a time, its 32 lanes side by side.

Numbers follow the DSL: `//` floors, `%` truncates, an integer and a float make a float32. A branch on lanes that disagree runs with the
others switched off, as far as what it does is a store, an atomic or an arrival.
"""

from __future__ import annotations

import ast
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import flexc

LANES = 32
_here = threading.local()  # the warp that runs: lanes, mask, and whatever a simulation adds


def lanes_on() -> np.ndarray:
    """Which lanes take part in what is executed."""
    return getattr(_here, "mask", np.ones(LANES, bool))


class Num:
    """A value of a warp: one for all lanes or one for each."""

    kind: Any = None
    rank = 0

    def __init__(self, value: Any):
        value = value.value if isinstance(value, Num) else value
        if self.kind is None:
            self.value = value
        elif self.kind is np.bool_:
            self.value = np.asarray(value) != 0
        else:
            with np.errstate(all="ignore"):
                self.value = np.asarray(value).astype(self.kind)

    @property
    def dtype(self) -> type[Num]:
        """The DSL's type."""
        return type(self)

    def to(self, kind: type[Num]) -> Num:
        """A conversion; floats become integers towards zero."""
        return kind(self)

    def bitcast(self, kind: type[Num]) -> Num:
        """The same bits."""
        return kind(self.value.view(kind.kind))

    def __bool__(self) -> bool:
        found = np.unique(self.value)
        assert len(found) == 1, "a branch on lanes that disagree"
        return bool(found[0])

    def __index__(self) -> int:
        found = np.unique(self.value)
        assert len(found) == 1 and not isinstance(self, Float32), "an index that differs between lanes"
        return int(found[0])

    __hash__ = None  # type: ignore[assignment]

    def __abs__(self) -> Num:
        return type(self)(np.abs(self.value))

    def __neg__(self) -> Num:
        return type(self)(-self.value)

    def __invert__(self) -> Num:
        return type(self)(~self.value)


class Boolean(Num):
    """Truth values."""

    kind, rank = np.bool_, 0


class Int32(Num):
    """Wraps around."""

    kind, rank = np.int32, 1


class Int64(Num):
    """Wraps around."""

    kind, rank = np.int64, 2


class Float32(Num):
    """Rounds after each operation."""

    kind, rank = np.float32, 3


def typed(x: Any, other: Any = None) -> Num:
    """Python numbers take the type of the other operand, unless they are floats."""
    if isinstance(x, Num):
        return x
    if isinstance(x, bool):
        return Boolean(x)
    if isinstance(x, float):
        return Float32(x)
    return type(other)(x) if isinstance(other, Num) and not isinstance(other, Boolean) else Int32(x)


def of_two(function: Callable[[Any, Any], Any], kind: type[Num] | None = None) -> Callable[[Any, Any], Num]:
    """An operation on two operands in their common type."""

    def operation(x: Any, y: Any) -> Num:
        a, b = typed(x, y), typed(y, x)
        common = type(a) if a.rank >= b.rank else type(b)
        with np.errstate(all="ignore"):
            return (kind or common)(function(common(a).value, common(b).value))

    return operation


def _remainder(a: Any, b: Any) -> Any:
    return np.fmod(a, np.where(b == 0, np.ones_like(b), b))


def _quotient(a: Any, b: Any) -> Any:
    assert not np.issubdtype(np.asarray(a).dtype, np.floating), "a float // prints about 60 instructions"
    return np.floor_divide(a, np.where(b == 0, np.ones_like(b), b))


def _true_quotient(a: Any, b: Any) -> Any:
    return np.float32(a) / np.float32(b)


_OPERATORS = {
    "add": of_two(np.add),
    "sub": of_two(np.subtract),
    "mul": of_two(np.multiply),
    "truediv": of_two(_true_quotient, Float32),
    "floordiv": of_two(_quotient),
    "mod": of_two(_remainder),
    "and": of_two(np.bitwise_and),
    "or": of_two(np.bitwise_or),
    "xor": of_two(np.bitwise_xor),
    "lshift": of_two(np.left_shift),
    "rshift": of_two(np.right_shift),
    "pow": of_two(np.power),
}
for _name, _operation in _OPERATORS.items():
    setattr(Num, f"__{_name}__", _operation)
    setattr(Num, f"__r{_name}__", lambda self, other, operation=_operation: operation(other, self))
for _name, _function in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(Num, f"__{_name}__", of_two(_function, Boolean))


def of_one(function: Callable[[Any], Any], wide: bool = True) -> Callable[..., Num]:
    """A function of a float; computed in double precision, so that only its meaning counts."""

    def operation(x: Any, **_: Any) -> Num:
        value = Float32(x).value
        with np.errstate(all="ignore"):
            return Float32(function(value.astype(np.float64) if wide else value))

    return operation


def spread(x: Any) -> np.ndarray:
    """One value for each lane."""
    return np.broadcast_to(np.asarray(x.value if isinstance(x, Num) else x), (LANES,))


# --- memory -------------------------------------------------------------------------------------------------------------------------------


class Registers:
    """A register tensor: one Num for each element, indexed by constants. `busy` says what hardware does with it meanwhile."""

    def __init__(self, size: int, kind: type[Num]):
        self.items: list[Num] = [kind(np.zeros(LANES)) for _ in range(size)]
        self.kind = kind
        self.busy = ""

    element_type = property(lambda self: self.kind)
    layout = property(lambda self: len(self.items))

    def __getitem__(self, index: int) -> Num:
        assert isinstance(index, int), "a register index that is not a constant"
        assert self.busy != "written", "registers read while a product writes them"
        return self.items[index]

    def __setitem__(self, index: int, value: Any) -> None:
        assert isinstance(index, int), "a register index that is not a constant"
        assert not self.busy, f"registers written while they are {self.busy} by a product"
        self.items[index] = self.kind(value)

    def fill(self, value: float) -> None:
        """All elements."""
        for i in range(len(self.items)):
            self[i] = value


class Pointer:
    """An element of flat memory; adding moves it."""

    def __init__(self, memory: Memory, offset: Any = 0):
        self.memory, self.offset = memory, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)


class Memory:
    """A tensor in global or shared memory, flat as it lies there. An access outside it fails."""

    def __init__(
        self, values: np.ndarray, shape: Sequence[int] = (), stride: Sequence[int] = (), first: int = 0, kind: type[Num] | None = None
    ):
        self.flat, self.first = values, first
        self.shape, self.stride = tuple(shape), tuple(stride)
        self.kind = kind or kind_of(values.dtype)

    @property
    def iterator(self) -> Pointer:
        """Its first element."""
        return Pointer(self, 0)

    def _places(self, offset: Any) -> np.ndarray:
        return spread(typed(offset).value.astype(np.int64)) + self.first

    def load(self, offset: Any) -> Num:
        """The elements that the lanes point at."""
        places = self._places(offset)
        assert ((places >= 0) & (places < len(self.flat)) | ~lanes_on()).all(), "a load outside the tensor"
        return self.kind(self.flat[places.clip(0, len(self.flat) - 1)])

    def store(self, offset: Any, value: Any) -> None:
        """By the lanes that are on."""
        places, on = self._places(offset), lanes_on()
        assert ((places >= 0) & (places < len(self.flat)) | ~on).all(), "a store outside the tensor"
        self.flat[places[on]] = spread(value)[on]

    def _offset(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        stride = self.stride or (1,)
        return sum((i * s for i, s in zip(index[1:], stride[1:])), typed(index[0]) * stride[0])

    def __getitem__(self, index: Any) -> Num:
        found = self.load(self._offset(index))
        return type(found)(found.value[0]) if (found.value == found.value[0]).all() else found

    def __setitem__(self, index: Any, value: Any) -> None:
        self.store(self._offset(index), value)


class View:
    """A few elements from a pointer on."""

    def __init__(self, pointer: Pointer):
        self.pointer = pointer

    def __getitem__(self, index: int) -> Num:
        return self.pointer.memory.load(self.pointer.offset + index)

    def __setitem__(self, index: int, value: Any) -> None:
        self.pointer.memory.store(self.pointer.offset + index, value)


def kind_of(dtype: Any) -> type[Num]:
    """The type that a loaded number has here."""
    if dtype == np.bool_:
        return Boolean
    if np.issubdtype(dtype, np.floating):
        return Float32
    return Int64 if dtype == np.int64 else Int32


def captured_memory(tensor: torch.Tensor) -> Memory:
    """A captured tensor as the host hands it over (see `readable` in templates/cute/host.py.j2)."""
    tensor = tensor.detach()
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    values = flat.to(torch.uint8) if tensor.dtype == torch.bool else flat.float() if tensor.is_floating_point() else flat
    strides = [Int64(s) for s in tensor.stride()]
    return Memory(values.numpy(), [Int32(n) for n in tensor.shape], strides, tensor.storage_offset())  # type: ignore[arg-type]


# --- modules ------------------------------------------------------------------------------------------------------------------------------


def _select(condition: Any, x: Any, y: Any) -> Any:
    assert isinstance(condition, Boolean), "select_ wants a run-time condition"
    assert isinstance(x, Num) and type(x) is type(y), "select_ does not unify types"
    return np.where(condition.value, x.value, y.value)


def _inline(code: str, write_only_types: Sequence[type[Num]], read_only_args: Sequence[Any]) -> Num:
    name = code.split()[0]
    if name == "bmsk.clamp.b32":
        start, count = (spread(typed(a)).astype(np.int64) for a in read_only_args)
        start = np.minimum(start, 32)
        return Int32((((1 << np.minimum(count, 32)) - 1 << start) & 0xFFFFFFFF).astype(np.uint32).view(np.int32))
    values = [Float32(a).value.astype(np.float64) for a in read_only_args]
    with np.errstate(all="ignore"):
        return write_only_types[0](_INSTRUCTIONS[name](*values))


def _fused(x: Any, y: Any, z: Any) -> Any:
    return x * y + z  # exact in double precision before the rounding


_INSTRUCTIONS = {
    "tanh.approx.f32": np.tanh,
    "rcp.approx.ftz.f32": lambda x: 1.0 / x,
    "cvt.rni.f32.f32": np.rint,
    "cvt.rzi.f32.f32": np.trunc,
    "cvt.rmi.f32.f32": np.floor,
    "cvt.rpi.f32.f32": np.ceil,
    "min.NaN.f32": np.minimum,
    "max.NaN.f32": np.maximum,
    "fma.rn.f32": _fused,
}


def _reduced(function: Callable[[Any, Any], Any]) -> Callable[..., Num]:
    def operation(x: Any, threads_in_group: int) -> Num:
        parts = spread(x).reshape(-1, threads_in_group)
        return Float32(np.repeat(function.reduce(parts, axis=1), threads_in_group))  # type: ignore[attr-defined]

    return operation


def _atomic_add(pointer: Pointer, value: Any, sem: str = "", scope: str = "") -> Num:
    on = lanes_on()
    memory = pointer.memory
    places = memory.first + spread(pointer.offset).astype(np.int64)
    with _atomic:
        old = memory.flat[places.clip(0, len(memory.flat) - 1)]
        np.add.at(memory.flat, places[on], spread(value)[on].astype(memory.flat.dtype))
    return memory.kind(old)


_atomic = threading.Lock()


def _numbers(*bounds: Any, **_: Any) -> range:
    return range(*(int(b) for b in bounds))


def _erf(x: Any) -> Any:
    return torch.erf(torch.from_numpy(np.atleast_1d(x))).numpy().reshape(np.shape(x))


def _same(x: Any) -> Any:
    return x


math_module = SimpleNamespace(
    **{name: of_one(getattr(np, name)) for name in "exp exp2 log log2 sqrt tanh sin cos".split()},
    rsqrt=of_one(lambda x: 1 / np.sqrt(x)),
    erf=of_one(_erf),
)
arch = SimpleNamespace(
    exp2=of_one(np.exp2),
    fmax=of_two(np.fmax),
    rcp_approx=of_one(lambda x: 1 / x),
    inline_ptx=_inline,
    warp_reduction_max=_reduced(np.maximum),
    warp_reduction_sum=_reduced(np.add),
    lane_idx=lambda: Int32(np.arange(LANES)),
    shuffle_sync=lambda x, lane: type(x)(spread(x)[lane]),
    atomic_add=_atomic_add,
    vote_ballot_sync=lambda x: Int32(np.packbits(spread(x).astype(bool), bitorder="little").view(np.int32)[0]),
    warp_redux_sync=lambda x, kind: type(x)({"min": np.min}[kind](spread(x))),
    vote_any_sync=lambda x: Boolean(bool(np.any(x.value))),
    sync_warp=lambda: None,
    make_warp_uniform=lambda x: typed(x),
    fence_proxy=lambda *args, **_: None,
)
cute = SimpleNamespace(
    math=math_module,
    arch=arch,
    jit=_same,
    kernel=_same,
    struct=_same,
    size=lambda x, mode=None: len(x.items),
    assume=lambda x, divby: x,
    ceil_div=lambda x, y: (x + y - 1) // y,
    make_layout=lambda *shape, **_: shape,
    make_tensor=lambda pointer, layout: View(pointer),
    make_rmem_tensor=lambda size, kind: Registers(size, kind if isinstance(kind, type) else Float32),
    Tensor=object,
    TiledMma=object,
    ComposedLayout=object,
)
cutlass = SimpleNamespace(
    Constexpr=object,
    const_expr=_same,
    Int16=int,
    range_constexpr=range,
    range=_numbers,
    select_=_select,
    min=of_two(np.minimum),
    max=of_two(np.maximum),
    BFloat16=Float32,
    Float16=Float32,
    Int32=Int32,
)
NAMES: dict[str, Any] = {
    "cute": cute,
    "cutlass": cutlass,
    "Boolean": Boolean,
    "Float32": Float32,
    "Int32": Int32,
    "Int64": Int64,
    "math": math,
}


def when(condition: Any) -> Iterator[None]:
    """Runs a loop body once for the lanes where the condition holds, if there are any."""
    value = condition.value if isinstance(condition, Num) else np.asarray(condition)
    before = lanes_on()
    mask = before & spread(value)
    if mask.any():
        _here.mask = mask
        try:
            yield
        finally:
            _here.mask = before


class _Predicated(ast.NodeTransformer):
    """`if x: …` without an else becomes `for _ in when(x): …`."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if node.orelse:
            return node
        call = ast.Call(ast.Name("when", ast.Load()), [node.test], [])
        return ast.copy_location(ast.For(ast.Name("_", ast.Store()), call, node.body, []), node)


def executed(text: str, names: dict[str, Any], file: str = "kernel.py") -> dict[str, Any]:
    """The module of a text without its imports, on stand-ins."""
    tree = ast.parse(text, file)
    tree.body = [n for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom))]
    tree = ast.fix_missing_locations(_Predicated().visit(tree))
    scope = {**NAMES, "when": when, **names}
    exec(compile(tree, file, "exec"), scope)
    return scope


def tile_library(**replaced: Any) -> SimpleNamespace:
    """`flexc.runtime.cute_tiles` on stand-ins; what touches the hardware may be replaced."""
    return library_of("cute_tiles", {}, replaced)


def library_of(name: str, names: dict[str, Any], replaced: dict[str, Any]) -> SimpleNamespace:
    """A file of `flexc.runtime` on stand-ins, with these `names` from outside; what touches the hardware may be `replaced`."""
    file = Path(flexc.__file__).parent / "runtime" / f"{name}.py"
    scope = executed(file.read_text(encoding="utf-8"), {"const_expr": _same, **names}, str(file))
    scope.update(replaced)
    return SimpleNamespace(**{name: value for name, value in scope.items() if not name.startswith("__")})


def evaluated(text: str, names: dict[str, Any]) -> Num:
    """The value of a printed expression."""
    return typed(eval(text, {**NAMES, "tiles": _plain_library(), **names}))


@cache
def _plain_library() -> SimpleNamespace:
    return tile_library()
