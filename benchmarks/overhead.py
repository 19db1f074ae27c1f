"""What a call costs the host: flexc beside PyTorch's SDPA and compiled FlexAttention, on a problem so small that little else counts.

    python benchmarks/overhead.py                                       # B1 H4 S256 D64, a score function, a mask, a captured tensor
    python benchmarks/overhead.py --systems flexc-triton,flexc-cute,sdpa,flex --out results/overhead.jsonl
    python benchmarks/overhead.py --profile profile                     # profile/calls.txt and profile/flame.svg: where flexc's time goes

On a GPU, `us` is the time until a call returns, with nothing waited for: kernels run behind it. On a CPU a call computes before it returns,
so there flexc's own part is `around_us`: the same call where the generated module gives a ready result; it is measured on a GPU too.
Systems take turns, and medians over all turns are printed. SDPA computes plain attention: what any call of PyTorch costs.
"""

from __future__ import annotations

import argparse
import cProfile
import html
import io
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from measure import circumstances, describe
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


SYSTEMS: dict[str, Callable[[Problem], Callable[[], object]]] = {
    "flexc": flexc_call,
    "flexc-triton": flexc_on("triton"),
    "flexc-cute": flexc_on("cute"),
    "sdpa": sdpa_call,
    "flex": flex_call,
    "flex-flash": lambda problem: flex_call(problem, BACKEND="FLASH"),
    "flexc-compiled": compiled_call(flexc_call),
    "flexc-cute-compiled": compiled_call(flexc_on("cute")),
    "sdpa-compiled": compiled_call(sdpa_call),
    "flexc-graph": graph_call(flexc_call),
    "sdpa-graph": graph_call(sdpa_call),
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


def microseconds(calls: dict[str, Callable[[], object]], turns: int, count: int, device: torch.device) -> dict[str, float]:
    """Median host time of one call, over turns of `count` calls each in which the systems alternate."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
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
            with torch.no_grad():
                calls[name]()
        except Missing as error:
            report(f"{name}: skipped, {error}")
        except Exception as error:
            calls.pop(name, None)
            report(f"{name}: {describe(error)}")
    return microseconds(calls, turns, count, problem.q.device)


# --- where the time goes ----------------------------------------------------------------------------------------------------------------


@dataclass
class Frame:
    """A function as reached by one path of calls."""

    name: str
    seconds: float = 0.0
    below: dict[str, Frame] = field(default_factory=dict)

    def child(self, name: str) -> Frame:
        return self.below.setdefault(name, Frame(name))


def tree_of(call: Callable[[], object], count: int) -> Frame:
    """Time by path of calls, of `count` calls under a profiler that is told of every function's begin and end."""
    root = Frame("call")
    stack: list[tuple[Frame, float]] = []

    def name_of(frame: FrameType, argument: Any, event: str) -> str:
        if event.startswith("c_"):
            return getattr(argument, "__qualname__", str(argument))
        code = frame.f_code
        return f"{code.co_qualname if sys.version_info >= (3, 11) else code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if argument is sys.setprofile:  # the end of the profile itself
            return
        if event in ("call", "c_call"):
            above = stack[-1][0] if stack else root
            stack.append((above.child(name_of(frame, argument, event)), time.perf_counter()))
        elif stack:
            node, start = stack.pop()
            node.seconds += time.perf_counter() - start

    for _ in range(count):
        sys.setprofile(seen)
        call()
        sys.setprofile(None)
        stack.clear()
    root.seconds = sum(child.seconds for child in root.below.values())
    return root


def rectangles(frame: Frame, left: float, depth: int, least: float) -> Iterator[tuple[float, int, Frame]]:
    """(start in seconds, depth, frame) of each frame that is wide enough to see."""
    yield left, depth, frame
    for child in sorted(frame.below.values(), key=lambda f: -f.seconds):
        if child.seconds >= least:
            yield from rectangles(child, left, depth + 1, least)
        left += child.seconds


def flame_svg(root: Frame, count: int, title: str) -> str:
    """A flame graph, the call at the top: the width of a box is its share of the time, what it calls stands below it."""
    width, height = 1200, 18
    boxes = list(rectangles(root, 0.0, 0, root.seconds / 400))
    rows = 1 + max(depth for _, depth, _ in boxes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{(rows + 2) * height}" font-family="monospace" font-size="11">',
        f'<text x="4" y="14">{html.escape(title)}</text>',
    ]
    for left, depth, frame in boxes:
        x, w, y = width * left / root.seconds, width * frame.seconds / root.seconds, (depth + 1.2) * height
        hue = 210 if "flexc" in frame.name or ".py" not in frame.name else 30 + sum(map(ord, frame.name)) % 25
        label = html.escape(frame.name[: max(0, int(w / 6.7))])
        note = html.escape(f"{frame.name}: {frame.seconds / count * 1e6:.1f} µs, {frame.seconds / root.seconds:.1%}")
        parts.append(
            f'<g><title>{note}</title><rect x="{x:.1f}" y="{y:.1f}" width="{max(w - 0.5, 0.5):.1f}" height="{height - 1}" '
            f'fill="hsl({hue}, 70%, 75%)"/><text x="{x + 2:.1f}" y="{y + 13:.1f}">{label}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def profile(call: Callable[[], object], folder: Path, title: str, count: int = 300) -> None:
    """Write calls.txt, functions by cumulative time, and flame.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for _ in range(20):
            call()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            call()
        profiler.disable()
        tree = tree_of(call, count)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(40)
    (folder / "calls.txt").write_text(f"{title}, {count} calls\n{text.getvalue()}")
    (folder / "flame.svg").write_text(flame_svg(tree, count, f"{title}; {tree.seconds / count * 1e6:.0f} µs a call under the profiler"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse("1,4,4,256,256,64"), metavar="B,Hq,Hkv,Sq,Skv,D[,Dv]")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--systems", default=",".join(DEFAULT), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--count", type=int, default=100, help="calls a turn")
    parser.add_argument("--out", type=Path, help="append a JSON line for each system")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also write where the time of flexc's call goes")
    options = parser.parse_args(arguments)
    names = options.systems.split(",")
    unknown = set(names) - set(SYSTEMS)
    if unknown:
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
    device = torch.device(options.device)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    problem = Problem.of(options.shape, DTYPES[dtype], device)
    title = f"{options.shape} {dtype} on {circumstances(device)['device']}"
    print(title)
    times = measured(problem, names, options.turns, options.count, print)
    records = []
    for name, us in times.items():
        record = {"system": name, "pattern": "alibi_window", "dtype": dtype, **vars(options.shape), "direction": "fwd", "us": round(us, 2)}
        if name in ("flexc", "flexc-triton", "flexc-cute"):
            backend = name.partition("-")[2] or "auto"
            record["around_us"] = round(around_us(problem, options.turns, options.count, backend), 2)
        records.append({**record, **circumstances(device)})
        note = f"   of which around the generated module {record['around_us']:.1f}" if "around_us" in record else ""
        print(f"{name:16}{us:10.1f} µs{note}")
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if options.profile:
        profile(flexc_call(problem), options.profile, title)
        print(f"{options.profile / 'calls.txt'} and {options.profile / 'flame.svg'}")


if __name__ == "__main__":
    main()
