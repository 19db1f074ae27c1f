"""Kernels under torch.compile and torch.export: one operator, no graph break, no more compilations than in eager code."""

import copy
import gc
import io
import operator
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flexc
from flexc import frontend, operators, pipeline, variants
from flexc.errors import ShapeError, TraceError, UnsupportedError
from flexc.launch import Launch
from flexc.operator_calls import split_numbers
from tests.accuracy import normal, qkv

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]  # Dynamo's own warnings are not ours

TABLE = normal(4)
WEIGHT = normal(4, seed=1, grad=True)
FACTOR = 1.5
NEAR_NEITHER = ~flexc.masks.sliding_window(15)  # outside of compiled regions: Dynamo knows no `~` of objects


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_global(score, batch, head, q_idx, kv_idx):
    return score * TABLE[head] * FACTOR


def by_cell(weight, factor):
    def score(s, batch, head, q_idx, kv_idx):
        return s * weight[head] * factor

    return score


@flexc.kernel
def alibi(score, batch, head, q_idx, kv_idx):
    return score - TABLE[head] * (q_idx - kv_idx)


class Layer(torch.nn.Module):
    """Projections, a parameter, a global tensor, a captured mask, and numbers that change."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(16, 3 * 4 * 8)
        self.factor = torch.nn.Parameter(normal(4, seed=2))
        self.slope, self.width = 0.25, 9
        self.attention = flexc.attention(self.score, flexc.masks.document(torch.arange(20) // 12) & self.window)

    def score(self, score, batch, head, q_idx, kv_idx):
        return score * self.factor[head] - TABLE[head] * (q_idx - kv_idx) * self.slope

    def window(self, batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.width)

    def forward(self, x):
        q, k, v = self.projection(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(monkeypatch):
    """The artifacts compiled by the test."""
    pipeline.clear_cache()
    made = []
    compile_attention = pipeline.compile_attention
    monkeypatch.setattr(
        pipeline, "compile_attention", lambda *args, **options: made.append(compile_attention(*args, **options)) or made[-1]
    )
    return made


@pytest.fixture
def forwards(monkeypatch):
    """One entry for each forward pass that ran."""
    ran, forward = [], Launch.forward
    monkeypatch.setattr(Launch, "forward", lambda *args: ran.append(1) or forward(*args))
    return ran


def compile_whole(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def assert_same(function, inputs, captured=(), zero_gradients=False, **options):
    """Compiled and eager: equal results, and gradients of the inputs and of what is captured."""
    leaves = [x for x in (*inputs, *captured) if isinstance(x, torch.Tensor) and x.requires_grad]
    results = []
    for run in (function, compile_whole(function, **options)):
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)) if leaves else (out,))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert results[1][0].any() and (zero_gradients or all(g.any() for g in results[1][1:]))


# --- where functions and what they capture may be ----------------------------------------------------------------------------------------


def of_globals(q):
    return flexc.attention(by_global, causal)(q, q, q)


def of_a_decorated_kernel(q):
    return alibi(q, q, q)


def of_cells_inside(q):
    return flexc.attention(by_cell(WEIGHT, 3.0), causal)(q, q, q)


def of_a_computed_capture(q):
    bias = 2 * WEIGHT  # a result inside the region, with a gradient
    return flexc.attention(lambda s, b, h, i, j: s * bias[h], causal)(q, q, q)


def with_branches(q):
    def score(s, batch, head, q_idx, kv_idx):
        if q_idx - kv_idx < 3:
            return s * WEIGHT[head]
        return s

    return flexc.attention(score, lambda b, h, i, j: 0 <= i - j < 9)(q, q, q)


def of_masks_inside(q):
    ids = torch.arange(q.shape[2]) // 5
    return flexc.attention(None, flexc.masks.causal & flexc.masks.document(ids) | NEAR_NEITHER)(q, q, q)


def of_a_default(q):
    return flexc.attention(None, lambda b, h, i, j, n=q.shape[2], *, m=2: (i >= j) & (j < n - m))(q, q, q)


def of_a_partial(q):
    return flexc.attention(partial(lambda w, s, b, h, i, j: s * w[h], WEIGHT))(q, q, q)


def of_a_helper(q):
    def scaled(s, head):
        return s * WEIGHT[head]

    return flexc.kernel(lambda s, b, h, i, j: scaled(s, h))(q, q, q)


def of_kernels_for_functions(q):
    return flexc.attention(alibi, flexc.kernel(lambda b, h, i, j: i >= j))(q, q, q)


def of_containers(q):
    parts = {"weights": [WEIGHT, TABLE], "at": 0}
    return flexc.attention(lambda s, b, h, i, j: s * parts["weights"][parts["at"]][h])(q, q, q)


def with_lse(q):
    out, aux = flexc.attention(by_cell(WEIGHT, 1.0), causal)(q, q, q, scale=0.3, return_lse=True)
    return out + aux.lse[..., None]


INSIDE = [
    of_globals,
    of_a_decorated_kernel,
    of_cells_inside,
    of_a_computed_capture,
    with_branches,
    of_masks_inside,
    of_a_default,
    of_a_partial,
    of_a_helper,
    of_kernels_for_functions,
    of_containers,
    with_lse,
]


@pytest.mark.parametrize("function", INSIDE)
def test_functions_made_inside_the_region(function):
    reads_weight = function not in (of_globals, of_a_decorated_kernel, of_masks_inside, of_a_default, of_kernels_for_functions)
    assert_same(function, qkv(q_len=20, grad=True)[:1], [WEIGHT] if reads_weight else [])


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_kernel_made_outside_the_region(scale):
    kernel = flexc.attention(by_cell(WEIGHT, 3.0), causal)
    q, k, v = qkv(q_len=20, kv_len=25, grad=True)
    assert_same(lambda q, k, v: kernel(q, k, v, scale=scale), (q, k, v), [WEIGHT], zero_gradients=scale == 0)


def test_module():
    layer = Layer()
    assert_same(layer, [normal(2, 20, 16, grad=True)], list(layer.parameters()))


@pytest.mark.slow
def test_inductor():
    """The default backend of torch.compile, which writes C++ here."""
    layer = Layer()
    assert_same(layer, [normal(2, 20, 16, grad=True)], list(layer.parameters()), backend="inductor")
    assert_same(of_a_computed_capture, qkv(q_len=20, grad=True)[:1], [WEIGHT], backend="inductor")

    def capped(q, limit, width):
        kernel = flexc.attention(lambda s, b, h, i, j: limit * torch.tanh(s / limit), lambda b, h, i, j: i - j < width)
        return kernel(q, q, q)

    run = compile_whole(capped, backend="inductor")
    for step in range(4):
        q = qkv(q_len=20 + step, seed=step)[0]
        torch.testing.assert_close(run(q, 1.5 + step, 4 + step), capped(q, 1.5 + step, 4 + step))


def test_graph_is_one_operator_with_the_captured_tensors_as_inputs():
    """A constant in place of an input would keep its first contents, and would have no gradient."""
    graphs = []
    kernel = flexc.attention(by_cell(WEIGHT, 3.0), causal)
    q = qkv(q_len=20)[0]
    torch.compile(lambda q: kernel(q, q, q), backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(q)
    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls if "flexc" in str(node.target)] == [operators.ATTENTION]
    (captured,) = next(node for node in calls if node.target is operators.ATTENTION).args[3]
    assert captured.op == "placeholder"


def test_captured_tensor_is_read_at_each_call():
    weight = normal(4)
    run = compile_whole(lambda q: flexc.attention(lambda s, b, h, i, j: s * weight[h])(q, q, q))
    q = qkv(q_len=20)[0]
    first = run(q)
    weight.mul_(2)
    assert not run(q).equal(first)
    torch.testing.assert_close(run(q), flexc.attention(lambda s, b, h, i, j: s * weight[h])(q, q, q))


def test_changed_function_compiles_anew():
    """Another function, flag, or kind of tensor in the place of the first is noticed."""
    holder = Layer()
    q = normal(2, 20, 16)
    run = compile_whole(holder)
    run(q)
    holder.score = lambda s, b, h, i, j: s + 1.0 * h * j
    holder.attention = flexc.attention(holder.score, causal)
    torch.testing.assert_close(run(q), holder(q))
    options = {"double": True}
    flagged = flexc.attention(lambda s, b, h, i, j: s * 2 if options["double"] else s)
    run = compile_whole(lambda q: flagged(q, q, q))
    q = qkv(q_len=20)[0]
    doubled = run(q)
    options["double"] = False
    torch.testing.assert_close(run(q), flagged(q, q, q))
    assert not run(q).equal(doubled)


def test_function_of_equal_code_that_flexc_does_not_look_into_is_another():
    def make(factor):
        times = lambda x: x * factor
        times.__module__ = "torch.made"  # as of a library: called as it is
        return times

    used = {"f": make(2.0)}
    kernel, q = flexc.attention(lambda s, b, h, i, j: used["f"](s)), qkv(q_len=20)[0]
    run = compile_whole(lambda q: kernel(q, q, q), backend="eager")
    run(q)
    used["f"] = make(3.0)
    torch.testing.assert_close(run(q), kernel(q, q, q))


def test_what_ran_is_shown_by_the_kernel():
    kernel = flexc.attention(by_global, causal)
    compile_whole(lambda q: kernel(q, q, q))(qkv(q_len=20)[0])
    assert kernel.backend == "cpu" and "FACTOR" in str(kernel.graph) and "def forward" in kernel.source


def test_kernel_that_leaves_the_region_works_outside():
    class Makes(torch.nn.Module):
        def forward(self, q):
            self.made = flexc.attention(lambda s, b, h, i, j: s * 2, flexc.masks.causal)
            return self.made(q, q, q)

    module, q = Makes(), qkv(q_len=20)[0]
    out = compile_whole(module)(q)
    assert repr(module.made) == "<flexc kernel <lambda> with mask causal>"
    torch.testing.assert_close(module.made(q, q, q), out)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        module.made.absent  # noqa: B018


def test_empty_inputs():
    run = compile_whole(lambda q: flexc.attention(None, causal)(q, q, q))
    assert run(torch.zeros(2, 4, 0, 8)).shape == (2, 4, 0, 8)


# --- what compiles anew ------------------------------------------------------------------------------------------------------------------


def steps(function, arguments, check=True):
    """Run a compiled function on each; how often Dynamo compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    run = compile_whole(function, backend=counter)
    for given in arguments:
        out = run(*given)
        torch.testing.assert_close(out, function(*given), rtol=1e-5, atol=1e-5)
    return counter.frame_count


def test_numbers_given_to_the_region(compiled):
    """Twice for Dynamo, as for flexc: once as a constant, then as an argument."""
    q = qkv(q_len=20)[0]
    windowed = lambda q, width: flexc.attention(None, lambda b, h, i, j: (i - j < width) & (i >= j))(q, q, q)
    assert steps(windowed, [(q, width) for width in range(3, 15)]) == 2 and len(compiled) == 2
    compiled.clear()
    capped = lambda q, limit: flexc.attention(lambda s, b, h, i, j: limit * torch.tanh(s / limit))(q, q, q)
    assert steps(capped, [(q, 1.0 + step / 2) for step in range(12)]) == 2 and len(compiled) == 2


def test_integer_argument_with_gradients():
    def attend(q, width):
        return flexc.attention(lambda s, b, h, i, j: s * WEIGHT[h], lambda b, h, i, j: (i - j < width) & (i >= j))(q, q, q)

    run = compile_whole(attend)
    for width in (3, 4, 5):
        q = qkv(q_len=20, grad=True)[0]
        ours, expected = (torch.autograd.grad(f(q, width).sin().sum(), [q, WEIGHT]) for f in (run, attend))
        for x, y in zip(ours, expected):
            torch.testing.assert_close(x, y)


def test_scale_that_changes(compiled):
    q = qkv(q_len=20)[0]
    assert steps(lambda q, scale: alibi(q, q, q, scale=scale), [(q, scale) for scale in (0.5, 0.25, -0.3, 1.5, 0.7)]) == 2
    assert len(compiled) == 1


def test_numbers_that_a_module_a_cell_and_a_global_hold(compiled, monkeypatch):
    """Dynamo alone would take integers there for constants, and give up after eight."""
    layer, x = Layer(), normal(2, 20, 16)
    counter = CompileCounterWithBackend("aot_eager")
    run = compile_whole(layer, backend=counter)
    for step in range(12):
        layer.width, layer.slope = 5 + step, 0.5 + step
        torch.testing.assert_close(run(x), layer(x))
    assert counter.frame_count == 2 and len(compiled) == 2
    compiled.clear()
    width = 3

    def mask(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < width + WIDTH)

    kernel, counter = flexc.attention(None, mask), CompileCounterWithBackend("eager")
    q, run = qkv(q_len=40)[0], compile_whole(lambda q: kernel(q, q, q), backend=counter)
    for width in range(3, 15):
        monkeypatch.setitem(globals(), "WIDTH", width // 2)
        torch.testing.assert_close(run(q), kernel(q, q, q))
    assert counter.frame_count == 2 and len(compiled) == 2


WIDTH = 0


def test_number_that_python_needs_compiles_for_each(compiled):
    """A loop: a constant for Dynamo as for flexc."""
    q = qkv(q_len=20)[0]

    def powered(q, times):
        def score(s, batch, head, q_idx, kv_idx):
            for _ in range(times):
                s = s * 1.5
            return s

        return flexc.attention(score)(q, q, q)

    assert steps(powered, [(q, times) for times in (1, 2, 3, 2)]) == 3


def test_number_on_which_a_function_branches():
    """The branch is a condition on the number, which Dynamo watches."""
    q = qkv(q_len=20)[0]

    def banded(q, width):
        return flexc.attention(None, lambda b, h, i, j: (i - j < width) if width > 6 else (i >= j))(q, q, q)

    assert steps(banded, [(q, width) for width in (7, 8, 9, 5, 4, 12)]) <= 4


def test_closures_made_anew_each_step_outside(compiled):
    def make(step):
        table = normal(4, seed=step)
        score = lambda s, b, h, i, j: s * table[h]
        return flexc.attention(score, flexc.masks.sliding_window(3 + step) & flexc.masks.document(torch.arange(20) // (3 + step)))

    q = qkv(q_len=20)[0]
    assert steps(lambda q, kernel: kernel(q, q, q), [(q, make(step)) for step in range(12)]) == 2
    assert len(compiled) == 2


def test_dynamic_batch_and_length(compiled):
    kernel = flexc.attention(by_global, causal)
    arguments = []
    for batch, length in ((2, 16), (3, 20), (4, 33), (5, 50)):
        q, k, _ = qkv(batch=batch, q_len=length, kv_len=length + 5)
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
        arguments.append((q, k))
    assert steps(lambda q, k: kernel(q, k, k), arguments) == 1 and len(compiled) == 1


def test_dynamic_length_that_a_mask_captures(compiled):
    """A run-time number from the start: as a constant it would break what mark_dynamic promises."""
    arguments = [qkv(q_len=length)[:1] for length in (16, 20, 33, 60)]
    for (q,) in arguments:
        torch._dynamo.mark_dynamic(q, 2)
    assert steps(lambda q: flexc.attention(None, lambda b, h, i, j, n=q.shape[2]: (i >= j) & (j < n - 1))(q, q, q), arguments) == 1
    assert len({artifact.key for artifact in compiled}) <= 2


def test_size_of_a_captured_tensor_that_is_dynamic():
    arguments = [(qkv(q_len=20)[0], normal(size)) for size in (30, 31, 45)]

    def biased(q, table):
        return flexc.attention(lambda s, b, h, i, j: s + table[(i - j) % table.shape[0]])(q, q, q)

    assert steps(biased, arguments) <= 3


# --- variants as text --------------------------------------------------------------------------------------------------------------------


def variant_and_captures(kernel):
    trace, binding = frontend.trace(kernel.score_mod, kernel.mask_mod)
    variant = variants.variant_of(kernel, trace)
    return variant, list(binding.tensors), *split_numbers(variant.graph, binding.scalars)


def test_compiled_region_outlives_its_kernel():
    """Kernels are collected, what was kept of their texts is forgotten: the text says all."""
    kernel = flexc.attention(by_global, causal)
    q = qkv(q_len=20)[0]
    run = compile_whole(lambda q, kernel: kernel(q, q, q))
    expected = run(q, kernel)
    variant, *_ = variant_and_captures(kernel)
    assert [user() for user in variant.users] == [kernel]
    pipeline.clear_cache()
    variants._variants.clear()
    assert run(q, kernel).equal(expected)
    remade = variants.variant_from(variant.text)
    assert remade is not variant and remade.graph == variant.graph and remade.text == variant.text
    del kernel, run
    torch._dynamo.reset()
    gc.collect()
    assert [user() for user in variant.users] == [None]


def test_number_of_kept_variants_is_bounded(monkeypatch):
    monkeypatch.setattr(variants, "_MOST_VARIANTS", 6)
    variants._variants.clear()
    for step in range(10):
        kernel = flexc.attention(eval(f"lambda s, b, h, i, j: s * {step + 2}"))
        assert variants.variant_from(variant_and_captures(kernel)[0].text).runner._backend == "auto"
    assert len(variants._variants) <= 6


def test_text_has_every_option():
    kernel = flexc.attention(by_global, None, backend="cpu", precision="exact", deterministic=True)
    variant, *_ = variant_and_captures(kernel)
    variants._variants.clear()
    runner = variants.variant_from(variant.text).runner
    assert runner._backend == "cpu" and runner._options == kernel._options and runner.__name__ == "by_global"
    other, *_ = variant_and_captures(flexc.attention(by_global, None, backend="cpu", precision="exact"))
    assert other.text != variant.text


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_compile(twin):
    kernel = twin(flexc.attention(by_global, causal))
    assert_same(lambda q: kernel(q, q, q), qkv(q_len=20, grad=True)[:1])


def test_gradients_lie_as_promised():
    """Contiguous, also where there is nothing to attend to and the inputs lie otherwise."""
    variant, *_ = variant_and_captures(flexc.attention(None, causal))
    q, k = normal(2, 7, 4, 8).transpose(1, 2), torch.zeros(2, 4, 0, 8)
    rest = ([], variant.text, None, [], [])
    out, lse = operators.ATTENTION(q, k, k, *rest)
    found = operators.ATTENTION_BACKWARD(torch.ones_like(out), None, q, k, k, out, lse, *rest)
    assert all(g.is_contiguous() and not g.any() for g in found) and found[0].shape == q.shape


@pytest.mark.parametrize("scale", [None, -0.5])
def test_opcheck(scale):
    layer = Layer()
    layer.attention(*qkv(heads=4, kv_heads=4, q_len=20))
    layer.width, layer.slope = 7, 0.75
    with torch.no_grad():
        layer.attention(*qkv(heads=4, kv_heads=4, q_len=20))
    variant, tensors, ints, floats = variant_and_captures(layer.attention)
    assert tensors and ints and floats
    q, k, v = qkv(q_len=20, grad=True)
    results = torch.library.opcheck(operators.ATTENTION, (q, k, v, tensors, variant.text, scale, ints, floats))
    assert set(results.values()) == {"SUCCESS"}
    saved = [x.detach() for x in (q, k, v, *operators.ATTENTION(q, k, v, tensors, variant.text, scale, ints, floats))]
    rest = ([t.detach() for t in tensors], variant.text, scale, ints, floats)
    out, lse = saved[3:]
    for dout, dlse in ((torch.ones_like(out), None), (None, torch.ones_like(lse)), (torch.ones_like(out), torch.ones_like(lse))):
        assert set(torch.library.opcheck(operators.ATTENTION_BACKWARD, (dout, dlse, *saved, *rest)).values()) == {"SUCCESS"}


def test_captured_integer_too_wide_for_its_kernel_is_refused():
    width = 3
    kernel = flexc.attention(None, lambda b, h, i, j: i - j < width)
    trace, _ = frontend.trace(None, kernel.mask_mod, runs_numbers=True)
    text, (q, k, v) = variants.variant_of(kernel, trace).text, qkv(q_len=8)
    operators.ATTENTION(q, k, v, [], text, None, [3], [])
    with pytest.raises(UnsupportedError, match="captured integer width was compiled for 32 bits, got 2147483648"):
        operators.ATTENTION(q, k, v, [], text, None, [2**31], [])


# --- errors ------------------------------------------------------------------------------------------------------------------------------


def test_function_that_cannot_be_traced_says_so_as_in_eager():
    def endless(s, batch, head, q_idx, kv_idx):
        for _ in range(q_idx):
            s = s + 1
        return s

    q = qkv(q_len=8)[0]
    for options in ({"fullgraph": True}, {}):
        torch._dynamo.reset()
        with pytest.raises(TraceError, match="(?s)over a traced length .*test_compile.py.*instead: a loop with a fixed number"):
            torch.compile(lambda q: flexc.attention(endless)(q, q, q), backend="eager", **options)(q)
    with pytest.raises(Exception, match="expected 5 .*or 4 .*for a mask function"):
        compile_whole(lambda q: flexc.kernel(lambda s, b, h: s)(q, q, q))(q)
    with pytest.raises(flexc.InputError, match="mask_mod takes 5 positional arguments, expected 4"):
        compile_whole(lambda q: flexc.attention(None, lambda s, b, h, i, j: s)(q, q, q))(q)
    with pytest.raises(flexc.InputError, match='unknown precision "?.?best'):
        compile_whole(lambda q: flexc.attention(precision="best")(q, q, q))(q)


def test_wrong_inputs_are_refused_while_compiling():
    kernel, (q, k, v) = flexc.attention(), qkv(q_len=8)
    run = compile_whole(lambda q, k, v: kernel(q, k, v))
    with pytest.raises(ShapeError, match="q and k must have one head_dim, got 32 and 4"):
        run(q, k[..., :4], v)
    with pytest.raises(ShapeError, match="q has 3 dimensions"):
        run(q[0], k, v)
    with pytest.raises(flexc.InputError, match="v is a list; expected a torch.Tensor"):
        compile_whole(lambda q: kernel(q, q, [q]))(q)


def test_scale_in_a_tensor_is_refused_or_runs_in_eager():
    q, scale = qkv(q_len=8)[0], torch.tensor(0.5)
    function = lambda q, scale: alibi(q, q, q, scale=scale)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="scale is a tensor, whose value torch.compile does not know"):
        compile_whole(function)(q, scale)
    assert torch.compile(function, backend="eager")(q, scale).equal(alibi(q, q, q, scale=0.5))


def test_captured_array_is_refused_or_runs_in_eager():
    q, array = qkv(q_len=8)[0], np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    kernel = flexc.attention(lambda s, b, h, i, j: s * array[h])
    function = lambda q: kernel(q, q, q) * 1.0
    with pytest.raises(torch._dynamo.exc.Unsupported, match="captured NumPy array array, whose contents torch.compile does not watch"):
        compile_whole(function)(q)
    torch._dynamo.reset()
    run = torch.compile(function, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(q), function(q))
        array *= 2


def test_eager_setting_is_refused_or_obeyed(monkeypatch):
    monkeypatch.setenv("FLEXC_EAGER", "1")
    q = qkv(q_len=8)[0]
    function = lambda q: alibi(q, q, q)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="FLEXC_EAGER=1 runs score and mask functions in Python"):
        compile_whole(function)(q)
    torch.testing.assert_close(torch.compile(function, backend="eager")(q), function(q))


def test_number_set_inside_the_region_is_refused():
    holder = Layer()

    def forward(x):
        holder.slope = 2.5
        return holder(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="captured number slope changes inside the compiled region"):
        compile_whole(forward)(normal(2, 20, 16))


def test_checked_indices(monkeypatch):
    monkeypatch.setenv("FLEXC_CHECK", "1")
    q = qkv(q_len=20)[0]
    with pytest.raises(flexc.IndexRangeError):
        compile_whole(lambda q: flexc.attention(lambda s, b, h, i, j: s + TABLE[j])(q, q, q))(q)


# --- modes -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    layer, x = Layer(), normal(2, 20, 16)
    run = compile_whole(layer)
    with mode():
        out = run(x)
        torch.testing.assert_close(out, layer(x))
    assert not out.requires_grad


def test_autocast():
    layer, x = Layer(), normal(2, 20, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = compile_whole(layer)(x), layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    q = qkv(q_len=20, grad=True)[0]
    run = compile_whole(of_a_computed_capture)
    expected = torch.autograd.grad(of_a_computed_capture(q).sin().sum(), [q])[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = run(q)
    assert out.dtype == torch.float32
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), [q])[0], expected)


def test_deterministic_algorithms():
    """The flag asks every kernel for it, in eager code and under torch.compile; with warn_only it does not."""
    q = qkv(q_len=20)[0]
    kernel = flexc.attention(lambda s, b, h, i, j: s * 1.25 + h)
    run = compile_whole(lambda q: kernel(q, q, q))
    seen = []
    try:
        for flags in ({}, {"mode": True}, {"mode": True, "warn_only": True}):
            torch.use_deterministic_algorithms(**(flags or {"mode": False}))
            for call in (lambda: kernel(q, q, q), lambda: run(q)):
                call()
                seen.append(kernel._last[0].options.deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, False, True, True, False, False]
    assert not kernel._options.deterministic


def test_threads():
    """Each with a kernel, numbers and sizes of its own, in eager code below a mode, and in one compiled function."""
    import threading

    run = compile_whole(lambda q, kernel: kernel(q, q, q), dynamic=True)
    wrong, start = [], threading.Barrier(3)

    def work(index):
        table = normal(4, seed=index)
        kernel = flexc.attention(lambda s, b, h, i, j: s * table[h] + index, lambda b, h, i, j: i - j < index + 2)
        start.wait()
        for step in range(3):
            q = qkv(q_len=18 + index + step, seed=index)[0]
            expected = kernel(q, q, q)
            mapped = torch.func.vmap(lambda q: kernel(q, q, q))(q[None])[0]
            for found in (run(q, kernel), mapped):
                if not torch.allclose(found, expected, atol=1e-5):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- checkpointing -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_selective_checkpoint_names_the_operator(forwards, is_saved, is_compiled):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, operator, *args, **kwargs):
        saves = operator == torch.ops.flexc.attention.default and is_saved
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.MUST_RECOMPUTE

    def checkpointed(x):
        return checkpoint(layer, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))

    layer, x = Layer(), normal(2, 20, 16, grad=True)
    expected = torch.autograd.grad(layer(x).sin().sum(), [x, layer.factor])
    forwards.clear()
    out = (compile_whole(checkpointed) if is_compiled else checkpointed)(x)
    assert len(forwards) == 1
    found = torch.autograd.grad(out.sin().sum(), [x, layer.factor])
    assert len(forwards) == (1 if is_saved else 2)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs)


def test_checkpoint_in_a_compiled_region():
    from torch.utils.checkpoint import checkpoint

    layer = Layer()
    assert_same(lambda x: checkpoint(layer, x, use_reentrant=False), [normal(2, 20, 16, grad=True)], [layer.factor])


# --- export ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_export(strict, is_dynamic):
    """The program runs here, after decompositions and after a round trip through a file; parameters stay parameters."""
    layer, x = Layer().eval(), normal(2, 20, 16)
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=20)},) if is_dynamic else None
    with torch.no_grad():
        program = torch.export.export(layer, (x,), strict=strict, dynamic_shapes=sizes)
        others = [x, normal(5, 13, 16)] if is_dynamic else [x]
        expected = [layer(y) for y in others]
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file)
        variants._variants.clear()
        for made in (program, program.run_decompositions(), loaded):
            for y, truth in zip(others, expected):
                torch.testing.assert_close(made.module()(y), truth)
    assert {"factor", "projection.weight"} <= set(program.state_dict)


def test_make_fx_sees_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    q = qkv(q_len=20)[0]
    kernel = flexc.attention(lambda s, b, h, i, j: s * 2, causal)
    graph = make_fx(lambda q: kernel(q, q, q), tracing_mode="symbolic")(q)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"].count(operators.ATTENTION) == 1
    other = qkv(batch=3, q_len=31)[0]
    assert graph(other).equal(kernel(other, other, other))


def test_constants_that_a_function_makes_are_no_operators_of_the_program():
    """Tracing computes with them: under a mode they would be recorded, or have no values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q = qkv(q_len=20)[0]
    kernel = flexc.attention(lambda s, b, h, i, j: s * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0]).cumsum(0)[h])
    graph = make_fx(lambda q: kernel(q, q, q), tracing_mode="symbolic")(q)
    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert targets == {operators.ATTENTION, operator.getitem}
    assert graph(q).equal(kernel(q, q, q))


def test_no_warning_of_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        compile_whole(of_globals)(qkv(q_len=8)[0])
