"""Small arrays of traced values, such as one row `T[head]` of a captured tensor: computed element by element, at most 64 of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from flexc.frontend.session import refuse
from flexc.frontend.symbol import COMPARISONS, OPERATORS, Array, Symbol, call, node_of, refuse_foreign
from flexc.ir.graph import BOOL, promote
from flexc.ir.ops import TORCH_DTYPES

MOST_ELEMENTS = 64


class Elementwise(Array):
    """Operators and methods of arrays; a subclass says what its elements are."""

    __slots__ = ()

    def elements(self) -> np.ndarray:
        """The elements, an object array of symbols and numbers."""
        raise NotImplementedError

    def __invert__(self) -> Any:
        return _method(self, "bitwise_not")()

    def __neg__(self) -> Any:
        return _method(self, "neg")()

    def __abs__(self) -> Any:
        return _method(self, "abs")()

    def __pos__(self) -> Any:
        return self

    def __pow__(self, other: Any) -> Any:
        return _method(self, "pow")(other)

    def __rpow__(self, other: Any) -> Any:
        return broadcast(lambda a, b: a**b, (other, self), {})

    def __matmul__(self, other: Any) -> Any:
        return _whole("matmul")(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _whole("matmul")(other, self)

    def __getitem__(self, key: Any) -> Any:
        from flexc.frontend.indexing import index_elements

        return index_elements(self.elements(), key)

    def __setitem__(self, key: Any, value: Any) -> None:
        refuse("writing to an array of traced values", why="values cannot be changed in place", instead="flexc.where(condition, new, old)")

    def __len__(self) -> int:
        return len(self.elements())

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __contains__(self, value: Any) -> Any:
        return bool(_whole("any")(self == value))

    def __bool__(self) -> bool:
        return bool(_only(self, "bool() of an array"))

    def __index__(self) -> int:
        return operator.index(_only(self, "an array as an index of a Python list"))

    def __float__(self) -> float:
        return float(_only(self, "float() of an array"))

    def __int__(self) -> int:
        return int(_only(self, "int() of an array"))

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that the elements have together."""
        return TORCH_DTYPES[promote(BOOL, *(node_of(x).dtype for x in self.elements().flat))]

    @property
    def device(self) -> torch.device:
        """Where small constants made beside it may live: anywhere."""
        return torch.device("cpu")

    @property
    def shape(self) -> Any:
        """Sizes, as Python integers."""
        return torch.Size(self.elements().shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.elements().ndim

    @property
    def T(self) -> Any:
        """The axes in reverse order."""
        return wrap(self.elements().T)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _method(self, name)


class Vector(Elementwise):
    """Elements that were computed."""

    __slots__ = ("_elements",)

    def __init__(self, elements: np.ndarray):
        if elements.size > MOST_ELEMENTS:
            refuse_large(elements.shape, "an array of traced values")
        self._elements = elements

    def elements(self) -> np.ndarray:
        return self._elements

    def __repr__(self) -> str:
        return f"<array of {self._elements.shape}: {', '.join(map(str, self._elements.flat))}>"


def refuse_large(shape: Sequence[int], what: str) -> NoReturn:
    """Refuse an array of too many elements."""
    refuse(
        f"{what} of shape {tuple(shape)}",
        why=f"arrays are computed element by element for every score, so at most {MOST_ELEMENTS} elements are taken",
        instead="index it down to one element, or compute the result outside the function and capture that",
    )


def _whole(name: str) -> Callable[..., Any]:
    from flexc.frontend.whole import WHOLE

    return WHOLE[name]


def _method(self: Any, name: str) -> Callable[..., Any]:
    from flexc.frontend.functions import method

    return method(self, name)


def _binary(op: str, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operate(self: Any, other: Any) -> Any:
        pair = (other, self) if swapped else (self, other)
        return broadcast(lambda a, b: call(op, a, b), pair, {})

    return operate


for _name, _op in OPERATORS.items():
    setattr(Elementwise, f"__{_name}__", _binary(_op))
    setattr(Elementwise, f"__r{_name}__", _binary(_op, swapped=True))
for _op in COMPARISONS:
    setattr(Elementwise, f"__{_op}__", _binary(_op))


# --- arrays and their elements ----------------------------------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether the value has more axes than a number."""
    return isinstance(value, Array) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0)


def elements_of(value: Any) -> np.ndarray:
    """The elements of anything array-like or of one number, as an object array."""
    if isinstance(value, Elementwise):
        return value.elements()
    if isinstance(value, torch.Tensor):
        refuse_foreign(value)
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    if isinstance(value, np.ndarray):
        if value.size > MOST_ELEMENTS:
            refuse_large(value.shape, "an array")
        return object_array([x.item() if isinstance(x, np.generic) else x for x in value.flat], value.shape)
    if isinstance(value, list | tuple) or hasattr(value, "__flexc_elements__"):
        return stacked([elements_of(x) for x in value], 0)
    return object_array([value], ())


def object_array(values: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """The values as an array."""
    # Element by element: NumPy would look inside objects that it takes for sequences.
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array.reshape(tuple(shape))


def wrap(elements: Any) -> Any:
    """A Vector, or the symbol if there is no axis left."""
    if isinstance(elements, np.ndarray):
        if elements.ndim:
            return Vector(elements)
        elements = elements[()]
    return elements if isinstance(elements, Symbol) else Symbol(node_of(elements))


def broadcast(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """`function`, which takes numbers, on each element of the arguments."""
    values = [*args, *kwargs.values()]
    if not any(map(is_array, values)):
        return function(*args, **kwargs)
    arrays = [elements_of(v) if is_array(v) else object_array([v], ()) for v in values]
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        refuse(f"arrays of shapes {' and '.join(str(a.shape) for a in arrays)}", why="they do not broadcast", instead="equal shapes")
    if int(np.prod(shape)) > MOST_ELEMENTS:
        refuse_large(shape, "an array of traced values")
    spread = [np.broadcast_to(a, shape).ravel() for a in arrays]
    results = []
    for position in range(int(np.prod(shape))):
        here = [s[position] for s in spread]
        results.append(function(*here[: len(args)], **dict(zip(kwargs, here[len(args) :], strict=True))))
    return wrap(object_array(results, shape))


def _only(self: Elementwise, what: str) -> Any:
    elements = self.elements()
    if elements.size != 1:
        refuse(f"{what} of shape {elements.shape}", why="it has more than one element", instead=".any(), .all(), or one element")
    return wrap(elements.reshape(()))


def stacked(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Arrays of one shape along a new axis."""
    if not arrays:
        return np.empty((0,), dtype=object)
    first = arrays[0].shape
    if any(a.shape != first for a in arrays):
        refuse(f"arrays of shapes {[a.shape for a in arrays]} stacked", why="they must have one shape", instead="equal shapes")
    flat = object_array([x for a in arrays for x in a.flat], (len(arrays), *first))
    return np.moveaxis(flat, 0, axis)
