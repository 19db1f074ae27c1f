"""One readable file that runs a compiled variant without flexc: the generated module, and below it a function that calls it.

    kernel.export("alibi_sm90.py")              # what ran last
    from alibi_sm90 import attention
    out = attention(q, k, v, slopes)

The file needs PyTorch, and Triton or the CuTe DSL if one of these backends made it; of a cute kernel it has the forward pass. It finds the
blocks of its mask by evaluating every pair of positions: exact, but slower than flexc, which proves them.
"""

from __future__ import annotations

import ast
import keyword
import os
import re
import tempfile
from collections.abc import Sequence
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
        InputError: no path, a name that no Python module can have, or a folder that is not there.
        UnsupportedError: the backend's modules cannot stand alone.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"expected the path of a file, such as 'alibi_sm90.py', got {path!r}")
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
    if backend is backends.DECODE:
        raise UnsupportedError(
            "export of a decoding step, which is two kernels: on every backend; export a call with more queries, or give a spec"
        )
    if getattr(artifact.plan, "max_scores", False):
        raise UnsupportedError(
            "export of a kernel that returns the largest scores: on every backend; call it without return_max_scores first, or give a spec"
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
        in_bulk=getattr(plan, "bulk" if backend.name == "cute" else "tma", False),
        has_backward=getattr(plan, "has_backward", backend.name != "cute"),
        **sizes,
    )
    source = artifact.source
    if backend.name == "cute":
        return f"{alone_in_a_file(source).rstrip()}\n\n\n{launcher}"
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


# --- CuTe -------------------------------------------------------------------------------------------------------------------------------

_RUNTIME = Path(__file__).parent / "runtime"
_OF_THE_LAUNCHER = ("TensorArgument", "NumberArgument", "tensor", "number", "Argument", "_architecture", "_fake")
_LAUNCHER = """import contextlib
import math
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace


{declared}


class Launcher:
    \"\"\"A host function that launches kernels, compiled at the first call for what its arguments are declared to be.\"\"\"

    def __init__(self, function, arch, arguments, smem_bytes=0):
        self.function, self.arch, self.arguments = function, arch, arguments
        self.ready, self.lock = None, threading.Lock()

    def __call__(self, *values):
        with self.lock:
            if self.ready is None:
                with _architecture(self.arch), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the DSL's advice on unrolled loops
                    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
                    options = f"--enable-tvm-ffi --gpu-arch {{self.arch}}"
                    self.ready = cute.compile(self.function, *_fake(self.arguments), stream, options=options)
        self.ready(*values)
"""


def alone_in_a_file(source: str) -> str:
    """A module of the cute backend with what it imports of flexc: the building blocks of tiles, and a launcher that keeps nothing on disk.

    The building blocks are called `tiles_x` in place of `tiles.x`: the DSL compiles functions from the text of the file that they stand in.
    """
    blocks = _body((_RUNTIME / "cute_tiles.py").read_text(encoding="utf-8"))
    declared = _segments((_RUNTIME / "cute_compile.py").read_text(encoding="utf-8"), _OF_THE_LAUNCHER)
    declared = re.sub(r"^ *cute = _cute\(\)\n", "", declared, flags=re.MULTILINE).replace("Any", "object")
    launcher = _LAUNCHER.format(declared=declared)
    ours = re.compile(r"^from flexc\.runtime.*\n", re.MULTILINE)
    counter = [_body((_RUNTIME / name).read_text(encoding="utf-8")) for name in ("graph_pools.py", "tile_counter.py")]
    counter = [ours.sub("", text) for text in counter] if "tile_counter" in source else []
    if len(ours.findall(source)) not in (2, 3):
        raise InternalError(f"the generated module imports something else of flexc than tiles, launcher and counter:\n{source}")
    first, *others = ours.split(source)
    rest = re.sub(r"\btiles\.", "tiles_", others[-1])
    parts = [first, launcher, *counter, "# --- building blocks of tiles ---", _renamed(blocks, "tiles_"), rest]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _body(text: str) -> str:
    """A module without its comments in front, its docstring and what it imports from the future."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    kept = [node for node in tree.body if not isinstance(node, ast.Expr) and getattr(node, "module", "") != "__future__"]
    return "".join(lines[kept[0].lineno - 1 :])


def _segments(text: str, names: Sequence[str]) -> str:
    """The statements of a module that define these names, in their order there."""
    found = []
    for node in ast.parse(text).body:
        defined = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        defined += [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
        if set(defined) & set(names):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            found.append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    return "\n\n\n".join(found)


def _renamed(text: str, prefix: str) -> str:
    """A module whose own functions and constants begin with a prefix; locals and attributes of the same names keep theirs."""
    tree = ast.parse(text)
    ours = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    lines = [line.encode() for line in text.splitlines()]
    places: list[tuple[int, int]] = []

    def visit(node: ast.AST, hidden: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef):
            if node in tree.body:
                places.append((node.lineno, lines[node.lineno - 1].index(b"def ") + 4))
            arguments = {a.arg for a in (*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs)}
            assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            hidden = hidden | arguments | assigned
        if isinstance(node, ast.Name) and node.id in ours - hidden:
            places.append((node.lineno, node.col_offset))
        for child in ast.iter_child_nodes(node):
            visit(child, hidden)

    visit(tree, frozenset())
    for line, column in sorted(places, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + prefix.encode() + lines[line - 1][column:]
    return b"\n".join(lines).decode()
