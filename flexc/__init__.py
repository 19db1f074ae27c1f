"""flexc: attention variants as plain Python functions, compiled to one fused kernel.

Glossary, the same in every room:

    B, Hq, Hkv     batch, query heads, key/value heads (Hq is a multiple of Hkv)
    Sq, Skv        query and key tokens
    D, Dv          head dimension of q and k, of v
    Bq, Bkv        tokens of a block of queries, of keys
    score          scale · q·k, float32
    lse            natural logarithm of the sum of exponentials of a row's scores
"""

import importlib
from typing import TYPE_CHECKING, Any

from flexc import masks, scores
from flexc.algebra import Mask, mask
from flexc.api import AuxOutput, Kernel, attention, kernel
from flexc.block_maps import block_map
from flexc.check import CheckReport, check
from flexc.compile_log import CompileLog, compile_log
from flexc.errors import (
    FlexcError,
    IndexRangeError,
    InputError,
    InternalError,
    NoCompileError,
    SettingError,
    ShapeError,
    ToolchainError,
    TraceError,
    UnsupportedError,
)
from flexc.frontend import constant, runtime, where
from flexc.inference.paged import PagedKV
from flexc.inference.varlen import varlen_attention
from flexc.reference import reference
from flexc.sparsity import BlockMap, Certificate
from flexc.sparsity.statements import declare_sorted as sorted
from flexc.target import Target

if TYPE_CHECKING:
    from flexc import integrations as integrations
    from flexc.warmup import Spec as Spec

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "BlockMap",
    "Certificate",
    "CheckReport",
    "CompileLog",
    "FlexcError",
    "IndexRangeError",
    "InputError",
    "InternalError",
    "Kernel",
    "Mask",
    "NoCompileError",
    "PagedKV",
    "SettingError",
    "ShapeError",
    "Spec",
    "Target",
    "ToolchainError",
    "TraceError",
    "UnsupportedError",
    "attention",
    "block_map",
    "check",
    "compile_log",
    "constant",
    "kernel",
    "mask",
    "masks",
    "reference",
    "runtime",
    "scores",
    "sorted",
    "varlen_attention",
    "where",
]


def __getattr__(name: str) -> Any:
    # What few programs use, and what imports other libraries, loads when it is asked for.
    if name == "Spec":
        return importlib.import_module("flexc.warmup").Spec
    if name == "integrations":
        return importlib.import_module("flexc.integrations")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
