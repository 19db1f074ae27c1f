"""Where a function may find its values: closures, globals, defaults, partial, objects, modules, containers, helpers."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import types
import weakref

import numpy as np
import pytest
import torch

from flexc import frontend
from tests.frontend.truth import assert_same, traced, traced_with_values

STRENGTH = 0.25
SLOPES = torch.linspace(0.1, 0.9, 4)
TABLE = [0.5, 1.5, 2.5, 3.5]


def _scaled(x):
    return x * STRENGTH


def test_closure():
    slopes, width = torch.rand(4), 2
    assert_same(lambda s, b, h, q, k: s - slopes[h] * (q - k) + width)


def test_global_tensor_and_number():
    assert_same(lambda s, b, h, q, k: s * STRENGTH - SLOPES[h])


def test_default_arguments():
    slopes = torch.rand(4)

    def score(s, b, h, q, k, table=slopes, strength=0.5, *, shift=2):
        return s * strength + table[h] - shift

    assert_same(score)


def test_partial():
    def score(table, s, b, h, q, k, *, strength):
        return s * strength + table[h]

    assert_same(functools.partial(score, torch.rand(4), strength=3))


def test_partial_of_a_partial_of_a_method():
    class Bias:
        def __init__(self):
            self.table = torch.rand(4)

        def score(self, factor, s, b, h, q, k, shift=0):
            return s + factor * self.table[h] + shift

    assert_same(functools.partial(functools.partial(Bias().score, 2), shift=1))


def test_bound_method_reads_self():
    class Bias:
        scale = 3

        def __init__(self, slopes):
            self.slopes = slopes

        @property
        def half(self):
            return self.slopes / 2

        @staticmethod
        def shift(x):
            return x + 1

        @classmethod
        def stretch(cls, x):
            return x * cls.scale

        def distance(self, q, k):
            return abs(q - k)

        def score(self, s, b, h, q, k):
            return self.stretch(self.shift(s)) - self.half[h] * self.distance(q, k)

    assert_same(Bias(torch.rand(4)).score)


def test_callable_object():
    class Window:
        def __init__(self, width):
            self.width = width

        def __call__(self, b, h, q, k):
            return abs(q - k) <= self.width

    assert_same(Window(2))


def test_inherited_method_calls_super():
    class Base:
        def __call__(self, s, b, h, q, k):
            return s * 2

    class Child(Base):
        def __call__(self, s, b, h, q, k):
            return super().__call__(s, b, h, q, k) + q

    assert_same(Child())


class RelativeBias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Embedding(9, 4)
        self.gain = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("limit", torch.tensor(4))

    def forward(self, s, b, h, q, k):
        return self.gain * s + self.bias(q - k + self.limit)[h]


def test_module():
    module = RelativeBias()
    with torch.no_grad():
        assert_same(module)
    graph = traced(module)
    assert {(t.name, t.rank, t.needs_grad) for t in graph.tensors} == {("weight", 2, True), ("gain", 0, True), ("limit", 0, False)}


def test_helpers_global_nested_and_recursive():
    def power(x, n):
        return x if n == 0 else power(x, n - 1) * x

    def score(s, b, h, q, k):
        return _scaled(power(s, 3)) + q

    assert_same(score)


def test_a_helper_that_calls_itself_by_its_global_name():
    namespace = {}
    exec("def halve(x, n):\n    return x if n == 0 else halve(x / 2, n - 1)\n", namespace)
    halve = namespace["halve"]
    assert_same(lambda s, b, h, q, k: halve(s, 3))


def test_a_function_made_in_globals_without_a_name():
    """It is of no module, and still the user's."""
    table = torch.arange(4.0)
    namespace = {"table": table}
    exec("def score(s, b, h, q, k):\n    return s + table[h]\n", namespace)
    assert [t.name for t in traced(namespace["score"]).tensors] == ["table"]


def test_decorated_and_cached_helpers():
    def doubled(function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            return 2 * function(*args, **kwargs)

        return inner

    @doubled
    def score(s, b, h, q, k):
        return s + table(3)

    @functools.lru_cache
    def table(n):
        return n * n

    assert_same(score)


def test_object_with_a_plain_function_inside():
    class Mask:
        def __init__(self, function):
            self.__flexc_function__ = function

        def __call__(self, *pair):
            return self.__flexc_function__(*pair)

    width = 2
    causal, near = Mask(lambda b, h, q, k: q >= k), Mask(lambda b, h, q, k: q - k < width)
    assert_same(Mask(lambda b, h, q, k: causal(b, h, q, k) & near(b, h, q, k)))


def test_flexc_masks_combine():
    from flexc import masks

    documents = torch.tensor([0, 0, 1, 1, 1])
    assert_same(masks.causal & masks.document(documents) | ~masks.sliding_window(2))


def test_flexc_mask_by_its_module():
    from flexc import masks

    assert_same(lambda b, h, q, k: masks.causal(b, h, q, k) | (h == 0))


@pytest.mark.parametrize("table", [TABLE, tuple(TABLE), np.array(TABLE), [np.float32(x) for x in TABLE], [torch.tensor(x) for x in TABLE]])
def test_table_indexed_by_a_position(table):
    assert_same(lambda s, b, h, q, k: s * table[h])


def test_table_of_tables_and_negative_positions():
    table = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert_same(lambda s, b, h, q, k: s + table[b][q % 3] + table[0][-1] + TABLE[h - 4])


def test_containers_used_statically():
    settings = {"shift": 2, "slopes": torch.rand(4), "nested": {"gain": 0.5}}
    Pair = collections.namedtuple("Pair", "low high")
    pair, numbers = Pair(1, 3), [1, 2, 3]

    def score(s, b, h, q, k):
        total = sum(numbers) + len(numbers) + numbers[-1] + max(numbers) + sum(numbers[1:])
        for x, y in zip(numbers, reversed(numbers)):
            total += x * y
        keys = [key for key in settings if key != "absent"]
        low, _ = pair
        return s * settings["nested"]["gain"] + settings["slopes"][h] + total + len(keys) + pair.high - low + settings.get("absent", 7)

    assert_same(score)


def test_captured_membership():
    heads = [0, 3]
    assert_same(lambda b, h, q, k: h in heads or q >= k, as_tensors=False)


def test_dataclass_namespace_enum_and_class_attributes():
    class Kind(enum.Enum):
        CAUSAL = 1
        FULL = 2

    @dataclasses.dataclass(frozen=True)
    class Config:
        kind: Kind
        width: int = 2

    class Defaults:
        sink = 1

    config, space = Config(Kind.CAUSAL), types.SimpleNamespace(offset=1)

    def mask(b, h, q, k):
        allowed = q + space.offset >= k if config.kind is Kind.CAUSAL else True
        return allowed & (q - k < config.width) | (k < Defaults.sink)

    assert_same(mask)


def test_operator_objects_and_functions_from_modules():
    second = operator.itemgetter(1)
    assert_same(lambda s, b, h, q, k: operator.add(s, second((q, k))))


def test_numbers_of_numpy():
    gain, shift, on = np.float32(0.5), np.int64(3), np.bool_(True)
    assert_same(lambda s, b, h, q, k: s * gain + shift if on else s)


def test_a_large_numpy_array_is_a_captured_tensor():
    table = np.arange(100, dtype=np.float64)
    assert_same(lambda s, b, h, q, k: s + table[q * 20 + k], as_tensors=False)
    assert [(t.name, t.dtype) for t in traced(lambda s, b, h, q, k: s + table[q]).tensors] == [("table", "float64")]


def test_booleans_strings_and_none_are_constants():
    causal, mode, extra = True, "relative", None

    def score(s, b, h, q, k):
        if extra is not None:
            return s * extra
        return s + (q - k if mode == "relative" and causal else k)

    assert_same(score)
    assert traced(score).scalars == ()


def test_isinstance_of_captured_numbers():
    gain, count = 0.5, 3

    def score(s, b, h, q, k):
        assert isinstance(gain, float) and not isinstance(gain, int) and isinstance(count, int | float)
        assert type(gain) is float and type(count) is int
        return s * gain + count

    assert_same(score)


def test_attributes_of_a_function():
    def helper(x):
        return x + helper.shift

    helper.shift = 3
    assert_same(lambda s, b, h, q, k: helper(s) * helper.shift)


def test_the_users_function_is_left_alone():
    calls = []

    def helper(x):
        return x + 1

    def score(s, b, h, q, k):
        return helper(s) * STRENGTH

    before = (score.__code__, score.__globals__["STRENGTH"], score.__closure__[0].cell_contents)
    traced(score)
    assert (score.__code__, score.__globals__["STRENGTH"], score.__closure__[0].cell_contents) == before
    assert not calls and score(1.0, 0, 0, 0, 0) == 0.5


def test_names_of_tensors_are_the_users():
    class Holder:
        pass

    holder = Holder()
    holder.bias = torch.rand(4)
    tables, score = [torch.rand(4)], torch.rand(4)
    graph = traced(lambda s, b, h, q, k: s + holder.bias[h] + tables[0][h] + SLOPES[h] + score[h])
    assert {t.name for t in graph.tensors} == {"bias", "tables_0", "SLOPES", "score_2"}


def test_a_tensor_reached_twice_is_one_input():
    table = torch.rand(4)
    other = table
    assert len(traced(lambda s, b, h, q, k: s + table[h] + other[q]).tensors) == 1
    trace, binding = frontend.trace(lambda s, b, h, q, k: s + table[h], lambda b, h, q, k: table[h] > 0.5)
    assert len(trace.graph.tensors) == len(binding.tensors) == 1


def test_what_is_not_read_is_not_an_input():
    unused = torch.rand(4)

    def score(s, b, h, q, k, other=unused):
        return s if True else unused[h]

    trace, binding = traced_with_values(score)
    assert trace.graph.tensors == () and binding.tensors == ()


def test_tensors_come_in_the_order_of_the_graph():
    first, second = torch.rand(4), torch.rand(4)
    trace, binding = traced_with_values(lambda s, b, h, q, k: s * second[h] + first[h])
    by_name = dict(zip((t.name for t in trace.graph.tensors), binding.tensors))
    assert by_name["first"] is first and by_name["second"] is second


# --- objects that are not what they seem -------------------------------------------------------------------------------------------------


class Options(dict):
    """Items are attributes, as in many libraries of configurations."""

    __getattr__ = dict.__getitem__

    def doubled(self):
        return 2 * self.gain


class Rows(list):
    first = property(lambda self: self[0])


class ByLookup:
    """What it lacks raises KeyError."""

    def __getattr__(self, name):
        return TABLES[name]


TABLES = {"gain": 3}


def test_items_as_attributes():
    options = Options(gain=3, inner=Options(table=torch.rand(4)))
    assert_same(score := lambda s, b, h, q, k: s * options.gain + options.inner.table[h] + options.doubled())
    first = frontend.trace(score)[0]
    assert frontend.trace(score)[0] is first
    options["gain"] = 5
    assert_same(score)
    assert frontend.trace(score)[0] is not first
    del options["gain"]
    with pytest.raises(KeyError):
        frontend.trace(score)


def test_attributes_of_a_list():
    rows = Rows([3.0, 1.0])
    assert_same(score := lambda s, b, h, q, k: s * rows.first + rows[1])
    rows[0] = 4.0
    assert_same(score)


def test_object_whose_attributes_are_looked_up_in_a_dict(monkeypatch):
    found = ByLookup()
    assert_same(score := lambda s, b, h, q, k: s * found.gain)
    monkeypatch.setitem(TABLES, "gain", 7)
    assert_same(score)


def test_what_a_weak_reference_leads_to():
    class Kept:
        gain = 2.0

    kept = Kept()
    reference = weakref.ref(kept)
    assert_same(score := lambda s, b, h, q, k: s * reference().gain)
    kept.gain = 3.0
    assert_same(score)
