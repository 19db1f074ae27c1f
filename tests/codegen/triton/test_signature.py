"""Every argument of every kernel has the type that a call gives it."""

from __future__ import annotations

import re

import pytest
import torch

from flexc.codegen.triton import signature
from flexc.ir.graph import FLOAT32, INT32, INT64, Graph, ScalarInput, TensorInput
from tests.codegen.triton.texts import function, lowered, planned, text_of

DTYPES = {
    "bool": "*i1", "uint8": "*u8", "int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64",
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64",
}  # fmt: skip


def parameters(text: str, kernel: str) -> list[str]:
    """Names of a kernel's parameters."""
    inside = re.sub(r"#.*|: tl\.constexpr", "", function(text, kernel).split("(", 1)[1].split("):")[0])
    return re.findall(r"\w+", inside)


@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_tensors(dtype):
    graph = Graph((), (TensorInput("t", dtype, 1, True), TensorInput("t_2", dtype, 0)))
    found = signature(["u_t_ptr", "u_t_size0", "u_t_stride0", "u1_t_2_ptr"], graph, planned(lowered()))
    assert found == {
        "u_t_ptr": DTYPES[dtype],
        "u_t_size0": "i32",
        "u_t_stride0": "i32",
        "u1_t_2_ptr": DTYPES[dtype],
    }


SLOPES, PAIRS = torch.ones(4, requires_grad=True), torch.zeros(2, 4, 8, 8, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("deterministic, of_sums", [(False, "*fp32"), (True, "*i64")])
def test_gradients_of_captured_tensors(deterministic, of_sums):
    def score(score, batch, head, q_idx, kv_idx):
        return score * SLOPES[head] + PAIRS[batch, head, q_idx, kv_idx]

    graph, text = lowered(score), text_of(score, dtype="float16", deterministic=deterministic)
    found = signature(parameters(text, "dq_kernel"), graph, planned(graph, dtype="float16", deterministic=deterministic))
    (stored,) = (name for name in found if re.fullmatch(r"u_PAIRS_grad\d_ptr", name))
    assert found["u_SLOPES_grad_ptr"] == of_sums and found[stored] == "*bf16" and found["u_SLOPES_grad_stride0"] == "i32"
    if deterministic:
        assert found["u_SLOPES_grad_step"] == "i32"
        assert signature(parameters(text, "sum_bins_kernel"), graph, planned(graph)) == {
            "bins_ptr": "*i64",
            "sum_ptr": "*fp32",
            "count": "i32",
        }


@pytest.mark.parametrize("dtype, expected", [(INT32, "i32"), (INT64, "i64"), (FLOAT32, "fp32")])
def test_scalars(dtype, expected):
    graph = Graph((), (), (ScalarInput("scale", dtype), ScalarInput("q_ptr", dtype)))
    assert signature(["u_scale", "u_q_ptr", "scale"], graph, planned(lowered())) == {
        "u_scale": expected,
        "u_q_ptr": expected,
        "scale": "fp32",
    }


@pytest.mark.parametrize("dtype, pointer", [("bfloat16", "*bf16"), ("float16", "*fp16"), ("float32", "*fp32")])
def test_pointers_of_the_kernels_own(dtype, pointer):
    graph = lowered(None, lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx)
    plan = planned(graph, dtype=dtype, tma=False)
    names = parameters(text_of(None, lambda batch, head, q_idx, kv_idx: q_idx >= kv_idx, dtype=dtype, tma=False), "dkv_kernel")
    found = signature(names, graph, plan)
    assert {found[n] for n in ("q_ptr", "k_ptr", "v_ptr", "dout_ptr", "dk_ptr", "dv_ptr")} == {pointer}
    assert {found[n] for n in ("lse2_ptr", "delta_ptr")} == {"*fp32"}
    assert {found[n] for n in ("map_ptr", "full_ptr", "partial_ptr", "order_ptr")} == {"*i32"}
    assert found["scale"] == "fp32" and {found[n] for n in ("q_len", "kv_len", "heads", "map_batch", "q_stride_s")} == {"i32"}
    assert list(found) == names


def test_descriptors():
    graph = lowered()
    plan = planned(graph, head_dim=96, head_dim_v=64)
    text = text_of(head_dim=96)
    found = signature(parameters(text, "dkv_kernel"), graph, plan)
    rows, columns = plan.dkv.rows, plan.dkv.columns
    assert found[f"q_desc64_{rows}"] == f"tensordesc<bf16[1, 1, {rows}, 64]>"
    assert found[f"q_desc32_{rows}"] == f"tensordesc<bf16[1, 1, {rows}, 32]>"
    assert found[f"k_desc32_{columns}"] == f"tensordesc<bf16[1, 1, {columns}, 32]>"
    assert found["lse2_desc"] == found["delta_desc"] == f"tensordesc<fp32[1, {rows}]>"
    assert signature(parameters(text, "row_sums_kernel"), graph, plan)["has_dlse"] == "constexpr"


def test_the_type_of_a_tensor_is_what_pytorch_gives_triton():
    """Names of dtypes that a graph can hold are PyTorch's."""
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)
