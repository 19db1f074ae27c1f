"""flex_attention call by call: every argument, return and error, beside PyTorch's own and the float64 reference."""

from __future__ import annotations

import gc
import inspect
import math
import warnings
import weakref
from functools import partial

import pytest
import torch

import flexc
from flexc import compat, frontend
from flexc.check import compare
from tests.accuracy import normal, qkv
from tests.compat.beside import KNOWS_ORDERS, TORCH, Called, assert_right, torchs


def causal(b, h, q, kv):
    return q >= kv


def late(b, h, q, kv):
    """The first ten queries see nothing, and batch element 1 neither."""
    return (q >= 10) & (b < 1)


def cap(score, b, h, q, kv):
    return 4.0 * torch.tanh(score / 4.0)


def block_mask_of(mask_mod, q_len, kv_len=None, B=None, H=None, **options):
    return compat.create_block_mask(mask_mod, B, H, q_len, kv_len or q_len, device="cpu", **options)


# --- signatures -------------------------------------------------------------------------------------------------------------------------

SHARED = "flex_attention create_block_mask create_mask and_masks or_masks noop_mask AuxRequest AuxOutput".split()
METHODS = "__init__ from_kv_blocks as_tuple __getitem__ numel sparsity to_dense to_string to _adjust".split()


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@KNOWS_ORDERS
@pytest.mark.parametrize("name", SHARED)
def test_signatures_are_those_of_torch(name):
    assert parameters(getattr(compat, name)) == parameters(getattr(TORCH, name))


@KNOWS_ORDERS
@pytest.mark.parametrize("name", METHODS)
def test_method_signatures_are_those_of_torch(name):
    def without_noop(function):
        return [(*p[:2], "noop" if p[2] in (compat.noop_mask, TORCH.noop_mask) else p[2]) for p in parameters(function)]

    assert without_noop(getattr(compat.BlockMask, name)) == without_noop(getattr(TORCH.BlockMask, name))


def test_every_public_name_of_torch_is_there():
    assert set(TORCH.__all__) <= set(compat.__all__)
    public = {name for name in dir(TORCH.BlockMask) if not name.startswith("_")}
    ours = compat.create_block_mask(causal, 1, 1, 8, 8, device="cpu")
    assert all(hasattr(ours, name) for name in public | set(TORCH.BlockMask.__annotations__))


def test_aux_tuples_are_those_of_torch():
    assert compat.AuxRequest() == TORCH.AuxRequest() == (False, False)
    assert compat.AuxOutput() == TORCH.AuxOutput() == (None, None)
    assert compat.AuxRequest._fields == TORCH.AuxRequest._fields and compat.AuxOutput._fields == TORCH.AuxOutput._fields


# --- arguments and returns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("score_mod", [None, cap])
@pytest.mark.parametrize("mask_mod", [None, causal, late])
def test_output_and_lse_beside_torch(mask_mod, score_mod, dtype):
    q, k, v = qkv(2, 4, 4, 45, 61, 16, 24, dtype=dtype)
    ours = None if mask_mod is None else block_mask_of(mask_mod, 45, 61, 2)
    theirs = None if mask_mod is None else TORCH.create_block_mask(mask_mod, 2, None, 45, 61, device="cpu")
    out, lse = compat.flex_attention(q, k, v, score_mod, ours, return_lse=True)
    expected, aux = torchs(q, k, v, score_mod, theirs, return_aux=TORCH.AuxRequest(lse=True))
    assert (out.dtype, out.shape, lse.shape) == (expected.dtype, expected.shape, aux.lse.shape)
    close = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out, expected, rtol=close, atol=close)
    torch.testing.assert_close(lse, aux.lse.float(), rtol=2e-6, atol=2e-6 if dtype.itemsize > 2 else close)
    assert lse.dtype == torch.float32
    if mask_mod is late:
        assert not out[:, :, :10].any() and not out[1].any() and bool((lse[:, :, :10] == -math.inf).all())


@pytest.mark.parametrize("mask_mod", [None, causal, late])
def test_gradients(mask_mod):
    """Also through lse, and 0 for rows without keys."""
    block_mask = None if mask_mod is None else block_mask_of(mask_mod, 45, 61, 2)
    assert_right(*qkv(2, 4, 4, 45, 61, 16, 24), cap, mask_mod, block_mask)


def test_gradients_of_captured_tensors_and_what_they_are_computed_from():
    weight = normal(4, seed=1, grad=True)
    bias = 2 * weight
    table = normal(2, 45, seed=2, grad=True)

    def biased(score, b, h, q, kv):
        return score * bias[h] + table[b, kv]

    assert_right(*qkv(2, 4, 2, 45), biased, causal, block_mask_of(causal, 45), {"weight": weight, "table": table}, enable_gqa=True)


@pytest.mark.parametrize("scale", [0.3, 1, 0.0, -0.7, None])
def test_scale(scale):
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    torch.testing.assert_close(compat.flex_attention(q, k, v, scale=scale), torchs(q, k, v, scale=scale), rtol=1e-5, atol=1e-5)


def test_arguments_by_position():
    q, k, v = qkv(1, 2, 1, 20, dim=8)
    mask = block_mask_of(causal, 20)
    out, lse = compat.flex_attention(q, k, v, cap, mask, 0.2, True, True, {"BACKEND": "AUTO"})
    expected, expected_lse = flexc.attention(cap, causal)(q, k, v, scale=0.2, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse.lse)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (5, 1), (3, 3)])
def test_grouped_heads(heads):
    q, k, v = qkv(2, *heads, 30, dim=8, dtype=torch.float64)
    mask = block_mask_of(lambda b, h, q, kv: q >= kv - h, 30, None, None, heads[0])
    theirs = TORCH.create_block_mask(mask.mask_mod, 1, heads[0], 30, 30, device="cpu")
    expected = torchs(q, k, v, cap, theirs, enable_gqa=True)
    torch.testing.assert_close(compat.flex_attention(q, k, v, cap, mask, enable_gqa=True), expected)


def test_returns():
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    out = compat.flex_attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    with_lse = compat.flex_attention(q, k, v, return_lse=True)
    assert isinstance(with_lse, tuple) and isinstance(with_lse[1], torch.Tensor)
    nothing = compat.flex_attention(q, k, v, return_aux=compat.AuxRequest())
    assert torch.equal(nothing[0], out) and nothing[1] == compat.AuxOutput(None, None)
    aux = compat.flex_attention(q, k, v, return_aux=compat.AuxRequest(lse=True))[1]
    assert isinstance(aux, compat.AuxOutput) and torch.equal(aux.lse, with_lse[1]) and aux.max_scores is None
    assert torch.equal(compat.flex_attention(q, k, v, return_aux=TORCH.AuxRequest(lse=True))[1].lse, aux.lse)


def test_max_scores_are_those_of_torchs_mathematics():
    """PyTorch gives them on GPUs only, by a kernel; its mathematics for them runs everywhere."""
    from torch._higher_order_ops.flex_attention import math_attention

    q, k, v = qkv(2, 4, 2, 20, dim=8, dtype=torch.float64)
    score_mod = lambda s, b, h, i, j: s * (h + 1) - 0.1 * (i - j)
    mask_mod = lambda b, h, i, j: (i >= j) & (i > 3)
    block_mask = TORCH.create_block_mask(mask_mod, None, None, 20, 20, device="cpu", BLOCK_SIZE=(16, 16))
    torchs = math_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), score_mod, block_mask.as_tuple(), 0.25, {})[
        2
    ] * math.log(2)
    for request in (compat.AuxRequest(max_scores=True), compat.AuxRequest(True, True), TORCH.AuxRequest(max_scores=True)):
        _, aux = compat.flex_attention(q, k, v, score_mod, block_mask, 0.25, enable_gqa=True, return_aux=request)
        assert aux.max_scores.dtype == torch.float32 and not aux.max_scores.requires_grad
        assert (aux.lse is None) is not request.lse
        assert bool((aux.max_scores[:, :, :4] == -math.inf).all())
        torch.testing.assert_close(aux.max_scores.double(), torchs, atol=1e-6, rtol=1e-6)


def test_one_key_value_batch_for_all_queries():
    q, k, v = qkv(3, 2, 2, 20, dim=8)
    k, v = k[:1], v[:1]
    mask = block_mask_of(lambda b, h, q, kv: kv < 5 * (b + 1), 20, B=3)
    theirs = TORCH.create_block_mask(mask.mask_mod, 3, None, 20, 20, device="cpu")
    torch.testing.assert_close(compat.flex_attention(q, k, v, block_mask=mask), torchs(q, k, v, block_mask=theirs), rtol=1e-5, atol=1e-5)
    for x in (q, k, v):
        x.requires_grad_()
    compat.flex_attention(q, k, v, block_mask=mask).sum().backward()
    assert k.grad.shape == (1, 2, 20, 8)


def test_autocast_casts_as_torch_does():
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = compat.flex_attention(q, k.half(), v), torchs(q, k.half(), v)
        wide = compat.flex_attention(q.double(), k.double(), v.double())
    assert out.dtype == expected.dtype == torch.bfloat16 and wide.dtype == torch.float64
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_keys_and_values_of_fewer_bits():
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    for low in (torch.bfloat16, torch.float16):
        out = compat.flex_attention(q, k.to(low), v.to(low))
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, torchs(q, k.to(low), v.to(low)), rtol=1e-5, atol=1e-5)
    with pytest.raises(flexc.InputError, match="must have one dtype, got torch.bfloat16, torch.float32 and torch.float32"):
        compat.flex_attention(q.bfloat16(), k, v)


def test_torchs_block_mask_for_any_lengths():
    """PyTorch makes one block of 2^30 tokens where none is given; some libraries pass it on."""
    q, k, v = qkv(2, 2, 2, 20, 30, dim=8)
    empty = TORCH._create_empty_block_mask(q, k)
    assert torch.equal(compat.flex_attention(q, k, v, block_mask=empty), compat.flex_attention(q, k, v))


def test_mask_that_reads_batch_and_head_made_for_one_of_each():
    """The lists of B=None, H=None are those of batch element 0 and head 0; the function decides."""

    def by_both(b, h, q, kv):
        return kv < 3 + 4 * h + 8 * b

    q, k, v = qkv(2, 4, 4, 40, dim=8)
    assert_right(q, k, v, None, by_both, block_mask_of(by_both, 40, BLOCK_SIZE=8))
    assert_right(q, k, v, None, by_both, block_mask_of(by_both, 40, B=1, H=1, BLOCK_SIZE=8))
    assert_right(q, k, v, None, by_both, block_mask_of(by_both, 40, B=2, H=4, BLOCK_SIZE=8))


def test_torchs_mask_that_reads_the_head_made_for_one_head_is_refused():
    theirs = TORCH.create_block_mask(lambda b, h, q, kv: kv < 3 + 4 * h, None, None, 40, 40, device="cpu", BLOCK_SIZE=8)
    with pytest.raises(flexc.ShapeError, match="reads `head`, but its block lists were made for H=1 and query has 4: .* with H=4"):
        compat.flex_attention(*qkv(2, 4, 4, 40, dim=8), block_mask=theirs)
    theirs = TORCH.create_block_mask(lambda b, h, q, kv: kv < 3 + 4 * b, None, None, 40, 40, device="cpu", BLOCK_SIZE=8)
    with pytest.raises(flexc.ShapeError, match="reads `batch`, but its block lists were made for B=1 and query has 2"):
        compat.flex_attention(*qkv(2, 4, 4, 40, dim=8), block_mask=theirs)


def test_torchs_mask_for_one_head_whose_lists_name_every_block():
    """Lists that leave everything to the function hold for every head."""

    def by_head(b, h, q, kv):
        return kv < 3 + 4 * h

    count, indices = torch.full((1, 1, 5), 5, dtype=torch.int32), torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5)
    theirs = TORCH.BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=8, mask_mod=by_head)
    assert_right(*qkv(2, 4, 4, 40, dim=8), None, by_head, theirs)


def test_torchs_paged_attention():
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    page, pages = 16, 10
    q, k, v = qkv(2, 2, 2, 64, dim=16)
    paged = PagedAttention(pages, page, 2, device="cpu")
    for b in range(2):
        paged.reserve(torch.tensor(b), torch.tensor(64))
    k_cache, v_cache = (torch.zeros(1, 2, pages * page, 16) for _ in range(2))
    paged.assign(torch.arange(2), torch.arange(64).expand(2, 64), k, v, k_cache, v_cache)
    mask = TORCH.create_block_mask(causal, 2, 1, 64, 64, device="cpu", BLOCK_SIZE=page)

    def biased(score, b, h, q, kv):
        return score + (q - kv) * 0.125

    out = compat.flex_attention(q, k_cache, v_cache, paged.get_score_mod(biased), paged.convert_logical_block_mask(mask))
    torch.testing.assert_close(out.double(), flexc.reference(biased, causal, q, k, v)[0], rtol=1e-5, atol=1e-5)


# --- kernels are shared -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """How many functions were traced."""
    made = []
    plain = frontend.trace.__globals__["_trace"]
    monkeypatch.setitem(frontend.trace.__globals__, "_trace", lambda *args: made.append(args) or plain(*args))
    return made


@pytest.mark.parametrize("module", [compat, TORCH])
def test_closures_made_anew_do_not_trace_again(traces, module):
    def call(width, slopes):
        def window(b, h, q, kv):
            return (q >= kv) & (q - kv < width)

        def biased(score, b, h, q, kv):
            return score + slopes[h]

        mask = module.create_block_mask(window, None, None, 40, 40, device="cpu")
        assert_close_to_reference(biased, window, mask)

    for width in (5, 5, 6, 7, 8):
        call(width, torch.rand(2))
    kept = len(traces)
    for width in (9, 10, 11):
        call(width, torch.rand(2))
    assert len(traces) == kept


def assert_close_to_reference(score_mod, mask_mod, block_mask):
    q, k, v = qkv(2, 2, 2, 40, dim=8)
    out = compat.flex_attention(q, k, v, score_mod, block_mask)
    torch.testing.assert_close(out.double(), flexc.reference(score_mod, mask_mod, q, k, v)[0], rtol=1e-5, atol=1e-5)


def test_decoding_step_by_step_traces_a_few_times_only(traces):
    """A picked row with a rule of its own for each token, as PyTorch's users decode, and with the rule that it keeps."""
    whole = block_mask_of(causal, 80, BLOCK_SIZE=8)
    q, k, v = qkv(1, 2, 2, 80, dim=8)
    kept = {}
    for step in range(1, 80, 6):
        mask = whole[:, :, step // 8]
        compat.flex_attention(q[:, :, step // 8 * 8 : step // 8 * 8 + 8], k, v, block_mask=mask)
        mask.mask_mod = lambda b, h, q, kv, step=step: q + step >= kv
        mask.seq_lengths = (1, 80)
        compat.flex_attention(q[:, :, step : step + 1], k, v, block_mask=mask)
        kept[step] = len(traces)
    assert kept[79] == kept[31]


def test_functions_of_equal_code_with_other_defaults_and_captures_are_told_apart():
    def times(factor):
        def scaled(score, b, h, q, kv, offset=factor):
            return score * factor + offset * h

        return scaled

    for factor in (1.0, 2.0, -1.0, 2.0):
        assert_close_to_reference(times(factor), None, None)


def test_callables_of_every_kind():
    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, score, b, h, q, kv):
            return score * self.factor

        def method(self, score, b, h, q, kv):
            return score + self.factor * h

    def with_factor(factor, score, b, h, q, kv):
        return score * factor + h

    for factor in (2.0, 3.0):
        for function in (Scaled(factor), Scaled(factor).method, partial(with_factor, factor), flexc.scores.soft_cap(factor)):
            assert_close_to_reference(function, None, None)


def test_what_a_function_captured_is_let_go():
    def call():
        tensor = torch.rand(2)

        def biased(score, b, h, q, kv):
            return score + tensor[h]

        mask = block_mask_of(lambda b, h, q, kv: q >= kv, 20)
        compat.flex_attention(*qkv(1, 2, 2, 20, dim=8), biased, mask)
        theirs = TORCH.create_block_mask(causal, None, None, 20, 20, device="cpu", BLOCK_SIZE=8)
        compat.flex_attention(*qkv(1, 2, 2, 20, dim=8), None, theirs)
        return [weakref.ref(x) for x in (tensor, biased, mask, theirs, theirs.kv_indices)]

    gone = call()
    gc.collect()
    assert [reference() for reference in gone] == [None] * 5


def test_few_kernels_are_kept(monkeypatch):
    monkeypatch.setattr(compat.attention, "_MOST_KERNELS", 3)
    q, k, v = qkv(1, 2, 2, 8, dim=8)
    for i in range(6):
        scope = {}
        exec(f"def f(score, b, h, q, kv):\n    return score + {i} * h", scope)
        compat.flex_attention(q, k, v, scope["f"])
    assert len(compat.attention._kernels) <= 3


# --- errors -----------------------------------------------------------------------------------------------------------------------------


def raises_as_torch(error, match, *args, **options):
    """The call raises what PyTorch raises, with our message."""
    with pytest.raises(error, match=match):
        compat.flex_attention(*args, **options)
    with pytest.raises(error):
        torchs(*args, **options)


def test_misfits_raise_what_torch_raises():
    q, k, v = qkv(2, 4, 4, 20, dim=8)
    raises_as_torch(ValueError, "one head_dim, got 8 and 4", q, k[..., :4], v)
    raises_as_torch(NotImplementedError, "have 3, 3, 3 dimensions: expected 4", q[0], k[0], v[0])
    raises_as_torch(ValueError, "have 1, 1, 1 dimensions: expected 4", q[0, 0, 0], k[0, 0, 0], v[0, 0, 0])
    raises_as_torch(ValueError, "one device, got cpu, meta and cpu", q, k.to("meta"), v)
    raises_as_torch(ValueError, "query has 4 heads, key and value 2: .* enable_gqa=True", q, k[:, :2], v[:, :2])
    raises_as_torch(ValueError, "multiple of those of key and value, got 4 and 3", q, k[:, :3], v[:, :3], enable_gqa=True)
    raises_as_torch(ValueError, "batch size 2, key 1: expected as many, or one and a block_mask", q, k[:1], v[:1])
    raises_as_torch(ValueError, "return_lse and return_aux", q, k, v, return_lse=True, return_aux=compat.AuxRequest(lse=True))


def test_nested_tensors_raise_what_torch_raises():
    q, _, v = qkv(1, 1, 1, 4, dim=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype: PyTorch says it once in a process
        bad = torch.nested.nested_tensor([q[0], q[0]])
    raises_as_torch(NotImplementedError, "key is a nested tensor: expected a dense one", q, bad, v)


@pytest.mark.parametrize("lengths", [(19, 20), (20, 19), (21, 20), (20, 32), (32, 32), (10, 30)])
def test_lengths_other_than_the_masks_raise_what_torch_raises(lengths):
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    for block_mask in (block_mask_of(causal, *lengths), TORCH.create_block_mask(causal, None, None, *lengths, device="cpu")):
        message = rf"created for {lengths[0]} queries and {lengths[1]} keys, got 20 and 20"
        with pytest.raises(ValueError, match=message):
            compat.flex_attention(q, k, v, block_mask=block_mask)
    with pytest.raises(ValueError):
        torchs(q, k, v, block_mask=TORCH.create_block_mask(causal, None, None, *lengths, device="cpu"))


@pytest.mark.parametrize(
    ("B", "H", "message"), [(3, 1, "batch size 3, got 2"), (1, 5, "number of heads 5, got 4"), (2, 2, "heads 2, got 4")]
)
@pytest.mark.parametrize("maker", [compat, TORCH])
def test_masks_for_other_batch_sizes_or_heads_are_refused(maker, B, H, message):
    mask = maker.create_block_mask(causal, B, H, 20, 20, device="cpu")
    with pytest.raises(flexc.ShapeError, match=f"block_mask was created for .*{message} in query: expected 1 or "):
        compat.flex_attention(*qkv(2, 4, 4, 20, dim=8), block_mask=mask)


def test_key_value_batches_that_fit_nothing():
    q, k, v = qkv(4, 2, 2, 20, dim=8)
    mask, other = (block_mask_of(causal, 20, B=B) for B in (4, 2))
    theirs, theirs_other = (TORCH.create_block_mask(causal, B, None, 20, 20, device="cpu") for B in (4, 2))
    with pytest.raises(ValueError, match="batch size 4, key 1 and block_mask 2: expected 4, 1 and 4"):
        compat.flex_attention(q, k[:1], v[:1], block_mask=other)
    with pytest.raises(ValueError):
        torchs(q, k[:1], v[:1], block_mask=theirs_other)
    with pytest.raises(RuntimeError, match="batch size 4, key 2 and value 2: expected 1 key/value for all"):
        compat.flex_attention(q, k[:2], v[:2], block_mask=mask)
    with pytest.raises(RuntimeError):
        torchs(q, k[:2], v[:2], block_mask=theirs)


@pytest.mark.parametrize("maker", [compat, TORCH])
def test_a_mask_on_another_device_raises_what_torch_raises(maker):
    mask = maker.create_block_mask(causal, None, None, 20, 20, device="cpu").to("meta")
    with pytest.raises(RuntimeError, match=r"query and block_mask on one device, got cpu and meta: block_mask.to\('cpu'\)"):
        compat.flex_attention(*qkv(1, 2, 2, 20, dim=8), block_mask=mask)


def test_what_is_no_block_mask_is_refused():
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    with pytest.raises(TypeError, match="block_mask is a function; expected a BlockMask: a mask function becomes one by create_block_mask"):
        compat.flex_attention(q, k, v, block_mask=causal)
    with pytest.raises(TypeError, match="block_mask is a Tensor; expected a BlockMask$"):
        compat.flex_attention(q, k, v, block_mask=torch.ones(20, 20))
    with pytest.raises(TypeError, match="query is a list; expected a torch.Tensor"):
        compat.flex_attention([1], k, v)


def test_functions_that_are_no_score_functions_are_refused():
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    with pytest.raises(TypeError, match="this looks like a mask"):
        compat.flex_attention(q, k, v, causal)
    with pytest.raises(flexc.TraceError, match="returns a truth value: this looks like a mask"):
        compat.flex_attention(q, k, v, lambda score, b, h, q, kv: q >= kv)
    with pytest.raises(TypeError, match="score_mod is a int; expected a function"):
        compat.flex_attention(q, k, v, 3)


def test_errors_are_those_of_flexc_too():
    for error in (compat.errors.ArgumentError, compat.errors.UsageError, compat.errors.CallableError):
        assert issubclass(error, flexc.InputError)


def test_called_as_check_calls_it():
    """The adapter of these tests: a wrong mask is noticed."""
    q, k, v = qkv(1, 2, 2, 20, dim=8)
    wrong = Called(None, causal, block_mask_of(lambda b, h, q, kv: q > kv, 20))
    assert not compare(wrong, q, k, v, {}).ok
