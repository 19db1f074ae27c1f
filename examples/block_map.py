"""Block maps: which parts of a mask are work at all, proved from the mask function alone.

A kernel skips blocks of pairs that are empty and evaluates no mask in blocks that are full. FlexAttention (Dong et al.,
arXiv:2412.05496) finds them by evaluating the mask on every pair. flexc evaluates the function on intervals, for whole squares of blocks at
a time, so that the time grows with the border between empty and full, and a million tokens are no trouble. The map is of use without a
kernel, too: it says what a cache of keys may free.

    python examples/block_map.py
"""

from __future__ import annotations

import time

import show
import torch

import flexc


def packed(documents: torch.Tensor, width: int) -> flexc.Mask:
    """Causal attention in a window, inside each of several texts packed into one sequence."""

    @flexc.mask
    def window(batch, head, q_idx, kv_idx):
        return 0 <= q_idx - kv_idx < width

    @flexc.mask
    def same(batch, head, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    return window & same


def document_numbers(length: int, count: int) -> torch.Tensor:
    """int32 [length]: 0, 0, …, 1, …, count - 1."""
    return (torch.arange(length, device=show.device) * count // length).int()


def odd_way(batch, head, q_idx, kv_idx):
    """Causal over frames of 16 tokens, written so that bounds cannot see it."""
    return (q_idx - q_idx % 16) - (kv_idx - kv_idx % 16) >= 0


def plain_way(batch, head, q_idx, kv_idx):
    """The same."""
    return q_idx // 16 >= kv_idx // 16


def main(small: bool = False) -> None:
    length, width = show.tokens(small), show.tokens(small) // 4
    mask = packed(document_numbers(length, 3), width)
    blocks = flexc.block_map(mask, length, length, block=16 if small else 64)

    print("Blocks that the mask leaves to do:")
    print(blocks)

    print("\nCompared with the mask on tokens:")
    print(blocks.certify())

    # What cannot be proved is evaluated, and the certificate says what stopped the proof and how to write it instead.
    for way in (odd_way, plain_way):
        found = flexc.block_map(way, 512, 512, block=32)
        print(f"\n{way.__name__}, {found.proof}:")
        print(found.certify())
        assert torch.equal(found.kind, flexc.block_map(plain_way, 512, 512, block=32).kind)

    # Keys written one after the other, each freed after its last reader: a window needs a cache of its own size, at any length.
    held, last = blocks.live()[0, 0].tolist(), blocks.last_reader()[0, 0].tolist()
    print(f"\nkey blocks that a cache holds while each query block is computed: {held}")
    print(f"the last query block that reads each key block: {last}")
    print(f"a cache needs {blocks.most_live()} of {len(last)} blocks")

    tokens = 2**14 if small else 2**20
    long = packed(document_numbers(tokens, 32), 4096)
    flexc.block_map(long, 1024, 1024, device=show.device)  # traces the function
    start = time.perf_counter()
    large = flexc.block_map(long, tokens, tokens)
    counts = large.counts()
    print(f"\n{tokens} tokens: {(time.perf_counter() - start) * 1e3:.1f} ms, {large.size_bytes / 2**10:.0f} KiB, {counts}")

    q, k, v = show.inputs(batch=1, q_heads=4, kv_heads=4, length=length, head_dim=64)
    kernel = flexc.attention(mask_mod=mask)
    truth, _ = flexc.reference(None, mask, q, k, v)
    show.accuracy(kernel(q, k, v), truth)
    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
