"""Captured tensors as the traced function sees them: `T[b, h, q]`, `T[b][h][q]`, slices, computed indices, small rows as vectors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flexc.frontend.guards import Source
from flexc.frontend.session import Session, refuse
from flexc.frontend.specialise import captured_number
from flexc.frontend.symbol import Symbol, call, cast, node_of
from flexc.frontend.vector import MOST_ELEMENTS, Elementwise, Vector, elements_of, is_array, refuse_large, wrap
from flexc.ir import ops
from flexc.ir.graph import BOOL, FLOAT32, loaded_dtype


@dataclass(frozen=True)
class Axis:
    """A dimension that is not indexed yet: element i is at start + step * i. `size` None means the whole dimension."""

    dimension: int
    start: int = 0
    step: int = 1
    size: int | None = None


class Captured(Elementwise):
    """A captured tensor, or a view of one in which some dimensions are indexed."""

    __slots__ = ("_axes", "_cast", "_fixed", "_session", "_source", "_tensor")

    def __init__(
        self,
        session: Session,
        source: Source,
        tensor: torch.Tensor,
        fixed: dict[int, Any],
        axes: tuple[Axis, ...],
        dtype: str | None = None,
    ):
        self._session = session
        self._source = source
        self._tensor = tensor
        self._fixed = fixed
        self._axes = axes
        self._cast = dtype

    def _with(self, **changes: Any) -> Captured:
        parts = {"fixed": self._fixed, "axes": self._axes, "dtype": self._cast, "source": self._source, "tensor": self._tensor, **changes}
        return Captured(self._session, **parts)

    def __repr__(self) -> str:
        return f"<captured tensor {self._source.name}, {str(self._tensor.dtype).removeprefix('torch.')}, {len(self._axes)} axes>"

    # --- sizes ----------------------------------------------------------------------------------------------------------------------

    def _size(self, position: int) -> Any:
        """The size of an axis as the user's function sees it: a captured number like any other."""
        axis = self._axes[position]
        if axis.size is not None:
            return axis.size
        source = Source(self._source, f"{{0}}.shape[{axis.dimension}]", f"{self._source.name}_size{axis.dimension}")
        return captured_number(self._session, source, int(self._tensor.shape[axis.dimension]))

    def _static_size(self, position: int) -> int:
        """The size of an axis as a Python integer; the trace then holds for this size only."""
        return operator.index(self._size(position))

    @property
    def shape(self) -> Sizes:
        return Sizes(self)

    @property
    def ndim(self) -> int:
        return len(self._axes)

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype if self._cast is None else ops.TORCH_DTYPES[self._cast]

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient is asked for (a guard of the trace)."""
        return self._tensor.requires_grad

    def __len__(self) -> int:
        if not self._axes:
            refuse("len() of a 0-d tensor", why="it is one number", instead="the number itself")
        return self._static_size(0)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    # --- indexing -------------------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        keys = list(key) if isinstance(key, tuple) else [key]
        consumed = sum(k is not None and k is not Ellipsis for k in keys)
        if consumed > len(self._axes):
            refuse(
                f"{consumed} indices into {self._source.name}, which has {len(self._axes)} dimensions left",
                why="a tensor takes at most one index for each dimension",
                instead="fewer indices, or a tensor of more dimensions",
            )
        if any(is_array(k) or isinstance(k, list) for k in keys):
            return self._index_by_arrays(keys)
        if any(k is None for k in keys):
            return Vector(self.elements())[key]
        if any(k is Ellipsis for k in keys):
            position = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[position : position + 1] = [slice(None)] * (len(self._axes) - consumed)
        fixed, axes = dict(self._fixed), []
        for position, axis in enumerate(self._axes):
            k = keys[position] if position < len(keys) else slice(None)
            if isinstance(k, slice):
                axes.append(axis if k == slice(None) else self._sliced(position, k))
            else:
                fixed[axis.dimension] = self._position(position, k)
        view = self._with(fixed=fixed, axes=tuple(axes))
        return view if axes else view.element()

    def _sliced(self, position: int, k: slice) -> Axis:
        axis = self._axes[position]
        if any(isinstance(x, Symbol) for x in (k.start, k.stop, k.step)):
            for x in (k.start, k.stop, k.step):
                if isinstance(x, Symbol):
                    x._need(
                        f"a slice of {self._source.name} with a traced end ({x})",
                        "its length is unknown while tracing",
                        "fixed ends, or an index for each element",
                    )
        start, stop, step = k.indices(self._static_size(position))
        return replace(axis, start=axis.start + axis.step * start, step=axis.step * step, size=len(range(start, stop, step)))

    def _position(self, position: int, k: Any) -> Any:
        axis = self._axes[position]
        if isinstance(k, torch.Tensor | np.generic):
            k = Symbol(node_of(k))
        if isinstance(k, Symbol):
            if k.node.dtype in (BOOL, FLOAT32):
                refuse(
                    f"index {k} into {self._source.name} is {'a truth value' if k.node.dtype == BOOL else 'a float'}",
                    why="an index is an integer",
                    instead="flexc.where for a truth value" if k.node.dtype == BOOL else "// in place of /, or .int()",
                )
        elif isinstance(k, bool) or not hasattr(k, "__index__"):
            refuse(f"{type(k).__name__} {k!r} as an index into {self._source.name}", why="an index is an integer", instead="an integer")
        else:
            k = operator.index(k)
        if axis.size is None:
            return k
        if isinstance(k, int):
            if not -axis.size <= k < axis.size:
                raise IndexError(f"index {k} is out of range for a slice of {axis.size} elements of {self._source.name}")
            return axis.start + axis.step * (k % axis.size)
        from_end = call("where", call("lt", k, 0), call("add", k, axis.size), k)
        return call("add", axis.start, call("mul", axis.step, from_end))

    def _index_by_arrays(self, keys: list[Any]) -> Any:
        if any(isinstance(k, slice) or k is None or k is Ellipsis for k in keys):
            refuse(
                f"slices together with arrays of indices into {self._source.name}",
                why="flexc keeps to one index for each dimension there",
                instead="one index at a time: T[h][:, i]",
            )
        arrays = [elements_of(k) if is_array(k) or isinstance(k, list) else elements_of(Symbol(node_of(k))) for k in keys]
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        count = int(np.prod(shape))
        if count > MOST_ELEMENTS:
            refuse_large(shape, f"{self._source.name} indexed by arrays")
        spread = [np.broadcast_to(a, shape).ravel() for a in arrays]
        results = [self[tuple(s[i] for s in spread)] for i in range(count)]
        parts = [elements_of(r) for r in results]
        flat = np.empty(sum(p.size for p in parts), dtype=object)
        for position, element in enumerate(x for p in parts for x in p.flat):
            flat[position] = element
        return wrap(flat.reshape((*shape, *(parts[0].shape if parts else ()))))

    def element(self) -> Symbol:
        """The one element, when every dimension is indexed."""
        slot = self._session.tensor_slot(self._source, self._tensor)
        dtype = loaded_dtype(self._session.tensors[slot].input.dtype)
        where = self._session.location()
        indices = [node_of(self._fixed[d], where) for d in range(self._tensor.ndim)]
        symbol = Symbol(ops.gather(slot, dtype, indices, where))
        return symbol if self._cast is None else cast(symbol, self._cast)

    def elements(self) -> np.ndarray:
        shape = []
        for position, axis in enumerate(self._axes):
            known = self._tensor.shape[axis.dimension] if axis.size is None else axis.size
            if known > MOST_ELEMENTS:
                refuse_large(
                    [int(self._tensor.shape[a.dimension]) if a.size is None else a.size for a in self._axes],
                    f"the captured tensor {self._source.name}, used as a value with {len(self._axes)} dimensions not indexed,",
                )
            shape.append(self._static_size(position))
        count = int(np.prod(shape))
        if count > MOST_ELEMENTS:
            refuse_large(shape, f"the captured tensor {self._source.name}, used as a value,")
        flat = np.empty(count, dtype=object)
        for position, key in enumerate(np.ndindex(*shape)):
            flat[position] = self[key] if key else self.element()
        return flat.reshape(shape)

    # --- what may be done to the whole tensor ---------------------------------------------------------------------------------------

    def permute(self, *dims: Any) -> Captured:
        """Axes in another order."""
        order = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
        return self._with(axes=tuple(self._axes[d] for d in order))

    def transpose(self, first: int, second: int) -> Captured:
        """Two axes exchanged."""
        order = list(range(len(self._axes)))
        order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def t(self) -> Captured:
        """The axes in reverse order."""
        return self.permute(list(reversed(range(len(self._axes)))))

    T = mT = property(t)

    def size(self, dim: int | None = None) -> Any:
        """One size, or all."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of axes."""
        return len(self._axes)

    def numel(self) -> int:
        """Number of elements; the trace then holds for these sizes only."""
        return int(np.prod([self._static_size(position) for position in range(len(self._axes))]))

    def detach(self) -> Captured:
        """The tensor without its gradient."""
        return self._with(source=Source(self._source, "{0}.detach()", self._source.name), tensor=self._tensor.detach())

    data = property(detach)

    def contiguous(self, *args: Any, **options: Any) -> Captured:
        """The tensor itself: how it lies in memory does not matter."""
        return self

    def to(self, *args: Any, **options: Any) -> Captured:
        """The tensor in another dtype, cast element by element."""
        from flexc.frontend.casts import target_of

        dtype = target_of(args, options)
        return self if dtype is None else self._with(dtype=dtype)

    def __getattr__(self, name: str) -> Any:
        from flexc.frontend.casts import METHOD_CASTS
        from flexc.frontend.functions import method

        if name.startswith("_"):
            raise AttributeError(name)
        if name in METHOD_CASTS:
            return lambda: self._with(dtype=METHOD_CASTS[name])
        if name.endswith("_"):
            self._refuse_write(f".{name}()")
        return method(self, name)

    # --- writing --------------------------------------------------------------------------------------------------------------------

    def _refuse_write(self, how: str) -> Any:
        refuse(
            f"{how} writes to the captured tensor {self._source.name}",
            why="the function runs for many scores at once, in no order, and while tracing nothing is computed",
            instead="a new value: x = x + y in place of x += y",
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse_write(f"{self._source.name}[...] = ...")


def _writes(sign: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: self._refuse_write(sign)


for _name, _sign in {"add": "+=", "sub": "-=", "mul": "*=", "truediv": "/=", "and": "&=", "or": "|=", "xor": "^=", "pow": "**="}.items():
    setattr(Captured, f"__i{_name}__", _writes(_sign))


class Sizes:
    """The shape of a captured tensor. Only the sizes that are read become guards or scalars."""

    def __init__(self, tensor: Captured):
        self._tensor = tensor

    def __len__(self) -> int:
        return self._tensor.ndim

    def __getitem__(self, key: Any) -> Any:
        positions = range(self._tensor.ndim)[key]
        if isinstance(positions, range):
            return tuple(self._tensor._size(p) for p in positions)
        return self._tensor._size(positions)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __eq__(self, other: object) -> Any:
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def numel(self) -> int:
        """Number of elements."""
        return self._tensor.numel()


def captured_tensor(session: Session, source: Source, tensor: torch.Tensor) -> Captured | Symbol:
    """What the traced function gets for a captured tensor: a number if it is 0-d."""
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        loaded_dtype(name)
    except TypeError as error:
        refuse(f"the captured tensor {source.name} is {name}", why=str(error), instead="a real tensor; the parts of a complex one apart")
    if tensor.layout != torch.strided:
        refuse(
            f"the captured tensor {source.name} is {tensor.layout}", why="kernels read strided memory", instead=f"{source.name}.to_dense()"
        )
    session.guards.tensor(source, tensor)
    view = Captured(session, source, tensor, {}, tuple(Axis(d) for d in range(tensor.ndim)))
    return view if tensor.ndim else view.element()
