"""BlockMask: a mask function with the lists of its blocks, which are made when they are first read."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flexc import frontend
from flexc.block_maps import block_map
from flexc.compat import picks
from flexc.compat.errors import ArgumentError, CallableError, UsageError
from flexc.compat.lists import Four, Lists, dense, of_block_map, refuse_half
from flexc.compat.masks import MaskFunction, arity_of, default_device, noop_mask
from flexc.errors import InputError, ShapeError

Tensor = torch.Tensor

_DEFAULT_BLOCK = 128
_KV = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_Q = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


class BlockMask:
    """Which blocks of queries and keys attend, and the mask function that decides inside them.

    A pair is allowed if its block is listed as full, or listed as partial and the mask function allows it. Masks that `create_block_mask`
    made keep the function alone until a list is read: their lists say nothing that the function does not.

    Attributes:
        seq_lengths: (queries, keys), in tokens.
        kv_num_blocks, kv_indices: partial blocks of each row of queries: int32 [B, H, rows] and [B, H, rows, columns].
        full_kv_num_blocks, full_kv_indices: blocks that the mask function need not be asked for, or None.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same by columns, or None.
        dq_write_order, dq_write_order_full, dq_kv_order, dq_kv_order_spt: kept and handed on; no kernel of flexc reads them.
        BLOCK_SIZE: (queries, keys) of a block, in tokens.
        mask_mod: (batch, head, q_idx, kv_idx) → may this query see this key? Assigning another one keeps the lists.
    """

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: tuple[int, int] = (_DEFAULT_BLOCK, _DEFAULT_BLOCK),
        mask_mod: MaskFunction = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ):
        if kv_num_blocks is None or kv_indices is None:
            raise CallableError("expected kv_num_blocks and kv_indices, got None")
        if kv_indices.dim() < 2:
            raise UsageError(f"expected kv_indices of at least 2 dimensions, [rows, columns], got shape {list(kv_indices.shape)}")
        refuse_half("full_q_num_blocks", full_q_num_blocks, "full_q_indices", full_q_indices)
        if dq_write_order_full is not None and dq_write_order is None:
            raise ArgumentError("dq_write_order_full needs dq_write_order")
        lists = Lists.given(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        self._set_up(lists, tuple(kv_indices.shape[:-1]), seq_lengths, _sides(BLOCK_SIZE), mask_mod, kv_indices.device, False)
        self._by_column = (q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
        self.dq_write_order = dq_write_order
        self.dq_write_order_full = dq_write_order_full
        self.dq_kv_order = dq_kv_order
        self.dq_kv_order_spt = dq_kv_order_spt

    def _set_up(
        self,
        lists: Lists,
        sizes: tuple[int, ...],
        seq_lengths: tuple[int, int],
        block: tuple[int, int],
        mask_mod: MaskFunction,
        device: torch.device,
        follows_rule: bool,
    ) -> None:
        self._lists = lists
        self._entries, self._rows = sizes[:-1], sizes[-1]
        self._device = device
        self._follows_rule = follows_rule
        self._by_column: tuple[Tensor | None, ...] | None = None
        self._has_columns = True
        self._separates = True
        self._mask_mod = mask_mod
        self._kept_rule: Any = None  # what attention made of the mask: see rules.py
        self.seq_lengths = seq_lengths
        self.BLOCK_SIZE = block
        self.dq_write_order: Tensor | None = None
        self.dq_write_order_full: Tensor | None = None
        self.dq_kv_order: Tensor | None = None
        self.dq_kv_order_spt: bool | None = None

    @classmethod
    def _made_of(cls, lists: Lists, sizes: tuple[int, ...], like: BlockMask, seq_lengths: tuple[int, int], mask_mod: MaskFunction) -> Any:
        """A mask of other lists, in all else like another one."""
        made = cls.__new__(cls)
        made._set_up(lists, sizes, seq_lengths, like.BLOCK_SIZE, mask_mod, like._device, like._follows_rule)
        made._has_columns, made._separates = like._has_columns, like._separates
        made.dq_kv_order_spt = like.dq_kv_order_spt
        return made

    @classmethod
    def _of_rule(
        cls,
        mask_mod: MaskFunction,
        entries: tuple[int, int],
        seq_lengths: tuple[int, int],
        block: tuple[int, int],
        device: torch.device,
        separate_full_blocks: bool,
    ) -> Any:
        """A mask whose lists are what its function says."""

        def make() -> Four:
            blocks = block_map(mask_mod, *seq_lengths, batch=entries[0], heads=entries[1], block=block)
            lists = of_block_map(blocks, *entries, separate_full_blocks)
            return tuple(None if x is None else x.to(device) for x in lists)  # pyright: ignore[reportReturnType]

        made = cls.__new__(cls)
        sizes = (*entries, -(-seq_lengths[0] // block[0]))
        made._set_up(Lists(make), sizes, seq_lengths, block, mask_mod, device, True)
        made._separates = separate_full_blocks
        return made

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
        mask_mod: MaskFunction | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> Any:
        """A mask of lists.

        Args:
            kv_num_blocks, kv_indices: partial blocks, [B, H, rows] and [B, H, rows, columns]. Without `mask_mod` all pairs in them are
                allowed.
            full_kv_num_blocks, full_kv_indices: blocks in which every pair is allowed, whatever `mask_mod` says.
            BLOCK_SIZE: tokens per block, (queries, keys) or one number for both.
            seq_lengths: default rows × queries and columns × keys of a block.
            compute_q_blocks: whether the lists by columns can be read; they are made when they are.

        Raises:
            UsageError: kv_indices of fewer than 2 dimensions.
            CallableError: one of the full lists without the other.
            ArgumentError: dq_kv_order is neither a truth value nor a tensor.
        """
        if kv_indices.dim() < 2:
            raise UsageError(f"expected kv_indices of at least 2 dimensions, [rows, columns], got shape {list(kv_indices.shape)}")
        if dq_kv_order is not None and not isinstance(dq_kv_order, bool | Tensor):
            raise ArgumentError(f"expected dq_kv_order to be a bool, a tensor or None, got a {type(dq_kv_order).__name__}")
        sides = _sides(BLOCK_SIZE)
        if seq_lengths is None:
            seq_lengths = (kv_indices.shape[-2] * sides[0], kv_indices.shape[-1] * sides[1])
        made = cls(
            seq_lengths,
            *(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices),
            *(None, None, None, None),
            BLOCK_SIZE=sides,
            mask_mod=noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )
        made._by_column, made._has_columns = None, compute_q_blocks
        return made

    # --- lists ---

    def _read(self, name: str) -> Tensor | None:
        if name in _KV:
            return self._lists.made[_KV.index(name)]
        if self._by_column is None:
            self._by_column = self._lists.transposed() if self._has_columns else (None, None, None, None)
        return self._by_column[_Q.index(name)]

    def _write(self, name: str, value: Tensor | None) -> None:
        if name in _KV:
            # The lists by columns stay what they are: PyTorch's do too.
            for column_list in _Q:
                self._read(column_list)
            made = list(self._lists.made)
            made[_KV.index(name)] = value
            self._lists = Lists(lambda: tuple(made))  # pyright: ignore[reportArgumentType]
            self._follows_rule = False
            if name == "kv_indices" and value is not None:
                self._entries, self._rows = tuple(value.shape[:-2]), value.shape[-2]
        else:
            self._read(name)
            by_column = list(self._by_column or ())
            by_column[_Q.index(name)] = value
            self._by_column = tuple(by_column)

    kv_num_blocks: Any = property(lambda self: self._read("kv_num_blocks"), lambda self, x: self._write("kv_num_blocks", x))
    kv_indices: Any = property(lambda self: self._read("kv_indices"), lambda self, x: self._write("kv_indices", x))
    full_kv_num_blocks: Any = property(lambda self: self._read("full_kv_num_blocks"), lambda self, x: self._write("full_kv_num_blocks", x))
    full_kv_indices: Any = property(lambda self: self._read("full_kv_indices"), lambda self, x: self._write("full_kv_indices", x))
    q_num_blocks: Any = property(lambda self: self._read("q_num_blocks"), lambda self, x: self._write("q_num_blocks", x))
    q_indices: Any = property(lambda self: self._read("q_indices"), lambda self, x: self._write("q_indices", x))
    full_q_num_blocks: Any = property(lambda self: self._read("full_q_num_blocks"), lambda self, x: self._write("full_q_num_blocks", x))
    full_q_indices: Any = property(lambda self: self._read("full_q_indices"), lambda self, x: self._write("full_q_indices", x))

    @property
    def mask_mod(self) -> MaskFunction:
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, function: MaskFunction) -> None:
        # The lists stay those of the function before.
        self._mask_mod = function
        self._follows_rule = False

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Everything in PyTorch's order; `flatten` gives lengths and block sides one by one, not as pairs."""
        block = self.BLOCK_SIZE if flatten else (self.BLOCK_SIZE,)
        lengths = self.seq_lengths if flatten else (self.seq_lengths,)
        orders = (self.dq_write_order, self.dq_write_order_full, self.dq_kv_order, self.dq_kv_order_spt)
        return *lengths, *(self._read(name) for name in (*_KV, *_Q)), *orders, *block, self.mask_mod

    # --- other masks ---

    def __getitem__(self, index: Any) -> Any:
        """The mask of some batch elements, heads and rows of blocks: integers, slices or lists of integers, dimensions are kept.

        The mask function goes with it: what it is asked of query 0 is what the first picked row's first query was asked before. The length
        is that of the picked rows.

        Raises:
            IndexRangeError: past the end.
            InputError: anything else, or lists of integers in more than one dimension.
            ShapeError: a short last row of blocks that is not picked last.
        """
        index = index if isinstance(index, tuple) else (index,)
        names = ("batch", "head", "row of blocks")[-len(self._entries) - 1 :]
        if len(self._entries) > 2:
            raise InputError(f"expected a block mask [B, H, rows], got {len(self._entries)} dimensions before its rows")
        if len(index) > len(names):
            raise InputError(f"expected at most {len(names)} indices ({', '.join(names)}), got {len(index)}")
        sizes = (*self._entries, self._rows)
        picked = tuple(picks.as_selection(i, n, name) for i, n, name in zip(index, sizes, names))
        picked += tuple(slice(0, n, 1) for n in sizes[len(picked) :])
        if sum(isinstance(p, Tensor) for p in picked) > 1:
            raise InputError("expected a list of integers in one dimension at most: index once for each")
        place = tuple(p.to(self._device) if isinstance(p, Tensor) else p for p in picked)
        queries = self.seq_lengths[0]
        if picks.count(picked[-1]) != self._rows or isinstance(picked[-1], Tensor):
            queries = picks.queries_in(picked[-1], self._rows, queries, self.BLOCK_SIZE[0])
        moved: list[Any] = [picks.place_of_entry(p, n) for p, n in zip(place[:-1], sizes)]
        moved = [None] * (2 - len(moved)) + moved + [picks.place_of_query(place[-1], self.BLOCK_SIZE[0])]
        rule = self.mask_mod
        if rule is not noop_mask and any(m is not None for m in moved):
            rule = picks.picked_rule(rule, *moved)
        lists = self._lists.mapped(lambda x: x[place])
        return self._made_of(lists, tuple(map(picks.count, place)), self, (queries, self.seq_lengths[1]), rule)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> Any:
        """The mask for other lengths: made anew of the mask function, or, where the lists say more than it, their first blocks.

        Raises:
            ShapeError: lists that do not reach so far.
        """
        lengths = (new_q_len, new_kv_len)
        if self._follows_rule and len(self._entries) == 2:
            entries = (self._entries[0], self._entries[1])
            return self._of_rule(self.mask_mod, entries, lengths, self.BLOCK_SIZE, self._device, self._separates)
        rows, columns = (-(-length // side) for length, side in zip(lengths, self.BLOCK_SIZE))
        if rows > self._rows or columns > self.kv_indices.shape[-1]:
            raise ShapeError(
                f"lists of {self._rows} x {self.kv_indices.shape[-1]} blocks of {self.BLOCK_SIZE[0]} x {self.BLOCK_SIZE[1]} tokens do not "
                f"cover {new_q_len} queries and {new_kv_len} keys: make the block mask anew"
            )
        return self._made_of(self._lists.cropped(rows, columns), (*self._entries, rows), self, lengths, self.mask_mod)

    def to(self, device: torch.device | str) -> Any:
        """The mask with its lists on a device. Tensors that the mask function captures stay where they are."""
        device = default_device(device)
        lists = self._lists.mapped(lambda x: x.to(device))
        made = self._made_of(lists, (*self._entries, self._rows), self, self.seq_lengths, self.mask_mod)
        made._device = device
        if self._by_column is not None:
            made._by_column = tuple(None if x is None else x.to(device) for x in self._by_column)
        for name in ("dq_write_order", "dq_write_order_full", "dq_kv_order"):
            order = getattr(self, name)
            setattr(made, name, None if order is None else order.to(device))
        return made

    def __getstate__(self) -> dict[str, Any]:
        made = self._lists.made
        return {name: value for name, value in vars(self).items() if name not in ("_lists", "_kept_rule")} | {"made": made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = state.pop("made")
        vars(self).update(state, _lists=Lists.given(*made), _kept_rule=None)

    # --- sizes and views ---

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, queries, keys)."""
        return (*self._entries, *self.seq_lengths)

    def numel(self) -> int:
        """Pairs, masked or not."""
        return math.prod(self.shape)

    def sparsity(self) -> float:
        """Percentage of the pairs that lie in no listed block. Below 0 where blocks reach past the lengths."""
        blocks = int(self.kv_num_blocks.sum())
        if self.full_kv_num_blocks is not None:
            blocks += int(self.full_kv_num_blocks.sum())
        return 100 * (1 - blocks * math.prod(self.BLOCK_SIZE) / self.numel())

    def to_dense(self) -> Tensor:
        """Which blocks are listed: int32 [B, H, rows, columns], 1 or 0. For the mask by token see `create_mask`."""
        num_blocks, indices, full_num_blocks, full_indices = self._lists.made
        listed = dense(num_blocks, indices)
        if full_num_blocks is not None and full_indices is not None:
            listed = listed | dense(full_num_blocks, full_indices)
        return listed.int()

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The blocks as text, two characters each: █ listed, ░ partly where one stands for several, blank where none is.

        Args:
            grid_size: rows and columns at most; one number for both; -1 for every block.
            limit: of (batch, head) entries shown.
        """
        blocks = self.to_dense().float().cpu()
        rows, columns = blocks.shape[-2:]
        at_most = grid_size if isinstance(grid_size, tuple) else (grid_size, grid_size)
        step = [1 if most < 0 else max(1, -(-size // most)) for size, most in zip((rows, columns), at_most)]
        pictures = []
        for entry in itertools.product(*map(range, blocks.shape[:-2])):
            if len(pictures) == limit:
                pictures += [
                    "...",
                    "To print out more, set BlockMask.to_string(limit=N)",
                    "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
                ]
                break
            squares = [[float(part.mean()) for part in band.split(step[1], 1)] for band in blocks[entry].split(step[0])]
            lines = ["".join(2 * _sign(share) for share in line) for line in squares]
            pictures.append("\n".join([str(entry), *lines, ""]))
        return "\n".join(pictures)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        shapes = [f"{name}={None if (x := self._read(name)) is None else x.shape}" for name in (*_KV, *_Q)]
        rest = [f"BLOCK_SIZE={self.BLOCK_SIZE}", f"shape={self.shape}", f"sparsity={self.sparsity():.2f}%"]
        lines = [*shapes, *rest, f"mask_mod={getattr(self.mask_mod, '__name__', self.mask_mod)}"]
        return "BlockMask(\n    " + ",\n    ".join(lines) + "\n)"


def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = _DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A block mask of a mask function. Its blocks are proved from the function; queries × keys is never made.

    Args:
        mask_mod: (batch, head, q_idx, kv_idx) → may this query see this key? A flexc mask too.
        B, H: batch elements and query heads that the lists tell apart; None for 1. Attention asks the function for every batch element and
            head that it has, also where the lists have one entry for all.
        Q_LEN, KV_LEN: tokens.
        device: of the lists; default the accelerator, the CPU without one.
        BLOCK_SIZE: tokens per block, (queries, keys) or one number for both.
        _compile: nothing is left to compile.
        separate_full_blocks: list blocks in which every pair is allowed apart.
        compute_dq_write_order: has no meaning here, and warns: see `flexc.attention(deterministic=True)`.

    Raises:
        CallableError: not a function of four arguments.
        TraceError: the function cannot become a graph.
        InputError, ShapeError: a size that is none.
    """
    if arity_of(mask_mod) != 4:
        name = getattr(mask_mod, "__name__", type(mask_mod).__name__)
        raise CallableError(f"{name} is a score function: expected a mask function (batch, head, q_idx, kv_idx)")
    if not isinstance(dq_kv_order, bool):
        raise ArgumentError(f"expected dq_kv_order to be a bool, got a {type(dq_kv_order).__name__}")
    if compute_dq_write_order:
        warnings.warn("flexc needs no compute_dq_write_order: dq_write_order stays None", UserWarning, stacklevel=2)
    sizes = [_size(name, value) for name, value in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN))]
    if not is_dynamo_compiling():
        frontend.trace(None, mask_mod)  # what cannot be compiled is said here, not at the first call of attention
    sides, where = _sides(BLOCK_SIZE), default_device(device)
    return BlockMask._of_rule(mask_mod, (sizes[0], sizes[1]), (sizes[2], sizes[3]), sides, where, separate_full_blocks)


def _size(name: str, value: Any) -> int:
    if value is None and name in ("B", "H"):
        return 1
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"expected {name} to be an integer, got a {type(value).__name__}")
    if value < 1:
        raise ShapeError(f"expected {name} >= 1, got {value}")
    return value


def _sides(block: Any) -> tuple[int, int]:
    sides = (block, block) if isinstance(block, int) else tuple(block)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in sides):
        raise InputError(f"expected BLOCK_SIZE to be (queries, keys) in tokens, or one number, got {block!r}")
    if min(sides) < 1:
        raise ShapeError(f"expected BLOCK_SIZE of at least 1 x 1 tokens, got {sides[0]} x {sides[1]}")
    return sides


def _sign(share: float) -> str:
    return {0.0: " ", 1.0: "█"}.get(share, "░")
