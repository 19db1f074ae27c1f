"""FlexAttention's interface on flexc: import from here in place of `torch.nn.attention.flex_attention`.

    from flexc.compat import create_block_mask, flex_attention

Names, signatures, defaults and layouts are PyTorch's; what differs is listed in docs/compat.md. Nothing needs `torch.compile`.
"""

from flexc.compat.attention import AuxOutput, AuxRequest, flex_attention
from flexc.compat.block_mask import BlockMask, create_block_mask
from flexc.compat.masks import and_masks, create_mask, noop_mask, or_masks
from flexc.compat.options import FlexKernelOptions

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]
