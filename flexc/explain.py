"""`kernel.explain`: what a variant is, what it costs, and how it will run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from flexc.ir.collisions import ARBITRARY, COLUMN, DIAGONAL, HEAD, ROW, UNIFORM, UNIQUE, gradient_terms
from flexc.ir.dependence import rates
from flexc.ir.graph import FLOAT32, Graph, Node, inputs_of, topological
from flexc.ir.ops import has_trait
from flexc.passes.affine import as_mathematics
from flexc.sparsity import BlockMap, Certificate
from flexc.sparsity.certificate import certify

if TYPE_CHECKING:
    from flexc.launch import Launch


_MOST_BLOCKS = 512  # evaluated at most to count pairs
_COMPARED = 256  # compared with the mask to find out what stops proofs


@dataclass(frozen=True)
class Explanation:
    """The facts behind a call; prints as a page.

    Attributes:
        name: of the variant.
        mathematics: lines that say what the score and the mask are.
        unmasked_share: allowed pairs of all pairs; an estimate if `is_estimated`, where counting them all would take too long.
        flops_forward, flops_backward: floating-point operations of the matrix products on allowed pairs: 4 and 10 each for D = Dv.
        bytes_forward: q, k, v read and out, lse written once.
        roofline_ms: the least time of the forward pass on this device, None where its peaks are unknown.
        workspace_bytes: what the backward pass allocates besides the gradients of q, k and v.
        loads: (captured tensor, index, rate) of each read.
        gradients: (captured tensor, index, how contributions to its gradient meet) of each read that needs one.
        steps: (expression, the user's line) of what has steps and reads the score: its derivative is 0, at the steps too.
        copied: inputs whose last dimension is not contiguous; each costs one copy.
        backend, reason, plan, blocks: as on the kernel.
        certificate: a comparison of some blocks with the mask, where bounds alone did not decide all that are empty or full; else None.
    """

    name: str
    mathematics: tuple[str, ...]
    unmasked_share: float
    is_estimated: bool
    flops_forward: float
    flops_backward: float
    bytes_forward: int
    roofline_ms: float | None
    workspace_bytes: int
    loads: tuple[tuple[str, str, str], ...]
    gradients: tuple[tuple[str, str, str], ...]
    steps: tuple[tuple[str, str], ...]
    copied: tuple[str, ...]
    backend: str
    reason: str
    plan: str
    blocks: BlockMap
    certificate: Certificate | None
    device: str

    def __str__(self) -> str:
        blocks, counts = self.blocks, self.blocks.counts()
        kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("full", "partial", "empty"))
        about = "about " if self.is_estimated else ""
        forward, backward = f"{about}{self.flops_forward / 1e9:.3f} GFLOP forward", f"{self.flops_backward / 1e9:.3f} backward"
        traffic, workspace = self.bytes_forward / 2**20, self.workspace_bytes / 2**20
        lines = [f"{self.name}", "", *(f"  {line}" for line in self.mathematics), ""]
        lines.append(f"  allowed     {about}{self.unmasked_share:.2%} of all pairs")
        lines.append(f"  blocks      {kinds} of {blocks.block[0]}x{blocks.block[1]} tokens")
        lines += [f"  {line}" for line in _decided(blocks, self.certificate)]
        lines.append(f"  work        {forward}, {backward}")
        lines.append(f"  traffic     {traffic:.2f} MiB forward, {workspace:.2f} MiB workspace backward")
        if self.roofline_ms is not None:
            lines.append(f"  roofline    {self.roofline_ms:.4f} ms forward on {self.device}")
        for tensor, index, rate in self.loads:
            lines.append(f"  loads       {tensor}[{index}] once for each {rate}")
        for tensor, index, how in self.gradients:
            lines.append(f"  gradient    {tensor}[{index}]: {how}")
        for expression, where in self.steps:
            lines.append(f"  derivative  0 through `{expression}`{where}")
        for name in self.copied:
            lines.append(f"  copies      {name}: its last dimension is not contiguous")
        lines += [f"  backend     {self.backend}: {self.reason}", "", *(f"  {line}" for line in self.plan.splitlines())]
        return "\n".join(lines)


def _decided(blocks: BlockMap, certificate: Certificate | None) -> list[str]:
    """Lines on how the blocks were decided, and how to rewrite what bounds could not see."""
    proof = blocks.proof
    ways = [f"{proof.bounds:,} by bounds"]
    ways += [f"{proof.mixed:,} partial by a period that every block mixes"] if proof.mixed else []
    ways += [f"{proof.sampled:,} partial by two pairs"] if proof.sampled else []
    ways += [f"{proof.evaluated:,} fell back to evaluation of all their pairs"] if proof.evaluated else []
    ways += [f"{proof.undecided:,} left partial, undecided"] if proof.undecided else []
    lines = [f"decided     {', '.join(ways)}"]
    lines += [f"waited      PyTorch operators found the blocks: {blocks.waited}"] if blocks.waited else []
    if blocks.overflowed:
        lines.append(f"overflow    {blocks.overflowed:,} rows of blocks are too ragged for their lists, and are walked from end to end")
    if certificate is None:
        return lines
    if certificate.loose:
        about = "" if certificate.is_complete else "about "
        lines.append(f"loose       {about}{certificate.loose_share:.2%} of all blocks are called partial and are empty or full")
    for stopper in certificate.stoppers:
        place = f" at {stopper.where}" if stopper.where else ""
        lines += [f"rewrite     `{stopper.expression}`{place}:", f"            {stopper.why}"]
    return lines


_RATE_WORDS = {
    "uniform": "call",
    "head": "head",
    "row": "query",
    "column": "key",
    "diagonal": "difference q_idx - kv_idx",
    "element": "pair",
}


_COLLISION_WORDS = {
    UNIFORM: "one sum, of all pairs",
    HEAD: "a sum for each head",
    ROW: "a sum for each query",
    COLUMN: "a sum for each key",
    DIAGONAL: "a sum for each difference q_idx - kv_idx, block by block",
    UNIQUE: "no two pairs of a head meet",
    ARBITRARY: "an addition for each pair",
}


def explain(launch: Launch, blocks: BlockMap, scale: float, copied: list[str], name: str, tensors: Sequence[Tensor] = ()) -> Explanation:
    """The explanation of a launch on these captured tensors."""
    artifact, shapes = launch.artifact, launch.shapes
    sums = artifact.backend.gradient_bytes(artifact.lowered, launch.options.deterministic, [tensor.numel() for tensor in tensors])
    share = blocks.unmasked_share(most_blocks=_MOST_BLOCKS)
    proof = blocks.proof
    # reach_pairs=0: which queries see nothing is a question for `blocks.certify`, and takes longer.
    certificate = certify(blocks, _COMPARED, 0, reach_pairs=0) if proof.evaluated or proof.undecided else None
    pairs = share * shapes.batch * shapes.heads_q * shapes.q_len * shapes.kv_len
    element = shapes.dtype.itemsize
    queries, keys = shapes.batch * shapes.heads_q * shapes.q_len, shapes.batch * shapes.heads_kv * shapes.kv_len
    width = shapes.head_dim + shapes.head_dim_v
    bytes_forward = (queries * width + keys * width) * element + queries * 4
    forward = 2 * pairs * width
    target = artifact.target
    roofline = None
    if target.peak_tflops and target.dram_gb_per_s:
        roofline = max(forward / target.peak_tflops / 1e12, bytes_forward / target.dram_gb_per_s / 1e9) * 1e3
    return Explanation(
        name=name,
        mathematics=tuple(_mathematics(artifact.graph, scale)),
        unmasked_share=share,
        is_estimated=blocks.counts()["partial"] > _MOST_BLOCKS,
        flops_forward=forward,
        flops_backward=2 * pairs * (3 * shapes.head_dim + 2 * shapes.head_dim_v),
        bytes_forward=bytes_forward,
        roofline_ms=roofline,
        workspace_bytes=_workspace_bytes(launch, blocks) + sum(sums.values()),
        loads=tuple(_loads(artifact.graph)),
        gradients=tuple(_gradients(artifact.lowered)),
        steps=tuple(_steps(artifact.graph)),
        copied=tuple(copied),
        backend=artifact.backend.name,
        reason=artifact.reason,
        plan=str(artifact.plan),
        blocks=blocks,
        certificate=certificate,
        device=target.name,
    )


def _workspace_bytes(launch: Launch, blocks: BlockMap) -> int:
    """Of the backward pass, without sums for captured tensors."""
    artifact = launch.artifact
    backward = artifact.for_backward(launch.shapes, launch.options)
    return backward.backend.workspace_bytes(backward.plan, launch.shapes, blocks.shape[0] * blocks.shape[1])


def _mathematics(graph: Graph, scale: float) -> list[str]:
    tensors, scalars = [t.name for t in graph.tensors], [s.name for s in graph.scalars]
    score = "score" if graph.score is None else as_mathematics(graph.score, tensors, scalars)
    allowed = "every pair" if graph.mask is None else as_mathematics(graph.mask, tensors, scalars)
    return [f"score       {_short(scale)} · q·k", f"logit       {score}", f"allowed     {allowed}"]


def _short(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def _loads(graph: Graph) -> list[tuple[str, str, str]]:
    tensors, scalars = [t.name for t in graph.tensors], [s.name for s in graph.scalars]
    found = rates(graph)
    rows = []
    for node in topological(node for _, node in graph.outputs):
        if node.op == "gather":
            index = ", ".join(_index(a, tensors, scalars) for a in node.args)
            rows.append((tensors[node.attrs[0]], index, _RATE_WORDS[found[node]]))
    return rows


def _steps(graph: Graph) -> list[tuple[str, str]]:
    if graph.score is None:
        return []
    tensors, scalars = [t.name for t in graph.tensors], [s.name for s in graph.scalars]
    rows = []
    for node in topological([graph.score]):
        is_step = has_trait(node, "stepped") or (node.op == "cast" and node.dtype != FLOAT32)
        if is_step and "score" in inputs_of(node):
            where = graph.lines.get(node)
            place = f" at {where.file.rsplit('/', 1)[-1]}:{where.line}" if where is not None else ""
            rows.append((as_mathematics(node, tensors, scalars), place))
    return rows


def _gradients(graph: Graph) -> list[tuple[str, str, str]]:
    tensors, scalars = [t.name for t in graph.tensors], [s.name for s in graph.scalars]
    rows = []
    for term in gradient_terms(graph):
        index = ", ".join(_index(a, tensors, scalars) for a in term.gather.args)
        rows.append((tensors[term.slot], index, _COLLISION_WORDS[term.collisions]))
    return rows


def _index(node: Node, tensors: list[str], scalars: list[str]) -> str:
    return as_mathematics(node, tensors, scalars)
