"""Masks whose block maps generated kernels must make, and what is checked; run in a process whose Triton interprets."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import traceback
from dataclasses import dataclass

import torch

import flexc
from flexc import block_kernels, block_launches, block_tables, launch, map_making
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import FLOAT32, INT32, INT64, Graph, Node, ScalarInput, scalar
from flexc.ir.ops import cast
from flexc.map_making import MapSizes
from flexc.sparsity import EMPTY, FULL, PARTIAL, BlockMap
from flexc.sparsity.statements import declare_sorted, is_declared_sorted
from flexc.sparsity.walk import Walk, walk_of
from tests.sparsity.graphs import batch, both, causal, graph_of, head, kinds_of, kv_idx, op, q_idx, read

Tensor = torch.Tensor
DEVICE = torch.device(os.environ.get("FLEXC_TEST_DEVICE", "cpu"))


@dataclass(frozen=True)
class Case:
    """One mask on one shape.

    Attributes:
        tight: bounds alone find the true kind of every block.
    """

    mask: Node
    tensors: tuple[Tensor, ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()
    q_len: int = 96
    kv_len: int = 96
    block: tuple[int, int] = (8, 8)
    b: int = 1
    h: int = 1
    tight: bool = False

    @property
    def graph(self) -> Graph:
        """The mask with what it captures."""
        inputs = tuple(ScalarInput(f"n_{i}", dtype) for i, (dtype, _) in enumerate(self.scalars))
        return Graph((("mask", self.mask),), graph_of(None, self.tensors).tensors, inputs)

    @property
    def values(self) -> list[float]:
        """Of the scalars."""
        return [value for _, value in self.scalars]

    def tensors_on(self, device: torch.device) -> list[Tensor]:
        """What the mask captures, with what was stated about it."""
        moved = [tensor.to(device) for tensor in self.tensors]
        for tensor, original in zip(moved, self.tensors, strict=True):
            if is_declared_sorted(original):
                declare_sorted(tensor)
        return moved

    def truth(self) -> Tensor:
        """Kinds by brute force: uint8 [B, Hq, n, m]."""
        inputs = {}
        for position, (name, size) in enumerate({"batch": self.b, "head": self.h, "q_idx": self.q_len, "kv_idx": self.kv_len}.items()):
            shape = [1, 1, 1, 1]
            shape[position] = size
            inputs[name] = torch.arange(size, dtype=torch.int32).view(shape)
        dense = evaluate([self.mask], Environment(inputs, self.tensors, self.values))[0]
        return kinds_of(dense.expand(self.b, self.h, self.q_len, self.kv_len), self.block)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _documents(length: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return (torch.rand(length, generator=_random(length)) < count / length).cumsum(0).to(dtype)


def _same(ids: Tensor) -> Node:
    return op("eq", read(0, ids, q_idx), read(0, ids, kv_idx))


def _with_nan() -> Tensor:
    values = torch.arange(96.0)
    values[20:28] = math.nan
    values[41] = math.inf
    return values


_DOCS, _SHORT_DOCS = _documents(96, 6), _documents(96, 5, torch.int32)
_UNSORTED = torch.randint(0, 3, (96,), generator=_random(1))
_SORTED = declare_sorted(_documents(96, 7))
_BATCHED = torch.stack([_documents(96, n) for n in (2, 9)])
_WINDOW = op("lt", q_idx - kv_idx, 24)
_TABLE = torch.rand(90, 83, generator=_random(2)) < 0.03
_LAYOUT = torch.rand(2, 12, 12, generator=_random(3)) < 0.4
_PREFIX = torch.tensor([5, 40, 96], dtype=torch.int32)
_END = torch.arange(96) // 10 * 10 + 9
_WIDTHS = torch.tensor([3, 30, 200])
_VALUES = _with_nan()
_STEP = torch.tensor([0, 7, 0, 12])
_BIG = torch.tensor([2**53] * 48 + [2**53 + 1] * 48)

CASES = {
    "causal": Case(causal, tight=True),
    "causal, ragged": Case(causal, q_len=91, kv_len=91),
    "causal, few queries": Case(op("ge", q_idx + 70, kv_idx), q_len=21, kv_len=91, block=(16, 8)),
    "one token": Case(causal, q_len=1, kv_len=1),
    "one query": Case(op("lt", kv_idx, 50), q_len=1, kv_len=91),
    "one key": Case(causal, q_len=91, kv_len=1),
    "sliding window": Case(both(causal, _WINDOW), tight=True),
    "window of a run-time width": Case(both(causal, op("lt", q_idx - kv_idx, scalar(0, INT32))), scalars=((INT32, 24),), tight=True),
    "window of a wide number": Case(op("lt", cast(q_idx - kv_idx, INT64), scalar(0, INT64)), scalars=((INT64, 2**40),), tight=True),
    "float limit": Case(op("lt", cast(q_idx - kv_idx, FLOAT32), scalar(0, FLOAT32)), scalars=((FLOAT32, 10.5),)),
    "float limit that is NaN": Case(op("lt", cast(kv_idx, FLOAT32), scalar(0, FLOAT32)), scalars=((FLOAT32, math.nan),)),
    "window and sinks": Case(both(causal, op("or", _WINDOW, op("lt", kv_idx, 4)))),
    "prefix": Case(op("or", causal, op("lt", kv_idx, 30))),
    "prefix by batch": Case(op("or", causal, op("lt", kv_idx, read(0, _PREFIX, batch))), (_PREFIX,), b=3),
    "padding by lengths": Case(both(op("lt", kv_idx, read(0, _PREFIX, batch)), op("lt", q_idx, read(0, _PREFIX, batch))), (_PREFIX,), b=3),
    "documents": Case(_same(_DOCS), (_DOCS,), tight=True),
    "documents in 32 bits": Case(_same(_SHORT_DOCS), (_SHORT_DOCS,), tight=True),
    "documents, unsorted": Case(_same(_UNSORTED), (_UNSORTED,)),
    "documents, declared sorted": Case(_same(_SORTED), (_SORTED,), tight=True),
    "documents by batch": Case(
        op("eq", read(0, _BATCHED, batch, q_idx), read(0, _BATCHED, batch, kv_idx)), (_BATCHED,), b=2, h=2, tight=True
    ),
    "documents beyond float64": Case(_same(_BIG), (_BIG,)),
    "documents, causal, window": Case(both(_same(_DOCS), causal, _WINDOW), (_DOCS,)),
    "documents, shifted": Case(op("eq", read(0, _DOCS, op("maximum", q_idx - 1, 0)), read(0, _DOCS, kv_idx)), (_DOCS,)),
    "dilated": Case(both(causal, op("eq", op("floormod", q_idx - kv_idx, 3), 0))),
    "block diagonal": Case(op("eq", op("floordiv", q_idx, 16), op("floordiv", kv_idx, 16)), tight=True),
    "block diagonal of a run-time size": Case(
        op("eq", op("floordiv", q_idx, scalar(0, INT32)), op("floordiv", kv_idx, scalar(0, INT32))), scalars=((INT32, 16),), tight=True
    ),
    "neighbourhood": Case(
        both(
            op("le", op("abs", op("floordiv", q_idx, 12) - op("floordiv", kv_idx, 12)), 1),
            op("le", op("abs", op("floormod", q_idx, 12) - op("floormod", kv_idx, 12)), 2),
        )
    ),
    "an end for each token": Case(op("le", kv_idx, read(0, _END, q_idx)), (_END,)),
    "a window for each head": Case(both(causal, op("lt", q_idx - kv_idx, read(0, _WIDTHS, head))), (_WIDTHS,), h=3, b=2),
    "a table of pairs": Case(read(0, _TABLE, q_idx, kv_idx), (_TABLE,), q_len=90, kv_len=83, tight=True),
    "a table by distance": Case(read(0, _TABLE.any(0), q_idx - kv_idx), (_TABLE.any(0),)),
    "a layout of blocks": Case(read(0, _LAYOUT, head, op("floordiv", q_idx, 8), op("floordiv", kv_idx, 8)), (_LAYOUT,), h=2, tight=True),
    "floats with NaN": Case(op("lt", read(0, _VALUES, kv_idx), read(0, _VALUES, q_idx)), (_VALUES,)),
    "not a float with NaN": Case(op("not", op("lt", read(0, _VALUES, kv_idx), 30.0)), (_VALUES,)),
    "functions of floats": Case(op("lt", op("sqrt", cast(q_idx, FLOAT32)) - op("tanh", cast(kv_idx - 50, FLOAT32)), 7.0)),
    "read past the end": Case(op("eq", read(0, _STEP, op("floordiv", kv_idx, 16)), 0), (_STEP,)),
    "negative indices": Case(op("gt", read(0, _END, q_idx - kv_idx), 40), (_END,)),
    "bits": Case(op("eq", op("and", op("shr", q_idx, 3), op("xor", kv_idx, 5)), 4)),
    "chosen": Case(op("where", op("lt", q_idx, 32), op("lt", kv_idx, 40), causal)),
    "rows only": Case(op("lt", q_idx, 20), tight=True),
    "columns only": Case(op("ge", kv_idx, 20), tight=True),
    "by batch and head": Case(op("or", op("eq", op("floormod", batch + head, 2), 0), causal), b=2, h=2),
    "everything": Case(op("ge", q_idx, 0), q_len=50, kv_len=45),
    "nothing": Case(op("lt", q_idx, 0), q_len=50, kv_len=45, tight=True),
    "blocks longer than a slab": Case(
        op("not", both(op("eq", op("floormod", q_idx, 16), 11), op("eq", op("floormod", kv_idx, 256), 200))),
        q_len=32,
        kv_len=512,
        block=(16, 256),
    ),
    "long rows of small blocks": Case(both(_same(_DOCS), op("ge", q_idx * 2, kv_idx)), (_DOCS,), block=(16, 1)),
}


def kinds_of_walk(walk: Walk, blocks: int) -> Tensor:
    """uint8 [B', H', n, blocks]; fails where a walk visits a block twice or a run is empty."""
    rows = walk.rows.view(-1, 4).tolist()
    kinds = torch.full((len(rows), blocks), EMPTY, dtype=torch.uint8)
    for kind, (start, count, run, runs) in zip(kinds, rows, strict=True):
        for block in walk.partial[start : start + count].tolist():
            assert kind[block] == EMPTY, f"block {block} is visited twice"
            kind[block] = PARTIAL
        for first, stop in walk.full[run : run + runs].tolist():
            assert first < stop and not kind[first:stop].any(), f"run {first}..{stop} is empty or visits a block twice"
            kind[first:stop] = FULL
    return kinds.view(*walk.rows.shape[:3], blocks)


def build(case: Case, exact: block_launches.Exact, **capacity: int) -> block_kernels.DeviceMap:
    """The map of a case."""
    tensors, sizes = case.tensors_on(DEVICE), MapSizes(case.q_len, case.kv_len, case.b, case.h, case.block)
    plan = block_kernels.plan_on_gpu(case.graph, sizes, tensors=tensors, device=DEVICE, exact=exact, **capacity)
    return plan.map(tensors, case.values)


def check(name: str, exact: bool, coarse: bool) -> None:
    """A case of the table."""
    check_case(CASES[name], exact, coarse)


def check_case(case: Case, exact: bool, coarse: bool) -> None:
    """Empty and full blocks are so in truth; with exact evaluation, and where bounds are tight, partial ones too; in both directions."""
    block_launches._COARSE_BLOCKS = 0 if coarse else 512
    truth = case.truth()
    found = build(case, exact)
    n, m = truth.shape[2:]
    assert found.shape[2:] == (n, m)
    for side, walk, blocks in (("rows", found.row_walk(), m), ("columns", found.column_walk(), n)):
        kinds = kinds_of_walk(walk, blocks)
        kinds = (kinds if side == "rows" else kinds.transpose(-1, -2)).expand_as(truth)
        wrong = (kinds != PARTIAL) & (kinds != truth)
        assert not wrong.any(), f"{side}: {wrong.sum()} blocks are not what was proved\n{kinds[0, 0]}\n{truth[0, 0]}"
        missed = kinds != truth
        if exact or case.tight:
            assert not missed.any(), f"{side}: {missed.sum()} blocks were not decided\n{kinds[0, 0]}\n{truth[0, 0]}"
        assert walk.partial[:blocks].tolist() == list(range(blocks))
        work = (kinds_of_walk(walk, blocks) != EMPTY).sum(-1).flatten(0, 1).sum(0)
        assert torch.equal(walk.order.long().cpu(), torch.argsort(work, descending=True, stable=True)), "order"
        assert not any(turn.item() for turn in block_launches._turns.values()), "the next launch counts its programs from 0"
    for runs, walk, blocks in ((found.rows(), found.row_walk(), m), (found.columns(), found.column_walk(), n)):
        assert torch.equal(kinds_of_walk(walk_of(runs), blocks), kinds_of_walk(walk, blocks))
    counts = found.counts()
    kinds = kinds_of_walk(found.row_walk(), m)
    assert (counts.empty, counts.partial, counts.full) == tuple(int((kinds == kind).sum()) for kind in (EMPTY, PARTIAL, FULL))
    assert counts.overflowed == 0
    decided = dataclasses.asdict(counts.proof)
    assert min(decided.values()) >= 0 and sum(decided.values()) == math.prod(found.shape)
    assert counts.proof.undecided == (0 if exact else counts.partial)


def random_masks(count: int) -> None:
    """From the op table, with random captured tensors. By bounds alone: the interpreter takes a comparison of two float scalars for a float
    where the mask itself spreads it."""
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.sparsity.test_classify import RANDOM, TABLES

    @settings(
        phases=[Phase.generate], max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(**RANDOM)
    def agree(mask, q_len, kv_len, block):
        case = Case(mask, TABLES, q_len=q_len, kv_len=kv_len, block=block, b=2, h=3)
        check_case(case, exact=False, coarse=q_len % 2 == 0)

    agree()


def overflow() -> None:
    """A row with more lists or runs than places is walked from its first block to its last, all of them partial."""
    layout = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    case = Case(both(read(0, layout, op("floordiv", kv_idx, 8)), op("ge", q_idx, 48)), (layout,))
    found = build(case, False, most_runs=3)
    assert found.counts().overflowed == 6
    expected = torch.zeros(12, 12, dtype=torch.uint8)
    expected[6:, 0:11] = PARTIAL
    assert torch.equal(kinds_of_walk(found.row_walk(), 12)[0, 0], expected)
    assert found.row_walk().order[:6].tolist() == [6, 7, 8, 9, 10, 11]
    halves = Case(both(case.mask, op("ne", op("floormod", kv_idx, 8), 3)), (layout,))
    found = build(halves, False, most_listed=4)
    assert found.counts().overflowed == 6 and torch.equal(kinds_of_walk(found.row_walk(), 12)[0, 0], expected)
    assert build(halves, False, most_listed=6).counts().overflowed == 0
    map_making.KERNEL_DEVICES = frozenset([DEVICE.type])
    moved, places = layout.to(DEVICE), block_launches.places
    kernel = flexc.attention(None, lambda b, h, q, k: moved[k // 8] & (q >= 48))
    explanation = kernel.explain(*(torch.randn(1, 1, 96, 16, device=DEVICE) for _ in "qkv"))
    try:
        block_launches.places = lambda *sizes: (5, 1)
        block_launches.Room.of.cache_clear()
        block_kernels._builders.clear()  # they remember how much room a walk takes
        blocks = flexc.block_map(kernel, 96, 96, block=8, device=DEVICE)
    finally:
        block_launches.places = places
        block_launches.Room.of.cache_clear()
        block_kernels._builders.clear()
    assert blocks.overflowed == 6 and blocks.counts() == {"empty": 144 - 66, "partial": 66, "full": 0}
    assert "6 rows of blocks are too ragged" in str(dataclasses.replace(explanation, blocks=blocks))


def closer_looks_are_limited() -> None:
    """One forbidden pair in each block, which no sample meets: looking closer is in vain, and a block row stops after a while."""
    hidden = both(op("eq", op("floormod", q_idx, 8), 3), op("eq", op("floormod", kv_idx, 8), 5))
    for exact, rows, evaluated in ((True, 2, 20), ("auto", 2, 16), ("auto", 3, 8)):
        try:
            block_launches._FEW_ROWS = 2
            proof = build(Case(op("not", hidden), q_len=8 * rows, kv_len=8 * 20), exact).counts().proof
        finally:
            block_launches._FEW_ROWS = 256
        assert (proof.bounds, proof.evaluated, proof.undecided) == (0, rows * evaluated, rows * (20 - evaluated)), (exact, rows)
    case = Case(op("not", hidden))
    before = block_launches.MOST_PAIRS
    try:
        block_launches.MOST_PAIRS = 64 * 12 * 3
        proof = build(dataclasses.replace(case, q_len=95), "auto").counts().proof
    finally:
        block_launches.MOST_PAIRS = before
    assert (proof.evaluated, proof.undecided) == (12 * 3, 12 * 9)
    assert (kinds_of_walk(build(case, "auto").row_walk(), 12) == PARTIAL).all()


def run_time_numbers_compile_nothing() -> None:
    """Other scalars, lengths and contents use the module that is there."""
    ids = _DOCS.clone()
    mask = both(_same(ids), op("lt", q_idx - kv_idx, scalar(0, INT32)))
    modules = set()
    for width, length in ((5, 96), (30, 96), (200, 91), (7, 40)):
        case = Case(mask, (ids,), ((INT32, width),), q_len=length, kv_len=length)
        kinds = kinds_of_walk(build(case, True).row_walk(), -(-length // 8))
        assert torch.equal(kinds, case.truth())
        modules |= {id(c.module) for b in block_kernels._builders.values() if b.graph == case.graph for c in b._by_plan.values()}
        ids.copy_(ids.roll(11).sort().values)
    assert len(modules) == 1


def rows_of_very_many_blocks() -> None:
    """More squares than are decided together: runs go on from one group of them to the next."""
    block_launches._COARSE_BLOCKS = 512
    holes = both(op("ne", op("floordiv", kv_idx, 2), 9000), op("or", op("lt", kv_idx, 9200), op("ge", kv_idx, 9400)))
    mask = both(op("ge", op("floordiv", kv_idx, 2), q_idx), holes, op("lt", kv_idx, 19_001))
    case = Case(mask, q_len=20, kv_len=20_001, block=(16, 2))
    walk = build(case, False).row_walk()
    assert torch.equal(kinds_of_walk(walk, 10_001), case.truth())
    assert walk.full[walk.rows[0, 0, 0, 2] :][: walk.rows[0, 0, 0, 3]].tolist() == [[15, 4600], [4700, 9000], [9001, 9500]]


def tables() -> None:
    """The kernels build what `SparseTable.of` does: all at once for short tensors, else in two steps."""
    from flexc.sparsity.facts import SparseTable

    tensors = [
        torch.randint(-50, 50, (1000,)), torch.randint(-50, 50, (3, 300), dtype=torch.int32), torch.rand(2, 5, 64) < 0.5,
        _with_nan(), torch.randn(700).half(), torch.randn(40, 3).double().t(), torch.randn(1), torch.randn(2, 600)[:, ::2],
    ]  # fmt: skip
    for tensor, most in [(t.to(DEVICE), 2**14) for t in tensors] + [(t.to(DEVICE), 0) for t in tensors[1:4:2]]:
        block_tables._AT_ONCE = most
        block_tables._Shape.of.cache_clear()
        for dim in range(tensor.dim()):
            for cell in (1, 3, 8, 64):
                made, expected = block_tables.sparse_table(tensor, dim, cell), SparseTable.of(tensor, [dim], cell)
                assert torch.equal(made.lo, expected.lo) and torch.equal(made.hi, expected.hi), (tensor.shape, tensor.dtype, dim, cell)
                assert made.lo.dtype == expected.lo.dtype
    block_tables._AT_ONCE = 2**14
    block_tables._Shape.of.cache_clear()


def tables_that_are_written_anew() -> None:
    """In the same memory, again and again, with what the tensor then holds."""
    from flexc.codegen.triton.blocks_program import Table
    from flexc.sparsity.facts import SparseTable

    draws = [
        lambda: torch.randint(-50, 50, (1000,)), lambda: torch.rand(2, 5, 64) < 0.5, lambda: torch.randn(700).half(),
        lambda: torch.randn(2, 600)[:, ::2], lambda: torch.randint(0, 99, (3, 300), dtype=torch.int32),
    ]  # fmt: skip
    for most in (2**14, 0):
        block_tables._AT_ONCE = most
        block_tables._Shape.of.cache_clear()
        for draw in draws:
            tensor, seen = draw().to(DEVICE), []
            dim = tensor.dim() - 1
            for _ in range(3):
                tensor.copy_(draw().roll(len(seen), dim))
                made = block_tables.table_of(tensor, Table(0, (dim,), 8, "t", str(tensor.dtype).removeprefix("torch.")), 0)
                expected = SparseTable.of(tensor, [dim], 8)
                assert torch.equal(made.lo, expected.lo) and torch.equal(made.hi, expected.hi), (tensor.shape, tensor.dtype)
                seen.append(made)
            assert seen[0] is seen[1] is seen[2]
    block_tables._AT_ONCE = 2**14
    block_tables._Shape.of.cache_clear()


def attention_on_maps_made_by_kernels() -> None:
    """Forward and backward walk them, and maps follow tensors that are written to."""
    map_making.KERNEL_DEVICES = frozenset([DEVICE.type])
    launch.MAPS.clear()
    with DEVICE:
        documents, lengths, slopes = torch.arange(100) // 30, torch.tensor([100, 37]), torch.rand(4, requires_grad=True)

    def score(s, b, h, q, k):
        return s - slopes[h] * (q - k)

    def mask(b, h, q, k):
        return (documents[q] == documents[k]) & (q >= k) & (k < lengths[b])

    kernel = flexc.attention(score, mask, backend="triton")
    q, k, v = (torch.randn(2, heads, 100, 16, generator=_random(heads)).to(DEVICE).requires_grad_() for heads in (4, 2, 2))
    for _ in range(2):
        inputs = (q, k, v, slopes)
        out, truth = kernel(q, k, v), flexc.reference(score, mask, q, k, v)[0]
        weight = torch.randn(truth.shape, generator=_random(0)).to(DEVICE)
        ours, right = (torch.autograd.grad((o * weight).sum(), inputs) for o in (out, truth))
        for found, expected in zip((out, *ours), (truth, *right), strict=True):
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-4)
        maps = [kept.blocks for kept in launch.MAPS._kept.values()]
        assert maps and all(isinstance(m._made.walks, block_kernels.DeviceMap) and not m.waited for m in maps)
        documents[50:] += 5
        lengths[1] = 80
    assert isinstance(kernel.blocks, BlockMap)


def views_of_maps_made_by_kernels() -> None:
    """Every view of them is that of the map made by operators, but for how the blocks were decided."""
    map_making.KERNEL_DEVICES = frozenset([DEVICE.type])
    ids, lengths = _DOCS.to(DEVICE), torch.tensor([90, 37], device=DEVICE)

    def mask(b, h, q, k):
        return (ids[q] == ids[k]) & (q - k < 40) & (k < lengths[b])

    found, other = (flexc.block_map(mask, n, n, batch=2, block=8, device=DEVICE) for n in (96, 61))
    with_lengths = found.with_lengths(61, 61)
    assert isinstance(found._made.walks, block_kernels.DeviceMap) and isinstance(with_lengths._made.walks, block_kernels.DeviceMap)
    assert torch.equal(with_lengths.kind, other.kind)
    copy = pickle.loads(pickle.dumps(found))
    map_making.KERNEL_DEVICES = frozenset()
    expected = flexc.block_map(mask, 96, 96, batch=2, block=8, device=DEVICE)
    assert expected._made is None and expected.shape == found.shape and found.device == expected.device
    for view in ("kind", "to_dense", "last_reader", "live", "row_work"):
        ours, theirs = ((x() if callable(x) else x) for x in (getattr(found, view), getattr(expected, view)))
        assert torch.equal(ours, theirs), view
    for view in ("counts", "sparsity", "unmasked_pairs", "most_live", "picture"):
        assert getattr(found, view)() == getattr(expected, view)(), view
    assert torch.equal(found.columns().offsets, expected.columns().offsets) and torch.equal(copy.kind, found.kind)
    assert sum(dataclasses.asdict(found.proof).values()) == math.prod(found.shape) and copy.proof == found.proof
    assert "decided: " in str(found)
    certificate = found.certify()
    assert certificate.is_complete and not certificate.wrong and not certificate.loose
    for walk, blocks in ((found.row_walk(), found.shape[3]), (found.column_walk(), found.shape[2])):
        kinds = kinds_of_walk(walk, blocks)
        assert torch.equal(kinds if walk is found.row_walk() else kinds.transpose(2, 3), expected.kind.cpu())


def columns_of_rows_that_are_old() -> None:
    """A map says what the tensors held when it was made, in both directions, also where its columns are asked for later."""
    map_making.KERNEL_DEVICES = frozenset([DEVICE.type])
    ids = _DOCS.clone().to(DEVICE)
    blocks = flexc.block_map(lambda b, h, q, k: ids[q] == ids[k], 96, 96, block=8, device=DEVICE)
    ids.fill_(3)
    assert torch.equal(kinds_of_walk(blocks.column_walk(), 12).transpose(2, 3), blocks.kind.cpu())
    assert blocks.counts()["empty"] > 20


def masks_without_a_kernel() -> None:
    """PyTorch operators make their maps, and maps say why."""
    map_making.KERNEL_DEVICES = frozenset([DEVICE.type])
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    blocks = flexc.block_map(lambda b, h, q, k: nothing[q] == k, 64, 64, block=8, device=DEVICE)
    assert "captured tensors with elements, got an empty one" in blocks.waited
    nothing = torch.arange(64, device=DEVICE)
    assert not flexc.block_map(lambda b, h, q, k: nothing[q] == k, 64, 64, block=8, device=DEVICE).waited
    has_triton = map_making._has_triton
    try:
        map_making._has_triton = lambda: False
        assert flexc.block_map(lambda b, h, q, k: q >= k, 64, 64, block=8, device=DEVICE).waited == "Triton is not installed"
    finally:
        map_making._has_triton = has_triton
    os.environ["FLEXC_DEVICE_MAPS"] = "0"
    try:
        kernel = flexc.attention(None, lambda b, h, q, k: q >= k)
        explanation = str(kernel.explain(*(torch.randn(1, 1, 32, 16, device=DEVICE) for _ in "qkv")))
        assert "waited      PyTorch operators found the blocks: FLEXC_DEVICE_MAPS=0" in explanation
    finally:
        del os.environ["FLEXC_DEVICE_MAPS"]
    assert "waited" not in str(kernel.explain(*(torch.randn(1, 1, 32, 16, device=DEVICE) for _ in "qkv")))


def failure_of(function: str, *arguments) -> str:
    """Empty if all is well; exceptions as text, because not all of them travel between processes."""
    try:
        globals()[function](*arguments)
    except BaseException:
        return traceback.format_exc()
    return ""
