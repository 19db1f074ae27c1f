"""The largest score of each row: float32, natural units, -inf for a row without keys, and no gradient; on every way to a kernel."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flexc
from tests.accuracy import distance, normal, qkv

largest_scores = importlib.import_module("flexc.reference").largest_scores


def tilted(score, batch, head, q_idx, kv_idx):
    return score * (head + 1) - 0.3 * (q_idx - kv_idx) + batch


def late(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 40 and q_idx > 10


VARIANTS = [(None, None), (tilted, None), (None, late), (tilted, late), (lambda s, b, h, i, j: -abs(s) - 5.0, late)]


def check(kernel, q, k, v, **named):
    out, aux = kernel(q, k, v, return_max_scores=True, **named)
    truth = largest_scores(kernel.score_mod, kernel.mask_mod, q, k, **named)
    plain, others = kernel(q, k, v, return_lse=True, **named)
    assert others.max_scores is None and aux.lse.equal(others.lse) and out.equal(plain)
    assert aux.max_scores.dtype == torch.float32 and not aux.max_scores.requires_grad
    assert distance(aux.max_scores, truth) < (0.05 if q.dtype == torch.bfloat16 else 2e-5)
    assert bool((aux.max_scores <= aux.lse + 1e-4).all())


@pytest.mark.parametrize(("score_mod", "mask_mod"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_scores(score_mod, mask_mod, dtype, backend, device):
    kernel = flexc.attention(score_mod, mask_mod, backend=backend)
    check(kernel, *qkv(q_len=150, kv_len=130, device=device, dtype=dtype))
    check(kernel, *qkv(q_len=150, kv_len=130, device=device, dtype=dtype), scale=-0.2)


def test_rows_without_keys_and_no_keys_at_all(backend, device):
    q, k, v = qkv(q_len=20, device=device)
    kernel = flexc.attention(None, lambda b, h, i, j: (i > 3) & (i >= j), backend=backend)
    largest = kernel(q, k, v, return_max_scores=True)[1].max_scores
    assert bool((largest[:, :, :4] == -math.inf).all()) and bool(largest[:, :, 4:].isfinite().all())
    largest = kernel(q, k[:, :, :0], v[:, :, :0], return_max_scores=True)[1].max_scores
    assert largest.shape == (2, 4, 20) and bool((largest == -math.inf).all())


def test_they_have_no_gradient_and_leave_the_others_as_they_are(backend, device):
    q, k, v = qkv(q_len=50, device=device, grad=True)
    weight = normal(4, device=device, grad=True)
    kernel = flexc.attention(lambda s, b, h, i, j: s * weight[h], late, backend=backend)
    out, aux = kernel(q, k, v, return_max_scores=True)
    assert not aux.max_scores.requires_grad and out.requires_grad and aux.lse.requires_grad
    found = torch.autograd.grad((out.sum() + aux.lse[:, :, 11:].sum()), [q, k, v, weight])
    out, aux = kernel(q, k, v, return_lse=True)
    expected = torch.autograd.grad((out.sum() + aux.lse[:, :, 11:].sum()), [q, k, v, weight])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_kernel_that_is_not_asked_computes_none():
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(tilted, late)
    kernel(q, k, v, return_lse=True)
    assert "largest" not in kernel.source
    kernel(q, k, v, return_max_scores=True)
    assert "largest" in kernel.source


def test_the_sink_is_no_score():
    q, k, v = qkv(q_len=20)
    sink = torch.full((4,), 50.0)
    kernel = flexc.attention(tilted, late)
    with_sink = kernel(q, k, v, sink=sink, return_max_scores=True)[1]
    assert with_sink.max_scores.equal(kernel(q, k, v, return_max_scores=True)[1].max_scores)
    assert bool((with_sink.lse > 49).all())


@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    q, k, v = qkv(q_len=50, grad=True)
    kernel = flexc.attention(tilted, late)
    out, aux = kernel(q, k, v, return_max_scores=True)
    run = torch.compile(lambda q, k, v: kernel(q, k, v, return_max_scores=True), backend="aot_eager", fullgraph=True)
    found, others = run(q, k, v)
    assert found.equal(out) and others.max_scores.equal(aux.max_scores) and others.lse.equal(aux.lse)
    assert not others.max_scores.requires_grad
    for x, y in zip(torch.autograd.grad(found.sum(), [q, k, v]), torch.autograd.grad(out.sum(), [q, k, v]), strict=True):
        torch.testing.assert_close(x, y)


def test_under_vmap_and_grad():
    q, k, v = (x[None].repeat(3, 1, 1, 1, 1) * torch.arange(1, 4).view(3, 1, 1, 1, 1) for x in qkv(q_len=20))
    kernel = flexc.attention(lambda s, b, h, i, j: s * (h + 1), late)
    call = lambda q, k, v: kernel(q, k, v, return_max_scores=True)[1].max_scores
    found = torch.func.vmap(call)(q, k, v)
    assert found.equal(torch.stack([call(*one) for one in zip(q, k, v)]))
    by_batch = flexc.attention(tilted, late)
    call = lambda q, k, v: by_batch(q, k, v, return_max_scores=True)[1].max_scores
    assert torch.func.vmap(call)(q, k, v).equal(torch.stack([call(*one) for one in zip(q, k, v)]))

    def loss(q):
        out, aux = kernel(q, k[0], v[0], return_max_scores=True)
        return out.sum(), aux.max_scores

    gradient, largest = torch.func.grad(loss, has_aux=True)(q[0])
    assert largest.equal(found[0]) and gradient.equal(torch.func.grad(lambda q: kernel(q, k[0], v[0]).sum())(q[0]))


def test_the_operator_passes_pytorchs_checks():
    from flexc import operators, variants

    q, k, v = qkv(q_len=20, grad=True)
    kernel = flexc.attention(None, late)
    text = variants.variant_of(kernel, flexc.frontend.trace(None, late)[0]).text
    torch.library.opcheck(operators.ATTENTION_WITH_MAX, (q, k, v, [], text, None, [], []))


def test_in_plain_pytorch(monkeypatch):
    q, k, v = qkv(q_len=50)
    kernel = flexc.attention(tilted, late)
    expected = kernel(q, k, v, return_max_scores=True)[1].max_scores
    monkeypatch.setenv("FLEXC_EAGER", "1")
    assert distance(kernel(q, k, v, return_max_scores=True)[1].max_scores, expected) < 2e-5


def test_positions():
    q, k, v = qkv(q_len=20, kv_len=50)
    kernel = flexc.attention(None, lambda b, h, i, j: i >= j)
    found = kernel(q, k, v, q_offset=30, kv_len=45, return_max_scores=True)[1].max_scores
    assert distance(found, largest_scores(None, kernel.mask_mod, q, k, q_offset=30, kv_len=45)) < 2e-5


def test_auto_takes_cute_for_them_on_hopper():
    pytest.importorskip("cutlass", reason="needs the package nvidia-cutlass-dsl")
    from flexc.backends import Options, Shapes
    from flexc.pipeline import compile_for

    shapes = Shapes(1, 2, 2, 128, 128, 64, 64, torch.bfloat16)
    artifact = compile_for(None, late, shapes=shapes, target=flexc.Target.parse("sm_90a"), options=Options(max_scores=True))
    assert artifact.backend.name == "cute" and artifact.plan.max_scores and "return out, lse, largest" in artifact.source


INTERPRETED = """
import torch, flexc
from tests.test_max_scores import VARIANTS, check
from tests.accuracy import qkv
for score_mod, mask_mod in VARIANTS:
    check(flexc.attention(score_mod, mask_mod, backend="triton"), *qkv(1, 2, 1, 70, 60, 16))
print("right")
"""


def test_triton_in_its_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "right", done.stderr[-2000:]
