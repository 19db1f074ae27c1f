"""The systems that are measured, each as a function: Case → Prepared, or Missing with the reason.

A system gets the same numbers in the layout that it likes; what it needs besides (block masks, compiled wrappers) is made once, outside
of the measured time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from patterns import CAP, WINDOWS, Pattern, document_ids


class Missing(Exception):
    """This system is not installed here, or does not know the pattern."""


@dataclass(frozen=True)
class Shape:
    B: int
    Hq: int
    Hkv: int
    Sq: int
    Skv: int
    D: int
    Dv: int

    @staticmethod
    def parse(text: str) -> Shape:
        """From "B,Hq,Hkv,Sq,Skv,D" or "B,Hq,Hkv,Sq,Skv,D,Dv"."""
        sizes = [int(size) for size in text.split(",")]
        if len(sizes) not in (6, 7) or min(sizes) < 1:
            raise ValueError(f"expected B,Hq,Hkv,Sq,Skv,D[,Dv] as positive numbers, got {text!r}")
        return Shape(*sizes, *sizes[5:6] if len(sizes) == 6 else ())

    def __str__(self) -> str:
        heads = f"{self.Hq}" if self.Hq == self.Hkv else f"{self.Hq}:{self.Hkv}"
        length = f"{self.Sq}" if self.Sq == self.Skv else f"{self.Sq}x{self.Skv}"
        return f"B{self.B} H{heads} S{length} D{self.D}" + (f" Dv{self.Dv}" if self.Dv != self.D else "")


@dataclass(frozen=True)
class Case:
    """One pattern on one shape, with its inputs [B, H, S, D]; q, k, v require gradients."""

    shape: Shape
    pattern: Pattern
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


@dataclass(frozen=True)
class Prepared:
    """`forward()` gives the output in the system's own layout; `inputs` and `dout` are what its backward takes."""

    forward: Callable[[], torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    dout: torch.Tensor
    is_bshd: bool = False  # [B, S, H, D] in place of [B, H, S, D]


def _flexc(backend: str, autotune: bool = False) -> Callable[[Case], Prepared]:
    def prepare(case: Case) -> Prepared:
        import flexc

        q, k, v = case.q, case.k, case.v
        kernel = flexc.attention(score_mod=case.pattern.score_mod, mask_mod=case.pattern.mask_mod, backend=backend, autotune=autotune)
        return Prepared(lambda: kernel(q, k, v), (q, k, v, *case.pattern.learned), case.dout)

    return prepare


def _block_mask(case: Case, batch: int | None, heads: int | None) -> object:
    """FlexAttention's; compiled where the eager way would need memory for Sq × Skv."""
    from torch.nn.attention.flex_attention import create_block_mask

    make = torch.compile(create_block_mask) if max(case.shape.Sq, case.shape.Skv) > 8192 else create_block_mask
    return make(case.pattern.mask_mod, batch, heads, case.shape.Sq, case.shape.Skv, device=case.q.device)


def _flex(backend: str | None) -> Callable[[Case], Prepared]:
    def prepare(case: Case) -> Prepared:
        if not case.q.is_cuda:
            raise Missing("needs a GPU")
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = case.q, case.k, case.v
        blocks = _block_mask(case, None, None) if case.pattern.mask_mod else None
        compiled = torch.compile(flex_attention, dynamic=False)
        options = {"BACKEND": backend} if backend else None
        named = dict(score_mod=case.pattern.score_mod, block_mask=blocks, kernel_options=options)
        named["enable_gqa"] = case.shape.Hq != case.shape.Hkv
        return Prepared(lambda: compiled(q, k, v, **named), (q, k, v, *case.pattern.learned), case.dout)

    return prepare


def _cudnn(case: Case) -> Prepared:
    if not case.q.is_cuda:
        raise Missing("needs a GPU")
    if case.pattern.name not in ("full", "causal"):
        raise Missing(f"has no {case.pattern.name}")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = case.q, case.k, case.v
    named = dict(is_causal=case.pattern.name == "causal", enable_gqa=case.shape.Hq != case.shape.Hkv)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, **named)

    return Prepared(forward, (q, k, v), case.dout)


def _fa4(case: Case) -> Prepared:
    """flash-attn-4 by its own entry point: native flags for full, causal, sliding and soft-capping, CuTe functions for the rest."""
    if not case.q.is_cuda:
        raise Missing("needs a GPU")
    try:
        import flash_attention_4
        from flash_attn.cute.interface import flash_attn_func
    except ImportError as error:
        raise Missing(f"not installed ({error})") from error

    name = case.pattern.name
    if case.pattern.learned:
        raise Missing("gives no gradient of a captured tensor")
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (case.q, case.k, case.v))
    if (name == "causal" or name in WINDOWS) and case.shape.Sq != case.shape.Skv:
        raise Missing("its causal flag aligns the last query with the last key")
    if name == "full":
        named = {}
    elif name == "causal":
        named = dict(causal=True)
    elif name in WINDOWS:
        named = dict(causal=False, window_size=(WINDOWS[name], 0))
    else:
        blocks = _block_mask(case, case.shape.B, case.shape.Hq)
        ids = document_ids(max(case.shape.Sq, case.shape.Skv)).to(q.device)
        named = flash_attention_4.arguments(name, blocks, ids, CAP)
    return Prepared(lambda: flash_attn_func(q, k, v, **named)[0], (q, k, v), case.dout.transpose(1, 2).contiguous(), is_bshd=True)


def _eager(case: Case) -> Prepared:
    """Dense attention in eager PyTorch with the mask ready made; for CPUs and for checking."""
    if case.pattern.score_mod is not None:
        raise Missing("is measured without score functions")
    q, k, v = case.q, case.k, case.v
    hidden = None
    if case.pattern.mask_mod is not None:
        rows, columns = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
        hidden = ~case.pattern.mask_mod(0, 0, rows, columns)
    ratio = case.shape.Hq // case.shape.Hkv

    def forward() -> torch.Tensor:
        keys, values = (x.repeat_interleave(ratio, dim=1) if ratio > 1 else x for x in (k, v))
        scores = q @ keys.transpose(-2, -1) * q.shape[-1] ** -0.5
        return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -torch.inf), dim=-1) @ values

    return Prepared(forward, (q, k, v), case.dout)


SYSTEMS: dict[str, Callable[[Case], Prepared]] = {
    "flexc-triton": _flexc("triton"),
    "flexc-triton-tuned": _flexc("triton", autotune=True),
    "flexc-cute": _flexc("cute"),
    "flexc-cpu": _flexc("cpu"),
    "flex-triton": _flex(None),
    "flex-flash": _flex("FLASH"),
    "fa4": _fa4,
    "cudnn": _cudnn,
    "eager": _eager,
}
DEFAULT = ("flexc-cute", "flexc-triton", "flex-triton", "flex-flash", "fa4", "cudnn")
