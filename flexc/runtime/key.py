"""Cache keys: everything that a kernel depends on, as one digest. A value that has no canonical text raises."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from typing import Any


def key_of(**parts: Any) -> str:
    """SHA-256 over everything that matters, as 64 hexadecimal digits; equal parts give equal keys on every machine.

    Values are None, bool, int, float, str, bytes, enums, tuples, lists, sets, dicts and dataclasses of such, torch dtypes. 1, 1.0, True
    and "1" are different values, and so are 0.0 and -0.0.

    Raises:
        TypeError: a value that cannot be keyed, with its path. A coarse key would run the wrong kernel in silence.
    """
    body = [[name, _canonical(parts[name], name)] for name in sorted(parts)]
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()


def _canonical(value: Any, path: str) -> Any:
    """The value as JSON in which different values never look alike: every container and every rare leaf carries a tag."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, Enum):
        return ["enum", kind.__qualname__, value.name]
    if kind in (tuple, list):
        return [kind.__name__, [_canonical(item, f"{path}[{index}]") for index, item in enumerate(value)]]
    if kind in (set, frozenset):
        return ["set", sorted((_canonical(item, f"{path}{{}}") for item in value), key=json.dumps)]
    if kind is dict:
        items = [[_canonical(name, f"{path} (a name)"), _canonical(item, f"{path}[{name!r}]")] for name, item in value.items()]
        return ["dict", sorted(items, key=json.dumps)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[field.name, _canonical(getattr(value, field.name), f"{path}.{field.name}")] for field in dataclasses.fields(value)]
        return ["dataclass", kind.__qualname__, fields]
    if f"{kind.__module__}.{kind.__qualname__}" == "torch.dtype":
        return ["dtype", str(value)]
    raise TypeError(f"cannot make a cache key of {path}: {kind.__module__}.{kind.__qualname__} has no canonical text")
