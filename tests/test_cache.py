"""The KV tensors: in-place growth, sharing between states, copies only when two states part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import layer_tensors, plain_cache, same_tensors
from tiny import tiny_model, tiny_tokenizer

from contextmem import ContextMemory, UnsupportedEdit
from contextmem.backbone import Backbone
from contextmem.cache import SpanCache


@pytest.fixture
def backbone() -> Backbone:
    return Backbone.of(tiny_model("llama"))


def filled(backbone: Backbone, n: int, seed: int = 0) -> SpanCache:
    cache = backbone.new_cache()
    backbone.prefill(torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(seed)).tolist(), cache)
    return cache


def storage_of(cache: SpanCache) -> int:
    return id(cache.lease.storage)


def test_prefill_writes_what_a_plain_cache_holds(model: Any) -> None:
    ids = list(range(3, 80))
    cache = Backbone.of(model).new_cache()
    Backbone.of(model).prefill(ids, cache, chunk=len(ids))
    past, _ = plain_cache(model, ids)
    for ours, theirs in zip(cache.layers, past.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_appending_within_capacity_copies_nothing(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    place = cache.layers[0].keys.data_ptr()
    for _ in range(100):
        backbone.forward([5], cache)
    assert cache.layers[0].keys.data_ptr() == place and cache.n_slots == 120


def test_growth_doubles_and_keeps_the_bits(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    before = [layer.keys.clone() for layer in cache.layers]
    held = cache.nbytes
    backbone.prefill([5] * 300, cache)
    assert cache.nbytes >= 2 * held
    assert all(torch.equal(layer.keys[:, :, :20], old) for layer, old in zip(cache.layers, before, strict=True))


def test_the_first_of_two_views_extends_in_place_and_the_second_copies(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    first, second = cache.view(), cache.view()
    backbone.forward([7], first)
    backbone.forward([9], second)
    assert storage_of(first) == storage_of(cache) != storage_of(second)
    assert torch.equal(first.layers[0].keys[:, :, :20], second.layers[0].keys[:, :, :20])
    assert not torch.equal(first.layers[0].keys[:, :, 20:], second.layers[0].keys[:, :, 20:])
    assert cache.layers[0].keys.shape[2] == 20


def test_a_view_that_went_out_of_scope_gives_its_slots_back(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    transient = cache.view()
    backbone.forward([7], transient)
    del transient
    again = cache.view()
    backbone.forward([9], again)
    assert storage_of(again) == storage_of(cache)


def test_a_shorter_view_copies_before_it_writes_over_live_slots(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    before = [layer.keys.clone() for layer in cache.layers]
    shorter = cache.view(10)
    backbone.forward([7], shorter)
    assert storage_of(shorter) != storage_of(cache)
    assert all(torch.equal(layer.keys, old) for layer, old in zip(cache.layers, before, strict=True))


def test_select_packs_slots_and_keeps_positions(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    picked = cache.select([(0, 4), (10, 15)])
    keys = cache.layers[2].keys
    assert torch.equal(picked.layers[2].keys, torch.cat((keys[:, :, :4], keys[:, :, 10:15]), 2))
    assert picked.positions.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 14]
    assert picked.next_position == 15


def test_turning_one_cache_leaves_the_one_it_came_from(backbone: Backbone) -> None:
    cache = filled(backbone, 20)
    positions, keys = cache.positions.clone(), cache.layers[1].keys.clone()
    picked = cache.select([(5, 20)])
    picked.turn_(0, 15, -5, backbone.angles())
    assert picked.positions.tolist() == list(range(15)) and picked.turns.tolist() == [1] * 15
    assert torch.equal(cache.positions, positions) and torch.equal(cache.layers[1].keys, keys)


def test_transformers_own_edits_are_refused(backbone: Backbone) -> None:
    cache = filled(backbone, 5)
    for edit in (lambda: cache.crop(-2), cache.reset, lambda: cache.reorder_cache(torch.tensor([0]))):
        with pytest.raises(UnsupportedEdit):
            edit()
    assert cache.n_slots == cache.get_seq_length() == 5


def test_tensors_round_trip(backbone: Backbone) -> None:
    cache = filled(backbone, 20).select([(0, 5), (9, 20)])
    copy = SpanCache.from_tensors(backbone.n_layers, cache.tensors(), cache.next_position)
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, copy.layers, strict=True))
    assert torch.equal(cache.positions, copy.positions)


def test_the_cache_handed_out_is_not_part_of_the_memory() -> None:
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer())
    memory.append("some text here")
    before = layer_tensors(memory)
    handed = memory.past_key_values
    memory.backbone.forward([7, 8, 9], handed)
    memory.append(" and more")
    n = before[0][0].shape[2]
    assert same_tensors([(k[:, :, :n], v[:, :, :n]) for k, v in layer_tensors(memory)], before)
    assert handed.n_slots == n + 3
    memory._state.check()


def test_fork_and_checkpoint_share_every_buffer() -> None:
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer())
    memory.append("x" * 500)
    kept = [memory.fork()._state.cache for _ in range(5)] + [memory.checkpoint().state.cache for _ in range(5)]
    assert {storage_of(cache) for cache in kept} == {storage_of(memory._state.cache)}
