"""Soft-capping: scores are bent smoothly into (-cap, cap), so no single one can take over.

Used by Gemma 2 (Gemma Team, arXiv:2408.00118) with a cap of 50 for attention, after Bello et al., arXiv:1611.09940. The bend has a
derivative, 1 - tanh², which the backward pass must apply; flexc derives it from the function.

    python examples/soft_capping.py
"""

from __future__ import annotations

import show
import torch

import flexc

CAP = 50.0


def soft_cap(score, batch, head, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


@flexc.mask
def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def main(small: bool = False) -> None:
    q, k, v = show.inputs(batch=1, q_heads=8, kv_heads=4, length=show.tokens(small), head_dim=64)
    q = q * 20  # large scores, so that the cap has something to bend

    kernel = flexc.attention(score_mod=soft_cap, mask_mod=causal)
    out = kernel(q, k, v)

    truth, _ = flexc.reference(soft_cap, causal, q, k, v)
    show.accuracy(out, truth, largest_score=CAP)
    uncapped, _ = flexc.reference(None, causal, q, k, v)
    print(f"without the cap the outputs differ by up to {(uncapped - truth).abs().max().item():.2f}")

    print("\nOutput and gradients against float64, on the first 64 tokens:")
    report = flexc.check(kernel, *(x[:, :, :64].detach().requires_grad_() for x in (q, k, v)))
    report.raise_if_bad()

    print("\nBlocks that the mask leaves to do:")
    kernel(q, k, v)
    print(kernel.blocks)

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
