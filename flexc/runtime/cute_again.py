"""Make a launch of a generated CuTe module again, with other tensors of the same sizes, strides and alignment.

What a generated `forward` works out before it calls the compiled launcher is the same each time. `record` runs it once and watches. The
result is a function, printed for this one launch, that allocates the results and calls the launcher with the tensors at hand. Whoever keeps
it must ask for equal sizes, strides, dtypes and 16-byte alignment of the inputs; at captured tensors and run-time numbers it looks itself,
and the launcher looks at the sizes of everything.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from flexc.runtime.recorded import Again, OtherLaunch, Results, allocation, checks_of_scalars, function_of

Tensor = torch.Tensor


def record(
    module: ModuleType, q: Tensor, k: Tensor, v: Tensor, scale: float, tensors: Sequence[Tensor], scalars: tuple, walk: Any
) -> tuple[Results, Again | None]:
    """The module's forward pass, and the function that launches it again if that can be: not where it copies inputs or slices results."""
    watcher = _Watcher(module, {"q": q, "k": k, "v": v, **{f"tensors[{slot}]": x for slot, x in enumerate(tensors)}})
    # The same function over names of its own: other threads go on calling the module's.
    kept = module.forward
    forward = types.FunctionType(kept.__code__, {**vars(module), **watcher.names}, None, kept.__defaults__, kept.__closure__)
    results = forward(q, k, v, scale, tensors, scalars, walk)
    try:
        return results, _again(watcher, results, q.device, tensors, scalars, walk)
    except OtherLaunch:
        return results, None


class _Watcher:
    """Notes what the launcher is called with, and where its tensors come from.

    Attributes:
        names: stand for those of the module while it is watched.
        paths: by identity of a tensor, the text that leads to it; `kept` keeps the tensors, and so their identities.
    """

    def __init__(self, module: ModuleType, inputs: dict[str, Tensor]):
        self.module = module
        self.calls: list[tuple] = []
        self.paths = {id(x): name for name, x in inputs.items()}
        self.kept: list[Tensor] = list(inputs.values())
        self.is_clear = len(self.paths) == len(inputs)  # else it is not said which of two equal ones is meant
        self.names: dict[str, Any] = {
            "FORWARD": self._launch,
            "tile_counter": self._counter,
            "plain": self._plain,
            "readable": self._readable,
        }

    def _launch(self, *values: Any) -> None:
        self.calls.append(values)
        self.module.FORWARD(*values)

    def _note(self, tensor: Tensor, path: str) -> Tensor:
        self.kept.append(tensor)
        self.paths[id(tensor)] = path
        return tensor

    def _counter(self, device: torch.device) -> Tensor:
        return self._note(self.module.tile_counter(device), "tile_counter(device)")

    def _plain(self, x: Tensor) -> Tensor:
        name = self.paths[id(x)].split(" ")[0]
        return self._note(self.module.plain(x), f"{name} if not {name}.requires_grad else {name}.detach()")

    def _readable(self, x: Tensor) -> Tensor:
        found = self.module.readable(x)
        if found is not x and x.requires_grad and (found.shape, found.dtype) == (x.shape, x.dtype):
            self._note(found, f"{self.paths[id(x)]}.detach()")
        return found  # what it makes otherwise has no path


def _again(watcher: _Watcher, results: Results, device: torch.device, tensors: Sequence[Tensor], scalars: tuple, walk: Any) -> Again:
    if len(watcher.calls) != 1 or not watcher.is_clear:
        raise OtherLaunch
    module, values = watcher.module, watcher.calls[0]
    known: dict[str, Any] = {"launch": module.FORWARD.prepare(), "device": device}
    tests, lines, paths = checks_of_scalars(scalars), [], watcher.paths
    for slot, tensor in enumerate(tensors):
        name = f"tensors[{slot}]"
        known[f"dtype{slot}"] = tensor.dtype
        same = f"{name}.shape == {tuple(tensor.shape)} and {name}.dtype is dtype{slot} and {name}.requires_grad is {tensor.requires_grad}"
        tests.append(f"not ({same})")
    for place, result in enumerate(results):
        if not any(result is value for value in values):
            raise OtherLaunch  # not what the launcher writes
        paths[id(result)] = f"result{place}"
        lines.append(f"result{place} = {allocation(result, device, known)}")
    if walk is not None:
        paths |= {id(getattr(walk, name)): f"walk.{name}" for name in ("rows", "partial", "full", "order")}
    if "tile_counter" in vars(module):
        known["tile_counter"] = module.tile_counter
    printed, first_scalar = [], len(values) - len(scalars)
    for place, (argument, value) in enumerate(zip(module.FORWARD.arguments, values, strict=True)):
        if isinstance(value, Tensor):
            if id(value) not in paths:
                raise OtherLaunch
            printed.append(paths[id(value)])
        elif place >= first_scalar:
            printed.append(f"scalars[{place - first_scalar}]")
        elif argument.name == "scale":
            printed.append("scale")
        elif type(value) is int:
            printed.append(repr(value))
        else:
            raise OtherLaunch
    checks = [f"if {test}: return None" for test in tests]
    end = "return " + ", ".join(f"result{place}" for place in range(len(results)))
    return function_of([*checks, *lines, f"launch({', '.join(printed)})", end], known)
