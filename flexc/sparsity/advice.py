"""How to rewrite a mask whose blocks bounds cannot decide: by what stopped the proof."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexc.ir.affine import affine_form
from flexc.ir.graph import BOOL, FLOAT32, Node, const_value, inputs_of, topological
from flexc.ir.ops import has_trait
from flexc.ir.text import format_node
from flexc.sparsity.tokens import TokenMask

_MOVING = frozenset({"q_idx", "kv_idx"})


def advice_for(node: Node, tokens: TokenMask) -> str:
    """What bounds cannot see of the node, and what to write instead."""
    for is_so, words in _KINDS:
        if is_so(node, tokens):
            return words(node, tokens)
    return (
        f"bounds of `{node.op}` are wider than its values here; they are sharp for comparisons of sums of positions, of q_idx // n and of "
        "sorted tables"
    )


def _reads_at_several(node: Node, tokens: TokenMask) -> bool:
    return node.op == "gather" and sum(bool(inputs_of(a) & _MOVING) for a in node.args) > 1


def _several(node: Node, tokens: TokenMask) -> str:
    name = _name(tokens, node)
    return (
        f"{name} is read at several indices that move, so that a block reads a box of it, whose elements must all be looked at; where a "
        "rule made the table, write the rule instead, or read a smaller table at indices that are constant in a block, such as q_idx // n "
        "with n a multiple of the block"
    )


def _reads(node: Node, tokens: TokenMask) -> bool:
    return node.op == "gather"


def _read(node: Node, tokens: TokenMask) -> str:
    return (
        f"the index of {_name(tokens, node)} jumps inside a block, and bounds take everything between the least and the largest index; "
        "read it at q_idx, kv_idx or q_idx // n, or make a table in the order in which it is read"
    )


def _compares_unsorted(node: Node, tokens: TokenMask) -> bool:
    return has_trait(node, "compare") and bool(_unsorted(node, tokens))


def _sort(node: Node, tokens: TokenMask) -> str:
    names = " and ".join(_unsorted(node, tokens))
    return (
        f"{names} is not sorted, so that the values of two blocks overlap in range though no pair is equal; number them in ascending order "
        "along the sequence, or put tokens of one number next to each other"
    )


def _compares_tables(node: Node, tokens: TokenMask) -> bool:
    return has_trait(node, "compare") and all(_gathers(a) for a in node.args)


def _tables(node: Node, tokens: TokenMask) -> str:
    return (
        "of each side only the least and the largest value in a block are known, and these ranges overlap though no pair does; values that "
        "ascend along the sequence and are equal for neighbours are told apart"
    )


def _is_remainder(node: Node, tokens: TokenMask) -> bool:
    return any(n.op == "floormod" for n in _arithmetic(node))


def _remainder(node: Node, tokens: TokenMask) -> str:
    divisor = next(n for n in _arithmetic(node) if n.op == "floormod").args[1]
    n = str(const_value(divisor)) if divisor.op == "const" else format_node(divisor)
    return (
        f"where a block holds a multiple of {n}, bounds take x % {n} for any remainder and forget which ones occur together; compare "
        f"x // {n} or the positions themselves, or write one condition on (q_idx - kv_idx) % {n}"
    )


def _is_product(node: Node, tokens: TokenMask) -> bool:
    products = (n for n in _arithmetic(node) if n.op in ("mul", "truediv", "pow"))
    return any(sum(bool(inputs_of(a) & _MOVING) for a in n.args) > 1 for n in products)


def _product(node: Node, tokens: TokenMask) -> str:
    return (
        "it holds a product of positions, and bounds forget that its factors move together with the rest; compare the factors one by one, "
        "such as abs(x) < n for x * x < n * n"
    )


def _is_rounded(node: Node, tokens: TokenMask) -> bool:
    return any(n.dtype == FLOAT32 for n in (node, *node.args))


def _rounded(node: Node, tokens: TokenMask) -> str:
    return (
        "it is computed in floating point, where bounds leave room for rounding (a share of 2^-16) and a value next to the border stays "
        "undecided; compute it in integers: // in place of /, and whole numbers in place of fractions"
    )


def _is_logic(node: Node, tokens: TokenMask) -> bool:
    return node.dtype == BOOL and node.op in ("and", "or", "xor", "not", "where", "eq", "ne") and any(a.dtype == BOOL for a in node.args)


def _logic(node: Node, tokens: TokenMask) -> str:
    return (
        "each condition holds for some pairs of the block and fails for others, only together they are the same for all, and bounds look "
        "at them one by one; merge those that meet, such as (x < 8) | (x == 8) to x <= 8, or add one that they imply together, such as a "
        "window around them all"
    )


def _is_sum_of_parts(node: Node, tokens: TokenMask) -> bool:
    return any(len(affine_form(n).rest) > 0 for n in (node, *node.args) if n.dtype not in (BOOL, FLOAT32))


def _sum(node: Node, tokens: TokenMask) -> str:
    return (
        "its parts move together inside a block, and bounds add their ranges as if each moved alone; write it with q_idx and kv_idx (or "
        "their difference) once each, or with q_idx // n and kv_idx // n of one n"
    )


_KINDS: tuple[tuple[Callable[[Node, TokenMask], bool], Callable[[Node, TokenMask], str]], ...] = (
    (_reads_at_several, _several),
    (_reads, _read),
    (_is_logic, _logic),
    (_compares_unsorted, _sort),
    (_compares_tables, _tables),
    (_is_remainder, _remainder),
    (_is_product, _product),
    (_is_rounded, _rounded),
    (_is_sum_of_parts, _sum),
)


def _arithmetic(node: Node) -> list[Node]:
    """What the node computes of positions and elements, outermost first; not how it comes to the indices of elements."""
    found, waiting = [], [node]
    while waiting:
        current = waiting.pop(0)
        if current.op != "gather" and current not in found and inputs_of(current) & _MOVING:
            found.append(current)
            waiting += current.args
    return found


def _gathers(node: Node) -> list[Node]:
    return [n for n in topological([node]) if n.op == "gather" and inputs_of(n) & _MOVING]


def _unsorted(node: Node, tokens: TokenMask) -> list[str]:
    """Names of the tables below the node that descend somewhere along the dimension that moves."""
    names = []
    for read in _gathers(node):
        tensor = tokens.tensors[read.attrs[0]]
        moving = next(d for d, index in enumerate(read.args) if inputs_of(index) & _MOVING)
        steps = tensor.diff(dim=moving) if tensor.dtype != torch.bool else tensor.int().diff(dim=moving)
        if bool((steps < 0).any()):
            names.append(_name(tokens, read))
    return list(dict.fromkeys(names))


def _name(tokens: TokenMask, read: Node) -> str:
    slot = read.attrs[0]
    return tokens.graph.tensors[slot].name if tokens.graph is not None else f"table {slot}"
