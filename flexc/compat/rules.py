"""The mask function that a block mask amounts to: what flexc compiles. Block masks of PyTorch are read here too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from flexc import frontend, passes
from flexc.compat.block_mask import BlockMask
from flexc.compat.errors import UsageError
from flexc.compat.lists import dense
from flexc.compat.masks import MaskFunction, and_masks, noop_mask, or_masks
from flexc.errors import InputError, ShapeError
from flexc.ir.graph import inputs_of

Tensor = torch.Tensor

_ONE_BLOCK = (1 << 30, 1 << 30)  # PyTorch's block size of a mask for any lengths
_TORCH = "torch.nn.attention.flex_attention"


@dataclass(frozen=True)
class _Rule:
    """A block mask's mask function, None where everything is allowed.

    Attributes:
        made_of: the mask function and the lists that it was made of.
        state: sizes, and how often the lists had been written to.
        one_batch, one_head: it holds for one batch element, or one head, only.
    """

    made_of: tuple
    state: tuple
    function: MaskFunction | None
    one_batch: bool = False
    one_head: bool = False


_kept_for_torchs: WeakIdKeyDictionary = WeakIdKeyDictionary()


def rule_of(block_mask: Any, q_shape: torch.Size, kv_shape: torch.Size, device: torch.device) -> MaskFunction | None:
    """The mask function to attend with, None where everything is allowed.

    Args:
        block_mask: a BlockMask, or PyTorch's.
        q_shape, kv_shape: of q and k, [B, heads, tokens, D].

    Raises:
        InputError: not a block mask.
        UsageError: on another device; a block mask that lost its mask function.
        ShapeError: it was made for other lengths, batch sizes or heads.
    """
    if isinstance(block_mask, BlockMask):
        entries, lists_device = block_mask._entries, block_mask._device
    else:
        _refuse_what_is_no_block_mask(block_mask)
        entries, lists_device = tuple(block_mask.kv_indices.shape[:-2]), block_mask.kv_indices.device
    lengths = block_mask.seq_lengths
    if (q_shape[2], kv_shape[2]) != tuple(lengths) and tuple(block_mask.BLOCK_SIZE) != _ONE_BLOCK:
        raise ShapeError(
            f"block_mask was created for {lengths[0]} queries and {lengths[1]} keys, got {q_shape[2]} and {kv_shape[2]}: "
            "create a block mask of these lengths"
        )
    batch, heads = (1, 1, *entries)[-2:]
    for name, made_for, got in (("batch size", batch, q_shape[0]), ("number of heads", heads, q_shape[1])):
        if made_for not in (1, got):
            raise ShapeError(f"block_mask was created for {name} {made_for}, got {got} in query: expected 1 or {got}")
    if device != lists_device:
        raise UsageError(f"expected query and block_mask on one device, got {device} and {lists_device}: block_mask.to({str(device)!r})")
    rule = _compiled_rule(block_mask, batch, heads) if is_dynamo_compiling() else _rule(block_mask, batch, heads)
    for is_one, name, letter, got in ((rule.one_batch, "batch", "B", q_shape[0]), (rule.one_head, "head", "H", q_shape[1])):
        if is_one and got > 1:
            raise ShapeError(
                f"the mask function of block_mask reads `{name}`, but its block lists were made for {letter}=1 and query has {got}: "
                f"create the block mask with {letter}={got}"
            )
    return rule.function


def _rule(block_mask: Any, batch: int, heads: int) -> _Rule:
    is_ours = isinstance(block_mask, BlockMask)
    if is_ours and block_mask._follows_rule:
        kept = block_mask._kept_rule
        if kept is None:  # its function cannot change: assigning one ends following
            function = as_ours(block_mask.mask_mod)
            kept = block_mask._kept_rule = _Rule((), (), None if function is noop_mask else function)
        return kept
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    made_of = (block_mask.mask_mod, *lists)
    state = (tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths), *map(_version, lists))
    found = block_mask._kept_rule if is_ours else _kept_for_torchs.get(block_mask)
    if found is None or found.state != state or not all(a is b for a, b in zip(found.made_of, made_of)):
        function, one_batch, one_head = _function_of_lists(block_mask, lists, batch, heads)
        found = _Rule(made_of, state, function, one_batch, one_head)
        if is_ours:
            block_mask._kept_rule = found
        else:
            _kept_for_torchs[block_mask] = found
    return found


def _compiled_rule(block_mask: Any, batch: int, heads: int) -> _Rule:
    """The same inside torch.compile, where nothing can be kept or looked at: tables are part of the graph, and follow the lists."""
    function = as_ours(block_mask.mask_mod)
    rule = None if function is noop_mask else function
    if isinstance(block_mask, BlockMask) and block_mask._follows_rule:
        return _Rule((), (), rule)
    (q_side, kv_side), (_, kv_len) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    columns = max(block_mask.kv_indices.shape[-1], -(-kv_len // kv_side))
    shape = (batch, heads, block_mask.kv_indices.shape[-2], columns)
    partial = dense(block_mask.kv_num_blocks, block_mask.kv_indices, columns, check=False).reshape(shape)
    full = block_mask.full_kv_num_blocks
    full = None if full is None else dense(full, block_mask.full_kv_indices, columns, check=False).reshape(shape)
    by_batch, by_head = batch > 1, heads > 1
    reads = () if rule is None else dynamo_reads(rule)
    pattern = _pattern(partial, full, rule, by_batch, by_head, q_side, kv_side)
    return _Rule((), (), pattern, not by_batch and "batch" in reads, not by_head and "head" in reads)


def dynamo_reads(rule: Any) -> Any:
    """Which of batch, head, q_idx and kv_idx a function reads that Dynamo knows."""
    from flexc.dynamo import reads

    return reads(rule)


def _version(tensor: Tensor | None) -> Any:
    """What changes when the tensor is written to in place. PyTorch does not count for inference tensors: they are never the same."""
    return None if tensor is None else (object() if tensor.is_inference() else tensor._version)


def _function_of_lists(block_mask: Any, lists: tuple, batch: int, heads: int) -> tuple[MaskFunction | None, bool, bool]:
    """The mask function, and whether it holds for one batch element, or one head, only."""
    (q_side, kv_side), (q_len, kv_len) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    num_blocks, indices, full_num_blocks, full_indices = lists
    rows, columns = indices.shape[-2], max(indices.shape[-1], -(-kv_len // kv_side))
    if rows * q_side < q_len:
        raise ShapeError(f"block_mask lists {rows} rows of {q_side} queries: expected enough for {q_len} queries")
    shape = (batch, heads, rows, columns)
    partial = dense(num_blocks, indices, columns).reshape(shape)
    full = None if full_num_blocks is None else dense(full_num_blocks, full_indices, columns).reshape(shape)
    if full is not None and not bool(full.any()):
        full = None
    rule = as_ours(block_mask.mask_mod)
    if rule is noop_mask:
        rule, partial, full = None, partial if full is None else partial | full, None
    if full is None and bool(partial.all()):
        return rule, False, False  # the lists leave everything to the function
    reads = frozenset() if rule is None else _reads(rule)
    by_batch, by_head = batch > 1, heads > 1
    function = _pattern(partial, full, rule, by_batch, by_head, frontend.constant(q_side), frontend.constant(kv_side))
    return function, not by_batch and "batch" in reads, not by_head and "head" in reads


def _reads(rule: MaskFunction) -> frozenset[str]:
    """Which of batch, head, q_idx and kv_idx the function reads."""
    mask = passes.run(frontend.trace(None, rule)[0].graph).mask
    return frozenset() if mask is None else frozenset(inputs_of(mask))


def _pattern(
    partial: Tensor, full: Tensor | None, rule: MaskFunction | None, by_batch: bool, by_head: bool, q_side: int, kv_side: int
) -> Any:
    """The mask function of tables of blocks, bool [B or 1, H or 1, rows, columns]."""

    def block_pattern(batch, head, q_idx, kv_idx):
        block = (batch if by_batch else 0, head if by_head else 0, q_idx // q_side, kv_idx // kv_side)
        allowed = partial[block]
        if rule is not None:
            allowed = allowed & rule(batch, head, q_idx, kv_idx)
        return allowed if full is None else allowed | full[block]

    return block_pattern


def as_ours(function: Any) -> Any:
    """A mask function without PyTorch's own parts, which make tensors of the positions' kind."""
    while getattr(function, "__module__", None) == _TORCH:
        name = getattr(function, "__qualname__", "").partition(".")[0]
        if name == "noop_mask":
            return noop_mask
        if name not in ("and_masks", "or_masks"):
            break
        (masks,) = (cell.cell_contents for cell in function.__closure__)
        return (and_masks if name == "and_masks" else or_masks)(*map(as_ours, masks))
    return function


def _refuse_what_is_no_block_mask(block_mask: Any) -> None:
    if not all(hasattr(block_mask, name) for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "seq_lengths", "mask_mod")):
        hint = ": a mask function becomes one by create_block_mask" if callable(block_mask) else ""
        raise InputError(f"block_mask is a {type(block_mask).__name__}; expected a BlockMask{hint}")
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise UsageError(
            "PyTorch's block mask lost its mask function when it was indexed: assign mask_mod, with the right offset, from the whole mask; "
            "or make the mask with flexc.compat.create_block_mask, which keeps it"
        )
