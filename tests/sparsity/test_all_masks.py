"""Every mask of the benchmark, and random masks of every op, against brute force: `empty` and `full` are true, `partial` nearly always."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexc
from flexc.ir.eager import evaluate
from flexc.ir.graph import POSITIONS, Graph, Node, inputs_of
from flexc.sparsity import EMPTY, FULL, PARTIAL, classify
from tests import strategies
from tests.sparsity.graphs import kinds_of

FOLDER = Path(__file__).parents[2] / "benchmarks"
MOST_LOOSE = 0.01  # of all tiles


def load_patterns():
    spec = importlib.util.spec_from_file_location("benchmark_mask_patterns", FOLDER / "mask_patterns.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its types
    spec.loader.exec_module(module)
    return module


PATTERNS = load_patterns()


def kinds_by_slabs(pattern, block: int, device: str = "cpu") -> torch.Tensor:
    """The kind of every block from the user's function on tokens, one row of blocks at a time; the graph is not used."""
    with torch.device(device):
        return _kinds_by_slabs(pattern, block)


def _kinds_by_slabs(pattern, block: int) -> torch.Tensor:
    kv_idx, kinds = torch.arange(pattern.length), []
    columns = -(-pattern.length // block)
    whole = torch.arange(1, columns + 1) * block <= pattern.length
    for b in range(pattern.batch):
        for first in range(0, pattern.length, block):
            q_idx = torch.arange(first, min(first + block, pattern.length))[:, None]
            allowed = pattern.mask(b, 0, q_idx, kv_idx).expand(len(q_idx), pattern.length)
            short = columns * block - pattern.length
            some = torch.nn.functional.pad(allowed, (0, short)).view(len(q_idx), columns, block).any(-1).any(0)
            every = torch.nn.functional.pad(allowed, (0, short), value=True).view(len(q_idx), columns, block).all(-1).all(0)
            kinds.append(torch.where(every & whole, FULL, torch.where(some, PARTIAL, EMPTY)))
    return torch.stack(kinds).view(pattern.batch, 1, -1, columns).byte()


def check(name: str, length: int, block: int, device: str = "cpu") -> None:
    pattern = PATTERNS.mask_pattern(name, length, device, batch=3)
    blocks = flexc.block_map(pattern.mask, pattern.length, pattern.length, batch=pattern.batch, block=block, device=device)
    true = kinds_by_slabs(pattern, block, device)
    claimed = blocks.kind.expand_as(true)
    assert torch.equal(claimed[claimed != PARTIAL], true[claimed != PARTIAL]), "an empty or a full block is not"
    loose = (claimed == PARTIAL) & (true != PARTIAL)
    named = [tuple(place) for place in loose.nonzero()[:5].tolist()]
    assert loose.sum() < MOST_LOOSE * loose.numel(), f"{int(loose.sum())} of {loose.numel()} blocks are loose, such as {named}"
    rows, columns = torch.arange(64, device=device)[:, None], torch.arange(pattern.length, device=device)
    pairs = sum(int(pattern.mask(b, 0, rows, columns).expand(64, -1).sum()) for b in range(pattern.batch))
    head = flexc.block_map(pattern.mask, 64, pattern.length, batch=pattern.batch, block=block, device=device)
    assert head.unmasked_pairs() == pairs


@pytest.mark.parametrize("name", PATTERNS.NAMES)
@pytest.mark.parametrize("length, block", [(1024, 64), (1024, 128), (999, 32)])
def test_masks_of_the_benchmark_agree_with_brute_force(name, length, block):
    check(name, length, block)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS.NAMES)
@pytest.mark.parametrize("length", [4096, 8192, 16384])
def test_long_masks_of_the_benchmark_agree_with_brute_force(name, length):
    check(name, length, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATTERNS.NAMES)
@pytest.mark.parametrize("length, block", [(999, 32), (8192, 128), (16384, 128)])
def test_masks_of_the_benchmark_agree_with_brute_force_on_a_gpu(name, length, block):
    check(name, length, block, "cuda")


@pytest.mark.parametrize("name", PATTERNS.NAMES)
def test_certificates_of_the_benchmark_find_nothing_wrong(name):
    pattern = PATTERNS.mask_pattern(name, 1024, "cpu")
    found = flexc.block_map(pattern.mask, pattern.length, pattern.length, block=64).certify()
    true = kinds_by_slabs(pattern, 64)
    assert found.is_complete and not found.wrong
    assert found.blocks == {
        "empty": (true == EMPTY).sum(),
        "partial": (true == PARTIAL).sum() + len(found.loose),
        "full": (true == FULL).sum(),
    }


@pytest.mark.parametrize("name", PATTERNS.NAMES)
def test_a_million_tokens_are_kept_in_kilobytes(name):
    """Nothing of the size of the block matrix, 64 MiB and more, is made or kept."""
    pattern = PATTERNS.mask_pattern(name, 2**20, "cpu")
    blocks = flexc.block_map(pattern.mask, pattern.length, pattern.length)
    counts = blocks.counts()
    assert blocks.size_bytes < 16 * 2**20 and sum(counts.values()) == blocks.shape[2] * blocks.shape[3]
    assert not blocks.certify(tiles=60).wrong


# --- random masks of every op ------------------------------------------------------------------------------------------------------


SIZES = st.sampled_from([(5, 7), (16, 16), (9, 30), (33, 21), (1, 12)])
BLOCKS = st.sampled_from([(4, 4), (8, 8), (3, 5), (2, 16)])


@st.composite
def random_masks(draw: st.DrawFn) -> Node:
    """A mask over the op table that does not read the score, with some structure in half of the cases."""
    positions_only = strategies.leaves()
    positions_only.float = [node for node in positions_only.float if "score" not in inputs_of(node)]
    pool = draw(strategies.nodes(positions_only, largest=8))
    last = pool.bool[-1]
    return draw(
        st.sampled_from([last, strategies.apply("and", last, pool.bool[0]), strategies.apply("or", last, draw(st.sampled_from(pool.bool)))])
    )


def check_random(mask: Node, seed: int, size: tuple[int, int], block: tuple[int, int]) -> None:
    """Against evaluation in float32, as kernels compute."""
    found = strategies.environment(seed, torch.float32)
    inputs = {"batch": 2, "head": 3, "q_idx": size[0], "kv_idx": size[1]}
    grid = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in inputs.values()), indexing="ij")
    env = strategies.Environment(dict(zip(POSITIONS, grid)), found.tensors, found.scalars)
    dense = evaluate([mask], env)[0].expand(2, 3, *size)
    graph = Graph((("mask", mask),), strategies.TENSORS, strategies.SCALARS)
    true = kinds_of(dense, block)
    for exact in (False, True):
        blocks = classify(graph, *size, batch=2, heads=3, block=block, tensors=found.tensors, scalars=found.scalars, exact=exact)
        claimed = blocks.kind.expand_as(true)
        decided = torch.ones_like(claimed, dtype=torch.bool) if exact else claimed != PARTIAL
        assert torch.equal(claimed[decided], true[decided])
    certificate = blocks.certify()
    assert not certificate.wrong and not certificate.loose and sum(s.tiles for s in certificate.stoppers) == certificate.unproved


@given(random_masks(), st.integers(0, 2**20), SIZES, BLOCKS)
@settings(strategies.quick)
def test_random_masks_of_every_op_are_sound(mask, seed, size, block):
    check_random(mask, seed, size, block)


@pytest.mark.slow
@given(random_masks(), st.integers(0, 2**20), SIZES, BLOCKS)
@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_ten_thousand_random_masks_are_sound(mask, seed, size, block):
    check_random(mask, seed, size, block)
