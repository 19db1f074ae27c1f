"""What reaches a user: the wheel holds the package, its templates and nothing else, and works where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted(path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (path,) = folder.glob("flexc-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The interpreter of a fresh environment that holds the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(command, check=True)
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "wheel.pth").write_text(f"{folder / 'site'}\n{sysconfig.get_path('purelib')}\n")
    return folder / "venv" / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLEXC_"))}
    environment["FLEXC_CACHE_DIR"] = str(cwd / "cache")
    result = subprocess.run([str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_wheel_holds_every_template(wheel):
    assert TEMPLATES
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"flexc/_templates/{name}" for name in TEMPLATES} <= names


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flexc/__init__.py", "flexc/py.typed", "flexc/ir/ops.py", "flexc/codegen/triton/rows.py"} <= set(names)
    assert {name.split("/")[0] for name in names} == {"flexc", next(name.split("/")[0] for name in names if ".dist-info/" in name)}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_installed_wheel_runs_a_kernel(installed, tmp_path):
    script = tmp_path / "variant.py"
    script.write_text(
        "import pathlib, sys, torch, flexc\n"
        "assert 'site' in pathlib.Path(flexc.__file__).parts, flexc.__file__\n"
        "@flexc.mask\n"
        "def causal(batch, head, q_idx, kv_idx):\n"
        "    return q_idx >= kv_idx\n"
        "if __name__ == '__main__':\n"
        "    q, k, v = torch.randn(3, 1, 2, 50, 16)\n"
        "    kernel = flexc.attention(mask_mod=causal)\n"
        "    truth, _ = flexc.reference(None, causal, q, k, v)\n"
        "    assert (kernel(q, k, v) - truth).abs().max() < 1e-5\n"
        "    print(kernel.backend)\n"
    )
    assert run(installed, str(script), cwd=tmp_path).strip() in ("cpu", "triton", "cute")
    text = run(installed, "-m", "flexc", "show", "variant.py:causal", "--backend", "triton", "--target", "sm_80", cwd=tmp_path)
    assert "@triton.jit" in text


def test_editable_install_finds_the_templates_of_the_repository():
    from flexc.codegen import templates

    assert templates.template_folder() == ROOT / "templates"


@pytest.mark.slow
def test_wheel_has_the_version_of_the_package(wheel):
    import flexc

    assert wheel.name.startswith(f"flexc-{flexc.__version__}-")


def test_makefile_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w[\w-]*)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_links_lead_to_files():
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(((?!https?:)[^)#]+)\)", readme):
        assert (ROOT / link).exists(), link
