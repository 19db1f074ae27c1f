"""The command line: `python -m flexc show | explain | check | env | cache`.

FILE.py:NAME is a Kernel, a Mask or a plain function of four (mask) or five (score) arguments at the top level of a file. A mistake of the
user is one message on stderr and exit code 2; `check` and `cache verify` end with 1 when they found something wrong.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexc.errors import FlexcError, InputError, InternalError, ShapeError

if TYPE_CHECKING:
    import torch

    from flexc.target import Target

app = typer.Typer(
    help="Plain Python attention functions become one fused kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The disk cache: what it holds, empty it, check every file.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


class Emit(str, Enum):
    """What `show` prints."""

    ir = "ir"
    source = "source"
    ptx = "ptx"
    sass = "sass"
    resources = "resources"


class Direction(str, Enum):
    """Which kernel `show` prints."""

    fwd = "fwd"
    bwd = "bwd"


class BackendName(str, Enum):
    """Backends by name; `auto` is the fastest that supports the request."""

    auto = "auto"
    cute = "cute"
    triton = "triton"
    cpu = "cpu"


class Dtype(str, Enum):
    """Dtypes of q, k and v."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


NameArgument = Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A Kernel, a Mask, or a plain function.", show_default=False)]
ShapeOption = Annotated[str, typer.Option("--shape", metavar="B,Hq,Hkv,Sq,Skv,D[,Dv]", help="Sizes of q, k and v.")]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on the CPU.", show_default=False)]
DeviceOption = Annotated[str | None, typer.Option(help="Default: the first GPU, else the CPU.", show_default=False)]


def main() -> None:
    """Run the command line of this process."""
    app(prog_name="flexc")


@app.command()
def show(
    name: NameArgument,
    backend: Annotated[BackendName, typer.Option(help="Which code generator.")] = BackendName.auto,
    target: Annotated[
        str | None, typer.Option(help="sm_90a, cpu, …; needs no such device. Default: this machine's.", show_default=False)
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.bfloat16,
    head_dim: Annotated[int, typer.Option(min=1, help="D, of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=1, help="Dv; default D.", show_default=False)] = None,
    heads: Annotated[int, typer.Option(min=1, help="Hq.")] = 8,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="Hkv; default Hq.", show_default=False)] = None,
    length: Annotated[int, typer.Option(min=1, help="Sq and Skv.")] = 4096,
    emit: Annotated[Emit, typer.Option(help="The stage to print.")] = Emit.source,
    direction: Annotated[Direction, typer.Option(help="Whose ptx, sass or resources; a source holds both.")] = Direction.fwd,
) -> None:
    """Print what flexc makes of a function, for any target, with or without that device."""
    with _one_message():
        from flexc import pipeline

        kv_heads = heads if heads_kv is None else heads_kv
        if heads % kv_heads:
            raise ShapeError(f"expected --heads to be a multiple of --heads-kv, got {heads} and {kv_heads}")
        variant = load(name)
        chosen = _target(target, backend)
        shapes = pipeline.Shapes(
            batch=1,
            heads_q=heads,
            heads_kv=kv_heads,
            q_len=length,
            kv_len=length,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            dtype=_dtype(dtype),
        )
        artifact = pipeline.compile_for(
            variant.score_mod, variant.mask_mod, shapes=shapes, target=chosen, backend=backend.value, direction=direction.value
        )
        if emit is Emit.ir:
            text = str(artifact.graph)
        elif emit is Emit.source:
            text = artifact.source
        else:
            text = str(getattr(artifact, emit.value)())
        _print_code(text, emit)


@app.command()
def explain(name: NameArgument, shape: ShapeOption, dtype: DtypeOption = None, device: DeviceOption = None) -> None:
    """Print what a variant is as mathematics, its work, its roofline, its tile, and why this backend."""
    with _one_message():
        kernel = load(name).kernel()
        typer.echo(str(kernel.explain(*inputs(shape, dtype, device))))


@app.command()
def check(name: NameArgument, shape: ShapeOption, dtype: DtypeOption = None, device: DeviceOption = None) -> None:
    """Compare output and all gradients with the float64 reference; exit code 1 if one is off."""
    with _one_message():
        import flexc

        report = flexc.check(load(name).kernel(), *inputs(shape, dtype, device))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """Print versions, devices, and each backend with the reason if it is unavailable."""
    with _one_message():
        from flexc import environment

        typer.echo(environment.report())


@cache_app.command("info")
def cache_info() -> None:
    """Print where the cache is and how much it holds."""
    with _one_message():
        info = _cache().info()
        limit = "no limit" if info.limit_bytes is None else f"limit {_mib(info.limit_bytes)}"
        typer.echo(f"{info.root}: {info.entries} entries, {_mib(info.size_bytes)}, {limit}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every entry."""
    with _one_message():
        cache = _cache()
        typer.echo(f"{cache.root}: removed {cache.clear()} entries")


@cache_app.command("verify")
def cache_verify() -> None:
    """Check the digest of every file; exit code 1 if one is wrong."""
    with _one_message():
        cache = _cache()
        damages = cache.verify()
        for damage in damages:
            typer.echo(f"{damage.folder}: {damage.reason}")
        typer.echo(f"{cache.root}: {cache.info().entries} entries, {len(damages)} damaged")
    if damages:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Variant:
    """What FILE.py:NAME named: the two functions, and the Kernel where it was one."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    made: Any = None

    def kernel(self) -> Any:
        """The user's own Kernel, or one made of the functions."""
        import flexc

        return self.made or flexc.attention(score_mod=self.score_mod, mask_mod=self.mask_mod)


def load(name: str) -> Variant:
    """Import FILE.py and take NAME out of it.

    Raises:
        InputError: no such file or name, the file fails to import, or NAME is none of the things that can be compiled.
    """
    file, _, attribute = name.rpartition(":")
    if not file or not attribute:
        raise InputError(f"expected FILE.py:NAME, got {name!r}")
    path = Path(file)
    if not path.is_file():
        raise InputError(f"no such file: {file}")
    module = _import(path)
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, list(vars(module)), 1)
        raise InputError(f"{file} has no {attribute!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return _variant(getattr(module, attribute), name)


def _variant(value: Any, name: str) -> Variant:
    import flexc
    from flexc import frontend

    if isinstance(value, flexc.Kernel):
        return Variant(value.score_mod, value.mask_mod, value)
    if isinstance(value, flexc.Mask):
        return Variant(None, value)
    if callable(value) and not isinstance(value, type):
        arity = frontend.arity(value)
        if arity == 5:
            return Variant(value, None)
        if arity == 4:
            return Variant(None, value)
    raise InputError(
        f"{name} is of type {type(value).__name__}; expected a Kernel, a Mask, a score function (score, batch, head, q_idx, kv_idx) "
        "or a mask function (batch, head, q_idx, kv_idx)"
    )


def _import(path: Path) -> Any:
    """Run a file as a module, with its folder on the path as `python FILE.py` has it."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"flexc_user_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise InputError(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except FlexcError:
        raise
    except SyntaxError as error:
        raise InputError(f"{path} cannot be imported: {error.msg} at line {error.lineno}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())]
        where = f" at line {lines[-1]}" if lines else ""
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}{where}") from error
    return module


def inputs(shape: str, dtype: Dtype | None, device: str | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit normal q, k, v that require gradients, the same on every run.

    Raises:
        ShapeError: not six or seven positive numbers.
        InputError: a device that is not there.
    """
    import torch

    try:
        sizes = [int(text) for text in shape.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (6, 7) or min(sizes) < 1:
        raise ShapeError(f"expected --shape B,Hq,Hkv,Sq,Skv,D[,Dv] of positive numbers, got {shape!r}")
    batch, heads_q, heads_kv, q_len, kv_len, head_dim = sizes[:6]
    where = _device(device)
    kind = _dtype(dtype) if dtype else torch.bfloat16 if where.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, heads_q, q_len, head_dim), (batch, heads_kv, kv_len, head_dim), (batch, heads_kv, kv_len, sizes[-1])
    q, k, v = (torch.randn(size, generator=generator).to(where, kind).requires_grad_() for size in shapes)
    return q, k, v


def _device(text: str | None) -> torch.device:
    import torch

    from flexc.target import Target

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise InputError(f"expected --device cpu, cuda or cuda:N, got {text!r}") from None
    Target.of(device)
    return device


def _dtype(dtype: Dtype) -> torch.dtype:
    import torch

    return getattr(torch, dtype.value)


def _target(text: str | None, backend: BackendName) -> Target:
    """What was asked for; else the CPU for its backend, this machine's GPU, or a Hopper."""
    from flexc.target import Target

    if text is not None:
        return Target.parse(text)
    if backend is BackendName.cpu:
        return Target.parse("cpu")
    device = _device(None)
    return Target.of(device) if device.type == "cuda" else Target.parse("sm_90a")


def _cache() -> Any:
    from flexc import settings
    from flexc.runtime.cache import cache_of

    return cache_of(settings.current())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _print_code(text: str, emit: Emit) -> None:
    """Coloured on a terminal, the bare text into a file or a pipe."""
    if emit is Emit.source and sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        Console().print(Syntax(text, "python", word_wrap=False))
    else:
        typer.echo(text, nl=not text.endswith("\n"))


@contextlib.contextmanager
def _one_message() -> Iterator[None]:
    """Errors of the user end as one message; a broken promise of ours keeps its traceback."""
    try:
        yield
    except InternalError:
        raise
    except FlexcError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
