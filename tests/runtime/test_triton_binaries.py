"""Who is told of Triton's binaries, with a Triton that only pretends. tests/test_compile_log.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexc.runtime.triton_binaries import watch

pytest.importorskip("triton")


class Observer:
    def __init__(self, refuses=False):
        self.told, self.refuses = [], refuses

    def missing(self, kernel):
        self.told.append(("missing", kernel))
        if self.refuses:
            raise RuntimeError("not allowed")

    def ready(self, kernel, compiled, seconds):
        self.told.append(("ready", kernel, compiled))
        assert seconds >= 0


class Source:
    """What Triton compiles: its IR is made only where its cache has no binary."""

    def __init__(self, name):
        self.name, self.made = name, 0

    def make_ir(self, *args):
        self.made += 1
        return args


class Function:
    """As much of a JITFunction as a launch uses: the hook first, then `self.compile`."""

    def __init__(self, name, on_disk):
        self.name, self.on_disk = name, on_disk
        self.compile = self._compile

    def _compile(self, source, target, options):
        return ("from disk", target) if self.on_disk else (source.make_ir(target, options), target)

    def launch(self):
        from triton import knobs

        source = Source(self.name)
        knobs.runtime.jit_cache_hook(key="", repr="", fn=SimpleNamespace(jit_function=self), compile={}, is_manual_warmup=False)
        return self.compile(source, target="sm_90", options={}), source.made


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    """Triton's hook is as it was after each test."""
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    yield knobs.runtime
    knobs.runtime.jit_cache_hook = before


def module_of(**functions):
    return SimpleNamespace(LAUNCH=dict.fromkeys(functions, (4, 1)), **functions)


def test_compiled_binary_is_told_before_and_after():
    function, observer = Function("forward_kernel", on_disk=False), Observer()
    watch(module_of(forward_kernel=function), observer)
    for _ in range(2):  # another specialisation of the same kernel
        assert function.launch() == ((("sm_90", {}), "sm_90"), 1)
    assert observer.told == [("missing", "forward_kernel"), ("ready", "forward_kernel", True)] * 2


def test_binary_on_the_disk_is_no_compilation():
    function, observer = Function("forward_kernel", on_disk=True), Observer(refuses=True)
    watch(module_of(forward_kernel=function), observer)
    assert function.launch() == (("from disk", "sm_90"), 0)
    assert observer.told == [("ready", "forward_kernel", False)]


def test_refusal_ends_the_launch_before_anything_is_compiled():
    function, observer = Function("forward_kernel", on_disk=False), Observer(refuses=True)
    watch(module_of(forward_kernel=function), observer)
    with pytest.raises(RuntimeError, match="not allowed"):
        function.launch()
    assert observer.told == [("missing", "forward_kernel")]


def test_kernels_of_others_are_left_alone():
    ours, theirs, observer = Function("forward_kernel", on_disk=False), Function("theirs", on_disk=False), Observer(refuses=True)
    watch(module_of(forward_kernel=ours), observer)
    assert theirs.launch()[1] == 1 and observer.told == []


def test_hook_that_was_there_is_still_called(hook):
    seen = []
    hook.jit_cache_hook = lambda **given: seen.append(given["fn"].jit_function.name) or "its answer"
    watch(module_of(forward_kernel=Function("forward_kernel", on_disk=True)), Observer())
    assert hook.jit_cache_hook(fn=SimpleNamespace(jit_function=Function("theirs", True))) == "its answer"
    assert seen == ["theirs"]


def test_one_hook_serves_all_modules(hook):
    first, second = Function("a", on_disk=False), Function("b", on_disk=False)
    observers = Observer(), Observer()
    watch(module_of(a=first), observers[0])
    ours = hook.jit_cache_hook
    watch(module_of(b=second), observers[1])
    assert hook.jit_cache_hook is ours
    second.launch()
    assert observers[0].told == [] and len(observers[1].told) == 2
