"""Whole backward kernels, run warp by warp on the CPU: right gradients in every shape; and what the simulation notices."""

from __future__ import annotations

import re
import time

import pytest
import torch

import flexc
from flexc import frontend, passes, sparsity
from flexc.codegen.cute.backward import emit_backward
from flexc.codegen.cute.backward_kernel import print_backward
from flexc.codegen.cute.backward_plan import BackwardTile, make_backward_plan
from flexc.pipeline import MaskAlone
from flexc.reference import eager
from tests.accuracy import assert_as_accurate_as_eager
from tests.codegen.cute import simulated, simulated_backward
from tests.codegen.cute.simulated import Stuck
from tests.codegen.cute.simulated_backward import simulate_backward
from tests.codegen.cute.texts import HOPPER, VARIANTS, lowered


def run(functions, *, head_dim=64, head_dim_v=None, tile=None, dtype=torch.bfloat16, seed=0, change=None, **given):
    """(gradients, a function of the attention that gives true ones) of the kernels for these functions, whose text `change` may edit."""
    batch, heads, kv_heads = given.pop("batch", 1), given.pop("heads", 2), given.pop("kv_heads", 1)
    q_len, kv_len, with_lse = given.pop("q_len", 200), given.pop("kv_len", 200), given.pop("with_lse", False)
    head_dim_v = head_dim_v or head_dim
    random = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, length, width, generator=random).to(dtype).requires_grad_()
        for n, length, width in ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim_v))
    )
    graph = lowered(*functions)
    name = str(dtype).removeprefix("torch.")
    plan = make_backward_plan(graph, HOPPER, dtype=name, head_dim=head_dim, head_dim_v=head_dim_v, group=heads // kv_heads, tile=tile)
    text = emit_backward(graph, plan, HOPPER)
    if change is not None:
        changed = change(text)
        assert changed != text, "the change found nothing to change"
        text = changed
    trace, binding = frontend.trace(*functions)
    walk = None
    if graph.mask is not None:
        alone = MaskAlone.of(passes.run(trace.graph))
        walk = sparsity.classify(
            alone.graph,
            q_len,
            kv_len,
            batch=batch,
            heads=heads,
            block=(plan.backward.rows, plan.backward.columns),
            tensors=[binding.tensors[slot] for slot in alone.tensor_slots],
            scalars=[binding.scalars[slot] for slot in alone.scalar_slots],
            device=torch.device("cpu"),
        ).column_walk()
    truth, true_lse = flexc.reference(*functions, q, k, v)
    dout = torch.randn(truth.shape, generator=random).to(dtype)
    dlse = torch.randn(true_lse.shape, generator=random) if with_lse else None
    kernel = print_backward(graph, approximate=plan.approximate, exact=plan.exact)

    def true(attention):
        out, lse = attention(*functions, q, k, v)
        loss = (out * dout).sum()
        if with_lse:
            loss = loss + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
        return torch.autograd.grad(loss, (q, k, v))

    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = flexc.reference(*functions, *doubles)
    loss = (out * dout.double()).sum()
    if with_lse:
        loss = loss + torch.where(lse.isfinite(), lse * dlse.double(), 0.0).sum()
    truths = torch.autograd.grad(loss, doubles)
    rough = true(eager)
    found = simulate_backward(
        text,
        plan,
        *(x.detach() for x in (q, k, v)),
        truth.detach().to(dtype),
        true_lse.detach().float(),
        dout,
        dlse,
        head_dim**-0.5,
        binding.tensors,
        binding.scalars,
        walk,
        staged=kernel.staged,
        seed=seed,
        **given,
    )
    return found, rough, truths


def check(functions, **given) -> None:
    for name, found, rough, truth in zip(("dq", "dk", "dv"), *run(functions, **given), strict=True):
        try:
            assert_as_accurate_as_eager(found, rough, truth, floor=5e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compute_the_gradients_of_their_variant(name):
    check(VARIANTS[name], head_dim=128, q_len=170, kv_len=190)


CASES = {
    "grouped heads, a short head": ("causal", {"batch": 2, "heads": 4, "kv_heads": 2, "kv_len": 100, "with_lse": True}),
    "head dimension 64": ("alibi", {"heads": 1, "q_len": 300, "kv_len": 140}),
    "padded": ("documents", {"head_dim": 72, "head_dim_v": 40}),
    "rows without keys": ("hole", {"head_dim": 128, "q_len": 230, "kv_len": 200, "with_lse": True}),
    "by dims, both of 192": ("causal", {"head_dim": 192, "q_len": 100, "kv_len": 130, "with_lse": True}),
    "by dims": ("softcap", {"head_dim": 192, "head_dim_v": 128, "q_len": 100, "kv_len": 130}),
    "by dims, wide": ("window", {"head_dim": 256, "q_len": 130, "kv_len": 100}),
    "by dims, values staged": ("documents", {"head_dim": 130, "q_len": 130, "kv_len": 100}),
    "by dims, a queue": (
        "causal",
        {"head_dim": 192, "head_dim_v": 128, "q_len": 100, "kv_len": 130, "tile": BackwardTile(64, 64, "dims", 1, queue=True)},
    ),
    "a queue, heads without keys, many tiles": (
        "hole",
        {"head_dim": 128, "heads": 4, "q_len": 130, "tile": BackwardTile(64, 128, queue=True), "blocks_of_threads": 1},
    ),
    "a queue, values staged": (
        "documents",
        {"heads": 3, "kv_heads": 3, "tile": BackwardTile(128, 128, queue=True), "blocks_of_threads": 1},
    ),
    "a block of threads for each tile": ("causal", {"head_dim": 128, "tile": BackwardTile(64, 128)}),
    "few tokens": ("plain", {"q_len": 5, "kv_len": 3, "head_dim": 128}),
    "one key": ("causal", {"q_len": 64, "kv_len": 1}),
    "ragged, dense": ("plain", {"q_len": 70, "kv_len": 300, "with_lse": True}),
    "float16": ("softcap", {"dtype": torch.float16, "head_dim": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_in_every_shape(case):
    name, given = CASES[case]
    check(VARIANTS[name], **given)


# --- the simulation notices what would go wrong on the device -----------------------------------------------------------------------------


def without(line: str, count: int = -1):
    """The text less the lines that contain this."""

    def change(text: str) -> str:
        lines, left = [], count
        for each in text.splitlines():
            if line in each and left != 0:
                left -= 1
                each = each[: len(each) - len(each.lstrip())] + "pass"
            lines.append(each)
        return "\n".join(lines) + "\n"

    return change


@pytest.mark.parametrize(
    "change",
    [
        without("queries.consumer_release(query_state)"),
        without("douts.consumer_release(dout_state)"),
        without("steps.take_back(part)", 1),
        without("steps.hand_order("),
        without("pairs.consumer_release(pair_state)"),
        without("queries.producer_acquire(query_state)"),
    ],
    ids=["queries are kept", "gradients are kept", "the buffer is never free", "nobody ends", "keys are kept", "queries come unasked"],
)
def test_a_missing_arrival_is_a_deadlock(change, monkeypatch):
    monkeypatch.setattr(simulated, "PATIENCE", 2.0)
    with pytest.raises((Stuck, AssertionError), match="waits for|arrivals"):
        run(VARIANTS["causal"], change=change, heads=2, head_dim=128, q_len=400, kv_len=200, blocks_of_threads=1)


def test_a_missing_fence_is_noticed():
    with pytest.raises(AssertionError, match="before its writer's fence"):
        run(VARIANTS["causal"], change=without("steps.publish_shared()"), heads=1, head_dim=128)


@pytest.mark.parametrize(
    "line, moved",
    [
        (r"( +warpgroup\.wait_group\(0\)[^\n]*\n)( +queries\.consumer_release\(query_state\)\n)", r"\2\1"),
        (r" +side = side \^ 1\n", ""),
    ],
    ids=["queries released too early", "one buffer of scores"],
)
def test_an_operand_that_changes_is_noticed(line, moved, monkeypatch):
    waited = simulated_backward.Machine.wait_group

    def slow(machine, count: int) -> None:
        """The other warpgroup's products take longer."""
        if simulated_backward._here.warp >= 8:
            time.sleep(5e-3)
        waited(machine, count)

    monkeypatch.setattr(simulated_backward.Machine, "wait_group", slow)

    def attempt(seed: int) -> bool:
        try:
            run(
                VARIANTS["causal"],
                change=lambda text: re.sub(line, moved, text),
                seed=seed,
                heads=1,
                head_dim=128,
                q_len=900,
                kv_len=100,
            )
        except AssertionError as error:
            assert "operand in shared memory changed" in str(error)
            return True
        return False

    assert any(attempt(seed) for seed in range(6))


def test_registers_of_a_running_product_are_not_touched():
    with pytest.raises(AssertionError, match="registers read while a product writes them"):
        run(VARIANTS["causal"], change=without("warpgroup.wait_group(1)  # the scores are done"), head_dim=128)
