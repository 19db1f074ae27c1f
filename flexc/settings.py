"""Every FLEXC_* variable: name, type, default, meaning. Read at use, validated, in one table.

    from flexc import settings
    if settings.current().eager: ...

A value that is not one of a setting's values raises SettingError, and so does a FLEXC_* name that is not in the table: a misspelt switch
would otherwise do nothing in silence. The table in README.md is `markdown_table()`; a test keeps the two equal.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import platformdirs

from flexc.errors import SettingError

PREFIX = "FLEXC_"


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        variable: name in the environment.
        field: name in `Settings`.
        kind: what a value looks like, as shown to users.
        default: the value when the variable is unset or empty.
        default_text: the default as shown to users.
        parse: text → value; raises ValueError saying what was expected.
        changes_code: the generated code or its meaning depends on it, so it is part of every cache key.
        meaning: one sentence.
    """

    variable: str
    field: str
    kind: str
    default: Any
    default_text: str
    parse: Callable[[str], Any]
    changes_code: bool
    meaning: str


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("expected 0 or 1")
    return _SWITCH[text.lower()]


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError("expected a folder, this is a file")
    return path.absolute()


def _existing_folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ValueError("expected a folder that exists")
    return path.absolute()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("expected a number of bytes such as 500MB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


TABLE: tuple[Setting, ...] = (
    Setting(
        "FLEXC_CACHE_DIR",
        "cache_dir",
        "folder",
        platformdirs.user_cache_path("flexc", appauthor=False),
        "the user's cache folder (`~/.cache/flexc` on Linux)",
        _folder,
        False,
        "Where generated sources and compiled kernels are kept; must be writable by you alone.",
    ),
    Setting(
        "FLEXC_CACHE_SIZE",
        "cache_size_bytes",
        "size",
        2 * 2**30,
        "2GiB",
        _size,
        False,
        "Limit of the disk cache; past it, the entries used least recently are removed.",
    ),
    Setting(
        "FLEXC_NO_DISK_CACHE",
        "no_disk_cache",
        "0 or 1",
        False,
        "0",
        _switch,
        False,
        "1: read and write no disk cache; sources live in a temporary folder for as long as the process does.",
    ),
    Setting(
        "FLEXC_NO_COMPILE",
        "no_compile",
        "0 or 1",
        False,
        "0",
        _switch,
        False,
        "1: raise where a call would compile something; what the disk cache has is loaded. For servers, after `kernel.warmup`.",
    ),
    Setting(
        "FLEXC_DUMP",
        "dump",
        "folder",
        None,
        "unset",
        _folder,
        False,
        "Write every stage of each compilation there, `1-trace.ir` to `5-kernel.py`.",
    ),
    Setting(
        "FLEXC_OVERRIDE",
        "override",
        "folder",
        None,
        "unset",
        _existing_folder,
        False,
        "Run an edited `5-kernel.py` from a folder that FLEXC_DUMP wrote, in place of the generated one.",
    ),
    Setting(
        "FLEXC_EAGER",
        "eager",
        "0 or 1",
        False,
        "0",
        _switch,
        True,
        "1: evaluate the graph in plain PyTorch, where `print` and `breakpoint` work.",
    ),
    Setting(
        "FLEXC_DEVICE_MAPS",
        "device_maps",
        "0 or 1",
        True,
        "1",
        _switch,
        False,
        "0: on a GPU, PyTorch operators find the blocks of a mask in place of generated kernels; the host waits for each of them.",
    ),
    Setting(
        "FLEXC_CHECK",
        "check",
        "0 or 1",
        False,
        "0",
        _switch,
        True,
        "1: an index outside a captured tensor raises, with the index expression and your line.",
    ),
)

_NAMES = tuple(row.variable for row in TABLE)

# os.environ encodes a name and decodes a value at every look, 6 µs for the table; the dict below it answers in a tenth of that.
_environment: Any = getattr(os.environ, "_data", os.environ)
_RAW_NAMES = tuple(map(os.environ.encodekey, _NAMES)) if _environment is not os.environ else _NAMES


@dataclass(frozen=True)
class Settings:
    """The value of every setting, in the order of the table."""

    cache_dir: Path
    cache_size_bytes: int
    no_disk_cache: bool
    no_compile: bool
    dump: Path | None
    override: Path | None
    eager: bool
    device_maps: bool
    check: bool

    def key(self) -> dict[str, Any]:
        """The settings that change code, for a cache key."""
        return {row.field: getattr(self, row.field) for row in TABLE if row.changes_code}


_last: tuple[tuple[Any, ...], Settings] | None = None  # the environment mostly is as it was: to compare takes less than to hash


def current() -> Settings:
    """The settings as the environment has them at this moment. Cheap enough for every call of a kernel.

    Raises:
        SettingError: a bad value, or an unknown FLEXC_* name (looked for whenever a known one changed).
    """
    global _last
    raw = tuple(map(_environment.get, _RAW_NAMES))
    known = _last
    if known is not None and known[0] == raw:
        return known[1]
    found = _parse(raw)
    _last = raw, found
    return found


@lru_cache(maxsize=64)
def _parse(raw: tuple[Any, ...]) -> Settings:
    # `raw` is what the cache compares; the texts come from the front door.
    for name in os.environ:
        if name.startswith(PREFIX) and name not in _NAMES:
            close = difflib.get_close_matches(name[len(PREFIX) :], [known[len(PREFIX) :] for known in _NAMES], 1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else "known: " + ", ".join(_NAMES)
            raise SettingError(f"{name}: no such setting; {hint}")
    values: dict[str, Any] = {}
    for row in TABLE:
        text = os.environ.get(row.variable)
        if not text:
            values[row.field] = row.default
            continue
        try:
            values[row.field] = row.parse(text)
        except ValueError as error:
            raise SettingError(f"{row.variable}: {error}, got {text!r}") from None
    return Settings(**values)


def markdown_table() -> str:
    """The table of settings as README.md shows it."""
    lines = ["| variable | value | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{row.variable}` | {row.kind} | {row.default_text} | {row.meaning} |" for row in TABLE]
    return "\n".join(lines)
