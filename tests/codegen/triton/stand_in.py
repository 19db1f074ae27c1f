"""A namespace in which printed Triton expressions run on PyTorch: `tl` and `libdevice` with Triton's own division and its own scalars.

Floats are float64 here, so that only the meaning is compared; a Python float counts as the float32 it becomes in a kernel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Tensor = torch.Tensor


def value_of(x: Any) -> Any:
    """The tensor inside an Array; a Python float rounded to float32."""
    if isinstance(x, Array):
        return x.value
    return struct.unpack("f", struct.pack("f", x))[0] if isinstance(x, float) and math.isfinite(x) else x


def lifted(x: Any, like: Tensor | None = None) -> Tensor:
    """A tensor for an operand; Python numbers take the kind that Triton gives them."""
    x = value_of(x)
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return torch.tensor(x)
    if isinstance(x, float):
        return torch.tensor(x, dtype=torch.float64)
    wide = like is not None and like.dtype in (torch.int64, torch.float64)
    return torch.tensor(x, dtype=like.dtype if wide and like is not None else torch.int32)


def pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Two operands in their common dtype."""
    a, b = lifted(x, value_of(y) if isinstance(y, Array) else None), lifted(y, value_of(x) if isinstance(x, Array) else None)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _divided(a: Tensor, b: Tensor) -> Tensor:
    assert not a.is_floating_point(), "Triton's // takes integers only"
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc").to(a.dtype)


def _rest(a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, torch.where(b == 0, torch.ones_like(b), b))


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Callable[..., Array], Callable[..., Array]]:
    def forward(self: Any, other: Any) -> Array:
        return Array(function(*pair(self, other)))

    def reflected(self: Any, other: Any) -> Array:
        return Array(function(*pair(other, self)))

    return forward, reflected


class Array:
    """A tensor with the operators that Triton gives its own."""

    def __init__(self, value: Tensor):
        self.value = value

    __add__, __radd__ = _binary(torch.add)
    __sub__, __rsub__ = _binary(torch.sub)
    __mul__, __rmul__ = _binary(torch.mul)
    __truediv__, __rtruediv__ = _binary(torch.true_divide)
    __floordiv__, __rfloordiv__ = _binary(_divided)
    __mod__, __rmod__ = _binary(_rest)
    __and__, __rand__ = _binary(torch.bitwise_and)
    __or__, __ror__ = _binary(torch.bitwise_or)
    __xor__, __rxor__ = _binary(torch.bitwise_xor)
    __lshift__, __rlshift__ = _binary(torch.bitwise_left_shift)
    __rshift__, __rrshift__ = _binary(torch.bitwise_right_shift)
    __lt__, _ = _binary(torch.lt)
    __le__, _ = _binary(torch.le)
    __gt__, _ = _binary(torch.gt)
    __ge__, _ = _binary(torch.ge)
    __eq__, _ = _binary(torch.eq)  # type: ignore[assignment]
    __ne__, _ = _binary(torch.ne)  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Array:
        return Array(-self.value)

    def __invert__(self) -> Array:
        assert self.value.dtype != torch.bool, "~ of a truth value"
        return Array(~self.value)

    def __getitem__(self, index: Any) -> Array:
        return Array(self.value[index])

    def __bool__(self) -> bool:
        raise AssertionError("a kernel cannot branch on an array")

    def to(self, dtype: torch.dtype) -> Array:
        """A cast."""
        return Array(self.value.to(dtype))


class Pointer:
    """The first element of a tensor; adding integers moves it. Reading outside the tensor fails unless it is masked."""

    def __init__(self, tensor: Tensor, offset: Any = 0):
        self.tensor, self.offset = tensor, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, offset + self.offset)

    def load(self, mask: Any) -> Array:
        """The elements pointed at, 0 where the mask is false."""
        offset = lifted(self.offset).long()
        inside = torch.tensor(True) if mask is None else lifted(mask)
        offset, inside = torch.broadcast_tensors(offset, inside)
        flat = torch.as_strided(self.tensor, (self.tensor.untyped_storage().nbytes() // self.tensor.element_size(),), (1,), 0)
        chosen = offset + self.tensor.storage_offset()
        assert bool(((chosen >= 0) & (chosen < flat.numel()) | ~inside).all()), "a load outside the tensor"
        found = flat[torch.where(inside, chosen, 0)] if flat.numel() else torch.zeros(chosen.shape, dtype=flat.dtype)
        found = torch.where(inside, found, torch.zeros((), dtype=found.dtype))
        if found.is_floating_point():
            found = found.double()
        return Array(found)


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Array]:
    return lambda x: Array(function(lifted(x)))


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Array]:
    return lambda x, y, **_: Array(function(*pair(x, y)))


def _where(condition: Any, x: Any, y: Any) -> Array:
    return Array(torch.where(lifted(condition), *pair(x, y)))


tl = SimpleNamespace(
    int1=torch.bool,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float64,
    where=_where,
    minimum=_of_two(torch.minimum),
    maximum=_of_two(torch.maximum),
    div_rn=_of_two(torch.true_divide),
    cast=lambda x, dtype: Array(lifted(x).to(dtype)),
    load=lambda pointer, mask=None, other=0: pointer.load(mask),
    PropagateNan=SimpleNamespace(ALL=None),
    sqrt_rn=_unary(torch.sqrt),
    **{name: _unary(getattr(torch, name)) for name in "abs exp exp2 log log2 rsqrt erf sin cos floor ceil".split()},
)
libdevice = SimpleNamespace(expm1=_unary(torch.expm1), log1p=_unary(torch.log1p), tanh=_unary(torch.tanh), pow=_of_two(torch.pow))
NAMESPACE: dict[str, Any] = {
    "tl": tl,
    "libdevice": libdevice,
    "tanh_approx": _unary(torch.tanh),
    "tanh_exp2": _unary(torch.tanh),
    "tanh_interpreted": _unary(torch.tanh),
    "floor_quotient": _of_two(lambda x, y: torch.div(x, y, rounding_mode="floor")),
    "floor_rest": _of_two(torch.remainder),
    "round_even": _unary(torch.round),
    "truncate": _unary(torch.trunc),
}


def evaluated(text: str, **names: Any) -> Tensor:
    """The value of a printed expression."""
    return lifted(eval(text, dict(NAMESPACE), names))


def executed(statements: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """All names after the statements ran."""
    scope = {**NAMESPACE, **names}
    exec("\n".join(statements), scope)
    return scope
