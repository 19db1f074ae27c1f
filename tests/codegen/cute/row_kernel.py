"""One kernel in which every row is printed, for each choice of operands that are numbers, to run or compile it for real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexc.codegen.cute.rows import CUTE_DTYPES, spell
from flexc.ir.graph import BOOL, Node
from flexc.runtime.module import load_module
from tests.codegen.triton.row_kernel import COUNT, Variant, differing, variants

__all__ = ["COUNT", "Facts", "Variant", "differing", "kernel_text", "run", "variants"]


@dataclass
class Facts:
    """Facts by hand."""

    approximate: bool = False
    exact: bool = False
    stepped: bool = False
    non_negative: bool = False

    def must_be_exact(self, node: Node) -> bool:
        """See `rows.Facts`."""
        return self.stepped

    def is_non_negative(self, node: Node) -> bool:
        """See `rows.Facts`."""
        return self.non_negative


def kernel_text(chosen: Sequence[Variant], facts: Facts) -> str:
    """A module with `LAUNCHERS`: (inputs, out), the variants' operands as float64 rows of COUNT, results likewise."""
    lines, slot = [], 0
    for number, variant in enumerate(chosen):
        for i, (text, dtype) in enumerate(zip(variant.texts, variant.dtypes, strict=True)):
            if text == f"x{i}":
                loaded = f"inputs[{slot * COUNT} + i]"
                lines.append(f"x{i} = {loaded} != 0" if dtype == BOOL else f"x{i} = {loaded}.to({CUTE_DTYPES[dtype]})")
                slot += 1
        # What a row prints is the number that its node's dtype says, or the result of a later operation would not be.
        lines.append(f"y = {spell(variant.node, variant.texts, facts)}")
        lines.append(f"assert type(y) is {CUTE_DTYPES[variant.node.dtype]}, {variant.name + str(variant.texts)!r}")
        lines.append(f"out[{number * COUNT} + i] = y.to(cutlass.Float64)")
    body = "\n    ".join(lines)
    return f"""
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from flexc.runtime import cute_tiles as tiles
from flexc.runtime.cute_compile import Launcher, tensor


@cute.kernel
def rows_kernel(inputs, out):
    i, _, _ = cute.arch.thread_idx()
    {body}


@cute.jit
def launch(inputs, out, stream):
    rows_kernel(inputs, out).launch(grid=[1, 1, 1], block=[{COUNT}, 1, 1], stream=stream)


ROWS = Launcher(
    launch,
    arch="sm_90a",
    arguments=(tensor("inputs", "float64", ("n",), compact=True), tensor("out", "float64", ("m",), compact=True)),
)
LAUNCHERS = {{"rows_kernel": ROWS}}
"""


def run(folder: Path, facts: Facts) -> list[str]:
    """Runs the kernel; what differs from eager, in words."""
    chosen = variants()
    module: Any = load_module(kernel_text(chosen, facts), folder / "rows.py")
    rows = torch.stack([v.double() for c in chosen for v in c.values if v.dim()]).flatten().cuda()
    out = torch.zeros(len(chosen) * COUNT, dtype=torch.float64, device="cuda")
    module.ROWS(rows, out)
    problems = []
    for variant, found in zip(chosen, out.view(-1, COUNT).cpu(), strict=True):
        rough = 2.0**-10 if facts.approximate and variant.name == "tanh" else 1e-6 if facts.exact else 4e-6
        problems += [differing(variant, found, rough)]
    return [problem for problem in problems if problem]
