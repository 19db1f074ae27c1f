"""Calls of named functions on traced values: how they arrive, where their meaning is found, and what is refused."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

import flexc.frontend.casts  # noqa: F401  (adds its functions to NAMED)
from flexc.frontend import vector, whole
from flexc.frontend.indexing import index
from flexc.frontend.named import NAMED
from flexc.frontend.session import current, is_scalar_only, refuse
from flexc.frontend.symbol import Symbol, Traced

# --- refusals -------------------------------------------------------------------------------------------------------------------------

_NO_VALUE = "its value is unknown while tracing"
_ONE_SCORE = "the function sees one score and its position, never a whole row"
_REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("item", "tolist", "numpy"), (_NO_VALUE, "the traced value itself: it can be computed and indexed with")),
    **dict.fromkeys(
        ("softmax", "log_softmax", "cumsum", "cumprod", "argmax", "argmin", "sort", "argsort", "topk", "logsumexp"),
        (_ONE_SCORE, "compute it outside the function and capture the tensor"),
    ),
    "detach": ("gradients of part of a score function cannot be stopped", "a captured tensor that requires no gradient, or T.detach()"),
    "data": ("gradients of part of a score function cannot be stopped", "a captured tensor that requires no gradient, or T.detach()"),
    "backward": ("the function is traced, not run", "out.backward() on the attention's output"),
    "dropout": ("random numbers would be drawn once, while tracing", "a captured tensor of random numbers, indexed by position"),
}
_RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
}
_RANDOM |= {
    "random_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "dropout",
    "alpha_dropout",
    "feature_dropout",
    "rrelu",
    "gumbel_softmax",
}


def refuse_random(name: str) -> NoReturn:
    """Refuse a function that draws random numbers."""
    refuse(
        f"random numbers ({name})",
        why="the function runs once, while tracing: every score and every call would get the same draw",
        instead="a captured tensor of random numbers drawn before the call, indexed by position",
    )


def is_random(name: str) -> bool:
    """Whether a torch function of this name draws random numbers."""
    return name in _RANDOM


def refuse_unknown(name: str, args: tuple, spelled: str) -> NoReturn:
    """Refuse a function that has no meaning on traced values; Python's own numbers are tried as constants first."""
    session = current()
    nodes = [a.node for a in args if isinstance(a, Symbol)]
    if session is not None and nodes and all(map(is_scalar_only, nodes)):
        session.pin(*nodes)
    if is_random(name):
        refuse_random(spelled)
    if name in _REFUSED:
        why, instead = _REFUSED[name]
        refuse(f"{spelled} of a traced value", why=why, instead=instead)
    if name.endswith("_") and not name.startswith("_"):
        refuse(f"{spelled} writes to a traced value", why="values cannot be changed in place", instead=f"x = x.{name[:-1]}(...)")
    near = difflib.get_close_matches(name, NAMED, 3, 0.7)
    hint = f"{' or '.join(near)}; or " if near else ""
    refuse(
        f"{spelled} of a traced value",
        why="flexc has no such operation on one score",
        instead=f"{hint}compute it outside the function and capture the tensor",
    )


# --- dispatch -------------------------------------------------------------------------------------------------------------------------


def call_named(name: str, args: tuple, kwargs: dict[str, Any], spelled: str) -> Any:
    """A function by name on any mixture of numbers, symbols and arrays."""
    name = name.removeprefix("special_").removeprefix("linalg_")
    if name in whole.WHOLE and whole.takes_whole(name, args, kwargs):
        return whole.WHOLE[name](*args, **kwargs)
    if name in ("max", "min"):
        return vector.broadcast(whole.two_sided(name), args, kwargs)
    if name not in NAMED:
        refuse_unknown(name, args, spelled)
    return vector.broadcast(NAMED[name], args, kwargs)


def is_known(name: str) -> bool:
    """Whether a torch function of this name has a meaning on traced values."""
    return name in NAMED or name in whole.WHOLE


_DUNDER = {"truediv": "true_divide", "div": "true_divide", "floordiv": "floor_divide", "mod": "remainder", "matmul": "matmul"}
_DUNDER |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}


def call_torch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `__torch_function__` does: the function by its name. Operators of real tensors arrive as dunder methods."""
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__":
        return index(args[0], args[1])
    if name == "where" and getattr(func, "__objclass__", None) is not None:
        return call_named("where", (args[1], args[0], *args[2:]), kwargs, "where")
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        if plain.startswith("r") and plain[1:] in {*_DUNDER, "add", "sub", "mul", "pow"}:
            plain, args = plain[1:], args[::-1]
        return call_named(_DUNDER.get(plain, plain), args, kwargs, name)
    module = getattr(func, "__module__", None) or "torch"
    module = "torch.nn.functional" if module == "torch._C._nn" else module
    return call_named(name, args, kwargs, f"{module if module.startswith('torch.nn') else 'torch'}.{name}")


_UFUNCS = {"fmin": "minimum", "fmax": "maximum", "divide": "true_divide", "mod": "remainder", "absolute": "abs", "conjugate": "conj"}


def call_ufunc(ufunc: Any, method_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `__array_ufunc__` does."""
    name = str(ufunc.__name__)
    if method_name != "__call__":
        refuse(f"numpy.{name}.{method_name} of a traced value", why="only plain calls can be traced", instead="torch functions, or a loop")
    if kwargs.pop("out", None) is not None:
        refuse(f"out= of numpy.{name}", why="a traced value cannot be written to", instead="the value that the function returns")
    return call_named(_UFUNCS.get(name, name), args, kwargs, f"numpy.{name}")


def method(self: Traced, name: str) -> Callable[..., Any]:
    """The method `name` of a traced value."""
    if name == "where":
        return lambda condition, other: call_named("where", (condition, self, other), {}, ".where")
    if name == "size":
        return lambda dim=None: self.shape if dim is None else self.shape[dim]  # pyright: ignore[reportAttributeAccessIssue]
    if name not in NAMED and name not in whole.WHOLE:
        refuse_unknown(name, (self,), f".{name}()")
    return lambda *args, **kwargs: call_named(name, (self, *args), kwargs, f".{name}()")


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`. On traced values, tensors and plain numbers alike."""
    if any(isinstance(x, Traced) for x in (condition, a, b)) and not isinstance(condition, bool):
        return call_named("where", (condition, a, b), {}, "flexc.where")
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, a, b)
    return a if condition else b
