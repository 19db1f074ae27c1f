"""Serve a small language model: a paged cache that stays constant, and continuous batching.

The model is the one of train_small_llm.py with other attention: every layer sees a sliding window and the first few tokens, the attention
sinks of StreamingLLM (Xiao et al., arXiv:2309.17453), under a soft cap. What it was trained with is what serves it, the same two functions.

Each step of the server is one call a layer on a batch in which some sequences bring a piece of their prompt and others their last token
(Yu et al., Orca, OSDI 2022; Kwon et al., arXiv:2309.06180). Sequences join when there is room and leave when they are done. Their keys and
values are in pages. The mask itself says when a page has been read for the last time (`last_reader`): then it goes back to the pool, and
a sequence holds as many pages after a thousand tokens as after a hundred.

Every text must be what plain recomputation gives: dense attention in PyTorch over the whole text, without a cache.

    python examples/serve_small_llm.py
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import show
import torch
import train_small_llm as llm
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import flexc

SINKS = 4  # first tokens that every token sees


@dataclass(frozen=True)
class Traffic:
    requests: int
    prompt: int  # tokens at most
    answer: int  # tokens at most
    together: int  # sequences in a step at most
    page: int  # tokens


SMALL = Traffic(requests=6, prompt=20, answer=30, together=3, page=4)
CPU = Traffic(requests=24, prompt=100, answer=300, together=8, page=16)
GPU = Traffic(requests=256, prompt=500, answer=1500, together=64, page=16)


def window_and_sinks(width: int) -> Callable:
    return lambda batch, head, q_idx, kv_idx: (kv_idx <= q_idx) & ((q_idx - kv_idx < width) | (kv_idx < SINKS))


# --- the server ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class Sequence:
    """Tokens of a prompt and of the answer so far; of the first `cached` the keys and values are in pages."""

    tokens: list[int]
    wanted: int  # tokens, with those of the prompt
    prompt: int
    cached: int = 0
    pages: dict[int, int] = field(default_factory=dict)  # number in the sequence → page of the pool

    def next_tokens(self, page: int) -> list[int]:
        """The last token, or the prompt's up to the next end of a page."""
        stop = (self.cached // page + 1) * page
        return self.tokens[self.cached : stop]


@dataclass
class Step:
    """What the layers are told of a step, all on the device."""

    boundaries: torch.Tensor  # of each sequence's tokens
    places: torch.Tensor  # in the pages, of each token
    table: torch.Tensor
    lengths: torch.Tensor


class PagedAttention:
    """Attention of a layer for packed tokens, in place of what the model was trained with. Keeps their keys and values."""

    def __init__(self, kernel: flexc.Kernel, pages: int, page: int, config: llm.Config):
        self.kernel = kernel
        self.k_pages, self.v_pages = torch.zeros(2, pages, page, config.kv_heads, config.width // config.heads, device=show.device)
        self.step: Step | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [1, Hq, tokens, D], k and v [1, Hkv, tokens, D]."""
        assert self.step is not None
        for pages, new in ((self.k_pages, k), (self.v_pages, v)):
            pages.flatten(0, 1)[self.step.places] = new[0].transpose(0, 1)
        cache = flexc.PagedKV(self.k_pages, self.v_pages, self.step.table, self.step.lengths)
        out = flexc.varlen_attention(q[0].transpose(0, 1), cache, cu_seqlens_q=self.step.boundaries, kernel=self.kernel)
        return out.transpose(0, 1)[None]


class Server:
    """Runs steps of all running sequences."""

    def __init__(self, model: llm.Model, kernel: flexc.Kernel, config: llm.Config, traffic: Traffic):
        longest = traffic.prompt + traffic.answer
        # One window more, so that no page is kept only because the map ends.
        blocks = flexc.block_map(kernel, longest + config.window + traffic.page, longest + config.window + traffic.page, block=traffic.page)
        self.last_reader = blocks.last_reader()[0, 0].tolist()
        self.pages_of_one = blocks.most_live()
        self.free = list(range(traffic.together * self.pages_of_one))
        self.attentions = [PagedAttention(kernel, len(self.free), traffic.page, config) for _ in model.blocks]
        for block, attention in zip(model.blocks, self.attentions):
            block.attention = attention
        self.model, self.page, self.columns = model, traffic.page, -(-longest // traffic.page)
        self.turns = llm.rotary_turns(longest, config.width // config.heads).to(show.device)

    def run(self, sequences: list[Sequence]) -> None:
        """One step: each sequence brings some tokens, and those whose prompt is done get one more."""
        news = [sequence.next_tokens(self.page) for sequence in sequences]
        table, places, positions = torch.zeros(len(sequences), self.columns, dtype=torch.int32), [], []
        for row, sequence, new in zip(table, sequences, news):
            for token in range(sequence.cached, sequence.cached + len(new)):
                if token % self.page == 0:
                    sequence.pages[token // self.page] = self.free.pop()
                places.append(sequence.pages[token // self.page] * self.page + token % self.page)
                positions.append(token)
            sequence.cached += len(new)
            row[list(sequence.pages)] = torch.tensor(list(sequence.pages.values()), dtype=torch.int32)
        boundaries = torch.tensor([0, *map(len, news)]).cumsum(0).int()
        lengths = torch.tensor([sequence.cached for sequence in sequences], dtype=torch.int32)
        step = Step(*(x.to(show.device) for x in (boundaries, torch.tensor(places), table, lengths)))
        for attention in self.attentions:
            attention.step = step
        self.model.turns = self.turns[:, torch.tensor(positions, device=show.device)]
        tokens = torch.tensor([token for new in news for token in new], device=show.device)
        last = self.model(tokens[None])[0, step.boundaries[1:].long() - 1].argmax(-1)
        for sequence, token in zip(sequences, last.tolist()):
            if sequence.cached == len(sequence.tokens):
                sequence.tokens.append(token)
            self.give_back([number for number in sequence.pages if sequence.cached >= (self.last_reader[number] + 1) * self.page], sequence)

    def give_back(self, numbers: list[int], sequence: Sequence) -> None:
        """Pages that nobody reads any more."""
        self.free += [sequence.pages.pop(number) for number in numbers]


@torch.no_grad()
def serve(server: Server, requests: list[Sequence], together: int) -> None:
    """All requests, with a bar. A request comes in every other step."""
    waiting, running, start, made, steps = deque(requests), [], time.perf_counter(), 0, 0
    most = 0
    columns = (TextColumn("serving"), BarColumn(), MofNCompleteColumn(), TextColumn("texts"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[rate]:.0f} tokens/s, {task.fields[pages]} pages")) as progress:
        task = progress.add_task("", total=len(requests), rate=0.0, pages=0)
        while waiting or running:
            if waiting and len(running) < together and steps % 2 == 0:
                running.append(waiting.popleft())
            before = sum(len(sequence.tokens) for sequence in running)
            server.run(running)
            made, steps = made + sum(len(sequence.tokens) for sequence in running) - before, steps + 1
            held = [len(sequence.pages) for sequence in running]
            most = max(most, *held)
            done = [sequence for sequence in running if len(sequence.tokens) == sequence.wanted]
            for sequence in done:
                server.give_back(list(sequence.pages), sequence)
            running = [sequence for sequence in running if sequence not in done]
            rate = made / (time.perf_counter() - start)
            progress.update(task, advance=len(done), rate=rate, pages=sum(held))
    seconds = time.perf_counter() - start
    print(f"{made} tokens in {steps} steps, {made / steps:.1f} a step, {made / seconds:.0f} tokens/s")
    print(f"no sequence held more than {most} pages of {server.page} tokens; the longest has {max(r.cached for r in requests)} tokens")


# --- what is right ------------------------------------------------------------------------------------------------------------------------


def dense_attention(config: llm.Config) -> llm.Attention:
    """The same variant, as one writes it in PyTorch."""

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        at = torch.arange(q.shape[2], device=q.device)
        distance = at[:, None] - at
        seen = (distance >= 0) & ((distance < config.window) | (at < SINKS))
        return torch.softmax((config.cap * torch.tanh(scores / config.cap)).masked_fill(~seen, -torch.inf), dim=-1) @ v

    return dense


@torch.no_grad()
def recompute(model: llm.Model, config: llm.Config, requests: list[Sequence]) -> None:
    """Compare every text with dense attention over all of it.

    A token depends on those before it alone. So when at each place of the answer the likeliest next token is the one that was served, then
    recomputing token by token, each time over the whole text so far, gives this very text.
    """
    for block in model.blocks:
        block.attention = dense_attention(config)
    for number, sequence in enumerate(requests):
        tokens = torch.tensor([sequence.tokens], device=show.device)
        model.turns = llm.rotary_turns(tokens.shape[1], config.width // config.heads).to(show.device)
        likeliest = model(tokens)[0].argmax(-1)[sequence.prompt - 1 : -1]
        served = tokens[0, sequence.prompt :]
        assert torch.equal(likeliest, served), f"text {number} differs at token {int((likeliest != served).nonzero()[0])} of the answer"
    print(f"all {len(requests)} texts are those of plain recomputation, token by token")


def main(small: bool = False) -> None:
    on_gpu = show.device.type == "cuda"
    config = llm.SMALL if small else llm.GPU if on_gpu else llm.CPU
    traffic = SMALL if small else GPU if on_gpu else CPU
    score, mask = llm.soft_cap(config.cap), window_and_sinks(config.window)
    kernel = flexc.attention(score_mod=score, mask_mod=mask)
    text = llm.text_of_python()
    _, model = llm.train("train", config, (kernel, kernel), text)

    generator = torch.Generator().manual_seed(1)
    requests = []
    for _ in range(traffic.requests):
        prompt, answer = (int(torch.randint(most // 2, most + 1, (), generator=generator)) for most in (traffic.prompt, traffic.answer))
        at = int(torch.randint(len(text) - prompt, (), generator=generator))
        requests.append(Sequence(text[at : at + prompt].tolist(), prompt + answer, prompt))
    serve(Server(model, kernel, config, traffic), requests, traffic.together)
    print(f"flexc: {kernel.backend}, {kernel.reason}")
    recompute(model, config, requests)
    sequence = requests[0]
    print("\nThe first text, prompt and answer:")
    print(bytes(sequence.tokens[: sequence.prompt]), bytes(sequence.tokens[sequence.prompt :])[:200], sep="\n")

    q, k, v = show.inputs(1, config.heads, config.kv_heads, min(config.length, 512), config.width // config.heads)
    truth, _ = flexc.reference(score, mask, q, k, v)
    print()
    show.accuracy(kernel(q, k, v), truth)

    print("\nBlocks that the mask leaves to do:")
    print(kernel.blocks)

    print()
    show.timing(kernel, q, k, v)

    print("\nThe generated kernel:\n")
    show.source(kernel.source)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a small language model from a paged cache, with continuous batching.")
    parser.add_argument("--small", action="store_true", help="a model for tests: seconds")
    main(parser.parse_args().small)
