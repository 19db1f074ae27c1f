"""When a trace is used again, and when not: equal functions share one, different captured values never share what they should not."""

from __future__ import annotations

import functools
import math
import threading
import timeit

import numpy as np
import pytest
import torch

from flexc import frontend
from flexc.errors import InputError, TraceError
from flexc.ir.graph import FLOAT32, INT32, INT64
from tests.frontend.truth import assert_same, traced_with_values, values_of_graph

WIDTH = 4


def window(width):
    return lambda b, h, q, k: 0 <= q - k < width


def traces_of(functions):
    """How many different traces these functions need, one after the other; each is compared with the function."""
    traces = []
    for function in functions:
        trace, _ = traced_with_values(function)
        traces.append(trace)
        assert_same(function, as_tensors=False)
    return len(set(map(id, traces)))


# --- numbers ----------------------------------------------------------------------------------------------------------------------------


def test_the_first_number_is_a_constant():
    trace, binding = frontend.trace(None, window(3))
    assert trace.graph.scalars == () and binding.scalars == ()


def test_the_same_function_and_value_is_traced_once():
    assert frontend.trace(None, window(3))[0] is frontend.trace(None, window(3))[0]


def test_twelve_window_values_need_two_traces():
    assert traces_of(window(width) for width in range(10, 22)) == 2


def test_the_second_value_is_a_scalar():
    frontend.trace(None, window(3))
    trace, binding = frontend.trace(None, window(4))
    assert [(s.name, s.dtype) for s in trace.graph.scalars] == [("width", INT32)] and binding.scalars == (4,)


def test_returning_to_the_first_value_finds_its_constant_trace():
    first, _ = frontend.trace(None, window(3))
    frontend.trace(None, window(4))
    assert frontend.trace(None, window(3))[0] is first


def test_all_numbers_become_scalars_together():
    def make(low, high):
        return lambda b, h, q, k: (q - k >= low) & (q - k < high)

    pairs = [(0, 3), (0, 4), (1, 4), (2, 7), (0, 9)]
    assert traces_of(make(*pair) for pair in pairs) == 2


def test_floats_become_float32_scalars():
    def make(cap):
        return lambda s, b, h, q, k: cap * math.tanh(s / cap)

    assert traces_of(make(cap) for cap in (15.0, 50.0, 30.0)) == 2
    assert frontend.trace(make(20.0), None)[0].graph.scalars[0].dtype == FLOAT32


def test_globals_defaults_attributes_and_items_become_scalars(monkeypatch):
    class Holder:
        gain = 1

    def make(default, gain, item):
        holder = Holder()
        holder.gain = gain
        items = {"shift": [item]}
        return lambda s, b, h, q, k, c=default: s * c + holder.gain * q + items["shift"][0] + WIDTH

    functions = [make(1, 2, 3), make(2, 2, 3), make(3, 5, 3), make(3, 5, 8)]
    assert traces_of(functions) == 2
    names = [s.name for s in traced_with_values(functions[-1])[0].graph.scalars]
    assert sorted(names) == ["WIDTH", "c", "gain", "shift_0"]
    before = traced_with_values(functions[-1])[0]
    monkeypatch.setitem(functions[-1].__globals__, "WIDTH", 77)
    trace, binding = traced_with_values(functions[-1])
    assert trace is before and 77 in binding.scalars


def test_lengths_in_tensor_shapes_become_scalars():
    """A mask that reads L and S from the sizes of a captured tensor."""

    def make(length, size):
        table = torch.zeros(length, size)
        return lambda b, h, q, k: q - table.shape[0] >= k - table.shape[1]

    assert traces_of(make(*sizes) for sizes in ((4, 5), (4, 6), (7, 9), (3, 3))) == 2


def test_lengths_in_a_shape_become_scalars():
    def make(length):
        shape = torch.zeros(2, length).shape
        return lambda b, h, q, k: k < shape[1]

    assert traces_of(make(length) for length in (2, 3, 4, 5)) == 2


def test_only_the_sizes_that_are_read_are_guarded():
    def make(length, size):
        table = torch.zeros(length, size)
        return lambda s, b, h, q, k: s + table[0, 0] * table.shape[0]

    assert traces_of([make(4, 5), make(4, 6), make(4, 7)]) == 1


def test_a_length_in_a_zero_dimensional_tensor_is_traced_once():
    def make(length):
        limit = torch.tensor(length)
        return lambda b, h, q, k: k < limit

    assert traces_of(make(length) for length in range(10)) == 1


def test_a_number_that_python_needs_stays_a_constant():
    def make(rounds, gain):
        def score(s, b, h, q, k):
            for i in range(rounds):
                s = s * gain + i
            return s

        return score

    assert traces_of([make(2, 0.5), make(2, 0.75), make(2, 0.25)]) == 2
    trace, _ = frontend.trace(make(2, 0.3))
    assert [s.name for s in trace.graph.scalars] == ["gain"]
    assert frontend.trace(make(3, 0.3))[0] is not trace
    assert_same(make(3, 0.3), as_tensors=False)


@pytest.mark.parametrize(
    "use",
    [
        lambda n: [1.0, 2.0, 3.0, 4.0][n],
        lambda n: {1: 2.0, 2: 3.0}[n],
        lambda n: sum([1.0] * n),
        lambda n: len("a" * n),
        lambda n: torch.arange(n).sum(),
        lambda n: math.gcd(n, 2),
        lambda n: float(f"{int(n):d}") if n.bit_length() else 0.0,
    ],
)
def test_python_may_do_anything_with_a_captured_number(use):
    def make(count, gain):
        return lambda s, b, h, q, k: s * gain + use(count)

    for count, gain in ((1, 0.5), (1, 0.75), (2, 0.75), (2, 0.25)):
        assert_same(make(count, gain), as_tensors=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, q, n: torch.add(s, q, alpha=n),
        lambda s, q, n: torch.nn.functional.leaky_relu(s, n),
        lambda s, q, n: torch.full_like(s, n) + s,
        lambda s, q, n: torch.clamp(s, -n, n),
        lambda s, q, n: s.clamp(min=n),
        lambda s, q, n: s.masked_fill(q > 1, n),
        lambda s, q, n: torch.tensor(n) * s,
        lambda s, q, n: torch.zeros(2).fill_(n)[0] + s,
        lambda s, q, n: s * np.full(2, n)[0],
        lambda s, q, n: torch.round(s, decimals=int(n)),
    ],
)
def test_a_captured_number_may_be_an_option(function):
    """Also where torch and NumPy take numbers only."""

    def make(number):
        return lambda s, b, h, q, k: function(s, q, number)

    for number in (0.5, 1.5, 2.5):
        assert_same(make(number))


def test_a_mistake_is_still_a_mistake_when_numbers_change():
    def make(number):
        return lambda s, b, h, q, k: s * number + torch.add(s, q, gamma=number) if number > 1 else s

    frontend.trace(make(1))
    for number in (2, 3):
        with pytest.raises(TypeError, match="gamma"):
            frontend.trace(make(number))


def test_a_whole_exponent_stays_a_constant():
    """s ** 2 multiplies, whatever other numbers come; `pow` would be slower, and inexact on whole numbers."""

    def make(exponent, gain):
        return lambda s, b, h, q, k: s * gain + q**exponent

    for exponent, gain in ((2, 1), (2, 5), (3, 5)):
        trace, _ = frontend.trace(make(exponent, gain))
        assert "pow" not in {node.op for node in trace.graph.nodes()}
        assert_same(make(exponent, gain), as_tensors=False)


def test_if_on_a_number_is_decided_by_the_number():
    """Not by its value at tracing time: both sides are found again, whatever the value."""

    def make(width):
        return lambda b, h, q, k: q - k < width if width > 0 else True

    assert traces_of(make(width) for width in (1, 2, 3, 0, -1, 4, -5, 2)) == 3


def test_ints_and_floats_do_not_share_a_trace():
    def make(factor):
        return lambda s, b, h, q, k: s + q // factor

    for factor in (2, 2.0, 3, 1.5, 4, 2.5):
        assert_same(make(factor), as_tensors=False)


def test_large_integers_become_int64_scalars():
    def make(limit):
        return lambda b, h, q, k: q * 1 < limit

    for limit in (1, 2, 2**40, 2**41, 3, 2**70, 2**71):
        assert_same(make(limit), as_tensors=False)
    frontend.clear_cache()
    frontend.trace(None, make(2**40))
    assert frontend.trace(None, make(2**41))[0].graph.scalars[0].dtype == INT64


def test_not_a_number_is_equal_to_itself_as_a_guard():
    def make(value):
        return lambda s, b, h, q, k: s + value

    assert frontend.trace(make(math.nan))[0] is frontend.trace(make(math.nan))[0]


def test_negative_zero_is_not_zero():
    def make(value):
        return lambda s, b, h, q, k: (s * 0 + 1) / (value * 1.0 + abs(s) * value)

    assert values_of_graph(make(0.0))[0] == math.inf and values_of_graph(make(-0.0))[0] == -math.inf


def test_bools_are_always_constants():
    def make(flag):
        return lambda b, h, q, k: (q >= k) if flag else (q <= k)

    assert traces_of(make(flag) for flag in (True, False, True, False)) == 2


def test_numpy_numbers_are_numbers():
    def make(width):
        width = np.int64(width)
        return lambda b, h, q, k: q - k < width

    assert traces_of(make(width) for width in range(2, 6)) == 2


def test_constant_compiles_in_every_value():
    def make(width, shift):
        width = frontend.constant(width)
        return lambda b, h, q, k: q - k < width + shift

    traces = [frontend.trace(None, make(width, 0))[0] for width in (1, 2, 3)]
    assert len(set(traces)) == 3 and "width" not in [s.name for t in traces for s in t.graph.scalars]
    assert frontend.constant(3) == 3 and isinstance(frontend.constant(2.5), float)


def test_runtime_compiles_once():
    def make(width):
        width = frontend.runtime(width)
        return lambda b, h, q, k: q - k < width

    assert traces_of(make(width) for width in (1, 2, 3)) == 1


@pytest.mark.parametrize("mark", [frontend.constant, frontend.runtime])
def test_only_numbers_are_marked(mark):
    with pytest.raises(InputError, match=rf"flexc.{mark.__name__} takes an int or a float, got str"):
        mark("3")
    with pytest.raises(InputError, match="got bool"):
        mark(True)


# --- what must not be shared --------------------------------------------------------------------------------------------------------------


def test_default_arguments_are_told_apart():
    def make(c):
        def score(s, b, h, q, k, c=c):
            return s * c

        return score

    assert torch.equal(values_of_graph(make(1.0)) * 2, values_of_graph(make(2.0)))


def test_objects_of_equal_printed_form_are_told_apart():
    class Silent:
        def __init__(self, gain):
            self.gain = gain

        def __repr__(self):
            return "Silent()"

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    def make(gain):
        holder = Silent(gain)
        return lambda s, b, h, q, k: s * holder.gain

    assert torch.equal(values_of_graph(make(1.0)) * 2, values_of_graph(make(2.0)))


def test_large_arrays_are_told_apart_where_print_elides_them():
    def make(middle):
        table = np.zeros(5000)
        table[2500] = middle
        return lambda s, b, h, q, k: s * 0 + table[2500 + q * 0]

    assert values_of_graph(make(1.0))[0] == 1 and values_of_graph(make(2.0))[0] == 2


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_contents_of_containers_are_compared_by_value(kind):
    def make(*numbers):
        table = kind(numbers)
        return lambda s, b, h, q, k: s + table[h]

    for numbers in ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 5.0), (9.0, 8.0, 7.0, 6.0, 5.0)):
        assert_same(make(*numbers), as_tensors=False)
    assert frontend.trace(make(1.0, 2.0, 3.0, 4.0))[0] is frontend.trace(make(1.0, 2.0, 3.0, 4.0))[0]


def test_a_changed_list_is_seen():
    table = [1.0, 2.0, 3.0, 4.0]

    def score(s, b, h, q, k):
        return s + table[h] + len(table)

    assert_same(score, as_tensors=False)
    table[3] = 7.0
    assert_same(score, as_tensors=False)
    table.append(1.0)
    assert_same(score, as_tensors=False)


def test_a_changed_dict_is_seen():
    options = {"a": 1}

    def score(s, b, h, q, k):
        return s + sum(options.values()) + ("b" in options)

    for change in ({}, {"b": 5}, {"b": 6}, {"c": 7}):
        options.update(change)
        assert_same(score, as_tensors=False)


def test_a_replaced_helper_is_seen():
    def make(helper):
        return lambda s, b, h, q, k: helper(s)

    assert_same(make(lambda x: x + 1))
    assert_same(make(lambda x: x * 2))
    assert_same(make(torch.tanh))
    assert_same(make(torch.exp))


def test_a_changed_global_is_seen(monkeypatch):
    def score(s, b, h, q, k):
        return s * WIDTH

    for value in (4, 5.5, 7, True, torch.tensor(3.0)):
        monkeypatch.setitem(score.__globals__, "WIDTH", value)
        assert_same(score)


def test_a_global_that_hides_a_builtin_is_seen(monkeypatch):
    def score(s, b, h, q, k):
        return max(s, 0)

    assert_same(score, as_tensors=False)
    monkeypatch.setitem(score.__globals__, "max", lambda a, b: a - b - 1)
    assert_same(score, as_tensors=False)


def test_a_changed_class_attribute_is_seen():
    class Config:
        width = 1

    def mask(b, h, q, k):
        return q - k < Config.width

    for width in (1, 2, 3):
        Config.width = width
        assert_same(mask)


def test_an_attribute_that_appears_is_seen():
    class Config:
        pass

    config = Config()

    def score(s, b, h, q, k):
        return s * config.gain if hasattr(config, "gain") else s

    assert_same(score)
    config.gain = 3
    assert_same(score)


def test_the_truth_of_an_object_is_seen():
    class Switch:
        on = True

        def __bool__(self):
            return self.on

    switch = Switch()

    def score(s, b, h, q, k):
        return s if switch else -s

    assert_same(score)
    switch.on = False
    assert_same(score)


def test_a_method_of_another_class_is_seen():
    class One:
        def bias(self, q):
            return q

    class Two(One):
        def bias(self, q):
            return -q

    def make(holder):
        return lambda s, b, h, q, k: s + holder.bias(q)

    assert_same(make(One()))
    assert_same(make(Two()))


def test_two_names_for_one_tensor_are_not_two_tensors():
    def make(first, second):
        return lambda s, b, h, q, k: s + first[h] - second[h]

    one, other = torch.rand(4), torch.rand(4)
    assert_same(make(one, one))
    assert_same(make(one, other))
    assert_same(make(other, other))


@pytest.mark.parametrize(
    "other",
    [
        torch.rand(4, 4),
        torch.rand(4).half(),
        torch.rand(4, requires_grad=True),
        torch.zeros(4, dtype=torch.bool),
        torch.empty(4, device="meta"),
    ],
    ids=["rank", "dtype", "gradient", "bool", "device"],
)
def test_tensors_of_another_kind_do_not_share_a_trace(other):
    def make(table):
        return lambda s, b, h, q, k: s + (table[h] if table.ndim == 1 else table[h, q])

    first, _ = frontend.trace(make(torch.rand(4)))
    assert frontend.trace(make(torch.rand(7)))[0] is first
    trace, _ = frontend.trace(make(other))
    assert trace is not first and trace.graph.tensors[0].needs_grad == other.requires_grad


def test_scores_and_masks_are_kept_apart():
    causal, score = (lambda b, h, q, k: q >= k), (lambda s, b, h, q, k: s * 2)
    traces = [frontend.trace(score, causal)[0], frontend.trace(score)[0], frontend.trace(None, causal)[0]]
    assert [[name for name, _ in t.graph.outputs] for t in traces] == [["score", "mask"], ["score"], ["mask"]]


# --- binding ------------------------------------------------------------------------------------------------------------------------------


def test_bind_reads_the_values_of_the_function_it_is_given():
    def make(table, width):
        return lambda s, b, h, q, k: s + table[h] * frontend.where(q < width, 1.0, 0.0)

    frontend.trace(make(torch.rand(4), 2))
    trace, _ = frontend.trace(make(torch.rand(4), 3))
    table = torch.rand(4)
    binding = trace.bind(make(table, 9), None)
    assert binding is not None and binding.tensors[0] is table and binding.scalars == (9,)


def test_bind_refuses_what_the_graph_does_not_hold_for():
    def make(table):
        return lambda s, b, h, q, k: s + table[h]

    trace, _ = frontend.trace(make(torch.rand(4)))
    assert trace.bind(make(torch.rand(4, 4)), None) is None
    assert trace.bind(make([1.0, 2.0]), None) is None
    assert trace.bind(lambda s, b, h, q, k: s, None) is None
    assert trace.bind(None, None) is None
    assert trace.bind(make(torch.rand(4)), window(3)) is None


def test_bind_survives_a_path_that_has_gone():
    class Holder:
        pass

    holder = Holder()
    holder.gain = 2.0

    def score(s, b, h, q, k):
        return s * holder.gain

    trace, _ = frontend.trace(score)
    del holder.gain
    assert trace.bind(score, None) is None


def test_gradients_flow_through_what_bind_returns():
    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(4))

        @property
        def doubled(self):
            return self.weight * 2

        def forward(self, s, b, h, q, k):
            return s + self.doubled[h]

    module = Bias()
    trace, binding = frontend.trace(module)
    again = trace.bind(module, None)
    assert again is not None and again.tensors[0] is not binding.tensors[0]
    again.tensors[0].sum().backward()
    assert module.weight.grad is not None and bool((module.weight.grad == 2).all())


def test_bind_takes_microseconds():
    slopes, width = torch.rand(4), 3

    def score(s, b, h, q, k):
        return s - slopes[h] * (q - k)

    def mask(b, h, q, k):
        return q - k < width

    trace, _ = frontend.trace(score, mask)
    fastest = min(timeit.repeat(lambda: trace.bind(score, mask), number=1000, repeat=5)) / 1000
    assert fastest < 100e-6, f"{fastest * 1e6:.0f} us"


def test_partial_and_method_made_anew_share_a_trace():
    class Bias:
        def __init__(self, table):
            self.table = table

        def score(self, s, b, h, q, k, gain=1.0):
            return s + gain * self.table[h]

    def make():
        return functools.partial(Bias(torch.rand(4)).score, gain=2.0)

    assert frontend.trace(make())[0] is frontend.trace(make())[0]


def test_clear_cache_forgets():
    first, _ = frontend.trace(None, window(3))
    frontend.clear_cache()
    assert frontend.trace(None, window(3))[0] is not first


def test_threads_share_traces():
    found = []

    def work():
        found.append(frontend.trace(None, window(3))[0])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1


def test_a_value_that_changes_at_every_reading_is_refused():
    class Restless:
        count = 0

        @property
        def label(self):
            Restless.count += 1
            return str(Restless.count)

    holder = Restless()

    def score(s, b, h, q, k):
        return s if holder.label else -s

    with pytest.raises(TraceError, match="captures something that changes each time it is read"):
        frontend.trace(score)
