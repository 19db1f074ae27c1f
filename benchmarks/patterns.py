"""The attention patterns that are measured: function, mask and number of unmasked pairs. Shared by flexc and FlexAttention alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

DOCUMENTS, PREFIX, CAP = 8, 2048, 20.0
WINDOWS = {"sliding": 1024, "sliding_128": 128}
DISTANCES = 1024  # of the relative bias; beyond, the last one


@dataclass(frozen=True)
class Pattern:
    """score_mod and mask_mod, written so that flexc and FlexAttention both take them; None where there is none.

    `learned`: captured tensors whose gradients belong to the backward pass.
    """

    name: str
    score_mod: Callable | None
    mask_mod: Callable | None
    pairs: int  # unmasked (query, key) pairs of one head
    learned: tuple[torch.Tensor, ...] = ()


def document_ids(length: int) -> torch.Tensor:
    """int32 [S], on the CPU: DOCUMENTS documents of random lengths, the same each time."""
    generator = torch.Generator().manual_seed(1)
    documents = min(DOCUMENTS, length)
    cuts = torch.sort(torch.randperm(length - 1, generator=generator)[: documents - 1] + 1).values
    ids = torch.zeros(length, dtype=torch.int32)
    ids[cuts] = 1
    return ids.cumsum(0).int()


def pairs(name: str, q_len: int, kv_len: int) -> int:
    """Unmasked pairs of one head, counted row by row; nothing of size Sq × Skv is made."""
    rows = torch.arange(q_len)
    seen = torch.clamp(rows + 1, max=kv_len)  # keys with kv_idx <= q_idx
    if name == "full":
        return q_len * kv_len
    if name in ("causal", "alibi_causal", "softcap_causal", "relative_causal"):
        return int(seen.sum())
    if name in WINDOWS:
        first = torch.clamp(rows - WINDOWS[name], min=0, max=kv_len)
        return int((seen - torch.minimum(first, seen)).sum())
    if name == "prefix":
        return int(torch.clamp(seen, min=min(PREFIX, kv_len)).sum())
    if name == "document":
        ids = document_ids(max(q_len, kv_len))
        starts = torch.searchsorted(ids, ids)  # first token of each token's document
        return int(torch.clamp(seen - starts[:q_len], min=0).sum())
    raise KeyError(name)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(width: int) -> Callable:
    def sliding(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= width)

    return sliding


def prefix(batch, head, q_idx, kv_idx):
    return (q_idx >= kv_idx) | (kv_idx < PREFIX)


def same_document(ids: torch.Tensor) -> Callable:
    def document(batch, head, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return document


def alibi(score, batch, head, q_idx, kv_idx):
    return score - torch.exp2(-(head + 1) * 0.5) * (q_idx - kv_idx).abs()


def soft_cap(score, batch, head, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


def relative_bias(table: torch.Tensor) -> Callable:
    def relative(score, batch, head, q_idx, kv_idx):
        return score + table[head, torch.clamp(q_idx - kv_idx, 0, DISTANCES - 1)]

    return relative


NAMES = ("full", "causal", "sliding", "document", "prefix", "alibi_causal", "softcap_causal", "relative_causal", "sliding_128")


def pattern(name: str, q_len: int, kv_len: int, device: str | torch.device, heads: int = 1) -> Pattern:
    masks = {"full": None, "prefix": prefix} | {name: window(width) for name, width in WINDOWS.items()}
    scores = {"alibi_causal": alibi, "softcap_causal": soft_cap}
    learned: tuple[torch.Tensor, ...] = ()
    if name == "relative_causal":
        table = torch.randn(heads, DISTANCES, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
        scores[name], learned = relative_bias(table), (table,)
    mask = same_document(document_ids(max(q_len, kv_len)).to(device)) if name == "document" else masks.get(name, causal)
    return Pattern(name, scores.get(name), mask, pairs(name, q_len, kv_len), learned)
