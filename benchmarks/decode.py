"""Decoding: GB/s of keys and values for flexc (also from pages) and its peers, side by side in one process, as a table and as JSON lines.

    python benchmarks/decode.py                                           # the shapes of a server, bf16, every pattern
    python benchmarks/decode.py --shape 4,32,8,1,65536,128 --patterns full,window --out results/h200.jsonl

A measurement is one replay of a CUDA graph of `--layers` calls, each on keys and values of its own, as a step of a model is: what the host
does is not in it. Bytes are those of the keys and values that the pattern needs: a window counts the window. Every output is compared with
flexc's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from ahead import run_ahead
from measure import append, circumstances, describe, interleaved
from rich.console import Console
from rich.table import Table
from systems import Missing, Shape

WINDOW, CAP = 4096, 20.0
PATTERNS = ("full", "softcap", "alibi", "window", "softcap_window", "positions")
SHAPES = ("16,32,8,1,8192,128", "1,32,8,1,131072,128", "64,32,8,1,4096,128", "8,64,8,1,32768,128")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FIELDS = tuple("system pattern dtype B Hq Hkv Sq Skv D Dv ms gb_per_s device torch triton cutlass commit date".split())


@dataclass(frozen=True)
class Step:
    """One decoding step of a model: queries of the last Sq positions, and the caches of its layers.

    Attributes:
        score_mod, mask_mod: over true positions; None where there is none.
        tokens: keys that a query needs.
        on_device: whether the positions are tensors of the device, as a server has them; else numbers.
    """

    shape: Shape
    pattern: str
    score_mod: Callable | None
    mask_mod: Callable | None
    tokens: int
    q: torch.Tensor
    caches: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    on_device: bool

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.shape.Skv - self.shape.Sq

    @property
    def bytes(self) -> int:
        """Of the keys and values that one layer needs."""
        s = self.shape
        return s.B * s.Hkv * self.tokens * (s.D + s.Dv) * self.q.element_size()


def softcap(score, batch, head, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


def alibi(score, batch, head, q_idx, kv_idx):
    return score - torch.exp2(-(head + 1) * 0.25) * (q_idx - kv_idx)


def window(batch, head, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def make_step(pattern: str, shape: Shape, layers: int, dtype: torch.dtype, device: torch.device) -> Step:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

    q = normal(shape.B, shape.Hq, shape.Sq, shape.D)
    caches = tuple((normal(shape.B, shape.Hkv, shape.Skv, shape.D), normal(shape.B, shape.Hkv, shape.Skv, shape.Dv)) for _ in range(layers))
    score_mod = {"softcap": softcap, "alibi": alibi, "softcap_window": softcap}.get(pattern)
    mask_mod = {"window": window, "softcap_window": window, "positions": causal}.get(pattern)
    tokens = min(shape.Skv, WINDOW + shape.Sq - 1) if mask_mod is window else shape.Skv
    return Step(shape, pattern, score_mod, mask_mod, tokens, q, caches, pattern == "positions")


# --- systems: Step → a call of one layer -----------------------------------------------------------------------------------------------

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def flexc_triton(step: Step) -> Layer:
    import flexc

    kernel = flexc.attention(step.score_mod, step.mask_mod, backend="triton" if step.q.is_cuda else "cpu")
    if step.on_device:
        lengths = torch.full((step.shape.B,), step.shape.Skv, dtype=torch.int32, device=step.q.device)
        offsets = lengths - step.shape.Sq
        return lambda k, v: kernel(step.q, k, v, q_offset=offsets, kv_len=lengths)
    return lambda k, v: kernel(step.q, k, v, q_offset=step.offset)


def flex_attention(step: Step) -> Layer:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not step.q.is_cuda:
        raise Missing("needs a GPU")
    s, offset, score_mod, mask_mod = step.shape, step.offset, step.score_mod, step.mask_mod

    def moved_mask(b, h, i, j):
        return mask_mod(b, h, i + offset, j)

    def moved_score(score, b, h, i, j):
        return score_mod(score, b, h, i + offset, j)

    blocks = create_block_mask(moved_mask, None, None, s.Sq, s.Skv, device=step.q.device) if mask_mod is not None else None
    named = {"score_mod": moved_score if score_mod is not None else None, "block_mask": blocks, "enable_gqa": s.Hq != s.Hkv}
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda k, v: compiled(step.q, k, v, **named)


def sdpa(step: Step) -> Layer:
    """PyTorch's, without a mask: of a window it is given the window's keys."""
    if step.score_mod is not None or (step.mask_mod is not None and step.shape.Sq > 1):
        raise Missing(f"has no {step.pattern}")
    grouped = step.shape.Hq != step.shape.Hkv

    def layer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k[:, :, -step.tokens :], v[:, :, -step.tokens :]
        return F.scaled_dot_product_attention(step.q, k, v, enable_gqa=grouped)

    return layer


def fa4(step: Step) -> Layer:
    if not step.q.is_cuda:
        raise Missing("needs a GPU")
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        raise Missing(f"not installed ({error})") from error
    if step.score_mod is not None or step.mask_mod is window:
        raise Missing(f"is measured without {step.pattern}")
    q = step.q.transpose(1, 2).contiguous()
    return lambda k, v: flash_attn_func(q, k.transpose(1, 2), v.transpose(1, 2))[0].transpose(1, 2)


def flexc_paged(page: int) -> Callable[[Step], Layer]:
    """The same cache in pages that lie in a random order."""

    def system(step: Step) -> Layer:
        import flexc

        s, device = step.shape, step.q.device
        kernel = flexc.attention(step.score_mod, step.mask_mod, backend="triton" if step.q.is_cuda else "cpu")
        order = torch.randperm(s.B * (s.Skv // page), generator=torch.Generator().manual_seed(0)).to(device)
        table = order.view(s.B, -1).int()
        lengths = torch.full((s.B,), s.Skv, dtype=torch.int32, device=device)

        def in_pages(x: torch.Tensor) -> torch.Tensor:
            made = x.new_empty(len(order), page, s.Hkv, x.shape[3])
            made[order] = x.unflatten(2, (-1, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
            return made

        caches = {k.data_ptr(): flexc.PagedKV(in_pages(k), in_pages(v), table, lengths) for k, v in step.caches}
        return lambda k, v: kernel(step.q, caches[k.data_ptr()])

    return system


def flexc_fp8(step: Step) -> Layer:
    """The same cache in float8, with one scale for each head."""
    import flexc

    if step.q.dtype == torch.float32:
        raise Missing("takes no float32 queries")
    kernel = flexc.attention(step.score_mod, step.mask_mod, backend="triton" if step.q.is_cuda else "cpu")

    def small(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax((0, 2, 3)).float() / 448
        return (x / scale[:, None, None].to(x.dtype)).to(torch.float8_e4m3fn), scale

    caches = {k.data_ptr(): (*small(k), *small(v)) for k, v in step.caches}

    def layer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, k_scale, v, v_scale = caches[k.data_ptr()]
        return kernel(step.q, k, v, q_offset=step.offset, k_scale=k_scale, v_scale=v_scale)

    return layer


SYSTEMS: dict[str, Callable[[Step], Layer]] = {
    "flexc": flexc_triton,
    "fp8": flexc_fp8,
    "paged16": flexc_paged(16),
    "paged64": flexc_paged(64),
    "flex": flex_attention,
    "sdpa": sdpa,
    "fa4": fa4,
}


# --- measuring --------------------------------------------------------------------------------------------------------------------------


def whole_step(step: Step, layer: Layer) -> Callable[[], object]:
    """All layers: as a CUDA graph on a GPU."""

    def run() -> None:
        for k, v in step.caches:
            layer(k, v)

    if not step.q.is_cuda:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, run: Callable[[], None]) -> None:
    """A graph knows addresses and keeps nothing alive; what was captured does: the caches of its layers."""
    graph.replay()


def prepare(step: Step, names: Sequence[str], report: Callable[[str], None]) -> dict[str, Callable[[], object]]:
    """A call for each system that can do the step; what computes something else is named."""
    calls: dict[str, Callable[[], object]] = {}
    first: tuple[str, torch.Tensor] | None = None
    for name in names:
        try:
            layer = SYSTEMS[name](step)
            out = layer(*step.caches[0])
            if first is None:
                first = name, out
            elif not (difference := (out.float() - first[1].float()).abs().max().item()) < 0.02:
                report(f"{name}: output differs from {first[0]}'s by {difference:.3f}")
            calls[name] = whole_step(step, layer)
        except Missing as error:
            report(f"{name}: skipped, {error}")
        except Exception as error:
            report(f"{name}: {describe(error)}")
    return calls


@torch.no_grad()
def measure(
    shape: Shape,
    pattern: str,
    systems: Sequence[str],
    layers: int,
    dtype: str,
    rounds: int,
    device: torch.device,
    report: Callable[[str], None],
    commit: str | None = None,
) -> list[dict]:
    """Records, with exactly the fields FIELDS, of every system that can do the step."""
    if device.type == "cuda":
        torch._dynamo.reset()  # past eight variants of one function, torch.compile falls back to eager
    step = make_step(pattern, shape, layers, DTYPES[dtype], device)
    about = circumstances(device, commit)
    records = []
    for system, total in interleaved(prepare(step, systems, report), rounds, device, report).items():
        ms = total / layers
        values = {"system": system, "pattern": pattern, "dtype": dtype, **vars(shape)}
        values |= {"ms": round(ms, 5), "gb_per_s": round(bytes_of(step, system) / ms / 1e6, 1), **about}
        records.append({field: values[field] for field in FIELDS})
    return records


def compile_ahead(shapes: Sequence[Shape], patterns: Sequence[str], systems: Sequence[str], options: argparse.Namespace) -> None:
    """One call of each kind in a process of its own. Steps with as many queries, heads and dimensions of a head share kernels."""
    kinds: dict[tuple, Shape] = {}
    for shape in shapes:
        kinds.setdefault((shape.Hq, shape.Hkv, shape.Sq, shape.D, shape.Dv), shape)
    jobs = [
        (vars(shape), pattern, system, options.dtype, options.device)
        for shape in kinds.values()
        for pattern in patterns
        for system in systems
    ]
    run_ahead(_call_once, jobs, options.processes)


@torch.no_grad()
def _call_once(sizes: dict[str, int], pattern: str, system: str, dtype: str, device: str) -> None:
    step = make_step(pattern, Shape(**sizes), 1, DTYPES[dtype], torch.device(device))
    SYSTEMS[system](step)(*step.caches[0])


def bytes_of(step: Step, system: str) -> int:
    """What a system reads of the keys and values of one layer."""
    return step.bytes // step.q.element_size() if system == "fp8" else step.bytes


def table(records: list[dict]) -> Table:
    systems = [name for name in SYSTEMS if any(r["system"] == name for r in records)]
    cells = {(_place(r), r["pattern"], r["system"]): r for r in records}
    made = Table(title=f"GB/s of keys and values, {records[0]['dtype']} on {records[0]['device']}")
    for heading in ("shape", "pattern", "flexc ms"):
        made.add_column(heading)
    for name in systems:
        made.add_column(name, justify="right")
    for place, pattern in dict.fromkeys((_place(r), r["pattern"]) for r in records):
        ours = cells.get((place, pattern, "flexc"))
        found = [cells.get((place, pattern, name)) for name in systems]
        made.add_row(place, pattern, f"{ours['ms']:.4f}" if ours else "–", *(f"{r['gb_per_s']:.0f}" if r else "–" for r in found))
    return made


def _place(record: dict) -> str:
    return f"{Shape(*(record[field] for field in ('B', 'Hq', 'Hkv', 'Sq', 'Skv', 'D', 'Dv')))}"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure decoding with flexc and its peers side by side.")
    parser.add_argument("--shape", type=Shape.parse, action="append", metavar="B,Hq,Hkv,Sq,Skv,D[,Dv]", help="repeatable")
    parser.add_argument("--patterns", default=",".join(PATTERNS), help=f"of {','.join(PATTERNS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--layers", type=int, default=2, help="calls in one measurement (2)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system (5)")
    parser.add_argument("--processes", type=int, default=0, help="that compile everything first (0: none)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append the measurements to this file as they come")
    parser.add_argument("--commit", help="recorded where the checkout cannot tell")
    options = parser.parse_args(argv)
    for named, known in ((options.patterns, PATTERNS), (options.systems, SYSTEMS)):
        if unknown := sorted(set(named.split(",")) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return options


def main(argv: Sequence[str] | None = None) -> list[dict]:
    options = arguments(argv)
    console = Console(width=140)
    records: list[dict] = []
    shapes = options.shape or [Shape.parse(text) for text in SHAPES]
    patterns, systems = options.patterns.split(","), options.systems.split(",")
    compile_ahead(shapes, patterns, systems, options)
    for shape in shapes:
        for pattern in patterns:
            about = f"{shape} {pattern}"
            found = measure(
                *(shape, pattern, systems, options.layers, options.dtype, options.rounds),
                *(torch.device(options.device), lambda text, about=about: console.print(f"{about}: {text}"), options.commit),
            )
            records += found
            append(found, options.out)
    if records:
        console.print(table(records))
    return records


if __name__ == "__main__":
    main()
