"""Packed sequences of random lengths, causal: TFLOP/s of flexc by both of its routes, and of its peers, in one interleaved run.

    python benchmarks/varlen.py                                        # bf16, H16 D128, 8 and 64 sequences in 32K tokens
    python benchmarks/varlen.py --tokens 8192 --sequences 4 --directions fwd --out results/h200.jsonl

`varlen` is `flexc.varlen_attention`, `document` the same as a mask on one long sequence. Operations are those of the pairs that count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ahead import run_ahead
from measure import append, circumstances, describe, interleaved
from rich.console import Console
from rich.table import Table
from systems import Missing

PATTERNS = ("causal", "alibi_causal")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FIELDS = tuple("system pattern dtype sequences tokens H D direction ms tflops device torch triton cutlass commit date".split())


@dataclass(frozen=True)
class Batch:
    """Packed sequences; q, k, v and dout are [total, H, D].

    Attributes:
        cu: int32 [B + 1], where each begins.
        longest: tokens.
        pairs: of all, that a causal mask allows.
    """

    pattern: str
    cu: torch.Tensor
    longest: int
    pairs: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What gradients are taken of."""
        return self.q, self.k, self.v


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, batch, head, q_idx, kv_idx):
    return score - torch.exp2(-(head + 1) * 0.5) * (q_idx - kv_idx)


def make_batch(pattern: str, sequences: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Random lengths, the same each time."""
    cuts = torch.sort(torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(1))[: sequences - 1] + 1).values
    cu = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
    lengths = cu.diff()
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = (torch.randn(tokens, heads, dim, generator=generator, device=device).to(dtype) for _ in range(4))
    inputs = (x.requires_grad_() for x in (q, k, v))
    pairs = int((lengths * (lengths + 1) // 2).sum())
    return Batch(pattern, cu.int().to(device), int(lengths.max()), pairs, *inputs, dout)


# --- systems: Batch → a call that gives [total, H, D] -------------------------------------------------------------------------------------

System = Callable[[Batch], Callable[[], torch.Tensor]]


def _functions(batch: Batch) -> tuple[Callable | None, Callable]:
    return (alibi if batch.pattern == "alibi_causal" else None), causal


def flexc_varlen(backend: str) -> System:
    def system(batch: Batch) -> Callable[[], torch.Tensor]:
        import flexc

        kernel = flexc.attention(*_functions(batch), backend=backend if batch.q.is_cuda else "cpu")
        return lambda: flexc.varlen_attention(*batch.inputs, batch.cu, kernel=kernel)

    return system


def flexc_document(backend: str) -> System:
    """Positions of the whole: in one sequence their differences are the same."""

    def system(batch: Batch) -> Callable[[], torch.Tensor]:
        import flexc

        score_mod, mask_mod = _functions(batch)
        mask = flexc.mask(mask_mod) & flexc.masks.document(_documents(batch))
        kernel = flexc.attention(score_mod, mask, backend=backend if batch.q.is_cuda else "cpu")
        q, k, v = (x.transpose(0, 1)[None] for x in batch.inputs)
        return lambda: kernel(q, k, v)[0].transpose(0, 1)

    return system


def _documents(batch: Batch) -> torch.Tensor:
    lengths = batch.cu.diff()
    return torch.arange(len(lengths), dtype=torch.int32, device=lengths.device).repeat_interleave(lengths)


def flex_attention(batch: Batch) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not batch.q.is_cuda:
        raise Missing("needs a GPU")
    documents, total = _documents(batch), batch.q.shape[0]

    def mask(b, h, i, j):
        return (documents[i] == documents[j]) & (i >= j)

    blocks = torch.compile(create_block_mask)(mask, None, None, total, total, device=batch.q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(0, 1)[None] for x in batch.inputs)
    return lambda: compiled(q, k, v, score_mod=_functions(batch)[0], block_mask=blocks)[0].transpose(0, 1)


def fa4(batch: Batch) -> Callable[[], torch.Tensor]:
    if not batch.q.is_cuda:
        raise Missing("needs a GPU")
    if batch.pattern != "causal":
        raise Missing(f"is measured without {batch.pattern}")
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except ImportError as error:
        raise Missing(f"not installed ({error})") from error
    named = {"cu_seqlens_q": batch.cu, "cu_seqlens_k": batch.cu, "max_seqlen_q": batch.longest, "max_seqlen_k": batch.longest}
    return lambda: flash_attn_varlen_func(*batch.inputs, causal=True, **named)[0]


SYSTEMS: dict[str, System] = {
    "varlen-triton": flexc_varlen("triton"),
    "document-triton": flexc_document("triton"),
    "varlen-cute": flexc_varlen("cute"),
    "document-cute": flexc_document("cute"),
    "flex": flex_attention,
    "fa4": fa4,
}


# --- measuring ----------------------------------------------------------------------------------------------------------------------------


def prepare(batch: Batch, names: Sequence[str], report: Callable[[str], None]) -> dict[str, Callable[[], torch.Tensor]]:
    """A call for each system that can; what computes something else is named."""
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    first: tuple[str, torch.Tensor] | None = None
    for name in names:
        try:
            call = SYSTEMS[name](batch)
            out = call().detach()
            if first is None:
                first = name, out
            elif not (difference := (out.float() - first[1].float()).abs().max().item()) < 0.05:
                report(f"{name}: output differs from {first[0]}'s by {difference:.3f}")
            calls[name] = call
        except Missing as error:
            report(f"{name}: skipped, {error}")
        except Exception as error:
            report(f"{name}: {describe(error)}")
    return calls


def directed(call: Callable[[], torch.Tensor], direction: str, batch: Batch) -> Callable[[], object]:
    """The forward pass, or the backward pass of an output that is kept."""
    if direction == "fwd":
        return torch.no_grad()(call)
    out = call()
    return lambda: torch.autograd.grad(out, batch.inputs, batch.dout, retain_graph=True)


def measure(batch: Batch, options: argparse.Namespace, report: Callable[[str], None]) -> list[dict]:
    """Records, with exactly the fields FIELDS, of every system that can."""
    device = batch.q.device
    if device.type == "cuda":
        torch._dynamo.reset()
    about, records = circumstances(device, options.commit), []
    calls = prepare(batch, options.systems.split(","), report)
    tokens, heads, dim = batch.q.shape
    for direction in options.directions.split(","):
        ready = {}
        for name, call in calls.items():
            try:
                ready[name] = directed(call, direction, batch)
            except Exception as error:
                report(f"{name} {direction}: {describe(error)}")
        work = {"fwd": 4, "bwd": 10}[direction] * heads * batch.pairs * dim
        for system, ms in interleaved(ready, options.rounds, device, report).items():
            values = {"system": system, "pattern": batch.pattern, "dtype": options.dtype, "sequences": len(batch.cu) - 1}
            values |= {"tokens": tokens, "H": heads, "D": dim, "direction": direction}
            values |= {"ms": round(ms, 5), "tflops": round(work / ms / 1e9, 2), **about}
            records.append({field: values[field] for field in FIELDS})
    return records


def kinds(systems: Sequence[str], patterns: Sequence[str], directions: str, counts: Sequence[int]) -> list[tuple[str, str, str, int]]:
    """Calls after which every kernel is in the caches on the disk. fa4 has none there; flexc's take any lengths."""
    last = "bwd" if "bwd" in directions else "fwd"  # an output to take gradients of comes from the forward kernel
    compiled = [system for system in systems if system != "fa4"]
    return [(s, p, last, count) for p in patterns for s in compiled for count in (counts if s == "flex" else counts[:1])]


def _call_once(system: str, pattern: str, direction: str, sequences: int, *sizes: Any) -> None:
    """For a process that compiles ahead."""
    batch = make_batch(pattern, sequences, *sizes)
    directed(SYSTEMS[system](batch), direction, batch)()


def table(records: list[dict]) -> Table:
    systems = [name for name in SYSTEMS if any(r["system"] == name for r in records)]
    cells = {(r["sequences"], r["pattern"], r["direction"], r["system"]): r for r in records}
    made = Table(title=f"TFLOP/s on pairs that count, {records[0]['tokens']} tokens, {records[0]['dtype']} on {records[0]['device']}")
    for heading in ("sequences", "pattern", "direction", *systems):
        made.add_column(heading)
    for row in dict.fromkeys(key[:3] for key in cells):
        found = [cells.get((*row, name)) for name in systems]
        made.add_row(*map(str, row), *(f"{r['tflops']:.0f}" if r else "–" for r in found))
    return made


def main(argv: Sequence[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description="Measure packed sequences with flexc and its peers side by side.")
    parser.add_argument("--sequences", default="8,64", help="how many (8,64)")
    parser.add_argument("--tokens", type=int, default=32768, help="of all together (32768)")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--patterns", default=",".join(PATTERNS), help=f"of {','.join(PATTERNS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--directions", default="fwd,bwd", help="of fwd,bwd")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system (5)")
    parser.add_argument("--processes", type=int, default=0, help="that compile everything first (0: none)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="append the measurements to this file as they come")
    parser.add_argument("--commit", help="recorded where the checkout cannot tell")
    options = parser.parse_args(argv)
    for named, known in ((options.patterns, PATTERNS), (options.systems, SYSTEMS), (options.directions, ("fwd", "bwd"))):
        if unknown := sorted(set(named.split(",")) - set(known)):
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    console, records = Console(width=140), []
    counts, patterns = [int(count) for count in options.sequences.split(",")], options.patterns.split(",")
    sizes = (options.tokens, options.heads, options.dim, DTYPES[options.dtype], torch.device(options.device))
    run_ahead(
        _call_once, [(*kind, *sizes) for kind in kinds(options.systems.split(","), patterns, options.directions, counts)], options.processes
    )
    for sequences in counts:
        for pattern in patterns:
            about = f"{sequences} sequences, {pattern}"
            batch = make_batch(pattern, sequences, *sizes)
            found = measure(batch, options, lambda text, about=about: console.print(f"{about}: {text}"))
            records += found
            append(found, options.out)
    if records:
        console.print(table(records))
    return records


if __name__ == "__main__":
    main()
