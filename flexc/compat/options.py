"""`kernel_options`: what flexc takes over from FlexAttention's options, and what it leaves aside, saying so once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from flexc.backends import is_interpreted
from flexc.compat.errors import ArgumentError, CallableError, UsageError
from flexc.errors import InputError

_BACKENDS = {"AUTO": "auto", "TRITON": "triton", "TRITON_DECODE": "triton", "FLASH": "cute"}
_PRECISIONS = {"ieee": "fast", "tf32": "tf32"}  # flexc's "fast" multiplies float32 as float32
_INTERNAL = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
_NO_OPTIONS = ("auto", "fast")

_TILES = "flexc computes its tiles; flexc.attention(..., autotune=True) measures them"
_PROMISE = "flexc proves what it needs to know of the mask"
_WHY = {
    **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages"), _TILES),
    **dict.fromkeys(("ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS"), _PROMISE),
    "PRESCALE_QK": "flexc folds the scale where that is exact enough",
}
_warned: set[str] = set()


class FlexKernelOptions(TypedDict, total=False):
    """Options that `flex_attention` takes over. Any other name is left aside, with one warning.

    Attributes:
        BACKEND: "AUTO", "TRITON" or "TRITON_DECODE" (flexc's triton), "FLASH" (flexc's cute). On the CPU all run flexc's cpu backend.
        FLOAT32_PRECISION: "ieee" or "tf32", for products of float32 tensors.
    """

    BACKEND: Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE"]
    FLOAT32_PRECISION: Literal["ieee", "tf32"]


def backend_and_precision(kernel_options: Mapping[str, Any] | None, on_cpu: bool) -> tuple[str, str]:
    """The `backend` and `precision` of a flexc kernel.

    Raises:
        InputError: no mapping.
        UsageError: BACKEND and FORCE_USE_FLEX_ATTENTION together.
        ArgumentError: an unknown backend or precision.
        CallableError: a name that is FlexAttention's own business.
    """
    if not kernel_options:
        return _NO_OPTIONS
    if not isinstance(kernel_options, Mapping):
        raise InputError(f'kernel_options is a {type(kernel_options).__name__}; expected a dict, such as {{"BACKEND": "TRITON"}}')
    options = dict(kernel_options)
    for name in _INTERNAL:
        if name in options:
            raise CallableError(f"{name} is no kernel option: ask with return_aux=AuxRequest(...)")
    if "BACKEND" in options and options.pop("FORCE_USE_FLEX_ATTENTION", False):
        raise UsageError("BACKEND cannot be combined with FORCE_USE_FLEX_ATTENTION, which it replaces: drop the latter")
    backend = _chosen(options, "BACKEND", "AUTO", _BACKENDS)
    precision = _chosen(options, "FLOAT32_PRECISION", "ieee", _PRECISIONS)
    for name in options:
        _warn_once(str(name))
    return ("auto" if on_cpu and not is_interpreted() else backend), precision


def _chosen(options: dict[str, Any], name: str, default: str, known: dict[str, str]) -> str:
    value = options.pop(name, default)
    value = value.strip("'\"") if isinstance(value, str) else value
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"invalid {name} {value!r}: expected " + ", ".join(f'"{k}"' for k in known))
    return known[value]


def _warn_once(name: str) -> None:
    if name in _warned:
        return
    _warned.add(name)
    why = _WHY.get(name.removeprefix("fwd_").removeprefix("bwd_"), "flexc has no such option")
    warnings.warn(f"flexc ignores the kernel option {name}: {why}", UserWarning, stacklevel=4)
