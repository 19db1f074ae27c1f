"""Calling a function of one pair, as users write it, on many pairs at once.

The function is called on whole columns of pairs with `torch.vmap`. Where it decides something in Python (`if`, `and`, `min`, a list indexed
by a position), the pairs are split by the decision and each part is called alone; where even that fails, the function is called once for
each pair. The three ways are equal. Truth or an exception, never a quiet third thing:

- Arithmetic is as wide as asked, whatever the dtypes of captured tensors and whatever `.float()` the function contains.
- `math.*` and NumPy's functions keep the gradient.
- Elements read out of range may be selected away by `where`; if the result depends on one, IndexRangeError.
- A branch that `where` does not select contributes no gradient, not 0 × NaN (noticed in gradients of the score; for captured tensors only
  with `one_by_one`).

While a function runs here, `math` and PyTorch's default dtype are changed for the whole process. Threads take turns; but code in another
thread that computes with either at that moment sees the change, so this is for checks and tests, not for serving.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from flexc.errors import IndexRangeError
from flexc.python_math import math_on_tensors

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_ONE_AT_A_TIME = threading.RLock()  # `math` and the default dtype belong to the whole process


def evaluate(
    function: Callable[..., Any], columns: Sequence[Tensor], wide: torch.dtype, *, is_mask: bool = False, one_by_one: bool = False
) -> Tensor:
    """The function's result for each pair, [n], differentiable for the scores and captured tensors.

    Args:
        function: a score function of five arguments, or a mask function of four.
        columns: one [n] tensor per argument: the score (a score function's only), then batch, head, q_idx, kv_idx as int32.
        wide: dtype of all floats while the function runs, and of the scores returned.
        is_mask: a truth value is expected, not a number.
        one_by_one: call once for each pair, even where it could be vectorised (about 0.1 ms a pair).

    Raises:
        IndexRangeError: a result depends on an element outside a captured tensor.
        TypeError: a truth value from a score function, anything else from a mask function, more than one value.
    """
    return _Evaluation(function, wide, one_by_one, is_mask).run(columns)


class _Split(Exception):
    """The function asks Python for a value that differs between pairs; `labels` [n] says which pairs agree."""

    def __init__(self, labels: Tensor):
        super().__init__("a decision differs between pairs")
        self.labels = labels


class _Evaluation:
    """One function on columns of pairs: [n] scores (for a score function) and four [n] int32 positions → [n] results."""

    def __init__(self, function: Callable[..., Any], wide: torch.dtype, one_by_one: bool, is_mask: bool):
        self.function = function
        self.wide = wide
        self.one_by_one = one_by_one
        self.is_mask = is_mask

    def run(self, columns: Sequence[Tensor]) -> Tensor:
        """The results, with their gradients.

        Raises:
            IndexRangeError: a result depends on an element read out of range.
        """
        with _ONE_AT_A_TIME, math_on_tensors(self.function), _default_dtype(self.wide):
            arithmetic = _Arithmetic(self.wide)
            result = self._evaluate(columns, arithmetic)
            if arithmetic.outside:
                other = _Arithmetic(self.wide, poison=True)
                with torch.no_grad():
                    changed = self._evaluate(columns, other)
                if not bool(((result == changed) | (result.isnan() & changed.isnan())).all()):
                    name = getattr(self.function, "__name__", type(self.function).__name__)
                    raise IndexRangeError(f"{name} depends on an element outside a captured tensor: {arithmetic.outside}")
        return result

    def _evaluate(self, columns: Sequence[Tensor], arithmetic: _Arithmetic) -> Tensor:
        if self.one_by_one or columns[0].numel() == 0:
            return self._each_pair(columns, arithmetic)
        try:
            result = self._all_pairs(columns, arithmetic)
        except _Rejected:
            raise
        except Exception:
            # Whatever the reason, calling it with one pair gives the true result, or the true error.
            return self._each_pair(columns, arithmetic)
        return self._each_pair(columns, arithmetic) if self._has_false_gradient(columns[0], result) else result

    def _all_pairs(self, columns: Sequence[Tensor], arithmetic: _Arithmetic) -> Tensor:
        def one_pair(*pair: Tensor) -> Tensor:
            with arithmetic:
                result = self.function(*pair)
            return result if isinstance(result, Tensor) else torch.as_tensor(result, device=columns[0].device)

        try:
            result = torch.vmap(one_pair, randomness="error")(*columns)
        except _Split as split:
            parts = [(split.labels == label).nonzero()[:, 0] for label in split.labels.unique()]
            results = [self._all_pairs([c[part] for c in columns], arithmetic) for part in parts]
            return torch.cat(results)[torch.cat(parts).argsort()]
        return self._checked(result, result.shape[1:])

    def _each_pair(self, columns: Sequence[Tensor], arithmetic: _Arithmetic) -> Tensor:
        results = []
        for pair in zip(*(c.unbind() for c in columns)):
            with arithmetic:
                result = self.function(*(x.as_subclass(_Number) for x in pair))
            result = torch.as_tensor(result, device=columns[0].device).as_subclass(Tensor)
            results.append(self._checked(result, result.shape))
        empty = torch.zeros(0, dtype=torch.bool if self.is_mask else self.wide, device=columns[0].device)
        return torch.stack(results) if results else empty

    def _checked(self, result: Tensor, shape: Sequence[int]) -> Tensor:
        kind = "mask" if self.is_mask else "score"
        if len(shape):
            raise _Rejected(f"a {kind} function returns one value for a pair, got shape {tuple(shape)}")
        if self.is_mask != (result.dtype == torch.bool):
            wanted = "a truth value" if self.is_mask else "a number"
            raise _Rejected(f"expected {wanted} from a {kind} function, got {str(result.dtype).removeprefix('torch.')}")
        return result if self.is_mask else result.to(self.wide)

    @staticmethod
    def _has_false_gradient(score: Tensor, result: Tensor) -> bool:
        """Whether autograd makes 0 × NaN of a branch that `where` discarded."""
        if not (result.requires_grad and score.requires_grad):
            return False
        (gradient,) = torch.autograd.grad(result.sum(), score, retain_graph=True, allow_unused=True)
        return gradient is not None and bool((gradient.isnan() & result.isfinite()).any())


class _Rejected(TypeError):
    """The function's result cannot be one score or one truth value."""


class _Number(torch.Tensor):
    """One score or position, a 0-d tensor, where Python's own ways to compute with a number work and keep the gradient."""

    def __float__(self) -> float:
        if self.requires_grad:
            raise TypeError("float() of a score drops its gradient; write the operation with torch or math")
        return float(self.item())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        name = str(ufunc.__name__)
        operation = getattr(torch, _NUMPY_NAMES.get(name, name), None)
        if method != "__call__" or options or operation is None:
            raise TypeError(f"numpy.{name} has no equal in torch")
        return operation(*(torch.as_tensor(x) for x in inputs))


# `x += 1` binds a new number to x, as it does for Python's numbers; whoever else holds the old one keeps it.
def _out_of_place(operator: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: getattr(torch.Tensor, f"__{operator}__")(self, other)


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Number, f"__i{_operator}__", _out_of_place(_operator))

_NUMPY_NAMES = {
    "power": "pow",
    "absolute": "abs",
    "invert": "bitwise_not",
    "fabs": "abs",
    "rint": "round",
    "left_shift": "bitwise_left_shift",
}
_NUMPY_NAMES |= {"right_shift": "bitwise_right_shift", "conjugate": "conj"}


# --- arithmetic ----------------------------------------------------------------------------------------------------------------------

_FLOAT32 = torch.float32
_AS_INTEGER = {"__int__", "__index__"}
_NEVER = {"__float__", "__complex__", "__array__", "numpy", "tolist"}  # on many pairs; on one they run as they are
_SUMS = {"add", "__radd__", "sub", "rsub", "__rsub__", "subtract", "mul", "__rmul__", "multiply", "neg", "__neg__", "negative"}
_POWERS = {"pow", "__pow__", "__rpow__", "float_power"}
_DTYPE_OF = torch.Tensor.dtype.__get__  # pyright: ignore[reportAttributeAccessIssue]


class _Arithmetic(TorchFunctionMode):
    """While the function runs: every float is `wide`, reads of captured tensors are safe, decisions split the pairs.

    Args:
        wide: dtype of all floats; where the function says float32 it means this.
        poison: elements read out of range get another value, to see whether a result depends on them.

    Attributes:
        outside: a description of one read out of range, or "".
    """

    def __init__(self, wide: torch.dtype, poison: bool = False):
        super().__init__()
        self.wide = wide
        self.poison = poison
        self.outside = ""
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}  # the tensor itself is held, so that its id stays taken

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if func == _DTYPE_OF:
            dtype = func(*args)
            return _FLOAT32 if dtype.is_floating_point else dtype
        if name == "__getitem__":
            return self._widened(self._read(*args))
        if name in ("__bool__", "is_nonzero", "item") or name in _AS_INTEGER or name in _NEVER:
            return _agreed(args[0], name) if _functorch.is_batchedtensor(args[0]) else func(*args, **(kwargs or {}))
        if name.endswith("_") and not name.endswith("__"):
            raise TypeError(f"{name} writes to a tensor")
        if name == "float":
            return args[0].to(self.wide)
        if name == "where" and not kwargs and len(args) == 3 and isinstance(args[0], _Number):
            # One pair: the branch that is not selected leaves no trace, so its derivative may be NaN.
            return self._widened(args[1] if args[0].item() else args[2])
        args, options = tree_map(self._widened, (args, kwargs or {}))
        if name in _POWERS:
            args = tuple(a.to(self.wide) if isinstance(a, Tensor) else a for a in args)
        elif name in _SUMS:
            # True is 1, as in Python.
            args = tuple(a.int() if isinstance(a, Tensor) and a.dtype == torch.bool else a for a in args)
        return tree_map(self._widened, func(*args, **options))

    def _widened(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != self.wide:
            source = self._source(x)
            return x.to(self.wide) if source is x else source
        return self.wide if x is _FLOAT32 else x

    def _source(self, tensor: Tensor) -> Tensor:
        """What to read from: widened first where a gradient comes back, because its sum over all pairs must be as wide."""
        if not (tensor.requires_grad and torch.is_grad_enabled()) or tensor.dtype == self.wide or _functorch.is_batchedtensor(tensor):
            return tensor
        if id(tensor) not in self._sources:
            self._sources[id(tensor)] = (tensor, tensor.to(self.wide))
        return self._sources[id(tensor)][1]

    def _read(self, tensor: Tensor, index: Any) -> Tensor:
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) > tensor.dim() or not all(_is_position(e) or e == slice(None) for e in entries):
            return self._source(tensor)[index]
        safe: list[Any] = []
        outside: Any = False
        for size, entry in zip(tensor.shape, entries):
            if isinstance(entry, slice):
                safe.append(entry)
                continue
            position = torch.as_tensor(entry, device=tensor.device).long()
            position = torch.where(position < 0, position + size, position)
            beyond = (position < 0) | (position >= size)
            if bool(_physical(beyond).any()):
                wrong = _physical(position)[_physical(beyond)].flatten()[0].item() if _physical(beyond).dim() else position.item()
                self.outside = f"index {wrong} with size {size}"
                outside = outside | beyond
            safe.append(position.clamp(0, max(size - 1, 0)))
        value = self._source(tensor)[tuple(safe)]
        if outside is False or not self.poison:
            return value
        return torch.where(outside, ~value if value.dtype == torch.bool else -2 * value - 1, value)


def _is_position(entry: Any) -> bool:
    if isinstance(entry, Tensor):
        return entry.dim() == 0 and not entry.is_floating_point() and entry.dtype != torch.bool
    return isinstance(entry, int) and not isinstance(entry, bool)


def _physical(x: Tensor) -> Tensor:
    """The plain tensor of all pairs behind what the function sees as one number."""
    if not _functorch.is_batchedtensor(x):
        return x
    return _physical(_functorch.get_unwrapped(x).movedim(_functorch.maybe_get_bdim(x), 0))


def _agreed(x: Tensor, name: str) -> bool | int:
    """The value that all pairs have, for Python to use; _Split if they differ."""
    values = _physical(x).detach()
    if name in ("__bool__", "is_nonzero"):
        values = values.bool()
    if name in _NEVER or values.dim() != 1 or values.is_floating_point():
        raise TypeError(f"{name} of many pairs")
    if values.unique().numel() > 1:
        raise _Split(values)
    return values[0].item()  # pyright: ignore[reportReturnType]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
