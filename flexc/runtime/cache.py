"""The disk cache: texts, compiled objects and JSON, one folder for each key. Nothing in it is ever unpickled.

    cache = cache_of(settings.current())
    key = key_of(graph=text, plan=plan, target=target, toolchain=versions)
    entry = cache.get(key)
    if entry is None:
        with cache.lock(key):                       # of many processes, one compiles
            entry = cache.get(key) or cache.put(key, {"kernel.py": source, "kernel.cubin": cubin}, {"num_warps": 4})
    entry.path("kernel.py"), entry.meta["num_warps"]

Layout: `<root>/<first two digits>/<key>/manifest.json` and beside it the files; `<root>/room` says how much may be written before the sizes
of all entries are added up again. The manifest holds the digest of every file and its
own, and all of them are checked before an entry is given out; what `Entry.read` returns is what was checked. An entry appears by one
rename, so a reader sees all of it or nothing; whatever is damaged, incomplete, foreign or open to others' writing is a miss. No absolute
path and no host name is inside: a container image can ship the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flexc.errors import SettingError
from flexc.runtime.key import key_of
from flexc.settings import Settings

__all__ = ["Cache", "Damage", "Entry", "Info", "cache_of", "key_of"]

FORMAT = 1
MANIFEST = "manifest.json"
_KEY = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_STALE_SECONDS = 3600.0
_ROOM = "room"


@dataclass(frozen=True)
class Entry:
    """One complete, verified entry.

    Attributes:
        key: 64 hexadecimal digits.
        folder: where the files are; they belong to the cache and must not be written.
        files: file name → SHA-256.
        meta: what `put` was given.
    """

    key: str
    folder: Path
    files: Mapping[str, str]
    meta: dict[str, Any]
    _contents: Mapping[str, bytes] = field(repr=False, compare=False)

    def path(self, name: str) -> Path:
        """Where a file of this entry is. KeyError if it has no such file."""
        if name not in self.files:
            raise KeyError(f"{name!r}; this entry has {sorted(self.files)}")
        return self.folder / name

    def read(self, name: str) -> bytes:
        """The content of a file, as it was when its digest was checked."""
        self.path(name)
        return self._contents[name]

    def text(self, name: str) -> str:
        """The content of a file that is UTF-8 text."""
        return self.read(name).decode()


@dataclass(frozen=True)
class Info:
    """What the cache holds."""

    root: Path
    entries: int
    size_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class Damage:
    """An entry that `get` takes for a miss, and why."""

    folder: Path
    reason: str


class Cache:
    """Entries below one folder. Safe with threads and with many processes on one machine.

    Args:
        root: made (readable by the user alone) if it does not exist.
        limit_bytes: past it, `put` removes the entries used least recently; None for no limit.

    Raises:
        SettingError: the folder belongs to someone else, others can write to it, or it cannot be made.
    """

    def __init__(self, root: Path | str, limit_bytes: int | None = None):
        self.root = Path(root)
        self.limit_bytes = limit_bytes
        _make_private(self.root)

    def get(self, key: str) -> Entry | None:
        """The entry if it is there and every digest agrees, else None."""
        try:
            entry = _open(self._folder(key))
        except _Damaged:
            return None
        with contextlib.suppress(OSError):  # a read-only cache has no order of use
            os.utime(entry.folder)
        return entry

    def put(self, key: str, files: Mapping[str, bytes | str], meta: dict[str, Any] | None = None) -> Entry:
        """Store an entry, whole or not at all, then evict down to the limit (never the entry just stored).

        An equal entry that is already there stays; a damaged or different one is replaced.

        Raises:
            ValueError: a file name that is not plain.
            TypeError: meta is not JSON.
            SettingError: the folder cannot be written.
        """
        for name in files:
            if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
                raise ValueError(f"expected a plain file name for the cache, got {name!r}")
        contents = {name: content.encode() if isinstance(content, str) else bytes(content) for name, content in files.items()}
        digests = {name: _sha256(content) for name, content in contents.items()}
        body = {"format": FORMAT, "key": key, "files": digests, "meta": {} if meta is None else meta}
        text = _json(body)
        contents[MANIFEST] = _json({"body": body, "sha256": _sha256(text.encode())}).encode()
        folder = self._folder(key)
        try:
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
            try:
                for name, content in contents.items():
                    _write(temporary / name, content)
                self._publish(temporary, folder, body)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise _unwritable(self.root, error) from error
        self._evict(folder, sum(map(len, contents.values())))
        return Entry(key, folder, digests, json.loads(text)["meta"], contents)

    def damage(self, key: str) -> str | None:
        """Why a key that `get` has no entry for is a miss; None if there is none, or nothing is wrong with it."""
        folder = self._folder(key)
        if not os.path.lexists(folder):
            return None
        try:
            _open(folder)
        except _Damaged as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold this key against other threads and processes; freed by the system if the holder dies."""
        import filelock  # needed by those that compile, not by those that find

        locks = self.root / "locks"
        try:
            locks.mkdir(mode=0o700, exist_ok=True)
            held = filelock.FileLock(locks / f"{self._folder(key).name}.lock", mode=0o600)
            held.acquire()
        except OSError as error:
            raise _unwritable(self.root, error) from error
        try:
            yield
        finally:
            held.release()

    def info(self) -> Info:
        """Number and size of the entries, read from the disk."""
        sizes = [_size_bytes(folder) for folder in self._folders()]
        return Info(self.root, len(sizes), sum(sizes), self.limit_bytes)

    def clear(self) -> int:
        """Remove every entry; files that are not ours stay. Returns how many there were."""
        removed = sum(self._remove(folder) for folder in self._folders())
        self._sweep(older_than_seconds=0.0)
        return removed

    def verify(self) -> list[Damage]:
        """Check every digest of every entry; returns what is wrong. Removes nothing: the next `put` of that key does."""
        found = []
        for folder in self._folders():
            try:
                _open(folder)
            except _Damaged as error:
                found.append(Damage(folder, str(error)))
        return found

    def _folder(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"expected a key of 64 hexadecimal digits, got {key!r}")
        return self.root / key[:2] / key

    def _folders(self) -> list[Path]:
        return sorted(path for path in self.root.glob("[0-9a-f][0-9a-f]/*") if _KEY.fullmatch(path.name) and path.is_dir())

    def _publish(self, temporary: Path, folder: Path, body: dict[str, Any]) -> None:
        """Rename into place. A rename onto a full folder fails, so what is in the way is renamed aside first; races end in a retry."""
        for _ in range(100):
            with contextlib.suppress(_Damaged):
                there = _open(folder)
                if there.files == body["files"] and _json(there.meta) == _json(body["meta"]):
                    return
            try:
                os.rename(temporary, folder)
                return
            except OSError:
                if not os.path.lexists(folder):
                    raise
            self._remove(folder)
        raise OSError(f"{folder} is written by others without end")

    def _remove(self, folder: Path) -> bool:
        """Take an entry away by one rename, then delete it. False if another process did first."""
        aside = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.root))
        try:
            os.rename(folder, aside / folder.name)
            return True
        except FileNotFoundError:
            return False
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _evict(self, keep: Path, written_bytes: int) -> None:
        """Make room, where the last look at all entries left too little for what was written since."""
        room = self._room() - written_bytes
        if room >= 0:
            self._note_room(room)
            return
        self._sweep(_STALE_SECONDS)
        if self.limit_bytes is None:
            return
        used = []
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError):
                used.append((folder.stat().st_mtime_ns, _size_bytes(folder), folder))
        total = sum(size for _, size, _ in used)
        for _, size, folder in sorted(used):
            if total <= self.limit_bytes:
                break
            if folder != keep:
                self._remove(folder)
                total -= size
        # A small part of what is left: processes that write at once may each take it for theirs.
        self._note_room((self.limit_bytes - total) // 16)

    def _room(self) -> int:
        """Bytes that may be written before all entries are looked at again; unknown is none."""
        try:
            limit, room = (self.root / _ROOM).read_text().split()
            return int(room) if int(limit) == self.limit_bytes else 0
        except (OSError, ValueError):
            return 0

    def _note_room(self, room: int) -> None:
        with contextlib.suppress(OSError):
            (self.root / _ROOM).unlink(missing_ok=True)
            _write(self.root / _ROOM, f"{self.limit_bytes} {room}".encode())

    def _sweep(self, older_than_seconds: float) -> None:
        """Delete what processes that died left behind: half-written entries, and locks that nobody holds."""
        import filelock

        for path in [*self.root.glob("tmp-*"), *self.root.glob("locks/*.lock")]:
            with contextlib.suppress(OSError, filelock.Timeout):
                if time.time() - path.stat().st_mtime < older_than_seconds:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    with filelock.FileLock(path, timeout=0, mode=0o600):
                        path.unlink()


def cache_of(current: Settings) -> Cache:
    """The cache that the settings ask for: on disk, or under FLEXC_NO_DISK_CACHE=1 a temporary folder that ends with the process."""
    if current.no_disk_cache:
        return _temporary_cache()
    return _disk_cache(current.cache_dir, current.cache_size_bytes)


@lru_cache(maxsize=8)
def _disk_cache(root: Path, limit_bytes: int) -> Cache:
    return Cache(root, limit_bytes)


@lru_cache(maxsize=1)
def _temporary_cache() -> Cache:
    folder = tempfile.mkdtemp(prefix="flexc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Cache(folder)


class _Damaged(Exception):
    """Why a folder is not an entry."""


def _open(folder: Path) -> Entry:
    """The entry in a folder, every digest checked; _Damaged if anything is missing or differs."""
    contents: dict[str, bytes] = {}
    try:
        for place in (folder.parent, folder):
            _refuse_open_to_others(place.stat(), place.name)
        manifest = json.loads(_read(folder / MANIFEST))
        body = manifest["body"]
        files, meta = body["files"], body["meta"]
        if manifest["sha256"] != _sha256(_json(body).encode()):
            raise _Damaged("the manifest does not have its own digest")
        if body["format"] != FORMAT or body["key"] != folder.name:
            raise _Damaged(f"the manifest is of format {body['format']} and key {body['key']}")
        for name, digest in files.items():
            if not _FILE_NAME.fullmatch(name):
                raise _Damaged(f"{name!r} is not a plain file name")
            contents[name] = _read(folder / name)
            if _sha256(contents[name]) != digest:
                raise _Damaged(f"{name} does not have its digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from None
    return Entry(folder.name, folder, files, meta, contents)


def _write(path: Path, content: bytes) -> None:
    """A new file. The mode is said, for a umask may leave files open to a group."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        _refuse_open_to_others(os.fstat(file.fileno()), path.name)
        return file.read()


def _refuse_open_to_others(status: os.stat_result, name: str) -> None:
    if os.name == "posix" and (status.st_mode & 0o022 or status.st_uid not in (os.getuid(), 0)):
        raise _Damaged(f"others can write to {name} ({stat.filemode(status.st_mode)}, uid {status.st_uid})")


def _make_private(root: Path) -> None:
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.stat()
        if os.name != "posix":
            return
        if status.st_uid == os.getuid() and status.st_mode & 0o022 and not any(root.iterdir()):
            root.chmod(0o700)
            status = root.stat()
    except OSError as error:
        raise _unwritable(root, error) from error
    if status.st_uid not in (os.getuid(), 0):
        raise SettingError(f"FLEXC_CACHE_DIR: {root} belongs to another user (uid {status.st_uid}); choose a folder of your own")
    if status.st_mode & 0o022:
        mode = stat.filemode(status.st_mode)
        raise SettingError(
            f"FLEXC_CACHE_DIR: others can write to {root} ({mode}), so what is in it cannot be trusted; chmod 700 or remove it"
        )


def _unwritable(root: Path, error: OSError) -> SettingError:
    reason = error.strerror or str(error)
    return SettingError(f"FLEXC_CACHE_DIR: cannot write to {root} ({reason}); choose another folder, or set FLEXC_NO_DISK_CACHE=1")


def _size_bytes(folder: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            total += file.stat().st_size
    return total


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
