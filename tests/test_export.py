"""An exported file runs in a process that cannot import flexc, and computes what the kernel computed, forward and backward."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import flexc
from flexc import backends
from flexc.check import compare
from flexc.errors import InputError, UnsupportedError
from flexc.export import exported
from tests.accuracy import normal, qkv

slopes = normal(4, seed=7, grad=True)
LENGTH = 100 if backends.is_interpreted() else 300  # several blocks: of 32 tokens in the interpreter, of 128 on the CPU
documents = torch.arange(LENGTH) // (LENGTH // 3)
limits = torch.tensor([[30], [90]], dtype=torch.int16)
few = torch.tensor([True, False, True])


def score(score, batch, head, q_idx, kv_idx):
    return score - slopes[head] * (q_idx - kv_idx)


def documents_and_more(batch, head, q_idx, kv_idx):
    return (documents[q_idx] == documents[kv_idx]) & (q_idx - kv_idx < span + limits[batch, 0]) & (q_idx + head >= kv_idx)


span = flexc.runtime(5)

CASES = {
    "documents": (score, documents_and_more),
    "plain": (None, None),
    "causal": (score, flexc.masks.causal),
    "by head": (None, lambda b, h, i, j: (i >= j) | (h == 2)),
    "by batch": (score, lambda b, h, i, j: j < limits[b, 0]),
    "arithmetic": (None, lambda b, h, i, j: ((i // 7 - j % 5) * 0.5 < 3.25) ^ (torch.where(i > j, i, -j) > 40)),
    "no pair": (None, lambda b, h, i, j: j < -1),
    "every pair": (None, lambda b, h, i, j: True),
    "past the end": (None, lambda b, h, i, j: few[i] | (i == j)),
}


def case(name, backend):
    return flexc.attention(*CASES[name], backend=backend)


def inputs():
    return qkv(q_len=LENGTH, dim=16, v_dim=32, grad=True)


def run_case(name, backend, path):
    """Run a kernel and export it; what is captured, in the order of the exported function's arguments."""
    kernel = case(name, backend)
    kernel(*inputs(), return_lse=True)
    kernel.export(path)
    graph, binding = (found for found in flexc.frontend.trace(kernel.score_mod, kernel.mask_mod))
    assert [t.name for t in graph.graph.tensors] == [t.name for t in kernel.artifact.traced.tensors]
    return kernel, [*binding.tensors, *binding.scalars]


ALONE = """
import importlib.util, sys, warnings
warnings.simplefilter("ignore")
sys.modules["flexc"] = None  # an import of flexc fails
import torch
try:
    import flexc
    raise SystemExit("flexc can be imported")
except ImportError:
    pass
given = torch.load(sys.argv[1])
results = {}
for name, (path, captured) in given["kernels"].items():
    spec = importlib.util.spec_from_file_location(path.split("/")[-1][:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    q, k, v = (x.requires_grad_() for x in given["inputs"])
    arguments = [x.clone().requires_grad_(needs) if torch.is_tensor(x) else x for x, needs in captured]
    wanted = [q, k, v, *(x for x in arguments if torch.is_tensor(x) and x.requires_grad)]
    for length in (q.shape[2], 61):
        out, lse = module.attention(q[:, :, :length], k, v, *arguments, return_lse=True)
        loss = (out * given["dout"][:, :, :length]).sum() + torch.where(lse.isfinite(), lse, 0).sum()
        results[name, length] = (out.detach(), lse.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True))
torch.save(results, sys.argv[1])
"""


def results_of(kernel, captured, dout):
    """What the process without flexc computes, by flexc."""
    q, k, v = inputs()
    wanted = [q, k, v, *(x for x in captured if torch.is_tensor(x) and x.requires_grad)]
    for length in (LENGTH, 61):
        out, aux = kernel(q[:, :, :length], k, v, return_lse=True)
        loss = (out * dout[:, :, :length]).sum() + torch.where(aux.lse.isfinite(), aux.lse, 0).sum()
        yield length, (out.detach(), aux.lse.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True))


def differences(names, backend, folder):
    """Where an exported kernel differs from the kernel, or the kernel from the reference; "" if nowhere."""
    wrong, expected, kernels = [], {}, {}
    dout = normal(2, 4, LENGTH, 32, seed=9)
    for number, name in enumerate(names):
        path = folder / f"exported_{number}.py"
        kernel, captured = run_case(name, backend, path)
        if name != "past the end":  # the reference refuses an index that kernels read as 0
            report = compare(kernel, *inputs(), {})
            wrong += [] if report.ok else [f"{name}: the kernel itself is wrong\n{report}"]
        expected |= {(name, length): found for length, found in results_of(kernel, captured, dout)}
        plain = [(x.detach(), x.requires_grad) if torch.is_tensor(x) else (int(x), False) for x in captured]
        kernels[name] = str(path), plain
    data = folder / "data.pt"
    torch.save({"inputs": [x.detach() for x in inputs()], "kernels": kernels, "dout": dout}, data)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLEXC_")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(data)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"exit status {done.returncode}: {done.stderr}"
    results = torch.load(data)
    assert set(results) == set(expected)
    for case_and_length, ours in results.items():
        for index, (x, y) in enumerate(zip(ours, expected[case_and_length], strict=True)):
            if (x is None) != (y is None) or (x is not None and not torch.allclose(x, y, rtol=1e-5, atol=1e-5)):
                wrong.append(f"{case_and_length}: result {index} differs")
    return "\n".join(wrong)


def test_exported_cpu_kernels_run_without_flexc(tmp_path):
    assert differences(CASES, "cpu", tmp_path) == ""


INTERPRETED = """
import pathlib, sys, warnings
warnings.simplefilter("ignore")
from tests.test_export import differences
print(differences(("documents", "plain", "by head", "no pair"), "triton", pathlib.Path(sys.argv[1])), end="")
"""


@pytest.mark.interpret
def test_exported_triton_kernels_run_without_flexc(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr + done.stdout


# --- the file --------------------------------------------------------------------------------------------------------------------------


def function_of(text, name):
    (found,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    return found


def test_arguments_are_called_as_the_user_calls_them(tmp_path):
    run_case("documents", "cpu", tmp_path / "one.py")
    function = function_of((tmp_path / "one.py").read_text(), "attention")
    assert [a.arg for a in function.args.args] == ["q", "k", "v", "slopes", "documents", "limits", "span"]
    assert [a.arg for a in function.args.kwonlyargs] == ["scale", "return_lse"]
    assert "span: captured number, int32." in ast.get_docstring(function)


def test_captured_names_do_not_hide_those_of_the_launcher(tmp_path):
    def variant(math, lse):
        return lambda score, batch, head, q_idx, kv_idx: score + math[head] + lse[head]

    first, second = normal(4, seed=1), normal(4, seed=2)
    kernel = flexc.attention(variant(first, second))
    q, k, v = inputs()
    out = kernel(q, k, v)
    kernel.export(tmp_path / "named.py")
    module = load(tmp_path / "named.py")
    torch.testing.assert_close(module.attention(q, k, v, math_=first, lse_=second), out)


def load(path):
    from flexc.runtime.module import load_module

    return load_module(path.read_text(), path)


def test_mask_is_printed_with_the_users_lines(tmp_path):
    run_case("documents", "cpu", tmp_path / "one.py")
    text = (tmp_path / "one.py").read_text()
    body = text[text.index("def _allowed_pairs") : text.index("def _number")]
    assert "_element(tensors[1], q_idx)" in body and "# test_export.py:" in body and "import flexc" not in text
    assert str(tmp_path) not in text and "/tests/" not in text


def test_blocks_are_found_again_when_a_captured_tensor_changes(tmp_path):
    shown = torch.tensor([True] * LENGTH)
    kernel = flexc.attention(None, lambda b, h, i, j: shown[j], backend="cpu")
    q, k, v = inputs()
    before = kernel(q, k, v)
    kernel.export(tmp_path / "shown.py")
    module = load(tmp_path / "shown.py")
    torch.testing.assert_close(module.attention(q, k, v, shown), before)
    shown[:200] = False
    torch.testing.assert_close(module.attention(q, k, v, shown), kernel(q, k, v))
    assert not kernel(q, k, v).allclose(before)
    other = torch.tensor([True] * LENGTH)
    other[:1] = True  # written to as often as `shown`
    torch.testing.assert_close(module.attention(q, k, v, other), before)


def test_exported_function_refuses_what_does_not_fit(tmp_path):
    run_case("plain", "cpu", tmp_path / "one.py")
    attention = load(tmp_path / "one.py").attention
    q, k, v = inputs()
    with pytest.raises(ValueError, match="expected q to have 4 dimensions and dtype float32"):
        attention(q.half(), k, v)
    with pytest.raises(ValueError, match="sizes do not fit"):
        attention(q, k[:, :, :5], v)
    with pytest.raises(ValueError, match="expected scale > 0, got -1.0"):
        attention(q, k, v, scale=-1)


def test_spec_exports_a_call_that_never_ran(tmp_path):
    kernel = case("documents", "triton")
    path = kernel.export(tmp_path / "hopper.py", {"target": "sm_90", "heads": 4, "heads_kv": 2, "head_dim": 64})
    text = path.read_text()
    assert "arch             sm_90a" in text and "torch.bfloat16" in text and '"dkv": (' in text
    assert "(64, 64, 2)" in text.replace("\n", "")
    compile(text, str(path), "exec")


def test_export_before_a_call_says_what_to_do(tmp_path):
    with pytest.raises(flexc.FlexcError, match="has not run yet"):
        case("plain", "cpu").export(tmp_path / "one.py")


@pytest.mark.parametrize("name", ["kernel.txt", "my-kernel.py", "class.py", "2.py", ".py"])
def test_file_that_cannot_be_imported_is_refused(tmp_path, name):
    kernel = case("plain", "cpu")
    kernel(*inputs())
    with pytest.raises(InputError, match="expected a file that can be imported"):
        kernel.export(tmp_path / name)


def test_folder_that_is_not_there_is_refused(tmp_path):
    kernel = case("plain", "cpu")
    kernel(*inputs())
    with pytest.raises(InputError, match="expected a file in a folder that exists"):
        kernel.export(tmp_path / "none" / "one.py")


def test_what_has_no_single_kernel_is_refused():
    with pytest.raises(UnsupportedError, match="export of a decoding step, which is two kernels"):
        exported(SimpleNamespace(backend=backends.DECODE), "0")
    kernel = case("plain", "cpu")
    kernel(*inputs(), return_max_scores=True)
    with pytest.raises(UnsupportedError, match="export of a kernel that returns the largest scores: .*or give a spec"):
        exported(kernel.artifact, "0")


def test_failed_write_leaves_no_file(tmp_path, monkeypatch):
    kernel = case("plain", "cpu")
    kernel(*inputs())
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        kernel.export(tmp_path / "one.py")
    assert list(tmp_path.iterdir()) == []
