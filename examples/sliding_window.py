"""Sliding window: each token sees itself and a fixed number of tokens before it.

Used by Longformer (Beltagy, Peters and Cohan, arXiv:2004.05150) and, causal, by Mistral 7B (Jiang et al., arXiv:2310.06825). The
work grows with length × window, not with length²: every block that lies wholly outside the band is never touched.

    python examples/sliding_window.py
"""

from __future__ import annotations

import show

import flexc


def sliding_window(width: int) -> flexc.Mask:
    """A mask is a plain Python function of four positions; chained comparisons, `and`, `or`, `not` all work."""

    @flexc.mask
    def window(batch, head, q_idx, kv_idx):
        return 0 <= q_idx - kv_idx < width

    return window


@flexc.mask
def sink(batch, head, q_idx, kv_idx):
    """The first four tokens stay visible to all: attention sinks (Xiao et al., arXiv:2309.17453)."""
    return kv_idx < 4 and kv_idx <= q_idx


def main(small: bool = False) -> None:
    width = 32 if small else 256
    q, k, v = show.inputs(batch=1, q_heads=8, kv_heads=2, length=show.tokens(small), head_dim=64)  # four query heads share a key head

    window = sliding_window(width)
    kernel = flexc.attention(mask_mod=window)
    out = kernel(q, k, v)

    truth, _ = flexc.reference(None, window, q, k, v)
    show.accuracy(out, truth)

    print("\nBlocks that the mask leaves to do:")
    print(kernel.blocks)

    # Masks combine with & | ~ ^ into new masks.
    with_sink = flexc.attention(mask_mod=window | sink)
    truth, _ = flexc.reference(None, window | sink, q, k, v)
    show.accuracy(with_sink(q, k, v), truth)

    print("\nBlocks with a sink of four tokens:")
    print(with_sink.blocks)

    # Another width needs no kernel of its own: the second one turns `width` into an argument, and all later ones share it.
    sources = {kernel.source}
    for other in (width // 2, width + 5, width * 2):
        narrow = flexc.attention(mask_mod=sliding_window(other))
        truth, _ = flexc.reference(None, sliding_window(other), q, k, v)
        print(f"width {other}: ", end="")
        show.accuracy(narrow(q, k, v), truth)
        sources.add(narrow.source)
    print(f"kernels made for four widths: {len(sources)}")
    assert len(sources) <= 2

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
