"""Block maps between calls: kept while the mask, the sizes and the contents of its tensors stay; never one moment longer."""

import gc
import importlib
import weakref

import pytest
import torch

import flexc
from flexc import map_making, sparsity
from flexc.errors import UnsupportedError
from flexc.launch import MAPS, MapCache, _Kept
from flexc.reference import reference
from tests.accuracy import normal, qkv

Q, K, V = qkv(q_len=200)


def causal(batch, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(*cuts):
    ids = torch.zeros(200, dtype=torch.int64)
    for cut in cuts:
        ids[cut:] += 1
    return ids


def same_document(ids):
    return lambda b, h, i, j: ids[i] == ids[j]


@pytest.fixture(autouse=True)
def no_maps():
    MAPS.clear()


@pytest.fixture
def classified(monkeypatch):
    """The block sizes of every classification."""
    blocks = []
    classify = sparsity.classify

    def counting(*args, **options):
        blocks.append(options["block"])
        return classify(*args, **options)

    monkeypatch.setattr(sparsity, "classify", counting)
    return blocks


def is_right(kernel, q=Q, k=K, v=V):
    truth = reference(kernel.score_mod, kernel.mask_mod, q, k, v)[0]
    return torch.allclose(kernel(q, k, v).double(), truth, atol=1e-5)


def test_unchanged_documents_keep_their_map(classified):
    kernel = flexc.attention(None, same_document(documents(50)))
    kernel(Q, K, V)
    blocks = kernel.blocks
    kernel(Q, K, V)
    assert kernel.blocks is blocks and len(classified) == 1


def test_documents_written_in_place_get_a_new_map():
    ids = documents(50)
    kernel = flexc.attention(None, same_document(ids))
    assert is_right(kernel)
    old = kernel.blocks
    ids.copy_(documents(20, 160))
    assert is_right(kernel) and kernel.blocks is not old
    ids[190:] = 7
    assert is_right(kernel)
    view = ids[:10]
    view.fill_(9)
    assert is_right(kernel)


def test_documents_that_are_replaced_get_a_new_map():
    ids = documents(50)

    def mask(batch, head, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    kernel = flexc.attention(None, mask)
    assert is_right(kernel)
    old, kept = kernel.blocks, ids
    ids = documents(120, 130)
    assert is_right(kernel) and kernel.blocks is not old
    ids = kept
    assert is_right(kernel) and kernel.blocks is old


def test_documents_freed_and_made_anew_at_the_same_address():
    kernel = flexc.attention(None, lambda b, h, i, j: holder[0][i] == holder[0][j])
    holder = [None]
    for cut in range(10, 200, 10):
        holder[0] = None
        holder[0] = documents(cut)
        assert is_right(kernel)


def test_another_tensor_that_looks_the_same_is_another():
    """Address, memory and version are those that a freed tensor leaves to the next one; only the weak reference tells."""
    ids = documents(50)
    twin = documents(50)
    versions = ((ids._version, ids.data_ptr()),)
    kept = _Kept((weakref.ref(ids),), versions, None)
    assert kept.holds_for([ids], versions) and not kept.holds_for([twin], versions)
    del ids
    assert not kept.is_alive and not kept.holds_for([twin], versions)


def test_memory_given_to_a_parameter_is_seen():
    """`parameter.data = other` counts no version."""
    bound = torch.nn.Parameter(torch.full((200,), 30.0))
    kernel = flexc.attention(None, lambda b, h, i, j: j < bound[i])
    assert is_right(kernel)
    bound.data = torch.full((200,), 150.0)
    assert is_right(kernel)


def test_tensors_whose_versions_are_not_counted_are_looked_at_each_time(classified):
    with torch.inference_mode():
        ids = documents(50)
        kernel = flexc.attention(None, same_document(ids))
        assert is_right(kernel)
        ids[60:] += 1
        assert is_right(kernel)
    assert len(classified) == 2


def test_map_made_in_inference_mode_serves_training():
    ids = documents(90)
    kernel = flexc.attention(lambda s, b, h, i, j: s * 0.5, same_document(ids))
    with torch.inference_mode():
        kernel(Q, K, V)
    q = Q.clone().requires_grad_()
    (ours,) = torch.autograd.grad(kernel(q, K, V).sin().sum(), q)
    (truth,) = torch.autograd.grad(reference(kernel.score_mod, kernel.mask_mod, q, K, V)[0].sin().sum(), q)
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def test_backward_uses_the_map_of_the_forward(classified):
    q = Q.clone().requires_grad_()
    out = flexc.attention(None, same_document(documents(50)))(q, K, V)
    out.sum().backward()
    assert len(classified) == 1


def test_kernels_with_one_mask_share_its_map(classified):
    """A model has a kernel in each layer, and all their documents are the same."""
    ids = documents(50)
    scales = normal(4)
    layers = [flexc.attention(score, same_document(ids)) for score in (None, lambda s, b, h, i, j: s * scales[h])]
    for layer in (*layers, *layers):
        assert is_right(layer)
    assert len(classified) == 1


def test_mask_that_shares_its_code_but_not_its_number_has_its_own_map():
    def window(width):
        return lambda b, h, i, j: i - j < width

    for width in (10, 300, 20, 300, 150):  # 300 allows everything
        assert is_right(flexc.attention(None, window(width)))


def test_number_of_the_score_does_not_make_a_new_map(classified):
    """A temperature that falls from step to step."""
    for step in range(6):
        temperature = 1.0 - 0.1 * step
        flexc.attention(lambda s, b, h, i, j, t=temperature: s * t, causal)(Q, K, V)
    assert len(classified) == 1


def test_other_sizes_have_other_maps():
    kernel = flexc.attention(None, lambda b, h, i, j: (i >= j) & (h < 3))
    for size in ({"q_len": 150}, {"q_len": 70, "kv_len": 200}, {"q_len": 200, "kv_len": 70}, {"heads": 6, "kv_heads": 3}, {"batch": 3}):
        assert is_right(kernel, *qkv(**size))
        q_len = size.get("q_len", 100)
        assert (kernel.blocks.q_len, kernel.blocks.kv_len) == (q_len, size.get("kv_len", q_len))


def test_plain_attention_walks_no_map(classified):
    kernel = flexc.attention()
    assert is_right(kernel)
    assert not classified
    assert kernel.blocks.counts() == {"empty": 0, "partial": 2, "full": 2}  # 200 keys: the last column is ragged


def test_map_keeps_no_tensor_that_the_mask_does_not_read():
    bias = normal(4, 200, 200)
    memory = weakref.ref(bias.untyped_storage())
    kernel = flexc.attention(lambda s, b, h, i, j, bias=bias: s + bias[h, i, j], causal)
    kernel(Q, K, V)
    del bias, kernel
    flexc.pipeline.clear_cache()
    gc.collect()
    assert memory() is None


def test_maps_of_tensors_that_are_gone_are_dropped():
    for cut in range(5):
        flexc.attention(None, same_document(documents(20 * cut + 20)))(Q, K, V)
    flexc.pipeline.clear_cache()
    gc.collect()
    flexc.attention(None, causal)(Q, K, V)
    assert len(MAPS._kept) == 1


@pytest.mark.parametrize(("limits", "left"), [({"most": 3}, 3), ({"most_bytes": 110}, 2), ({"most_bytes": 0}, 1)])
def test_maps_used_least_recently_are_dropped(monkeypatch, limits, left):
    """Each map here has 51 bytes: the runs of 2 x 2 blocks."""
    launch = importlib.import_module("flexc.launch")
    maps = MapCache(**limits)
    monkeypatch.setattr(launch, "MAPS", maps)
    kernel = flexc.attention(None, causal)
    for length in (190, 191, 192, 193, 194):
        assert is_right(kernel, *qkv(q_len=length))
    assert [kept.blocks.q_len for kept in maps._kept.values()] == [190, 191, 192, 193, 194][-left:]


def test_many_maps_are_looked_at_once_in_a_while(monkeypatch):
    """Each step of a generation brings a map of its own; the limit on their number holds all the time."""
    launch = importlib.import_module("flexc.launch")
    maps = MapCache(most=40, most_bytes=1000)
    monkeypatch.setattr(launch, "MAPS", maps)
    looks = []
    monkeypatch.setattr(launch._Kept, "size_bytes", property(lambda kept: looks.append(1) or 0))
    kernel = flexc.attention(None, causal)
    for length in range(1, 101):
        kernel(*qkv(q_len=length))
        assert len(maps._kept) <= 40
    assert sum(range(17)) + 3 * 16 <= len(looks) <= 16 * 17 / 2 + 6 * 40


def test_map_that_is_used_stays(monkeypatch):
    launch = importlib.import_module("flexc.launch")
    maps = MapCache(most=2)
    monkeypatch.setattr(launch, "MAPS", maps)
    kernel = flexc.attention(None, causal)
    for length in (190, 191, 190, 192):
        kernel(*qkv(q_len=length))
    assert [kept.blocks.q_len for kept in maps._kept.values()] == [190, 192]


def test_number_on_the_cpu_is_copied_once_to_another_device():
    """A block map is kept for as long as the tensors that it was made from: a new copy for each call would never find it."""
    arguments = importlib.import_module("flexc.arguments")
    number, meta = torch.tensor(5), torch.device("meta")
    moved = arguments.number_beside(number, "number", meta)
    assert moved.device == meta and arguments.number_beside(number, "number", meta) is moved
    number.fill_(6)
    assert arguments.number_beside(number, "number", meta) is not moved
    learned = torch.tensor(0.5, requires_grad=True)
    copies = [arguments.number_beside(learned, "learned", meta) for _ in range(2)]
    assert copies[0] is not copies[1] and all(copy.grad_fn is not None for copy in copies)  # a graph of its own for each call


def test_a_graph_that_is_being_captured_cannot_wait_for_blocks(monkeypatch):
    """`classify` reads values from the device, which a capture forbids with an error of CUDA's."""
    monkeypatch.setattr(map_making, "is_capturing", lambda: True)
    map_making._refuse_waiting(torch.device("cpu"), "")
    with pytest.raises(
        UnsupportedError, match="a CUDA graph is being captured.*waits for the GPU \\(FLEXC_DEVICE_MAPS=0\\). Call the kernel"
    ):
        map_making._refuse_waiting(torch.device("cuda"), "FLEXC_DEVICE_MAPS=0")


def test_what_a_captured_graph_walks_is_kept_for_good():
    """Without tensors a map made before the capture serves, from whatever stream; with tensors it is made again at each replay."""
    maps = MapCache()
    blocks = flexc.block_map(causal, 64, 64)
    kept = maps._kept[("causal", ()), 7] = _Kept((), (), blocks)
    maps._kept[("documents", (1,)), 7] = _Kept((), (), blocks)
    assert maps._captured_map(("window", ())) is None and maps._captured_map(("documents", (1,))) is None
    assert maps._captured_map(("causal", ())) is blocks
    maps.clear()
    assert maps._captured_map(("causal", ())) is blocks and kept.blocks is None


def test_maps_that_are_used_outlast_others():
    """Whoever holds a map and says that it is used need not look for it."""
    maps = MapCache(most=3)
    blocks = flexc.block_map(causal, 64, 64)
    kept = {length: _Kept((), (), blocks) for length in range(6)}
    for length, each in kept.items():
        maps._kept[(length, ()), 0] = each
        maps._evict()
        kept[0].is_used = True
    assert [length for length, each in kept.items() if each.blocks is not None] == [0, 4, 5]
    for each in kept.values():
        each.is_used = True
    maps.most = 1
    maps._evict()
    assert [length for length, each in kept.items() if each.blocks is not None] == [5]


def test_walks_that_are_made_are_taken_as_they_are(monkeypatch):
    """To make one outside of the pools of CUDA graphs takes a thread, 0.2 ms: not at every call."""
    launch = importlib.import_module("flexc.launch")
    made = []
    monkeypatch.setattr(launch, "outside_of_pools", lambda make, device: made.append(make()))
    maps = {"forward": flexc.block_map(causal, 64, 64), "dkv": flexc.block_map(causal, 64, 64)}
    rows = maps["forward"].row_walk()
    for _ in range(3):
        launch.Launch._walked(maps, torch.device("cuda"))
    assert len(made) == 1 and made[0] is maps["dkv"].column_walk() and maps["forward"].row_walk() is rows
