"""When the split kernel runs, what it plans, and on Triton's interpreter that any cut of the keys gives the same."""

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jinja2.meta
import pytest
import torch

import flexc
from flexc import api, backends, frontend, passes, pipeline
from flexc.backends import Options, Shapes
from flexc.codegen import templates
from flexc.codegen.templates import render, template_source
from flexc.codegen.triton import Tile, decode_emit, plan_decode, tile_rows
from flexc.codegen.triton.decode_plan import smem_bytes
from flexc.codegen.triton.decode_range import key_range
from flexc.errors import InputError, UnsupportedError
from flexc.inference.decode import is_decoding
from flexc.inference.places import packed
from flexc.ir.eager import Environment, evaluate
from flexc.target import KIB, Target
from tests.inference import interpreted

HOPPER = Target.parse("sm_90a")
SHAPES = Shapes(4, 32, 8, 1, 8192, 128, 128, torch.bfloat16)


def module_of(score_mod=None, mask_mod=None, shapes=SHAPES):
    graph = packed(frontend.trace(score_mod, mask_mod)[0].graph, shapes.group)
    return pipeline.compile_attention(graph, shapes, HOPPER, backends.DECODE, "a test", Options(), "a test")


# --- when ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"q_len": 16}, True),
        ({"kv_len": 255}, False),
        ({"q_len": 128, "kv_len": 511}, False),
        ({"q_len": 128, "kv_len": 8192, "batch": 1}, True),
        ({"q_len": 128, "kv_len": 8192, "batch": 64}, False),
        ({"q_len": 129}, False),
        ({"q_len": 0}, False),
    ],
)
def test_few_queries_against_many_keys_are_a_decoding_step(change, expected):
    assert is_decoding(replace(SHAPES, **change), HOPPER.sm_count) is expected


def test_lengths_are_worth_more_tiles_than_a_copy_of_the_keys():
    shapes = replace(SHAPES, q_len=64, batch=64)
    assert is_decoding(shapes, HOPPER.sm_count, hides_rest=True) and not is_decoding(shapes, HOPPER.sm_count)
    assert not is_decoding(replace(shapes, q_len=65), HOPPER.sm_count, hides_rest=True)


def test_a_call_says_whether_lengths_hide_keys(monkeypatch):
    hidden = []
    monkeypatch.setattr(api, "decoding", lambda launch, q, k, v, tensors, hides_rest=False: hidden.append(hides_rest) or launch)
    q, kernel = torch.randn(2, 2, 4, 16), flexc.attention()
    for positions in ({}, {"q_offset": 3}, {"kv_len": torch.tensor([4, 1])}):
        kernel(q, q, q, **positions)
    assert hidden == [False, False, True]


# --- the plan ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tile_fits_shared_memory(arch, dtype):
    target = Target.parse(arch)
    graph = frontend.trace()[0].graph
    for head_dim, head_dim_v in ((1, 1), (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)):
        for rows in {tile_rows(n, head_dim + head_dim_v, dtype) for n in (1, 17, 33, 200)}:
            plan = plan_decode(graph, target, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, group=1, rows=rows)
            needed = smem_bytes(plan.forward, head_dim, head_dim_v, dtype)
            assert needed <= target.smem_bytes, (head_dim, rows, plan.forward)
            assert plan.programs // target.sm_count * (needed + KIB) <= target.smem_bytes_per_sm, (head_dim, rows, plan.forward)


def test_packed_rows_take_the_least_tile():
    assert [tile_rows(n, 256, "bfloat16") for n in (1, 16, 17, 64, 65, 4096)] == [16, 16, 32, 64, 64, 64]
    assert [tile_rows(4096, width, "float32") for width in (128, 512, 1024)] == [32, 16, 16]


def test_lengths_that_grow_share_a_module():
    assert backends.DECODE.reads(SHAPES) == backends.DECODE.reads(replace(SHAPES, batch=9, kv_len=70_001, q_len=4))


@pytest.mark.parametrize(("head_dim", "dtype", "message"), [(513, "bfloat16", "at most 512"), (64, "float64", "expected float16")])
def test_what_has_no_kernel_is_refused(head_dim, dtype, message):
    graph = frontend.trace()[0].graph
    with pytest.raises(UnsupportedError, match=message):
        plan_decode(graph, HOPPER, dtype=dtype, head_dim=head_dim, head_dim_v=64, group=1, rows=16)


# --- ranges of keys ------------------------------------------------------------------------------------------------------------------


RANGES = {
    "causal": lambda b, h, i, j: i >= j,
    "causal, the other way round": lambda b, h, i, j: j <= i,
    "before": lambda b, h, i, j: j + 1 < i,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 7),
    "window as a chain": lambda b, h, i, j: 0 <= i - j < 7,
    "around": lambda b, h, i, j: (j - i <= 3) & (j > i - 4),
    "by head": lambda b, h, i, j: (i - j < 3 * h + 1) & (j < 20 + b),
    "one key": lambda b, h, i, j: 2 * i == 3 + j,
    "rows": lambda b, h, i, j: (i % 3 == 0) & (i >= j),
    "entries": lambda b, h, i, j: (b == 1) & (i >= j),
    "all keys of some rows": lambda b, h, i, j: (i % 3 == 0) | (i >= j),
    "prefix": lambda b, h, i, j: (i >= j) | (j < 4),
    "window and sinks": lambda b, h, i, j: (i >= j) & ((i - j < 7) | (j < 4)),
    "the same, apart": lambda b, h, i, j: ((i >= j) & (i - j < 7)) | ((j < 4) & (i >= j)),
    "window and a prefix ahead": lambda b, h, i, j: ((i >= j) & (i - j < 7)) | (j < 4),
    "around a gap": lambda b, h, i, j: (i - j > 7) | (j > i),
    "sinks by head": lambda b, h, i, j: (i >= j) & ((j < h + 1) | (i - j < 5 * b + 2)),
}
MORE_THAN_A_RANGE = {
    "both sides of a gap, twice": lambda b, h, i, j: ((i - j < 7) | (j < 4)) & ((i - j < 9) | (j < 2 + b)),
    "stripes": lambda b, h, i, j: (i >= j) & (j % 2 == 0),
    "twice as far": lambda b, h, i, j: 2 * j <= i,
    "distance": lambda b, h, i, j: abs(i - j) < 4,
    "floats": lambda b, h, i, j: i * 0.5 >= j,
}


@pytest.mark.parametrize("name", RANGES)
def test_a_range_holds_the_keys_of_each_row_and_no_more(name):
    graph = passes.run(frontend.trace(None, RANGES[name])[0].graph)
    found = key_range(graph)
    assert found is not None
    places = torch.meshgrid(*(torch.arange(n, dtype=torch.int32) for n in (2, 3, 40, 64)), indexing="ij")
    env = Environment(dict(zip(("batch", "head", "q_idx", "kv_idx"), places)))
    (mask,) = evaluate([graph.mask], env)
    keys, inside = places[3], torch.ones_like(mask)
    for node, side in ((found.first, torch.ge), (found.stop, torch.lt)):
        if node is not None:
            inside &= side(keys, evaluate([node], env)[0])
    if found.gap_first is not None and found.gap_stop is not None:
        first, stop = evaluate([found.gap_first, found.gap_stop], env)
        inside &= (keys < first) | (keys >= stop)
    assert torch.equal(mask, inside.expand_as(mask))


@pytest.mark.parametrize("name", MORE_THAN_A_RANGE)
def test_what_is_more_than_a_range_takes_a_map(name):
    assert key_range(passes.run(frontend.trace(None, MORE_THAN_A_RANGE[name])[0].graph)) is None
    assert module_of(None, MORE_THAN_A_RANGE[name]).plan.walk == "runs"


def test_a_range_needs_no_map():
    artifact = module_of(None, RANGES["window"])
    assert artifact.plan.walk == "range" and artifact.map_blocks == {}


# --- the text ------------------------------------------------------------------------------------------------------------------------


def test_a_slope_is_read_once_a_row():
    slopes = torch.rand(32)
    source = module_of(lambda s, b, h, i, j: s - slopes[h] * (i - j)).source
    (load,) = re.findall(r"\n( *)u_slopes_\d+ = tl.load", source)
    (loop,) = re.findall(r"\n( *)for block in tl.range\(place", source)
    assert len(load) <= len(loop), "inside the loop over keys"


def test_full_blocks_load_nothing_for_the_mask():
    documents = torch.zeros(8192, dtype=torch.int32)
    source = module_of(None, lambda b, h, i, j: documents[i] == documents[j]).source
    full = source[source.index("# full blocks:") :]
    assert "kv_idx" in source and "kv_idx" not in full[: full.index("inverse")]


def test_holes_of_the_templates_are_what_is_passed(monkeypatch):
    passed: dict[str, set[str]] = {}
    monkeypatch.setattr(decode_emit, "render", lambda name, **holes: passed.update({name: set(holes)}) or render(name, **holes))
    artifact = module_of()
    backends.DECODE.emit(artifact.lowered, artifact.plan, HOPPER, "not from the cache")
    asked, made = set(), set()
    for name in backends.DECODE.templates:
        parsed = templates._environment().parse(template_source(name))
        asked |= jinja2.meta.find_undeclared_variables(parsed)
        made |= {node.name for node in parsed.find_all(jinja2.nodes.Name) if node.ctx in ("store", "param")}
    assert asked - made == passed[backends.DECODE.templates[0]]


def test_a_mask_that_loads_nothing_for_each_key_runs_in_one_loop():
    """A second loop would start its copies anew."""
    widths = torch.zeros(32, dtype=torch.int32)
    source = module_of(None, lambda b, h, i, j: (i - j < widths[h]) & (j % 4 == 0)).source
    assert len(re.findall(r"= tl\.dot\(p", source)) == 1


def test_shares_end_where_entries_do():
    """Where that leaves almost all programs at work: 264 of them are resident."""
    module = module_of().module
    assert [module.programs_for(entries) for entries in (1, 8, 64, 128, 512, 1024)] == [264, 264, 256, 256, 256, 256]
    assert [module.programs_for(entries) for entries in (0, 100, 200, 300)] == [264] * 4


@pytest.mark.parametrize(
    ("batch", "kv_len", "expected"),
    [(64, 8192, [256, 0]), (16, 8192, [256, 128 * 4]), (64, 255, [256, 512 * 4])],
)
def test_entries_that_one_program_reads_are_not_combined(monkeypatch, batch, kv_len, expected):
    """Triton launches nothing on a grid of 0."""

    class Noted:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(*grid)

    module, launched = module_of().module, []
    for name in module.LAUNCH:
        monkeypatch.setattr(module, name, Noted())
    q, k = (torch.empty(1, dtype=torch.bfloat16).expand(batch, heads, n, 128) for heads, n in ((32, 1), (8, kv_len)))
    module.forward(q, k, k, 0.1, (), (), None)
    assert launched == expected


def test_no_kernel_runs_before_that_of_a_range_of_keys():
    """One that did so, of a single program, took as long as to read 30 MB."""
    causal = module_of(None, lambda b, h, i, j: i >= j)
    assert list(causal.module.LAUNCH) == ["split_kernel", "combine_kernel"]
    ragged = module_of(None, lambda b, h, i, j: i >= j, replace(SHAPES, page=16, ragged=True))
    assert list(ragged.module.LAUNCH) == ["schedule_kernel", "split_kernel", "combine_kernel"]


def test_overlapping_kernels_wait_before_they_read():
    """Each lets the next one start, and touches no memory before those before it have ended."""
    for mask_mod in (None, lambda b, h, i, j: i >= j, lambda b, h, i, j: (j // 64) % 2 == 0):
        source = module_of(None, mask_mod).source
        for name in ("split_kernel", "combine_kernel"):
            body = source[source.index(f"def {name}") :]
            before = body[: body.index("gdc_wait()")]
            assert "tl.load(" not in before and "tl.store(" not in before and "schedule(" not in before
            assert "gdc_launch_dependents()" in body[: body.index("tl.store(")]
        assert source.count("launch_pdl=True") == 2


def test_pages_of_a_step_are_read_once():
    """A step of 64 keys lies in four pages of 16 tokens: four numbers, not 64."""
    source = module_of(None, lambda b, h, i, j: i >= j, replace(SHAPES, page=16)).source
    reads = re.findall(r"tl\.load\(pages \+ (.*)", source)
    assert reads and all("tl.arange(0, 4)" in read and "tl.arange(0, 64)" not in read for read in reads)


def test_a_cache_is_read_in_16_bytes_and_ahead():
    """Keys and values come by asynchronous copies of 16 bytes, three steps of them on their way."""
    artifact = module_of()
    ptx = artifact.ptx()
    copies = re.findall(r"cp\.async\.\w+\.shared\.global[\w:.]* \[[^\]]*\], \[[^\]]*\], (0x10|16)", ptx)
    assert len(copies) >= 4 * 16, "four steps of 32 KiB by 128 threads, 16 bytes each"
    assert artifact.plan.forward == Tile(16, 64, 4, 4)
    (spilled,) = re.findall(r"split_kernel +\d+ +(\d+) ", artifact.resources())
    assert int(spilled) <= 32


# --- on the interpreter --------------------------------------------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(16))
def test_any_cut_of_the_keys_gives_the_same(worker, seed):
    assert not worker.submit(interpreted.drawn, seed).result(timeout=300)


@pytest.mark.interpret
def test_entries_of_one_program_are_whole(worker):
    assert not worker.submit(interpreted.whole_entries).result(timeout=300)


@pytest.mark.interpret
@pytest.mark.parametrize("by_head", [False, True])
def test_keys_of_every_token_of_a_tile_are_read(worker, by_head):
    assert not worker.submit(interpreted.ends_of_every_token, by_head).result(timeout=300)


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(8))
def test_bits_of_a_row_do_not_depend_on_its_surroundings(worker, seed):
    assert not worker.submit(interpreted.bits_of_a_row, seed).result(timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_bits_of_a_row_do_not_depend_on_its_surroundings_on_a_gpu(seed):
    assert not interpreted.bits_of_a_row(seed, "cuda", torch.bfloat16)


def test_batch_invariance_is_decided_by_the_queries_alone():
    shapes = replace(SHAPES, q_len=128, kv_len=130, batch=64)
    assert is_decoding(shapes, HOPPER.sm_count, batch_invariant=True)
    assert not is_decoding(replace(shapes, q_len=129), HOPPER.sm_count, batch_invariant=True)


def test_batch_invariance_is_not_on_the_cpu():
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(UnsupportedError, match="batch_invariant=True on the cpu backend"):
        flexc.attention(batch_invariant=True)(q, q, q)
    with pytest.raises(InputError, match="batch_invariant is a int; expected True or False"):
        flexc.attention(batch_invariant=1)


def test_batch_invariance_survives_pickling_and_compiling():
    kernel = pickle.loads(pickle.dumps(flexc.attention(batch_invariant=True)))
    assert kernel._options.batch_invariant
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(Exception, match="batch_invariant=True on the cpu backend"):
        torch.compile(lambda q: kernel(q, q, q), backend="eager", fullgraph=True)(q)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["with_a_gradient_the_ordinary_kernel_runs", "operators_decode_too", "nobody_reads_what_nobody_sees"])
def test_on_the_interpreter(worker, name):
    assert not worker.submit(getattr(interpreted, name)).result(timeout=300)


def test_what_never_ends_is_ended():
    program = "import time\nfrom tests.inference.conftest import watchdog\nwith watchdog(0.2):\n    time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=Path(__file__).parents[2])
    assert ended.returncode and "Timeout" in ended.stderr
