"""Keys and values in pages: the cache of a server, whose sequences grow, share pages and lie anywhere.

On a GPU the split kernel reads the pages where they are, for decoding and for prefill; on the CPU they are gathered first. Positions in
score and mask functions are those of the sequence: a page changes the address of a key and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from flexc import backends, frontend, pipeline, settings
from flexc.autograd import run
from flexc.backends import Shapes
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.inference.decode import rows_of
from flexc.inference.places import MAX_POSITION, Positions, packed, positions_of
from flexc.inference.quantized import Scales, is_quantized, is_readable, meant, refuse_scales_of_wide, scales_of
from flexc.launch import Launch

if TYPE_CHECKING:
    from flexc.api import Kernel
    from flexc.inference.mixed import PackedQueries

Tensor = torch.Tensor

MOST_PAGE = 256
_LAYOUTS = {"NHD": (0, 2, 1, 3), "HND": (0, 1, 2, 3)}


@dataclass(frozen=True)
class PagedKV:
    """Keys and values in pages, in place of k and v in a call.

    Nothing is copied; the tensors may change between calls, also those that a CUDA graph reads.

    Attributes:
        k_pages, v_pages: [pages, page, Hkv, D] and [pages, page, Hkv, Dv] with layout "NHD" (vLLM's), [pages, Hkv, page, D] with "HND"
            (FlashInfer's); a page has 1 to 256 tokens.
        page_table: [B, n], int32: the pages of each sequence, in order. Sequences may share pages. Entries past a length are never read.
        lengths: [B], int32: tokens of each sequence that are in the cache.
        layout: "NHD" or "HND".
        k_scale, v_scale: factors of pages of float8_e4m3fn or int8, float32: [], [Hkv], or like the pages without their last dimension;
            None for 1.

    Raises:
        InputError, ShapeError: sizes, dtypes or devices do not fit.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths: Tensor
    layout: str = "NHD"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in _LAYOUTS:
            raise InputError(f"unknown layout {self.layout!r}: expected " + " or ".join(f'"{name}"' for name in _LAYOUTS))
        for name in ("k_pages", "v_pages", "page_table", "lengths"):
            value, dims = getattr(self, name), {"page_table": 2, "lengths": 1}.get(name, 4)
            if not isinstance(value, Tensor):
                raise InputError(f"{name} is a {type(value).__name__}; expected a torch.Tensor")
            if value.layout is not torch.strided:
                raise InputError(f"{name} has layout {value.layout}; expected a dense tensor: convert it with {name}.to_dense()")
            if value.dim() != dims:
                raise ShapeError(f"{name} has shape {list(value.shape)}; expected {dims} dimensions")
            if dims < 4 and value.dtype != torch.int32:
                raise InputError(f"{name} has dtype {value.dtype}; expected int32: convert it with {name}.to(torch.int32)")
            if value.device != self.k_pages.device:
                raise InputError(f"{name} is on {value.device} and k_pages on {self.k_pages.device}: move it there")
        if self.k_pages.shape[:3] != self.v_pages.shape[:3] or self.k_pages.dtype != self.v_pages.dtype:
            raise ShapeError(
                f"k_pages is {list(self.k_pages.shape)} of {self.k_pages.dtype} and v_pages {list(self.v_pages.shape)} of "
                f"{self.v_pages.dtype}; expected one dtype and all but the last size alike"
            )
        if not 1 <= self.page <= MOST_PAGE:
            raise ShapeError(f"a page of {self.page} tokens; expected 1 to {MOST_PAGE}: is the layout {self.layout!r}?")
        if self.page_table.shape[0] != self.lengths.shape[0]:
            raise ShapeError(f"page_table has {self.page_table.shape[0]} rows and lengths {self.lengths.shape[0]}; expected one of each")
        if self.capacity > MAX_POSITION:
            raise UnsupportedError(f"expected at most {MAX_POSITION} tokens of a sequence on every backend, got room for {self.capacity}")
        refuse_scales_of_wide(self.k_scale, self.v_scale, self.k_pages)
        if is_quantized(self.k_pages):
            _ = self.scales

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """Views [pages, Hkv, page, D] of the keys and of the values."""
        order = _LAYOUTS[self.layout]
        return self.k_pages.permute(order), self.v_pages.permute(order)

    @property
    def scales(self) -> Scales | None:
        """Of pages of eight bits."""
        order = (0, 2, 1) if self.layout == "NHD" else (0, 1, 2)
        return scales_of(self.k_scale, self.v_scale, *self.pages, order) if is_quantized(self.k_pages) else None

    @property
    def addresses(self) -> tuple[Tensor, ...]:
        """What a kernel takes besides the pages."""
        return self.page_table, self.lengths

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.pages[0].shape[2]

    @property
    def capacity(self) -> int:
        """Tokens that a row of the table has room for."""
        return self.page_table.shape[1] * self.page

    def contiguous(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies [B, Hkv, S, D] of the keys and of the values, S the room of the table, zeros past each length.

        Raises:
            InputError: on the CPU, a length or a page that cannot be.
        """
        if self.lengths.device.type == "cpu":  # where a wrong page would be PyTorch's IndexError
            self.refuse_values()
        is_used = torch.arange(self.page_table.shape[1], device=self.lengths.device) * self.page < self.lengths[:, None]
        table = torch.where(is_used, self.page_table, 0).long()
        whole = meant(*self.pages, self.scales, dtype)
        batch, heads = len(self.lengths), whole[0].shape[1]
        if len(self.k_pages):
            copies = [x[table].movedim(2, 1).flatten(2, 3) for x in whole]
        else:
            copies = [x.new_zeros((batch, heads, self.capacity, x.shape[3])) for x in whole]
        return Positions(kv_len=self.lengths).without_rest(*copies)

    def refuse_values(self) -> None:
        """Refuse lengths and pages that cannot be. Waits for the device.

        Raises:
            InputError: names the first that is wrong.
        """
        rows = self.page_table.tolist()
        for entry, length in enumerate(self.lengths.tolist()):
            if not 0 <= length <= self.capacity:
                raise InputError(f"lengths[{entry}] is {length}; expected 0 to {self.capacity}, the room of a row of page_table")
            for place, page in enumerate(rows[entry][: math.ceil(length / self.page)]):
                if not 0 <= page < len(self.k_pages):
                    raise InputError(f"page_table[{entry}, {place}] is {page}; expected a page from 0 to {len(self.k_pages) - 1}")

    def refuse_overlaps(self, written: Tensor) -> None:
        """Refuse a table by which two sequences write the same place of a page. Waits for the device.

        Args:
            written: [B], how many of the last tokens of each sequence a step has written: the queries' own.

        Raises:
            InputError: names both sequences.
        """
        rows, writers = self.page_table.tolist(), {}
        for entry, (length, count) in enumerate(zip(self.lengths.tolist(), written.tolist())):
            for token in range(max(0, length - count), length):
                page, place = rows[entry][token // self.page], token % self.page
                other = writers.setdefault((page, place), entry)
                if other != entry:
                    raise InputError(
                        f"token {token} of sequence {entry} is written to place {place} of page {page}, and so is one of sequence {other}: "
                        f"expected a page of its own in page_table[{entry}, {token // self.page}]"
                    )


@dataclass(frozen=True)
class ContiguousKV:
    """Keys and values of eight bits that lie one after another, as a cache.

    Attributes:
        k, v: [B, Hkv, S, D] and [B, Hkv, S, Dv].
        lengths: [B], or None for all.
        k_scale, v_scale: [], [Hkv] or [B, Hkv, S], or None for 1.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    page = 0
    addresses: tuple[Tensor, ...] = ()

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """The keys and the values."""
        return self.k, self.v

    @property
    def scales(self) -> Scales | None:
        """Of both."""
        return scales_of(self.k_scale, self.v_scale, self.k, self.v)

    @property
    def capacity(self) -> int:
        """Tokens of a sequence."""
        return self.k.shape[2]

    def contiguous(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the keys and the values mean."""
        return meant(self.k, self.v, self.scales, dtype)


def attend_paged(
    kernel: Kernel, q: Tensor, cache: PagedKV, v: Any, scale: float | None, q_offset: int | Tensor | None, kv_len: Any, scales: tuple
) -> tuple[Tensor, Tensor]:
    """out and lse of a kernel on a paged cache; `Kernel.__call__` says what the arguments are."""
    given = {"v": v, "kv_len": kv_len, "k_scale": scales[0], "v_scale": scales[1]}
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} was given beside a PagedKV, which has its own; expected kernel(q, cache)")
    refuse_queries(q, cache, len(cache.lengths))
    if settings.current().check:
        cache.refuse_values()
        if q_offset is None:
            cache.refuse_overlaps(torch.full_like(cache.lengths, q.shape[2]))
    if q_offset is None:
        q_offset = torch.clamp(cache.lengths - q.shape[2], min=0)
    return attend_cache(kernel, q, cache, scale, q_offset, "a paged cache")


def attend_quantized(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    q_offset: int | Tensor | None,
    kv_len: int | Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """out and lse of a kernel on keys and values of eight bits."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ShapeError(f"{name} is {list(x.shape) if isinstance(x, Tensor) else type(x).__name__}; expected 4 dimensions")
    refuse_scales_of_wide(*scales, k)
    if v.dtype != k.dtype or v.shape[:3] != k.shape[:3] or v.device != k.device:
        raise ShapeError(
            f"k is {list(k.shape)} of {k.dtype} and v {list(v.shape)} of {v.dtype}; expected one dtype and device, and as many tokens"
        )
    refuse_queries(q, ContiguousKV(k, v, None, None, None), k.shape[0])
    positions, k, v = positions_of(q_offset, kv_len, q, k, v)
    k_scale, v_scale = (x[:, :, : k.shape[2]] if isinstance(x, Tensor) and x.dim() == 3 else x for x in scales)
    lengths = None if positions is None else positions.kv_len
    return attend_cache(kernel, q, ContiguousKV(k, v, lengths, k_scale, v_scale), scale, q_offset, "a cache of eight bits")


def attend_cache(
    kernel: Kernel,
    q: Tensor,
    cache: PagedKV | ContiguousKV,
    scale: float | None,
    q_offset: int | Tensor | None,
    what: str,
    queries: PackedQueries | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a kernel on a cache.

    Args:
        what: the cache is, for messages.
        queries: of several sequences one after another, q [1, Hq, total, D]; else q is [B, Hq, Sq, D].
    """
    keys, values = cache.pages
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, keys, values)):
        raise UnsupportedError(f"a gradient through {what}, on every backend: call the kernel under torch.no_grad(), or detach q")
    backend, _ = backends.choose(kernel._backend, q.device)
    if backend is backends.CPU or settings.current().eager:
        wide = torch.float32 if is_quantized(keys) else q.dtype  # no 16 bits hold what numbers of eight and their scales mean
        k, v = cache.contiguous(wide)
        if queries is None:
            out, lse = kernel._attend_at(q.to(wide), k, v, scale, q_offset, cache.lengths, False)
        else:
            assert cache.lengths is not None
            k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
            sequences = queries.sequences(cache.lengths, cache.capacity, q_offset)
            out, lse = kernel._attend_placed(q.to(wide), k, v, scale, sequences)
        return out.to(q.dtype), lse
    if kernel._backend not in ("auto", "triton"):
        raise UnsupportedError(f'{what} on the {backend.name} backend: expected backend="triton" or "auto"')
    positions = queries.positions(cache.lengths, q_offset) if queries else positions_of(q_offset, cache.lengths, q, keys, values)[0]
    return _attend_split(kernel, q, cache, scale, positions, f"{what}: triton, split over the keys, query heads packed", queries)


def refuse_queries(q: Tensor, cache: PagedKV | ContiguousKV, sequences: int) -> None:
    """Refuse queries [sequences, Hq, Sq, D] that do not fit a cache."""
    keys, _ = cache.pages
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ShapeError(f"q is {list(q.shape) if isinstance(q, Tensor) else type(q).__name__}; expected [batch, heads, tokens, head_dim]")
    if (q.dtype != keys.dtype and not is_quantized(keys)) or q.device != keys.device:
        raise InputError(f"q is {q.dtype} on {q.device} and the cache {keys.dtype} on {keys.device}; expected one dtype and one device")
    if is_quantized(q):
        raise InputError(f"q has dtype {q.dtype}; expected float16 or bfloat16: convert it with q.to(torch.bfloat16)")
    if q.shape[0] != sequences:
        raise ShapeError(f"q has batch size {q.shape[0]} and the cache {sequences} sequences")
    if q.shape[3] != keys.shape[3]:
        raise ShapeError(f"q and k must have one head_dim, got {q.shape[3]} and {keys.shape[3]}")
    if not q.shape[1] or not keys.shape[1] or q.shape[1] % keys.shape[1]:
        raise ShapeError(f"the heads of q must be a multiple of those of the cache, and not 0, got {q.shape[1]} and {keys.shape[1]}")


def _attend_split(
    kernel: Kernel,
    q: Tensor,
    cache: PagedKV | ContiguousKV,
    scale: float | None,
    positions: Positions | None,
    reason: str,
    queries: PackedQueries | None,
) -> tuple[Tensor, Tensor]:
    from flexc.arguments import as_kernels_take

    (keys, values), scales = cache.pages, cache.scales
    batch = queries.count if queries else q.shape[0]
    q, scale, tensors, trace, binding = as_kernels_take(kernel, q, scale, positions, batch)
    _, heads, q_len, head_dim = q.shape
    if queries:  # tiles suit the mean, or where the rest of the batch must change nothing, one query
        q_len = min(q_len, 1) if kernel._options.batch_invariant else math.ceil(q_len / max(batch, 1))
    sizes = {"head_dim": head_dim, "head_dim_v": values.shape[3], "dtype": q.dtype, "bulk": False, "page": cache.page}
    sizes |= {"ragged": queries is not None}
    if scales is not None:
        sizes |= {"cache": str(keys.dtype).removeprefix("torch."), "token_scales": scales.of_tokens}
    shapes = Shapes(batch, heads, keys.shape[1], q_len, cache.capacity, **sizes)
    trace, target = _packed_trace(trace, shapes.group), pipeline.target_of(q.device)
    artifact = pipeline.artifact_for(trace, shapes, target, backends.DECODE, reason, kernel._options, kernel.__name__)
    launch = Launch(artifact, rows_of(shapes), scale, binding.scalars, kernel._options, kernel.__name__, maps_by_kernels=True)
    kernel._last = (launch, tensors, q.device)
    keys, values = (x if is_readable(x) else x.contiguous() for x in (keys, values))
    addresses = cache.addresses
    if queries and not launch.has_no_pairs:
        addresses = *addresses, queries.tiles(shapes.group, artifact.plan.forward.rows)
    out, lse = run(launch, q, keys, values, (*tensors, *addresses, *(() if scales is None else (scales.k, scales.v))))
    return out, lse.float()


@lru_cache(maxsize=1024)
def _packed_trace(trace: frontend.Trace, group: int) -> frontend.Trace:
    return replace(trace, graph=packed(trace.graph, group))
