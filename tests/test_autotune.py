"""The search for tiles: which are tried, how the compiler's refusals are counted, where winners are kept, and one kernel run alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flexc
from flexc import autotune, backends, frontend, pipeline
from flexc.autotune import alone, chosen, search, with_tiles
from flexc.backends import Options, Shapes
from flexc.codegen.triton import Tile, candidates, known_tiles
from flexc.errors import InternalError, ToolchainError
from flexc.launch import Launch
from flexc.target import Target
from tests.accuracy import qkv
from tests.contract.interpreter import interpreting_workers

HOPPER = Target.parse("sm_90a")
CPU = torch.device("cpu")
SHAPES = Shapes(1, 2, 2, 300, 300, 64, 64, torch.float16)


class PTXASError(RuntimeError):
    """As Triton's own is called."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty disk cache."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def nothing_remembered():
    autotune._tuned.clear()


def launched(shapes=SHAPES, mask=flexc.masks.causal, reason="a test"):
    """A launch for a GPU that need not be here, and its trace."""
    trace, binding = frontend.trace(None, mask)
    artifact = pipeline.artifact_for(trace, shapes, HOPPER, backends.TRITON, reason, Options(), "attention")
    return Launch(artifact, shapes, 0.125, binding.scalars, Options(), "attention"), trace


def tiles_of(kernel):
    return candidates(kernel, HOPPER, "float16", 64, 64)


def by_number(trial, kernel):
    """A made-up time: later candidates are faster, except that the last one is slowest."""
    (tile,) = [tile for name, tile in trial.options.tiles if name == kernel]
    place = tiles_of(kernel).index(tile)
    return 10.0 - place if place < len(tiles_of(kernel)) - 1 else 20.0


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_the_fastest_plausible_tile_is_kept(kernel):
    launch, trace = launched()
    found = search(launch, trace, kernel, by_number)
    assert [tile for tile, _ in found.times] == tiles_of(kernel) and not found.refused
    assert found.best == tiles_of(kernel)[-2]
    assert found.left_out == known_tiles(kernel, HOPPER, "float16") - len(tiles_of(kernel)) > 0


def test_only_the_searched_kernels_tile_changes():
    launch, trace = launched()
    seen = []

    def time(trial, kernel):
        seen.append((kernel, trial.artifact.plan))
        return 1.0

    for kernel in ("dq", "dkv"):
        search(launch, trace, kernel, time)
    default = launch.artifact.plan
    for kernel, plan in seen:
        others = {"forward", "dq", "dkv"} - {kernel}
        assert all(getattr(plan, other) == getattr(default, other) for other in others)
    assert {plan.dq for kernel, plan in seen if kernel == "dq"} == set(tiles_of("dq"))


@pytest.mark.parametrize(
    "error", [PTXASError("register allocation failed\nmore"), RuntimeError("PassManager::run failed"), IndexError("map::at")], ids=repr
)
def test_a_refused_tile_is_skipped_and_counted(error):
    launch, trace = launched()
    bad = tiles_of("dq")[1]

    def time(trial, kernel):
        if dict(trial.options.tiles)[kernel] == bad:
            raise error
        return by_number(trial, kernel)

    found = search(launch, trace, "dq", time)
    ((tile, reason),) = found.refused
    assert tile == bad and reason == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert bad not in dict(found.times) and len(found.times) == len(tiles_of("dq")) - 1
    assert str(found) == f"dq {found.best} ({len(found.times)} timed, {found.left_out} left out, 1 refused)"


def test_out_of_resources_is_a_refusal():
    from triton.runtime.errors import OutOfResources

    launch, trace = launched()
    first = tiles_of("forward")[0]

    def time(trial, kernel):
        if dict(trial.options.tiles)[kernel] == first:
            raise OutOfResources(300000, 232448, "shared memory")
        return 1.0

    ((tile, reason),) = search(launch, trace, "forward", time).refused
    assert tile == first and "shared memory" in reason


def test_if_every_tile_is_refused_all_reasons_are_told():
    launch, trace = launched()

    def time(trial, kernel):
        raise PTXASError(f"no room for {dict(trial.options.tiles)[kernel]}")

    with pytest.raises(ToolchainError, match="no tile of the dkv kernel of attention compiles for sm_90a") as caught:
        search(launch, trace, "dkv", time)
    for tile in tiles_of("dkv"):
        assert f"{tile}: PTXASError: no room for {tile}" in str(caught.value)


@pytest.mark.parametrize(
    "error", [InternalError("a bug"), torch.OutOfMemoryError("full"), RuntimeError("CUDA error: an illegal memory access")], ids=repr
)
def test_faults_are_not_refusals(error):
    launch, trace = launched()

    def time(trial, kernel):
        raise error

    with pytest.raises(type(error), match=str(error)):
        search(launch, trace, "forward", time)


def test_the_reason_tells_what_was_found(cache):
    launch, trace = launched()
    winner = chosen(launch, trace, (), CPU, lambda: by_number)
    plan = winner.artifact.plan
    assert (plan.forward, plan.dq, plan.dkv) == tuple(tiles_of(kernel)[-2] for kernel in ("forward", "dq", "dkv"))
    assert winner.artifact.reason.startswith("a test; tiles: forward ")
    for kernel in ("forward", "dq", "dkv"):
        assert f"{kernel} {getattr(plan, kernel)} ({len(tiles_of(kernel))} timed, " in winner.artifact.reason


def test_winners_are_kept_in_memory_and_on_disk(cache):
    launch, trace = launched()
    winner = chosen(launch, trace, (), CPU, lambda: by_number)

    def none():
        raise AssertionError("timed again")

    assert chosen(launch, trace, (), CPU, none).artifact is winner.artifact
    autotune._tuned.clear()
    assert chosen(launch, trace, (), CPU, none).artifact is winner.artifact


def test_other_lengths_and_other_sparsity_are_searched_again(cache):
    launch, trace = launched()
    chosen(launch, trace, (), CPU, lambda: by_number)
    timers = []

    def timer():
        timers.append(1)
        return by_number

    longer, longer_trace = launched(dataclasses.replace(SHAPES, q_len=3000, kv_len=3000))
    chosen(longer, longer_trace, (), CPU, timer)
    assert len(timers) == 1


def test_nothing_is_chosen_where_there_is_no_gpu():
    launch, trace = launched()
    q, k, v = qkv(q_len=20)
    assert autotune.tuned(launch, trace, q, k, v, ()) is launch


@pytest.mark.parametrize("backend", [backends.HOPPER, backends.CUTE], ids=["auto", "cute"])
def test_tiles_of_cute_kernels_are_searched_and_kept_too(backend, cache):
    trace, binding = frontend.trace(None, flexc.masks.causal)
    shapes = dataclasses.replace(SHAPES, head_dim=128, head_dim_v=128)
    artifact = pipeline.artifact_for(trace, shapes, HOPPER, backend, f"{backend is backends.CUTE}", Options(), "attention")
    launch = Launch(artifact, shapes, 0.125, binding.scalars, Options(), "attention")
    forward, backward = autotune.spaces(launch)
    assert (forward.kernel, backward.kernel) == ("forward", "backward") and len(forward.tiles) > 1
    assert backward.tiles[0] == artifact.for_backward(shapes, Options()).plan.backward, "the default is among the tiles, and comes first"

    def last_is_best(trial, kernel):
        space = next(space for space in (forward, backward) if space.kernel == kernel)
        return -float(space.tiles.index(dict(trial.options.tiles)[kernel]))

    winner = chosen(launch, trace, (), CPU, lambda: last_is_best)
    assert winner.artifact.plan.forward == forward.tiles[-1] != artifact.plan.forward and winner.artifact.backend is backend
    assert winner.artifact.for_backward(shapes, winner.options).plan.backward == backward.tiles[-1]
    autotune._tuned.clear()
    assert chosen(launch, trace, (), CPU, lambda: pytest.fail("timed again")).artifact is winner.artifact


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_that_add_in_no_fixed_order_are_not_tried_in_a_deterministic_kernel(deterministic, cache):
    trace, binding = frontend.trace(None, None)
    shapes, options = dataclasses.replace(SHAPES, head_dim=256, head_dim_v=256), Options(deterministic=deterministic)
    artifact = pipeline.artifact_for(trace, shapes, HOPPER, backends.CUTE, "asked for", options, "attention")
    _, backward = autotune.spaces(Launch(artifact, shapes, 0.125, binding.scalars, options, "attention"))
    assert any(tile.direct for tile in backward.tiles) is not deterministic and not all(tile.direct for tile in backward.tiles)


# --- one kernel alone ----------------------------------------------------------------------------------------------------------------


def each_kernel_alone() -> str:
    """In the interpreter: the kernel under test does its work, the others are not even launched, and the artifact's own module is whole."""
    q, k, v = qkv(1, 2, 2, 70, 70, 16)
    shapes = Shapes(1, 2, 2, 70, 70, 16, 16, torch.float32)
    launch, trace = launched(shapes)
    launch = with_tiles(launch, trace, {"dq": Tile(32, 32, 8, 1), "dkv": Tile(32, 32, 8, 1)})
    out, lse = launch.forward(q, k, v, [])
    dout = torch.ones_like(out)
    whole = launch.backward(q, k, v, out, lse, dout, None, [])
    wrong = []
    for kernel, mine in (("dq", (0,)), ("dkv", (1, 2))):
        single = alone(launch, kernel)
        launched_kernels = [
            n for n in ("forward", "dq", "dkv") if not isinstance(getattr(single.artifact.module, f"{n}_kernel"), autotune._Skipped)
        ]
        if launched_kernels != [kernel]:
            wrong.append(f"{launched_kernels} run, expected {kernel}")
        found = single.backward(q, k, v, out, lse, dout, None, [])
        wrong += [f"{kernel}: gradient {i} differs" for i in mine if not torch.equal(found[i], whole[i])]
    again = launch.backward(q, k, v, out, lse, dout, None, [])
    if not all(torch.equal(x, y) for x, y in zip(again, whole)):
        wrong.append("the artifact's own module was changed")
    if not torch.equal(alone(launch, "forward").forward(q, k, v, [])[0], out):
        wrong.append("forward differs")
    return "; ".join(wrong)


@pytest.mark.interpret
def test_each_kernel_runs_alone():
    with interpreting_workers() as pool:
        assert not pool.submit(each_kernel_alone).result()


@pytest.mark.gpu
def test_autotune_on_a_gpu():
    q, k, v = qkv(1, 4, 2, 500, 500, 64, dtype=torch.float16, device="cuda", grad=True)
    kernel = flexc.attention(None, flexc.masks.causal, backend="triton", autotune=True)
    plain = flexc.attention(None, flexc.masks.causal, backend="triton")
    torch.testing.assert_close(kernel(q, k, v), plain(q, k, v), rtol=1e-2, atol=1e-2)
    for name in ("forward", "dq", "dkv"):
        assert f"{name} {getattr(kernel.plan, name)} (" in kernel.reason


def test_on_a_gpu_blocks_are_counted_once_for_all_contents_of_a_mask(monkeypatch):
    """Counting waits for the device: later calls of the same lengths take what the first one saw."""
    counted = []

    class Counting:
        def blocks(self, launch, block, tensors, device):
            counted.append(launch.shapes.q_len)
            return flexc.block_map(flexc.masks.causal, launch.shapes.q_len, launch.shapes.kv_len, block=block)

    monkeypatch.setattr(autotune, "MAPS", Counting())
    autotune._first_tenths.clear()
    launch, _ = launched()
    longer = dataclasses.replace(launch, shapes=dataclasses.replace(SHAPES, q_len=5000, kv_len=5000))
    sizes = [autotune._sizes(each, (), torch.device("cuda")) for each in (launch, launch, longer, longer, launch)]
    assert counted == [300, 5000] and sizes[0] == sizes[1] == sizes[4] != sizes[2] == sizes[3]
