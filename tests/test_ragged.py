"""Ragged caches against dense ones with a mask for every head, which a reference attention of the tests' own applies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import cache_argument, floor
from tiny import build, tiny_config, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from contextmem import attention
from contextmem.attention import switched
from contextmem.backbone import Backbone
from contextmem.cache import SpanCache
from contextmem.errors import UnsupportedEdit
from contextmem.ragged import RaggedCache

IDS = [int(i) for i in torch.randint(3, 259, (90,), generator=torch.Generator().manual_seed(2))]
N_CONTEXT = 60


def masks_of(backbone: Backbone, n_slots: int, share: float, seed: int = 0) -> torch.Tensor:
    """Random slots for every head, the first four always; heads differ in how many they keep."""
    config = backbone.core.config
    generator = torch.Generator().manual_seed(seed)
    shape = (backbone.n_layers, config.num_key_value_heads, n_slots)
    wanted = share * (0.5 + torch.rand(shape[:2], generator=generator))[..., None]
    keep = torch.rand(shape, generator=generator) < wanted
    keep[:, :, :4] = True
    return keep


def prefilled(backbone: Backbone, ids: list[int]) -> SpanCache:
    cache = backbone.new_cache()
    backbone.prefill(ids, cache)
    return cache


_keep: list[torch.Tensor] = []  # of the reference attention, (layers, heads, n_slots)


def _masked_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
    keep = _keep[-1][module.layer_idx]
    whole = torch.cat((keep, torch.ones(keep.shape[0], key.shape[2] - keep.shape[1], dtype=torch.bool)), dim=1)
    groups = query.shape[1] // key.shape[1]
    key, value, whole = (t.repeat_interleave(groups, dim=d) for t, d in ((key, 1), (value, 1), (whole, 0)))
    scores = query @ key.transpose(2, 3) * (scaling or 1 / math.sqrt(query.shape[-1]))
    scores = scores.masked_fill(~whole[None, :, None, :], -1e30)
    scores = scores if mask is None else scores.masked_fill(~mask, -1e30)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def _full_mask(*args: Any, **kwargs: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **(kwargs | {"allow_is_causal_skip": False}))


AttentionInterface.register("reference", _masked_attention)
AttentionMaskInterface.register("reference", _full_mask)


@contextmanager
def reference_attention(model: Any, keep: torch.Tensor) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = "reference"
    _keep.append(keep)
    try:
        yield
    finally:
        model.config._attn_implementation = before
        _keep.pop()


def dense_logits(model: Any, keep: torch.Tensor, parts: list[list[int]]) -> list[torch.Tensor]:
    """Logits after every part, over a dense cache of the context with `keep` masking each head's view of it."""
    cache, logits, at = DynamicCache(), [], 0
    with torch.no_grad():
        for number, ids in enumerate([IDS[:N_CONTEXT], *parts]):
            arguments = {
                "position_ids": torch.arange(at, at + len(ids))[None],
                "use_cache": True,
                cache_argument(model): cache,
            }
            if number == 0:
                model(torch.tensor([ids]), **arguments)
            else:
                with reference_attention(model, keep):
                    logits.append(model(torch.tensor([ids]), **arguments).logits[0].float())
            at += len(ids)
    return logits


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_ragged_equals_dense_with_a_mask_for_every_head(model: Any, share: float) -> None:
    """Prefill of several new tokens, decoding token by token, and several again."""
    backbone = Backbone.of(model)
    dense = prefilled(backbone, IDS[:N_CONTEXT])
    keep = masks_of(backbone, N_CONTEXT, share)
    ragged = RaggedCache.of(dense, keep, backbone.windows)
    assert torch.equal(ragged.held(), keep) and ragged.n_held == int(keep.sum())
    parts = [IDS[60:72], [IDS[72]], [IDS[73]], IDS[74:]]
    expected = dense_logits(model, keep, parts)
    for ids, wanted in zip(parts, expected, strict=True):
        got = backbone.forward(ids, ragged, all_logits=True)
        assert (got - wanted).abs().max() <= 5 * max(floor(model, IDS), 1e-6 * float(wanted.abs().max()))
    assert ragged.n_slots == len(IDS) and ragged.next_position == len(IDS)
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_with_everything_kept_it_is_the_dense_cache(model: Any) -> None:
    backbone = Backbone.of(model)
    dense = prefilled(backbone, IDS[:N_CONTEXT])
    keep = torch.ones(backbone.n_layers, model.config.num_key_value_heads, N_CONTEXT, dtype=torch.bool)
    ragged = RaggedCache.of(dense, keep, backbone.windows)
    got, wanted = (backbone.forward(IDS[N_CONTEXT:], cache) for cache in (ragged, dense))
    assert (got - wanted).abs().max() <= 5 * floor(model, IDS)


def test_compacted_again_equals_compacted_at_once(model: Any) -> None:
    """Narrower choices of what is held, and of the tail that has grown meanwhile."""
    backbone = Backbone.of(model)
    keep = masks_of(backbone, N_CONTEXT, 0.7)
    once = RaggedCache.of(prefilled(backbone, IDS[:N_CONTEXT]), keep, backbone.windows)
    backbone.prefill(IDS[60:80], once)
    later = masks_of(backbone, 80, 0.5, seed=3)
    twice = once.again(later)
    assert torch.equal(twice.held(), later & once.held())
    for index, layer in enumerate(once.layers):
        dense = torch.cat((prefilled(backbone, IDS[:N_CONTEXT]).layers[index].keys, layer.keys), dim=2)[0]
        for head, slots in enumerate(twice.kept[index].slots):
            assert torch.equal(twice.kept[index].keys[head], dense[head, slots])
    before = twice.nbytes
    logits = backbone.forward(IDS[80:], twice.view())
    assert torch.isfinite(logits).all() and twice.nbytes == before, "a view that grew has a tail of its own"


def test_bytes_really_fall(model: Any) -> None:
    backbone = Backbone.of(model)
    dense = prefilled(backbone, IDS * 10)
    keep = masks_of(backbone, dense.n_slots, 0.1)
    ragged = RaggedCache.of(dense, keep, backbone.windows)
    pair = dense.slot_nbytes // (backbone.n_layers * model.config.num_key_value_heads)
    assert ragged.nbytes == ragged.n_held * pair < 0.2 * dense.nbytes
    backbone.forward(IDS[:3], ragged)
    spare = 256 + 3
    assert ragged.nbytes <= (ragged.n_held + spare * backbone.n_layers * model.config.num_key_value_heads) * pair


def test_views_are_independent_and_rewind(model: Any) -> None:
    backbone = Backbone.of(model)
    ragged = RaggedCache.of(prefilled(backbone, IDS[:N_CONTEXT]), masks_of(backbone, N_CONTEXT, 0.5), backbone.windows)
    first = backbone.forward(IDS[60:70], ragged.view())
    one, other = ragged.view(), ragged.view()
    backbone.forward(IDS[75:90], other)
    assert torch.equal(backbone.forward(IDS[60:70], one), first)
    one.rewind(N_CONTEXT)
    assert (one.n_slots, one.next_position) == (N_CONTEXT, N_CONTEXT)
    assert torch.equal(backbone.forward(IDS[60:70], one), first)
    assert torch.equal(backbone.forward(IDS[60:70], one.view(N_CONTEXT)), first)
    with pytest.raises(UnsupportedEdit, match="not addressable"):
        one.view(10)
    with pytest.raises(UnsupportedEdit, match="compacted"):
        one.select(((0, 10),))


def test_a_model_that_shares_the_configuration_is_not_disturbed() -> None:
    """Called inside the switch, as another thread would."""
    config = tiny_config("llama")
    one, other = build(config, seed=1), build(config, seed=2)
    other.config = one.config
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = one.config
    ids = torch.tensor([IDS])
    with torch.no_grad():
        expected = other(ids).logits
        with switched(one):
            assert torch.equal(other(ids).logits, expected)
        with pytest.raises(RuntimeError), switched(one):
            raise RuntimeError
    assert one.config._attn_implementation == "sdpa"


def test_interleaved_forwards_of_models_that_share_a_configuration() -> None:
    """Two locks, one configuration: the first to leave must not pull the name from under the second."""
    model = build(tiny_config("llama"))
    first, second = switched(model), switched(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "contextmem-sdpa"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_other_attention_is_refused() -> None:
    model = build(tiny_config("llama"))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedEdit, match="flex_attention"), switched(model):
        pass


def test_what_a_layer_attends_with_can_be_watched(model: Any) -> None:
    """Queries and keys as the attention gets them: their product, softmaxed, are its weights."""
    backbone, seen = Backbone.of(model), {}
    cache = backbone.new_cache()
    with backbone.lock, switched(model, lambda layer, query, keys: seen.update({layer: (query, keys)})):
        backbone.prefill(IDS, cache)
    assert sorted(seen) == list(range(backbone.n_layers))
    query, keys = seen[0]
    groups = query.shape[1] // keys.shape[1]
    weights = query @ keys.repeat_interleave(groups, dim=1).transpose(2, 3) / math.sqrt(query.shape[-1])
    eager = tiny_model(model.config.model_type.removesuffix("_text"), "eager")
    with torch.no_grad():
        wanted = eager(torch.tensor([IDS]), output_attentions=True).attentions[0]
    causal = torch.ones(len(IDS), len(IDS), dtype=torch.bool).tril()
    if backbone.windows[0] is not None:
        causal &= torch.ones_like(causal).triu(1 - backbone.windows[0])
    assert torch.allclose(weights.masked_fill(~causal, -1e30).softmax(-1), wanted, atol=1e-5)


@pytest.mark.parametrize("n_new", [1, 7])
def test_grouped_attention_is_the_models_own(model: Any, n_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries over a longer cache, and one, which needs no mask and is left to the model; an outer watch stays."""
    backbone = Backbone.of(model)
    before, ids = prefilled(backbone, IDS[:N_CONTEXT]), IDS[N_CONTEXT : N_CONTEXT + n_new]
    plain = backbone.forward(ids, before.view(), all_logits=True)
    seen, calls, inner = list[int](), list[int](), attention._grouped
    monkeypatch.setattr(attention, "_grouped", lambda *given: calls.append(1) or inner(*given))
    with backbone.lock, switched(model, lambda layer, *_: seen.append(layer)), switched(model, grouped=True):
        grouped = backbone.forward(ids, before.view(), all_logits=True)
    assert (grouped - plain).abs().max() <= 5 * floor(model, IDS[: N_CONTEXT + n_new])
    assert seen == list(range(backbone.n_layers)) and (n_new == 1 or len(calls) == backbone.n_layers)
