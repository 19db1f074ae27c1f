"""Whole backward kernels, run warp by warp on the CPU: right gradients in every shape; and what the simulation notices."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch

import flexc
from flexc import frontend, passes, sparsity
from flexc.codegen.cute.backward import emit_backward
from flexc.codegen.cute.backward_kernel import print_backward
from flexc.codegen.cute.backward_plan import BackwardTile, make_backward_plan
from flexc.codegen.cute.backward_terms import gradient_slots
from flexc.pipeline import MaskAlone
from flexc.reference import eager
from tests.accuracy import assert_as_accurate_as_eager, distance
from tests.codegen.cute import simulated, simulated_backward, stand_in
from tests.codegen.cute.simulated import Stuck
from tests.codegen.cute.simulated_backward import simulate_backward
from tests.codegen.cute.texts import HOPPER, VARIANTS, causal, lowered, window


def run(functions, *, head_dim=64, head_dim_v=None, tile=None, dtype=torch.bfloat16, seed=0, change=None, **given):
    """(gradients, a function of the attention that gives true ones) of the kernels for these functions, whose text `change` may edit."""
    batch, heads, kv_heads = given.pop("batch", 1), given.pop("heads", 2), given.pop("kv_heads", 1)
    q_len, kv_len, with_lse = given.pop("q_len", 200), given.pop("kv_len", 200), given.pop("with_lse", False)
    head_dim_v, deterministic = head_dim_v or head_dim, given.pop("deterministic", False)
    random = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, length, width, generator=random).to(dtype).requires_grad_()
        for n, length, width in ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim_v))
    )
    graph = lowered(*functions)
    name = str(dtype).removeprefix("torch.")
    sizes = {"dtype": name, "head_dim": head_dim, "head_dim_v": head_dim_v, "group": heads // kv_heads}
    plan = make_backward_plan(graph, HOPPER, **sizes, deterministic=deterministic, tile=tile)
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
    if given.pop("cancels", False):
        with torch.no_grad():
            q[:, 1::2] = q[:, ::2]
        truth, true_lse = flexc.reference(*functions, q, k, v)
        dout[:, 1::2] = dout[:, 1::2] / 64 - dout[:, ::2]
    dlse = torch.randn(true_lse.shape, generator=random) if with_lse else None
    kernel = print_backward(graph, approximate=plan.approximate, exact=plan.exact)
    slots = gradient_slots(graph)
    learned = [binding.tensors[slot] for slot in slots]

    def true(attention):
        out, lse = attention(*functions, q, k, v)
        loss = (out * dout).sum()
        if with_lse:
            loss = loss + torch.where(lse.isfinite(), lse * dlse, 0.0).sum()
        return torch.autograd.grad(loss, (q, k, v, *learned))

    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = flexc.reference(*functions, *doubles)
    loss = (out * dout.double()).sum()
    if with_lse:
        loss = loss + torch.where(lse.isfinite(), lse * dlse.double(), 0.0).sum()
    truths = torch.autograd.grad(loss, (*doubles, *learned))
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
        gradients=slots,
        seed=seed,
        **given,
    )
    return found, rough, truths


def check(functions, **given) -> None:
    gradients = run(functions, **given)
    names = ["dq", "dk", "dv", *(f"captured {n}" for n in range(len(gradients[0]) - 3))]
    for name, found, rough, truth in zip(names, *gradients, strict=True):
        try:
            assert_as_accurate_as_eager(found, rough, truth, floor=5e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compute_the_gradients_of_their_variant(name):
    check(VARIANTS[name], head_dim=128, q_len=170, kv_len=190)


QUEUE, APART = BackwardTile(64, 128, queue=True), BackwardTile(64, 128, queue=True, apart=True)
ROWS_80, ROWS_80_SMALL = BackwardTile(80, 128), BackwardTile(80, 128, stages=1)
WIDE_KEYS = {"head_dim": 192, "head_dim_v": 128}
IN_TURN = {"head_dim": 128, "deterministic": True, "blocks_of_threads": 3, "at_once": 3}
CASES = {
    "grouped heads, a short head": ("causal", {"batch": 2, "heads": 4, "kv_heads": 2, "kv_len": 100, "with_lse": True}),
    "head dimension 64": ("alibi", {"heads": 1, "q_len": 300, "kv_len": 140}),
    "padded": ("documents", {"head_dim": 72, "head_dim_v": 40}),
    "rows without keys": ("hole", {"head_dim": 128, "q_len": 230, "kv_len": 200, "with_lse": True}),
    "by dims, both of 192": ("causal", {"head_dim": 192, "q_len": 100, "kv_len": 130, "with_lse": True}),
    "by dims": ("leaky", {"head_dim": 192, "head_dim_v": 128, "q_len": 100, "kv_len": 130}),
    "by dims, both of 192, a window": ("window", {"head_dim": 192, "heads": 4, "kv_heads": 2, "q_len": 170, "kv_len": 150}),
    "by dims, padded to 192": ("documents", {"head_dim": 140, "head_dim_v": 136, "q_len": 130, "kv_len": 70}),
    "by dims, 192 and 256": ("causal", {"head_dim": 192, "head_dim_v": 256, "heads": 1, "q_len": 100, "kv_len": 130}),
    "by dims, 128 queries": (
        "causal",
        {"head_dim": 192, "head_dim_v": 128, "q_len": 170, "kv_len": 130, "tile": BackwardTile(128, 64, "dims", 1, direct=True)},
    ),
    "48 queries": ("plain", {**WIDE_KEYS, "batch": 2, "q_len": 130, "kv_len": 190, "with_lse": True}),
    "48 queries, grouped": ("causal", {**WIDE_KEYS, "heads": 4, "q_len": 150, "kv_len": 170, "with_lse": True}),
    "48 queries, a soft cap": ("softcap", {**WIDE_KEYS, "q_len": 100, "kv_len": 130}),
    "48 queries, a window": ("window", {**WIDE_KEYS, "heads": 3, "kv_heads": 3, "q_len": 260, "kv_len": 300}),
    "48 queries, values staged": ("documents", {**WIDE_KEYS, "q_len": 170, "kv_len": 190}),
    "48 queries, padded": ("hole", {"head_dim": 136, "head_dim_v": 40, "q_len": 170, "kv_len": 190}),
    "48 queries, wide values": ("alibi", {"head_dim": 100, "head_dim_v": 192, "q_len": 130, "kv_len": 190, "with_lse": True}),
    "48 queries, added from registers": ("causal", {**WIDE_KEYS, "q_len": 130, "kv_len": 190, "tile": BackwardTile(48, 128, direct=True)}),
    "48 queries, few": ("plain", {**WIDE_KEYS, "q_len": 5, "kv_len": 3}),
    "by dims, wide": ("window", {"head_dim": 256, "q_len": 130, "kv_len": 100}),
    "by dims, values staged": ("documents", {"head_dim": 130, "q_len": 130, "kv_len": 100}),
    "by dims, a queue": (
        "causal",
        {"head_dim": 192, "head_dim_v": 128, "q_len": 100, "kv_len": 130, "tile": BackwardTile(64, 64, "dims", 1, queue=True)},
    ),
    "a queue, heads without keys, many tiles": (
        "hole",
        {"head_dim": 128, "heads": 4, "q_len": 130, "tile": QUEUE, "blocks_of_threads": 1},
    ),
    "a queue, values staged": (
        "documents",
        {"heads": 3, "kv_heads": 3, "tile": BackwardTile(128, 128, queue=True), "blocks_of_threads": 1},
    ),
    "a queue, gradients of values apart": ("causal", {"head_dim": 128, "batch": 2, "q_len": 170, "kv_len": 390, "tile": APART}),
    "a queue, gradients of values apart, one block of threads": (
        "window",
        {"head_dim": 128, "heads": 4, "kv_heads": 4, "q_len": 270, "kv_len": 290, "tile": APART, "blocks_of_threads": 1},
    ),
    "a queue, tiles of a query head": (
        "causal",
        {"head_dim": 128, "batch": 2, "heads": 4, "kv_heads": 2, "q_len": 170, "kv_len": 190, "with_lse": True},
    ),
    "a queue, tiles of a query head, values staged": (
        "documents",
        {"head_dim": 128, "heads": 4, "q_len": 170, "kv_len": 190},
    ),
    "a block of threads for each tile": ("causal", {"head_dim": 128, "tile": BackwardTile(64, 128)}),
    "64 queries, grouped": ("plain", {"head_dim": 128, "q_len": 170, "kv_len": 190, "with_lse": True, "tile": BackwardTile(64, 128)}),
    "80 queries, grouped": ("alibi", {"head_dim": 128, "heads": 4, "q_len": 333, "kv_len": 200, "with_lse": True, "tile": ROWS_80}),
    "80 queries, a mask": ("causal", {"head_dim": 128, "q_len": 170, "kv_len": 190, "tile": ROWS_80}),
    "80 queries, values staged": ("documents", {"head_dim": 128, "heads": 1, "q_len": 170, "kv_len": 190, "tile": ROWS_80_SMALL}),
    "few tokens": ("plain", {"q_len": 5, "kv_len": 3, "head_dim": 128}),
    "in turn": ("plain", {"head_dim": 128, "batch": 2, "q_len": 150, "kv_len": 300, "deterministic": True}),
    "in turn, a queue": (
        "plain",
        {
            "head_dim": 128,
            "heads": 3,
            "kv_heads": 3,
            "q_len": 150,
            "kv_len": 300,
            "deterministic": True,
            "tile": QUEUE,
            "blocks_of_threads": 1,
        },
    ),
    "in turn, grouped": ("plain", {"head_dim": 64, "heads": 4, "kv_heads": 2, "q_len": 200, "kv_len": 300, "deterministic": True}),
    "in turn, by dims": ("plain", {"head_dim": 192, "q_len": 130, "kv_len": 200, "deterministic": True}),
    "in turn, 48 queries": ("plain", {**WIDE_KEYS, "heads": 4, "kv_heads": 2, "q_len": 130, "kv_len": 300, "deterministic": True}),
    "in turn, a mask, 192 and 128": ("prefix", {"q_len": 130, "kv_len": 270, **IN_TURN, **WIDE_KEYS}),
    "in turn, a mask": ("causal", {"q_len": 250, "kv_len": 280, **IN_TURN, "with_lse": True}),
    "in turn, a mask, grouped": ("window", {"batch": 2, "q_len": 300, "kv_len": 260, **IN_TURN}),
    "in turn, keys without queries": ("hole", {"q_len": 230, "kv_len": 600, **IN_TURN}),
    "in turn, values staged, a block for each tile": (
        "documents",
        {"heads": 4, "kv_heads": 2, "q_len": 200, "kv_len": 280, **IN_TURN, "head_dim": 64},
    ),
    "in turn, a mask, by dims": ("prefix", {"q_len": 130, "kv_len": 270, **IN_TURN, "head_dim": 192}),
    "one key": ("causal", {"q_len": 64, "kv_len": 1}),
    "ragged, dense": ("plain", {"q_len": 70, "kv_len": 300, "with_lse": True}),
    "float16": ("softcap", {"dtype": torch.float16, "head_dim": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_in_every_shape(case):
    name, given = CASES[case]
    check(VARIANTS[name], **given)


@pytest.mark.parametrize("case", ["causal", "plain"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_a_group_are_rounded_once(case, deterministic):
    """What the heads of a group add to gradients of values cancels but for a 64th: roundings of each head's part would be a tenth of it."""
    sizes = {"heads": 4, "kv_heads": 1, "q_len": 150, "kv_len": 140, "head_dim": 128}
    found, _, truths = run(VARIANTS[case], **sizes, deterministic=deterministic, cancels=True)
    assert distance(found[2], truths[2]) < 2**-7 * truths[2].abs().max()


TURNS = {
    "ragged": ("causal", {"heads": 1, "q_len": 300, "kv_len": 330}),
    "grouped, window": ("window", {"q_len": 200, "kv_len": 260}),
    "documents": ("documents", {"heads": 1, "q_len": 260, "kv_len": 260}),
    "a block for each tile": ("hole", {"heads": 1, "q_len": 300, "kv_len": 400, "head_dim": 64}),
}


@pytest.mark.parametrize("case", TURNS)
def test_in_turn_the_same_bits_come_whichever_block_of_threads_is_faster(case, monkeypatch):
    name, given = TURNS[case]
    given = {**IN_TURN, **given}
    slept, turn = [], simulated_backward.Machine.wait_for_turn

    def tired(machine, *values) -> None:
        """Another block of threads falls behind in each run."""
        if simulated_backward._here.block.number == len(slept):
            time.sleep(2e-2)
        turn(machine, *values)

    monkeypatch.setattr(simulated_backward.Machine, "wait_for_turn", tired)
    first, *others = [(slept.append(0), run(VARIANTS[name], **given)[0])[1] for _ in range(3)]
    for found in others:
        assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))


STEPS = stand_in.library_of("cute_backward_tiles", vars(stand_in.tile_library()), {})


@pytest.mark.parametrize("full, found", [([(3, 5)], 2), ([(8, 9)], 1), ([(0, 1)], 4), ([(0, 1), (3, 6)], 2), ([(11, 12)], 0), ([], 4)])
def test_partial_blocks_behind_the_last_full_one(full, found):
    """Where none is full, all are."""
    partial, runs = (stand_in.captured_memory(torch.tensor(x, dtype=torch.int32)) for x in ([7, 1, 2, 7, 10, 0], [(3, 3), *full]))
    first, count, run, runs_count = (stand_in.Int32(x) for x in (1, 4, 1, len(full)))
    assert int(STEPS.blocks_behind(partial, first, count, runs, run, runs_count)) == found


@pytest.mark.parametrize("count", [1, 16, 37])
def test_sums_before_each_of_many(count):
    numbers = torch.randint(0, 2, (count, 40), generator=torch.Generator().manual_seed(count), dtype=torch.int32)
    memory, lanes = stand_in.captured_memory(numbers.clone()), stand_in.Int32(np.arange(32))
    STEPS.sums_before(memory.iterator + lanes, stand_in.Int32(count), stand_in.Int32(40), lanes < 30)
    sums = torch.from_numpy(memory.flat).view(count, 40)
    assert torch.equal(sums[:, :30], (numbers.cumsum(0) - numbers)[:, :30]) and torch.equal(sums[:, 30:], numbers[:, 30:])


# --- gradients of captured tensors ------------------------------------------------------------------------------------------------------


def learned(values: torch.Tensor) -> torch.Tensor:
    return values.clone().requires_grad_()


SLOPES = learned(torch.linspace(0.05, 0.6, 4))
TEMPERATURE = learned(torch.tensor(0.8))
PLACES = torch.tensor([2, 0, 3, 1])
ENTRIES = learned(torch.linspace(0.5, 1.5, 6).reshape(2, 3))
KEYS = learned(torch.linspace(-1, 1, 250))
KEYS_OF_HEADS = learned(torch.randn(4, 250, generator=torch.Generator().manual_seed(1)))


def alibi(score, batch, head, q_idx, kv_idx):
    return score - SLOPES[head] * (q_idx - kv_idx)


def temperature(score, batch, head, q_idx, kv_idx):
    return score * TEMPERATURE + KEYS[kv_idx]


def capped(score, batch, head, q_idx, kv_idx):
    return 20 * torch.tanh((score - SLOPES[PLACES[head]] * (q_idx - kv_idx)) / 20) + KEYS[kv_idx]


def entries(score, batch, head, q_idx, kv_idx):
    return score * ENTRIES[batch, head - 1] + SLOPES[3] * KEYS_OF_HEADS[head, kv_idx]


def roots(score, batch, head, q_idx, kv_idx):
    return score - SLOPES[head] * torch.sqrt(torch.abs(q_idx - kv_idx) + 1.0)


LEARNED = {
    "what the score and its derivative share": (roots, causal, {"head_dim": 128, "q_len": 130, "kv_len": 100, "seed": 2}),
    "slopes": (alibi, causal, {"head_dim": 128, "heads": 4, "kv_heads": 4}),
    "slopes, grouped, a block for each tile": (
        alibi,
        causal,
        {"head_dim": 128, "heads": 4, "kv_heads": 2, "tile": BackwardTile(64, 128), "q_len": 150},
    ),
    "a temperature, a bias of keys": (temperature, causal, {"head_dim": 128, "q_len": 130, "kv_len": 190}),
    "inside and outside of a soft cap": (capped, window, {"head_dim": 64, "heads": 3, "kv_heads": 3}),
    "batch and head": (entries, None, {"batch": 2, "heads": 2, "kv_heads": 1, "q_len": 100, "kv_len": 130}),
    "by dims": (capped, causal, {"head_dim": 192, "head_dim_v": 128, "q_len": 100, "kv_len": 130}),
    "48 queries": (alibi, causal, {**WIDE_KEYS, "heads": 4, "kv_heads": 2, "q_len": 150, "kv_len": 190, "seed": 1}),
}


@pytest.mark.parametrize("case", LEARNED)
def test_gradients_of_captured_tensors(case):
    score, mask, given = LEARNED[case]
    check((score, mask), **given)


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


def test_a_tile_that_has_not_begun_is_waited_for_in_vain(monkeypatch):
    """Blocks of threads begin in any order, here that of the first tile not among the first two: so they take their tiles themselves."""
    monkeypatch.setattr(simulated, "PATIENCE", 2.0)

    def by_number(text: str) -> str:
        return re.sub(r"tile = steps\.first_tile\(.*", "tile, _, _ = cute.arch.block_idx()", text)

    given = {**IN_TURN, "head_dim": 64, "at_once": 2, "heads": 1, "q_len": 500, "kv_len": 500, "seed": 2}
    run(VARIANTS["causal"], **given)
    with pytest.raises(Stuck, match="waits for"):
        run(VARIANTS["causal"], change=by_number, **given)


@pytest.mark.parametrize("line", ["steps.wait_for_turn(", "steps.end_turn("])
def test_a_missing_turn_is_noticed(line):
    with pytest.raises(AssertionError, match="turn"):
        run(
            VARIANTS["plain"],
            change=without(line),
            deterministic=True,
            tile=QUEUE,
            heads=1,
            head_dim=128,
            q_len=300,
            kv_len=300,
            blocks_of_threads=1,
        )


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
