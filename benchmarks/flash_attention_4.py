"""Score and mask functions for flash-attn-4, which takes them as CuTe functions; imports it, so import this only where it is installed."""

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import math as mlir_math
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from patterns import PREFIX


@cute.jit
def causal(batch, head, m, n, info, aux):
    return n <= m


@cute.jit
def prefix(batch, head, m, n, info, aux):
    length = utils.scalar_to_ssa(PREFIX, cutlass.Int32)
    return (n <= m) | (n < length)


@cute.jit
def document(batch, head, m, n, info, aux):
    ids = aux[0]
    mine = utils.scalar_to_ssa(ids[m[0]], cutlass.Int32)
    other = utils.scalar_to_ssa(ids[n[0]], cutlass.Int32)
    return (mine == other) & (n <= m)


@cute.jit
def alibi(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # called by these names
    slope = cute.math.exp2((head + cute.full_like(head, 1)).to(cutlass.Float32) * cute.full_like(score, -0.5))
    distance = q_idx - kv_idx
    return score - slope * cute.TensorSSA(mlir_math.absi(distance), distance.shape, distance.dtype).to(cutlass.Float32)


@cute.jit
def alibi_backward(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad


MASKS = {"prefix": prefix, "document": document, "alibi_causal": causal, "softcap_causal": causal}


def arguments(name, blocks, ids, cap):
    """Keyword arguments of flash_attn_func for a pattern, from FlexAttention's block mask."""
    size = tuple(blocks.BLOCK_SIZE)

    def lists(count, index, full_count, full_index):
        return BlockSparseTensorsTorch(
            mask_block_cnt=count, mask_block_idx=index, full_block_cnt=full_count, full_block_idx=full_index, block_size=size
        )

    named = dict(
        mask_mod=MASKS[name],
        block_sparse_tensors=lists(blocks.kv_num_blocks, blocks.kv_indices, blocks.full_kv_num_blocks, blocks.full_kv_indices),
        block_sparse_tensors_bwd=lists(blocks.q_num_blocks, blocks.q_indices, blocks.full_q_num_blocks, blocks.full_q_indices),
    )
    if name == "document":
        named["aux_tensors"] = [ids]
    if name == "alibi_causal":
        named.update(score_mod=alibi, score_mod_bwd=alibi_backward)
    if name == "softcap_causal":
        named["softcap"] = cap
    return named
