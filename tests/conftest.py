"""What all tests share: tests marked `gpu` are skipped where there is none, and `backend` names each backend that can run here."""

import os
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the texts in tests/golden instead of comparing with them")


def pytest_configure(config):
    torch.set_num_threads(1)  # the tensors here are small: more threads only wait for each other
    config.addinivalue_line("markers", "interpret: runs kernels in Triton's interpreter, in a process of its own")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    """Tests leave nothing in the user's cache and find nothing there; FLEXC_CACHE_DIR in the environment overrides."""
    with pytest.MonkeyPatch.context() as patch:
        if "FLEXC_CACHE_DIR" not in os.environ:
            patch.setenv("FLEXC_CACHE_DIR", str(tmp_path_factory.mktemp("flexc-cache", numbered=True)))
        yield


@pytest.fixture
def golden(request):
    """`golden(name, text)`: the text is what the file of this name in tests/golden says; --update-golden writes it there instead."""

    def compare(name, text):
        file = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert text == (file.read_text(encoding="utf-8") if file.is_file() else ""), f"{name} differs; pytest --update-golden rewrites it"

    return compare


@pytest.fixture
def nodes_without_lines():
    """For tests that look at the lines in a text: nodes are shared by all graphs of a process, and so are the lines of what was traced."""
    from flexc import frontend
    from flexc.ir import graph

    frontend.clear_cache()
    for node in list(graph._interned.values()):
        object.__setattr__(node, "where", None)


@pytest.fixture(params=["cpu", pytest.param("triton", marks=pytest.mark.gpu)])
def backend(request):
    """The name of a backend. Triton's interpreter is not among them: it has a process of its own, see contract/test_interpreted.py."""
    return request.param


@pytest.fixture
def device(backend):
    """Where the backend runs."""
    return torch.device("cpu" if backend == "cpu" else "cuda")
