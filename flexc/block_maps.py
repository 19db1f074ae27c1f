"""`flexc.block_map`: the blocks of a mask, without attention around it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flexc import frontend, map_making, passes, settings
from flexc.algebra import Mask
from flexc.api import Kernel
from flexc.arguments import MAX_TOKENS
from flexc.backends import Shapes
from flexc.errors import InputError, ShapeError, TraceError, UnsupportedError
from flexc.extents import Extent, extents_of, refuse_wrong_sizes
from flexc.index_check import check_indices
from flexc.ir.graph import Graph, inputs_of
from flexc.map_making import MapMaker, MapSizes, number_on
from flexc.pipeline import MaskAlone, claim_lines
from flexc.sparsity import BlockMap
from flexc.sparsity.statements import is_declared_sorted, verify_facts
from flexc.target import Target, named_device

Tensor = torch.Tensor

_DEFAULT_BLOCK = (128, 128)
_MOST_BLOCKS = 2**31 - 1  # runs count blocks in int32


def block_map(
    mask: Callable[..., Any] | Mask | Kernel,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    block: int | tuple[int, int] | None = None,
    device: torch.device | str | None = None,
) -> BlockMap:
    """Which blocks of a mask are empty, partial or full: proved from the function, never by evaluating every pair.

    Args:
        mask: a mask function (batch, head, q_idx, kv_idx), a Mask, or a kernel, whose mask may also be hidden in its score function, as in
            where(condition, score, -inf).
        q_len, kv_len: tokens, fewer than 2^24 each; they need not divide the block.
        batch, heads: how many the map covers. It has one entry for all where the mask does not read them.
        block: tokens per block, (Bq, Bkv) or one number for both; default (128, 128).
        device: where the map is made; default: that of the captured tensors, the CPU if there are none.

    Returns:
        BlockMap; `print` draws it. It is that of the captured tensors' present contents: when they change, make another.

    Raises:
        InputError, ShapeError: an argument is not what is said above, or does not fit a captured tensor; with FLEXC_CHECK=1, a tensor that
            was declared sorted is not.
        TraceError: the function cannot become a graph.
        UnsupportedError: 2^24 tokens or more.
        IndexRangeError: with FLEXC_CHECK=1, the mask reads past a captured tensor. Otherwise such a read gives 0, as in kernels.
    """
    score_mod, mask_mod = _functions_of(mask)
    try:
        trace, binding = frontend.trace(score_mod, mask_mod)
    except TraceError:
        _refuse_arity(mask)
        raise
    ready = _prepared(trace)
    alone = ready.alone
    tensors = [binding.tensors[slot] for slot in alone.tensor_slots]
    scalars = [binding.scalars[slot] for slot in alone.scalar_slots]
    now = settings.current()
    maker = ready.maker((q_len, kv_len, batch, heads, block, device), tensors, now.device_maps)
    where = maker.device
    tensors = [(t if t.device == where or t.dim() else number_on(t, where)).detach() for t in tensors]
    if now.check:
        verify_facts(tensors, [spec.name for spec in alone.graph.tensors])
        sizes = maker.sizes
        if alone.graph.mask is not None and sizes.q_len and sizes.kv_len:
            shapes = Shapes(sizes.batch, sizes.heads, sizes.heads, sizes.q_len, sizes.kv_len, 1, 1, torch.float32)
            check_indices(alone.graph, shapes, tensors, scalars, where)
    made = maker.map(tensors, scalars)
    made.make_rows()  # of the present contents
    return made


_MOST_MAKERS = 64


@dataclass
class _Prepared:
    """The mask of a trace, its extents and which positions it reads.

    Attributes:
        makers: for arguments that were checked with tensors of some sizes.
    """

    alone: MaskAlone
    extents: tuple[Extent, ...]
    reads: frozenset[str]
    makers: dict[tuple, MapMaker] = field(default_factory=dict)

    def maker(self, asked: tuple, tensors: Sequence[Tensor], by_kernels: bool) -> MapMaker:
        """What makes the map of a call: found once, as to look at arguments takes longer than to launch the kernels.

        Args:
            asked: q_len, kv_len, batch, heads, block and device, as the user gave them.
            by_kernels: what FLEXC_DEVICE_MAPS says.
        """
        block = asked[4]
        flat = (*asked, *block) if isinstance(block, tuple) else asked
        sizes = tuple([(t.shape, t.device, is_declared_sorted(t)) for t in tensors])
        # 1 == True == 1.0: what was checked holds for arguments of the same types.
        key = flat, tuple(map(type, flat)), sizes, by_kernels, map_making.KERNEL_DEVICES
        try:
            found = self.makers.get(key)
        except TypeError:  # a list, say
            return self._maker(asked, tensors)
        if found is None:
            found = self._maker(asked, tensors)
            if len(self.makers) >= _MOST_MAKERS:
                self.makers.clear()
            self.makers[key] = found
        return found

    def _maker(self, asked: tuple, tensors: Sequence[Tensor]) -> MapMaker:
        q_len, kv_len, batch, heads, block, device = asked
        q_len, kv_len = _length("q_len", q_len), _length("kv_len", kv_len)
        batch, heads = _count("batch", batch), _count("heads", heads)
        sides = _block(block)
        where = _device(device, self.alone.graph, tensors)
        refuse_wrong_sizes(self.extents, self.alone.graph, tensors, batch, heads, "the map is made for")
        _refuse_too_many_blocks(self.reads, q_len, kv_len, batch, heads, sides)
        return MapMaker.of(self.alone.graph, MapSizes(q_len, kv_len, batch, heads, sides), tensors=tensors, device=where)


_ready: WeakKeyDictionary[frontend.Trace, _Prepared] = WeakKeyDictionary()


def _prepared(trace: frontend.Trace) -> _Prepared:
    """Made once: for a short map this takes longer than classification."""
    found = _ready.get(trace)
    if found is None:
        claim_lines(trace.graph)
        alone = MaskAlone.of(passes.run(trace.graph))
        mask = alone.graph.mask
        found = _ready[trace] = _Prepared(alone, extents_of(alone.graph), inputs_of(mask) if mask is not None else frozenset())
    return found


def _functions_of(mask: Any) -> tuple[Any, Any]:
    """The score and the mask function to trace."""
    if isinstance(mask, Kernel):
        return mask.score_mod, mask.mask_mod
    if not callable(mask):
        raise InputError(f"mask is a {type(mask).__name__}; expected a function (batch, head, q_idx, kv_idx), a Mask or a kernel")
    return None, mask


def _refuse_arity(mask: Any) -> None:
    """Asked only where tracing failed: to read a signature takes longer than all else before classification."""
    arity = 4 if isinstance(mask, Kernel) else frontend.arity(mask)
    if arity != 4:
        hint = ": five make a score function; for the mask hidden in it, pass flexc.kernel(function)" if arity == 5 else ""
        name = getattr(mask, "__name__", type(mask).__name__)
        raise InputError(f"{name!r} takes {arity} positional arguments; expected 4 (batch, head, q_idx, kv_idx){hint}")


def _whole(name: str, value: Any, wanted: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(f"expected {name} to be {wanted}, got {value!r}") from None


def _length(name: str, value: Any) -> int:
    tokens = _whole(name, value, "an integer number of tokens")
    if tokens < 0:
        raise ShapeError(f"expected {name} >= 0, got {tokens}")
    if tokens >= MAX_TOKENS:
        raise UnsupportedError(f"expected fewer than {MAX_TOKENS} tokens, got {name} {tokens}")
    return tokens


def _count(name: str, value: Any) -> int:
    number = _whole(name, value, "an integer")
    if number < 1:
        raise ShapeError(f"expected {name} >= 1, got {number}")
    return number


def _block(block: Any) -> tuple[int, int]:
    if block is None:
        return _DEFAULT_BLOCK
    sides = block if isinstance(block, tuple | list) else (block, block)
    if len(sides) != 2:
        raise InputError(f"expected block to be (query tokens, key tokens) or one number, got {block!r}")
    q_side, kv_side = (_whole("block", side, "integers, tokens per block") for side in sides)
    if min(q_side, kv_side) < 1:
        raise ShapeError(f"expected a block of at least 1 × 1 tokens, got {q_side} × {kv_side}")
    return q_side, kv_side


def _device(asked: torch.device | str | None, graph: Graph, tensors: Sequence[Tensor]) -> torch.device:
    """Where to make the map. Single numbers may come from elsewhere and are copied."""
    named = [(spec.name, tensor.device) for spec, tensor in zip(graph.tensors, tensors, strict=True) if tensor.dim()]
    for name, device in named[1:]:
        if device != named[0][1]:
            raise InputError(f"captured tensors must be on one device, got {named[0][0]} on {named[0][1]} and {name} on {device}")
    if asked is None:
        return named[0][1] if named else next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
    wanted = named_device(asked)
    if named and not _is_same(wanted, named[0][1]):
        raise InputError(f"the captured tensor {named[0][0]} is on {named[0][1]}, but the map was asked for on {wanted}: move one of them")
    if named:
        return named[0][1]
    Target.of(wanted)  # raises, if it is none of this machine
    return wanted


def _is_same(wanted: torch.device, found: torch.device) -> bool:
    return wanted.type == found.type and wanted.index in (None, found.index)


def _refuse_too_many_blocks(reads: frozenset[str], q_len: int, kv_len: int, batch: int, heads: int, block: tuple[int, int]) -> None:
    entries = (batch if "batch" in reads else 1) * (heads if "head" in reads else 1)
    rows, columns = (-(-length // side) for length, side in zip((q_len, kv_len), block))
    if entries * max(rows, columns) > _MOST_BLOCKS:
        raise ShapeError(
            f"expected at most {_MOST_BLOCKS:,} rows of blocks and as many columns, through batch and heads, got {entries:,} x {rows:,} "
            f"and {entries:,} x {columns:,} of {block[0]} x {block[1]} tokens: take larger blocks"
        )
