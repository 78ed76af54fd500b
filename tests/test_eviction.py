"""Evictors against their formulas, computed from the attention weights that transformers itself gives out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import cache_argument
from tiny import ARCHITECTURES, tiny_model, tiny_tokenizer
from transformers import DynamicCache

from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.errors import InvalidInput
from contextmem.eviction import EVICTORS, Reading, evictor_named
from contextmem.eviction.expected_attention import expected_scores
from contextmem.eviction.kvzip import KvZip
from contextmem.eviction.snapkv import SnapKv
from contextmem.framing import framing_of
from contextmem.ragged import RaggedCache

TOKENIZER = tiny_tokenizer()
TEXT = "The town of Ashby lies on the river Mere, and its bridge was built of grey stone in another century."
FULL_ATTENTION = [name for name in ARCHITECTURES if name in ("llama", "qwen2", "qwen3")]


def reading_of(model: Any, text: str = TEXT, start: int = 0) -> Reading:
    backbone, codec = Backbone.of(model), Codec.of(TOKENIZER)
    ids = codec.encode(text)
    cache = backbone.new_cache()
    backbone.prefill(ids, cache)
    return Reading(backbone, codec, framing_of(codec), cache, tuple(ids[start:]), start)


def weights_of(model: Any, parts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Attention of the last part's queries, (kv heads, group, queries, slots) a layer, from eager attention."""
    eager = tiny_model(model.config.model_type.removesuffix("_text"), "eager")
    cache, at = DynamicCache(), 0
    with torch.no_grad():
        for ids in parts:
            where = torch.arange(at, at + len(ids))[None]
            arguments: Any = {cache_argument(eager): cache, "position_ids": where, "output_attentions": True}
            given = eager(torch.tensor([ids]), use_cache=True, **arguments).attentions
            at += len(ids)
    n_heads = model.config.num_key_value_heads
    return [layer[0].reshape(n_heads, -1, *layer.shape[-2:]) for layer in given]


@pytest.mark.parametrize("name", list(EVICTORS))
def test_scores_have_a_place_for_every_pair(model: Any, name: str) -> None:
    for start in (0, 40):
        reading = reading_of(model, start=start)
        before = [layer.keys.clone() for layer in reading.cache.layers]
        scores = EVICTORS[name].scores(reading)
        assert scores.shape == (4, 2, len(TEXT) - start) and scores.dtype == torch.float32
        assert torch.isfinite(scores).all() and torch.equal(scores, EVICTORS[name].scores(reading))
        after = [layer.keys for layer in reading.cache.layers]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("name", list(EVICTORS))
def test_the_tail_of_a_compacted_cache_scores_as_that_of_a_dense_one(model: Any, name: str) -> None:
    """With everything kept, it is the same context."""
    dense = reading_of(model, start=60)
    keep = torch.ones(4, 2, 60, dtype=torch.bool)
    ragged = RaggedCache.of(dense.cache.view(60), keep, dense.backbone.windows)
    dense.backbone.prefill(dense.token_ids, ragged)
    other = Reading(dense.backbone, dense.codec, dense.framing, ragged, dense.token_ids, 60)
    one, two = EVICTORS[name].scores(dense), EVICTORS[name].scores(other)
    assert torch.allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_h2o_is_the_most_attention_received(name: str) -> None:
    reading = reading_of(tiny_model(name))
    expected = torch.stack([w.amax((1, 2)) for w in weights_of(tiny_model(name), [reading.token_ids])])
    assert torch.allclose(EVICTORS["h2o"].scores(reading), expected, atol=1e-5)


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_snapkv_is_the_attention_of_the_last_tokens(name: str) -> None:
    reading = reading_of(tiny_model(name))
    n = reading.n
    scores = SnapKv(window=16, kernel=3).scores(reading)
    weights = weights_of(tiny_model(name), [reading.token_ids])
    for layer, given in enumerate(weights):
        mean = given[:, :, -16:].mean((1, 2))
        neighbours = torch.stack([mean, mean.roll(1, -1), mean.roll(-1, -1)]).amax(0)
        assert torch.allclose(scores[layer, :, 1 : n - 17], neighbours[:, 1 : n - 17], atol=1e-5)
    assert SnapKv(window=16).n_recent == 16


@pytest.mark.parametrize("name", FULL_ATTENTION)
@pytest.mark.parametrize("chunk", [1000, 40])
def test_kvzip_is_the_most_attention_while_the_text_is_repeated(name: str, chunk: int) -> None:
    """Eager weights of a plain rehearsal, renormalised over the first slots, the part, and the rehearsal."""
    reading = reading_of(tiny_model(name))
    encode, opened, ids = reading.codec.encode, reading.framing.answer_open, reading.token_ids
    expected = torch.zeros(4, 2, reading.n)
    for start in range(0, reading.n, chunk):
        part = ids[start : start + chunk]
        lead = ids[max(0, start - 8) : start]
        request = encode("\n\nRepeat the part of the text above that begins right after these words:") if start else ()
        asked = (*(request or encode("\n\nRepeat the text above word for word.")), *lead, *opened, *part)
        seen = [*range(min(4, start)), *range(start, start + len(part)), *range(reading.n, reading.n + len(asked))]
        for layer, given in enumerate(weights_of(tiny_model(name), [ids, asked])):
            shares = given[..., seen] / given[..., seen].sum(-1, keepdim=True)
            at = min(4, start)
            expected[layer, :, start : start + len(part)] = shares[..., at : at + len(part)].amax((1, 2))
    assert torch.allclose(KvZip(chunk=chunk).scores(reading), expected, atol=1e-4)


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_kvzip_plus_counts_what_a_slot_adds(name: str) -> None:
    """Eager weights of the rehearsal times |W_O v| over the norm of the hidden state that the query was made from."""
    model = tiny_model(name)
    reading = reading_of(model)
    ids = reading.token_ids
    asked = (*reading.codec.encode("\n\nRepeat the text above word for word."), *reading.framing.answer_open, *ids)
    hidden: list[torch.Tensor] = []
    layers = model.get_decoder().layers
    with torch.no_grad():
        states = model(torch.tensor([[*ids, *asked]]), output_hidden_states=True).hidden_states
        hidden = [layer.input_layernorm(states[i])[0, len(ids) :] for i, layer in enumerate(layers)]
    expected = torch.zeros(4, 2, reading.n)
    for index, given in enumerate(weights_of(model, [ids, asked])):
        weight = layers[index].self_attn.o_proj.weight.detach()
        for head in range(2):
            for group in range(2):
                columns = weight[:, (2 * head + group) * 8 : (2 * head + group + 1) * 8]
                added = (reading.cache.layers[index].values[0, head] @ columns.T).norm(dim=-1)
                norms = hidden[index].norm(dim=-1)[:, None]
                contribution = given[head, group, :, : reading.n] * added / norms.where(norms > 0, torch.inf)
                expected[index, head] = torch.maximum(expected[index, head], contribution.amax(0))
    assert torch.isfinite(expected).all()
    assert torch.allclose(EVICTORS["kvzip_plus"].scores(reading), expected, rtol=1e-3, atol=1e-5)
    assert not any(layer.self_attn._forward_pre_hooks for layer in layers)


def test_contrastkv_lifts_structure_and_nothing_else() -> None:
    reading = reading_of(tiny_model("llama"))
    plain, scores = EVICTORS["kvzip"].scores(reading), EVICTORS["contrastkv"].scores(reading)
    lifted = scores > plain
    assert (scores >= plain).all() and 0 < int(lifted.sum()) <= 4 * 2 * round(0.06 * reading.n)


def test_knorm_and_streaming_llm() -> None:
    reading = reading_of(tiny_model("llama"), start=10)
    scores = EVICTORS["knorm"].scores(reading)
    assert torch.allclose(scores[2, 1], -reading.cache.layers[2].keys[0, 1, 10:].norm(dim=-1))
    assert EVICTORS["streaming_llm"].scores(reading)[0, 0].tolist() == list(range(10, len(TEXT)))


def test_expected_attention_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(shape, generator=generator) for shape in ((1, 4, 50, 8), (2, 30, 8), (2, 30, 8)))
    scores = expected_scores(query, keys, values)
    for head in range(2):
        seen = query[0, 2 * head : 2 * head + 2].reshape(-1, 8)
        mean, covariance = seen.mean(0), torch.cov(seen.T)
        logits = torch.stack([mean @ k / 8**0.5 + k @ covariance @ k / 16 for k in keys[head]])
        assert torch.allclose(scores[head], 30 * logits.softmax(-1) * values[head].norm(dim=-1), atol=1e-4)


def test_unknown_evictors_are_named() -> None:
    with pytest.raises(InvalidInput, match="psychic"):
        evictor_named("psychic")
    with pytest.raises(InvalidInput):
        evictor_named(3)  # type: ignore[arg-type]
