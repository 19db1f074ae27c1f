"""What compiles anew and what does not: changing numbers, growing lengths, functions made again each step, other processes, threads."""

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import flexc
from flexc import backends, pipeline
from flexc.reference import reference
from tests.accuracy import normal, qkv


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.fixture
def compiled(monkeypatch):
    """The artifacts compiled by the test."""
    pipeline.clear_cache()
    made = []
    compile_attention = pipeline.compile_attention

    def counting(*args, **options):
        made.append(compile_attention(*args, **options))
        return made[-1]

    monkeypatch.setattr(pipeline, "compile_attention", counting)
    return made


def check(kernel, q, k, v):
    torch.testing.assert_close(kernel(q, k, v).double(), reference(kernel.score_mod, kernel.mask_mod, q, k, v)[0], rtol=1e-4, atol=1e-4)


# --- numbers -----------------------------------------------------------------------------------------------------------------------


def test_window_that_changes_each_step_compiles_twice(compiled):
    q, k, v = qkv(q_len=70)
    for width in range(10, 22):

        def window(batch, head, q_idx, kv_idx, width=width):
            return (q_idx - kv_idx < width) & (q_idx >= kv_idx)

        check(flexc.attention(None, window), q, k, v)
    assert len(compiled) == 2


def test_global_number_that_changes_compiles_twice(compiled, monkeypatch):
    q, k, v = qkv(q_len=40)
    kernel = flexc.attention(lambda s, b, h, i, j: s * FACTOR)
    for factor in (1.0, 0.5, 0.25, 3.0, 1.0, 0.5):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        check(kernel, q, k, v)
    assert len(compiled) == 2


FACTOR = 1.0


def test_lengths_that_a_mask_captures_compile_twice(compiled):
    """allowed iff i - L >= j - S: attention whose last query sees the last key."""
    for q_len, kv_len in ((70, 90), (71, 91), (65, 120), (100, 100), (80, 81)):
        check(flexc.attention(None, lambda b, h, i, j, m=q_len, n=kv_len: i - m >= j - n), *qkv(q_len=q_len, kv_len=kv_len))
    assert len(compiled) == 2


def test_functions_that_differ_in_a_default_alone_are_two(compiled):
    q, k, v = qkv(q_len=40)
    make = [eval(f"lambda s, b, h, i, j, c={c}: s * c") for c in ("1", "2", "1.0", "-0.0")]
    outs = [flexc.attention(score)(q, k, v) for score in make]
    for out, factor in zip(outs, (1, 2, 1, 0)):
        truth = reference(lambda s, b, h, i, j, c=factor: s * c, None, q, k, v)[0]
        torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-4)
    assert not outs[0].equal(outs[1])


def test_number_in_a_tensor_never_compiles_anew(compiled):
    """A length that lives on the device and is made anew each step."""
    q, k, v = qkv(q_len=70, grad=True)
    for length in range(40, 50):
        limit = torch.tensor(length)
        kernel = flexc.attention(None, lambda b, h, i, j, limit=limit: j < limit)
        check(kernel, q, k, v)
        kernel(q, k, v).sum().backward()
    assert len(compiled) == 1


# --- sizes -------------------------------------------------------------------------------------------------------------------------


def test_keys_that_grow_token_by_token_compile_at_most_twice(compiled):
    q, k, v = qkv(heads=4, q_len=1, kv_len=227)
    for length in range(28, 228):
        out = flexc.attention(None, lambda b, h, i, j, n=length: i + n - 1 >= j)(q, k[:, :, :length], v[:, :, :length])
        assert out.isfinite().all()
    # The number as a constant, then as an argument; blocks of 64 keys, then of 128.
    assert len(compiled) <= 3


@pytest.mark.parametrize("transposed", [False, True])
def test_decoding_with_a_growing_cache_is_one_kernel(compiled, transposed):
    q, k, v = qkv(batch=1, heads=16, kv_heads=16, q_len=1, kv_len=227, dim=64, dtype=torch.float16)
    if transposed:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    kernel = flexc.attention(lambda s, b, h, i, j: s - h * j * 0.001)
    for length in range(128, 228):
        kernel(q, k[:, :, :length], v[:, :, :length])
    assert len(compiled) == 1


def test_lengths_of_a_training_run_are_one_kernel(compiled):
    kernel = flexc.attention(None, causal)
    for length in (320, 256, 192, 128):
        check(kernel, *qkv(q_len=length))
    assert len(compiled) == 1


def test_batch_and_head_counts_are_no_part_of_a_kernel(compiled):
    kernel = flexc.attention(lambda s, b, h, i, j: s + b + h, causal)
    for batch, heads, kv_heads in ((1, 4, 2), (3, 4, 2), (2, 8, 4), (2, 4, 1)):
        check(kernel, *qkv(batch=batch, heads=heads, kv_heads=kv_heads, q_len=70))
    assert len(compiled) == 1


def test_dtypes_are_part_of_a_kernel_and_on_the_cpu_head_dims_are_not(compiled):
    kernel = flexc.attention(None, causal)
    for sizes in ({}, {"dim": 16}, {"v_dim": 16}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}, {}):
        kernel(*qkv(**sizes))
    assert len({artifact.key for artifact in compiled}) == len(compiled) == 3


# --- functions made again ---------------------------------------------------------------------------------------------------------------


def test_closure_made_anew_each_step_compiles_once(compiled):
    q, k, v = qkv(q_len=70)

    def make(seed):
        slopes = normal(4, seed=seed)

        def score(s, batch, head, q_idx, kv_idx):
            return s - slopes[head] * (q_idx - kv_idx)

        return score

    for seed in range(5):
        check(flexc.attention(make(seed), flexc.masks.causal), q, k, v)
    assert len(compiled) == 1


def test_masks_combined_anew_each_step_compile_once(compiled):
    for step in range(4):
        ids = (torch.arange(70) + step) // 20
        check(flexc.attention(None, flexc.masks.causal & flexc.masks.document(ids)), *qkv(q_len=70))
    assert len(compiled) == 1


def test_training_step_compiles_once(compiled):
    w = torch.nn.Parameter(normal(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    q, k, v = qkv(q_len=70)
    for _ in range(5):
        optimizer.zero_grad()
        flexc.attention(lambda s, b, h, i, j: s * w[h], causal)(q, k, v).square().sum().backward()
        optimizer.step()
    assert len(compiled) == 1


def test_tensor_that_begins_to_require_a_gradient_compiles_anew(compiled):
    w, (q, k, v) = normal(4), qkv(q_len=40)
    kernel = flexc.attention(lambda s, b, h, i, j: s * w[h])
    kernel(q, k, v)
    w.requires_grad_()
    kernel(q, k, v).sum().backward()
    assert w.grad.any() and len(compiled) == 2
    with torch.no_grad():
        kernel(q, k, v)
    assert len(compiled) == 2


# --- threads -------------------------------------------------------------------------------------------------------------------------


def test_threads_that_call_at_once_compile_once(compiled):
    q, k, v = qkv(q_len=70)
    kernel = flexc.attention(lambda s, b, h, i, j: torch.tanh(s) * 3, causal)
    start, outs = threading.Barrier(4), []

    def run():
        start.wait()
        outs.append(kernel(q, k, v))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(outs) == 4
    truth = reference(kernel.score_mod, causal, q, k, v)[0]
    assert all(torch.allclose(out.double(), truth, atol=1e-5) for out in outs)


def test_threads_with_different_lengths_get_their_own_maps():
    kernel = flexc.attention(None, causal)
    cases = {length: qkv(q_len=length) for length in (50, 70, 130, 200)}
    truths = {length: reference(None, causal, *inputs)[0] for length, inputs in cases.items()}
    wrong = []

    def run(length):
        (q, k, v), truth = cases[length], truths[length]
        for _ in range(10):
            if not torch.allclose(kernel(q, k, v).double(), truth, atol=1e-5):
                wrong.append(length)

    threads = [threading.Thread(target=run, args=(length,)) for length in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- the disk cache ------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import dataclasses, sys
import torch, flexc
from flexc import backends

emitted = []
emit = backends.CPU.emit
object.__setattr__(backends.CPU, "emit", lambda *args: emitted.append(args) or emit(*args))

factor = {factor}

def soft(score, batch, head, q_idx, kv_idx):
    return factor * torch.tanh(score / factor)

x = torch.arange(2 * 70 * 8.0).reshape(1, 2, 70, 8) / 1000
kernel = flexc.attention(soft, flexc.masks.causal)
print(len(emitted), kernel(x, x, x).double().sum().item(), len(emitted), kernel.key)
"""


def in_a_process(folder, factor=20.0):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(factor=factor)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "FLEXC_CACHE_DIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    before, total, after, key = done.stdout.split()
    assert before == "0"
    return float(total), int(after), key


def test_second_process_compiles_nothing(tmp_path):
    total, emitted, key = in_a_process(tmp_path / "cache")
    assert emitted == 1
    again, emitted, same = in_a_process(tmp_path / "cache")
    assert emitted == 0 and again == total and same == key
    other, emitted, other_key = in_a_process(tmp_path / "cache", factor=0.02)
    assert emitted == 1 and other != total and other_key != key


@pytest.fixture
def emitted(monkeypatch, tmp_path):
    """Texts emitted by the test, with a disk cache of its own."""
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "cache"))
    texts = []
    emit = backends.CPU.emit
    # The backend is one object that everyone refers to.
    object.__setattr__(backends.CPU, "emit", lambda *args: texts.append(emit(*args)) or texts[-1])
    yield texts
    object.__setattr__(backends.CPU, "emit", emit)


def test_what_memory_forgot_is_read_from_disk(emitted):
    pipeline.clear_cache()
    q, k, v = qkv(q_len=40)
    first = flexc.attention(None, causal)
    out = first(q, k, v)
    pipeline.clear_cache()
    second = flexc.attention(None, causal)
    assert second(q, k, v).equal(out)
    assert len(emitted) == 1 and first.artifact is not second.artifact and first.key == second.key and first.source == second.source


@pytest.mark.parametrize("damage", ["truncated", "other text", "removed", "manifest"])
def test_damaged_entry_is_compiled_again(emitted, damage):
    pipeline.clear_cache()
    q, k, v = qkv(q_len=40)
    kernel = flexc.attention(None, causal)
    out = kernel(q, k, v)
    file = Path(kernel.artifact.path)
    text = file.read_text()
    if damage == "truncated":
        file.write_text(text[: len(text) // 2])
    elif damage == "other text":
        file.write_text(text.replace("-math.inf", "0.0"))
    elif damage == "removed":
        file.unlink()
    else:
        (file.parent / "manifest.json").write_text("{")
    pipeline.clear_cache()
    assert flexc.attention(None, causal)(q, k, v).equal(out)
    assert len(emitted) == 2 and file.read_text() == text


def test_title_is_part_of_the_key():
    """It heads the source; two variants of equal mathematics are two files with two names."""

    def make(name):
        def score(s, batch, head, q_idx, kv_idx):
            return s * 2

        score.__name__ = name
        return score

    shapes = backends.Shapes(1, 2, 2, 128, 128, 64, 64, torch.float16)
    compile_for = functools.partial(pipeline.compile_for, mask_mod=None, shapes=shapes, target=flexc.Target.parse("sm_90"))
    first, second = compile_for(make("doubled")), compile_for(make("twice"))
    assert first.key != second.key and "doubled" in first.source and "twice" in second.source


def test_key_and_source_do_not_depend_on_what_was_traced_before():
    """Nodes are shared by all functions of a process, and hold the line that made them last: another process would compile anew."""

    def mine(s, batch, head, q_idx, kv_idx):
        return torch.tanh(s * 3.0) + 1.0

    shapes = backends.Shapes(1, 2, 2, 128, 128, 64, 64, torch.float32)
    for target in ("cpu", "sm_90"):
        pipeline.clear_cache()
        compile_for = functools.partial(pipeline.compile_for, mask_mod=None, shapes=shapes, target=flexc.Target.parse(target))
        first = compile_for(mine)
        other = compile_for(lambda s, b, h, i, j: torch.tanh(s * 3.0) + 1.0)
        compile_for(lambda s, b, h, i, j: 3.0 * (1.0 - torch.tanh(s * 3.0) * torch.tanh(s * 3.0)))  # the derivative of mine
        emitted = first.backend.emit(first.lowered, first.plan, first.target, "mine")
        second = compile_for(mine)
        assert first.key == second.key != other.key
        assert second.backend.emit(second.lowered, second.plan, second.target, "mine") == emitted
        assert "return torch.tanh(s * 3.0) + 1.0" in str(second.graph)
        assert "lambda" not in str(second.lowered) and "lambda" not in emitted


def test_every_choice_is_part_of_the_key():
    """Target, dtype, head dims, ratio of heads, precision, constants, mask: a coarse key runs the wrong kernel in silence."""
    shapes = backends.Shapes(1, 4, 2, 128, 128, 64, 64, torch.bfloat16)
    scale = 2.0

    def score(s, batch, head, q_idx, kv_idx):
        return torch.tanh(s) * scale

    def key(score=score, mask=None, target="sm_90", precision="fast", backend="triton", **sizes):
        made = backends.Shapes(**{**vars(shapes), **sizes})
        options = backends.Options(precision=precision)
        return pipeline.compile_for(score, mask, shapes=made, target=flexc.Target.parse(target), backend=backend, options=options).key

    keys = [
        key(),
        key(target="sm_80"),
        key(precision="exact"),
        key(dtype=torch.float16),
        key(head_dim=128),
        key(head_dim_v=128),
        key(heads_kv=4),
        key(mask=causal),
        key(score=lambda s, b, h, i, j: torch.tanh(s) * 3.0),
        key(score=None),
        key(target="cpu", backend="cpu"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0] and key(q_len=4096, batch=7) == keys[0]
