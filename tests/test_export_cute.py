"""Exported cute kernels: one file with the building blocks of tiles, which compiles, and on a Hopper GPU runs, without flexc."""

import os
import subprocess
import sys

import pytest
import torch

import flexc
from flexc import pipeline
from flexc.backends import Options, Shapes
from flexc.export import _renamed, _segments, alone_in_a_file, export
from flexc.target import Target
from tests.accuracy import distance, normal, qkv

WITHOUT_FLEXC = """
import sys
sys.modules["flexc"] = None  # an import of flexc fails
sys.path.insert(0, sys.argv[1])
import torch
import exported
"""
COMPILES = (
    WITHOUT_FLEXC
    + """
import cutlass.cute as cute
launcher = exported.FORWARD
with exported._architecture(launcher.arch):
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    cute.compile(launcher.function, *exported._fake(launcher.arguments), stream, options=f"--enable-tvm-ffi --gpu-arch {launcher.arch}")
print("compiled")
"""
)
RUNS = (
    WITHOUT_FLEXC
    + """
given = torch.load(sys.argv[1] + "/given.pt")
results = exported.attention(*given, return_lse=True)
try:
    exported.attention(given[0].requires_grad_(), *given[1:]).sum().backward()
except NotImplementedError as error:
    print(error)
torch.save([x.detach() for x in results], sys.argv[1] + "/results.pt")
"""
)


def variant(device="cpu"):
    slopes, documents = normal(4, device=device), torch.arange(300, device=device) // 110

    def score(score, batch, head, q_idx, kv_idx):
        return torch.tanh(score - slopes[head] * (q_idx - kv_idx))

    def mask(batch, head, q_idx, kv_idx):
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    return score, mask, slopes, documents


def without_flexc(program, folder):
    path = os.pathsep.join(entry for entry in sys.path if entry and not os.path.isdir(os.path.join(entry, "flexc")))
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("FLEXC_")}, "PYTHONPATH": path}
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (72, 40)])
def test_exported_kernel_compiles_without_flexc(dims, tmp_path):
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    shapes = Shapes(1, 4, 2, 300, 300, *dims, torch.bfloat16)
    score, mask, *_ = variant()
    artifact = pipeline.compile_for(score, mask, shapes=shapes, target=Target.parse("sm_90a"), backend="cute", options=Options())
    export(artifact, tmp_path / "exported.py", "0")
    done = without_flexc(COMPILES, tmp_path)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
def test_exported_kernel_runs_without_flexc(tmp_path):
    pytest.importorskip("cutlass")
    score, mask, slopes, documents = variant("cuda")
    q, k, v = qkv(2, 4, 2, 300, dim=64, device="cuda", dtype=torch.bfloat16)
    kernel = flexc.attention(score, mask, backend="cute")
    out, aux = kernel(q, k, v, return_lse=True)
    kernel.export(tmp_path / "exported.py")
    names = [t.name for t in kernel.artifact.traced.tensors]
    torch.save([q, k, v, *({"slopes": slopes, "documents": documents}[name] for name in names)], tmp_path / "given.pt")
    done = without_flexc(RUNS, tmp_path)
    assert "exported without a backward pass" in done.stdout, done.stderr[-2000:]
    found, lse = torch.load(tmp_path / "results.pt")
    assert distance(found, out) == 0 and distance(lse, aux.lse) < 1e-6


def test_building_blocks_keep_the_names_of_locals_and_attributes():
    text = """
import math

WIDTH = 4


@math.decorator
def place(tile, count):
    return tile * WIDTH


def fetch(place, x):
    width = math.place(place, place=WIDTH)
    return place + x.place + width


def use(x):
    return place(x, count=fetch(x, WIDTH))
"""
    expected = text
    for old, new in (
        ("\nWIDTH", "\nown_WIDTH"),
        ("def place", "def own_place"),
        ("tile * WIDTH", "tile * own_WIDTH"),
        ("def fetch", "def own_fetch"),
        ("place=WIDTH", "place=own_WIDTH"),
        ("def use", "def own_use"),
        ("return place(x, count=fetch(x, WIDTH))", "return own_place(x, count=own_fetch(x, own_WIDTH))"),
    ):
        expected = expected.replace(old, new, 1)
    assert _renamed(text, "own_") == expected.rstrip("\n")


def test_statements_are_taken_whole():
    text = "import a\n\n\n@a.decorated\ndef one(x):\n    return x\n\n\nTwo = one | 3\n\n\nclass Three:\n    pass\n"
    assert _segments(text, ("one", "Two")) == "@a.decorated\ndef one(x):\n    return x\n\n\nTwo = one | 3"


def test_a_module_that_imports_more_of_flexc_is_an_error():
    with pytest.raises(flexc.InternalError, match="imports something else of flexc"):
        alone_in_a_file("import torch\n\nfrom flexc.runtime import cute_tiles as tiles\n")
