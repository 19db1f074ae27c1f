"""One kernel in which every row is printed, for each choice of operands that are numbers, to run or compile it for real."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexc.codegen.triton.body import literal
from flexc.codegen.triton.emit import HELPERS
from flexc.codegen.triton.rows import TRITON_DTYPES, spell
from flexc.ir.eager import Environment, evaluate
from flexc.ir.graph import BOOL, FLOAT32, INT32, INT64, Node, const, scalar
from flexc.ir.ops import TABLE, TORCH_DTYPES, Op, apply
from flexc.runtime.module import load_module

COUNT = 64
DTYPE_OF = {"float": FLOAT32, "int": INT32, "bool": BOOL}


@dataclass
class Facts:
    """Facts by hand."""

    tanh: str = "libdevice"
    interpreted: bool = False
    exact: bool = False
    non_negative: bool = False
    uses: set[str] = field(default_factory=set)

    def need(self, helper: str) -> str:
        """See `rows.Facts`."""
        self.uses.add(helper)
        return helper

    def must_be_exact(self, node: Node) -> bool:
        """See `rows.Facts`."""
        return self.exact

    def is_non_negative(self, node: Node) -> bool:
        """See `rows.Facts`."""
        return self.non_negative


def operand_dtypes(row: Op) -> list[tuple[str, ...]]:
    """The dtypes to try: the domain's own, and other kinds of number where the row takes them."""
    own = tuple(DTYPE_OF[d.kind] for d in row.domain)
    found = []
    for wanted in (None, FLOAT32, INT32, INT64, BOOL):
        dtypes = (
            own
            if wanted is None
            else tuple(d if d == BOOL and row.promotes == "branches" and i == 0 else wanted for i, d in enumerate(own))
        )
        try:
            result = row.dtype(*dtypes)
        except TypeError:
            continue
        if dtypes not in found and result and not (row.promotes == "float" and wanted not in (None, FLOAT32)):
            found.append(dtypes)
    return found


def drawn(row: Op, dtypes: Sequence[str], seed: int, count: int = COUNT) -> list[torch.Tensor]:
    """Operands from the domain, whichever kind of number is asked for; divisors of both signs."""
    random = torch.Generator().manual_seed(seed)
    values = []
    for domain, dtype in zip(row.domain, dtypes, strict=True):
        if dtype == BOOL:
            values.append(torch.randint(0, 2, (count,), generator=random).bool())
        elif dtype == FLOAT32:
            values.append(torch.rand(count, generator=random) * (domain.hi - domain.lo) + domain.lo)
        else:
            low, high = (domain.lo, domain.hi) if domain.kind != "bool" else (-50, 50)
            values.append(torch.randint(int(low), int(high) + 1, (count,), generator=random).to(TORCH_DTYPES[dtype]))
    if row.name in ("floor", "ceil", "round", "trunc"):
        values[0][::2] = (values[0][::2] * 2).round() / 2  # integers and halves
    if row.name in ("floordiv", "floormod", "truediv"):
        values[1][::3] *= -1  # which the domain leaves out
    return values


@dataclass(frozen=True)
class Variant:
    """One printed row: its node, the texts and values of its operands, and what eager makes of them."""

    name: str
    node: Node
    dtypes: tuple[str, ...]
    texts: tuple[str, ...]
    values: tuple[torch.Tensor, ...]

    def expected(self) -> torch.Tensor:
        """By the op's eager column, in float32."""
        leaves = [scalar(i, d) for i, d in enumerate(self.dtypes)]
        (result,) = evaluate([apply(self.name, *leaves)], Environment({}, (), self.values))
        return result.expand(COUNT)


def variants(names: Sequence[str] = ()) -> list[Variant]:
    """Every op on every kind of number, with every choice of operands (not all) as literals."""
    found = []
    for name in names or sorted(TABLE):
        row = TABLE[name]
        for dtypes in operand_dtypes(row):
            values = drawn(row, dtypes, seed=len(found))
            for fixed in itertools.product([False, True], repeat=row.arity):
                if all(fixed):
                    continue
                index = 3
                nodes = [
                    const(v[index].item(), d) if f else scalar(i, d) for i, (v, d, f) in enumerate(zip(values, dtypes, fixed, strict=True))
                ]
                texts = tuple(literal(n) if n.op == "const" else f"x{i}" for i, n in enumerate(nodes))
                given = tuple(v[index] if f else v for v, f in zip(values, fixed, strict=True))
                found.append(Variant(name, apply(name, *nodes), dtypes, texts, given))
    return found


def kernel_text(chosen: Sequence[Variant], facts: Facts) -> str:
    """A module with `rows_kernel(inputs, out)`: the variants' operands as float64 rows of COUNT, results likewise."""
    lines, slot = [], 0
    for number, variant in enumerate(chosen):
        for i, (text, dtype) in enumerate(zip(variant.texts, variant.dtypes, strict=True)):
            if text == f"x{i}":
                lines.append(
                    f"x{i} = tl.load(inputs + {slot * COUNT} + i)" + (" != 0" if dtype == BOOL else f".to({TRITON_DTYPES[dtype]})")
                )
                slot += 1
        lines.append(f"y = {spell(variant.node, variant.texts, facts)}")
        lines.append(f"tl.store(out + {number * COUNT} + i, y.to(tl.float64))")
    head = ["import triton", "import triton.language as tl"]
    if "libdevice" in facts.uses:
        head.append("from triton.language.extra import libdevice")
    helpers = "\n\n".join(HELPERS[name] for name in sorted(facts.uses) if name in HELPERS)
    body = "\n    ".join([f"i = tl.arange(0, {COUNT})", *lines])
    return (
        "\n".join(head) + f"\n\n{helpers}\n\n@triton.jit\ndef rows_kernel(inputs, out):\n    {body}\n\nLAUNCH = {{'rows_kernel': (1, 1)}}\n"
    )


def run(folder: str, device: str, interpreted: bool, tanh: str = "libdevice") -> list[str]:
    """Runs the kernel; what differs from eager, in words."""
    chosen = variants()
    module: Any = load_module(kernel_text(chosen, Facts(tanh, interpreted)), Path(folder) / "rows.py")
    rows = [v.double() for c in chosen for v in c.values if v.dim()]
    out = torch.zeros(len(chosen), COUNT, dtype=torch.float64, device=device)
    module.rows_kernel[(1,)](torch.stack(rows).to(device), out)
    problems = []
    for variant, found in zip(chosen, out.cpu(), strict=True):
        rough = tanh == "hardware" and variant.name == "tanh"
        wrong = differing(variant, found, 2.0**-10 if rough else 1e-6)
        if wrong:
            problems.append(wrong)
    return problems


def differing(variant: Variant, found: torch.Tensor, tolerance: float = 1e-6) -> str:
    """Empty if the values agree, else the first one that does not."""
    expected = variant.expected().double()
    wide = torch.ones(1, dtype=torch.float64)
    if variant.node.dtype == FLOAT32:
        # The interpreter has no fused multiply-add: the rest of a division is off by the rounding of the dividend.
        size = variant.values[0].double().abs() if variant.name == "floormod" else expected.abs()
        wide = size.clamp(min=1.0)
    bad = ~((found - expected).abs() <= tolerance * wide) & ~(found.isnan() & expected.isnan())
    if not bool(bad.any()):
        return ""
    at = int(bad.nonzero()[0])
    operands = ", ".join(str(v.expand(COUNT)[at].item()) for v in variant.values)
    return f"{variant.name}{variant.dtypes} of {operands} as {variant.texts}: {found[at].item()}, expected {expected[at].item()}"
