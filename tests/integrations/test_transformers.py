"""Small models of Hugging Face transformers with random weights: flexc gives the logits of `eager`, prefill and generation."""

import importlib.util

import pytest
import torch

import flexc
from flexc.errors import ShapeError, ToolchainError, UnsupportedError
from flexc.integrations import transformers as ours
from tests.accuracy import distance, normal

is_there = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not is_there, reason="needs transformers")
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")
SMALL = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=0,
)


@pytest.fixture(autouse=True, scope="module")
def registered():
    if is_there:
        ours.register()


def config_of(kind):
    import transformers as hf

    if kind == "llama":
        return hf.LlamaConfig(**SMALL)
    if kind == "mistral":
        return hf.MistralConfig(**SMALL, sliding_window=7)
    if kind == "qwen3":
        return hf.Qwen3Config(**SMALL)
    if kind == "gemma2":
        return hf.Gemma2Config(**SMALL, sliding_window=6, attn_logit_softcapping=0.1, query_pre_attn_scalar=1)
    if kind == "gpt_oss":
        return hf.GptOssConfig(**SMALL, sliding_window=6, num_local_experts=2, num_experts_per_tok=1)
    return hf.BertConfig(**{name: SMALL[name] for name in SMALL if name not in ("num_key_value_heads", "head_dim")})


CAUSAL = ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"]


def models(kind, device="cpu", dtype=torch.float32):
    """The same model with flexc and with transformers' own attention in plain PyTorch."""
    import transformers as hf

    kinds = hf.AutoModel if kind == "bert" else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    made = [kinds.from_config(config_of(kind), attn_implementation=name).to(device, dtype).eval() for name in ("eager", "flexc")]
    for name, parameter in made[0].named_parameters():
        if name.endswith("sinks"):  # they begin as what the memory held
            parameter.data = normal(*parameter.shape, device=device, dtype=dtype)
    made[1].load_state_dict(made[0].state_dict())
    assert [m.config._attn_implementation for m in made] == ["eager", "flexc"]  # a config that they shared would be of the last one
    return made


def tokens(device="cpu", batch=3, length=21):
    """Ids, and which are no padding: rows are padded on the left, as for generation."""
    ids = torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(0))
    is_token = torch.ones_like(ids)
    for row in range(1, batch):
        is_token[row, : 4 * row] = 0
    return ids.to(device), is_token.to(device)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@needs_transformers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*CAUSAL, "bert"])
def test_logits_are_those_of_eager(kind, device):
    eager, model = models(kind, device)
    ids, is_token = tokens(device)
    for given in (None, torch.ones_like(is_token), is_token):
        with torch.no_grad():
            expected, found = (m(ids, attention_mask=given)[0] for m in (eager, model))
        counted = torch.ones_like(is_token, dtype=torch.bool) if given is None else given.bool()
        assert distance(found[counted], expected[counted]) < 2e-4


@needs_transformers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CAUSAL)
def test_gradients_are_those_of_eager(kind, device):
    eager, model = models(kind, device)
    ids, is_token = tokens(device)
    counted = is_token.bool()[..., None]
    for m in (eager, model):
        (m(ids, attention_mask=is_token)[0].sin() * counted).sum().backward()
    for (name, x), y in zip(eager.named_parameters(), model.parameters(), strict=True):
        if x.grad is not None:
            torch.testing.assert_close(y.grad, x.grad, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


@needs_transformers
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_that_of_eager(kind, device, cache):
    eager, model = models(kind, device)
    ids, is_token = tokens(device)
    options = dict(attention_mask=is_token, max_new_tokens=12, min_new_tokens=12, do_sample=False, cache_implementation=cache)
    options |= dict(output_logits=True, return_dict_in_generate=True, disable_compile=True)
    flexc.compile_log(reset=True)
    expected, found = (m.generate(ids, **options) for m in (eager, model))
    assert found.sequences.equal(expected.sequences)
    for x, y in zip(found.logits, expected.logits, strict=True):
        assert distance(x, y) < 2e-4
    # Prefill, and steps: with numbers as constants at first, then as arguments; twice that where layers of two kinds alternate.
    assert len(flexc.compile_log().of("source").compiled) <= 8


@needs_transformers
def test_packed_sequences_do_not_see_each_other():
    """Without a mask, positions that begin anew tell sequences apart."""
    eager, model = models("llama")
    ids = tokens(batch=1)[0]
    positions = torch.cat([torch.arange(8), torch.arange(13)])[None]
    with torch.no_grad():
        found = model(ids, position_ids=positions, use_cache=False)[0]
        assert distance(found, eager(ids, position_ids=positions, use_cache=False)[0]) < 2e-4
        assert distance(found[:, 8:], eager(ids[:, 8:], use_cache=False)[0]) < 2e-4


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_inside_torch_compile():
    torch._dynamo.reset()
    eager, model = models("gemma2")
    ids, is_token = tokens()
    run = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        found, expected = run(ids, attention_mask=is_token, use_cache=False)[0], eager(ids, attention_mask=is_token)[0]
    assert distance(found[is_token.bool()], expected[is_token.bool()]) < 2e-4


@needs_transformers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_generation_with_a_compiled_model_and_a_static_cache(kind):
    """Steps share a graph: a new mask for each is no reason to compile."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    eager, model = models(kind)
    ids, is_token = tokens()
    options = dict(attention_mask=is_token, max_new_tokens=12, min_new_tokens=12, do_sample=False, cache_implementation="static")
    expected = eager.generate(ids, **options, disable_compile=True)
    counter = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counter)
    assert model.generate(ids, **options, disable_compile=True).equal(expected)
    assert counter.frame_count <= 3  # prefill, steps, and a window that is full


# --- the functions themselves, which need no transformers ---------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def qkv(q_len=9, kv_len=9):
    return normal(2, 4, q_len, 8), normal(2, 2, kv_len, 8, seed=1), normal(2, 2, kv_len, 8, seed=2)


def expected_of(q, k, v, allowed=None, score=None, **named):
    rule = None if allowed is None else lambda b, h, i, j: allowed[b, h, i, j]
    return flexc.reference(score, rule, q, k, v, **named)[0].transpose(1, 2)


def test_masks_and_biases_as_tensors():
    q, k, v = qkv()
    allowed = (normal(2, 1, 9, 9, seed=3) > 0).expand(2, 4, 9, 9)
    for given in (allowed, allowed[:, :1]):
        assert distance(ours.attention(Layer(), q, k, v, given)[0], expected_of(q, k, v, allowed)) < 1e-5
    added, bias = normal(2, 1, 9, 12, seed=4), normal(1, 4, 9, 9, seed=5)
    found, weights = ours.attention(Layer(), q, k, v, added, position_bias=bias, softcap=2.0, scaling=0.7)
    truth = expected_of(q, k, v, score=lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0) + added[b, 0, i, j] + bias[0, h, i, j], scale=0.7)
    assert weights is None and distance(found, truth) < 1e-5


def test_no_mask_is_causal_where_the_layer_is():
    q, k, v = qkv(5, 9)
    below = torch.ones(5, 9, dtype=torch.bool).tril(4)
    spread = lambda x: x.expand(2, 4, 5, 9)
    assert distance(ours.attention(Layer(), q, k, v)[0], expected_of(q, k, v, spread(below))) < 1e-5
    near = below & ~torch.ones(5, 9, dtype=torch.bool).tril(1)
    assert distance(ours.attention(Layer(), q, k, v, sliding_window=3)[0], expected_of(q, k, v, spread(near))) < 1e-5
    assert distance(ours.attention(Layer(), q, k, v, is_causal=False)[0], expected_of(q, k, v)) < 1e-5
    one = ours.attention(Layer(), q[:, :, :1], k, v)[0]  # one query is the last
    assert distance(one, expected_of(q[:, :, :1], k, v)) < 1e-5


def test_masks_by_either_version_of_the_interface():
    q, k, v = qkv(5, 9)
    allowed = (torch.arange(5)[:, None] + 4 >= torch.arange(9)).expand(2, 4, 5, 9).clone()
    allowed[1, :, :, :3] = False
    is_token = torch.ones(2, 9)
    is_token[1, :3] = 0
    for where in (dict(q_length=5, q_offset=4), dict(cache_position=torch.arange(4, 9))):
        made = ours.mask(2, kv_length=9, attention_mask=is_token, **where)
        assert tuple(made.shape) == (2, 1, 5, 9) and str(made) == "<flexc mask [2, 1, 5, 9]>"
        assert distance(ours.attention(Layer(), q, k, v, made)[0], expected_of(q, k, v, allowed)) < 1e-5
    with pytest.raises(ShapeError, match="the mask was made for 5 queries and 9 keys, got 5 and 8"):
        ours.attention(Layer(), q, k[:, :, :8], v[:, :, :8], made)


def test_torchs_block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = qkv()
    made = create_block_mask(lambda b, h, i, j: i - j < 3, None, None, 9, 9, device="cpu")
    allowed = (torch.arange(9)[:, None] - torch.arange(9) < 3).expand(2, 4, 9, 9)
    assert distance(ours.attention(Layer(), q, k, v, made)[0], expected_of(q, k, v, allowed)) < 1e-5


def test_what_is_refused(monkeypatch):
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match=r"dropout inside flexc attention, on every backend: call model.eval\(\)"):
        ours.attention(Layer(), q, k, v, dropout=0.1)
    with pytest.raises(UnsupportedError, match="output_attentions=True: flexc never has the weights; load the model with .*eager"):
        ours.attention(Layer(), q, k, v, output_attentions=True)
    with pytest.raises(flexc.errors.InputError, match="expected q_length or cache_position, got neither"):
        ours.mask(2, kv_length=9)
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ToolchainError, match="needs transformers >= 5: pip install"):
        ours.register()
