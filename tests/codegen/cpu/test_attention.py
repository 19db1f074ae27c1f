"""The CPU backend against a dense float64 computation: output, lse and all gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flexc.codegen import cpu
from flexc.ir.graph import FLOAT32, Graph, const
from flexc.ir.ops import gather
from flexc.passes.derivative import differentiate
from flexc.runtime.module import load_module
from flexc.sparsity import Runs, classify
from tests.codegen.cpu.attention_cases import CASES, CAUSAL, SHAPES, B, Case, H, K, Q, S, Sizes, dense, f32, inputs, normal

Tensor = torch.Tensor
BY_NAME = {case.name: case for case in CASES}


@dataclasses.dataclass
class Result:
    """What a call gave, forward and backward."""

    out: Tensor
    lse: Tensor
    grads: list[Tensor | None]


def built(case: Case, sizes: Sizes, dtype: torch.dtype, folder: Path) -> tuple[ModuleType, Graph, cpu.Plan]:
    """The module of a case."""
    graph = differentiate(case.graph)
    plan = cpu.plan(graph, q_len=sizes.q_len, kv_len=sizes.kv_len, head_dim=sizes.dim, head_dim_v=sizes.dim_v, dtype=dtype)
    return load_module(cpu.emit(graph, plan), folder / "kernel.py"), graph, plan


def runs(case: Case, graph: Graph, sizes: Sizes, block: tuple[int, int], tensors: Sequence[Tensor]) -> Runs:
    """The case's block map."""
    sized = {"batch": sizes.batch, "heads": sizes.heads, "block": block, "tensors": tensors, "scalars": case.scalar_values()}
    return classify(graph, sizes.q_len, sizes.kv_len, **sized).rows()


def run(
    case: Case,
    folder: Path,
    *,
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.float32,
    block: tuple[int, int] = (16, 16),
    use_blocks: bool = True,
    with_lse: bool = True,
) -> tuple[Result, Result, Result]:
    """(ours, dense in the same dtype, dense in float64)."""
    sizes = sizes or case.sizes
    q, k, v = inputs(sizes, dtype)
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in case.captured()]
    scale = 1 / math.sqrt(sizes.dim)
    module, graph, _ = built(case, sizes, dtype, folder)
    rows = runs(case, graph, sizes, block, tensors) if use_blocks else None
    before = [t.clone() for t in (q, k, v, *tensors)]
    out, lse = module.forward(q, k, v, scale, tuple(tensors), case.scalar_values(), rows, block)
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse.dtype) if with_lse else None
    *dqkv, dtensors = module.backward(q, k, v, out, lse, dout, dlse, scale, tuple(tensors), case.scalar_values(), rows, block)
    for was, is_now in zip(before, (q, k, v, *tensors), strict=True):
        assert torch.allclose(was, is_now, rtol=0, atol=0, equal_nan=True), "an input was overwritten"
    assert len(dtensors) == len(tensors)
    ours = Result(out, lse, [*dqkv, *dtensors])
    return (
        ours,
        expected(case, (q, k, v), tensors, scale, dout, dlse, dtype),
        expected(case, (q, k, v), tensors, scale, dout, dlse, torch.float64),
    )


def expected(
    case: Case, qkv: Sequence[Tensor], tensors: Sequence[Tensor], scale: float, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype
) -> Result:
    """The dense computation in a dtype, with autograd's gradients."""
    learnable = [g for _, _, g in case.tensors]
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv)
    captured = [
        (t.to(dtype).requires_grad_() if g else t.to(dtype)) if t.is_floating_point() else t
        for t, g in zip(tensors, learnable, strict=True)
    ]
    out, lse = dense(case, q, k, v, scale, captured)
    wanted = [q, k, v, *(t for t, g in zip(captured, learnable, strict=True) if g)]
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        loss = loss + torch.where(lse.isinf(), 0, lse * dlse.to(dtype)).sum()
    if loss.requires_grad:
        found = list(torch.autograd.grad(loss, wanted, allow_unused=True))
    else:
        found = [None] * len(wanted)
    found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]
    grads: list[Tensor | None] = found[:3]
    rest = iter(found[3:])
    grads += [next(rest) if g else None for g in learnable]
    return Result(out.detach(), lse.detach(), grads)


def assert_as_accurate_as_eager(out: Tensor, eager: Tensor, truth: Tensor) -> None:
    """At most twice the error of eager PyTorch in the same dtype; truth is float32 or wider. NaN fails."""
    error, allowed = (out.double() - truth).abs().max(), (eager.double() - truth).abs().max()
    floor = 2 * torch.finfo(torch.float32).eps * truth.abs().max()
    assert error <= 2 * allowed + floor, f"error {error:.2e}, eager {allowed:.2e}"


def assert_close(ours: Result, truth: Result, tolerance: float) -> None:
    """Within `tolerance` of the largest value, and never NaN."""
    assert torch.equal(ours.lse.isinf(), truth.lse.isinf())
    finite = ~truth.lse.isinf()
    pairs = [("out", ours.out, truth.out), ("lse", ours.lse[finite], truth.lse[finite])]
    for index, (a, b) in enumerate(zip(ours.grads, truth.grads, strict=True)):
        assert (a is None) == (b is None), f"gradient {index}"
        if a is not None and b is not None:
            pairs.append((f"gradient {index}", a, b))
    for name, a, b in pairs:
        assert a.shape == b.shape, name
        if a.numel():
            error = (a.double() - b).abs().max()
            assert error <= tolerance * max(1.0, float(b.abs().max())), f"{name}: error {error:.2e}, largest {b.abs().max():.2e}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention(case: Case, tmp_path: Path) -> None:
    ours, _, truth = run(case, tmp_path)
    assert_close(ours, truth, 2e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float64_inputs_are_computed_in_float64(case: Case, tmp_path: Path) -> None:
    ours, _, truth = run(case, tmp_path, dtype=torch.float64, use_blocks=False)
    assert ours.lse.dtype == torch.float64
    assert_close(ours, truth, 1e-12)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    "name", ["plain", "causal", "window by head", "padding by batch, one batch without keys", "square: the derivative needs the raw score"]
)
def test_shapes(name: str, sizes: Sizes, tmp_path: Path) -> None:
    case = BY_NAME[name]
    if "by head" in name:
        widths = torch.tensor([3, 20, 70, 1, 9, 100, 2, 40], dtype=torch.int32)
        case = dataclasses.replace(case, tensors=[("width", lambda generator: widths, False)])
    ours, _, truth = run(case, tmp_path, sizes=sizes)
    assert_close(ours, truth, 2e-5)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_with_captured_gradients(sizes: Sizes, tmp_path: Path) -> None:
    table, bias = ("table", normal(sizes.heads, 300), True), ("bias", normal(2, 150, 80), True)
    case = Case(
        "everything",
        score_node=S + gather(0, FLOAT32, [H, Q - K + const(150)]) + gather(1, FLOAT32, [B, Q, K]) * f32(H),
        score=lambda s, b, h, q, k, t, p: s + t[h, q - k + 150] + p[b, q, k] * h,
        tensors=[table, bias],
    )
    ours, _, truth = run(case, tmp_path, sizes=sizes)
    assert_close(ours, truth, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["plain", "causal", "alibi with learnable slopes", "softcap", "pair bias, learnable", "learnable scalar of rank 0"]
)
def test_as_accurate_as_eager(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ours, eager, truth = run(BY_NAME[name], tmp_path, dtype=dtype)
    assert ours.out.dtype == dtype and ours.lse.dtype == torch.float32
    assert_as_accurate_as_eager(ours.out, eager.out, truth.out)
    assert_as_accurate_as_eager(ours.lse, eager.lse, truth.lse)
    for mine, theirs, right in zip(ours.grads, eager.grads, truth.grads, strict=True):
        if mine is not None:
            assert theirs is not None and right is not None and mine.dtype == dtype
            assert_as_accurate_as_eager(mine, theirs, right)


@pytest.mark.parametrize(
    "name",
    ["causal", "alibi with learnable slopes", "relative bias table, learnable, causal", "rows without keys, in a score with a derivative"],
)
def test_many_small_tiles_give_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of one thread and few scores: every head apart, every row in several spans."""
    case = BY_NAME[name]
    sizes = dataclasses.replace(case.sizes, q_len=70, kv_len=70)
    module, graph, plan = built(case, sizes, torch.float32, tmp_path)
    small = load_module(cpu.emit(graph, dataclasses.replace(plan, tile_scores=16 * 16)), tmp_path / "small.py")
    q, k, v = inputs(sizes)
    tensors = tuple(case.captured())
    rows = runs(case, graph, sizes, (16, 16), tensors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for blocks in (rows, None):
        whole = module.forward(q, k, v, 0.25, tensors, (), blocks, (16, 16))
        parts = small.forward(q, k, v, 0.25, tensors, (), blocks, (16, 16))
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
        dout = torch.ones_like(whole[0])
        for a, b in zip(
            flat(module.backward(q, k, v, *whole, dout, None, 0.25, tensors, (), blocks, (16, 16))),
            flat(small.backward(q, k, v, *whole, dout, None, 0.25, tensors, (), blocks, (16, 16))),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def flat(results: tuple) -> list[Tensor]:
    """dq, dk, dv and the gradients of captured tensors that exist."""
    *dqkv, dtensors = results
    return [*dqkv, *(t for t in dtensors if t is not None)]


def test_rows_without_keys_have_zero_gradients_also_through_lse(tmp_path: Path) -> None:
    ours, _, _ = run(BY_NAME["rows without keys, in a score with a derivative"], tmp_path)
    assert (ours.out[:, :, :10] == 0).all()
    assert (ours.lse[:, :, :10] == -math.inf).all()
    dq = ours.grads[0]
    assert dq is not None and (dq[:, :, :10] == 0).all() and not dq[:, :, 10:].eq(0).all()


def test_infinite_gradient_of_lse_on_a_row_without_keys_is_ignored(tmp_path: Path) -> None:
    case = BY_NAME["padding by batch, one batch without keys"]
    q, k, v = inputs(case.sizes)
    tensors = tuple(case.captured())
    module, graph, _ = built(case, case.sizes, torch.float32, tmp_path)
    rows = runs(case, graph, case.sizes, (16, 16), tensors)
    out, lse = module.forward(q, k, v, 0.25, tensors, (), rows, (16, 16))
    dlse = torch.where(lse.isinf(), math.nan, 0.0)
    for blocks in (rows, None):
        for gradient in module.backward(q, k, v, out, lse, torch.ones_like(out), dlse, 0.25, tensors, (), blocks, (16, 16))[:3]:
            assert gradient.isfinite().all()
            assert (gradient[1] == 0).all()


def test_unseen_key_has_gradients_of_exactly_zero(tmp_path: Path) -> None:
    ours, _, _ = run(BY_NAME["a column that nobody sees"], tmp_path)
    for gradient in ours.grads[1:3]:
        assert gradient is not None and (gradient[:, :, 5] == 0).all()


def test_same_tensor_as_queries_keys_and_values(tmp_path: Path) -> None:
    case = BY_NAME["causal"]
    module, graph, _ = built(case, case.sizes, torch.float32, tmp_path)
    x, _, _ = inputs(case.sizes)
    rows = runs(case, graph, case.sizes, (16, 16), ())
    out, lse = module.forward(x, x, x, 0.25, (), (), rows, (16, 16))
    dq, dk, dv, _ = module.backward(x, x, x, out, lse, torch.ones_like(out), None, 0.25, (), (), rows, (16, 16))
    y = x.double().requires_grad_()
    right, _ = dense(case, y, y, y, 0.25, ())
    (gradient,) = torch.autograd.grad(right.sum(), y)
    torch.testing.assert_close((dq + dk + dv).double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["heads inside", "sliced", "expanded keys"])
def test_any_strides(layout: str, tmp_path: Path) -> None:
    case = BY_NAME["causal"]
    module, graph, _ = built(case, case.sizes, torch.float32, tmp_path)
    q, k, v = inputs(case.sizes)
    if layout == "heads inside":
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "sliced":
        strided = [torch.cat([x, x], dim=3)[..., :16] for x in (q, k, v)]
    else:
        strided = [q, k[:1].expand_as(k), v[:1].expand_as(v)]
        k, v = (x.contiguous() for x in strided[1:])
    rows = runs(case, graph, case.sizes, (16, 16), ())
    out, lse = module.forward(q, k, v, 0.25, (), (), rows, (16, 16))
    again, lse_again = module.forward(*strided, 0.25, (), (), rows, (16, 16))
    torch.testing.assert_close(out, again)
    torch.testing.assert_close(lse, lse_again)
    for a, b in zip(
        module.backward(q, k, v, out, lse, out, None, 0.25, (), (), rows, (16, 16))[:3],
        module.backward(*strided, out, lse, out, None, 0.25, (), (), rows, (16, 16))[:3],
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_no_rows_or_no_keys(tmp_path: Path) -> None:
    case = BY_NAME["alibi with learnable slopes"]
    for sizes in (Sizes(q_len=0), Sizes(kv_len=0), Sizes(batch=0)):
        module, _, _ = built(case, sizes, torch.float32, tmp_path)
        q, k, v = inputs(sizes)
        tensors = tuple(case.captured())
        out, lse = module.forward(q, k, v, 0.25, tensors, (), None, (16, 16))
        assert out.shape == q.shape and (out == 0).all() and (lse == -math.inf).all()
        dq, dk, dv, (dslopes,) = module.backward(q, k, v, out, lse, out, None, 0.25, tensors, (), None, (16, 16))
        assert all((g == 0).all() for g in (dq, dk, dv, dslopes))


def test_second_run_is_bitwise_equal(tmp_path: Path) -> None:
    for name in ("tensor indexed twice", "learnable table by document pair", "relative bias table, learnable, causal"):
        first, _, _ = run(BY_NAME[name], tmp_path)
        second, _, _ = run(BY_NAME[name], tmp_path)
        assert torch.equal(first.out, second.out)
        for a, b in zip(first.grads, second.grads, strict=True):
            assert a is None or (b is not None and torch.equal(a, b))


def test_without_gradient_of_lse(tmp_path: Path) -> None:
    ours, _, truth = run(BY_NAME["alibi with learnable slopes"], tmp_path, with_lse=False)
    assert_close(ours, truth, 2e-5)


def test_huge_scores_neither_overflow_nor_vanish(tmp_path: Path) -> None:
    case = Case(
        "large", score_node=S * 1000.0 - f32(Q), score=lambda s, b, h, q, k: s * 1000 - q, mask_node=CAUSAL, mask=lambda b, h, q, k: q >= k
    )
    ours, eager, truth = run(case, tmp_path)
    assert_as_accurate_as_eager(ours.out, eager.out, truth.out)
    assert_as_accurate_as_eager(ours.lse, eager.lse, truth.lse)


def test_rounding_of_lse_does_not_scale_the_gradients(tmp_path: Path) -> None:
    """Scores that float32 holds exactly, above 16,384: lse is then a multiple of 0.002, the gradients must not be."""
    case = Case("offset", score_node=S + 16384.0, score=lambda s, b, h, q, k: s + 16384)
    sizes = Sizes(batch=1, heads=1, kv_heads=1, dim=4, dim_v=4)
    module, _, plan = built(case, sizes, torch.float32, tmp_path)
    q, k, v = (x.round() for x in inputs(sizes))
    out, lse = module.forward(q, k, v, 0.25, (), (), None, plan.block)
    found = module.backward(q, k, v, out, lse, torch.ones_like(out), None, 0.25, (), (), None, plan.block)
    truth = expected(case, (q, k, v), (), 0.25, torch.ones_like(out), None, torch.float64)
    for mine, right in zip(found[:3], truth.grads, strict=True):
        assert right is not None and (mine - right).abs().max() <= 1e-6 * right.abs().max()


def test_full_blocks_evaluate_no_mask(tmp_path: Path) -> None:
    case = BY_NAME["causal"]
    module, graph, _ = built(case, case.sizes, torch.float32, tmp_path)
    evaluated = []
    allowed = module._allowed

    def spy(at: object, b: slice, h: slice, r: slice, c: slice) -> Tensor:
        evaluated.append((r, c))
        return allowed(at, b, h, r, c)

    module._allowed = spy
    q, k, v = inputs(case.sizes)
    module.forward(q, k, v, 0.25, (), (), runs(case, graph, case.sizes, (16, 16), ()), (16, 16))
    assert set((r.start, c.start) for r, c in evaluated if True) == {(i * 16, i * 16) for i in range(5)}
    assert all(c.stop - c.start <= 16 for _, c in evaluated)


def test_memory_grows_with_the_length_not_its_square(tmp_path: Path) -> None:
    """No tensor made on the way is larger than the tile budget or a few times q."""
    case = BY_NAME["causal"]
    sizes = Sizes(batch=1, heads=2, kv_heads=2, q_len=4096, kv_len=4096, dim=8, dim_v=8)
    module, graph, plan = built(case, sizes, torch.float32, tmp_path)
    q, k, v = inputs(sizes)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    rows = runs(case, graph, sizes, plan.block, ())
    with Watch():
        out, lse = module.forward(q, k, v, 0.25, (), (), rows, plan.block)
        module.backward(q, k, v, out, lse, out, None, 0.25, (), (), rows, plan.block)
    budget = 4 * plan.tile_scores * max(2, torch.get_num_threads())
    assert largest <= 2 * budget + 4 * q.nbytes
    assert largest < 4 * 4096 * 4096 * 2 / 4
