"""create_mask, and_masks, or_masks and noop_mask beside PyTorch's."""

from __future__ import annotations

import pytest
import torch

import flexc
from flexc import compat
from tests.accuracy import qkv
from tests.compat.beside import TORCH, assert_right, torchs

LENGTHS = torch.tensor([5, 9, 12])
SLOPES = torch.tensor([0.5, 0.25])


def causal(b, h, q, kv):
    return q >= kv


def near(b, h, q, kv):
    return torch.abs(q - kv) < 3 + h


def padded(b, h, q, kv):
    return kv < LENGTHS[b]


def alibi(score, b, h, q, kv):
    return score - SLOPES[h] * (q - kv)


def causal_score(score, b, h, q, kv):
    return torch.where(q >= kv, score, -float("inf"))


# --- create_mask ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 2, 12, 12), (3, 1, 5, 20), (None, None, 7, 3), (1, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("function", [causal, near, padded, alibi, causal_score])
def test_create_mask_is_that_of_torch(function, sizes):
    ours, theirs = (module.create_mask(function, *sizes, device="cpu") for module in (compat, TORCH))
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert torch.equal(ours, theirs)


def test_create_mask_in_parts(monkeypatch):
    monkeypatch.setattr("flexc.compat.masks._PAIRS_AT_ONCE", 50)
    for function in (near, causal_score):
        ours, theirs = (module.create_mask(function, 2, 2, 11, 9, device="cpu") for module in (compat, TORCH))
        assert torch.equal(ours, theirs)


def test_create_mask_of_a_flexc_mask():
    ours = compat.create_mask(flexc.masks.causal & flexc.masks.sliding_window(3), 1, 1, 8, 8, device="cpu")
    assert torch.equal(ours[0, 0], torch.ones(8, 8, dtype=torch.bool).tril().triu(-2))


def test_create_mask_takes_python_conditions():
    """Functions that PyTorch cannot vectorise."""

    def rule(b, h, q, kv):
        if q < 3:
            return kv == 0
        return 0 <= q - kv < 2

    ours = compat.create_mask(rule, 1, 1, 6, 6, device="cpu")[0, 0]
    assert ours.tolist() == [[kv == 0 if q < 3 else 0 <= q - kv < 2 for kv in range(6)] for q in range(6)]


@pytest.mark.parametrize("function", [lambda q, kv: q, lambda: True, lambda *any: True, None])
def test_create_mask_refuses_other_functions(function):
    with pytest.raises(AssertionError, match=r"positional arguments|any number|not a function"):
        compat.create_mask(function, 1, 1, 4, 4, device="cpu")


def test_create_mask_refuses_a_number_for_a_truth_value():
    with pytest.raises(TypeError, match="expected a truth value from a mask function, got int32"):
        compat.create_mask(lambda b, h, q, kv: q - kv, 1, 1, 4, 4, device="cpu")


# --- combinations -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [(), (causal,), (causal, near), (causal, near, padded)], ids=len)
@pytest.mark.parametrize("name", ["and_masks", "or_masks"])
def test_combinations_are_those_of_torch(name, masks):
    ours, theirs = getattr(compat, name)(*masks), getattr(TORCH, name)(*masks)
    dense = [compat.create_mask(ours, 3, 2, 12, 12, "cpu"), TORCH.create_mask(ours, 3, 2, 12, 12, "cpu")]
    expected = TORCH.create_mask(theirs, 3, 2, 12, 12, "cpu")
    assert torch.equal(dense[0], expected) and torch.equal(dense[1], expected)
    rule = theirs if masks else (lambda b, h, q, kv: kv >= 0) if name == "and_masks" else (lambda b, h, q, kv: kv < 0)
    for combination in (ours, theirs):  # PyTorch's own is taken apart
        block_mask = compat.create_block_mask(causal, 3, 2, 12, 12, device="cpu")
        block_mask = compat.BlockMask.from_kv_blocks(*whole_block(), BLOCK_SIZE=16, seq_lengths=(12, 12), mask_mod=combination)
        assert_right(*qkv(3, 2, 2, 12, dim=8), None, rule, block_mask)


def whole_block():
    return torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)


def test_combinations_of_combinations_and_of_flexc_masks():
    ours = compat.or_masks(compat.and_masks(flexc.masks.causal, near), flexc.masks.sinks(2), compat.noop_mask)
    assert bool(compat.create_mask(ours, 1, 1, 9, 9, "cpu").all())
    ours = compat.and_masks(compat.or_masks(flexc.masks.sliding_window(3), flexc.masks.sinks(2)), compat.noop_mask)
    block_mask = compat.create_block_mask(ours, None, None, 30, 30, device="cpu")
    expected = flexc.masks.sliding_window(3) | flexc.masks.sinks(2)
    assert_right(*qkv(2, 2, 2, 30, dim=8), None, expected, block_mask)


def test_combinations_of_torchs_combinations():
    theirs = TORCH.and_masks(TORCH.or_masks(causal, TORCH.noop_mask), near)
    block_mask = TORCH.create_block_mask(theirs, 1, 2, 30, 30, device="cpu", BLOCK_SIZE=8)
    assert_right(*qkv(2, 2, 2, 30, dim=8), None, near, block_mask)


@pytest.mark.parametrize("name", ["and_masks", "or_masks"])
def test_combinations_refuse_what_is_no_function(name):
    with pytest.raises(RuntimeError, match=r"expected mask functions \(batch, head, q_idx, kv_idx\), got a Tensor"):
        getattr(compat, name)(causal, torch.ones(3))


def test_noop_mask_called_with_tensors():
    ours = compat.noop_mask(*(torch.tensor(i) for i in range(4)))
    theirs = TORCH.noop_mask(*(torch.tensor(i) for i in range(4)))
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype == torch.bool


@pytest.mark.parametrize("module", [compat, TORCH])
def test_noop_mask_allows_everything(module):
    block_mask = module.create_block_mask(module.noop_mask, None, None, 20, 33, device="cpu") if module is TORCH else None
    q, k, v = qkv(2, 2, 2, 20, 33, dim=8)
    ours = compat.create_block_mask(compat.noop_mask, None, None, 20, 33, device="cpu")
    for mask in (ours, block_mask):
        torch.testing.assert_close(compat.flex_attention(q, k, v, block_mask=mask), torchs(q, k, v))
