"""ALiBi: a penalty that grows with distance, in place of position embeddings.

Proposed by Press, Smith and Lewis in "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation", arXiv:2108.12409. Each head subtracts its own slope times the distance between query and key; the slopes are a
geometric sequence, so the first heads look nearby and the last ones far.

    python examples/alibi.py
"""

from __future__ import annotations

import show
import torch

import flexc

HEADS = 8
slopes = torch.exp2(-8.0 / HEADS * torch.arange(1, HEADS + 1, device=show.device))  # 1/2, 1/4, … 1/256


def alibi(score, batch, head, q_idx, kv_idx):
    return score - slopes[head] * (q_idx - kv_idx)


@flexc.mask
def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def main(small: bool = False) -> None:
    q, k, v = show.inputs(batch=1, q_heads=HEADS, kv_heads=HEADS, length=show.tokens(small), head_dim=64)

    # flexc.kernel(alibi) is attention with the score function alone. A language model adds the causal mask:
    kernel = flexc.attention(score_mod=alibi, mask_mod=causal)
    out = kernel(q, k, v)

    truth, _ = flexc.reference(alibi, causal, q, k, v)
    show.accuracy(out, truth)

    print("\nBlocks that the mask leaves to do:")
    print(kernel.blocks)

    print("\nThe variant as flexc sees it:")
    print(kernel.graph)

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel; the slope is loaded once a head, not once a score:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
