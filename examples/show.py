"""What every example does around its own few lines: inputs for the device at hand, accuracy, one timing, the generated source."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32


def tokens(small: bool) -> int:
    """Sequence length of an example: 200 for a test, 4096 on a GPU, 1024 on a CPU."""
    return 200 if small else 4096 if device.type == "cuda" else 1024


def inputs(batch: int, q_heads: int, kv_heads: int, length: int, head_dim: int, seed: int = 0) -> list[torch.Tensor]:
    """Unit normal q [B, Hq, S, D], k and v [B, Hkv, S, D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, length, head_dim) for heads in (q_heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def accuracy(out: torch.Tensor, truth: torch.Tensor, largest_score: float = 0.0) -> None:
    """Print the largest difference from the float64 reference, and stop if rounding does not explain it.

    In bfloat16 the rounding of the output itself is what counts (2 eps); in float32, the sums over the keys (16 eps). Scores are float32
    in both, so a score of size s makes its weight wrong by eps · s, which counts where scores are far larger than usual.
    """
    error = (out.double() - truth).abs().max().item()
    roundings = (16 if out.dtype == torch.float32 else 2) * torch.finfo(out.dtype).eps + largest_score * torch.finfo(torch.float32).eps
    allowed = roundings * truth.abs().max().item()
    print(f"largest difference from the float64 reference: {error:.1e} (allowed for {out.dtype}: {allowed:.1e})")
    assert error <= allowed, f"difference {error:.1e}, allowed {allowed:.1e}"


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain attention in eager PyTorch, with no variant and no mask: what the dense way costs before it does anything special."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def milliseconds(call: Callable[[], object], rounds: int = 10) -> float:
    """Median wall time of one call, the device finished."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def timing(kernel: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Print how long one forward call takes, beside dense attention without the variant."""
    with torch.no_grad():
        ours, plain = milliseconds(lambda: kernel(q, k, v)), milliseconds(lambda: dense(q, k, v))
    shape = f"{list(q.shape)} {str(q.dtype).removeprefix('torch.')} on {device.type}"
    print(f"flexc {ours:.2f} ms, plain dense attention in eager PyTorch {plain:.2f} ms: {shape}")


def source(text: str, lines: int = 40) -> None:
    """Print the first lines of a generated kernel."""
    all_lines = text.splitlines()
    print("\n".join(all_lines[:lines]))
    if len(all_lines) > lines:
        print(f"… and {len(all_lines) - lines} more lines: print(kernel.source)")
