"""The promises of the disk cache, one test each."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import filelock
import pytest
import torch

from flexc.errors import SettingError
from flexc.runtime import cache as module
from flexc.runtime.cache import MANIFEST, Cache, cache_of, key_of
from flexc.settings import current

KEY = key_of(name="a kernel")
OTHER = key_of(name="another kernel")
FILES = {"kernel.py": "x = 1\n", "kernel.cubin": b"\x7fELF\x00\xff"}


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


class Order(Enum):
    ROWS = 1
    COLUMNS = 2


@dataclass(frozen=True)
class Plan:
    tile: tuple[int, int]
    order: Order = Order.ROWS


@dataclass(frozen=True)
class OtherPlan:
    tile: tuple[int, int]
    order: Order = Order.ROWS


# Keys


def test_equal_parts_give_equal_keys_in_any_order():
    assert key_of(a=1, b={"x": 1.5, "y": (2,)}) == key_of(b={"y": (2,), "x": 1.5}, a=1)
    assert key_of(plan=Plan((64, 128)), names={"b", "a"}) == key_of(plan=Plan((64, 128)), names={"a", "b"})


def test_key_is_the_same_on_every_machine():
    assert key_of(a=1, b=(2.5, "x", None, b"y")) == "b736fbda51d83d98b7c308fd9c80b56e5aedeaf11cfdf4bd4f924bb2c8220df2"


@pytest.mark.parametrize(
    "values",
    [
        [1, 1.0, True, "1", b"1", None, (1,), [1], {1}, {"1": 1}, {1: 1}],
        [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-300],
        [0.1, 0.1 + 1e-17 + 2e-17],
        [Plan((64, 128)), Plan((128, 64)), OtherPlan((64, 128)), Plan((64, 128), Order.COLUMNS)],
        [Order.ROWS, "ROWS", ["enum", "Order", "ROWS"], 1],
        [("a", "b"), ("ab",), (("a",), "b")],
        [torch.float32, torch.float16, "torch.float32"],
        [2**63, 2**63 + 1, float(2**63)],
    ],
)
def test_different_values_give_different_keys(values):
    keys = [key_of(value=value) for value in values]
    distinct = {repr((type(value).__name__, value)) for value in values}
    assert len(set(keys)) == len(distinct)


@pytest.mark.parametrize("value", [object(), lambda: 1, torch.zeros(1), Path("x"), {"a": [1, object()]}, Plan, 1j])
def test_value_that_cannot_be_keyed_raises(value):
    with pytest.raises(TypeError, match="cannot make a cache key of plan"):
        key_of(plan=value)


def test_the_error_names_where_the_value_is():
    with pytest.raises(TypeError, match=r"cannot make a cache key of plan\['tiles'\]\[1\]\.tile: builtins\.object has no canonical text"):
        key_of(plan={"tiles": [1, Plan(tile=object())]})  # type: ignore[arg-type]


# Entries


def test_what_is_put_is_got(cache):
    assert cache.get(KEY) is None
    stored = cache.put(KEY, FILES, {"num_warps": 4, "tile": (64, 128)})
    found = Cache(cache.root).get(KEY)
    assert found == stored
    assert found.text("kernel.py") == "x = 1\n"
    assert found.read("kernel.cubin") == b"\x7fELF\x00\xff"
    assert found.meta == {"num_warps": 4, "tile": [64, 128]}
    assert found.path("kernel.py").is_file()
    assert cache.get(OTHER) is None


def test_entry_names_its_files_when_asked_for_another(cache):
    with pytest.raises(KeyError, match=r"kernel\.ptx.*this entry has \['kernel\.cubin', 'kernel\.py'\]"):
        cache.put(KEY, FILES).path("kernel.ptx")


def test_put_replaces_a_different_entry(cache):
    cache.put(KEY, FILES)
    cache.put(KEY, {"kernel.py": "x = 2\n"})
    assert cache.get(KEY).text("kernel.py") == "x = 2\n"
    assert set(cache.get(KEY).files) == {"kernel.py"}


def test_put_leaves_an_equal_entry_alone(cache):
    inode = cache.put(KEY, FILES, {"a": 1}).path("kernel.py").stat().st_ino
    assert cache.put(KEY, FILES, {"a": 1}).path("kernel.py").stat().st_ino == inode


@pytest.mark.parametrize("name", ["../kernel.py", "a/b", "", ".", "..", ".hidden", MANIFEST, "a\nb"])
def test_file_name_that_leaves_the_entry_is_refused(cache, name):
    with pytest.raises(ValueError, match="expected a plain file name for the cache"):
        cache.put(KEY, {name: "x"})


@pytest.mark.parametrize("key", ["", "abc", "../" * 20, "A" * 64, KEY + "\n"])
def test_key_that_is_no_digest_is_refused(cache, key):
    with pytest.raises(ValueError, match="expected a key of 64 hexadecimal digits"):
        cache.get(key)


def test_meta_that_is_not_json_is_refused(cache):
    with pytest.raises(TypeError, match="not JSON serializable"):
        cache.put(KEY, FILES, {"target": object()})
    assert cache.get(KEY) is None


def damage_text(folder: Path) -> None:
    (folder / "kernel.py").write_text("x = 2\n")


def damage_by_truncation(folder: Path) -> None:
    (folder / "kernel.cubin").write_bytes(b"\x7fEL")


def damage_by_deletion(folder: Path) -> None:
    (folder / "kernel.cubin").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def damage_manifest_by_deletion(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def damage_meta(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    assert '"num_warps":4' in text
    (folder / MANIFEST).write_text(text.replace('"num_warps":4', '"num_warps":8'))


def damage_by_a_list_for_a_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1, 2]")


DAMAGES = [
    damage_text,
    damage_by_truncation,
    damage_by_deletion,
    damage_manifest,
    damage_manifest_by_deletion,
    damage_meta,
    damage_by_a_list_for_a_manifest,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_recompiled(cache, damage):
    damage(cache.put(KEY, FILES, {"num_warps": 4}).folder)
    assert cache.get(KEY) is None
    assert [problem.folder.name for problem in cache.verify()] == [KEY]
    cache.put(KEY, FILES, {"num_warps": 4})
    assert cache.get(KEY).text("kernel.py") == "x = 1\n"
    assert cache.verify() == []


def test_verify_says_what_is_wrong(cache):
    damage_text(cache.put(KEY, FILES).folder)
    assert cache.verify()[0].reason == "kernel.py does not have its digest"


def test_entry_of_another_key_is_a_miss(cache):
    """A folder that was copied to another key's place, as by hand."""
    entry = cache.put(KEY, FILES)
    place = cache.root / OTHER[:2] / OTHER
    place.parent.mkdir(exist_ok=True)
    entry.folder.rename(place)
    assert cache.get(OTHER) is None


def test_entry_of_another_format_is_a_miss(cache, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 999)
    cache.put(KEY, FILES)
    monkeypatch.undo()
    assert cache.get(KEY) is None


def test_manifest_cannot_point_outside_its_folder(cache, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    entry = cache.put(KEY, FILES)
    manifest = json.loads((entry.folder / MANIFEST).read_text())
    manifest["body"]["files"] = {"../../../secret": module._sha256(b"s")}
    manifest["sha256"] = module._sha256(module._json(manifest["body"]).encode())
    (entry.folder / MANIFEST).write_text(json.dumps(manifest))
    assert cache.get(KEY) is None
    assert "is not a plain file name" in cache.verify()[0].reason


def test_file_in_the_way_of_an_entry_is_replaced(cache):
    place = cache.root / KEY[:2] / KEY
    place.parent.mkdir()
    place.write_text("in the way")
    cache.put(KEY, FILES)
    assert cache.get(KEY) is not None


def test_failed_write_leaves_nothing_behind(cache, monkeypatch):
    def full_disk(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(SettingError, match=r"FLEXC_CACHE_DIR: cannot write to .* \(No space left on device\)"):
        cache.put(KEY, FILES)
    monkeypatch.undo()
    assert cache.get(KEY) is None
    assert list(cache.root.glob("tmp-*")) == []


def test_cache_can_be_moved(cache, tmp_path):
    cache.put(KEY, FILES, {"num_warps": 4})
    assert str(tmp_path) not in (cache.get(KEY).folder / MANIFEST).read_text()
    cache.root.rename(tmp_path / "moved")
    assert Cache(tmp_path / "moved").get(KEY).meta == {"num_warps": 4}


def test_what_is_loaded_is_what_was_checked(cache):
    """A file that changes after its digest was compared."""
    cache.put(KEY, FILES)
    entry = cache.get(KEY)
    entry.path("kernel.py").write_text("x = 2\n")
    assert entry.text("kernel.py") == "x = 1\n"
    assert cache.get(KEY) is None


def test_damage_says_why_a_key_is_a_miss(cache):
    assert cache.damage(KEY) is None
    entry = cache.put(KEY, FILES)
    assert cache.damage(KEY) is None
    entry.path("kernel.py").write_text("x = 2\n")
    assert cache.damage(KEY) == "kernel.py does not have its digest"


@pytest.mark.parametrize("place", ["entry", "above it", "a file", "the manifest"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_in_a_cache_is_a_miss(cache, place, mode):
    """The folder of a cache that was shipped with open folders inside."""
    entry = cache.put(KEY, FILES)
    path = {"entry": entry.folder, "above it": entry.folder.parent, "a file": entry.path("kernel.py")}.get(place, entry.folder / MANIFEST)
    path.chmod(path.stat().st_mode | mode)
    assert cache.get(KEY) is None
    assert "others can write to" in cache.verify()[0].reason
    cache.put(KEY, FILES)
    assert (cache.get(KEY) is None) == (place == "above it")  # the folder of many entries is not ours to replace


def test_files_are_private_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        entry = Cache(tmp_path / "cache").put(KEY, FILES)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [entry.folder.parent, entry.folder, *entry.folder.iterdir()]}
    assert set(modes.values()) <= {0o600, 0o700} and modes["kernel.py"] == 0o600
    assert Cache(tmp_path / "cache").get(KEY) is not None


def test_nothing_in_the_cache_is_unpickled():
    """No part of flexc that reads the cache knows a format that runs code while it is read, other than the sources themselves."""
    for name in ("cache", "module", "key", "triton_binaries", "triton_cache", "triton_ahead"):
        source = (Path(module.__file__).parent / f"{name}.py").read_text()
        assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve|dill|joblib)\b|torch\.load|cPickle", source, re.MULTILINE), name


# Many processes


def _compile_once(root: str, log: str) -> None:
    cache = Cache(root)
    with cache.lock(KEY):
        entry = cache.get(KEY)
        if entry is None:
            with open(log, "a") as file:
                file.write("compiled\n")
            time.sleep(0.2)
            entry = cache.put(KEY, FILES)
    assert entry.text("kernel.py") == "x = 1\n"


def _put_again_and_again(root: str, text: str) -> None:
    cache = Cache(root)
    for _ in range(20):
        cache.put(KEY, {"kernel.py": text * 1000})


def _run_all(processes) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture(scope="module")
def fork():
    return multiprocessing.get_context("spawn")


def test_two_processes_write_once(tmp_path, fork):
    arguments = (str(tmp_path / "cache"), str(tmp_path / "log"))
    _run_all([fork.Process(target=_compile_once, args=arguments) for _ in range(2)])
    assert (tmp_path / "log").read_text() == "compiled\n"


EIGHT = """
import os, sys, time
import torch, flexc
torch.set_num_threads(1)  # no threads yet, so that a fork is safe
q, k, v = torch.randn(3, 1, 2, 50, 16, generator=torch.Generator().manual_seed(0))
start = time.time() + 0.3
children = []
for _ in range(8):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        time.sleep(max(0, start - time.time()))
        out = flexc.attention(lambda s, b, h, i, j: s * 0.5, flexc.masks.causal)(q, k, v)
        log = flexc.compile_log()
        os.write(writer, f"{len(log.compiled)} {len(log)} {out.sum().item()!r}".encode())
        os._exit(0)
    os.close(writer)
    children.append((child, reader))
for child, reader in children:
    print(os.read(reader, 1000).decode())
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_eight_processes_that_start_at_once_compile_once(tmp_path):
    environment = {**os.environ, "FLEXC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", EIGHT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled, made, sums = zip(*(line.split() for line in done.stdout.splitlines()))
    assert sorted(compiled) == ["0"] * 7 + ["1"]
    assert set(made) == {"1"} and len(set(sums)) == 1 and len(sums) == 8


def test_reader_never_sees_half_an_entry(tmp_path, fork):
    """Two processes replace each other's entry without taking the lock."""
    root = str(tmp_path / "cache")
    cache = Cache(root)
    processes = [fork.Process(target=_put_again_and_again, args=(root, text)) for text in "ab"]
    for process in processes:
        process.start()
    seen = set()
    while any(process.is_alive() for process in processes):
        entry = cache.get(KEY)
        if entry is not None:
            seen.add(entry.files["kernel.py"])
    assert [process.exitcode for process in processes] == [0, 0]
    assert 1 <= len(seen) <= 2
    assert cache.get(KEY) is not None
    assert cache.verify() == []
    assert list(cache.root.glob("tmp-*")) == []


def test_lock_keeps_other_threads_out(cache):
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        with cache.lock(KEY):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_locks_of_two_keys_do_not_wait_for_each_other(cache):
    with cache.lock(KEY), cache.lock(OTHER):
        pass


def test_lock_in_use_survives_a_sweep(cache):
    with cache.lock(KEY):
        lock = cache.root / "locks" / f"{KEY}.lock"
        os.utime(lock, (0, 0))
        cache.put(OTHER, FILES)
        assert lock.exists()
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(lock, timeout=0, is_singleton=False).acquire()
    os.utime(lock, (0, 0))
    cache.put(KEY, FILES)
    assert not lock.exists()


def test_rubbish_of_a_killed_process_is_swept(cache):
    rubbish = cache.root / "tmp-killed"
    rubbish.mkdir()
    (rubbish / "kernel.py").write_text("half")
    cache.put(KEY, FILES)
    assert rubbish.exists(), "it may belong to a process that is still writing"
    os.utime(rubbish, (0, 0))
    cache.put(OTHER, FILES)
    assert not rubbish.exists()


# Size


def test_least_recently_used_entry_is_evicted(tmp_path):
    cache = Cache(tmp_path / "cache", limit_bytes=2600)
    keys = [key_of(number=number) for number in range(3)]
    for age, key in zip((300, 200), keys):
        cache.put(key, {"kernel.py": "x" * 1000})
        os.utime(cache.root / key[:2] / key, (time.time() - age,) * 2)
    assert cache.get(keys[0]) is not None  # used now: the second is the oldest
    cache.put(keys[2], {"kernel.py": "x" * 1000})
    assert [cache.get(key) is not None for key in keys] == [True, False, True]


def test_entry_larger_than_the_limit_is_kept_until_the_next(tmp_path):
    cache = Cache(tmp_path / "cache", limit_bytes=10)
    assert cache.put(KEY, FILES).path("kernel.py").exists()
    cache.put(OTHER, FILES)
    assert cache.get(KEY) is None
    assert cache.get(OTHER) is not None


def test_entries_are_looked_at_once_in_a_while(tmp_path, monkeypatch):
    """Adding up the sizes of all entries costs as much as there are: not at every compilation, nor in every process."""
    looked = []
    size_of = module._size_bytes
    monkeypatch.setattr(module, "_size_bytes", lambda folder: looked.append(folder) or size_of(folder))
    for number in range(20):
        Cache(tmp_path / "cache", 10**6).put(key_of(number=number), FILES)
    assert len(looked) == 1
    Cache(tmp_path / "cache", 10**5).put(key_of(number=20), FILES)  # another limit
    assert len(looked) == 22
    (tmp_path / "cache" / "room").write_text("nonsense")
    Cache(tmp_path / "cache", 10**5).put(key_of(number=21), FILES)
    assert len(looked) == 22 + 22


def test_limit_holds_however_much_is_written(tmp_path):
    limit = 20_000
    cache, most = Cache(tmp_path / "cache", limit), 0
    for number in range(60):
        cache.put(key_of(number=number), {"kernel.py": "x" * (37 * number % 1500)})
        most = max(most, cache.info().size_bytes)
    assert limit / 2 < most <= limit
    assert cache.get(key_of(number=59)) is not None and cache.get(key_of(number=0)) is None


def test_info_counts_entries_and_bytes(cache):
    assert (cache.info().entries, cache.info().size_bytes) == (0, 0)
    folder = cache.put(KEY, FILES).folder
    cache.put(OTHER, {"a": ""})
    size = sum(file.stat().st_size for file in folder.parent.parent.glob("*/*/*"))
    assert (cache.info().entries, cache.info().size_bytes, cache.info().limit_bytes) == (2, size, None)


def test_clear_leaves_files_that_are_not_ours(cache):
    cache.put(KEY, FILES)
    cache.put(OTHER, FILES)
    mine = [cache.root / "notes.txt", cache.root / KEY[:2] / "notes.txt"]
    for path in mine:
        path.write_text("mine")
    assert cache.clear() == 2
    assert cache.info().entries == 0
    assert all(path.read_text() == "mine" for path in mine)


# Who may write


def test_folder_is_private_to_the_user(cache):
    entry = cache.put(KEY, FILES)
    for folder in (cache.root, entry.folder.parent, entry.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_folder_that_others_can_write_is_refused(tmp_path, mode):
    Cache(tmp_path / "cache").put(KEY, FILES)
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(SettingError, match=r"FLEXC_CACHE_DIR: others can write to .* so what is in it cannot be trusted; chmod 700"):
        Cache(tmp_path / "cache")


def test_empty_folder_of_ours_is_made_private(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    Cache(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    owner = os.stat_result((0o40700, 0, 0, 0, os.getuid() + 1, 0, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self, **_: owner)
    with pytest.raises(SettingError, match=r"FLEXC_CACHE_DIR: .* belongs to another user \(uid \d+\); choose a folder of your own"):
        Cache(tmp_path / "cache")


def test_folder_that_cannot_be_made_says_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"FLEXC_CACHE_DIR: cannot write to .*; choose another folder, or set FLEXC_NO_DISK_CACHE=1"):
        Cache(tmp_path / "file" / "cache")


def test_settings_choose_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("FLEXC_CACHE_SIZE", "1MB")
    cache = cache_of(current())
    assert (cache.root, cache.limit_bytes) == (tmp_path / "kernels", 10**6)
    assert cache_of(current()) is cache


def test_no_disk_cache_writes_nothing_there(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXC_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("FLEXC_NO_DISK_CACHE", "1")
    cache_of(current()).put(KEY, FILES)
    assert cache_of(current()).get(KEY) is not None
    assert not (tmp_path / "kernels").exists()
