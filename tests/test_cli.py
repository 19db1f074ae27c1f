"""The command line, in this process through typer's runner and once as `python -m flexc`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexc import settings
from flexc.cli import app
from flexc.runtime.cache import MANIFEST, Cache, key_of

VARIANTS = """\
import torch
import flexc

slopes = torch.tensor([0.5, 0.25])


@flexc.kernel
def alibi(score, batch, head, q_idx, kv_idx):
    return score - slopes[head] * (q_idx - kv_idx)


@flexc.mask
def window(batch, head, q_idx, kv_idx):
    return 0 <= q_idx - kv_idx < 64


def soft_capped(score, batch, head, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def noisy(score, batch, head, q_idx, kv_idx):
    return score + torch.rand(())


def two(a, b):
    return a


width = 64
local = flexc.attention(score_mod=soft_capped, mask_mod=window)
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "variants.py"
    path.write_text(VARIANTS)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    for row in settings.TABLE:
        monkeypatch.delenv(row.variable, raising=False)
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def flexc(*arguments: object, code: int = 0) -> str:
    """stdout of a command that must end with this code; where that is 2, stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stderr if code == 2 else result.stdout


NAMES = ["alibi", "window", "soft_capped", "causal", "local"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_show_prints_source_that_python_can_parse(file, name, backend):
    text = flexc("show", f"{file}:{name}", "--backend", backend, "--head-dim", 64)
    compile(text, "kernel.py", "exec")
    assert str(file.parent) not in text


def test_show_prints_the_graph(file):
    assert "tanh" in flexc("show", f"{file}:soft_capped", "--backend", "cpu", "--emit", "ir")


def test_show_depends_on_target_dtype_and_head_dims(file):
    def show(*options: object) -> str:
        return flexc("show", f"{file}:alibi", "--backend", "triton", *options)

    base = show("--target", "sm_90a", "--dtype", "bfloat16", "--head-dim", 128)
    assert base == show("--target", "sm_90", "--head-dim", 128)
    assert base != show("--target", "sm_90a", "--head-dim", 96, "--head-dim-v", 40)


@pytest.mark.slow
@pytest.mark.parametrize(("emit", "expected"), [("ptx", ".target sm_80"), ("sass", "HMMA"), ("resources", "registers")])
def test_show_compiles_for_a_device_that_is_not_here(file, emit, expected):
    assert expected in flexc("show", f"{file}:alibi", "--backend", "triton", "--target", "sm_80", "--head-dim", 64, "--emit", emit)


@pytest.mark.slow
def test_show_compiles_the_direction_asked_for(file):
    def show(direction: str) -> str:
        options = ("--backend", "triton", "--target", "sm_80", "--head-dim", 64, "--emit", "resources", "--direction", direction)
        return flexc("show", f"{file}:alibi", *options)

    assert "forward_kernel" in show("fwd")
    backward = show("bwd")
    assert "forward_kernel" not in backward
    assert "dq_kernel" in backward


def test_explain_prints_the_work(file):
    text = flexc("explain", f"{file}:local", "--shape", "1,2,1,200,200,32", "--device", "cpu")
    assert "cpu" in text


@pytest.mark.parametrize("name", NAMES)
def test_check_passes(file, name):
    text = flexc("check", f"{file}:{name}", "--shape", "1,2,1,100,90,16,24", "--dtype", "float32", "--device", "cpu")
    assert all(tensor in text for tensor in ("out", "dq", "dk", "dv"))


def test_check_ends_with_one_if_something_is_off(file, monkeypatch):
    import flexc as package

    class Report:
        ok = False

    monkeypatch.setattr(package, "check", lambda kernel, q, k, v: Report())
    flexc("check", f"{file}:causal", "--shape", "1,1,1,8,8,8", "--device", "cpu", code=1)


def test_env_names_versions_devices_and_backends():
    text = flexc("env")
    for expected in ("torch ", "triton ", "devices", "cpu: ", "backends", "cute ", "settings", "FLEXC_CACHE_DIR="):
        assert expected in text


def test_env_says_why_a_backend_is_unavailable(monkeypatch):
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "triton compiles only: no CUDA device" in flexc("env")


def test_env_shows_a_bad_setting_without_failing(monkeypatch):
    monkeypatch.setenv("FLEXC_EAGER", "maybe")
    assert "FLEXC_EAGER: expected 0 or 1, got 'maybe'" in flexc("env")


def test_env_makes_no_cache(own_cache):
    flexc("env")
    assert not own_cache.exists()


def test_cache_info_clear_verify(own_cache):
    cache = Cache(own_cache)
    entry = cache.put(key_of(a=1), {"kernel.py": "x = 1\n"})
    assert "1 entries" in flexc("cache", "info")
    assert "1 entries, 0 damaged" in flexc("cache", "verify")
    (entry.folder / MANIFEST).write_text("{")
    text = flexc("cache", "verify", code=1)
    assert str(entry.folder) in text
    assert "1 damaged" in text
    assert "removed 1 entries" in flexc("cache", "clear")
    assert "0 entries" in flexc("cache", "info")


# What users get wrong: one message on stderr, exit code 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{file}", "InputError: expected FILE.py:NAME, got '"),
        ("{file}:", "InputError: expected FILE.py:NAME, got '"),
        ("nowhere.py:alibi", "InputError: no such file: nowhere.py"),
        ("{file}:alibbi", "has no 'alibbi'; did you mean 'alibi'?"),
        ("{file}:zzzz", "has no 'zzzz'"),
        ("{file}:width", "width is of type int; expected a Kernel, a Mask, a score function (score, batch, head, q_idx, kv_idx) or a mask"),
        ("{file}:torch", "torch is of type module; expected a Kernel"),
        ("{file}:two", "two is of type function; expected a Kernel"),
    ],
)
def test_name_that_cannot_be_shown(file, name, message):
    assert message in flexc("show", name.format(file=file), "--backend", "cpu", code=2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef f(:\n", "bad.py cannot be imported: invalid syntax at line 2"),
        ("x = 1\n\nraise RuntimeError('no data')\n", "bad.py cannot be imported: RuntimeError: no data at line 3"),
        (
            "import a_package_that_is_not_there\n",
            "bad.py cannot be imported: ModuleNotFoundError: No module named 'a_pack",
        ),
    ],
)
def test_file_that_cannot_be_imported(tmp_path, source, message):
    (tmp_path / "bad.py").write_text(source)
    assert message in flexc("show", f"{tmp_path / 'bad.py'}:f", code=2)


def test_file_that_is_not_python(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert "InputError: expected a Python file, got" in flexc("show", f"{tmp_path / 'notes.txt'}:f", code=2)


def test_file_sees_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_variants.py").write_text("limit = 7\n")
    (tmp_path / "variants.py").write_text(
        "from neighbour_of_variants import limit\ndef near(batch, head, q_idx, kv_idx):\n    return q_idx - kv_idx < limit\n"
    )
    assert "7" in flexc("show", f"{tmp_path / 'variants.py'}:near", "--backend", "cpu", "--emit", "ir")


def test_function_that_cannot_be_traced_is_one_message(file):
    text = flexc("show", f"{file}:noisy", "--backend", "cpu", code=2)
    assert text.startswith("TraceError: ")
    assert "variants.py:" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "sm_70"], "UnsupportedError: unknown target 'sm_70'; known: sm_80"),
        (["--backend", "metal"], "Invalid value for '--backend'"),
        (["--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--head-dim", "0"], "Invalid value for '--head-dim'"),
        (["--heads", "6", "--heads-kv", "4"], "ShapeError: expected --heads to be a multiple of --heads-kv, got 6 and 4"),
        (["--backend", "cpu", "--emit", "ptx"], "InputError: the cpu backend has no machine code"),
        (["--backend", "triton", "--target", "cpu"], "InputError: the triton backend compiles for a GPU"),
    ],
)
def test_option_that_is_not_one(file, options, message):
    assert message in flexc("show", f"{file}:alibi", *options, code=2)


@pytest.mark.parametrize("shape", ["1,2,3", "1,2,1,a,b,c", "1,2,1,8,8,0", "1,2,1,8,8,8,8,8", ""])
def test_shape_that_is_not_one(file, shape):
    message = "ShapeError: expected --shape B,Hq,Hkv,Sq,Skv,D[,Dv] of positive numbers, got"
    assert message in flexc("check", f"{file}:alibi", "--shape", shape, code=2)


def test_device_that_is_not_one(file):
    text = flexc("check", f"{file}:alibi", "--shape", "1,1,1,8,8,8", "--device", "gpu", code=2)
    assert "InputError: expected --device cpu, cuda or cuda:N, got 'gpu'" in text


def test_heads_that_do_not_divide(file):
    assert "ShapeError" in flexc("check", f"{file}:soft_capped", "--shape", "1,3,2,8,8,8", "--device", "cpu", code=2)


def test_bad_setting_is_one_message(monkeypatch):
    monkeypatch.setenv("FLEXC_CACHE_SIZE", "much")
    assert "SettingError: FLEXC_CACHE_SIZE: expected a number of bytes" in flexc("cache", "info", code=2)


def test_runs_as_a_module(file, own_cache):
    command = [sys.executable, "-m", "flexc", "show", f"{file}:nothing", "--backend", "cpu"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("InputError: ")
    assert "Traceback" not in result.stderr
