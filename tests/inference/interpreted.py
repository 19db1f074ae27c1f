"""Functions that run in the interpreter's process, and on a GPU; each returns "" or what is wrong."""

from __future__ import annotations

import math
import random
import warnings

import torch

import flexc
from flexc.codegen.triton import DecodePlan, Tile
from flexc.inference.decode import LEAST_KEYS
from flexc.reference import reference
from tests.accuracy import qkv


def largest(x: torch.Tensor) -> float:
    """Of the absolute values; 0 of none."""
    return x.abs().max().item() if x.numel() else 0.0


def drawn(seed: int) -> str:
    """A decoding step of random sizes, lengths, score and mask, in tiles that make many parts: the shares end anywhere."""
    warnings.simplefilter("ignore")  # NumPy's, of rows without keys
    draw = random.Random(seed)
    batch, kv_heads, group, q_len = draw.randint(1, 3), draw.randint(1, 3), draw.choice([1, 2, 3, 5, 7]), draw.choice([1, 1, 2, 4, 11])
    kv_len = LEAST_KEYS + draw.randint(0, 200)
    q, k, v = qkv(batch, group * kv_heads, kv_heads, q_len, kv_len, draw.choice([16, 24]), draw.choice([16, 40]), seed=seed)
    lengths = torch.tensor([draw.choice([0, 1, kv_len, draw.randint(0, kv_len)]) for _ in range(batch)], dtype=torch.int32)
    for entry, length in enumerate(lengths.tolist()):
        k[entry, :, length:] = v[entry, :, length:] = math.nan
    offsets = torch.clamp(lengths - q_len, min=0)
    width, slopes = draw.randint(1, kv_len), torch.rand(group * kv_heads, generator=torch.Generator().manual_seed(seed))
    score_mod = draw.choice([None, lambda s, b, h, i, j: s - slopes[h] * (i - j), lambda s, b, h, i, j: 5 * torch.tanh(s / 5)])
    mask_mod = draw.choice(
        [
            None,
            lambda b, h, i, j: i >= j,
            lambda b, h, i, j: (i >= j) & (i - j < width),
            lambda b, h, i, j: (i >= j) & ((i - j < width // (h + 1)) | (j < 4)),
            lambda b, h, i, j: (j // 64) % 2 == b % 2,
        ]
    )
    kernel = flexc.attention(score_mod, mask_mod, backend="triton")
    object.__setattr__(kernel._options, "tiles", (("decode", Tile(16, draw.choice([16, 32]), 4, 2)),))
    positions = {"q_offset": offsets, "kv_len": lengths} if draw.random() < 0.7 else {"kv_len": lengths}
    out, aux = kernel(q, k, v, return_lse=True, **positions)
    assert isinstance(kernel.plan, DecodePlan)
    expected, lse = reference(score_mod, mask_mod, q, k, v, **positions)
    off = (out.double() - expected).abs().max().item()
    without = lse == -torch.inf
    if not off < 1e-5 or not torch.equal(aux.lse == -torch.inf, without) or out[without].any():
        return f"seed {seed}: off by {off}, rows without keys {int(without.sum())}"
    off = largest((aux.lse.double() - lse)[~without])
    return "" if off < 1e-4 else f"seed {seed}: lse off by {off}"


def ends_of_every_token(by_head: bool) -> str:
    """Several tokens in a tile, each with four query heads: the tile's keys are those of all of them, also where heads see other keys."""
    q, k, v = qkv(2, 8, 2, 9, LEAST_KEYS + 60, 16)
    lengths = torch.tensor([LEAST_KEYS + 60, 100], dtype=torch.int32)
    for entry, length in enumerate(lengths.tolist()):
        k[entry, :, length:] = v[entry, :, length:] = math.nan
    mask_mod = (lambda b, h, i, j: (i >= j) & (i - j < 3 + 20 * (h % 4))) if by_head else (lambda b, h, i, j: (i >= j) & (i - j < 12))
    kernel = flexc.attention(None, mask_mod, backend="triton")
    object.__setattr__(kernel._options, "tiles", (("decode", Tile(16, 16, 4, 2)),))
    positions = {"q_offset": lengths - 9, "kv_len": lengths}
    out, (expected, _) = kernel(q, k, v, **positions), reference(None, mask_mod, q, k, v, **positions)
    return "" if (out - expected).abs().max() < 1e-5 else f"off by {(out - expected).abs().max()}"


def whole_entries() -> str:
    """As many entries as programs, without a mask: nothing is combined, and nothing is left out."""
    q, k, v = qkv(3, 2, 1, 1, LEAST_KEYS + 5, 16)
    kernel = flexc.attention(backend="triton")
    out, aux = kernel(q, k, v, return_lse=True)
    expected, lse = reference(None, None, q, k, v)
    return "" if max((out - expected).abs().max(), (aux.lse - lse).abs().max()) < 1e-5 else f"off by {(out - expected).abs().max()}"


def with_a_gradient_the_ordinary_kernel_runs() -> str:
    """And says so."""
    q, k, v = qkv(1, 2, 1, 1, LEAST_KEYS, 16)
    kernel = flexc.attention(backend="triton")
    kernel(q, k, v)
    first = kernel.reason
    if kernel.explain(q, k, v).reason != first:
        return "explained otherwise"
    kernel(q.requires_grad_(), k, v).sum().backward()
    if "split over the keys" not in first or "split over the keys" in kernel.reason or isinstance(kernel.plan, DecodePlan):
        return f"{first!r}, then {kernel.reason!r}"
    with torch.no_grad():
        kernel(q, k, v)
    return "" if isinstance(kernel.plan, DecodePlan) else "the ordinary kernel, without a gradient"


def nobody_reads_what_nobody_sees() -> str:
    """An entry of the batch that is not in use: its cache may hold anything."""
    q, k, v = qkv(2, 2, 1, 1, LEAST_KEYS, 16)
    k[1], v[1], in_use = math.nan, math.nan, torch.tensor([1, 0])
    kernel = flexc.attention(None, lambda b, h, i, j: (in_use[b] > 0) & (j <= i + 200), backend="triton")
    out = kernel(q, k, v)
    expected, _ = reference(None, lambda b, h, i, j: j <= i + 200, q[:1], k[:1], v[:1])
    return "" if not out[1].any() and (out[:1] - expected).abs().max() < 1e-5 else f"{out[1]}"


def operators_decode_too() -> str:
    """What torch.compile calls."""
    q, k, v = qkv(1, 2, 1, 1, LEAST_KEYS, 16, grad=True)
    kernel = flexc.attention(lambda s, b, h, i, j: s - 0.01 * j, backend="triton")
    out = torch.compile(lambda q, k, v: kernel(q, k, v), backend="eager", fullgraph=True)(q, k, v)
    if not isinstance(kernel.plan, DecodePlan):
        return "the ordinary kernel"
    truth, _ = reference(kernel.score_mod, None, q, k, v)
    pairs = zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(truth.sum(), (q, k, v)))
    off = max(float((a - b).abs().max()) for a, b in pairs)
    return "" if off < 1e-5 and float((out - truth).abs().max()) < 1e-5 else f"off by {off}"


def paged(seed: int, backend: str = "triton", device: str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """A paged cache of random sizes, against the same tokens one after another. Pages that no sequence uses hold NaN, and so do the rests
    of the last pages; entries past a length name pages that do not exist."""
    warnings.simplefilter("ignore")
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, group, q_len = draw.randint(1, 3), draw.randint(1, 2), draw.choice([1, 2, 3, 5]), draw.choice([1, 1, 2, 9, 40])
    page, most, layout = draw.choice([1, 3, 16, 24, 64]), draw.randint(1, 130), draw.choice(["NHD", "HND"])
    dim, dim_v = draw.choice([16, 24]), draw.choice([16, 40])
    lengths = torch.tensor([draw.choice([0, 1, most, draw.randint(0, most)]) for _ in range(batch)], dtype=torch.int32)
    needed = [-(-n // page) for n in lengths.tolist()]
    shared = min(needed) // 2  # the first sequences' common beginning
    free = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    table = torch.full((batch, max(1, *needed)), 10**9, dtype=torch.int32)
    prefix = [free.pop() for _ in range(shared)]
    for row, count in zip(table, needed):
        row[:count] = torch.tensor((prefix + [free.pop() for _ in range(count - shared)]), dtype=torch.int32)
    sizes = (page, kv_heads) if layout == "NHD" else (kv_heads, page)
    k_pages, v_pages = (torch.full((sum(needed) + 3, *sizes, n), math.nan) for n in (dim, dim_v))
    k, v = (torch.zeros(batch, kv_heads, int(lengths.max()), n) for n in (dim, dim_v))
    for entry, length in enumerate(lengths.tolist()):
        for token in range(length):
            place = int(table[entry, token // page])
            for pages, whole in ((k_pages, k), (v_pages, v)):
                cell = pages[place, token % page] if layout == "NHD" else pages[place, :, token % page]
                if cell.isnan().any():
                    cell.copy_(torch.randn(cell.shape, generator=generator))
                whole[entry, :, token] = cell
    q = torch.randn(batch, group * kv_heads, q_len, dim, generator=generator)
    slopes = torch.rand(group * kv_heads, generator=generator).to(device)
    q, k, v, k_pages, v_pages = (x.to(device, dtype) for x in (q, k, v, k_pages, v_pages))
    table, lengths = table.to(device), lengths.to(device)
    score_mod = draw.choice([None, lambda s, b, h, i, j: s - slopes[h] * (i - j)])
    mask_mod = draw.choice([None, lambda b, h, i, j: i >= j, lambda b, h, i, j: (i >= j) & (i - j < 30 + 9 * h)])
    offsets = torch.clamp(lengths - q_len, min=0)
    kernel = flexc.attention(score_mod, mask_mod, backend=backend)
    out, aux = kernel(q, flexc.PagedKV(k_pages, v_pages, table, lengths, layout), return_lse=True)
    expected, lse = reference(score_mod, mask_mod, q, k, v, q_offset=offsets, kv_len=lengths)
    if not out.numel() or not k.shape[2]:
        return "" if not out.any() else "not 0 without keys"
    off = (out.double() - expected).abs().max().item()
    same = torch.equal(aux.lse == -torch.inf, lse == -torch.inf)
    return "" if off < (1e-5 if dtype == torch.float32 else 0.03) and same else f"seed {seed}: off by {off}"


def varlen(seed: int, backend: str = "triton", device: str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """Packed sequences of random lengths, forward and backward, against a run of its own for each."""
    warnings.simplefilter("ignore")
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, kv_heads, group = draw.randint(1, 5), draw.randint(1, 2), draw.choice([1, 2, 3])
    q_lengths = [draw.choice([0, 1, draw.randint(0, 60)]) for _ in range(count)]
    k_lengths = q_lengths if draw.random() < 0.5 else [draw.choice([0, 1, draw.randint(0, 90)]) for _ in range(count)]
    rest, integers = draw.choice([0, 0, 5]), draw.choice([torch.int32, torch.int64])  # tokens of no sequence
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(integers) for lengths in (q_lengths, k_lengths))
    sizes = [(sum(q_lengths), group * kv_heads, 16), (sum(k_lengths), kv_heads, 16), (sum(k_lengths), kv_heads, 24)]
    q, k, v = (torch.randn(n + rest, h, d, generator=generator).to(device, dtype).requires_grad_() for n, h, d in sizes)
    bias = torch.randn(count, generator=generator).to(device).requires_grad_()
    cu_q, cu_k = cu_q.to(device), cu_k.to(device)
    score_mod = draw.choice([None, lambda s, b, h, i, j: s * (1 + 0.1 * bias[b]) - 0.1 * (h + 1) * (i - j)])
    mask_mod = draw.choice([None, lambda b, h, i, j: i >= j, lambda b, h, i, j: (b % 2 == 0) | ((i >= j) & (i - j < 7))])
    kernel = flexc.attention(score_mod, mask_mod, backend=backend)
    given = (cu_q,) if k_lengths is q_lengths else (cu_q, cu_k)
    out, aux = flexc.varlen_attention(q, k, v, *given, kernel=kernel, return_lse=True)
    outs, lses = [], []
    for number in range(count):

        def score(s, b, h, i, j, number=number):
            return score_mod(s, torch.full_like(i, number), h, i, j)

        def mask(b, h, i, j, number=number):
            return mask_mod(torch.full_like(i, number), h, i, j)

        rows, columns = slice(int(cu_q[number]), int(cu_q[number + 1])), slice(int(cu_k[number]), int(cu_k[number + 1]))
        functions = (score if score_mod else None, mask if mask_mod else None)
        alone = (x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns]))
        part, lse = reference(*functions, *alone)
        outs.append(part[0].transpose(0, 1))
        lses.append(lse[0].T)
    expected = torch.cat([*outs, torch.zeros(rest, *out.shape[1:], dtype=torch.float64, device=device)])
    lse = torch.cat([*lses, torch.full((rest, out.shape[1]), -math.inf, dtype=torch.float64, device=device)])
    dout = torch.randn(out.shape, generator=generator).to(device, dtype)
    inputs = (q, k, v, bias)
    ours = torch.autograd.grad((out * dout).sum(), inputs, allow_unused=True)
    truth = torch.autograd.grad((expected * dout).sum(), inputs, allow_unused=True)
    wrong = [] if torch.equal(aux.lse == -torch.inf, lse == -torch.inf) else ["rows without keys"]
    for name, a, b in zip(("out", "dq", "dk", "dv", "dbias"), (out, *ours), (expected, *truth)):
        a, b = (torch.zeros(1, device=device) if x is None else x.detach().double() for x in (a, b))
        off, size = largest(a - b), largest(b)
        if not off < (1e-4 if dtype == torch.float32 else 0.02 * max(1.0, size)):
            wrong.append(f"{name} off by {off}")
    return f"seed {seed}, {q_lengths} x {k_lengths}: {wrong}" if wrong else ""


def bits_of_a_row(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32, batch_invariant: bool = True) -> str:
    """The same sequence alone, in a batch, in a larger cache, in pages: batch_invariant=True gives the same bits."""
    warnings.simplefilter("ignore")
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    most = 400 if device == "cpu" else 9000
    heads, kv_heads, q_len, length = 4, draw.choice([1, 2, 4]), draw.choice([1, 3]), draw.randint(1, most)
    mask_mod = draw.choice([None, lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j < 130, lambda b, h, i, j: (i >= j) & (j % 3 != 1)])
    kernel = flexc.attention(lambda s, b, h, i, j: s - 0.01 * (i - j), mask_mod, backend="triton", batch_invariant=batch_invariant)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    q, k, v = (normal(1, h, n, 16) for h, n in ((heads, q_len), (kv_heads, length), (kv_heads, length)))
    start = max(0, length - q_len)

    def among(others: list[int], room: int) -> torch.Tensor:
        lengths = torch.tensor([*others, length], dtype=torch.int32, device=device)
        caches = [normal(len(lengths), kv_heads, room, 16) for _ in range(2)]
        queries = normal(len(lengths), heads, q_len, 16)
        queries[-1], caches[0][-1, :, :length], caches[1][-1, :, :length] = q[0], k[0], v[0]
        return kernel(queries, *caches, q_offset=torch.clamp(lengths - q_len, min=0), kv_len=lengths)[-1]

    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    alone = kernel(q, k, v, q_offset=lengths.clamp(min=q_len) - q_len, kv_len=lengths)[0]
    results = {
        "in a batch": among([most - 100, 0, 77], most),
        "with room": among([], length + 211),
        "in another batch": among([5], most + 200),
    }
    order = torch.randperm(-(-length // 16) + 2, generator=generator)[: -(-length // 16)]
    order, token = order.to(device), torch.arange(length, device=device)
    pages = [torch.full((len(order) + 2, kv_heads, 16, 16), math.nan, device=device, dtype=dtype) for _ in range(2)]
    for paged_x, x in zip(pages, (k, v)):
        paged_x[order[token // 16], :, token % 16] = x[0].transpose(0, 1)
    cache = flexc.PagedKV(pages[0], pages[1], order[None].int(), lengths, "HND")
    results["in pages"] = kernel(q, cache)[0]
    wrong = [name for name, x in results.items() if not torch.equal(x, alone)]
    expected, _ = reference(kernel.score_mod, mask_mod, q, k, v, q_offset=start)
    off = (alone - expected[0]).abs().max().item()
    return f"seed {seed}: {wrong}, off by {off}" if wrong or not off < (1e-5 if dtype == torch.float32 else 0.03) else ""


def quantized(seed: int, backend: str = "triton", device: str = "cpu", dtype: torch.dtype = torch.float16) -> str:
    """A cache of eight bits, contiguous or in pages, with scales of every kind, against what its numbers mean."""
    warnings.simplefilter("ignore")
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    eight, kind, page = draw.choice([torch.float8_e4m3fn, torch.int8]), draw.choice(["all", "head", "token"]), draw.choice([0, 16, 64])
    batch, kv_heads, group, q_len = 2, draw.choice([1, 2]), draw.choice([1, 3, 4]), draw.choice([1, 4])
    kv_len = draw.choice([64, 192, 320]) if page else draw.randint(2, 330)
    lengths = torch.tensor([kv_len, draw.randint(1, kv_len)], dtype=torch.int32)
    shape = {"all": (), "head": (kv_heads,), "token": (batch, kv_heads, kv_len)}[kind]

    def cache(dim: int, size: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Numbers of eight bits, their scale, and what they mean."""
        scale = (torch.rand(shape, generator=generator) + 0.5) * size
        if kind == "token":
            scale *= torch.exp2(torch.randint(-9, 9, shape, generator=generator))
        most = 20 if eight == torch.int8 else 2
        numbers = (torch.randn(batch, kv_heads, kv_len, dim, generator=generator) * most).clamp(-127, 127).to(eight)
        spread = scale[..., None] if kind == "token" else scale[None, :, None, None] if kind == "head" else scale
        return numbers, scale, numbers.double() * spread.double()

    size = 1e-2 if kind == "token" else 3.0
    dim, dim_v = draw.choice([(16, 24), (16, 24), (17, 24), (48, 80)])
    k, k_scale, true_k = cache(dim, (0.05 if eight == torch.int8 else 0.4) * 4 / dim**0.5)
    v, v_scale, true_v = cache(dim_v, size)
    q = torch.randn(batch, group * kv_heads, q_len, dim, generator=generator).to(dtype) * draw.choice(
        [1.0, 1e3 if dtype == torch.bfloat16 else 1.0]
    )
    score_mod, mask_mod = (lambda s, b, h, i, j: 15 * torch.tanh(s / 15)), draw.choice([None, lambda b, h, i, j: i >= j])
    offsets = torch.clamp(lengths - q_len, min=0)
    expected, lse = reference(score_mod, mask_mod, q.double(), true_k, true_v, q_offset=offsets, kv_len=lengths)
    q, k, v, k_scale, v_scale, lengths, offsets = (x.to(device) for x in (q, k, v, k_scale, v_scale, lengths, offsets))
    kernel = flexc.attention(score_mod, mask_mod, backend=backend)
    if page:
        order = torch.randperm(batch * kv_len // page, generator=generator).to(device)

        def in_pages(x: torch.Tensor) -> torch.Tensor:
            rows = x.view(torch.uint8) if x.dtype == eight else x  # PyTorch indexes few tensors of float8
            made = torch.empty(len(order), page, *rows.shape[1:2], *rows.shape[3:], dtype=rows.dtype, device=device)
            made[order] = rows.movedim(2, 1).unflatten(1, (-1, page)).flatten(0, 1)
            return made.view(x.dtype)

        scales = [in_pages(x) if kind == "token" else x for x in (k_scale, v_scale)]
        pages = flexc.PagedKV(in_pages(k), in_pages(v), order.view(batch, -1).int(), lengths, "NHD", *scales)
        out, aux = kernel(q, pages, return_lse=True, q_offset=offsets)
    else:
        named = {"k_scale": k_scale, "v_scale": v_scale, "q_offset": offsets, "kv_len": lengths}
        out, aux = kernel(q, k, v, return_lse=True, **named)
    off = ((out.cpu().double() - expected).abs() / expected.abs().amax((2, 3), keepdim=True)).max().item()
    off_lse = (aux.lse.cpu().double() - lse).abs().max().item()
    allowed = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    return "" if off < allowed and off_lse < 10 * allowed else f"seed {seed}: {eight}, {kind}, page {page}: off by {off}, lse by {off_lse}"


def queries_of_any_size(eight: torch.dtype, of_tokens: bool, backend: str = "triton", device: str = "cpu") -> str:
    """Rows of bfloat16 that float16 does not hold, 0, with an infinity, and of usual size, in one tile.

    Another head has a key of NaN, for which Triton's interpreter reads a number. Scores stay below 2^30: of larger ones a GPU, which rounds
    score times scale less the maximum once, knows the difference no better than by what 2^x has no numbers for.
    """
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor([1.0, 2.0**28, 2.0**-100, 0.0, 2.0**20])
    q = (torch.randn(1, 2, 5, 16, generator=generator) * factors[:, None]).bfloat16()
    q[0, 0, 0, 3] = torch.inf
    k, v = ((torch.randn(1, 2, 300, n, generator=generator) * 20).clamp(-127, 127).to(eight) for n in (16, 32))
    spread = torch.rand(1, 2, 300, generator=generator) / 40 if of_tokens else torch.full((1, 2, 300), 1 / 64)
    scales = spread if of_tokens else spread[0, :, 0]
    if eight == torch.float8_e4m3fn and device != "cpu":
        k.view(torch.uint8)[0, 1, 299, 5] = 0x7F
    expected, _ = reference(None, None, q.double(), k.double() * spread[..., None], v.double() * spread[..., None])
    kernel = flexc.attention(backend=backend)
    named = {"k_scale": scales.to(device), "v_scale": scales.to(device)}
    out = kernel(q.to(device), k.to(device), v.to(device), **named).cpu().double()
    if not torch.equal(out.isnan(), expected.isnan()) or not out[0, 0, 0].isnan().all() or out[0, 0, 1:].isnan().any():
        return f"NaN in rows {out.isnan().any(3).nonzero().tolist()}, expected in {expected.isnan().any(3).nonzero().tolist()}"
    off = largest((out - expected).nan_to_num()) / largest(expected.nan_to_num())
    return "" if off < 1e-2 else f"off by {off}"


def rows_at_odd_addresses() -> str:
    """A cache that is part of another, each of whose tokens has an odd number of bytes."""
    wide = [torch.randint(-100, 100, (1, 1, 300, 17), generator=torch.Generator().manual_seed(seed)).to(torch.int8) for seed in (0, 1)]
    k, v = wide[0][..., :16], wide[1][..., 1:]
    q, scale = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(2)).half(), torch.full((), 1 / 64)
    expected, _ = reference(None, None, q.double(), k.double() / 64, v.double() / 64)
    out = flexc.attention(backend="triton")(q, k, v, k_scale=scale, v_scale=scale)
    return "" if (out - expected).abs().max() < 2e-3 else f"off by {(out - expected).abs().max()}"
