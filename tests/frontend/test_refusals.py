"""What cannot be traced is refused with the expression, the user's line, why, and what to write instead."""

from __future__ import annotations

import os
import random
import time
from os import environ
from time import monotonic_ns

import numpy as np
import pytest
import torch

from flexc import frontend
from flexc.errors import TraceError

TABLE = torch.rand(4, 5)
LENGTHS = torch.tensor([3, 4])
LARGE = torch.rand(4, 100)
SQUARE = torch.rand(4, 16, 16)
COMPLEX = torch.zeros(4, dtype=torch.complex64)
NUMBERS = [1.0, 2.0, 3.0]
OPTIONS = {"gain": 2.0}
HIDDEN = {"set": frozenset({1})}
KEPT = []
COUNT = 0


class Holder:
    gain = 2.0

    def __init__(self):
        self.total = 0


HOLDER = Holder()


def refusal(function):
    """The TraceError for a score function (five arguments) or a mask function."""
    with pytest.raises(TraceError) as caught:
        frontend.trace(function, None) if function.__code__.co_argcount == 5 else frontend.trace(None, function)
    return caught.value


def _traced_loop(b, h, q, k):
    total = 0
    for i in range(LENGTHS[b]):
        total = total + i
    return total > k


def _writes_item(s, b, h, q, k):
    TABLE[h, q] = s
    return s


def _writes_number(s, b, h, q, k):
    rows = TABLE
    rows += 1
    return s


def _writes_list(s, b, h, q, k):
    NUMBERS.append(s)
    return s


def _writes_list_item(s, b, h, q, k):
    NUMBERS[0] = s
    return s


def _writes_dict(s, b, h, q, k):
    OPTIONS["gain"] = 3
    return s


def _writes_attribute(s, b, h, q, k):
    HOLDER.total = HOLDER.total + 1
    return s


def _writes_global(s, b, h, q, k):
    global COUNT
    COUNT += 1
    return s


def _many_paths(s, b, h, q, k):
    for i in range(8):
        if q == i:
            s = s + 1
        if k > i:
            s = s - 1
    return s


def _endless(s, b, h, q, k):
    while q > 0:
        q = q - 1
    return s


def _nothing(s, b, h, q, k):
    if q >= k:
        return s


def _raises(s, b, h, q, k):
    if h > 7:
        raise ValueError("too many heads")
    return s


def _unassigned(s, b, h, q, k):
    if h > 7:
        result = s
    return result


def _shuffle(s, b, h, q, k):
    return s + random.random()


class Shifted:
    def __init__(self, x):
        self.x = x + COUNT


# name: (function, the start of the message, what it says instead)
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


REFUSED = {
    "loop over a traced length": (_traced_loop, r"`for` over a traced length \(LENGTHS\[batch\]\)", "a fixed number of rounds"),
    "range of a position": (lambda s, b, h, q, k: sum(s for _ in range(q)), r"`for` over a traced length \(q_idx\)", "fixed number"),
    "loop over a number": (lambda s, b, h, q, k: sum(s), "a loop over score", "captured tensor"),
    "item": (lambda s, b, h, q, k: s + LENGTHS[b].item(), r"\.item\(\) of a traced value", "the traced value itself"),
    "item of a whole tensor": (lambda s, b, h, q, k: s + TABLE.item(), r"\.item\(\) of a traced value", "the traced value itself"),
    "tolist": (lambda s, b, h, q, k: s + TABLE.tolist()[0][0], r"\.tolist\(\)", "the traced value itself"),
    "random torch": (lambda s, b, h, q, k: s + torch.rand(()), r"random numbers \(torch.rand\)", "drawn before the call"),
    "random like": (lambda s, b, h, q, k: s + torch.randn_like(s), r"random numbers \(torch.randn_like\)", "drawn before the call"),
    "random python": (_shuffle, r"random numbers \(random.random\)", "drawn before the call"),
    "random numpy": (lambda s, b, h, q, k: s + np.random.rand(), r"random numbers \(numpy.random.rand\)", "drawn before the call"),
    "dropout": (lambda s, b, h, q, k: torch.nn.functional.dropout(s), r"random numbers \(torch.dropout\)", "drawn before the call"),
    "environment": (lambda s, b, h, q, k: s * len(os.environ.get("HOME", "")), r"os\.environ in a score", "read before the call"),
    "environment by name": (lambda b, h, q, k: q > k if "HOME" in environ else q < k, r"os\.environ in a score", "read before the call"),
    "clock": (lambda s, b, h, q, k: s * time.perf_counter(), r"time\.perf_counter in a score", "read before the call"),
    "clock by name": (lambda s, b, h, q, k: s * monotonic_ns(), r"time\.monotonic_ns in a score", "read before the call"),
    "mode of autograd": (
        lambda s, b, h, q, k: s if torch.is_grad_enabled() else -s,
        r"torch\.is_grad_enabled in a",
        "read before the call",
    ),
    "write to a tensor": (_writes_item, r"TABLE\[...\] = ... writes to the captured tensor TABLE", "a new value"),
    "in-place operator": (_writes_number, r"\+= writes to the captured tensor TABLE", "x = x \\+ y"),
    "in-place method": (lambda s, b, h, q, k: s + TABLE.add_(1)[h, q], r"\.add_\(\) writes to the captured tensor TABLE", "a new value"),
    "in-place on a value": (lambda s, b, h, q, k: s.add_(1), r"\.add_\(\) writes to a traced value", r"x = x\.add\(...\)"),
    "out": (lambda s, b, h, q, k: torch.tanh(s, out=s), "out= of tanh", "the value that the function returns"),
    "write to a list": (_writes_list, r"\.append\(\) writes to the captured NUMBERS", "a local variable"),
    "write to an element": (_writes_list_item, "an assignment to an element writes to the captured NUMBERS", "a local variable"),
    "write to a dict": (_writes_dict, "an assignment to an element writes to the captured OPTIONS", "a local variable"),
    "write to an attribute": (_writes_attribute, "an assignment to .total writes to the captured HOLDER", "a local variable"),
    "write to a global": (_writes_global, "assignment to the global variable COUNT", "a local variable"),
    "too many paths": (_many_paths, "more than 64 paths", "flexc.where"),
    "endless while": (_endless, "more than 64 paths", "a fixed number of rounds"),
    "nothing": (_nothing, "_nothing returns nothing on some path", "a number on every path"),
    "exception on a path": (_raises, "ValueError on the path where head > 7 is True: too many heads", "on every path"),
    "unassigned": (_unassigned, "UnboundLocalError on the path where head > 7 is False", "on every path"),
    "score of truth": (lambda s, b, h, q, k: q >= k, "returns a truth value: this looks like a mask", "a mask function"),
    "score True": (lambda s, b, h, q, k: True, "returns a truth value: this looks like a mask", "a mask function"),
    "score of text": (lambda s, b, h, q, k: "s", "returns a str", "a number on every path"),
    "score of two": (lambda s, b, h, q, k: (s, s), "returns a tuple", "a number on every path"),
    "score of a row": (lambda s, b, h, q, k: s + TABLE[h], "returns 5 values", "a number on every path"),
    "mask of a float": (lambda b, h, q, k: TABLE[h, k], "returns a float, but a mask function returns a truth value", "x > 0"),
    "mask of an integer": (lambda b, h, q, k: q - k, "returns an integer, but a mask function returns a truth value", "x != 0"),
    "mask of 1": (lambda b, h, q, k: 1, "returns an integer, but a mask function returns a truth value", "x != 0"),
    "dict key": (lambda s, b, h, q, k: s * {0: 1.0}[h], "head as a dict key or in a set", "a list or a captured tensor"),
    "captured dict key": (lambda s, b, h, q, k: s * OPTIONS[h], "head as a dict key or in a set", "a list or a captured tensor"),
    "in a set": (lambda b, h, q, k: h in {1, 2}, "head as a dict key or in a set", r"joined by \|"),
    "in a captured set": (lambda b, h, q, k: h in HIDDEN["set"], "head as a dict key or in a set", r"joined by \|"),
    "local list": (lambda s, b, h, q, k: s * [1.0, 2.0][h], "Python asks for the value of head", "a captured torch tensor"),
    "subtracting truths": (lambda b, h, q, k: (q > k) - (h > 1), "`sub` of", "a & ~b"),
    "negated truth": (lambda b, h, q, k: -(q > k), "`neg` of", "~a"),
    "and of floats": (lambda s, b, h, q, k: s & 1, "`and` of score", r"\.int\(\)"),
    "condition is a number": (lambda s, b, h, q, k: torch.where(q, s, 0.0), "`where` of q_idx", "a comparison"),
    "float index": (lambda s, b, h, q, k: s + TABLE[h, q / 2], "index q_idx / 2 into TABLE is a float", "// in place of /"),
    "truth index": (lambda s, b, h, q, k: s + TABLE[h, q > k], "index q_idx > kv_idx into TABLE is a truth value", "flexc.where"),
    "text index": (lambda s, b, h, q, k: s + TABLE["a", k], "str 'a' as an index into TABLE", "an integer"),
    "too many indices": (lambda s, b, h, q, k: s + TABLE[b, h, q], "3 indices into TABLE, which has 2 dimensions left", "fewer indices"),
    "slice with a traced end": (
        lambda s, b, h, q, k: s + TABLE[h, :k].sum(),
        r"a slice of TABLE with a traced end \(kv_idx\)",
        "fixed ends",
    ),
    "large vector": (lambda s, b, h, q, k: s + LARGE[h].sum(), r"the captured tensor LARGE.* of shape \(100,\)", "index it down to one"),
    "large product": (lambda s, b, h, q, k: s + SQUARE[h].sum(), r"the captured tensor SQUARE.* of shape \(16, 16\)", "index it down"),
    "shapes": (lambda s, b, h, q, k: s + (TABLE[h] * TABLE[:, q]).sum(), "arrays of shapes .* and", "equal shapes"),
    "complex tensor": (lambda s, b, h, q, k: s + COMPLEX[h].real, "the captured tensor COMPLEX is complex64", "a real tensor"),
    "complex number": (lambda s, b, h, q, k: s * 1j, r"the complex number 1j", "real and imaginary"),
    "softmax": (lambda s, b, h, q, k: torch.softmax(s, 0), "torch.softmax of a traced value", "outside the function"),
    "unknown function": (lambda s, b, h, q, k: torch.lgamma(s), "torch.lgamma of a traced value", "outside the function"),
    "unknown method": (lambda s, b, h, q, k: s.clam(0, 1), r"\.clam\(\) of a traced value", "clamp"),
    "unknown math": (lambda s, b, h, q, k: __import__("math").gamma(s), r"float\(\) of score", "torch functions"),
    "unknown ufunc": (lambda s, b, h, q, k: np.arctan(s), "numpy.arctan of a traced value", "outside the function"),
    "ufunc reduction": (lambda s, b, h, q, k: np.add.reduce(s), "numpy.add.reduce of a traced value", "torch functions"),
    "detach": (lambda s, b, h, q, k: s.detach() + s, r"\.detach\(\) of a traced value", r"T\.detach\(\)"),
    "matrix product": (lambda s, b, h, q, k: s @ q, "score @ q_idx", r"\*"),
    "object made inside": (lambda s, b, h, q, k: s + Shifted(q).x, "an object of class Shifted made in the function", "captured"),
    "numpy array of values": (lambda s, b, h, q, k: np.asarray(s), "a NumPy array of score", "operators"),
    "index of a number": (lambda s, b, h, q, k: s[0], "an index into score", "the number itself"),
    "list of tensors": (lambda s, b, h, q, k: s + [TABLE, TABLE][h][q, k], "Python asks for the value of head", "captured torch tensor"),
    "new vector": (lambda s, b, h, q, k: s + s.new_ones(3), r"a new tensor of shape \(3,\)", "a Python number"),
    "new tensor of several": (lambda s, b, h, q, k: s + s.new_tensor([1.0, 2.0]).sum(), "a new tensor of several numbers", "indexed"),
    "function with a derivative of its own": (lambda s, b, h, q, k: Doubled.apply(s), "Doubled.apply of a traced value", "its formula"),
    "cast to complex": (lambda s, b, h, q, k: s.to(torch.complex64), "a cast to torch.complex64", r"\.float\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, what, instead = REFUSED[name]
    error = refusal(function)
    with pytest.raises(TraceError, match=what):
        raise error
    with pytest.raises(TraceError, match=rf"\n  why: .+\n  instead: .*{instead}"):
        raise error
    with pytest.raises(TraceError, match=r"\n  at test_refusals.py:\d+: "):
        raise error


def test_a_trace_error_is_a_type_error():
    assert isinstance(refusal(_traced_loop), TypeError)


def test_the_line_is_the_users():
    error = refusal(_traced_loop)
    assert error.where.line == _traced_loop.__code__.co_firstlineno + 2
    assert str(error).splitlines()[1].endswith("for i in range(LENGTHS[b]):")


def test_nonlocal_assignment():
    total = 0

    def score(s, b, h, q, k):
        nonlocal total
        total += 1
        return s

    with pytest.raises(TraceError, match=r"assignment to the captured variable total\n  at test_refusals.py:\d+: total \+= 1"):
        frontend.trace(score)


def test_captured_list_of_tensors_by_a_position():
    tables = [torch.rand(4), torch.rand(4)]
    with pytest.raises(TraceError, match=r"index head into tables: element 0 is a Tensor"):
        frontend.trace(lambda s, b, h, q, k: s + tables[h][q])


def test_captured_list_of_many_numbers_by_a_position():
    numbers = list(range(65))
    with pytest.raises(TraceError, match=r"index q_idx into a list of 65\n.*\n.*at most 64.*\n.*torch.tensor\(values\)"):
        frontend.trace(lambda s, b, h, q, k: s + numbers[q])


def test_a_value_kept_from_another_trace():
    frontend.trace(lambda s, b, h, q, k: (KEPT.__iter__(), s)[1])
    leaked = []

    class Sink:
        def put(self, x):
            leaked.append(x)

    def keeps(s, b, h, q, k):
        keep(s)
        return s

    keep = type("Keep", (), {"__call__": staticmethod(leaked_into(leaked))})()
    frontend.trace(keeps)
    with pytest.raises(TraceError, match="holds a traced value of another call"):
        value = leaked[0]
        frontend.trace(lambda s, b, h, q, k: s + value)
    with pytest.raises(TraceError, match="a traced value from another call: score"):
        leaked[0] + 1


def leaked_into(store):
    """A function written in C for the tracer: what it does is not seen."""
    return store.append


def test_a_hidden_tensor():
    """A tensor that only a C object knows cannot be read again at the next call."""
    from operator import methodcaller

    hidden = methodcaller("__call__", torch.rand(4))

    def add(table):
        return table

    with pytest.raises(TraceError, match=r"a tensor of shape \(4,\) that flexc did not see captured"):
        frontend.trace(lambda s, b, h, q, k: s + hidden(add)[h])


def test_a_module_with_hooks():
    class Bias(torch.nn.Module):
        def forward(self, s, b, h, q, k):
            return s

    module = Bias()
    module.register_forward_hook(lambda *args: None)
    with pytest.raises(TraceError, match="score has forward hooks"):
        frontend.trace(module)


def test_sparse_tensor():
    table = torch.eye(4).to_sparse()
    with pytest.raises(TraceError, match="the captured tensor table is torch.sparse_coo"):
        frontend.trace(lambda s, b, h, q, k: s + table[h, q])


def test_a_function_that_takes_other_steps_when_run_again():
    steps = iter(range(100))
    advance = type("Advance", (), {"__call__": staticmethod(steps.__next__)})()

    def score(s, b, h, q, k):
        return s if q > advance() else -s

    with pytest.raises(TraceError, match=r"the function took other steps when it was run again: bool\(q_idx > 1\)"):
        frontend.trace(score)


# --- arguments ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "mask", "message"),
    [
        (lambda b, h, q, k: q >= k, None, r"takes 4 arguments, but a score function takes 5: \(score, batch, head, q_idx, kv_idx\)"),
        (None, lambda s, b, h, q, k: s, r"takes 5 arguments, but a mask function takes 4: \(batch, head, q_idx, kv_idx\)"),
        (lambda s, q, k: s, None, r"takes 3 arguments, but a score function takes 5"),
        (None, lambda: True, r"takes 0 arguments, but a mask function takes 4"),
        (lambda *args: args[0], None, r"takes any number of arguments"),
        (3, None, r"int 3 is not a function"),
    ],
)
def test_wrong_arguments(score, mask, message):
    with pytest.raises(TraceError, match=message):
        frontend.trace(score, mask)


def test_four_arguments_are_called_a_mask():
    with pytest.raises(TraceError, match="4 arguments make a mask function: pass it as mask_mod"):
        frontend.trace(lambda b, h, q, k: q >= k, None)
    with pytest.raises(TraceError, match="5 arguments make a score function: pass it as score_mod"):
        frontend.trace(None, lambda s, b, h, q, k: s)


def test_generators_and_coroutines():
    def generator(s, b, h, q, k):
        yield s

    async def coroutine(s, b, h, q, k):
        return s

    with pytest.raises(TraceError, match="generator is a generator function"):
        frontend.trace(generator)
    with pytest.raises(TraceError, match="coroutine is a coroutine function"):
        frontend.trace(coroutine)


def test_not_written_in_python():
    with pytest.raises(TraceError, match="takes 2 arguments|is not written in Python"):
        frontend.trace(torch.add)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda s, b, h, q, k: s, 5),
        (lambda b, h, q, k, width=3: True, 4),
        (lambda s, b, h, q, k, *, gain=1.0: s, 5),
        (lambda b, h, q, k, *rest: True, 4),
    ],
)
def test_arity_counts_what_must_be_given(function, count):
    assert frontend.arity(function) == count


def test_an_ordinary_mistake_is_reported_as_python_does():
    with pytest.raises(NameError, match="undefined_name"):
        frontend.trace(lambda s, b, h, q, k: s + undefined_name)  # noqa: F821  # pyright: ignore
    with pytest.raises(ZeroDivisionError):
        frontend.trace(lambda s, b, h, q, k: s + 1 / 0)
