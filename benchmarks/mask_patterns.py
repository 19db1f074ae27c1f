"""The masks whose block maps are measured: plain functions that flexc and FlexAttention both take, with their captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
MaskFunction = Callable[..., object]

WINDOW, SINKS, CHUNK, DIFFUSION_BLOCK, STEP, RADIUS = 1024, 4, 64, 32, 4, 7
DIAGONAL = 1000  # of the block-diagonal mask; no multiple of a block
LONG_DOCUMENTS = 819_200  # the 0.8 million packed tokens of 32 documents


@dataclass(frozen=True)
class MaskPattern:
    """A mask over q_len x kv_len tokens.

    Attributes:
        batch: 1 where the mask does not read the batch number.
        tensors: what the mask captures.
    """

    name: str
    mask: MaskFunction
    length: int
    batch: int
    tensors: tuple[Tensor, ...]


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(batch, head, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def window_sinks(batch, head, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < WINDOW) | (kv_idx < SINKS))


def dilated(batch, head, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW * STEP) & ((q_idx - kv_idx) % STEP == 0)


def block_diagonal(batch, head, q_idx, kv_idx):
    return q_idx // DIAGONAL == kv_idx // DIAGONAL


def document_ids(documents: int, length: int, device: torch.device) -> Tensor:
    """int32 [length]: documents of random lengths, the same each time."""
    generator = torch.Generator().manual_seed(documents)
    cuts = torch.randperm(length - 1, generator=generator)[: min(documents, length) - 1] + 1
    ids = torch.zeros(length, dtype=torch.int32)
    ids[cuts] = 1
    return ids.cumsum(0, dtype=torch.int32).to(device)


def _prefix_lm(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    prefix = length // 5

    def prefix_lm(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < prefix)

    return prefix_lm, ()


def _prefix_batch(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    prefix = torch.arange(1, batch + 1, device=device, dtype=torch.int32) * (length // (batch + 4))

    def prefix_of_batch(batch, head, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < prefix[batch])

    return prefix_of_batch, (prefix,)


def _documents(count: int) -> Callable[..., tuple[MaskFunction, tuple[Tensor, ...]]]:
    def make(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
        ids = document_ids(count, length, device)

        def documents(batch, head, q_idx, kv_idx):
            return ids[q_idx] == ids[kv_idx]

        return documents, (ids,)

    return make


def _documents_causal_window(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    ids = document_ids(64, length, device)

    def documents_causal_window(batch, head, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)

    return documents_causal_window, (ids,)


def _documents_block_causal(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    ids = document_ids(64, length, device)

    def documents_block_causal(batch, head, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx // CHUNK >= kv_idx // CHUNK)

    return documents_block_causal, (ids,)


def _neighborhood_2d(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    width = math.isqrt(length)

    def neighborhood_2d(batch, head, q_idx, kv_idx):
        rows, columns = q_idx // width - kv_idx // width, q_idx % width - kv_idx % width
        return (rows <= RADIUS) & (rows >= -RADIUS) & (columns <= RADIUS) & (columns >= -RADIUS)

    return neighborhood_2d, ()


def _block_diffusion(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    half = length // 2

    def block_diffusion(batch, head, q_idx, kv_idx):
        """Noisy tokens, then the clean ones. A noisy block sees itself and the clean blocks before it, a clean one those up to itself."""
        q_clean, kv_clean = q_idx >= half, kv_idx >= half
        q_block, kv_block = (q_idx % half) // DIFFUSION_BLOCK, (kv_idx % half) // DIFFUSION_BLOCK
        own = (q_clean == kv_clean) & (q_block == kv_block)
        return own | (kv_clean & (q_block > kv_block))

    return block_diffusion, ()


def _end_limits(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    ahead = torch.randint(0, WINDOW, (length,), generator=generator)
    end = (torch.arange(length) + ahead).cummax(0).values.int().to(device)

    def end_limits(batch, head, q_idx, kv_idx):
        return kv_idx <= end[q_idx]

    return end_limits, (end,)


def _padding(length: int, batch: int, device: torch.device) -> tuple[MaskFunction, tuple[Tensor, ...]]:
    lengths = length - torch.arange(1, batch + 1, device=device, dtype=torch.int32) * (length // (batch + 3))

    def padding(batch, head, q_idx, kv_idx):
        return (q_idx < lengths[batch]) & (kv_idx < lengths[batch])

    return padding, (lengths,)


def _plain(mask: MaskFunction) -> Callable[..., tuple[MaskFunction, tuple[Tensor, ...]]]:
    return lambda length, batch, device: (mask, ())


MAKERS = {
    "causal": _plain(causal),
    "window": _plain(window),
    "window_sinks": _plain(window_sinks),
    "prefix_lm": _prefix_lm,
    "prefix_batch": _prefix_batch,
    "documents_8": _documents(8),
    "documents_512": _documents(512),
    "documents_causal_window": _documents_causal_window,
    "dilated": _plain(dilated),
    "block_diagonal": _plain(block_diagonal),
    "neighborhood_2d": _neighborhood_2d,
    "documents_block_causal": _documents_block_causal,
    "block_diffusion": _block_diffusion,
    "end_limits": _end_limits,
    "padding": _padding,
    "documents_32": _documents(32),
}
NAMES = tuple(MAKERS)
READS_BATCH = ("prefix_batch", "padding")


def mask_pattern(name: str, length: int, device: str | torch.device, batch: int = 1) -> MaskPattern:
    """The mask for N = `length`; block diffusion has 2N tokens."""
    batch = batch if name in READS_BATCH else 1
    tokens = 2 * length if name == "block_diffusion" else length
    mask, tensors = MAKERS[name](tokens, batch, torch.device(device))
    return MaskPattern(name, mask, tokens, batch, tensors)
