"""Casts and the functions that make a value of a dtype. Halves and doubles are computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexc.frontend.named import NAMED, named
from flexc.frontend.session import refuse
from flexc.frontend.symbol import Symbol, Traced, cast, node_of
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64

_CASTS: dict[Any, str] = {
    bool: BOOL,
    int: INT64,
    float: FLOAT32,
    torch.bool: BOOL,
    torch.int64: INT64,
    torch.float16: FLOAT32,
    torch.bfloat16: FLOAT32,
    torch.float32: FLOAT32,
    torch.float64: FLOAT32,
}
_CASTS |= dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.int32), INT32)
METHOD_CASTS = {"float": FLOAT32, "double": FLOAT32, "half": FLOAT32, "bfloat16": FLOAT32}
METHOD_CASTS |= {"bool": BOOL, "int": INT32, "short": INT32, "char": INT32, "byte": INT32, "long": INT64}


def cast_of(dtype: Any) -> str:
    """The IR dtype that a torch dtype (or int, float, bool) is computed in."""
    dtype = getattr(dtype, "__flexc_stands_for__", dtype)
    if dtype not in _CASTS:
        refuse(
            f"a cast to {dtype}",
            why="scores are computed in bool, int32, int64 and float32",
            instead=".float(), .int(), .long() or .bool()",
        )
    return _CASTS[dtype]


def target_of(args: tuple, kwargs: dict[str, Any]) -> str | None:
    """The IR dtype that the arguments of `.to()` ask for; None for a device, as the value is in the kernel anyway."""
    for option in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(option, Traced | torch.Tensor):
            return cast_of(option.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(getattr(option, "__flexc_stands_for__", option), torch.dtype | type):
            return cast_of(option)
    return None


@named("to")
def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = target_of(args, kwargs)
    return self if dtype is None else cast(self, dtype)


@named("type", "astype")
def _type(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
    return cast(self, cast_of(dtype))


@named("type_as")
def _type_as(self: Any, other: Any) -> Any:
    return cast(self, cast_of(other.dtype))


def _caster(dtype: str) -> Callable[..., Any]:
    return lambda self: cast(self, dtype)


for _name, _dtype in METHOD_CASTS.items():
    NAMED[_name] = _caster(_dtype)


@named("full_like")
def _full_like(input: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Any:
    return cast(fill_value, node_of(input).dtype if dtype is None else cast_of(dtype))


@named("zeros_like")
def _zeros_like(input: Any, *, dtype: Any = None, **options: Any) -> Any:
    return _full_like(input, 0, dtype=dtype)


@named("ones_like")
def _ones_like(input: Any, *, dtype: Any = None, **options: Any) -> Any:
    return _full_like(input, 1, dtype=dtype)


@named("new_full")
def _new_full(self: Any, size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Any:
    if len(size) if isinstance(size, tuple | list) else True:
        refuse(f"a new tensor of shape {size}", why="a value of a kernel is one number", instead="shape (), or a Python number")
    return _full_like(self, fill_value, dtype=dtype)


@named("new_zeros")
def _new_zeros(self: Any, *size: Any, dtype: Any = None, **options: Any) -> Any:
    return _new_full(self, _only(size), 0, dtype=dtype)


@named("new_ones")
def _new_ones(self: Any, *size: Any, dtype: Any = None, **options: Any) -> Any:
    return _new_full(self, _only(size), 1, dtype=dtype)


@named("new_tensor")
def _new_tensor(self: Any, data: Any, *, dtype: Any = None, **options: Any) -> Any:
    if isinstance(data, tuple | list):
        refuse("a new tensor of several numbers", why="a value of a kernel is one number", instead="a list, indexed")
    return _full_like(self, data, dtype=dtype)


def _only(size: tuple) -> Any:
    """Sizes as given one by one or as one tuple."""
    return size[0] if len(size) == 1 and isinstance(size[0], tuple | list) else size


@named("clone", "contiguous", "positive", "squeeze", "expand_as", "cpu", "cuda", "conj", "real")
def _itself(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input if isinstance(input, Symbol) else Symbol(node_of(input))


@named("dim", "ndimension")
def _dim(input: Any) -> int:
    return 0


@named("numel", "nelement")
def _numel(input: Any) -> int:
    return 1


@named("is_floating_point")
def _is_floating_point(input: Any) -> bool:
    return node_of(input).dtype == FLOAT32
