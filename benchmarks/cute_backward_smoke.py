"""Whether backward kernels of the cute backend are right and fast on this GPU, each case in a process of its own with a time limit.

A deadlock then costs seconds. From the repository root: `python benchmarks/cute_backward_smoke.py [correct|speed|all]`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.abspath(__file__)
sys.path.insert(0, os.getcwd())
sys.path.insert(0, os.path.dirname(HERE))

from cute_smoke import SCRATCH, timed, variants  # noqa: E402  (sets FLEXC_CACHE_DIR)

LIMIT = int(os.environ.get("LIMIT", "60"))  # seconds of a case

EACH, QUEUE = (64, 128), (64, 128, "keys", 2, True)

IN_TURN = "in turn"  # the default tile of a deterministic kernel

# name: (variant, sizes, tile or None, with a gradient of lse)
CORRECT = {
    "plain D128": ("plain", dict(b=2, h=4, hk=4, s=1024, sk=1024, d=128), None, False),
    "plain D128 ragged, grouped": ("plain", dict(b=2, h=8, hk=2, s=777, sk=1234, d=128), None, True),
    "plain D128, 64 queries a step": ("plain", dict(b=2, h=8, hk=2, s=1000, sk=1100, d=128), EACH, True),
    "plain D128, a queue": ("plain", dict(b=2, h=8, hk=2, s=1000, sk=1100, d=128), (64, 128, "keys", 2, True), True),
    "causal D128, a block for each tile": (
        "causal",
        dict(b=2, h=4, hk=4, s=1000, sk=1100, d=128),
        EACH,
        False,
    ),
    "causal D128 grouped": ("causal", dict(b=2, h=8, hk=2, s=1000, sk=1000, d=128), None, False),
    "causal D128 long": ("causal", dict(b=2, h=8, hk=8, s=3000, sk=3000, d=128), None, True),
    "window D128": ("window", dict(b=1, h=4, hk=4, s=2000, sk=2000, d=128), None, False),
    "documents D128": ("documents", dict(b=1, h=4, hk=2, s=2000, sk=2000, d=128), None, False),
    "alibi causal D128": ("alibi", dict(b=1, h=4, hk=4, s=1100, sk=1100, d=128), None, False),
    "softcap causal D128": ("softcap", dict(b=1, h=4, hk=4, s=1100, sk=1100, d=128), None, False),
    "rows without keys D128": ("hole", dict(b=1, h=2, hk=2, s=700, sk=700, d=128), None, True),
    "plain D64": ("plain", dict(b=1, h=4, hk=1, s=1500, sk=900, d=64), None, False),
    "causal D64": ("causal", dict(b=1, h=4, hk=1, s=1500, sk=900, d=64), None, False),
    "causal D192/128": ("causal", dict(b=1, h=4, hk=4, s=700, sk=700, d=192, dv=128), None, False),
    "plain D256": ("plain", dict(b=1, h=2, hk=2, s=500, sk=1000, d=256), None, False),
    "relative bias window fp16": ("relative", dict(b=1, h=4, hk=4, s=900, sk=900, d=128, dtype="float16"), None, False),
    "pair bias D72/40 (padded)": ("pairbias", dict(b=1, h=2, hk=1, s=300, sk=310, d=72, dv=40), None, False),
    "causal D65 (copied)": ("causal", dict(b=1, h=2, hk=1, s=300, sk=310, d=65), None, False),
    "gated D128": ("gated", dict(b=1, h=2, hk=1, s=500, sk=500, d=128), None, False),
    "key bias causal D96": ("keybias", dict(b=2, h=4, hk=2, s=600, sk=640, d=96), None, False),
    "slopes learned": ("slopes", dict(b=2, h=4, hk=4, s=1100, sk=1100, d=128), None, False),
    "slopes learned D64 grouped": ("slopes", dict(b=2, h=4, hk=2, s=1100, sk=900, d=64), None, True),
    "temperature, keys learned": ("temperature", dict(b=2, h=4, hk=4, s=700, sk=1000, d=128), None, False),
    "learned in a soft cap D256": ("capped", dict(b=1, h=4, hk=2, s=700, sk=700, d=256), None, False),
    "in turn plain D128": ("plain", dict(b=2, h=8, hk=8, s=2000, sk=2100, d=128), IN_TURN, True),
    "in turn plain grouped D64": ("plain", dict(b=2, h=16, hk=4, s=2000, sk=2000, d=64), IN_TURN, False),
    "in turn plain D192": ("plain", dict(b=1, h=4, hk=2, s=700, sk=700, d=192), IN_TURN, True),
    "in turn causal D128": ("causal", dict(b=2, h=16, hk=16, s=2000, sk=2100, d=128), IN_TURN, False),
    "in turn window grouped D128": ("window", dict(b=1, h=16, hk=4, s=3000, sk=3000, d=128), IN_TURN, False),
    "in turn documents D64": ("documents", dict(b=2, h=16, hk=16, s=2000, sk=2000, d=64), IN_TURN, False),
    "in turn hole D192": ("hole", dict(b=1, h=4, hk=2, s=700, sk=700, d=192), IN_TURN, True),
    "learned in a soft cap": ("capped", dict(b=1, h=4, hk=2, s=700, sk=700, d=128), EACH, False),
}

SPEED = {  # variant: tiles, and the head dimension
    "plain": ([None, EACH, QUEUE, IN_TURN], 128),
    "causal": ([None, EACH, IN_TURN], 128),
    "window": ([None, EACH, IN_TURN], 128),
    "documents": ([None, EACH, IN_TURN], 128),
    "softcap": ([None, EACH], 128),
    "alibi": ([None, EACH], 128),
    "slopes": ([None], 128),
    "temperature": ([None], 128),
    "prefix": ([None], 128),
    "plain D64": ([None, IN_TURN], 64),
    "causal D64": ([None, IN_TURN], 64),
    "causal D192": ([None], 192),
    "causal D256": ([None], 256),
}


def inputs(b, h, hk, s, sk, d, dv=None, dtype="bfloat16"):
    import torch

    dv = dv or d
    kind = getattr(torch, dtype)
    g = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((h, s, d), (hk, sk, d), (hk, sk, dv), (h, s, dv))
    return [torch.randn(b, *shape, device="cuda", generator=g).to(kind) for shape in shapes]


def functions_of(name, s, heads):
    """(score, mask) of a variant; some have captured tensors that want a gradient."""
    import torch

    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device="cuda") / heads).requires_grad_()
    degree = torch.tensor(0.8, device="cuda", requires_grad=True)
    keys = torch.randn(heads, s + 700, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).requires_grad_()

    def learned_slopes(score, b, h, q, k):
        return score - slopes[h] * (q - k)

    def temperature(score, b, h, q, k):
        return score * degree + keys[h, k]

    def capped(score, b, h, q, k):
        return 20 * torch.tanh((score - slopes[h] * (q - k)) / 20) + keys[0, k]

    def causal(b, h, q, k):
        return q >= k

    learned = {"slopes": learned_slopes, "temperature": temperature, "capped": capped}
    return (learned[name], causal) if name in learned else variants(s, heads)[name]


def prepared(name, functions, tile, q, k, v):
    """(backward, plan, learned): `backward(out, lse, dout, dlse)` launches the kernels; captured tensors whose gradients it returns."""
    import torch

    from flexc import frontend, passes, sparsity
    from flexc.codegen.cute.backward import emit_backward
    from flexc.codegen.cute.backward_plan import BackwardTile, make_backward_plan
    from flexc.codegen.cute.backward_terms import gradient_slots
    from flexc.passes.base2 import lower_to_base2
    from flexc.passes.derivative import differentiate
    from flexc.pipeline import MaskAlone
    from flexc.runtime.module import load_module
    from flexc.target import Target

    trace, binding = frontend.trace(*functions)
    run = passes.run(trace.graph)
    graph = lower_to_base2(differentiate(run))
    target = Target.parse("sm_90a")
    plan = make_backward_plan(
        graph,
        target,
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        group=q.shape[1] // k.shape[1],
        tile=BackwardTile(*tile) if tile and tile != IN_TURN else None,
        deterministic=tile == IN_TURN,
    )
    text = emit_backward(graph, plan, target, title=name)
    os.makedirs(SCRATCH, exist_ok=True)
    module = load_module(text, f"{SCRATCH}/backward_{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py")
    walk = None
    if graph.mask is not None:
        alone = MaskAlone.of(run)
        walk = sparsity.classify(
            alone.graph,
            q.shape[2],
            k.shape[2],
            batch=q.shape[0],
            heads=q.shape[1],
            block=(plan.backward.rows, plan.backward.columns),
            tensors=[binding.tensors[i] for i in alone.tensor_slots],
            scalars=[binding.scalars[i] for i in alone.scalar_slots],
            device=torch.device("cuda"),
        ).column_walk()

    def backward(out, lse, dout, dlse):
        return module.backward(q, k, v, out, lse, dout, dlse, q.shape[3] ** -0.5, binding.tensors, binding.scalars, walk)

    return backward, plan, [binding.tensors[slot] for slot in gradient_slots(graph)]


def gradients(attention, functions, leaves, learned, dout, dlse):
    import torch

    out, lse = attention(*functions, *leaves)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
    return out.detach(), lse.detach(), torch.autograd.grad(loss, (*leaves, *learned))


def one_correct(case):
    import torch

    import flexc
    from flexc.reference import eager

    name, sizes, tile, with_lse = CORRECT[case]
    q, k, v, dout = inputs(**sizes)
    functions = functions_of(name, q.shape[2], q.shape[1])
    backward, plan, learned = prepared(name, functions, tile, q, k, v)
    dlse = torch.randn(q.shape[:3], device="cuda") if with_lse else None
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse, truth = gradients(flexc.reference, functions, doubles, learned, dout.double(), dlse)
    *_, rough = gradients(eager, functions, [x.clone().requires_grad_() for x in (q, k, v)], learned, dout, dlse)
    given = (out.to(q.dtype), lse.float(), dout, dlse)
    started = time.time()

    def call():
        *found, captured = backward(*given)
        return [*found, *(x for x in captured if x is not None)]

    found = call()
    torch.cuda.synchronize()
    first = time.time() - started
    ok, said = len(found) == len(truth), {}
    names = ["dq", "dk", "dv", *(f"d{n}" for n in range(len(learned)))]
    for which, x, r, t in zip(names, found, rough, truth):
        error, allowed = (x.double() - t).abs().max().item(), (r.double() - t).abs().max().item()
        luck = 1e-3 * t.abs().max().item() if which not in names[:3] else 0.0  # few numbers: eager's error may be small by chance
        ok = ok and error <= 2 * allowed + luck + 1e-6
        said[which] = f"{error:.1e}/{allowed:.1e}"
    same = True
    for _ in range(100 if tile == IN_TURN else 10):
        dq, dk, dv, *_ = call()
        same = same and torch.equal(dk, found[1]) and torch.equal(dv, found[2]) and (tile != IN_TURN or torch.equal(dq, found[0]))
        ok = ok and (dq.double() - found[0].double()).abs().max().item() <= 0.02 * truth[0].abs().max().item() + 1e-6
    print(json.dumps(dict(ok=bool(ok and same), **said, repeat=same, s=round(first, 1), plan=str(plan.backward))))


def speed_of(pattern):
    """TFLOP/s of our tiles and of triton's backward (autograd's call), interleaved."""
    import torch

    import flexc

    tiles, d = SPEED[pattern]
    name = pattern.split()[0]
    q, k, v, dout = inputs(b=2, h=16, hk=16, s=8192, sk=8192, d=d)
    functions = functions_of(name, 8192, 16)
    found = [prepared(name, functions, tile, q, k, v) for tile in tiles]
    leaves = [*(x.requires_grad_() for x in (q, k, v)), *found[0][2]]
    out, aux = flexc.attention(*functions, backend="triton")(*leaves[:3], return_lse=True)
    given = (out.detach(), aux.lse.detach(), dout, None)
    calls = [functools.partial(backward, *given) for backward, *_ in found]
    times = timed([*calls, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)], repeats=7, inner=2)
    pairs = 8192 * 8192
    if functions[1] is not None:
        i = torch.arange(8192, device="cuda")
        pairs = int(sum(torch.as_tensor(functions[1](0, 0, i[a : a + 512, None], i[None, :])).sum() for a in range(0, 8192, 512)))
    rates = [round(10 * 2 * 16 * pairs * d / t / 1e9) for t in times]
    mine = "  ".join(f"{plan.backward}{', in turn' if plan.deterministic else ''}: {rate}" for (_, plan, _), rate in zip(found, rates))
    return f"{pattern:12} {mine}  triton: {rates[-1]}"


def one_speed(names):
    """One line a pattern."""
    for pattern in names.split(","):
        try:
            print(speed_of(pattern), flush=True)
        except Exception as error:
            print(f"{pattern:12} FAILED {type(error).__name__}: {error}"[:300], flush=True)


def child(kind, argument, limit):
    try:
        done = subprocess.run([sys.executable, HERE, "--one", kind, str(argument)], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return f"{said}TIME-OUT after {limit} s (deadlock?)"
    if kind == "speed":
        return done.stdout + ("" if done.returncode == 0 else "FAILED " + " | ".join(done.stderr.strip().splitlines()[-3:])[:400])
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return "FAILED " + " | ".join(done.stderr.strip().splitlines()[-3:])[:400]
    found = json.loads(lines[-1])
    return ("ok    " if found.pop("ok") else "WRONG ") + "  ".join(f"{k} {v}" for k, v in found.items())


def one_warm(job):
    """Compiles what the timing process needs: a tile of a pattern, or triton's kernels."""
    import torch

    import flexc

    pattern, index = job.split(":")
    tiles, d = SPEED[pattern]
    name = pattern.split()[0]
    small = index == "triton"
    q, k, v, dout = inputs(b=2, h=16, hk=16, s=512 if small else 8192, sk=512 if small else 8192, d=d)
    functions = functions_of(name, 8192, 16)
    if small:
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *prepared(name, functions, None, q, k, v)[2]]
        torch.autograd.grad(flexc.attention(*functions, backend="triton")(*leaves[:3]), leaves, dout)
    else:
        prepared(name, functions, tiles[int(index)], q, k, v)[0](dout, torch.zeros(q.shape[:3], device="cuda"), dout, None)
    torch.cuda.synchronize()
    print(json.dumps(dict(ok=True)))


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else "all"
    started = time.time()
    jobs = [f"{pattern}:{i}" for pattern, (tiles, _) in SPEED.items() for i in ("triton", *range(len(tiles)))]
    with ThreadPoolExecutor(16) as pool:
        correct = {case: pool.submit(child, "correct", case, LIMIT) for case in (CORRECT if wanted != "speed" else ())}
        warm = {job: pool.submit(child, "warm", job, LIMIT) for job in (jobs if wanted != "correct" else ())}
        if correct:
            print("--- correct: errors of dq, dk, dv against float64 / eager PyTorch's", flush=True)
        for case, line in correct.items():
            print(f"{case:27} {line.result()}", flush=True)
        for job, line in warm.items():
            if not line.result().startswith("ok"):
                print(f"warming {job}: {line.result()}", flush=True)
    if wanted != "correct":
        print(f"--- after {time.time() - started:.0f} s: bf16 B2 H16 S8192, backward TFLOP/s of allowed pairs, interleaved", flush=True)
        print(child("speed", ",".join(SPEED), LIMIT), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        {"correct": one_correct, "speed": one_speed, "warm": one_warm}[sys.argv[2]](sys.argv[3])
    else:
        main()
