"""What a call costs the host: flexc beside PyTorch's SDPA and compiled FlexAttention, on a problem so small that little else counts.

    python benchmarks/overhead.py                                       # B1 H4 S256 D64, a score function, a mask, a captured tensor
    python benchmarks/overhead.py --systems flexc-triton,flexc-cute,sdpa,flex --out results/overhead.jsonl
    python benchmarks/overhead.py --grad                                # with a gradient to come
    python benchmarks/overhead.py --systems flexc-triton --profile profile    # profile/flexc-triton.svg and .txt: where the time goes

On a GPU, `us` is the time until a call returns, with nothing waited for: kernels run behind it. On a CPU a call computes before it returns,
so there flexc's own part is `around_us`: the same call where the generated module gives a ready result; it is measured on a GPU too.
Systems take turns, and medians over all turns are printed. SDPA computes plain attention: what any call of PyTorch costs. flexc and SDPA
are there as `NAME-compiled`, too, inside torch.compile, and all as `NAME-graph`, the replay of a CUDA graph. FlexAttention is compiled.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flame import write
from measure import append, circumstances, describe
from systems import Missing, Shape

WINDOW = 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """The inputs, and the variant as functions that both flexc and FlexAttention take."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    score_mod: Callable[..., Any]
    mask_mod: Callable[..., Any]

    @staticmethod
    def of(shape: Shape, dtype: torch.dtype, device: torch.device) -> Problem:
        q = torch.randn(shape.B, shape.Hq, shape.Sq, shape.D, dtype=dtype, device=device)
        k = torch.randn(shape.B, shape.Hkv, shape.Skv, shape.D, dtype=dtype, device=device)
        v = torch.randn(shape.B, shape.Hkv, shape.Skv, shape.Dv, dtype=dtype, device=device)
        slopes = torch.rand(shape.Hq, device=device)

        def alibi(score, batch, head, q_idx, kv_idx):
            return score - slopes[head] * (q_idx - kv_idx)

        def window(batch, head, q_idx, kv_idx):
            return (q_idx - kv_idx < WINDOW) & (q_idx >= kv_idx)

        return Problem(q, k, v, alibi, window)


def flexc_call(problem: Problem, backend: str = "auto") -> Callable[[], object]:
    import flexc

    kernel = flexc.attention(problem.score_mod, problem.mask_mod, backend=backend)
    return lambda: kernel(problem.q, problem.k, problem.v)


def flexc_on(backend: str) -> Callable[[Problem], Callable[[], object]]:
    """Calls of one backend."""
    return lambda problem: flexc_call(problem, backend)


def sdpa_call(problem: Problem) -> Callable[[], object]:
    named = {"enable_gqa": problem.q.shape[1] != problem.k.shape[1]}
    return lambda: F.scaled_dot_product_attention(problem.q, problem.k, problem.v, **named)


def flex_call(problem: Problem, **kernel_options: Any) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = problem.q, problem.k, problem.v
    blocks = create_block_mask(problem.mask_mod, None, None, q.shape[2], k.shape[2], device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    named = {"score_mod": problem.score_mod, "block_mask": blocks, "enable_gqa": q.shape[1] != k.shape[1]}
    named |= {"kernel_options": kernel_options or None}
    return lambda: compiled(q, k, v, **named)


def compiled_call(make: Callable[[Problem], Callable[[], object]]) -> Callable[[Problem], Callable[[], object]]:
    """The same call inside torch.compile."""
    return lambda problem: torch.compile(make(problem), fullgraph=True)


def graph_call(make: Callable[[Problem], Callable[[], object]]) -> Callable[[Problem], Callable[[], object]]:
    """Replay of a CUDA graph of the same call."""

    def prepare(problem: Problem) -> Callable[[], object]:
        if not problem.q.is_cuda:
            raise Missing("needs a GPU")
        call = make(problem)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    return prepare


PLAIN: dict[str, Callable[[Problem], Callable[[], object]]] = {
    "flexc": flexc_call,
    "flexc-triton": flexc_on("triton"),
    "flexc-cute": flexc_on("cute"),
    "sdpa": sdpa_call,
    "flex": flex_call,
    "flex-flash": lambda problem: flex_call(problem, BACKEND="FLASH"),
}
SYSTEMS = {
    **PLAIN,
    **{f"{name}-compiled": compiled_call(make) for name, make in PLAIN.items() if not name.startswith("flex-") and name != "flex"},
    **{f"{name}-graph": graph_call(make) for name, make in PLAIN.items()},
}
DEFAULT = ("flexc", "sdpa", "flex")


def around_us(problem: Problem, turns: int, count: int, backend: str = "auto") -> float:
    """Host time of flexc's call with a module that computes nothing."""
    import flexc

    kernel = flexc.attention(problem.score_mod, problem.mask_mod, backend=backend)
    out, aux = kernel(problem.q, problem.k, problem.v, return_lse=True)
    module = kernel.artifact.module
    forward, module.forward = module.forward, lambda *_: (out, aux.lse)
    try:
        call = {"around": lambda: kernel(problem.q, problem.k, problem.v)}
        return microseconds(call, turns, count, problem.q.device)["around"]
    finally:
        module.forward = forward


def waiting_for(device: torch.device) -> Callable[[], object]:
    """What waits until a device has nothing left to do."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def microseconds(calls: dict[str, Callable[[], object]], turns: int, count: int, device: torch.device) -> dict[str, float]:
    """Median host time of one call, over turns of `count` calls each in which the systems alternate."""
    wait = waiting_for(device)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(20):
            call()
    for _ in range(turns):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append((time.perf_counter() - start) / count * 1e6)
    wait()
    return {name: statistics.median(times) for name, times in found.items()}


def measured(problem: Problem, names: list[str], turns: int, count: int, report: Callable[[str], None]) -> dict[str, float]:
    """Host time of each system that can do the problem."""
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        try:
            calls[name] = SYSTEMS[name](problem)
            calls[name]()
        except Missing as error:
            report(f"{name}: skipped, {error}")
        except Exception as error:
            calls.pop(name, None)
            report(f"{name}: {describe(error)}")
    return microseconds(calls, turns, count, problem.q.device)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse("1,4,4,256,256,64"), metavar="B,Hq,Hkv,Sq,Skv,D[,Dv]")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--systems", default=",".join(DEFAULT), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--count", type=int, default=100, help="calls a turn")
    parser.add_argument("--out", type=Path, help="append a JSON line for each system")
    parser.add_argument("--grad", action="store_true", help="q requires a gradient")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also write where the time of each of flexc's calls goes")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each profile")
    options = parser.parse_args(arguments)
    names = options.systems.split(",")
    unknown = set(names) - set(SYSTEMS)
    if unknown:
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
    device = torch.device(options.device)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    with torch.set_grad_enabled(options.grad):
        _measure(options, names, device, dtype)


def _measure(options: argparse.Namespace, names: list[str], device: torch.device, dtype: str) -> None:
    problem = Problem.of(options.shape, DTYPES[dtype], device)
    problem.q.requires_grad_(options.grad)
    title = f"{options.shape} {dtype} on {circumstances(device)['device']}"
    print(title)
    times = measured(problem, names, options.turns, options.count, print)
    for name, us in times.items():
        print(f"{name:22}{us:8.1f} µs", flush=True)
    kind = {"pattern": "alibi_window", "dtype": dtype, **vars(options.shape), "grad": options.grad}
    records = [{"system": name, **kind, "us": round(us, 2), **circumstances(device)} for name, us in times.items()]
    for record in records:
        name = str(record["system"])
        if name in PLAIN and name.startswith("flexc"):
            around = around_us(problem, options.turns, options.count, name.partition("-")[2] or "auto")
            record["around_us"] = round(around, 2)
            print(f"{name:22}{around:8.1f} µs of it around the generated module", flush=True)
    append(records, options.out)
    if options.profile:
        for name in (name for name in times if name in PLAIN and name.startswith("flexc")):
            written = write(SYSTEMS[name](problem), options.profile, name, title, options.seconds, waiting_for(device))
            print(" and ".join(map(str, written)))


if __name__ == "__main__":
    main()
