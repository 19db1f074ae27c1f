"""Whole kernels, run warp by warp on the CPU: right results, in every way of handing out tiles; and what the simulation notices."""

from __future__ import annotations

import re

import pytest
import torch

import flexc
from flexc import frontend, passes, sparsity
from flexc.codegen.cute import Tile, emit
from flexc.codegen.cute.kernel import print_kernel
from flexc.pipeline import MaskAlone
from tests.accuracy import assert_as_accurate_as_eager
from tests.codegen.cute import simulated
from tests.codegen.cute.simulated import Stuck, simulate
from tests.codegen.cute.texts import HOPPER, VARIANTS, lowered, planned


def run(functions, *, head_dim=64, head_dim_v=None, tile=None, dtype=torch.bfloat16, seed=0, change=None, max_scores=False, **given):
    """(out, lse, the inputs, and the largest scores if asked for) of the kernel for these functions, whose text `change` may edit.

    Sizes and options of `simulate`: `given`.
    """
    batch, heads, kv_heads = given.pop("batch", 1), given.pop("heads", 2), given.pop("kv_heads", 1)
    q_len, kv_len = given.pop("q_len", 300), given.pop("kv_len", 300)
    head_dim_v = head_dim_v or head_dim
    random = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, n, length, width, generator=random).to(dtype)
        for n, length, width in ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, head_dim_v))
    )
    graph = lowered(*functions)
    name = str(dtype).removeprefix("torch.")
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, "group": heads // kv_heads}
    plan = planned(graph, dtype=name, **sizes, tile=tile, max_scores=max_scores)
    text = emit(graph, plan, HOPPER)
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
            block=(plan.forward.rows, plan.forward.columns),
            tensors=[binding.tensors[slot] for slot in alone.tensor_slots],
            scalars=[binding.scalars[slot] for slot in alone.scalar_slots],
            device=torch.device("cpu"),
        ).row_walk()
    kernel = print_kernel(graph, approximate=plan.approximate, exact=plan.exact, diagonals=True, votes=plan.forward.votes)
    staged = [*kernel.staged, *kernel.diagonals]
    out, lse, *largest = simulate(
        text, plan, q, k, v, head_dim**-0.5, binding.tensors, binding.scalars, walk, staged=staged, seed=seed, **given
    )
    return out, lse, (q, k, v), *largest


def check(functions, **given) -> None:
    out, lse, inputs = run(functions, **given)
    truth, true_lse = flexc.reference(*functions, *inputs)
    eager, _ = flexc.reference.__globals__["eager"](*functions, *inputs)
    assert_as_accurate_as_eager(out, eager, truth)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(true_lse))
    torch.testing.assert_close(lse, true_lse.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_computes_its_variant(name):
    check(VARIANTS[name])


EAGER = Tile(128, 64, 2, True, "dynamic", votes=True, eager=True)
CASES = {
    "a queue of tiles, grouped heads": (
        "causal",
        {"batch": 2, "heads": 4, "kv_heads": 2, "kv_len": 200, "tile": Tile(128, 64, 2, True, "dynamic")},
    ),
    "three stages, fixed strides": (
        "window",
        {"batch": 2, "q_len": 260, "kv_len": 400, "head_dim": 96, "tile": Tile(128, 64, 3, True, "static")},
    ),
    "out over queries, a queue": ("plain", {"kv_len": 500, "head_dim": 128, "tile": Tile(128, 176, 2, True, "dynamic")}),
    "out over queries, rows without keys": (
        "hole",
        {"q_len": 500, "head_dim": 192, "head_dim_v": 128, "tile": Tile(128, 128, 2, False, "static")},
    ),
    "three warpgroups in turns, ragged dims": ("documents", {"head_dim": 72, "head_dim_v": 40, "tile": Tile(192, 64, 2, True, "dynamic")}),
    "one warpgroup": ("key bias", {"tile": Tile(64, 128, 2, False, "dynamic")}),
    "a block wider than a word of bits": ("window", {"tile": Tile(128, 176)}),
    "few tokens": ("plain", {"q_len": 5, "kv_len": 3}),
    "one key": ("causal", {"q_len": 64, "kv_len": 1}),
    "float16, bounded": ("softcap", {"dtype": torch.float16}),
    "wide heads": ("alibi", {"head_dim": 256, "q_len": 140}),
    "diagonals in one warpgroup": ("relative bias", {"tile": Tile(64, 128, 2, False, "dynamic")}),
    "diagonals of ragged tiles, grouped heads": (
        "bucketed",
        {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 77, "kv_len": 333, "head_dim": 72, "head_dim_v": 40, "tile": Tile(128, 64)},
    ),
    "values of keys by votes": ("documents", {"tile": Tile(128, 160, 2, True, "dynamic", votes=True)}),
    "truth values of keys by votes": ("flags", {"tile": Tile(128, 64, 2, True, "dynamic", votes=True)}),
    "the next tile's first product, a queue": ("documents", {"q_len": 500, "heads": 4, "blocks": 2, "tile": EAGER}),
    "the next tile's first product, rows without keys": ("hole", {"q_len": 500, "heads": 4, "blocks": 1, "tile": EAGER}),
    "the next tile's first product, fixed strides": (
        "plain",
        {"q_len": 500, "kv_len": 150, "heads": 4, "blocks": 2, "tile": Tile(128, 160, 2, True, "static", eager=True)},
    ),
    "the next tile's first product, values of keys": ("key bias", {"q_len": 400, "blocks": 1, "tile": EAGER}),
    "the next tile's first product, bounded, three warpgroups": (
        "softcap",
        {"q_len": 400, "blocks": 1, "tile": Tile(192, 64, 2, True, "dynamic", eager=True)},
    ),
    "heads of a cluster": (
        "plain",
        {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 200, "head_dim": 128, "blocks": 4, "tile": Tile(128, 160, 2, True, "static", 2)},
    ),
    "code for each warpgroup, rows without keys": ("hole", {"q_len": 200, "head_dim": 160, "head_dim_v": 256, "heads": 1}),
    "diagonals, more queries than keys": ("bucketed", {"q_len": 390, "kv_len": 100, "tile": Tile(128, 176, 2, True, "static")}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_in_every_shape(case):
    name, given = CASES[case]
    check(VARIANTS[name], **given)


@pytest.mark.parametrize("name", ["plain", "hole", "alibi", "softcap"])
def test_a_kernel_returns_the_largest_scores(name):
    """Of a row without keys too, of a score whose part of the row is taken out of the loop, and of one that needs no maximum by itself."""
    out, lse, (q, k, _), largest = run(VARIANTS[name], max_scores=True, q_len=150)
    truth = flexc.reference.__globals__["largest_scores"](*VARIANTS[name], q, k).float()
    torch.testing.assert_close(largest, truth, rtol=1e-5, atol=1e-5)
    plain = run(VARIANTS[name], q_len=150)
    torch.testing.assert_close(lse, plain[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float(), plain[0].float(), rtol=1e-2, atol=1e-2)


IDS = torch.randint(-3, 4, (300,), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
IDS[5::7] = 2**31 - 1


@pytest.mark.parametrize("tile", [Tile(128, 128, votes=True), EAGER])
def test_any_values_are_compared_by_votes(tile):
    """More of them in a warp's rows than rows of one value, the largest number too."""

    def alike(batch, head, q_idx, kv_idx):
        return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)

    check((None, alike), tile=tile)


def test_a_factor_of_the_head_is_that_of_the_finished_tile():
    """lse and output of a tile are written when the next one has begun."""
    factors = torch.linspace(0.5, 2, 4)

    def scaled(score, batch, head, q_idx, kv_idx):
        return score * factors[head]

    check((scaled, VARIANTS["hole"][1]), tile=EAGER, heads=4, q_len=400, blocks=1)


def rising(slope):
    """Scores that grow or fall by `slope` a key: the later keys of a row outgrow its earlier maximum, or never do."""

    def score_mod(score, batch, head, q_idx, kv_idx):
        return score + slope * kv_idx

    return score_mod


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.06, 0.5, 3.0, -0.5])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_maximum_is_kept_until_scores_outgrow_it(head_dim, slope):
    """Blocks of 64 keys; the slack is 8 in base 2, so that at 0.06 a key every other block or so makes a row's output shrink."""
    sizes = {"head_dim": head_dim, "heads": 1, "q_len": 80, "kv_len": 400, "tile": Tile(128, 64, 2, False, "static")}
    check((rising(slope), VARIANTS["hole"][1]), **sizes)


def test_a_maximum_that_is_never_renewed_is_noticed():
    def change(text: str) -> str:
        return text.replace("if grown:", "if False:")

    functions, sizes = (rising(-0.5), None), {"heads": 1, "q_len": 80, "kv_len": 400, "tile": Tile(128, 64, 2, False, "static")}
    wrong, right = run(functions, change=change, **sizes), run(functions, **sizes)
    assert (wrong[0].float() - right[0].float()).abs().max() > 0.05


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
        without("keys.consumer_release(key_state)"),
        without("tiles.pass_turn(group, GROUPS)", 1),
        without("queries.consumer_release(query_state)"),
        without("values.producer_acquire(value_state)"),
    ],
    ids=["keys are kept", "nobody begins", "queries are kept", "values come unasked"],
)
def test_a_missing_arrival_is_a_deadlock(change, monkeypatch):
    monkeypatch.setattr(simulated, "PATIENCE", 2.0)
    with pytest.raises((Stuck, AssertionError), match="waits for|arrivals"):
        run(VARIANTS["causal"], tile=Tile(128, 64, 2, True, "static"), change=change, blocks=1, q_len=400, kv_len=400)


def test_a_stage_released_too_early_is_noticed():
    def change(text: str) -> str:
        return re.sub(r"( +warpgroup\.wait_group\(1\)[^\n]*\n)( +keys\.consumer_release\(key_state\)\n)", r"\2\1", text)

    def attempt(seed: int) -> bool:
        try:
            run(VARIANTS["causal"], tile=Tile(128, 64), change=change, seed=seed, q_len=600, kv_len=600, heads=1)
        except AssertionError as error:
            assert "operand in shared memory changed" in str(error)
            return True
        return False

    assert any(attempt(seed) for seed in range(6))


def test_registers_of_a_running_product_are_not_touched():
    with pytest.raises(AssertionError, match="registers read while a product writes them"):
        run(VARIANTS["causal"], tile=Tile(128, 64), change=without("warpgroup.wait_group(1)"))
