"""Hugging Face transformers: models with `attn_implementation="flexc"`.

    from flexc.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="flexc")

transformers describes a mask by functions of positions (causal, window, chunks, packed sequences, padding), which flexc compiles as they
are: no mask of queries × keys is made. Soft-caps, additive biases and sinks come from the model's layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import BlockMask

from flexc.compat.attention import kernel_for
from flexc.compat.rules import rule_of
from flexc.errors import InputError, ShapeError, ToolchainError, UnsupportedError

Tensor = torch.Tensor
Function = Callable[..., Any]

NAME = "flexc"


def register(name: str = NAME) -> None:
    """Make flexc an attention implementation of transformers.

    Args:
        name: what `attn_implementation` calls it.

    Raises:
        ToolchainError: transformers is not installed, or older than 5.
    """
    try:
        theirs: Any = importlib.import_module("transformers")
        registries = theirs.AttentionInterface, theirs.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ToolchainError(f'flexc.integrations.transformers needs transformers >= 5: pip install "transformers>=5" ({error})') from None
    for registry, function in zip(registries, (attention, mask), strict=True):
        registry.register(name, function)


class Mask(BlockMask):
    """A mask function of one forward pass of a model. Models hand it from where it is made to their layers.

    It is a PyTorch BlockMask by type alone, which is what models let through; it has no lists of blocks.

    Attributes:
        rule: (batch, head, row, column) → may this query see this key? Positions count in the tensors of the call.
    """

    def __init__(self, rule: Function, batch: int, q_len: int, kv_len: int):
        self.rule = rule
        self._sizes = batch, q_len, kv_len

    @property
    def shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """[B, 1, queries, keys], as of a mask of all pairs."""
        batch, q_len, kv_len = self._sizes
        return batch, 1, q_len, kv_len

    def __repr__(self) -> str:
        return f"<flexc mask {list(self.shape)}>"

    __str__ = __repr__


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Function | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **_: Any,
) -> Mask:
    """What transformers calls once for each kind of layer in a forward pass.

    Args:
        q_length, kv_length: tokens in q, and in k and v.
        q_offset, kv_offset: positions of the first ones.
        mask_function: of positions; default causal.
        attention_mask: [B, keys], which tokens are no padding.
        cache_position: positions of the queries, in place of their number and offset.
    """
    if cache_position is not None:
        q_length, q_offset = len(cache_position), cache_position[0]
    if q_length is None:
        raise InputError("expected q_length or cache_position, got neither")
    rule = _causal if mask_function is None else mask_function
    if attention_mask is not None and (is_compiling() or not bool(attention_mask.all())):
        missing = kv_length + kv_offset - attention_mask.shape[1]  # keys of a cache that nothing was written to yet
        rule = _without_padding(rule, torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0))))
    return Mask(_placed(rule, q_offset, kv_offset), batch_size, q_length, kv_length)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """What a layer of a model calls.

    Args:
        query, key, value: [B, Hq, Sq, D], [B, Hkv, Skv, D], [B, Hkv, Skv, Dv].
        attention_mask: of `mask`; PyTorch's BlockMask; a tensor [B or 1, Hq or 1, Sq, Skv or more] of truth values or to be added to
            scores; or None: causal if the layer is, with its window.
        scaling, softcap, s_aux, position_bias: scale, soft-cap of scores, logit of each head's sink, what is added to scores
            [B or 1, Hq or 1, Sq, Skv].

    Returns:
        [B, Sq, Hq, Dv], and None for the weights, which are never there.

    Raises:
        UnsupportedError: dropout, or weights are asked for.
    """
    if dropout:
        raise UnsupportedError("dropout inside flexc attention, on every backend: call model.eval(), or set the attention dropout to 0")
    if named.get("output_attentions"):
        raise UnsupportedError('output_attentions=True: flexc never has the weights; load the model with attn_implementation="eager"')
    q_len, kv_len = query.shape[2], key.shape[2]
    rule, added = None, None
    if isinstance(attention_mask, Mask):
        if tuple(attention_mask.shape[2:]) != (q_len, kv_len):
            made_for = attention_mask.shape[2:]
            raise ShapeError(f"the mask was made for {made_for[0]} queries and {made_for[1]} keys, got {q_len} and {kv_len}")
        rule = attention_mask.rule
    elif isinstance(attention_mask, Tensor):
        rule, added = (_listed(attention_mask), None) if attention_mask.dtype == torch.bool else (None, attention_mask[..., :kv_len])
    elif attention_mask is not None:
        rule = rule_of(attention_mask, query.shape, key.shape, query.device)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        rule = _band(kv_len - q_len, sliding_window) if causal and q_len > 1 else None
    kernel: Any = kernel_for(_modified(softcap, added, position_bias), rule)
    out = kernel(query, key, value, scale=scaling, sink=s_aux)
    return out.transpose(1, 2).contiguous(), None


# --- mask functions: closures over tensors and numbers, so that every step of generation has the same code --------------------------------


def _causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def _placed(rule: Function, q_offset: int | Tensor, kv_offset: int) -> Function:
    def placed(batch, head, q_idx, kv_idx):
        return rule(batch, head, q_idx + q_offset, kv_idx + kv_offset)

    starts_at_zero = isinstance(q_offset, int) and q_offset == 0 == kv_offset
    return rule if starts_at_zero else placed


def _without_padding(rule: Function, is_token: Tensor) -> Function:
    def without_padding(batch, head, q_idx, kv_idx):
        return is_token[batch, kv_idx] & rule(batch, head, q_idx, kv_idx)

    return without_padding


def _band(offset: int, width: int | None) -> Function:
    def band(batch, head, q_idx, kv_idx):
        distance = q_idx + offset - kv_idx
        return distance >= 0 if width is None else (distance >= 0) & (distance < width)

    return band


def _listed(allowed: Tensor) -> Function:
    by_batch, by_head = allowed.shape[0] > 1, allowed.shape[1] > 1

    def listed(batch, head, q_idx, kv_idx):
        return allowed[batch if by_batch else 0, head if by_head else 0, q_idx, kv_idx]

    return listed


# --- score functions --------------------------------------------------------------------------------------------------------------------


def _modified(softcap: float | None, *biases: Tensor | None) -> Function | None:
    """The score function of a layer, None where it changes nothing."""
    given = [bias for bias in biases if bias is not None]
    if softcap is None and not given:
        return None
    added = None if not given else given[0] if len(given) == 1 else given[0] + given[1]
    if added is not None:
        return _biased(softcap, added)
    return None if softcap is None else _capped(softcap)


def _capped(cap: float) -> Function:
    def capped(score, batch, head, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return capped


def _biased(cap: float | None, bias: Tensor) -> Function:
    by_batch, by_head = bias.shape[0] > 1, bias.shape[1] > 1

    def biased(score, batch, head, q_idx, kv_idx):
        capped = score if cap is None else cap * torch.tanh(score / cap)
        return capped + bias[batch if by_batch else 0, head if by_head else 0, q_idx, kv_idx]

    return biased
