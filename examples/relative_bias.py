"""Relative bias: a learnable number for each head and each range of distances, added to the score.

Proposed by Shaw, Uszkoreit and Vaswani, arXiv:1803.02155, in the form used by T5 (Raffel et al., arXiv:1910.10683): near distances have a
bucket of their own, far ones share buckets that widen with the logarithm. The table is an ordinary parameter. Here a student learns
the table of a teacher from the teacher's outputs alone; flexc delivers the gradient of the captured tensor.

    python examples/relative_bias.py
"""

from __future__ import annotations

import math

import show
import torch

import flexc

HEADS, BUCKETS, FAR = 4, 32, 128  # distances from FAR on share the last bucket
NEAR = BUCKETS // 2  # distances below NEAR have one bucket each


def bucket(distance):
    """Bucket of a distance ≥ 0. An ordinary helper; `if` on a position works."""
    if distance < NEAR:
        return distance
    far = NEAR + torch.floor(torch.log(distance / NEAR) / math.log(FAR / NEAR) * (BUCKETS - NEAR)).int()
    return min(far, BUCKETS - 1)


def relative_bias(table: torch.Tensor) -> flexc.Kernel:
    """Causal attention with table [Hq, BUCKETS] added to its scores."""

    def biased(score, batch, head, q_idx, kv_idx):
        return score + table[head, bucket(max(q_idx - kv_idx, 0))]

    return flexc.attention(score_mod=biased, mask_mod=causal)


@flexc.mask
def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def main(small: bool = False) -> None:
    length, steps = (96, 10) if small else (512, 60)
    q, k, v = show.inputs(batch=2, q_heads=HEADS, kv_heads=HEADS, length=length, head_dim=32)

    teacher = torch.randn(HEADS, BUCKETS, generator=torch.Generator().manual_seed(1)).to(show.device)
    with torch.no_grad():
        target = relative_bias(teacher)(q, k, v)

    table = torch.zeros(HEADS, BUCKETS, device=show.device, requires_grad=True)
    kernel = relative_bias(table)
    optimizer = torch.optim.Adam([table], lr=0.1)
    losses = []
    for step in range(steps):
        loss = (kernel(q, k, v) - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // 6, 1) == 0 or step == steps - 1:
            print(f"step {step:3}: loss {losses[-1]:.2e}, distance to the teacher's table {spread(table - teacher):.3f}")
    assert losses[-1] < losses[0] * (0.5 if small else 0.02), f"loss went from {losses[0]:.2e} to {losses[-1]:.2e}"

    def plain(score, batch, head, q_idx, kv_idx):
        return score + table[head, bucket(max(q_idx - kv_idx, 0))]

    truth, _ = flexc.reference(plain, causal, q, k, v)
    show.accuracy(kernel(q, k, v), truth)

    print("\nBlocks that the mask leaves to do:")
    print(kernel.blocks)

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


def spread(difference: torch.Tensor) -> float:
    """Standard deviation in a head: softmax does not see a number added to the whole row."""
    return difference.detach().float().std(dim=1).mean().item()


if __name__ == "__main__":
    main()
