"""Every argument that a user can get wrong raises one clear error: what was expected, what was given, and what to write instead."""

import dataclasses
import functools
import importlib.util
import math
import subprocess
import sys
import warnings

import pytest
import torch

import flexc
from flexc import pipeline
from flexc.backends import Shapes
from flexc.compat import AuxRequest, create_block_mask, flex_attention
from flexc.errors import FlexcError, InputError, SettingError, ShapeError, ToolchainError, TraceError, UnsupportedError
from flexc.gradient_sums import refuse_large_sums
from tests.accuracy import normal, qkv


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


class Halved:
    def __call__(self, score, batch, head, q_idx, kv_idx):
        return score / 2


def soft(score, batch, head, q_idx, kv_idx):
    return torch.tanh(score)


KERNEL = flexc.attention(soft, causal)
Q, K, V = qkv(q_len=20, kv_len=30, dim=16, v_dim=8)
META = torch.device("meta")


# --- q, k and v --------------------------------------------------------------------------------------------------------------------

BAD_CALLS = {
    "a list": (lambda: ([1.0], K, V), InputError, "q is a list; expected a torch.Tensor"),
    "a NumPy array": (lambda: (Q, K.numpy(), V), InputError, "k is a ndarray; expected a torch.Tensor"),
    "None": (lambda: (Q, K, None), InputError, "v is a NoneType; expected a torch.Tensor"),
    "sparse": (lambda: (Q.to_sparse(), K, V), InputError, r"q has layout torch.sparse_coo; .*convert it with q.to_dense\(\)"),
    "q without batch": (
        lambda: (Q[0], K, V),
        ShapeError,
        r"q has 3 dimensions, \[4, 20, 16\]; expected 4: \[batch, heads, tokens, head_dim\]",
    ),
    "k without batch": (lambda: (Q, K[0], V), ShapeError, "k has 3 dimensions"),
    "v of rank five": (lambda: (Q, K, V[None]), ShapeError, r"v has 5 dimensions, \[1, 2, 2, 30, 8\]"),
    "a number": (lambda: (torch.tensor(1.0), K, V), ShapeError, r"q has 0 dimensions, \[\]"),
    "integer q": (lambda: (Q.int(), K.int(), V.int()), InputError, r"q has dtype torch.int32; .*convert it with q.to\(torch.bfloat16\)"),
    "bool q": (lambda: (Q > 0, K > 0, V > 0), InputError, "q has dtype torch.bool"),
    "complex q": (lambda: (Q.cfloat(), K.cfloat(), V.cfloat()), InputError, "q has dtype torch.complex64"),
    "fp8": (lambda: [x.to(torch.float8_e4m3fn) for x in (Q, K, V)], InputError, "q has dtype torch.float8_e4m3fn; expected float16"),
    "mixed dtypes": (lambda: (Q, K.half(), V), InputError, "one dtype, got torch.float32, torch.float16 and torch.float32"),
    "mixed devices": (lambda: (Q, K.to(META), V), InputError, "on one device, got cpu, meta and cpu"),
    "batches": (lambda: (Q, K[:1], V), ShapeError, "one batch size, got 2, 1 and 2"),
    "head_dim of q and k": (lambda: (Q, K[..., :8], V), ShapeError, "q and k must have one head_dim, got 16 and 8"),
    "tokens of k and v": (lambda: (Q, K, V[:, :, :29]), ShapeError, "k and v must have as many tokens, got 30 and 29"),
    "heads of k and v": (lambda: (Q, K, V[:, :1]), ShapeError, "k and v must have as many heads, got 2 and 1"),
    "heads that do not divide": (lambda: (Q[:, :3], K, V), ShapeError, "multiple of the heads of k and v, and not 0, got 3 and 2"),
    "fewer heads of q than of k": (
        lambda: (Q[:, :1], K, V),
        ShapeError,
        "must be a multiple of the heads of k and v, and not 0, got 1 and 2",
    ),
    "no heads of k": (lambda: (Q, K[:, :0], V[:, :0]), ShapeError, "must be a multiple .* got 4 and 0"),
    "no heads of q": (lambda: (Q[:, :0], K, V), ShapeError, "and not 0, got 0 and 2"),
    "head_dim 0": (lambda: (Q[..., :0], K[..., :0], V), ShapeError, "head_dim must be at least 1, got 0 for q and k, 8 for v"),
    "head_dim 0 of v": (lambda: (Q, K, V[..., :0]), ShapeError, "head_dim must be at least 1, got 16 for q and k, 0 for v"),
    "2^24 queries": (
        lambda: (normal(1, 2, 1, 16).expand(1, 2, 2**24, 16), K[:1], V[:1]),
        UnsupportedError,
        "fewer than 16777216 tokens on",
    ),
    "2^24 keys": (
        lambda: (Q[:1], *[normal(1, 2, 1, 16).expand(1, 2, 2**24, 16)] * 2),
        UnsupportedError,
        "tokens on every backend, got 16777216",
    ),
}


@pytest.mark.parametrize("way", ["call", "explain", "check", "eager"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_q_k_v(case, way, monkeypatch):
    inputs, kind, message = BAD_CALLS[case]
    if way == "eager":
        monkeypatch.setenv("FLEXC_EAGER", "1")
    call = {"call": KERNEL, "eager": KERNEL, "explain": KERNEL.explain, "check": functools.partial(flexc.check, KERNEL)}[way]
    with pytest.raises(kind, match=message):
        call(*inputs())


def test_nested_tensor_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([Q[0], Q[1]])
    with pytest.raises(InputError, match="q is a nested tensor; .* mask with flexc.masks.document"):
        KERNEL(nested, K, V)


def test_sparse_tensor_is_refused_after_a_dense_one_of_its_shape():
    """Sizes that were checked before are not checked again."""
    KERNEL(Q, K, V)
    with pytest.raises(InputError, match="k has layout"):
        KERNEL(Q, K.to_sparse(), V)
    with pytest.raises(InputError, match="v is a ndarray"):
        KERNEL(Q, K, V.numpy())


def test_error_is_also_the_builtin_that_fits():
    with pytest.raises(ValueError, match="head_dim"):
        KERNEL(Q, K[..., :8], V)
    with pytest.raises(TypeError, match="ndarray"):
        KERNEL(Q.numpy(), K, V)
    with pytest.raises(NotImplementedError, match="device meta: expected cuda or cpu"):
        KERNEL(Q.to(META), K.to(META), V.to(META))


def test_error_is_raised_again():
    """What is kept of sizes that were checked is their success alone."""
    for _ in range(2):
        with pytest.raises(ShapeError, match="got 3 and 2"):
            KERNEL(Q[:, :3], K, V)


def test_parameters_and_other_subclasses_of_tensor_are_taken():
    assert KERNEL(torch.nn.Parameter(Q), K, V).equal(KERNEL(Q, K, V))


# --- scale -------------------------------------------------------------------------------------------------------------------------

BAD_SCALES = [
    (math.nan, "scale must be finite in float32, got nan"),
    (math.inf, "scale must be finite in float32, got inf"),
    (-math.inf, "scale must be finite in float32, got -inf"),
    (1e39, r"scale must be finite in float32, got 1e\+39"),
    (torch.tensor(math.nan), "scale must be finite"),
    ("0.1", "scale is a str; expected a number"),
    (1j, "scale is a complex; expected a number"),
    (True, "scale is a bool; expected a number"),
    (torch.tensor([0.5, 1.0]), r"scale is a tensor of shape \[2\]; expected one number"),
    (torch.tensor(True), "scale is a bool"),
    (torch.tensor(0.5, requires_grad=True), "scale requires a gradient, which would be lost; multiply q by it"),
]


@pytest.mark.parametrize("eager", ["0", "1"])
@pytest.mark.parametrize(("scale", "message"), BAD_SCALES, ids=lambda x: str(x)[:20])
def test_bad_scale(scale, message, eager, monkeypatch):
    monkeypatch.setenv("FLEXC_EAGER", eager)
    with pytest.raises(InputError, match=message):
        KERNEL(Q, K, V, scale=scale)
    with pytest.raises(InputError, match=message):
        KERNEL.explain(Q, K, V, scale=scale)


# --- switches and sinks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["no", 1, torch.ones(2)], ids=["a text", "a number", "a tensor"])
@pytest.mark.parametrize("name", ["return_lse", "return_max_scores"])
def test_switch_that_is_neither_true_nor_false(name, value):
    """Python counts the text "no" as true."""
    with pytest.raises(InputError, match=f"{name} is a {type(value).__name__}; expected True or False"):
        KERNEL(Q, K, V, **{name: value})


def test_switch_of_packed_sequences():
    packed = [x[0].transpose(0, 1) for x in (Q, K[:, :, :20], V[:, :, :20])]
    with pytest.raises(InputError, match="return_lse is a str; expected True or False"):
        flexc.varlen_attention(*packed, torch.tensor([0, 20]), return_lse="no")


def test_sparse_sink():
    with pytest.raises(InputError, match=r"sink has layout torch.sparse_coo; .*sink.to_dense\(\)"):
        KERNEL(Q, K, V, sink=torch.zeros(4).to_sparse())


def test_tokens_and_heads_in_the_wrong_order():
    with pytest.raises(ShapeError, match=r"got 20 and 30 in \[batch, heads, tokens, head_dim\]"):
        KERNEL(*[x.transpose(1, 2) for x in (Q, K, V)])


# --- flexc.mask, flexc.check, flexc.reference, flexc.sorted, flexc.compat ------------------------------------------------------------

CALLS = {
    "mask of a kernel": (lambda: flexc.mask(flexc.kernel(causal)), InputError, "got the flexc kernel causal: pass its .mask_mod"),
    "mask and a kernel": (lambda: flexc.masks.causal & flexc.kernel(causal), InputError, "got the flexc kernel causal"),
    "mask of what makes one": (lambda: flexc.mask(flexc.masks.document), InputError, r"it makes a mask: call it, document\(...\)"),
    "check of a function": (lambda: flexc.check(soft, Q, K, V), InputError, "kernel is a function; expected a flexc kernel"),
    "reference of a kernel": (
        lambda: flexc.reference(KERNEL, None, Q, K, V),
        InputError,
        "score_mod is a flexc kernel; .*kernel.score_mod",
    ),
    "reference of a number": (lambda: flexc.reference(None, 3, Q, K, V), InputError, "mask_mod is a int; expected a function or None"),
    "reference of lists": (lambda: flexc.reference(soft, None, [1.0], K, V), InputError, "q is a list; expected a torch.Tensor"),
    "reference of other sizes": (
        lambda: flexc.reference(soft, None, Q[0], K, V),
        ShapeError,
        r"expected q \[B, Hq, Sq, D\], .*got \(4, 20, 16",
    ),
    "sorted list": (lambda: flexc.sorted([1, 2]), InputError, "expected a tensor of numbers, got a list"),
    "target of a number": (lambda: flexc.Target.parse(90), InputError, 'expected the name of a target, such as "sm_90a", got 90'),
    "device": (lambda: flexc.Target.of("gpu"), InputError, "expected device to name a device, such as 'cuda:0', got 'gpu'"),
    "map on no device of ours": (
        lambda: flexc.block_map(causal, 8, 8, device="meta"),
        InputError,
        "expected a CPU or CUDA device, got meta",
    ),
    "plot into a number": (lambda: flexc.block_map(causal, 8, 8).plot(3), InputError, "expected the path of an image file"),
    "export to a number": (lambda: KERNEL.export(3, {"heads": 4, "head_dim": 16}), InputError, "expected the path of a file"),
    "aux": (lambda: flex_attention(Q, K, V, enable_gqa=True, return_aux=True), InputError, r"is a bool; expected AuxRequest\(lse=True\)"),
    "options": (
        lambda: flex_attention(Q, K, V, enable_gqa=True, kernel_options="x"),
        InputError,
        "kernel_options is a str; expected a dict",
    ),
    "option in a list": (
        lambda: flex_attention(Q, K, V, enable_gqa=True, kernel_options={"BACKEND": ["x"]}),
        InputError,
        r"invalid BACKEND \['x'\]",
    ),
    "mask as score_mod": (
        lambda: flex_attention(Q, K, V, causal, enable_gqa=True),
        InputError,
        "a mask: pass block_mask=create_block_mask",
    ),
    "block mask on no device": (
        lambda: create_block_mask(causal, None, None, 8, 8, device="gpu"),
        InputError,
        "expected device to name a device, such as 'cuda:0', got 'gpu'",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_argument(case):
    call, kind, message = CALLS[case]
    with pytest.raises(kind, match=message):
        call()


def test_any_record_of_the_two_requests_is_taken():
    """PyTorch's own AuxRequest is another class."""
    theirs = importlib.import_module("torch.nn.attention.flex_attention").AuxRequest(lse=True)
    for request in (AuxRequest(lse=True), theirs):
        _, aux = flex_attention(Q, K, V, enable_gqa=True, return_aux=request)
        assert aux.lse.shape == (2, 4, 20)


# --- flexc.kernel, flexc.attention -------------------------------------------------------------------------------------------------


def wants(what):
    return rf"{what}; expected a function \((score, )?batch, head, q_idx, kv_idx\)"


BAD_KERNELS = {
    "score as mask": (
        lambda: flexc.attention(None, soft),
        InputError,
        "mask_mod takes 5 .* expected 4: .*looks like a score function: pass it as score_mod",
    ),
    "mask as score": (
        lambda: flexc.attention(causal),
        InputError,
        "score_mod takes 4 .* expected 5: .*looks like a mask: pass it as mask_mod",
    ),
    "Mask as score": (lambda: flexc.attention(flexc.masks.causal), InputError, "score_mod takes 4 .*looks like a mask"),
    "swapped": (lambda: flexc.attention(causal, soft), InputError, "score_mod takes 4 positional arguments"),
    "three arguments": (lambda: flexc.kernel(lambda a, b, c: a), InputError, "takes 3 positional arguments: expected 5 .* or 4"),
    "six arguments": (
        lambda: flexc.attention(lambda a, b, c, d, e, f: a),
        InputError,
        "score_mod takes 6 positional arguments, expected 5",
    ),
    "any number": (lambda: flexc.attention(lambda *a: a), TraceError, "takes any number of arguments"),
    "a number": (lambda: flexc.attention(3), InputError, wants("score_mod is a int")),
    "a mask tensor": (lambda: flexc.attention(None, torch.ones(3, 3)), InputError, wants("mask_mod is a Tensor")),
    "kernel of a number": (lambda: flexc.kernel(3), TraceError, "int 3 is not a function"),
    "kernel of None": (lambda: flexc.kernel(None), TraceError, "None is not a function"),
    "kernel of a tensor": (lambda: flexc.kernel(torch.zeros(9, 9)), TraceError, "^a Tensor is not a function"),
    "a class": (lambda: flexc.kernel(Halved), TraceError, r"(?s)Halved is a class.*instead: what that call gives, Halved\(...\)"),
    "what makes a mask": (
        lambda: flexc.attention(None, flexc.masks.document),
        TraceError,
        r"(?s)document makes mask or score functions, and is none itself.*instead: what that call gives, document\(...\)",
    ),
    "what makes a score": (lambda: flexc.kernel(flexc.scores.alibi), TraceError, r"(?s)alibi makes mask or.*what that call gives, alibi"),
    "an argument by name": (
        lambda: flexc.kernel(lambda s, b, h, i, j, *, cap: s),
        TraceError,
        r"(?s)needs the keyword argument cap.*instead: a default, or functools.partial\(function, cap=...\)",
    ),
    "a block map": (lambda: flexc.attention(None, flexc.block_map(causal, 8, 8)), InputError, "is a BlockMap; .* the map was made of"),
    "a block mask": (
        lambda: flexc.attention(None, create_block_mask(causal, None, None, 8, 8, device="cpu")),
        InputError,
        "is a BlockMask; .*pass its .mask_mod, or use flexc.compat.flex_attention",
    ),
    "a builtin": (lambda: flexc.kernel(max), TraceError, "max is not written in Python"),
    "kernel of a mask as score": (
        lambda: flexc.attention(flexc.kernel(causal)),
        InputError,
        "kernel of the mask function causal: pass it as mask_mod",
    ),
    "kernel of a score as mask": (
        lambda: flexc.attention(None, flexc.kernel(soft)),
        InputError,
        "the score function soft: pass it as score_mod",
    ),
    "kernel of two functions": (
        lambda: flexc.attention(KERNEL),
        InputError,
        "kernel of two functions, soft with mask causal; .*pass its .score_mod and",
    ),
    "kernel of none": (lambda: flexc.attention(None, flexc.attention()), InputError, "mask_mod is a flexc kernel without functions"),
    "unknown backend": (lambda: flexc.attention(backend="cuda"), InputError, 'unknown backend \'cuda\': expected "auto", "triton", "cpu"'),
    "backend in a list": (lambda: flexc.attention(backend=["cpu"]), InputError, r"unknown backend \['cpu'\]"),
    "backend None": (lambda: flexc.attention(backend=None), InputError, "unknown backend None"),
    "unknown precision": (
        lambda: flexc.attention(precision="high"),
        InputError,
        'unknown precision \'high\': expected "fast", "exact", "tf32"',
    ),
    "precision None": (lambda: flexc.attention(precision=None), InputError, "unknown precision None"),
    "autotune": (lambda: flexc.attention(autotune="yes"), InputError, "autotune is a str; expected True or False"),
    "deterministic": (lambda: flexc.attention(deterministic="no"), InputError, "deterministic is a str; expected True or False"),
}


@pytest.mark.parametrize("case", BAD_KERNELS)
def test_bad_kernel(case):
    make, kind, message = BAD_KERNELS[case]
    with pytest.raises(kind, match=message):
        make()


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        KERNEL(Q, K, V, 0.5)
    with pytest.raises(TypeError, match="positional"):
        flexc.attention(soft, causal, "cpu")


# --- captured tensors ------------------------------------------------------------------------------------------------------------------

ONE, THREE, FIVE = normal(1), normal(3), normal(5)


def table(*shape):
    values = normal(*shape)
    return lambda s, b, h, i, j: s * values[b, h, 0]


WRONG_SIZES = {
    "lengths of three for a batch of two": (
        None,
        lambda b, h, i, j: j < THREE[b],
        "the captured tensor THREE has 3 entries along dimension 0, which `batch` indexes; q has 2 batch entries",
    ),
    "five slopes for four heads": (
        lambda s, b, h, i, j: s * FIVE[h],
        None,
        "the captured tensor FIVE has 5 entries along dimension 0, which `head` indexes; q has 4 heads",
    ),
    "three slopes for four heads": (lambda s, b, h, i, j: s * THREE[h], None, "THREE has 3 entries"),
    "one slope for four heads": (lambda s, b, h, i, j: s * ONE[h], None, "ONE has 1 entries along dimension 0, which `head`"),
    "the key heads' own": (table(2, 2, 1), None, "values has 2 entries along dimension 1, which `head` indexes; q has 4 heads"),
    "batch of another size": (table(3, 4, 1), None, "values has 3 entries along dimension 0, which `batch` indexes"),
    "mask of heads": (None, lambda b, h, i, j: i - j < FIVE[h], "FIVE has 5 entries"),
    "beside a guarded read": (lambda s, b, h, i, j: torch.where(h < 3, THREE[h], FIVE[h]) + FIVE[h], None, "FIVE has 5 entries"),
    "guarded by another position": (lambda s, b, h, i, j: s + torch.where(i < 3, FIVE[h], 0.0), None, "FIVE has 5 entries"),
}


@pytest.mark.parametrize("case", WRONG_SIZES)
def test_table_for_another_batch_or_head_count(case):
    """Read without a check, it would be read past its end, or answer for the wrong heads."""
    score, mask, message = WRONG_SIZES[case]
    kernel = flexc.attention(score, mask)
    for _ in range(2):
        with pytest.raises(ShapeError, match=message):
            kernel(Q, K, V)
    with pytest.raises(ShapeError, match=message):
        kernel.explain(Q, K, V)


def test_nothing_is_compiled_for_a_table_of_the_wrong_size(monkeypatch):
    monkeypatch.setattr(pipeline, "compile_attention", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ShapeError, match="FIVE has 5 entries"):
        flexc.attention(lambda s, b, h, i, j: torch.sin(s) * FIVE[h])(Q, K, V)


def test_table_for_other_heads_is_refused_after_calls_that_fit():
    slopes = normal(4)
    kernel = flexc.attention(lambda s, b, h, i, j: s * slopes[h])
    kernel(Q, K, V)
    with pytest.raises(ShapeError, match="slopes has 4 entries .* q has 2 heads"):
        kernel(Q[:, :2], K, V)
    slopes = normal(5)
    with pytest.raises(ShapeError, match="slopes has 5 entries .* q has 4 heads"):
        kernel(Q, K, V)


def test_guarded_read_of_a_shorter_table_is_taken():
    def some_heads(score, batch, head, q_idx, kv_idx):
        return score + (THREE[head] if head < 3 else 0.0)

    def some_batches(batch, head, q_idx, kv_idx):
        return (batch > 0) | ((batch < 1) & (kv_idx <= 10 + ONE[batch]))

    for kernel in (flexc.attention(some_heads), flexc.attention(None, some_batches)):
        assert flexc.check(kernel, Q, K, V, quiet=True).ok


def test_captured_tensor_on_another_device():
    elsewhere = normal(4).to(META)
    number = torch.tensor(0.5, device=META)
    with pytest.raises(InputError, match=r"the captured tensor elsewhere is on meta and q on cpu: move it with elsewhere.to\('cpu'\)"):
        flexc.attention(lambda s, b, h, i, j: s * elsewhere[h])(Q, K, V)
    with pytest.raises(InputError, match="the captured tensor number is on meta and q on cpu"):
        flexc.attention(lambda s, b, h, i, j: s * number)(Q, K, V)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: normal(4).to_sparse(), r"(?s)values is torch.sparse_coo.*values.to_dense\(\)"),
        (lambda: normal(4).cfloat(), "(?s)values is complex64.*expected bool, an integer or a floating dtype"),
    ],
)
def test_captured_tensor_that_kernels_cannot_read(make, message):
    values = make()
    with pytest.raises(TraceError, match=message):
        flexc.attention(lambda s, b, h, i, j: s + values[h].real)(Q, K, V)


def test_integer_that_requires_a_gradient_is_refused_by_pytorch():
    with pytest.raises(RuntimeError, match="only Tensors of floating point"):
        torch.arange(4).requires_grad_()


def test_score_that_is_nan_is_named():
    def root(score, batch, head, q_idx, kv_idx):
        return torch.sqrt(-1.0 - score * score)

    report = flexc.check(flexc.attention(root), Q, K, V, quiet=True)
    assert not report.ok
    with pytest.raises(InputError, match="root gives NaN at batch 0, head 0, q_idx 0, kv_idx 0 for the score"):
        report.raise_if_bad()


# --- backends, targets, toolchains ---------------------------------------------------------------------------------------------------

SHAPES = Shapes(1, 4, 4, 256, 256, 64, 64, torch.float16)


def test_backend_without_a_kernel_for_the_device():
    with pytest.raises(UnsupportedError, match="the triton backend needs CUDA tensors, got cpu: .*TRITON_INTERPRET=1"):
        flexc.attention(backend="triton")(Q, K, V)
    with pytest.raises(UnsupportedError, match="the cpu backend needs CPU tensors, got meta"):
        flexc.attention(backend="cpu")(Q.to(META), K.to(META), V.to(META))
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    with pytest.raises(UnsupportedError, match='the cute backend needs tensors on a Hopper GPU, got cpu: use backend="triton", or "auto"'):
        flexc.attention(backend="cute")(Q, K, V)


def test_missing_triton(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else found(name, *rest))
    assert flexc.attention(soft)(Q, K, V).shape == (2, 4, 20, 8)
    message = r"the triton backend needs the package triton >= 3.5: pip install triton"
    with pytest.raises(ToolchainError, match=message):
        flexc.attention(backend="triton")(Q, K, V)
    with pytest.raises(ImportError, match=message):
        pipeline.compile_for(soft, None, shapes=SHAPES, target=flexc.Target.parse("sm_90"))


def test_the_cpu_backend_runs_where_triton_is_not_installed():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, flexc\n"
        "x = torch.ones(1, 1, 8, 4)\n"
        "print(flexc.attention(None, flexc.masks.causal)(x, x, x).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "32.0", done.stderr


def test_unknown_target():
    with pytest.raises(UnsupportedError, match="unknown target 'sm_12'; known: sm_80"):
        flexc.Target.parse("sm_12")
    with pytest.raises(InputError, match="expected a CPU or CUDA device, got meta"):
        flexc.Target.of("meta")


def test_target_that_the_backend_does_not_compile_for():
    cpu, hopper = flexc.Target.parse("cpu"), flexc.Target.parse("sm_90")
    compile_for = functools.partial(pipeline.compile_for, soft, None, shapes=SHAPES)
    with pytest.raises(InputError, match="the triton backend compiles for a GPU: expected a target such as \"sm_90a\", got 'cpu'"):
        compile_for(target=cpu, backend="triton")
    with pytest.raises(InputError, match="the cpu backend compiles for the CPU: expected the target \"cpu\", got 'sm_90a'"):
        compile_for(target=hopper, backend="cpu")
    with pytest.raises(InputError, match="unknown backend 'cuda'"):
        compile_for(target=hopper, backend="cuda")
    with pytest.raises(InputError, match='unknown direction \'sideways\': expected "fwd", "bwd"'):
        compile_for(target=hopper, direction="sideways")


def test_machine_code_of_the_cpu_backend():
    artifact = pipeline.compile_for(soft, None, shapes=SHAPES, target=flexc.Target.parse("cpu"))
    for show in (artifact.ptx, artifact.sass, artifact.resources):
        with pytest.raises(InputError, match="the cpu backend has no machine code: expected --emit ir or --emit source"):
            show()


def test_deterministic_sums_that_take_too_much_memory():
    """A sum for each pair, where the index does not say that no two pairs meet."""
    size = 4097
    bias, ids = torch.zeros(size, 1, requires_grad=True).expand(size, size), torch.arange(size)
    shapes = dataclasses.replace(SHAPES, q_len=size, kv_len=size)
    options = dataclasses.replace(pipeline.Options(), deterministic=True)
    compile_for = functools.partial(
        pipeline.compile_for, shapes=shapes, target=flexc.Target.parse("sm_90"), backend="triton", options=options
    )
    mixed = compile_for(lambda s, b, h, i, j: s + bias[ids[i], j], None)
    tensors = [bias if t.name == "bias" else ids for t in mixed.graph.tensors]
    with pytest.raises(
        UnsupportedError, match="deterministic=True on the triton backend: expected at most 4 GiB for the sums of the gradient"
    ):
        refuse_large_sums(mixed, tensors)
    refuse_large_sums(mixed, [t[:4096, :4096] if t is bias else t for t in tensors])
    refuse_large_sums(compile_for(lambda s, b, h, i, j: s + bias[i, j], None), [bias])


# --- looking inside too early ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["source", "plan", "blocks", "backend", "reason", "key", "artifact"])
def test_looking_at_what_has_not_run(name):
    with pytest.raises(FlexcError, match=r"soft has not run yet: call it on q, k, v first, or compile it with `python -m flexc show"):
        getattr(flexc.kernel(soft), name)


def test_misspelt_setting(monkeypatch):
    monkeypatch.setenv("FLEXC_EAGR", "1")
    monkeypatch.setenv("FLEXC_CACHE_SIZE", "1GiB")  # settings are read again when one changed
    with pytest.raises(SettingError, match="FLEXC_EAGR: no such setting; did you mean FLEXC_EAGER"):
        KERNEL(Q, K, V)
