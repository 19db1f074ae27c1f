"""Generated texts as modules from real files."""

from __future__ import annotations

import inspect
import sys
import traceback

import pytest

from flexc.errors import InternalError
from flexc.runtime.module import load_module

TEXT = "def f(x):\n    return 1 / x  # the line\n"


def test_source_and_traceback_show_the_file(tmp_path):
    module = load_module(TEXT, tmp_path / "kernel.py")
    assert inspect.getsource(module.f) == TEXT
    assert inspect.getsourcefile(module.f) == str(tmp_path / "kernel.py")
    with pytest.raises(ZeroDivisionError) as caught:
        module.f(0)
    assert "1 / x  # the line" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_another_text_at_the_same_path_is_another_module(tmp_path):
    first = load_module("def f():\n    return 1\n", tmp_path / "kernel.py")
    second = load_module("def f():\n    return 2\n", tmp_path / "kernel.py")
    assert (first.f(), second.f()) == (1, 2)
    assert "return 2" in inspect.getsource(second.f)
    assert not any(module in (first, second) for module in list(sys.modules.values()))


def test_a_file_that_holds_the_text_is_not_written_again(tmp_path):
    path = tmp_path / "deep" / "kernel.py"
    load_module(TEXT, path)
    before = path.stat().st_mtime_ns
    load_module(TEXT, path)
    assert path.stat().st_mtime_ns == before
    assert [p.name for p in path.parent.iterdir()] == ["kernel.py"]


def test_a_text_that_does_not_load_names_its_file(tmp_path):
    with pytest.raises(InternalError, match=r"generated module .*kernel\.py does not load: SyntaxError"):
        load_module("def f(:\n", tmp_path / "kernel.py")


def test_a_file_must_be_python(tmp_path):
    with pytest.raises(InternalError, match=r"a module file must end in \.py, got .*kernel\.txt"):
        load_module(TEXT, tmp_path / "kernel.txt")
