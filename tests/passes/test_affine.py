"""Nodes as mathematics."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flexc.ir
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, const, input_node, scalar
from flexc.ir.ops import apply, cast, gather
from flexc.passes.affine import as_mathematics

SCORE, HEAD, Q, K = (input_node(n) for n in ("score", "head", "q_idx", "kv_idx"))
WIDTH = scalar(0, INT32)
DOC_Q, DOC_K = gather(1, INT64, [Q]), gather(1, INT64, [K])
VALID = gather(2, BOOL, [K])


@pytest.mark.parametrize(
    "node, text",
    [
        (apply("ge", Q, K), "q_idx ≥ kv_idx"),
        (apply("ge", Q, K) & apply("lt", Q - K, WIDTH), "q_idx - kv_idx < width ∧ q_idx ≥ kv_idx"),
        (
            apply("lt", K, 256) | (apply("ge", Q, K) & apply("eq", DOC_Q, DOC_K)),
            "(doc[q_idx] = doc[kv_idx] ∧ q_idx ≥ kv_idx) ∨ kv_idx < 256",
        ),
        (VALID & apply("ge", Q, K), "q_idx ≥ kv_idx ∧ valid[kv_idx]"),
        (~VALID, "¬(valid[kv_idx])"),
        (const(True), "True"),
        (apply("eq", apply("floordiv", Q, 16), apply("floordiv", K, 16)), "floor(q_idx/16) = floor(kv_idx/16)"),
        (apply("ge", (Q + 3) - (K + 3), 0), "q_idx - kv_idx ≥ 0"),
        (SCORE - gather(0, FLOAT32, [HEAD]) * (Q - K), "score - (q_idx - kv_idx)*slopes[head]"),
        (20.0 * apply("tanh", SCORE * 0.05), "20.0*tanh(0.05*score)"),
        (apply("where", apply("gt", Q, K), SCORE * 2.0, SCORE), "(2.0*score if kv_idx < q_idx else score)"),
        (SCORE * gather(3, FLOAT32, []), "score*t3"),
        (SCORE * cast(VALID, FLOAT32), "score*(1 if valid[kv_idx] else 0)"),
        (cast(SCORE, INT32), "trunc(score)"),
        (apply("exp2", SCORE), "exp2(score)"),
    ],
)
def test_mathematics(node, text):
    assert as_mathematics(node, ["slopes", "doc", "valid"], ["width"]) == text


def test_a_large_node_prints_as_it_is():
    node = SCORE
    for i in range(200):
        node = node * float(i + 2)
    assert "score" in as_mathematics(node) or "..." in as_mathematics(node)


def test_sympy_is_off_the_hot_path():
    """It takes longer to import than a kernel to trace, so no room imports it at the top of a file."""
    for file in Path(flexc.ir.__file__).parents[1].glob("*/*.py"):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                assert "sympy" not in ast.unparse(statement), file
