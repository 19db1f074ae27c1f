"""Whether kernels of the cute backend are right and fast on this GPU, each case in a process of its own with a time limit.

A deadlock then costs seconds. From the repository root: `python benchmarks/cute_smoke.py [correct|disk|speed|host|sanitize|all]`, where
`all` leaves out compute-sanitizer, which has to be on the PATH.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.abspath(__file__)
sys.path.insert(0, os.getcwd())
SCRATCH = os.path.join(tempfile.gettempdir(), "flexc_smoke")
os.environ.setdefault("FLEXC_CACHE_DIR", os.path.join(SCRATCH, "cache"))

# name: (variant, sizes, tile or None)
CORRECT = {
    "plain D128, 128x176 static": ("plain", dict(b=2, h=4, hk=4, s=1000, sk=1000, d=128), None),
    "plain D128 ragged, dynamic": ("plain", dict(b=2, h=8, hk=2, s=777, sk=1234, d=128), (128, 128, 2, True, "dynamic")),
    "causal D128 grid": ("causal", dict(b=2, h=8, hk=2, s=1000, sk=1000, d=128), None),
    "causal D128 dynamic": ("causal", dict(b=2, h=8, hk=2, s=3000, sk=3000, d=128), (128, 128, 2, True, "dynamic")),
    "causal D64 192x128": ("causal", dict(b=2, h=4, hk=1, s=1500, sk=900, d=64), None),
    "window D128": ("window", dict(b=1, h=4, hk=4, s=2000, sk=2000, d=128), None),
    "documents D128": ("documents", dict(b=1, h=4, hk=2, s=2000, sk=2000, d=128), None),
    "alibi causal D128": ("alibi", dict(b=1, h=4, hk=4, s=1100, sk=1100, d=128), None),
    "softcap causal D128": ("softcap", dict(b=1, h=4, hk=4, s=1100, sk=1100, d=128), None),
    "key bias causal D96 dynamic": ("keybias", dict(b=2, h=4, hk=2, s=600, sk=640, d=96), (128, 128, 2, True, "dynamic")),
    "causal D192/128": ("causal", dict(b=1, h=4, hk=4, s=700, sk=700, d=192, dv=128), None),
    "rows without keys D256": ("hole", dict(b=1, h=2, hk=2, s=700, sk=700, d=256), None),
    "relative bias window fp16": ("relative", dict(b=1, h=4, hk=4, s=900, sk=900, d=128, dtype="float16"), None),
    "buckets of distances D64 ragged": ("buckets", dict(b=2, h=4, hk=2, s=333, sk=777, d=64), None),
    "buckets of distances D128": ("buckets", dict(b=1, h=4, hk=2, s=900, sk=900, d=128), (128, 144, 2, True, "dynamic")),
    "pair bias D72/40 (padded)": ("pairbias", dict(b=1, h=2, hk=1, s=300, sk=310, d=72, dv=40), None),
    "causal D65 (copied)": ("causal", dict(b=1, h=2, hk=1, s=300, sk=310, d=65), None),
    "gated D64": ("gated", dict(b=1, h=2, hk=1, s=500, sk=500, d=64), None),
    "plain one warpgroup": ("plain", dict(b=1, h=2, hk=1, s=200, sk=3000, d=128), (64, 128, 2, False, "static")),
    "plain D256 128x80": ("plain", dict(b=1, h=2, hk=2, s=500, sk=1000, d=256), None),
}


def variants(s, heads):
    import torch

    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads).cuda()
    cuts = torch.tensor(sorted(torch.randperm(s, generator=torch.Generator().manual_seed(1))[:7].tolist()))
    doc = torch.bucketize(torch.arange(s + 700), cuts, right=True).to(torch.int32).cuda()
    bias = torch.randn(s + 700, generator=torch.Generator().manual_seed(2)).cuda()
    table = torch.randn(heads, 64, generator=torch.Generator().manual_seed(3)).half().cuda()
    pair = torch.randn(heads, 300, 310, generator=torch.Generator().manual_seed(4)).cuda() if s == 300 else None
    bucket_bias = torch.randn(32, heads, generator=torch.Generator().manual_seed(5)).bfloat16().cuda()
    weight = torch.tensor(1.5, device="cuda")
    width = 1024 if s >= 4096 else 100

    def alibi(score, b, h, q, k):
        return score - slopes[h] * (q - k)

    def softcap(score, b, h, q, k):
        return 20 * torch.tanh(score / 20)

    def keybias(score, b, h, q, k):
        return score + bias[k] * weight

    def relative(score, b, h, q, k):
        return score + table[h, (q - k) % 64]

    def buckets(score, b, h, q, k):
        """As T5 does: exact below 8, then logarithmic, for each direction."""
        distance = k - q
        far = torch.abs(distance)
        large = 8 + (torch.log2(torch.clamp(far, min=1).float() / 8) * 2).to(torch.int32)
        return score + bucket_bias[torch.where(distance > 0, 16, 0) + torch.where(far < 8, far, torch.clamp(large, max=15)), h]

    def pairbias(score, b, h, q, k):
        return score + pair[h, q, k]

    def gated(score, b, h, q, k):
        return torch.sigmoid(score) * (k // 3) - torch.abs(q - k) * 0.01

    def causal(b, h, q, k):
        return q >= k

    def window(b, h, q, k):
        return (q >= k) & (q - k < width)

    def documents(b, h, q, k):
        return (doc[q] == doc[k]) & (q >= k)

    def prefix(b, h, q, k):
        return (k < 2048) | (q >= k)

    def hole(b, h, q, k):
        return (q >= 64) & (q < 400) & (k >= 96) & (k < 600)

    return {
        "plain": (None, None),
        "causal": (None, causal),
        "window": (None, window),
        "documents": (None, documents),
        "prefix": (None, prefix),
        "hole": (None, hole),
        "alibi": (alibi, causal),
        "softcap": (softcap, causal),
        "keybias": (keybias, causal),
        "relative": (relative, window),
        "buckets": (buckets, None),
        "pairbias": (pairbias, None),
        "gated": (gated, causal),
    }


def prepared(name, tile, b, h, hk, s, sk, d, dv=None, dtype="bfloat16", precision="fast"):
    """(call, q, k, v, functions, plan): `call()` launches the kernel."""
    import torch

    from flexc import frontend, passes, sparsity
    from flexc.codegen.cute import Tile, emit, make_plan
    from flexc.passes.base2 import lower_to_base2
    from flexc.passes.derivative import differentiate
    from flexc.pipeline import MaskAlone
    from flexc.runtime.module import load_module
    from flexc.target import Target

    dv = dv or d
    kind = getattr(torch, dtype)
    g = torch.Generator(device="cuda").manual_seed(0)
    q = torch.randn(b, h, s, d, device="cuda", generator=g).to(kind)
    k = torch.randn(b, hk, sk, d, device="cuda", generator=g).to(kind)
    v = torch.randn(b, hk, sk, dv, device="cuda", generator=g).to(kind)
    functions = variants(s, h)[name]
    trace, binding = frontend.trace(*functions)
    run = passes.run(trace.graph)
    graph = lower_to_base2(differentiate(run))
    target = Target.parse("sm_90a")
    chosen = Tile(*tile) if tile else None
    plan = make_plan(graph, target, dtype=dtype, head_dim=d, head_dim_v=dv, group=h // hk, tile=chosen, precision=precision)
    text = emit(graph, plan, target, title=name)
    folder = SCRATCH
    os.makedirs(folder, exist_ok=True)
    import hashlib

    module = load_module(text, f"{folder}/{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py")
    walk = None
    if graph.mask is not None:
        alone = MaskAlone.of(run)
        walk = sparsity.classify(
            alone.graph,
            s,
            sk,
            batch=b,
            heads=h,
            block=(plan.forward.rows, plan.forward.columns),
            tensors=[binding.tensors[i] for i in alone.tensor_slots],
            scalars=[binding.scalars[i] for i in alone.scalar_slots],
            device=torch.device("cuda"),
        ).row_walk()

    def call():
        return module.forward(q, k, v, d**-0.5, binding.tensors, binding.scalars, walk)

    return call, q, k, v, functions, plan


def one_correct(case):
    import torch

    import flexc
    from flexc.reference import eager

    name, sizes, tile = CORRECT[case]
    call, q, k, v, functions, plan = prepared(name, tile, **sizes)
    started = time.time()
    out, lse = call()
    torch.cuda.synchronize()
    first = time.time() - started
    truth, true_lse = flexc.reference(*functions, q, k, v)
    rough, _ = eager(*functions, q, k, v)
    error, allowed = (out.double() - truth).abs().max().item(), (rough.double() - truth).abs().max().item()
    live = ~torch.isneginf(true_lse)
    lse_error = (lse.double() - true_lse)[live].abs().max().item() if live.any() else 0.0
    same = all(torch.equal(call()[0], out) for _ in range(20))
    ok = error <= 2 * allowed + 1e-6 and lse_error < 2e-3 and torch.equal(torch.isneginf(lse), ~live) and same
    print(
        json.dumps(
            dict(
                ok=bool(ok),
                error=f"{error:.2e}",
                eager=f"{allowed:.2e}",
                lse=f"{lse_error:.1e}",
                repeat=same,
                first_s=round(first, 1),
                plan=f"{plan.forward} {plan.out_buffer}",
            )
        )
    )


# Both ways of handing out tiles, of keeping the output and of grouping warps; values shared by columns and by diagonals.
SANITIZED = (
    "plain D128 ragged, dynamic",
    "causal D128 grid",
    "causal D64 192x128",
    "key bias causal D96 dynamic",
    "rows without keys D256",
    "buckets of distances D64 ragged",
)


def one_launch(case):
    """What compute-sanitizer watches."""
    import torch

    name, sizes, tile = CORRECT[case]
    call, *_ = prepared(name, tile, **{**sizes, "b": 1})
    call()
    torch.cuda.synchronize()
    print(json.dumps(dict(ok=True)))


def sanitized(case, tool, limit):
    """The tool's summary of the kernel in one case; its object must be on disk, so that nothing else takes time."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-regex", "kns=forward_kernel", sys.executable, HERE, "--one", "launch", case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"TIME-OUT after {limit} s"
    except FileNotFoundError:
        return "compute-sanitizer is not on the PATH"
    found = re.findall(r"=+ +(?:\w+ SUMMARY: .*|Error.*)", done.stdout)
    if not found:
        return "FAILED " + " | ".join((done.stdout + done.stderr).splitlines()[-3:])[:300]
    return " | ".join(line.strip("= ") for line in found[-2:])


SPEED = [  # (variant, tile); pairs counted as allowed
    ("plain", None),
    ("plain", (128, 128, 2, True, "grid")),
    ("plain", (128, 128, 2, True, "dynamic")),
    ("plain", (128, 176, 2, True, "dynamic")),
    ("causal", None),
    ("causal", (128, 128, 2, True, "dynamic")),
    ("causal", (128, 176, 2, True, "grid")),
    ("window", None),
    ("window", (128, 128, 2, True, "dynamic")),
    ("window", (128, 64, 3, True, "dynamic")),
    ("documents", None),
    ("documents", (128, 128, 2, True, "dynamic")),
    ("prefix", None),
    ("plain", None, 64),
    ("causal", None, 64),
    ("causal", (128, 128, 2, True, "grid"), 64),
    ("softcap", None, 64),
    ("softcap", (192, 112, 2, False, "grid"), 64),
    ("plain", None, 256),
    ("causal", None, 256),
    ("alibi", None),
    ("alibi", (128, 128, 2, True, "dynamic")),
    ("softcap", None),
    ("softcap", (128, 128, 2, True, "dynamic")),
]


def timed(calls, repeats=15, inner=5):
    """Median milliseconds of each call, interleaved."""
    import torch

    for call in calls:
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    found = [[] for _ in calls]
    for _ in range(repeats):
        for slot, call in enumerate(calls):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            end.synchronize()
            found[slot].append(begin.elapsed_time(end) / inner)
    return [sorted(x)[len(x) // 2] for x in found]


def one_speed(index):
    import torch

    import flexc

    name, tile, *rest = SPEED[int(index)]
    d = rest[0] if rest else 128
    sizes = dict(b=2, h=16, hk=16, s=8192, sk=8192, d=d)
    call, q, k, v, functions, plan = prepared(name, tile, **sizes)
    call()
    torch.cuda.synchronize()
    triton = flexc.attention(*functions, backend="triton")
    with torch.no_grad():
        triton(q, k, v)
        mine, theirs = timed([call, lambda: triton(q, k, v)])
    pairs = 8192 * 8192
    if functions[1] is not None:
        i = torch.arange(8192, device="cuda")
        pairs = int(sum(torch.as_tensor(functions[1](0, 0, i[a : a + 512, None], i[None, :])).sum() for a in range(0, 8192, 512)))
    flops = 4 * 2 * 16 * pairs * d
    print(
        json.dumps(
            dict(
                ok=True,
                tflops=round(flops / mine / 1e9),
                triton=round(flops / theirs / 1e9),
                ms=round(mine, 3),
                plan=f"{plan.forward} {plan.out_buffer}",
            )
        )
    )


def one_disk(_):
    """A process that finds the object on disk (run it after `correct`)."""
    one_correct("causal D128 grid")


def one_host(_):
    """Host time of a call on small tensors."""
    import torch

    call, *_ = prepared("causal", None, b=1, h=2, hk=2, s=128, sk=128, d=128)
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(500):
        call()
    spent = (time.perf_counter() - started) / 500
    torch.cuda.synchronize()
    print(json.dumps(dict(ok=True, host_us=round(1e6 * spent, 1))))


def child(kind, argument, limit):
    try:
        done = subprocess.run([sys.executable, HERE, "--one", kind, str(argument)], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"TIME-OUT after {limit} s (deadlock?)"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return "FAILED " + " | ".join(done.stderr.strip().splitlines()[-3:])[:400]
    found = json.loads(lines[-1])
    return ("ok    " if found.pop("ok") else "WRONG ") + "  ".join(f"{k} {v}" for k, v in found.items())


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else "all"
    if wanted in ("correct", "all"):
        print("--- correct: error against float64, next to eager PyTorch's", flush=True)
        with ThreadPoolExecutor(6) as pool:
            for case, line in zip(CORRECT, pool.map(lambda case: child("correct", case, 90), CORRECT)):
                print(f"{case:32} {line}", flush=True)
    if wanted == "sanitize":
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda case: child("launch", case, 90), SANITIZED))
            for tool in ("memcheck", "racecheck"):
                for case, line in zip(SANITIZED, pool.map(lambda case, tool=tool: sanitized(case, tool, 120), SANITIZED)):
                    print(f"{tool:10} {case:32} {line}", flush=True)
    if wanted in ("disk", "all"):
        print("--- from the disk cache\n" + child("disk", "", 60), flush=True)
    if wanted in ("host", "all"):
        print("--- host time a call\n" + child("host", "", 60), flush=True)
    if wanted in ("speed", "all"):
        print("--- speed: bf16 B2 H16 S8192 D128, TFLOP/s of allowed pairs, interleaved with the triton backend", flush=True)
        for index, (name, _, *rest) in enumerate(SPEED):
            print(f"{name:10} D{(rest or [128])[0]:<4} {child('speed', index, 60)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        {"correct": one_correct, "launch": one_launch, "speed": one_speed, "disk": one_disk, "host": one_host}[sys.argv[2]](sys.argv[3])
    else:
        main()
