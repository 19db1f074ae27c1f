"""Prefix LM: the prompt is read in both directions, what follows is written left to right.

Studied by Raffel et al. in the T5 paper, arXiv:1910.10683, after Liu et al., arXiv:1801.10198. Each sequence of a batch has a prompt of
its own length, so the mask reads `batch`.

    python examples/prefix_lm.py
"""

from __future__ import annotations

import show
import torch

import flexc


def prefix_lm(prompt_lengths: torch.Tensor) -> flexc.Mask:
    @flexc.mask
    def visible(batch, head, q_idx, kv_idx):
        return kv_idx <= q_idx or kv_idx < prompt_lengths[batch]

    return visible


def main(small: bool = False) -> None:
    length = show.tokens(small)
    prompt_lengths = torch.tensor([length // 2, length // 5], dtype=torch.int32, device=show.device)
    q, k, v = show.inputs(batch=2, q_heads=4, kv_heads=4, length=length, head_dim=64)

    mask = prefix_lm(prompt_lengths)
    kernel = flexc.attention(mask_mod=mask)
    out = kernel(q, k, v)

    truth, _ = flexc.reference(None, mask, q, k, v)
    show.accuracy(out, truth)

    print(f"\nBlocks that the mask leaves to do, for prompts of {prompt_lengths.tolist()} tokens:")
    print(kernel.blocks)

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
