"""Batches as a serving engine issues them, drawn at random, and what is right for each: a dense run for every sequence of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import flexc
from flexc.errors import UnsupportedError
from flexc.reference import reference

SCORES: dict[str, Callable | None] = {
    "plain": None,
    "slopes": lambda s, b, h, i, j: s - 0.05 * (h + 1) * (i - j),
    "cap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    "batch": lambda s, b, h, i, j: s * (1 + 0.1 * b),
}
MASKS: dict[str, Callable | None] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: 0 <= i - j < 23,
    "window by head": lambda b, h, i, j: (i >= j) & (i - j < 9 * h + 4),
    "window and sinks": lambda b, h, i, j: (i >= j) & ((i - j < 20) | (j < 3)),
    "rows and entries": lambda b, h, i, j: (b != 1) & (i % 3 != 0) & (i >= j),
    "stripes": lambda b, h, i, j: (i >= j) & ((j // 5) % 2 == b % 2),
}


@dataclass(frozen=True)
class Batch:
    """What is drawn. `sequences`: of each the tokens in the cache and how many of the last are queries; `rest`: tokens of no sequence."""

    sequences: tuple[tuple[int, int], ...]
    rest: int
    page: int
    layout: str
    shares: bool  # the first pages of all sequences
    kv_heads: int
    group: int
    dim: int
    score: str
    mask: str
    invariant: bool
    seed: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5))
    # a step of decoding, a chunk, or everything
    queries = [draw(st.sampled_from([min(1, n), draw(st.integers(0, n)), n])) for n in lengths]
    return Batch(
        tuple(zip(lengths, queries)),
        rest=draw(st.sampled_from([0, 0, 3])),
        page=draw(st.sampled_from([1, 3, 16, 24, 64, 256])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        shares=draw(st.booleans()),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 5, 8])),
        dim=draw(st.sampled_from([8, 16, 24])),
        score=draw(st.sampled_from(list(SCORES))),
        mask=draw(st.sampled_from(list(MASKS))),
        invariant=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def paged_cache(batch: Batch, generator: torch.Generator) -> tuple[flexc.PagedKV, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The cache in float32, and the keys and values of each sequence [1, Hkv, n, D].

    Places that no sequence uses hold NaN, and entries of the table past a length name pages that do not exist.
    """
    needed = [-(-n // batch.page) for n, _ in batch.sequences]
    shared = min((n - queries) // batch.page for n, queries in batch.sequences) if batch.shares else 0
    free = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    prefix = [free.pop() for _ in range(shared)]
    tables = [prefix + [free.pop() for _ in range(count - shared)] for count in needed]
    pages = [torch.randn(sum(needed) + 2, batch.kv_heads, batch.page, batch.dim, generator=generator) for _ in range(2)]
    is_used = torch.zeros(sum(needed) + 2, batch.page, dtype=torch.bool)
    table, whole = torch.full((len(needed), max(1, *needed)), 10**9, dtype=torch.int32), []
    for row, places, (length, _) in zip(table, tables, batch.sequences):
        row[: len(places)] = torch.tensor(places, dtype=torch.int32)
        tokens = torch.arange(length)
        at, within = torch.tensor(places, dtype=torch.long)[tokens // batch.page], tokens % batch.page
        is_used[at, within] = True
        whole.append(tuple(x[at, :, within].transpose(0, 1)[None] for x in pages))
    for x in pages:
        x.masked_fill_(~is_used[:, None, :, None], math.nan)
    order = (0, 2, 1, 3) if batch.layout == "NHD" else (0, 1, 2, 3)
    lengths = torch.tensor([n for n, _ in batch.sequences], dtype=torch.int32)
    return flexc.PagedKV(*(x.permute(order).contiguous() for x in pages), table, lengths, batch.layout), whole


def wrong(batch: Batch, backend: str = "triton", device: str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """ "" or what is wrong of one call on the whole batch."""
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(batch.seed)
    cache, whole = paged_cache(batch, generator)
    queries = [n for _, n in batch.sequences]
    q = torch.randn(sum(queries) + batch.rest, batch.group * batch.kv_heads, batch.dim, generator=generator).to(dtype)
    given = (cache.k_pages.to(device, dtype), cache.v_pages.to(device, dtype), cache.page_table.to(device), cache.lengths.to(device))
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    score_mod, mask_mod = SCORES[batch.score], MASKS[batch.mask]
    kernel = flexc.attention(score_mod, mask_mod, backend=backend, batch_invariant=batch.invariant and backend == "triton")
    cache = flexc.PagedKV(*given, batch.layout)
    out, aux = flexc.varlen_attention(q.to(device), cache, cu_seqlens_q=cu.to(device), kernel=kernel, return_lse=True)
    if backend == "triton" and sum(queries) and max(n for n, _ in batch.sequences) and not kernel.plan.ragged:
        return f"not by the split kernel: {batch}"
    results, out, lse = (out, aux.lse), out.cpu().double(), aux.lse.cpu()
    for number, ((length, count), (k, v)) in enumerate(zip(batch.sequences, whole)):
        rows = slice(int(cu[number]), int(cu[number + 1]))

        def score(s, b, h, i, j, number=number):
            return score_mod(s, torch.full_like(i, number), h, i, j)

        def mask(b, h, i, j, number=number):
            return mask_mod(torch.full_like(i, number), h, i, j)

        functions = (score if score_mod else None, mask if mask_mod else None)
        alone = (x.to(dtype) for x in (q[rows].transpose(0, 1)[None], k, v))
        expected, true_lse = reference(*functions, *alone, q_offset=length - count)
        expected, true_lse = expected[0].transpose(0, 1), true_lse[0].T
        off = (out[rows] - expected).abs().max().item() if count else 0.0
        if not off < (1e-5 if dtype == torch.float32 else 0.03) or not torch.equal(lse[rows].isinf(), true_lse.isinf()):
            return f"sequence {number} off by {off}, {batch}"
    if backend == "triton" and batch.invariant and not _first_alone(q.to(device), cache, cu.to(device), kernel, results):
        return f"bits of the first sequence depend on the others: {batch}"
    behind = slice(sum(queries), None)
    return "" if not out[behind].any() and bool((lse[behind] == -math.inf).all()) else f"tokens of no sequence: {batch}"


def _first_alone(q: torch.Tensor, cache: flexc.PagedKV, cu: torch.Tensor, kernel: flexc.Kernel, results: tuple) -> bool:
    """Whether the first sequence has the same bits in a call of its own, with pages in another order."""
    count, pages = int(cu[1]), len(cache.k_pages)
    order = torch.arange(pages - 1, -1, -1, device=q.device)
    table = (pages - 1 - cache.page_table[:1]).clamp(0, pages - 1)
    moved = flexc.PagedKV(cache.k_pages[order], cache.v_pages[order], table, cache.lengths[:1], cache.layout)
    out, aux = flexc.varlen_attention(q[:count], moved, cu_seqlens_q=cu[:2].clone(), kernel=kernel, return_lse=True)
    return all(torch.equal(alone, among[:count]) for alone, among in zip((out, aux.lse), results))


def _small() -> tuple[flexc.Kernel, tuple[torch.Tensor, flexc.PagedKV, None, torch.Tensor]]:
    """Two queries of a sequence of six tokens, and 30 of none."""
    pages, table = torch.randn(2, 4, 1, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    cache = flexc.PagedKV(pages, pages, table, torch.tensor([6], dtype=torch.int32))
    return flexc.attention(None, MASKS["causal"], backend="triton"), (torch.randn(32, 1, 16), cache, None, torch.tensor([0, 2]))


def has_no_block_map() -> str:
    """And says so."""
    kernel, given = _small()
    flexc.varlen_attention(*given, kernel=kernel)
    try:
        return f"has {kernel.blocks}"
    except UnsupportedError as error:
        return "" if "expected flexc.block_map(mask, q_len, kv_len)" in str(error) else str(error)


def leaves_tiles_without_rows_out() -> str:
    """As many tiles as any boundaries could need are there; those that these do not need read no keys."""
    kernel, given = _small()
    flexc.varlen_attention(*given, kernel=kernel)
    module, steps = kernel.artifact.module, []
    split, names = module.split_kernel, module.split_kernel.arg_names

    class Watched:
        def __getitem__(self, grid):
            return lambda *args, **options: steps.append(args[names.index("prefix_ptr")]) or split[grid](*args, **options)

    module.split_kernel = Watched()
    flexc.varlen_attention(*given, kernel=kernel)
    return "" if len(steps[0]) > 2 and steps[0][-1] == 1 else f"steps before each tile: {steps[0].tolist()}"
