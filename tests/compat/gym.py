"""The variants that FlexAttention's users collected (attention-gym, PyTorch's tutorial), written from their mathematics.

A variant is made by a function of (batch, heads, q_len, kv_len); it says which gradients count and which lengths it is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flexc.compat import and_masks, or_masks
from tests.accuracy import normal

BATCH, HEADS = 2, 4


@dataclass
class Variant:
    score_mod: Any = None
    mask_mod: Any = None
    captured: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    make: Callable[[int, int], Variant]  # (q_len, kv_len)
    q_len: int = 96
    kv_len: int = 96
    dims: tuple[int, int] = (16, 16)


VARIANTS: dict[str, Entry] = {}


def variant(q_len=96, kv_len=None, dims=(16, 16)):
    def enter(make):
        VARIANTS[make.__name__] = Entry(make, q_len, kv_len or q_len, dims)
        return make

    return enter


def causal_rule(b, h, q, kv):
    return q >= kv


# --- masks ----------------------------------------------------------------------------------------------------------------------------


@variant()
def causal(q_len, kv_len):
    return Variant(mask_mod=causal_rule)


@variant(101)
def causal_ragged(q_len, kv_len):
    return Variant(mask_mod=causal_rule)


@variant(37, 101)
def causal_at_the_end(q_len, kv_len):
    """The last query sees the last key."""
    offset = kv_len - q_len

    def bottom_right(b, h, q, kv):
        return q + offset >= kv

    return Variant(mask_mod=bottom_right)


@variant(101)
def sliding_window(q_len, kv_len):
    width = 17

    def window(b, h, q, kv):
        return q - kv <= width

    return Variant(mask_mod=and_masks(causal_rule, window))


@variant()
def prefix_lm(q_len, kv_len):
    prefix = torch.tensor([20, 51])

    def in_prefix(b, h, q, kv):
        return kv < prefix[b]

    return Variant(mask_mod=or_masks(in_prefix, causal_rule))


def document_rule(rule, lengths):
    """Documents one after the other; inside them the rule counts from the document's beginning."""
    lengths = torch.tensor(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths

    def inside(b, h, q, kv):
        same = document[q] == document[kv]
        return same & rule(b, h, q - first[document[q]], kv - first[document[kv]])

    return inside


@variant(101)
def documents(q_len, kv_len):
    return Variant(mask_mod=document_rule(causal_rule, [13, 1, 40, 47]))


@variant(96)
def documents_with_windows(q_len, kv_len):
    def rule(b, h, q, kv):
        return (q >= kv) & (q - kv < 9)

    return Variant(mask_mod=document_rule(rule, [30, 50, 16]))


@variant(96)
def documents_with_prefixes(q_len, kv_len):
    prefix = 5

    def rule(b, h, q, kv):
        return (kv < prefix) | (q >= kv)

    return Variant(mask_mod=document_rule(rule, [30, 50, 16]))


@variant(101)
def dilated_sliding_window(q_len, kv_len):
    width, dilation = 12, 3

    def dilated(b, h, q, kv):
        apart = torch.abs(q - kv)
        return (apart <= width * dilation) & (apart % dilation == 0) & (q >= kv)

    return Variant(mask_mod=dilated)


def neighbourhood(place, columns, rows, kernel):
    """A cell sees the kernel × kernel cells around it; at the border the window moves inward. `place` gives (x, y) of a token."""
    reach = kernel // 2

    def natten(b, h, q, kv):
        (qx, qy), (kx, ky) = place(q), place(kv)
        cx = torch.clamp(qx, reach, columns - 1 - reach)
        cy = torch.clamp(qy, reach, rows - 1 - reach)
        return (torch.abs(cx - kx) <= reach) & (torch.abs(cy - ky) <= reach)

    return natten


@variant(120)
def natten_simple(q_len, kv_len):
    return Variant(mask_mod=neighbourhood(lambda i: (i % 12, i // 12), 12, 10, 5))


@variant(96)
def natten_tiled(q_len, kv_len):
    """Tokens tile after tile: tiles of 4 x 4 cells on a canvas of 12 x 8."""
    columns, rows, side = 12, 8, 4

    def place(i):
        tile, inside = i // (side * side), i % (side * side)
        across = columns // side
        return tile % across * side + inside % side, tile // across * side + inside // side

    return Variant(mask_mod=neighbourhood(place, columns, rows, 3))


@variant(64)
def natten_morton(q_len, kv_len):
    """Tokens along the Morton curve of an 8 x 8 canvas: even bits are x, odd bits y."""

    def every_second_bit(i):
        x = i & 1
        for bit in range(1, 3):
            x = x | ((i >> (2 * bit)) & 1) << bit
        return x

    return Variant(mask_mod=neighbourhood(lambda i: (every_second_bit(i), every_second_bit(i >> 1)), 8, 8, 3))


@variant(100)
def shared_prefix(q_len, kv_len):
    """Several continuations after one prefix: each sees the prefix and itself."""
    lengths = torch.tensor([34, 20, 30, 16])
    part = torch.arange(4).repeat_interleave(lengths)

    def continuation(b, h, q, kv):
        return (q >= kv) & ((part[kv] == 0) | (part[q] == part[kv]))

    return Variant(mask_mod=continuation)


@variant(96)
def transfusion(q_len, kv_len):
    """Causal text with images, whose tokens see all of their own image."""
    images = torch.tensor([[[5, 20], [40, 16]], [[0, 8], [70, 26]]])  # [B, images, (first token, tokens)]

    def causal_or_one_image(b, h, q, kv):
        allowed = q >= kv
        for image in range(2):
            first, length = images[b, image, 0], images[b, image, 1]
            allowed = allowed | ((q >= first) & (q < first + length) & (kv >= first) & (kv < first + length))
        return allowed

    return Variant(mask_mod=causal_or_one_image)


@variant(90, 48)
def flamingo(q_len, kv_len):
    """Text looks at the tokens of the last image before it; text before the first image sees nothing."""
    tokens_per_image = 16
    begins = torch.zeros(BATCH, q_len, dtype=torch.int64)
    begins[0, [4, 30, 62]] = 1
    begins[1, [0, 50]] = 1
    image = begins.cumsum(1) - 1

    def last_image(b, h, q, kv):
        return image[b, q] == kv // tokens_per_image

    return Variant(mask_mod=last_image)


@variant(96)
def block_diffusion(q_len, kv_len):
    """Noised tokens, then the clean ones: noised blocks see themselves and the clean blocks before; clean ones are causal by block."""
    half, block = q_len // 2, 8

    def rule(b, h, q, kv):
        q_clean, kv_clean = q >= half, kv >= half
        q_block = torch.where(q_clean, q - half, q) // block
        kv_block = torch.where(kv_clean, kv - half, kv) // block
        itself = (q_block == kv_block) & (q_clean == kv_clean)
        before = (q_block > kv_block) & kv_clean & ~q_clean
        clean = (q_block >= kv_block) & kv_clean & q_clean
        return itself | before | clean

    return Variant(mask_mod=rule)


@variant(96)
def causal_and_window_by_head(q_len, kv_len):
    """The later half of the heads sees a window."""

    def rule(b, h, q, kv):
        return (q >= kv) & ((h < HEADS // 2) | (q - kv < 10))

    return Variant(mask_mod=rule)


# --- scores ---------------------------------------------------------------------------------------------------------------------------


@variant(101)
def noop(q_len, kv_len):
    def unchanged(score, b, h, q, kv):
        return score

    return Variant(score_mod=unchanged)


@variant(101)
def relative_positional(q_len, kv_len):
    def relative(score, b, h, q, kv):
        return score + (q - kv)

    return Variant(score_mod=relative)


@variant(96)
def relative_positional_table(q_len, kv_len):
    table = normal(2 * q_len - 1, HEADS, seed=5, grad=True)

    def relative(score, b, h, q, kv):
        return score + table[q - kv + q_len - 1, h]

    return Variant(score_mod=relative, captured={"table": table})


@variant(101)
def alibi(q_len, kv_len):
    def with_slope(score, b, h, q, kv):
        slope = torch.exp2(-((h + 1) * 8.0 / HEADS))
        return score + (kv - q) * slope

    return Variant(score_mod=with_slope, mask_mod=causal_rule)


@variant(96)
def alibi_learned(q_len, kv_len):
    slopes = torch.exp2(-torch.arange(1, HEADS + 1) * 8.0 / HEADS).requires_grad_()

    def with_slope(score, b, h, q, kv):
        return score - torch.abs(q - kv) * slopes[h]

    return Variant(score_mod=with_slope, captured={"slopes": slopes})


@variant(101)
def soft_cap(q_len, kv_len):
    cap = 2.0

    def capped(score, b, h, q, kv):
        return cap * torch.tanh(score / cap)

    return Variant(score_mod=capped, mask_mod=causal_rule)


@variant(101)
def soft_cap_approximated(q_len, kv_len):
    """tanh by its continued fraction, cut off where it leaves [-1, 1]."""
    cap = 2.0

    def capped(score, b, h, q, kv):
        x = torch.clamp(score / cap, -3.0, 3.0)
        return cap * x * (27 + x * x) / (27 + 9 * x * x)

    return Variant(score_mod=capped, mask_mod=causal_rule)


@variant(96)
def checkerboard(q_len, kv_len):
    def board(score, b, h, q, kv):
        return torch.where(torch.abs(kv - q) % 2 == 1, score * 0.5, score * 2.0)

    return Variant(score_mod=board)


@variant(96)
def head_bias(q_len, kv_len):
    bias = normal(HEADS, seed=6, grad=True)

    def biased(score, b, h, q, kv):
        return score + bias[h] * (kv % 3)

    return Variant(score_mod=biased, captured={"bias": bias})


@variant(60)
def bias_of_pairs(q_len, kv_len):
    bias = normal(HEADS, q_len, kv_len, seed=7, grad=True)

    def biased(score, b, h, q, kv):
        return score + bias[h, q, kv]

    return Variant(score_mod=biased, captured={"bias": bias})


@variant(96)
def causal_as_score(q_len, kv_len):
    def masked(score, b, h, q, kv):
        return torch.where(q >= kv, score, -float("inf"))

    return Variant(score_mod=masked)


@variant(80)
def documents_as_score(q_len, kv_len):
    document = torch.arange(4).repeat_interleave(torch.tensor([10, 30, 25, 15]))

    def masked(score, b, h, q, kv):
        return torch.where(document[q] == document[kv], score, -math.inf)

    return Variant(score_mod=masked)


@variant(70, dims=(16, 24))
def latent_rope_as_score(q_len, kv_len):
    """Multi-head latent attention: the part of the score that carries the position, with one key for all heads, is added."""
    q_rope = normal(BATCH, HEADS, q_len, 4, seed=8, grad=True)
    k_rope = normal(BATCH, kv_len, 4, seed=9, grad=True)

    def with_rope(score, b, h, q, kv):
        return score + torch.dot(q_rope[b, h, q], k_rope[b, kv]) * 0.25

    return Variant(score_mod=with_rope, mask_mod=causal_rule, captured={"q_rope": q_rope, "k_rope": k_rope})


@variant(70, dims=(24, 16))
def latent_head_dims(q_len, kv_len):
    """Multi-head latent attention with both parts in one head dimension: D is larger than Dv."""
    return Variant(mask_mod=causal_rule)
