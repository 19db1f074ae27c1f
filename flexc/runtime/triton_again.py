"""Make a launch of a generated Triton module again, with other tensors of the same sizes, strides and alignment.

A generated `forward` describes its tensors to Triton at each call, and Triton looks at every argument to find the binary: 20 µs of Python
for what is the same each time. `record` runs it once and watches the launch. The result is a function, printed for this one launch, that
allocates the results, fills in the pointers, and calls what Triton would have called in the end. Whoever keeps it must ask for equal sizes,
strides, dtypes and 16-byte alignment of the inputs; of captured tensors, run-time numbers and the block map it looks itself.

It knows Triton's launcher as it is in 3.6; with another one, or with hooks on launches, calls go through Triton.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from flexc.runtime.recorded import Again, OtherLaunch, Results, allocation, checks_of_scalars, function_of

Tensor = torch.Tensor

_POINTERS_AT_HAND = 64  # encoded descriptors of one tensor: allocators give the same few addresses again and again


def record(
    module: ModuleType, q: Tensor, k: Tensor, v: Tensor, scale: float, tensors: Sequence[Tensor], scalars: tuple, walk: Any
) -> tuple[Results, Again | None]:
    """The module's forward pass, and the function that launches it again if that can be: not where it launches nothing, or twice."""
    watcher = _Watcher(module.forward_kernel)
    # The same function over names of its own: other threads go on calling the module's.
    kept = module.forward
    forward = types.FunctionType(kept.__code__, {**vars(module), "forward_kernel": watcher}, None, kept.__defaults__, kept.__closure__)
    results = forward(q, k, v, scale, tensors, scalars, walk)
    if len(watcher.launches) != 1:
        return results, None
    return results, _again(watcher, results, q, k, v, tensors, scalars, walk)


class _Watcher:
    """Stands for a kernel and notes what it is launched with."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.launches: list[tuple[tuple[int, ...], tuple, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append((grid, arguments, self.kernel[grid](*arguments, **options)))

        return launch


def _again(watcher: _Watcher, results: Results, *inputs: Any) -> Again | None:
    (grid, arguments, binary), function = watcher.launches[0], watcher.kernel
    try:
        return _Printer(function, binary, grid, arguments, results, *inputs).function()
    except OtherLaunch:
        return None


class _Printer:
    """Prints one launch as a Python function."""

    def __init__(
        self,
        kernel: Any,
        binary: Any,
        grid: tuple[int, ...],
        arguments: tuple,
        results: Results,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Tensor],
        scalars: tuple,
        walk: Any,
    ):
        from triton import knobs
        from triton import runtime as triton_runtime

        driver: Any = triton_runtime.driver
        self.names, self.arguments, self.scalars = kernel.arg_names, arguments, scalars
        launch, metas = _launcher_of(binary)
        self.metas = iter(metas)
        self.lines: list[str] = []
        self.known: dict[str, Any] = {
            "runtime": knobs.runtime,
            "enter": knobs.runtime.launch_enter_hook,
            "leave": knobs.runtime.launch_exit_hook,
            "stream_of": driver.active.get_current_stream,
            "launch": launch,
            "function": binary.function,
            "metadata": binary.packed_metadata,
            "cooperative": binary.run.launch_cooperative_grid,
            "pdl": binary.run.launch_pdl,
        }
        self.device = q.device
        self.grid = (*grid, 1, 1)[:3]
        self.index = q.device.index
        self.paths = {id(x): name for name, x in (("q", q), ("k", k), ("v", v))}
        self.paths |= {id(x): f"tensors[{slot}]" for slot, x in enumerate(tensors)}
        if len(self.paths) < 3 + len(tensors):  # one tensor in two places: it is not said which of them an argument is
            raise OtherLaunch
        if walk is not None:
            self.paths |= {id(getattr(walk, name)): f"walk.{name}" for name in ("rows", "partial", "full", "order")}
        self.results = [self._result(place, result) for place, result in enumerate(results)]
        self._check({"q": q, "k": k, "v": v}, tensors, walk)

    def _result(self, place: int, result: Tensor) -> str:
        """How a result is allocated."""
        if not any(result is argument for argument in self.arguments) or id(result) in self.paths:
            raise OtherLaunch
        self.paths[id(result)] = f"result{place}"
        return allocation(result, self.device, self.known)

    def _check(self, inputs: dict[str, Tensor], tensors: Sequence[Tensor], walk: Any) -> None:
        """Lines that return None where the binary or the literal arguments are not for this call."""
        tests = []
        for name, hook in (("launch_enter_hook", "enter"), ("launch_exit_hook", "leave")):
            tests.append(f"runtime.{name} is not {hook}" + ("" if self.known[hook] is None else f" or {hook}.calls"))
        if any(x.data_ptr() % 16 for x in inputs.values()):  # who keeps the function knows that not all are aligned, but not which
            tests += [f"({name}.data_ptr() % 16 == 0) is not {x.data_ptr() % 16 == 0}" for name, x in inputs.items()]
        for slot, tensor in enumerate(tensors):
            name = f"tensors[{slot}]"
            self.known[f"dtype{slot}"] = tensor.dtype
            tests.append(f"{name}.shape != {tuple(tensor.shape)} or {name}.stride() != {tensor.stride()}")
            tests.append(f"{name}.dtype is not dtype{slot} or ({name}.data_ptr() % 16 == 0) is not {tensor.data_ptr() % 16 == 0}")
        tests += checks_of_scalars(self.scalars)
        if walk is not None:
            other = [f"walk.rows.shape != {tuple(walk.rows.shape)}"]
            for name in ("rows", "partial", "full", "order"):
                other.append(f"(walk.{name}.data_ptr() % 16 == 0) is not {getattr(walk, name).data_ptr() % 16 == 0}")
            self.known["recorded"] = weakref.ref(walk)  # most maps are kept
            tests.append(f"walk is not recorded() and ({' or '.join(other)})")
        self.lines += [f"if {test}: return None" for test in tests]

    def function(self) -> Again:
        """The function, compiled."""
        return function_of(self.all_lines(), self.known)

    def all_lines(self) -> list[str]:
        """Of the function."""
        results = [f"result{place} = {text}" for place, text in enumerate(self.results)]
        printed = [text for name, argument in zip(self.names, self.arguments, strict=True) for text in self._argument(name, argument)]
        grid = ", ".join(map(str, self.grid))
        fixed = f"{grid}, stream_of({self.index}), function, cooperative, pdl, None, None, metadata, None, None, None"
        end = "return " + ", ".join(f"result{place}" for place in range(len(self.results)))
        return [*self.lines, *results, f"launch({fixed}, {', '.join(printed)})", end]

    def _argument(self, name: str, argument: Any) -> list[str]:
        if isinstance(argument, Tensor):
            return [f"{self._path(argument)}.data_ptr()"]
        if hasattr(argument, "base"):
            return self._descriptor(argument)
        if name == "scale":
            return ["scale"]
        if name in self._scalar_names():
            return [f"scalars[{self._scalar_names().index(name)}]"]
        if type(argument) is not int and type(argument) is not bool:
            raise OtherLaunch
        return [repr(argument)]

    def _scalar_names(self) -> tuple[str, ...]:
        """The arguments that run-time numbers go to: they stand before those of the map, or before the scale."""
        end = self.names.index("map_ptr") if "map_ptr" in self.names else self.names.index("scale")
        return tuple(self.names[end - len(self.scalars) : end])

    def _path(self, tensor: Tensor) -> str:
        path = self.paths.get(id(tensor))
        if path is None:
            raise OtherLaunch
        return path

    def _descriptor(self, argument: Any) -> list[str]:
        """A bulk-copy descriptor: encoded anew where the tensor is at an address not met lately."""
        name = f"encoded{len(self.known)}"
        self.known[name] = _Encoded(argument, next(self.metas, None))
        return [f"{name}[{self._path(argument.base)}.data_ptr()]", *map(str, argument.shape), *map(str, argument.strides)]


class _Encoded(dict):
    """Address → encoded descriptor."""

    def __init__(self, descriptor: Any, meta: Any):
        from triton import runtime as triton_runtime
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        driver: Any = triton_runtime.driver
        super().__init__()
        if meta is None or meta["fp4_padded"]:
            raise OtherLaunch
        padding = 1 if descriptor.padding == "nan" else 0
        kinds = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
        encode, shape, strides = driver.active.utils.fill_tma_descriptor, list(descriptor.shape), list(descriptor.strides)
        self._encode = lambda address: encode(address, *kinds, shape, strides, padding)

    def __missing__(self, address: int) -> Any:
        if len(self) >= _POINTERS_AT_HAND:
            self.clear()
        made = self[address] = self._encode(address)
        return made


def _launcher_of(binary: Any) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function in C that launches a binary, and what it knows of each descriptor."""
    run: Any = getattr(binary, "run", None)
    needs = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if type(run).__name__ != "CudaLauncher" or not all(hasattr(run, name) for name in needs):
        raise OtherLaunch
    if run.global_scratch_size or run.profile_scratch_size:
        raise OtherLaunch
    launch = run.launch
    if not isinstance(launch, types.FunctionType):
        return launch, ()
    # With descriptors, Triton's `inner` encodes them in Python around the same function.
    inside = dict(zip(launch.__code__.co_freevars, launch.__closure__ or ()))
    if not {"launcher", "tensordesc_meta"} <= set(inside):
        raise OtherLaunch
    return inside["launcher"].cell_contents, inside["tensordesc_meta"].cell_contents
