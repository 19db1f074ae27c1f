"""The usual masks and their algebra: against masks written out pair by pair, called plainly and traced."""

from __future__ import annotations

import functools

import pytest
import torch

from flexc import masks
from flexc.algebra import Mask, mask
from flexc.errors import InputError, ShapeError
from flexc.frontend import trace
from flexc.ir.eager import Environment, evaluate
from flexc.sparsity import classify

B, H, Q, K = 2, 3, 19, 23


def positions(q_len: int = Q, kv_len: int = K) -> dict[str, torch.Tensor]:
    shapes = {"batch": (B, 1, 1, 1), "head": (1, H, 1, 1), "q_idx": (1, 1, q_len, 1), "kv_idx": (1, 1, 1, kv_len)}
    return {name: torch.arange(max(shape), dtype=torch.int32).view(shape) for name, shape in shapes.items()}


def called(function) -> torch.Tensor:
    """The mask as a function of tensors of positions."""
    return torch.as_tensor(function(**positions())).expand(B, H, Q, K)


def traced(function) -> torch.Tensor:
    found, binding = trace(None, function)
    assert found.graph.mask is not None
    return evaluate([found.graph.mask], Environment(positions(), binding.tensors, binding.scalars))[0].expand(B, H, Q, K)


def pair_by_pair(allowed) -> torch.Tensor:
    """`allowed` is called on Python integers."""
    table = [[[[bool(allowed(b, h, q, k)) for k in range(K)] for q in range(Q)] for h in range(H)] for b in range(B)]
    return torch.tensor(table)


IDS = torch.tensor([0] * 5 + [3] * 2 + [4] * 12 + [7] * 4)
BATCH_IDS = torch.stack([IDS, IDS.flip(0)]).to(torch.int32)
LENGTHS = torch.tensor([4, 17])
TABLE = torch.rand(B, K, generator=torch.Generator().manual_seed(0)) < 0.5

CASES = {
    "everything": (masks.everything, lambda b, h, q, k: True),
    "noop": (masks.noop, lambda b, h, q, k: True),
    "causal": (masks.causal, lambda b, h, q, k: k <= q),
    "sliding_window": (masks.sliding_window(4), lambda b, h, q, k: k in (q, q - 1, q - 2, q - 3)),
    "prefix": (masks.prefix(6), lambda b, h, q, k: k < 6),
    "prefix of each batch element": (masks.prefix(LENGTHS), lambda b, h, q, k: k < [4, 17][b]),
    "prefix, 0-d tensor": (masks.prefix(torch.tensor(6)), lambda b, h, q, k: k < 6),
    "prefix_lm": (masks.prefix_lm(6), lambda b, h, q, k: k < 6 or k <= q),
    "document": (masks.document(IDS), lambda b, h, q, k: int(IDS[q]) == int(IDS[k])),
    "document of each batch element": (masks.document(BATCH_IDS), lambda b, h, q, k: int(BATCH_IDS[b, q]) == int(BATCH_IDS[b, k])),
    "document, other keys": (masks.document(IDS[:Q], IDS.flip(0)), lambda b, h, q, k: int(IDS[q]) == int(IDS.flip(0)[k])),
    "dilated": (masks.dilated(3, 4), lambda b, h, q, k: q - k in (0, 4, 8)),
    "block_diagonal": (masks.block_diagonal(7), lambda b, h, q, k: q // 7 == k // 7),
    "neighborhood_2d": (masks.neighborhood_2d(5, 1), lambda b, h, q, k: max(abs(q // 5 - k // 5), abs(q % 5 - k % 5)) <= 1),
    "neighborhood_2d, two radii": (masks.neighborhood_2d(5, (0, 2)), lambda b, h, q, k: q // 5 == k // 5 and abs(q % 5 - k % 5) <= 2),
    "padding, a length": (masks.padding(9), lambda b, h, q, k: k < 9),
    "padding, lengths": (masks.padding(LENGTHS), lambda b, h, q, k: k < [4, 17][b]),
    "padding, a table": (masks.padding(TABLE), lambda b, h, q, k: bool(TABLE[b, k])),
    "padding, one table": (masks.padding(TABLE[0]), lambda b, h, q, k: bool(TABLE[0, k])),
    "sinks": (masks.sinks(3), lambda b, h, q, k: k < 3 and k <= q),
    "and": (masks.causal & masks.document(IDS), lambda b, h, q, k: k <= q and int(IDS[q]) == int(IDS[k])),
    "or": (masks.sliding_window(3) | masks.sinks(2), lambda b, h, q, k: 0 <= q - k < 3 or (k < 2 and k <= q)),
    "xor": (masks.causal ^ masks.prefix(5), lambda b, h, q, k: (k <= q) != (k < 5)),
    "not": (~masks.causal, lambda b, h, q, k: k > q),
    "not everything": (~masks.everything, lambda b, h, q, k: False),
    "everything and": (masks.everything & masks.causal, lambda b, h, q, k: k <= q),
    "nested": (
        ~(masks.causal & ~masks.prefix(5)) ^ masks.padding(LENGTHS),
        lambda b, h, q, k: (not (k <= q and k >= 5)) != (k < [4, 17][b]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_agree_pair_by_pair(name):
    function, allowed = CASES[name]
    assert isinstance(function, Mask)
    expected = pair_by_pair(allowed)
    assert torch.equal(called(function), expected)
    assert torch.equal(traced(function), expected)


@pytest.mark.parametrize("name", ["causal", "sliding_window", "block_diagonal", "neighborhood_2d", "sinks", "nested"])
def test_masks_work_on_python_integers(name):
    function, allowed = CASES[name]
    if name != "nested":  # its lengths are a tensor
        assert pair_by_pair(function).equal(pair_by_pair(allowed))
    else:
        assert bool(function(0, 0, 7, 6)) == allowed(0, 0, 7, 6)


def test_a_traced_mask_becomes_the_block_map_of_its_dense_form():
    function = masks.causal & masks.document(BATCH_IDS)
    found, binding = trace(None, function)
    blocks = classify(found.graph, Q, K, batch=B, heads=H, block=(4, 4), tensors=binding.tensors, scalars=binding.scalars)
    assert blocks.kind.shape == (B, 1, 5, 6)
    assert torch.equal(blocks.to_dense(), called(function)[:, :1])


def test_equal_masks_made_anew_share_a_trace():
    first, _ = trace(None, masks.causal & masks.document(IDS))
    second, binding = trace(None, masks.causal & masks.document(IDS + 1))
    assert first is second
    assert torch.equal(binding.tensors[0], IDS + 1)


def test_masks_of_any_python_form_combine():
    """Chained comparison, `and` and `if` fork the trace; parts of a mask may be masks that are called."""

    def chained(batch, head, q_idx, kv_idx):
        return 0 <= q_idx - kv_idx < 4

    def branching(batch, head, q_idx, kv_idx):
        if head == 1:
            return kv_idx < 3 and q_idx > 2
        return masks.causal(batch, head, q_idx, kv_idx)

    def allowed(b, h, q, k):
        return bool(chained(b, h, q, k)) != bool(branching(b, h, q, k)) or int(IDS[q]) != int(IDS[k])

    combined = (mask(chained) ^ branching) | ~masks.document(IDS)
    assert torch.equal(traced(combined), pair_by_pair(allowed))


def test_a_captured_table_that_requires_a_gradient_is_only_read():
    limits = torch.tensor([3.0, 5.0, 30.0], requires_grad=True)
    found, binding = trace(None, lambda batch, head, q_idx, kv_idx: kv_idx < limits[head])
    blocks = classify(found.graph, Q, K, batch=B, heads=H, block=(4, 4), tensors=binding.tensors, scalars=binding.scalars)
    assert torch.equal(blocks.to_dense(), pair_by_pair(lambda b, h, q, k: k < [3, 5, 30][h])[:1])


# --- algebra -----------------------------------------------------------------------------------------------------------------------


def window(batch, head, q_idx, kv_idx):
    """Three keys."""
    return (q_idx - kv_idx >= 0) & (q_idx - kv_idx < 3)


def test_mask_wraps_once_and_keeps_the_function():
    once = mask(window)
    assert mask(once) is once
    assert once.__flexc_function__ is window and once.__name__ == "window" and once.__doc__ == "Three keys."
    assert Mask(once).__flexc_function__ is window


def test_masks_combine_with_plain_functions_on_either_side():
    expected = pair_by_pair(lambda b, h, q, k: k <= q and q - k < 3)
    assert torch.equal(called(masks.causal & window), expected)
    assert torch.equal(called(window & masks.causal), expected)
    assert torch.equal(called(window | ~masks.causal), pair_by_pair(lambda b, h, q, k: k > q or q - k < 3))
    assert torch.equal(called(window ^ masks.causal), pair_by_pair(lambda b, h, q, k: q - k >= 3))
    assert (window & masks.causal).__name__ == "window & causal"


def test_names_read_like_the_expression():
    document = masks.document(IDS)
    assert (masks.causal & document).__name__ == "causal & document"
    assert (masks.causal & document & window).__name__ == "causal & document & window"
    assert ((masks.causal | window) & document).__name__ == "(causal | window) & document"
    assert (~masks.causal).__name__ == "~causal" and (~(masks.causal ^ window)).__name__ == "~(causal ^ window)"
    assert (~masks.causal & window).__name__ == "~causal & window"
    assert repr(masks.causal & window) == "<flexc mask causal & window>"
    assert masks.prefix_lm(3).__name__ == "prefix_lm" and masks.padding(3).__name__ == "padding"


def test_partials_objects_and_methods_become_masks():
    class Limits:
        limit = 4

        def __call__(self, batch, head, q_idx, kv_idx):
            return kv_idx < self.limit

        def method(self, batch, head, q_idx, kv_idx):
            return kv_idx < self.limit

    def wide(width, batch, head, q_idx, kv_idx):
        return q_idx - kv_idx < width

    expected = pair_by_pair(lambda b, h, q, k: k < 4 and q - k < 3)
    for limit in (Limits(), Limits().method):
        combined = mask(limit) & functools.partial(wide, 3)
        assert torch.equal(called(combined), expected)
        assert torch.equal(traced(combined), expected)
    assert mask(Limits()).__name__ == "Limits" and mask(functools.partial(wide, 3)).__name__ == "wide"


def test_not_and_bool_of_a_mask_are_refused():
    with pytest.raises(InputError, match="truth value of the mask `causal` is not defined; for the opposite mask use ~mask"):
        assert not masks.causal
    with pytest.raises(InputError, match="use ~mask"):
        assert masks.causal and window


def test_a_score_function_is_refused_as_a_mask():
    with pytest.raises(
        InputError, match=r"a mask function takes \(batch, head, q_idx, kv_idx\): expected 4 positional arguments, got 5 in plain"
    ) as error:

        @mask
        def plain(score, batch, head, q_idx, kv_idx):
            return score

    assert "use flexc.kernel" in str(error.value)


def test_a_wrong_number_of_arguments_is_refused():
    with pytest.raises(InputError, match=r"expected 4 positional arguments, got 2 in <lambda>\(q, k\)"):
        mask(lambda q, k: q >= k)
    with pytest.raises(InputError, match="expected 4 positional arguments, got 3"):
        masks.causal & (lambda b, q, k: q >= k)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(InputError, match="a mask is made of a function .*, got Tensor"):
        mask(torch.ones(3, 3))
    with pytest.raises(TypeError, match="unsupported operand"):
        masks.causal & 3


# --- arguments ---------------------------------------------------------------------------------------------------------------------


def test_widths_and_blocks_must_be_positive_integers():
    for make, name in ((masks.sliding_window, "width"), (masks.block_diagonal, "block")):
        with pytest.raises(ShapeError, match=f"expected {name} >= 1, got 0"):
            make(0)
        with pytest.raises(InputError, match=f"expected {name} to be an integer number of tokens, got 2.5"):
            make(2.5)
        with pytest.raises(InputError, match="to be an integer number of tokens, got True"):
            make(True)
    with pytest.raises(ShapeError, match="expected step >= 1, got -1"):
        masks.dilated(3, -1)
    with pytest.raises(ShapeError, match="expected radius >= 0, got -1"):
        masks.neighborhood_2d(3, -1)
    with pytest.raises(ShapeError, match="expected count >= 0, got -2"):
        masks.sinks(-2)
    with pytest.raises(ShapeError, match="expected the length of prefix >= 0, got -1"):
        masks.prefix(-1)


def test_tensors_of_the_wrong_kind_are_refused():
    with pytest.raises(InputError, match=r"expected doc_ids to be an integer tensor \[S\] or \[B, S\], got float32"):
        masks.document(torch.zeros(4))
    with pytest.raises(InputError, match="expected doc_ids to be an integer tensor .*, got list"):
        masks.document([0, 1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"expected doc_ids of shape \[S\] or \[B, S\], got \[1, 2, 3\]"):
        masks.document(torch.zeros(1, 2, 3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"of the same rank, got \[23\] and \[2, 23\]"):
        masks.document(IDS, BATCH_IDS)
    with pytest.raises(InputError, match=r"expected the length of prefix to be an integer tensor \[\] or \[B\], got float32"):
        masks.prefix(torch.zeros(2))
    with pytest.raises(ShapeError, match=r"expected a padding table \[Skv\] or \[B, Skv\], got \[1, 1, 4\]"):
        masks.padding(torch.ones(1, 1, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"expected the length of padding of shape \[\] or \[B\], got \[2, 2\]"):
        masks.padding(torch.ones(2, 2, dtype=torch.int32))
