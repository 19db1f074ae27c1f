"""Is a kernel right? Compare its output and all its gradients with the float64 reference.

The rule: at most twice the error of eager PyTorch in the same dtype, plus a floor of float32 rounding. The floor knows two things that
eager PyTorch does not show on every input:

- Scores are rounded relative to their own size, so exp(score) is off by eps × |score|; the lse of a row is about its largest score.
- A backward pass that starts from the stored output knows the row sums of dO·O only to the output's rounding. Such an error acts exactly
  like a gradient of lse, so the gradients of lse say how far it reaches. (In a row with one key, eager PyTorch gets exactly 0 instead.)
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexc.errors import InputError, InternalError
from flexc.reference import eager, reference, scores

if TYPE_CHECKING:
    from rich.table import Table

_EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class CheckRow:
    """One compared tensor; errors are largest absolute differences from the reference.

    Attributes:
        name: out, lse, out (no grad), lse (no grad), dq, dk, dv, or d of a captured tensor.
        error, eager_error: of the kernel and of eager PyTorch in the same dtype; NaN where one has a NaN that the reference has not.
        allowed: the most that `error` may be.
        size: the largest finite magnitude in the reference.
        worst: index of the largest error.
        note: what else is wrong, or "".
    """

    name: str
    error: float
    eager_error: float
    allowed: float
    size: float
    worst: tuple[int, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        """Accurate enough, and nothing else wrong. NaN fails."""
        return self.error <= self.allowed and not self.note


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. `str(report)` is the table.

    Attributes:
        title: shapes, dtype and backend.
        rows: one for each compared tensor.
        nan_scores: where the user's own function gave NaN, or "".
    """

    title: str
    rows: tuple[CheckRow, ...]
    nan_scores: str = ""

    @property
    def ok(self) -> bool:
        """Every row is, and the user's function gave no NaN."""
        return all(row.ok for row in self.rows) and not self.nan_scores

    def raise_if_bad(self) -> None:
        """Do nothing if all is well.

        Raises:
            InputError: the user's own function gave NaN scores.
            InternalError: the kernel is less accurate than it promises.
        """
        if self.nan_scores:
            raise InputError(self.nan_scores)
        if not self.ok:
            raise InternalError(f"the kernel differs from the reference\n{self}")

    def table(self) -> Table:
        """The rows for a terminal."""
        from rich.table import Table

        table = Table(title=self.title, title_justify="left")
        for heading in ("tensor", "error", "eager's error", "allowed", "largest value", "worst at", ""):
            table.add_column(heading, justify="left" if heading in ("tensor", "worst at", "") else "right")
        for row in self.rows:
            figures = [f"{x:.2e}" for x in (row.error, row.eager_error, row.allowed, row.size)]
            verdict = "[green]ok[/green]" if row.ok else f"[red]{row.note or 'too far off'}[/red]"
            table.add_row(row.name, *figures, ", ".join(map(str, row.worst)), verdict)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=140, color_system=None).print(self.table())
        return text.getvalue().rstrip() + (f"\n{self.nan_scores}" if self.nan_scores else "")


def check(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    kv_len: int | Tensor | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> CheckReport:
    """Run a kernel and the reference, forward and backward, and print how far they are apart.

    Args:
        kernel: a `flexc.Kernel`.
        q, k, v: as for the kernel; they are not changed and get no `.grad`.
        scale, sink, q_offset, kv_len: as for the kernel.
        seed: of the random gradients of out and lse.
        quiet: print nothing.

    Returns:
        CheckReport; a difference raises nothing, see `.ok` and `.raise_if_bad()`.

    Raises:
        InputError: no kernel; and what a call raises.
    """
    if not hasattr(kernel, "captured"):
        raise InputError(f"kernel is a {type(kernel).__name__}; expected a flexc kernel, made by flexc.kernel or flexc.attention")
    report = compare(kernel, q, k, v, kernel.captured(q, k, v), scale=scale, sink=sink, q_offset=q_offset, kv_len=kv_len, seed=seed)
    if not quiet:
        from rich.console import Console

        console = Console()
        console.print(report.table())
        if report.nan_scores:
            console.print(report.nan_scores, style="red", markup=False)
    return report


def compare(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: Mapping[str, Tensor],
    *,
    scale: float | None = None,
    sink: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    kv_len: int | Tensor | None = None,
    seed: int = 0,
) -> CheckReport:
    """`check` with the tensors named whose gradients count besides those of q, k and v: captured ones, or what they are computed from."""
    options: dict[str, Any] = {name: x for name, x in (("q_offset", q_offset), ("kv_len", kv_len)) if x is not None}
    if sink is not None:
        options["sink"] = sink = sink.detach().requires_grad_()
        captured = {**captured, "sink": sink}

    def run_kernel(score_mod: Any, mask_mod: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **options: Any) -> tuple:
        out, aux = kernel(q, k, v, scale=scale, return_lse=True, **options)
        return out, aux.lse

    functions = (kernel.score_mod, kernel.mask_mod)
    douts = _random_gradients(q, v, seed)
    ours, backward = _forward(partial(run_kernel, **options), functions, (q, k, v), captured, scale)
    ours |= backward(douts)
    with torch.no_grad():
        ours["out (no grad)"], ours["lse (no grad)"] = run_kernel(*functions, q, k, v, scale=scale, **options)
    yardstick, backward = _forward(partial(eager, **options), functions, (q, k, v), captured, scale)
    yardstick |= backward(douts)
    truth, backward = _forward(
        partial(reference, **options), functions, (q.double(), k.double(), v.double()), captured, scale, aliases=(q, k, v)
    )
    truth |= backward(douts)
    # What rounding the output to its dtype does to the row sums reaches this far.
    row_sums = (douts[0].double() * truth["out"]).norm(dim=-1)
    reached = backward((torch.zeros_like(truth["out"]), row_sums))
    noise = {name: torch.finfo(q.dtype).eps * _largest(x.double()) for name, x in reached.items()}
    for values in (yardstick, truth):
        values["out (no grad)"], values["lse (no grad)"] = values["out"], values["lse"]

    lse = truth["lse"]
    largest_lse = max(1.0, _largest(lse[lse.isfinite()]))
    without_key = lse == -torch.inf
    rows = []
    for name in ("out", "lse", "out (no grad)", "lse (no grad)", *(n for n in truth if n.startswith("d"))):
        size = _largest(truth[name][truth[name].isfinite()])
        floor = 2 * _EPS32 * largest_lse * (max(1.0, size) if name.startswith("lse") else size) + noise.get(name, 0.0)
        if name.removeprefix("d ") in captured:
            # The reference's own result is rounded to the dtype of the tensor as well.
            floor += torch.finfo(captured[name.removeprefix("d ")].dtype).eps * size
        rows.append(_row(name, ours[name], yardstick[name], truth[name], size, floor, without_key))
    title = (
        f"q {list(q.shape)} k {list(k.shape)} v {list(v.shape)} {str(q.dtype).removeprefix('torch.')} on {getattr(kernel, 'backend', '?')}"
    )
    nan_scores = _nan_scores(functions, q, k, scale) if bool(lse.isnan().any()) else ""
    return CheckReport(title, tuple(rows), nan_scores)


def _random_gradients(q: Tensor, v: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64)
    dlse = torch.randn(q.shape[:-1], generator=generator, dtype=torch.float64)
    return dout.to(q.device, q.dtype), dlse.to(q.device, torch.float32)


def _leaves(qkv: tuple[Tensor, Tensor, Tensor], aliases: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Leaves with the same strides; tensors that are one object stay one."""
    made: dict[int, Tensor] = {}
    for x, alias in zip(qkv, aliases):
        made.setdefault(id(alias), x.detach().requires_grad_())
    return [made[id(alias)] for alias in aliases]


Backward = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def _forward(
    attention: Callable[..., tuple[Tensor, Tensor]],
    functions: tuple[Any, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    captured: Mapping[str, Tensor],
    scale: float | None,
    aliases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Backward]:
    """Output and lse by name, and a function from their gradients to the gradients of all inputs by name."""
    leaves = _leaves(qkv, aliases or qkv)
    with torch.enable_grad():
        out, lse = attention(*functions, *leaves, scale=scale)
    names = ["dq", "dk", "dv", *(f"d {name}" for name in captured)]
    inputs = [*leaves, *captured.values()]

    def backward(gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        # An output that carries no gradient, or has another shape, gives none; the comparison then names what is missing.
        seeded = [(x, g.to(x.dtype)) for x, g in zip((out, lse), gradients) if x.requires_grad and x.shape == g.shape]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if seeded:
            found = torch.autograd.grad([x for x, _ in seeded], inputs, [g for _, g in seeded], retain_graph=True, allow_unused=True)
        return {n: torch.zeros_like(x) if g is None else g.detach() for n, x, g in zip(names, inputs, found)}

    return {"out": out.detach(), "lse": lse.detach()}, backward


def _row(name: str, ours: Tensor, yardstick: Tensor, truth: Tensor, size: float, floor: float, without_key: Tensor) -> CheckRow:
    difference = _difference(ours, truth)
    eager_error = _largest(_difference(yardstick, truth))
    worst: tuple[int, ...] = ()
    if difference.numel() and difference.dim():
        flat = int(difference.nan_to_num(nan=torch.inf).argmax())
        worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
    note = ""
    if ours.shape != truth.shape:
        note = f"shape {list(ours.shape)}, expected {list(truth.shape)}"
    elif bool((ours.isnan() & ~truth.isnan()).any()):
        note = "NaN"
    elif name in ("out", "dq", "out (no grad)") and ours.dim() == 4 and bool(ours[without_key].any()):
        note = "not 0 in a row without keys"
    return CheckRow(name, _largest(difference), eager_error, 2 * eager_error + floor, size, worst, note)


def _difference(x: Tensor, truth: Tensor) -> Tensor:
    """Distance element by element; equal infinities are 0 apart."""
    if x.shape != truth.shape:
        return torch.full(truth.shape, torch.nan, dtype=torch.float64)
    wide, true = x.double(), truth.double()
    return torch.where(wide == true, 0.0, (wide - true).abs())


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@torch.no_grad()
def _nan_scores(functions: tuple[Any, Any], q: Tensor, k: Tensor, scale: float | None) -> str:
    """Names the first NaN that the user's function made of a score that was a number."""
    score_mod, mask_mod = functions
    for row in range(q.shape[2]):
        raw = scores(None, None, q, k, scale=scale, row=row)
        made = scores(score_mod, mask_mod, q, k, scale=scale, row=row)
        wrong = (made.isnan() & ~raw.isnan()).nonzero()
        if len(wrong):
            batch, head, kv_idx = (int(i) for i in wrong[0])
            score = float(raw[batch, head, kv_idx])
            name = getattr(score_mod, "__name__", type(score_mod).__name__)
            lines = [
                f"{name} gives NaN at batch {batch}, head {head}, q_idx {row}, kv_idx {kv_idx} for the score {score:.6g}"
                f" ({len(wrong)} times at this q_idx)"
            ]
            return "\n".join(lines + [f"  {line}" for line in _captured_values(score_mod)])
    return "the scores are NaN before the function: q or k has a NaN or an infinity"


def _captured_values(function: Any) -> list[str]:
    """What the function holds, one line a name: numbers as they are, tensors by shape and whether a NaN is in them."""
    try:
        found = inspect.getclosurevars(function)
    except TypeError:
        return []
    lines = []
    for name, value in {**found.globals, **found.nonlocals}.items():
        if isinstance(value, Tensor):
            wrong = int(value.isnan().sum())
            content = (
                f"{value.item():.6g}" if value.dim() == 0 else f"tensor {list(value.shape)}" + (f", {wrong} of them NaN" if wrong else "")
            )
            lines.append(f"{name} = {content}")
        elif isinstance(value, int | float | str):
            lines.append(f"{name} = {value!r}")
    return lines
