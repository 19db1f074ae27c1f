"""Documents: several texts packed into one sequence, each blind to the others.

Packing without cross-contamination (Krell, Kosec, Perez and Fitzgibbon, arXiv:2107.02027) lets training batches of unequal texts carry no
padding. The mask reads a captured tensor, the document number of every token, so its blocks depend on data.

    python examples/documents.py
"""

from __future__ import annotations

import show
import torch

import flexc


def document_numbers(lengths: list[int]) -> torch.Tensor:
    """int32 [sum of lengths]: 0 for each token of the first document, 1 for each of the second, …"""
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(lengths)).to(show.device)


def same_document(documents: torch.Tensor) -> flexc.Mask:
    @flexc.mask
    def same(batch, head, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    return same


@flexc.mask
def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def main(small: bool = False) -> None:
    length = show.tokens(small)
    lengths = [length // 2, length // 4, length // 8, 17]  # of one text each
    lengths.append(length - sum(lengths))
    q, k, v = show.inputs(batch=1, q_heads=4, kv_heads=4, length=length, head_dim=64)

    mask = causal & same_document(document_numbers(lengths))
    kernel = flexc.attention(mask_mod=mask)
    out = kernel(q, k, v)

    truth, _ = flexc.reference(None, mask, q, k, v)
    show.accuracy(out, truth)

    # Packed is the same as each text alone.
    alone = flexc.attention(mask_mod=causal)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    separate = torch.cat([alone(*part) for part in parts], dim=2)
    print(f"packed against one call for each text: {(out - separate).abs().max().item():.1e}")
    show.accuracy(separate, truth)

    print(f"\nBlocks that the mask leaves to do, for texts of {lengths} tokens:")
    print(kernel.blocks)

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
