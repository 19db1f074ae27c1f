"""Masks that combine: `window & document`, `causal | prefix`, `~padding`, `a ^ b`.

A `Mask` wraps a function (batch, head, q_idx, kv_idx) → "may this query see this key?". Combining two masks makes a plain function that
calls both, so the tracer sees nothing but plain functions.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch

from flexc.errors import InputError
from flexc.pickling import Recipe, follow, graph_of_mask, has_a_name, held_at, mask_of_graph

MaskFunction = Callable[..., Any]

_EXPECTED = "(batch, head, q_idx, kv_idx)"


class Mask:
    """A mask function that combines with others by `&`, `|`, `^` and `~`. Calling it calls the function.

    Every mask can be copied and pickled: see `flexc.pickling`.

    Attributes:
        __flexc_function__: the plain function, for the tracer.
        __name__: readable, such as "causal & document".
        recipe: what makes it again, for a mask that was made of arguments or of other masks.
    """

    def __init__(self, function: MaskFunction, name: str | None = None, recipe: Recipe | None = None):
        function = plain_function(function)
        _refuse_wrong_arity(function)
        self.__flexc_function__ = function
        self.__name__ = name or _name_of(function)
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", None) or __name__
        self.recipe = recipe

    def __reduce__(self) -> str | tuple:
        function = self.__flexc_function__
        name = getattr(function, "__qualname__", "")
        if held_at(self.__module__, name) is self:
            return name  # where a decorated function was, there is the mask
        if self.recipe is not None:
            return follow, (self.recipe,)
        if has_a_name(function):
            return Mask, (function, self.__name__)
        return _of_graph, (*graph_of_mask(function), self.__name__)

    def __call__(self, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.__flexc_function__(batch, head, q_idx, kv_idx)

    def __and__(self, other: Mask | MaskFunction) -> Mask:
        return _combined(self, other, _both, operator.and_, "&")

    def __rand__(self, other: Mask | MaskFunction) -> Mask:
        return _combined(other, self, _both, operator.and_, "&")

    def __or__(self, other: Mask | MaskFunction) -> Mask:
        return _combined(self, other, _either, operator.or_, "|")

    def __ror__(self, other: Mask | MaskFunction) -> Mask:
        return _combined(other, self, _either, operator.or_, "|")

    def __xor__(self, other: Mask | MaskFunction) -> Mask:
        return _combined(self, other, _one_of, operator.xor, "^")

    def __rxor__(self, other: Mask | MaskFunction) -> Mask:
        return _combined(other, self, _one_of, operator.xor, "^")

    def __invert__(self) -> Mask:
        return Mask(_negation(self.__flexc_function__), f"~{_operand_name(self)}", (operator.invert, (self,), {}))

    def __bool__(self) -> bool:
        raise InputError(
            f"the truth value of the mask `{self.__name__}` is not defined; for the opposite mask use ~mask instead of `not mask`,"
            " and & and | instead of `and` and `or`"
        )

    def __repr__(self) -> str:
        return f"<flexc mask {self.__name__}>"


def mask(function: MaskFunction) -> Mask:
    """Make a mask of a function (batch, head, q_idx, kv_idx), so that it combines with others. A mask is returned as it is.

    Raises:
        InputError: not callable, or not four positional arguments.
    """
    return function if isinstance(function, Mask) else Mask(function)


def plain_function(function: Any) -> MaskFunction:
    """The function inside a mask; anything else as it is."""
    return getattr(function, "__flexc_function__", function)


# The plain functions that masks are combined into. Module-level makers, so that equal combinations share their code.


def _both(left: MaskFunction, right: MaskFunction) -> MaskFunction:
    def both(batch, head, q_idx, kv_idx):
        return left(batch, head, q_idx, kv_idx) & right(batch, head, q_idx, kv_idx)

    return both


def _either(left: MaskFunction, right: MaskFunction) -> MaskFunction:
    def either(batch, head, q_idx, kv_idx):
        return left(batch, head, q_idx, kv_idx) | right(batch, head, q_idx, kv_idx)

    return either


def _one_of(left: MaskFunction, right: MaskFunction) -> MaskFunction:
    def one_of(batch, head, q_idx, kv_idx):
        return left(batch, head, q_idx, kv_idx) ^ right(batch, head, q_idx, kv_idx)

    return one_of


def _negation(function: MaskFunction) -> MaskFunction:
    def negation(batch, head, q_idx, kv_idx):
        allowed = function(batch, head, q_idx, kv_idx)
        # ~True is the integer -2.
        return operator.not_(allowed) if isinstance(allowed, bool) else ~allowed

    return negation


def _combined(
    left: Any, right: Any, maker: Callable[[MaskFunction, MaskFunction], MaskFunction], operation: Callable[[Any, Any], Any], sign: str
) -> Mask:
    if not callable(left) or not callable(right):
        return NotImplemented
    left, right = mask(left), mask(right)
    name = f"{_operand_name(left, sign)} {sign} {_operand_name(right, sign)}"
    return Mask(maker(left.__flexc_function__, right.__flexc_function__), name, (operation, (left, right), {}))


def _of_graph(text: str, tensors: tuple, scalars: tuple, name: str) -> Mask:
    return Mask(mask_of_graph(text, tensors, scalars), name)


def _operand_name(operand: Mask, sign: str = "~") -> str:
    """In parentheses where the operand is itself a combination of another kind."""
    signs = {character for character in operand.__name__ if character in "&|^"}
    return operand.__name__ if signs <= {sign} else f"({operand.__name__})"


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or _name_of_part(function) or type(function).__name__


def _name_of_part(function: Any) -> str | None:
    return getattr(getattr(function, "func", None), "__name__", None)  # functools.partial


def _refuse_wrong_arity(function: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # a mask made inside a compiled region: `flexc.dynamo` finds out
    if not callable(function):
        raise InputError(f"a mask is made of a function {_EXPECTED}, got {type(function).__name__}")
    if hasattr(function, "mask_mod"):
        raise InputError(f"a mask is made of a function {_EXPECTED}, got the flexc kernel {_name_of(function)}: pass its .mask_mod")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # builtins without a signature: the tracer finds out
    try:
        signature.bind(0, 0, 0, 0)
    except TypeError:
        count = _positional_count(signature)
        hint = "; five arguments make a score function: use flexc.kernel" if count == 5 else ""
        hint = f"; it makes a mask: call it, {_name_of(function)}(...)" if getattr(function, "makes_functions", False) else hint
        raise InputError(
            f"a mask function takes {_EXPECTED}: expected 4 positional arguments, got {count} in {_name_of(function)}{signature}{hint}"
        ) from None


def _positional_count(signature: inspect.Signature) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in signature.parameters.values())
