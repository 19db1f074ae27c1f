"""Sequences of different lengths packed one after another: [total, H, D], without padding and without a mask to build.

One batch entry holds all tokens. The functions see `batch` as the number of the sequence and positions inside of it, as a rewriting of the
graph; a pair of two sequences is masked, and the block map skips it. So every backend runs it, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary

from flexc import frontend
from flexc.errors import InputError, ShapeError
from flexc.extents import extents_of, refuse_wrong_sizes
from flexc.frontend import Binding, Trace
from flexc.inference.paged import PagedKV
from flexc.inference.places import refuse_bad_position
from flexc.ir.graph import INT32, Graph, Node, TensorInput, input_node, inputs_of, substitute
from flexc.ir.ops import apply, gather
from flexc.sparsity.statements import declare_sorted

if TYPE_CHECKING:
    from flexc.api import AuxOutput, Kernel

Tensor = torch.Tensor


def varlen_attention(
    q: Tensor,
    k: Tensor | PagedKV,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kernel: Kernel | Callable[..., Any] | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    q_offset: int | Tensor | None = None,
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention inside each of many sequences that lie one after another.

    Args:
        q: [total_q, Hq, D], or a jagged nested tensor [B, j, Hq, D] that brings its lengths.
        k: [total_k, Hkv, D]; v: [total_k, Hkv, Dv]; likewise. Or a PagedKV of as many sequences, in place of k, v and cu_seqlens_k.
        cu_seqlens_q: [B + 1], int32 or int64: where each sequence begins, and where the last ends. Sequences may have no token. Tokens
            after the last sequence see nothing and are not seen.
        cu_seqlens_k: of the keys; default that of the queries.
        kernel: what `flexc.attention` or `flexc.kernel` made, or a function as `flexc.kernel` takes it; default plain attention. Its
            functions see the number of the sequence as `batch`, and positions inside of it.
        scale, return_lse: as in `Kernel.__call__`.
        q_offset: position of the first query of each sequence in it, a number or an integer tensor [B]. Default: 0; of a PagedKV such that
            the queries are the last tokens of their sequences.

    Returns:
        out like q with the last dimension of v, or (out, AuxOutput) with lse [total_q, Hq]. Gradients flow as in `Kernel.__call__`.

    Raises:
        InputError, ShapeError: sizes, dtypes or devices do not fit.
    """
    from flexc import api
    from flexc.arguments import refuse_bad_switch

    refuse_bad_switch("return_lse", return_lse)
    if is_dynamo_compiling():
        from flexc.dynamo import call_varlen

        return call_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, kernel, scale, return_lse, q_offset)
    made = api.attention() if kernel is None else api.kernel(kernel)
    if isinstance(q, Tensor) and q.is_nested:
        return _of_nested(q, k, v, cu_seqlens_q, cu_seqlens_k, made, scale, return_lse, q_offset)
    if cu_seqlens_q is None:
        raise InputError("cu_seqlens_q is missing; expected where each sequence begins, and where the last ends, or a jagged nested q")
    if isinstance(k, PagedKV):
        from flexc.inference.mixed import attend_mixed

        out, lse = attend_mixed(made, q, k, v, cu_seqlens_q, cu_seqlens_k, scale, q_offset)
    else:
        sequences = _sequences(q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, q_offset)
        trace, binding = frontend.trace(made.score_mod, made.mask_mod)
        refuse_wrong_sizes(extents_of(trace.graph), trace.graph, binding.tensors, sequences.count, q.shape[1], "cu_seqlens_q and q have")
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # pyright: ignore[reportOptionalMemberAccess]  (refused before)
        out, lse = made._attend_placed(q, k, v, scale, sequences)
    out, lse = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    return (out, api.AuxOutput(lse)) if return_lse else out


def _of_nested(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, kernel: Kernel, scale: float | None, return_lse: bool, q_offset: int | Tensor | None
) -> Any:
    if cu_q is not None or cu_k is not None:
        raise InputError("cu_seqlens were given beside nested tensors, which have their own; expected varlen_attention(q, k, v)")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not (isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged and x.dim() == 4):
            raise InputError(f"expected q, k and v to be jagged nested tensors [B, j, heads, head_dim], got {name} of another kind")
        if x.lengths() is not None:  # pyright: ignore[reportAttributeAccessIssue]  (of nested tensors)
            raise InputError(f"{name} is a nested tensor with holes; expected {name}.contiguous()")
    packed = (q.values(), k.values(), v.values())
    result = varlen_attention(*packed, q.offsets(), k.offsets(), kernel, scale=scale, return_lse=return_lse, q_offset=q_offset)
    out, *aux = result if isinstance(result, tuple) else (result,)
    nested = torch.nested.nested_tensor_from_jagged(out, q.offsets())
    return (nested, *aux) if aux else nested


# --- the sequences of a call --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """Of each packed token the number of its sequence and its position there, int32 [total]; after the last sequence a number of none."""

    sequence: Tensor
    position: Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where the tokens of a call belong.

    Attributes:
        count: of sequences.
        boundaries: cu_seqlens of queries and of keys.
        queries, keys: their tokens.
    """

    count: int
    boundaries: tuple[Tensor, Tensor]
    queries: Tokens
    keys: Tokens

    def placed(self, trace: Trace, binding: Binding) -> tuple[Trace, Binding]:
        """The trace and the captured values of the same functions inside these sequences."""
        placed, names = _placed(trace)
        tables = {
            "q_sequence": self.queries.sequence,
            "k_sequence": self.keys.sequence,
            "q_position": self.queries.position,
            "k_position": self.keys.position,
        }
        return placed, Binding(binding.tensors + tuple(tables[name] for name in names), binding.scalars)

    hides_rest = False

    def without_rest(self, k: Tensor, v: Tensor, *, may_look: bool = True) -> tuple[Tensor, Tensor]:
        """k and v as they are: every token is there."""
        return k, v

    def in_python(self, score_mod: Any, mask_mod: Any) -> tuple[Any, Any, dict[str, Any]]:
        """The functions inside these sequences, for plain PyTorch, and no options."""
        q, k = self.queries, self.keys

        def score(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score_mod(score, q.sequence[q_idx], head, q.position[q_idx], k.position[kv_idx])

        def mask(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
            same = q.sequence[q_idx] == k.sequence[kv_idx]
            return same if mask_mod is None else same & mask_mod(q.sequence[q_idx], head, q.position[q_idx], k.position[kv_idx])

        return None if score_mod is None else score, mask, {}

    def refuse_values(self, q_len: int, kv_len: int) -> None:
        """Refuse boundaries that cannot be. Waits for the device.

        Raises:
            InputError: names the first that is wrong.
        """
        for name, cu, total in zip(("cu_seqlens_q", "cu_seqlens_k"), self.boundaries, (q_len, kv_len)):
            refuse_boundary_values(name, cu, total)


def refuse_boundary_values(name: str, cu: Tensor, total: int) -> None:
    """Refuse boundaries of so many tokens that cannot be. Waits for the device.

    Raises:
        InputError: names the first that is wrong.
    """
    numbers = cu.tolist()
    if numbers[0] != 0:
        raise InputError(f"{name}[0] is {numbers[0]}; expected 0")
    for entry, (before, after) in enumerate(pairwise(numbers), 1):
        if after < before:
            raise InputError(f"{name}[{entry}] is {after} after {before}; expected boundaries that do not fall")
    if numbers[-1] > total:
        raise InputError(f"{name}[-1] is {numbers[-1]} and there are {total} tokens; expected at most as many")


def refuse_bad_boundaries(name: str, cu: Any, device: torch.device) -> None:
    """Refuse what are no boundaries, whatever their values."""
    if not isinstance(cu, Tensor):
        raise InputError(f"{name} is a {type(cu).__name__}; expected an int32 or int64 tensor [B + 1]")
    if cu.dim() != 1 or not len(cu):
        raise ShapeError(f"{name} has shape {list(cu.shape)}; expected [B + 1]")
    if cu.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} has dtype {cu.dtype}; expected int32 or int64: convert it with {name}.to(torch.int32)")
    if cu.device != device:
        raise InputError(f"{name} is on {cu.device} and q on {device}: move it with {name}.to({str(device)!r})")


def _sequences(q: Any, k: Any, v: Any, cu_q: Tensor, cu_k: Tensor, q_offset: int | Tensor | None) -> Sequences:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 3:
            found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} is {found}; expected [total, heads, head_dim]")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        refuse_bad_boundaries(name, cu, q.device)
    if len(cu_q) != len(cu_k):
        raise ShapeError(f"cu_seqlens_q has {len(cu_q) - 1} sequences and cu_seqlens_k {len(cu_k) - 1}; expected equally many")
    # A number of their own for tokens of no sequence: as queries and as keys they are of different ones.
    count = len(cu_q) - 1
    refuse_bad_position("q_offset", q_offset, count, q.device)
    queries = moved_by(q_offset, tokens_of(cu_q, q.shape[0], count), count)
    return Sequences(count, (cu_q, cu_k), queries, tokens_of(cu_k, k.shape[0], count + 1))


def moved_by(q_offset: int | Tensor | None, tokens: Tokens, count: int) -> Tokens:
    """Tokens of so many sequences, those of each as far behind its beginning."""
    if q_offset is None or not count:
        return tokens
    offset = q_offset[tokens.sequence.clamp(max=count - 1)] if isinstance(q_offset, Tensor) else q_offset
    return replace(tokens, position=(tokens.position + offset).int())


def tokens_of(cu: Tensor, total: int, of_none: int) -> Tokens:
    """Of so many packed tokens, those after the last sequence with the number `of_none`."""
    return kept_for(cu, ("tokens", total, of_none), lambda: _tokens(cu, total, of_none))


def _tokens(cu: Tensor, total: int, of_none: int) -> Tokens:
    places = torch.arange(total, dtype=cu.dtype, device=cu.device)
    sequence = torch.searchsorted(cu, places, right=True, out_int32=True) - 1
    is_in = sequence < len(cu) - 1
    position = places - cu[sequence.clamp(0, len(cu) - 1)]
    # Without boundaries that fall, the numbers ascend.
    return Tokens(declare_sorted(torch.where(is_in, sequence, of_none).int()), position.clamp(min=0).int())


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


def kept_for(cu: Tensor, key: tuple, make: Callable[[], Any]) -> Any:
    """What is made of boundaries, kept for as long as they stay. Block maps are kept for as long as the tensors they were made from."""
    version = None if cu.is_inference() else (cu._version, cu.data_ptr())
    kept: dict[tuple, tuple[Any, Any]] = _kept.setdefault(cu, {})  # pyright: ignore[reportAssignmentType]
    found = kept.get(key)
    if found is not None and version is not None and found[0] == version and not _is_capturing(cu):
        return found[1]
    with torch.no_grad():
        made = make()
    if not _is_capturing(cu):
        current = {other: value for other, value in kept.items() if value[0] == version}
        _kept[cu] = current | {key: (version, made)}
    return made


def _is_capturing(x: Tensor) -> bool:
    """What a CUDA graph replays must follow what the boundaries are then."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# --- the graph ----------------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _placed(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """The trace inside sequences, and which tables it reads besides what the functions captured, in order."""
    graph, names = trace.graph, []
    read = frozenset[str]().union(*(inputs_of(node) for _, node in graph.outputs))
    tables: dict[str, Node] = {}
    wanted = [("q_sequence", "q_idx"), ("k_sequence", "kv_idx")]
    wanted += [("q_position", "q_idx")] if "q_idx" in read else []
    wanted += [("k_position", "kv_idx")] if "kv_idx" in read else []
    for name, index in wanted:
        graph, tables[name] = _with_table(graph, name, input_node(index))
        names.append(name)
    moved = {input_node("batch"): tables["q_sequence"]}
    moved |= {input_node(index): tables[name] for name, index in wanted[2:]}
    outputs = {name: substitute(node, moved) for name, node in graph.outputs}
    same = apply("eq", tables["q_sequence"], tables["k_sequence"])
    outputs["mask"] = apply("and", same, outputs["mask"]) if "mask" in outputs else same
    return replace(trace, graph=graph.with_outputs(**outputs)), tuple(names)


def _with_table(graph: Graph, name: str, index: Node) -> tuple[Graph, Node]:
    """The graph with one more captured tensor, and its element at a position."""
    taken = {x.name for x in (*graph.tensors, *graph.scalars)}
    while name in taken:
        name += "_"
    node = apply("maximum", gather(len(graph.tensors), INT32, [index]), 0)
    return replace(graph, tensors=(*graph.tensors, TensorInput(name, "int32", 1))), node
