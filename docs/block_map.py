"""Draw docs/block_map.png, the picture in README.md: `python docs/block_map.py`. Needs the `examples` extra."""

from __future__ import annotations

from pathlib import Path

import torch

import flexc

LENGTHS = (900, 1500, 500, 1196)
doc_ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


@flexc.mask
def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 600


def main() -> None:
    q, k, v = torch.zeros(3, 1, 1, sum(LENGTHS), 64)
    kernel = flexc.attention(mask_mod=window & flexc.masks.document(doc_ids))
    kernel(q, k, v)
    kernel.blocks.plot(Path(__file__).with_name("block_map.png"), title="window of 600 tokens over 4 packed documents")


if __name__ == "__main__":
    main()
