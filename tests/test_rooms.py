"""The walls of the house: which room may import which. Every file under flexc/ is read, none is imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flexc"
SOURCES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py") if "_templates" not in path.parts)

EVERYONE = {"errors", "settings", "target"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "target": {"errors"},
    "pairs": {"errors", "python_math"},
    "python_math": set(),
    "reference": {"errors", "pairs"},
    "ir": EVERYONE,
    "runtime": EVERYONE,
    "frontend": EVERYONE | {"ir"},
    "passes": EVERYONE | {"ir"},
    "sparsity": EVERYONE | {"ir"},
    "codegen": EVERYONE | {"ir", "sparsity"},
}
BACKENDS = ("cpu", "cute", "triton")


def imports_of(source: str, path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of ours; `from flexc import a` counts as flexc.a. Relative imports count as "."."""
    found = []
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "."))
        elif isinstance(node, ast.ImportFrom) and node.module == "flexc":
            found += [(node.lineno, f"flexc.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.module or ""))
    return [(line, name) for line, name in found if name.split(".")[0] in ("flexc", "", ".")]


def room_of(path: Path) -> str:
    """flexc/ir/ops.py → "ir", flexc/target.py → "target"."""
    return path.with_suffix("").parts[1]


def complaints(path: Path, source: str) -> list[str]:
    """What a file imports that its room may not."""
    room = room_of(path)
    found = []
    for line, name in imports_of(source, path):
        parts = name.split(".")
        if name == ".":
            found.append(f"{path}:{line}: a relative import")
        elif room in MAY_IMPORT and parts[1:2] != [room] and not set(parts[1:2]) & MAY_IMPORT[room]:
            found.append(f"{path}:{line}: {room} imports {name}")
        elif room in ("codegen", "runtime") and len(path.parts) > 3:
            others = set(BACKENDS) - {path.parts[2]}
            if path.parts[2] in BACKENDS and parts[1:2] == [room] and set(parts[2:3]) & others:
                found.append(f"{path}:{line}: the {path.parts[2]} backend imports {name}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_room_looks_downstream(path):
    assert complaints(path, (PACKAGE.parent / path).read_text()) == []


def test_every_folder_is_a_known_room():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    known = set(MAY_IMPORT) | {"compat", "inference", "integrations"}
    assert folders <= known, f"give {folders - known} a row in MAY_IMPORT"


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("flexc/ir/graph.py", "from flexc.passes import run", "flexc/ir/graph.py:1: ir imports flexc.passes"),
        ("flexc/ir/graph.py", "def f():\n    import flexc.api", "flexc/ir/graph.py:2: ir imports flexc.api"),
        ("flexc/passes/fold.py", "from flexc import sparsity", "flexc/passes/fold.py:1: passes imports flexc.sparsity"),
        ("flexc/passes/fold.py", "from .. import ir", "flexc/passes/fold.py:1: a relative import"),
        ("flexc/codegen/text.py", "import flexc", "flexc/codegen/text.py:1: codegen imports flexc"),
        ("flexc/runtime/cache.py", "from flexc.ir.graph import Node", "flexc/runtime/cache.py:1: runtime imports flexc.ir.graph"),
        ("flexc/reference.py", "from flexc.ir import ops", "flexc/reference.py:1: reference imports flexc.ir"),
        (
            "flexc/codegen/cpu/emit.py",
            "from flexc.codegen.triton.rows import ROWS",
            "flexc/codegen/cpu/emit.py:1: the cpu backend imports flexc.codegen.triton.rows",
        ),
    ],
)
def test_a_look_downstream_is_found(path, source, complaint):
    assert complaints(Path(path), source) == [complaint]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("flexc/ir/graph.py", "import torch\nfrom flexc.errors import TraceError\nfrom flexc.ir.ops import TABLE"),
        ("flexc/codegen/triton/emit.py", "from flexc.codegen.triton.rows import ROWS\nfrom flexc.sparsity import BlockMap"),
        ("flexc/pipeline.py", "from flexc import frontend, passes, runtime"),
        ("flexc/runtime/cache.py", "from flexc import settings"),
    ],
)
def test_what_is_allowed_is_not_complained_of(path, source):
    assert complaints(Path(path), source) == []
