"""Train a small language model whose layers use four variants at once, and the same model on dense attention beside it.

The model is Llama-style (Touvron et al., arXiv:2302.13971): RMSNorm, SwiGLU, rotary positions (Su et al., arXiv:2104.09864), grouped-query
attention (Ainslie et al., arXiv:2305.13245). As in Gemma 2 (arXiv:2408.00118), every score is soft-capped and every other layer sees only a
sliding window. The text, 465,000 characters on the Python language, comes with Python itself.

All runs start from the same weights and see the same batches, so only rounding separates them. How much that is, is measured: a third run
does its dense attention in float64. flexc may stray from that one a few times as far as dense float32 attention does, at every step. The
bound has to be that tight: in the CPU configuration rounding moves the loss by less than 1e-6, a forgotten derivative of the cap by 7e-3
and a window wider by one token by 1e-2. All is float32 for the same reason: with the
rounding of bfloat16, a forgotten derivative passed in the configuration for tests.

    python examples/train_small_llm.py
"""

from __future__ import annotations

import argparse
import itertools
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import show
import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

import flexc

STRAY = 4  # times the rounding of dense attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    kv_heads: int
    length: int  # tokens in a sequence
    window: int  # tokens that a local layer sees
    cap: float  # of the scores
    sequences: int  # in a batch
    steps: int
    learning_rate: float = 2e-3


SMALL = Config(layers=2, width=32, heads=4, kv_heads=2, length=64, window=16, cap=1.0, sequences=4, steps=12)
CPU = Config(layers=4, width=96, heads=6, kv_heads=2, length=256, window=64, cap=30.0, sequences=6, steps=200)
GPU = Config(layers=8, width=512, heads=8, kv_heads=2, length=1024, window=256, cap=30.0, sequences=8, steps=200, learning_rate=1e-3)


# The variants, as flexc takes them.


def soft_cap(cap: float) -> Callable:
    return lambda score, batch, head, q_idx, kv_idx: cap * torch.tanh(score / cap)


def sliding_window(width: int) -> Callable:
    return lambda batch, head, q_idx, kv_idx: 0 <= q_idx - kv_idx < width


def causal(batch, head, q_idx, kv_idx):
    return kv_idx <= q_idx


def flexc_attentions(config: Config) -> tuple[flexc.Kernel, flexc.Kernel]:
    """For global and for local layers."""
    score = soft_cap(config.cap)
    return flexc.attention(score_mod=score, mask_mod=causal), flexc.attention(score_mod=score, mask_mod=sliding_window(config.window))


# The same variants, as one writes them in PyTorch: the whole score matrix, bent and masked.


def dense_attentions(config: Config, wide: bool = False) -> tuple[Attention, Attention]:
    """For global and for local layers; `wide` computes in float64."""

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        if wide:
            q, k, v = q.double(), k.double(), v.double()
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
        capped = (config.cap * torch.tanh(scores / config.cap)).masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return (torch.softmax(capped, dim=-1) @ v).float()

    return lambda q, k, v: dense(q, k, v, config.length), lambda q, k, v: dense(q, k, v, config.window)


class Block(nn.Module):
    def __init__(self, config: Config, attention: Attention):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.width // config.heads
        self.attention = attention
        self.before_attention, self.before_mlp = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.gate_up = nn.Linear(config.width, 6 * config.width, bias=False)
        self.down = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before_attention(x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        mixed = self.attention(rotate(q, turns), rotate(k, turns), v.contiguous())
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, config: Config, attentions: tuple[Attention, Attention]):
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.blocks = nn.ModuleList(Block(config, attentions[layer % 2]) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.register_buffer("turns", rotary_turns(config.length, config.width // config.heads), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return F.linear(self.norm(x), self.embed.weight)


def rotary_turns(length: int, head_dim: int) -> torch.Tensor:
    """Cosines and sines [2, S, D/2] of position × frequency."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turn each pair (x[d], x[d + D/2]) by its angle."""
    cos, sin = turns
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def text_of_python() -> torch.Tensor:
    """Characters as numbers below 256."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def train(name: str, config: Config, attentions: tuple[Attention, Attention], text: torch.Tensor) -> tuple[list[float], Model]:
    """Losses of `config.steps` steps, in nats a character; and the model."""
    torch.manual_seed(0)
    model = Model(config, attentions)
    nn.init.normal_(model.embed.weight, std=config.width**-0.5)
    model.to(show.device)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(config.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm, 1.0))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    losses, ended = [], [time.perf_counter()]
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        task = progress.add_task(f"{name:5}", total=config.steps, loss=float("nan"))
        for _ in range(config.steps):
            at = torch.randint(len(text) - config.length - 1, (config.sequences, 1), generator=generator)
            window = text[at + torch.arange(config.length + 1)].to(show.device)
            loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            ended.append(time.perf_counter())
            progress.update(task, advance=1, loss=losses[-1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    each = statistics.median(after - before for before, after in itertools.pairwise(ended)) * 1e3
    print(f"{name:5}: {parameters:,} parameters, {each:.0f} ms a step (median), loss {losses[0]:.4f} → {last(losses):.4f}")
    return losses, model


def last(losses: list[float]) -> float:
    """Mean of the last tenth."""
    tail = losses[-max(len(losses) // 10, 1) :]
    return sum(tail) / len(tail)


def largest_difference(losses: list[float], others: list[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def main(small: bool = False, steps: int | None = None) -> None:
    config = SMALL if small else GPU if show.device.type == "cuda" else CPU
    if steps is not None:
        config = Config(**{**vars(config), "steps": steps})
    tokens = text_of_python()
    print(f"{len(tokens):,} bytes of text; {config}")

    kernels = flexc_attentions(config)
    ours, _ = train("flexc", config, kernels, tokens)
    dense, _ = train("dense", config, dense_attentions(config), tokens)
    exact, _ = train("exact", config, dense_attentions(config, wide=True), tokens)

    print("\n   step   flexc   dense  flexc - exact  dense - exact")
    for step in sorted({*range(0, config.steps, max(config.steps // 8, 1)), config.steps - 1}):
        print(f"{step:7} {ours[step]:7.4f} {dense[step]:7.4f}       {ours[step] - exact[step]:+.1e}       {dense[step] - exact[step]:+.1e}")
    noise, stray = largest_difference(dense, exact), largest_difference(ours, exact)
    allowed = STRAY * noise + 8 * torch.finfo(torch.float32).eps * exact[0]  # the loss itself is a float32
    print(f"last tenth: flexc {last(ours):.6f}, dense {last(dense):.6f}, difference {last(ours) - last(dense):+.1e}")
    print(f"largest difference from the exact run at any step: flexc {stray:.1e}, dense {noise:.1e} (allowed: {allowed:.1e})")
    assert stray <= allowed, f"losses differ by {stray:.1e}, more than rounding explains ({allowed:.1e})"
    assert last(ours) < ours[0] - (0.05 if small else 1.0), "the model does not learn"

    # One local layer on its own, against the float64 reference.
    length = min(config.length, 512)
    q, k, v = show.inputs(1, config.heads, config.kv_heads, length, config.width // config.heads)
    truth, _ = flexc.reference(soft_cap(config.cap), sliding_window(config.window), q, k, v)
    show.accuracy(kernels[1](q, k, v), truth)

    print("\nBlocks that a local layer leaves to do:")
    print(kernels[1].blocks)

    print()
    show.timing(kernels[1], q, k, v)

    print("\nThe generated kernel of the local layers:\n")
    show.source(kernels[1].source)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small language model on flexc and on dense attention.")
    parser.add_argument("--small", action="store_true", help="a model for tests: a few steps, seconds")
    parser.add_argument("--steps", type=int, help="training steps (200)")
    arguments = parser.parse_args()
    main(arguments.small, arguments.steps)
