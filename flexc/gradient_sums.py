"""Memory that the backward pass takes to add up the gradients of captured tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexc.errors import UnsupportedError
from flexc.pipeline import Artifact

MOST_SUMS_BYTES = 2**32
"""Of sums that do not depend on the order of additions, for one tensor: they take many times what the tensor does."""


def refuse_large_sums(artifact: Artifact, tensors: Sequence[torch.Tensor]) -> None:
    """What a deterministic backward pass would need more memory for than attention itself takes.

    Raises:
        UnsupportedError: a tensor that large, which is not indexed in a way that says that no two pairs meet.
    """
    graph = artifact.lowered
    needed = artifact.backend.gradient_bytes(graph, True, [tensor.numel() for tensor in tensors])
    for given, tensor in zip(graph.tensors, tensors, strict=True):
        size_bytes = needed.get(given.name, 0)
        # Some terms may be stored after all, in buffers that are no larger than the tensor.
        if size_bytes > max(MOST_SUMS_BYTES, 16 * tensor.numel()):
            raise UnsupportedError(
                f"deterministic=True on the {artifact.backend.name} backend: expected at most {MOST_SUMS_BYTES >> 30} GiB for the sums of "
                f"the gradient of `{given.name}`, got {size_bytes / 2**30:.1f} GiB for its {tensor.numel():,} elements. Index it by "
                "positions alone, such as bias[head, q_idx, kv_idx], whose gradient needs no sums, or detach it"
            )
