"""Whole kernels, forward and backward, in Triton's interpreter: what tests of the text alone would miss."""

import pytest

from tests.codegen.triton.interpreted import CASES

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kernels_agree_with_pytorch(case, interpreter):
    wrong = interpreter(case)
    assert not wrong, f"\n{wrong}"
