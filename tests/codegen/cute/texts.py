"""Graphs, plans and texts to look at, as the CuTe backend makes them from a user's functions, and variants that tests share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from flexc import frontend, passes
from flexc.codegen.cute import Plan, emit, make_plan
from flexc.ir.graph import Graph
from flexc.passes.base2 import lower_to_base2
from flexc.passes.derivative import differentiate
from flexc.target import Target

HOPPER = Target.parse("sm_90a")

SLOPES = torch.linspace(0.05, 0.6, 4)
DOCUMENTS = torch.arange(700, dtype=torch.int32) // 90
KEY_BIAS = torch.linspace(-2, 2, 700)
SHORT_BIAS = torch.linspace(-2, 2, 250)
PAIR_BIAS = torch.randn(4, 300, 320, generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).half()
ALLOWED = torch.rand(700, generator=torch.Generator().manual_seed(3)) > 0.3
WEIGHT = torch.tensor(1.5)
DISTANCES = torch.randn(150, generator=torch.Generator().manual_seed(4))
BUCKETS = torch.randn(32, 4, generator=torch.Generator().manual_seed(5)).bfloat16()
STEPS = torch.randint(-3, 4, (801,), generator=torch.Generator().manual_seed(6))
NEAR = torch.rand(700, generator=torch.Generator().manual_seed(7)) > 0.4


def alibi(score, batch, head, q_idx, kv_idx):
    return score - SLOPES[head] * (q_idx - kv_idx)


def softcap(score, batch, head, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def key_bias(score, batch, head, q_idx, kv_idx):
    return score + KEY_BIAS[kv_idx] * WEIGHT


def pair_bias(score, batch, head, q_idx, kv_idx):
    return score * 0.5 + PAIR_BIAS[head, q_idx, kv_idx]


def relative_bias(score, batch, head, q_idx, kv_idx):
    return score + TABLE[head, (q_idx - kv_idx) % 64]


def bucketed(score, batch, head, q_idx, kv_idx):
    """T5's buckets: exact below 8, logarithmic up to 128, for each direction."""
    distance = kv_idx - q_idx
    far = torch.abs(distance)
    large = 8 + (torch.log2(torch.clamp(far, min=1).float() / 8) * 2).to(torch.int32)
    bucket = torch.where(distance > 0, 16, 0) + torch.where(far < 8, far, torch.clamp(large, max=15))
    return score + BUCKETS[bucket, head]


def short_distances(score, batch, head, q_idx, kv_idx):
    """Pairs that `window` forbids would read past the end of the table, or from its end backwards."""
    return score * DISTANCES[q_idx - kv_idx] - SLOPES[head] * (q_idx - kv_idx)


def stepped(score, batch, head, q_idx, kv_idx):
    return torch.tanh(score * 0.1) + STEPS[q_idx - kv_idx + 400] * 0.5 + KEY_BIAS[kv_idx]


def near(batch, head, q_idx, kv_idx):
    return NEAR[torch.abs(q_idx - kv_idx)] | (kv_idx < 10)


def leaky(score, batch, head, q_idx, kv_idx):
    return torch.where(score > 0, score - SLOPES[head] * (q_idx - kv_idx), 0.5 * score) + (3 - q_idx) * 0.25


def gated(score, batch, head, q_idx, kv_idx):
    return torch.sigmoid(score) * (kv_idx // 3) - torch.abs(q_idx - kv_idx) * 0.01


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(batch, head, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)


def documents(batch, head, q_idx, kv_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx >= kv_idx)


def prefix(batch, head, q_idx, kv_idx):
    return (kv_idx < 100) | (q_idx >= kv_idx)


def hole(batch, head, q_idx, kv_idx):
    """Rows without keys, rows whose blocks are all full, and both in one tile."""
    return (q_idx >= 64) & (q_idx < 200) & (kv_idx >= 96) & (kv_idx < 256)


def early(batch, head, q_idx, kv_idx):
    """Rows whose blocks are all full."""
    return kv_idx < 256


def short(score, batch, head, q_idx, kv_idx):
    return score + SHORT_BIAS[kv_idx]


def in_short(batch, head, q_idx, kv_idx):
    """The rest of a block would read past the end of the bias."""
    return kv_idx < 250


def flags(batch, head, q_idx, kv_idx):
    return ALLOWED[kv_idx] & (q_idx // 40 >= kv_idx // 40)


VARIANTS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "window": (None, window),
    "documents": (None, documents),
    "prefix": (None, prefix),
    "hole": (None, hole),
    "early": (None, early),
    "short": (short, in_short),
    "flags": (None, flags),
    "alibi": (alibi, causal),
    "softcap": (softcap, causal),
    "key bias": (key_bias, causal),
    "pair bias": (pair_bias, None),
    "relative bias": (relative_bias, window),
    "bucketed": (bucketed, None),
    "short distances": (short_distances, window),
    "stepped": (stepped, near),
    "leaky": (leaky, prefix),
    "gated": (gated, causal),
}


def lowered(score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None) -> Graph:
    """The graph that is printed."""
    trace, _ = frontend.trace(score_mod, mask_mod)
    return lower_to_base2(differentiate(passes.run(trace.graph)))


def planned(graph: Graph, **changes: Any) -> Plan:
    """A plan for bfloat16."""
    given: dict[str, Any] = {"dtype": "bfloat16", "head_dim": 128, "head_dim_v": 128, "group": 1, **changes}
    return make_plan(graph, HOPPER, **given)


def text_of(score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None, **changes: Any) -> str:
    """The module for a user's functions."""
    graph = lowered(score_mod, mask_mod)
    return emit(graph, planned(graph, **changes), HOPPER, title="test")


def function(text: str, name: str) -> str:
    """One function of a module, without its decorator."""
    found = re.search(rf"^def {name}\(.*?(?=\n\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no function {name}"
    return found.group(0).rstrip() + "\n"


def loops(text: str, which: str) -> list[str]:
    """The loops over `which` ("partial" or "full") blocks of the kernel: the loading warp's, then the computing one's."""
    starts = {"partial": "# partial blocks: ", "full": "# full blocks: ", "all": "# from right to left: "}
    found = []
    for part in function(text, "forward_kernel").split(starts[which])[1:]:
        first, *rest = [line for line in part.splitlines()[1:] if line.strip()]
        lines = [first]
        for line in rest:
            if _indent(line) <= _indent(first):
                break
            lines.append(line)
        found.append("\n".join(lines))
    return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
