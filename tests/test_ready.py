"""Repeated calls: what was checked once is not checked again, and whatever differs is noticed."""

import dataclasses
import gc
import importlib
import weakref
from pathlib import Path

import pytest
import torch

import flexc
from flexc import settings
from flexc.backends import Call
from flexc.errors import InputError, ShapeError, UnsupportedError
from flexc.launch import MAPS, Launch, Remembered
from tests.accuracy import normal, qkv

prepare = importlib.import_module("flexc.prepare")


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.fixture
def checked(monkeypatch):
    """The calls whose inputs were checked."""
    seen, check = [], prepare.refuse_what_is_no_input
    monkeypatch.setattr(prepare, "refuse_what_is_no_input", lambda q, k, v: (seen.append(q), check(q, k, v)))
    return seen


def test_equal_inputs_are_checked_once(checked):
    kernel = flexc.attention(None, causal)
    for seed in range(3):
        q, k, v = qkv(q_len=20, seed=seed)
        torch.testing.assert_close(kernel(q, k, v).double(), flexc.reference(None, causal, q, k, v)[0], atol=1e-5, rtol=1e-5)
    kernel(q, k, v, scale=0.5)
    kernel(q, k, v, return_lse=True)
    assert len(checked) == 1


def test_what_differs_is_checked_again(checked):
    kernel = flexc.attention(None, causal)
    q, k, v = qkv(q_len=20)
    others = [
        (q[:1], k[:1], v[:1]),
        (q[:, :, :19], k, v),
        (q.mT.contiguous().mT, k, v),
        tuple(x.bfloat16() for x in (q, k, v)),
        tuple(torch.cat([x, x], 3)[..., :32] for x in (q, k, v)),
        (torch.nn.functional.pad(q.flatten(), (1, 0))[1:].view(q.shape), k, v),  # at another address
    ]
    kernel(q, k, v)
    for inputs in others:
        before = len(checked)
        for _ in range(2):
            expected = flexc.reference(None, causal, *inputs)[0]
            torch.testing.assert_close(kernel(*inputs).double(), expected, atol=0.02, rtol=0.02)
        assert len(checked) > before


@pytest.fixture
def looked_up(monkeypatch):
    """The calls whose inputs were looked up, not only compared with those of the last calls."""
    ready, seen = importlib.import_module("flexc.ready"), []
    find = ready.likeness_of
    monkeypatch.setattr(ready, "likeness_of", lambda *given: (seen.append(given), find(*given))[1])
    return seen


def test_inputs_like_the_last_ones_are_not_looked_up(looked_up):
    kernel = flexc.attention(None, causal)
    q, k, v = qkv(q_len=20)
    for _ in range(5):
        kernel(q, k, v)
    assert len(looked_up) == 2
    kernel(q, k, v, scale=0.5)
    kernel(q, k, v, return_lse=True)
    assert len(looked_up) == 2
    unaligned = torch.nn.functional.pad(q.flatten(), (1, 0))[1:].view(q.shape)
    different = (q[:1], k[:1], v[:1]), (unaligned, k, v), (q, k, v.mT.contiguous().mT), (q.clone().requires_grad_(), k, v)
    for number, inputs in enumerate(different, 3):
        # float32 sums of 20 keys, against float64
        torch.testing.assert_close(kernel(*inputs).double(), flexc.reference(None, causal, *inputs)[0], atol=1e-5, rtol=1e-5)
        assert len(looked_up) == number


def test_kinds_of_inputs_in_turns_are_only_looked_up(looked_up, monkeypatch):
    """To prepare a comparison for each would take longer than to look them up."""
    ready = importlib.import_module("flexc.ready")
    monkeypatch.setattr(ready, "like", lambda tensors: pytest.fail("prepared a comparison"))
    kernel, kinds = flexc.attention(None, causal), [qkv(q_len=20), qkv(q_len=30)]
    for turn in range(10):
        kernel(*kinds[turn % 2])
    assert len(looked_up) == 10


def test_inputs_that_need_a_copy_are_copied_each_time():
    kernel = flexc.attention(None, causal)
    q, k, v = (x.mT.contiguous().mT for x in qkv(q_len=20))
    for seed in range(3):
        with torch.no_grad():
            q.copy_(normal(*q.shape, seed=seed))
        expected = flexc.reference(None, causal, q, k, v)[0]
        torch.testing.assert_close(kernel(q, k, v).double(), expected, atol=1e-5, rtol=1e-5)
        expected = flexc.reference(None, causal, q, k, v, scale=-0.5)[0]
        torch.testing.assert_close(kernel(q, k, v, scale=-0.5).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_launch_for_copies_is_not_kept_for_the_inputs():
    """A negative scale turns q around in a copy, which is aligned even if q is not."""
    kernel = flexc.attention(None, causal)
    q, k, v = qkv(q_len=20)
    kernel(q, k, v, scale=-1.0)
    kernel(q.mT.contiguous().mT, k, v)
    assert len(kernel._ready) == 0
    kernel(q, k, v)
    assert len(kernel._ready) == 1


def test_bad_inputs_after_good_ones_are_refused():
    kernel = flexc.attention(None, causal)
    q, k, v = qkv(q_len=20)
    kernel(q, k, v)
    with pytest.raises(ShapeError, match="q has 3 dimensions"):
        kernel(q[0], k, v)
    with pytest.raises(InputError, match="k has layout torch.sparse_coo"):
        kernel(q, k.to_sparse(), v)
    with pytest.raises(InputError, match="q is a list; expected a torch.Tensor"):
        kernel([q], k, v)
    with pytest.raises(InputError, match="scale is a str; expected a number"):
        kernel(q, k, v, scale="0.5")
    with pytest.raises(InputError, match="scale must be finite"):
        kernel(q, k, v, scale=float("inf"))


def test_a_captured_table_that_shrinks_is_refused():
    q, k, v = qkv(q_len=20)
    tables = [normal(4)]
    kernel = flexc.attention(lambda s, b, h, i, j: s * tables[0][h])
    kernel(q, k, v)
    tables[0] = normal(3)
    with pytest.raises(ShapeError, match="has 3 entries along dimension 0, which `head` indexes"):
        kernel(q, k, v)


def test_run_time_numbers_of_each_call_count():
    q, k, v = qkv(q_len=20)
    factor = 1.0
    kernel = flexc.attention(lambda s, b, h, i, j: s * factor)
    for factor in (1.0, 2.0, 3.0, 3.0, -0.0):
        expected = flexc.reference(lambda s, b, h, i, j, f=factor: s * f, None, q, k, v)[0]
        torch.testing.assert_close(kernel(q, k, v).double(), expected, atol=1e-5, rtol=1e-5)


def test_settings_and_flags_that_change_are_noticed(monkeypatch, tmp_path):
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    kernel(q, k, v)
    assert not kernel._last[0].options.deterministic
    torch.use_deterministic_algorithms(True)
    try:
        kernel(q, k, v)
        assert kernel._last[0].options.deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("FLEXC_DUMP", str(tmp_path / "dump"))
    kernel(q, k, v)
    assert (tmp_path / "dump" / "5-kernel.py").is_file()
    assert settings.current().dump is not None


def test_few_likenesses_are_kept():
    kernel = flexc.attention()
    for length in range(1, 300):
        kernel(*qkv(1, 1, 1, 1, length, 4))
    assert len(kernel._ready) <= 256


# --- maps -------------------------------------------------------------------------------------------------------------------------------


def test_the_map_of_a_mask_that_reads_nothing_is_at_hand(monkeypatch):
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    kernel(q, k, v)
    monkeypatch.setattr(Launch, "block_maps", lambda *_: pytest.fail("looked for a map"))
    kernel(q, k, v)
    kernel(q, k, v, scale=0.3)


def test_maps_that_were_dropped_are_made_again():
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    expected = kernel(q, k, v)
    (kept,) = [weakref.ref(kernel.blocks)]
    MAPS.clear()
    gc.collect()
    assert kept() is None and kernel(q, k, v).equal(expected)


# --- gradients --------------------------------------------------------------------------------------------------------------------------


def test_a_node_of_autograd_only_where_someone_may_ask():
    q, k, v = qkv(q_len=20)
    weight = normal(4, grad=True)
    plain, learned = flexc.attention(None, causal), flexc.attention(lambda s, b, h, i, j: s * weight[h], causal)
    for x in (q, k, v):
        assert not plain(q, k, v).requires_grad
        x.requires_grad_()
        assert plain(q, k, v).grad_fn is not None
        x.requires_grad_(False)
    assert type(learned(q, k, v).grad_fn).__name__ == "AttentionBackward"  # and not a graph of the operations inside
    with torch.no_grad():
        assert not learned(q, k, v).requires_grad
    q.requires_grad_()
    out = learned(q, k, v)
    found = torch.autograd.grad(out.sum(), [q, weight])
    assert all(x is not None and bool(x.abs().sum() > 0) for x in found)


def test_lse_is_float32_with_and_without_a_node():
    q, k, v = qkv(q_len=20, dtype=torch.float64)
    kernel = flexc.attention(None, causal)
    for needs in (False, True):
        assert kernel(q.requires_grad_(needs), k, v, return_lse=True)[1].lse.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which making dual tensors imports
def test_dual_tensors_are_refused_after_good_calls():
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    kernel(q, k, v)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        kernel(torch.autograd.forward_ad.make_dual(q, q), k, v)


# --- launches that are made again ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(monkeypatch):
    """A launch on the CPU whose backend records, as Triton's does on a GPU; what was done, and what the recorded launch returns."""
    q, k, v = qkv(q_len=20)
    kernel = flexc.attention(None, causal)
    kernel(q, k, v)
    launch = kernel._last[0]
    done, backend = [], launch.artifact.backend

    def again(*given):
        done.append("again")
        return None if given[3] == 0.5 else backend.forward(launch.artifact.module, Call(*given[:-1]), {"forward": kernel.blocks})

    def record(module, call, maps):
        done.append("record")
        return backend.forward(module, call, maps), again

    def forward(module, call, maps):
        done.append("forward")
        return backend.forward(module, call, maps)

    monkeypatch.setattr(launch.artifact, "backend", dataclasses.replace(backend, record=record, forward=forward))
    launch.remembered = Remembered()
    return kernel, (q, k, v), done


def test_the_second_call_is_recorded_and_the_third_made_again(recording):
    kernel, inputs, done = recording
    expected = flexc.reference(None, causal, *inputs)[0]
    for _ in range(4):
        torch.testing.assert_close(kernel(*inputs).double(), expected, atol=1e-5, rtol=1e-5)
    assert done == ["forward", "record", "again", "again"]


def test_a_call_of_another_kind_is_recorded_anew_but_not_for_ever(recording):
    kernel, inputs, done = recording
    expected = flexc.reference(None, causal, *inputs, scale=0.5)[0]
    for _ in range(20):
        torch.testing.assert_close(kernel(*inputs, scale=0.5).double(), expected, atol=1e-5, rtol=1e-5)
    assert done.count("record") == 8 and done[-2:] == ["again", "forward"]


def test_nothing_is_recorded_of_an_edited_kernel(recording, monkeypatch):
    """FLEXC_OVERRIDE: what a user wrote into the host function runs at each call."""
    kernel, inputs, done = recording
    launch, current = kernel._last[0], settings.current()
    monkeypatch.setattr(settings, "current", lambda: dataclasses.replace(current, override=Path(".")))
    for _ in range(3):
        launch.forward(*inputs, ())
    assert done == ["forward"] * 3
