"""One readable file that runs a compiled variant without flexc: the generated module, and below it a function that calls it.

    kernel.export("alibi_sm90.py")              # what ran last
    from alibi_sm90 import attention
    out = attention(q, k, v, slopes)

The file needs PyTorch, and Triton if it was made by that backend. It finds the blocks of its mask by evaluating every pair of positions:
exact, but slower than flexc, which proves them.
"""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from pathlib import Path

from flexc import backends
from flexc.codegen.cpu.rows import literal, spell
from flexc.codegen.templates import render
from flexc.errors import InputError, InternalError, UnsupportedError
from flexc.ir.graph import FLOAT32, INT64, Graph, Node, inputs_of, topological
from flexc.pipeline import Artifact, MaskAlone

_TEMPLATE = "export/launcher.py.j2"
_TAKEN = {"scale", "return_lse", "torch", "math", "name", "x", "out", "lse"}


def export(artifact: Artifact, path: str | os.PathLike[str], version: str) -> Path:
    """Write the file, whole or not at all; returns where it is.

    Raises:
        InputError: a name that no Python module can have, or a folder that is not there.
        UnsupportedError: the backend's modules cannot stand alone.
    """
    file = Path(path)
    if file.suffix != ".py" or not file.stem.isidentifier() or keyword.iskeyword(file.stem):
        raise InputError(f"expected a file that can be imported, such as 'alibi_sm90.py', got {str(path)!r}")
    if not file.parent.is_dir():
        raise InputError(f"expected a file in a folder that exists, got {str(path)!r}")
    text = exported(artifact, version)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as written:
            written.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return file


def exported(artifact: Artifact, version: str) -> str:
    """The text of the file."""
    backend = artifact.backend
    if backend not in (backends.CPU, backends.TRITON):
        raise UnsupportedError(
            f"export of a kernel of the {backend.name} backend: its launcher is part of flexc; make the kernel with "
            'backend="triton" or backend="cpu" and export that'
        )
    graph, plan = artifact.traced, artifact.plan
    names = _argument_names(graph)
    tensor_names, scalar_names = names[: len(graph.tensors)], names[len(graph.tensors) :]
    described = [f"captured tensor, {t.dtype} of rank {t.rank}" for t in graph.tensors]
    described += [f"captured number, {s.dtype}" for s in graph.scalars]
    sizes = {name: getattr(plan, name, None) for name in ("head_dim", "head_dim_v", "group")}
    alone = artifact.mask_alone
    mask = alone.graph.mask
    reads = frozenset() if mask is None else inputs_of(mask)
    lines, result = ([], "") if mask is None else mask_statements(alone, mask)
    launcher = render(
        _TEMPLATE,
        version=version,
        arguments=list(zip(names, described, strict=True)),
        tensor_names=tensor_names,
        scalars=f"({', '.join(scalar_names)}{',' if len(scalar_names) == 1 else ''})",
        dtype=plan.dtype,
        backend=backend.name,
        blocks=artifact.map_blocks,
        mask_lines=lines,
        mask_result=result,
        entries=("batch" in reads, "head" in reads),
        in_bulk=getattr(plan, "tma", False),
        has_backward=getattr(plan, "has_backward", True),
        **sizes,
    )
    source = artifact.source
    needed = {"import contextlib": backend is backends.TRITON, "import math": True, "from types import SimpleNamespace": True}
    imports = "\n".join(line for line, is_needed in needed.items() if is_needed)
    found = re.compile(r"^import math$(\n^from types import SimpleNamespace$)?", re.MULTILINE)
    if not found.search(source):
        raise InternalError(f"the generated module does not import math:\n{source}")
    source = found.sub(imports, source, count=1)
    return f"{source.rstrip()}\n\n\n{launcher}"


def _argument_names(graph: Graph) -> list[str]:
    """Names of the captured tensors, then of the run-time numbers, as the user calls them."""
    taken = set(_TAKEN)
    names = []
    for given in (*graph.tensors, *graph.scalars):
        name = given.name
        while name in taken or keyword.iskeyword(name) or not name.isidentifier():
            name = f"{name}_" if name.isidentifier() else f"captured_{len(names)}"
        taken.add(name)
        names.append(name)
    return names


def mask_statements(alone: MaskAlone, mask: Node) -> tuple[list[str], str]:
    """The mask as PyTorch statements over batch, head, q_idx, kv_idx, tensors and scalars, each with the user's line; and its value."""
    named: dict[Node, str] = {}
    lines: list[tuple[str, str]] = []
    where = alone.graph.lines
    for node in topological([mask]):
        if node.op == "const":
            named[node] = literal(node)
            continue
        if node.op == "input":
            named[node] = node.attrs[0]
            continue
        if node.op == "scalar":
            dtype = {FLOAT32: "FLOAT", INT64: "torch.int64"}.get(node.dtype, "torch.int32")
            text = f"_number(scalars[{alone.scalar_slots[node.attrs[0]]}], {dtype}, q_idx.device)"
        elif node.op == "gather":
            indices = [named[index] for index in node.args]
            text = f"_element({', '.join([f'tensors[{alone.tensor_slots[node.attrs[0]]}]', *indices])})"
        else:
            text = spell(node, [named[a] for a in node.args])
        named[node] = f"x{len(lines)}"
        line = where.get(node)
        lines.append((f"{named[node]} = {text}", "" if line is None else f"  # {Path(line.file).name}:{line.line}"))
    if mask.op == "const":
        return [], f"_number({named[mask]}, torch.bool, q_idx.device)"
    width = min(60, max((len(text) for text, _ in lines), default=0))
    return [f"{text:<{width}}{line}".rstrip() for text, line in lines], named[mask]
