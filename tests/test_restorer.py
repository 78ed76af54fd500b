"""Restore slots: generated over the full cache, counted in the budget, seen by every head, of one model alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import moved
from oracle import assert_equal_logits, assert_equals_reference, assert_unchanged, reference, snapshot, state_tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_ragged import reference_attention
from tiny import build, tiny_config, tiny_model, tiny_tokenizer

from contextmem import ContextMemory, IdentityMismatch, InvalidInput, RestoreKV, StorageError
from contextmem.ragged import RaggedCache

TOKENIZER = tiny_tokenizer()
TEXT = "The town of Ashby lies on the river Mere, and its bridge is old. "


def restorer_of(model: Any, **options: Any) -> RestoreKV:
    """One that changes what the embeddings become, as a trained one does."""
    return moved(RestoreKV.untrained(model, **options), model)  # type: ignore[arg-type,return-value]


def new(model: Any, **options: Any) -> ContextMemory:
    return ContextMemory(model, TOKENIZER, **{"eraser": None, "evictor": "knorm", "restorer": None, **options})


def test_untrained_slots_are_the_models_own_kv_of_the_embeddings(model: Any) -> None:
    memory, restorer = new(model), RestoreKV.untrained(model, n=5)
    memory.append(TEXT)
    before = state_tensors(memory)
    slots = restorer.slots(memory.backbone, memory._state.cache)
    cache = memory.past_key_values
    where = torch.arange(memory.seq_length, memory.seq_length + 5)[None]
    with torch.no_grad():
        model(
            inputs_embeds=restorer.embeddings[None],
            position_ids=where,
            use_cache=True,
            **{memory.backbone.cache_argument: cache},
        )
    for (keys, values), layer in zip(slots, cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys[:, :, -5:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, layer.values[:, :, -5:], rtol=1e-4, atol=1e-5)
    after = state_tensors(memory)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_head_sees_them_and_they_are_in_the_budget(model: Any) -> None:
    """Logits are those of a dense cache with the evicted slots masked and the restore slots behind."""
    restorer = restorer_of(model, n=6)
    whole, memory = new(model), new(model, budget=160, restorer=restorer)
    for target in (whole, memory):
        target.append(TEXT * 4)
    cache = memory._state.cache
    assert isinstance(cache, RaggedCache) and cache.n_restore == 6
    assert memory.stats().tokens_held <= 160 and memory.next_position == whole.next_position + 6
    slots, dense = restorer.slots(whole.backbone, whole._state.cache), whole.past_key_values
    dense.lease.claim(dense.n_slots, dense.n_slots + 6)
    for layer, (keys, values) in zip(dense.layers, slots, strict=True):
        layer.update(keys, values)
    keep = torch.cat((cache.held(), torch.ones(*cache.held().shape[:2], 6, dtype=torch.bool)), dim=-1)
    ids = [*memory._codec.encode("?")]
    where = torch.arange(memory.next_position, memory.next_position + len(ids))[None]
    with torch.no_grad(), reference_attention(model, keep):
        expected = model(
            torch.tensor([ids]), position_ids=where, use_cache=True, **{whole.backbone.cache_argument: dense}
        ).logits[0, -1]
    assert_equal_logits(model, whole.token_ids, memory.logits("?"), expected.float())


def test_they_are_made_anew_at_every_compaction_and_after_every_retraction(model: Any) -> None:
    memory = new(model, budget=160, restorer=restorer_of(model, n=4), full_tier="cpu")
    segments = [memory.append(f"{number}. {TEXT}") for number in range(8)]
    cache = memory._state.cache
    assert isinstance(cache, RaggedCache) and cache.n_restore == 4
    assert {int((slots >= cache.offset).sum()) for kept in cache.kept for slots in kept.slots} == {4}
    memory.retract(segments[2], method="recompute")
    now = memory._state.cache
    assert isinstance(now, RaggedCache) and now.n_restore == 4 and memory.stats().tokens_held <= 160
    assert not torch.equal(now.kept[0].keys[0][-4:], cache.kept[0].keys[0][-4:])
    memory.set_budget(None)
    memory.settle()
    assert_equals_reference(memory)


def test_the_model_is_as_it_was(model: Any) -> None:
    ids = list(range(5, 40))
    before = reference(model, ids)
    memory = new(model, budget=120, restorer=restorer_of(model))
    memory.append(TEXT * 4)
    assert memory._state.is_compacted and torch.equal(reference(model, ids), before)


def test_where_the_budget_makes_them_useless_they_are_left_out() -> None:
    model = tiny_model("llama")
    memory = new(model, budget=60, reserve=30, restorer=restorer_of(model, n=8))
    memory.append(TEXT * 3)
    cache = memory._state.cache
    assert isinstance(cache, RaggedCache) and cache.n_restore == 0


def test_beside_a_larger_share_than_they_are_for_they_are_left_out(tmp_path: Path) -> None:
    """And they come in by themselves when the memory has grown."""
    model = tiny_model("llama")
    restorer = restorer_of(model, n=4)
    restorer.config = replace(restorer.config, largest_share=0.25)
    restorer.save_pretrained(tmp_path, torch.float32)
    memory = new(model, budget=60, reserve=0, restorer=RestoreKV.from_pretrained(tmp_path))
    shares = set[bool]()
    for _ in range(12):
        memory.append(TEXT)
        if memory.stats().tokens_held < memory.seq_length:
            small = 0.25 * memory.seq_length >= 60
            assert memory.stats().restore_slots == (4 if small else 0)
            shares.add(small)
    assert shares == {False, True}


def test_saved_forked_and_rewound_with_their_slots(model: Any, tmp_path: Path) -> None:
    memory = new(model, budget=160, restorer=restorer_of(model, n=4))
    memory.append(TEXT * 4)
    logits, empty = memory.logits("?"), memory.logits("")
    fork = memory.fork()
    tail = fork.append("A tail. ")
    fork.retract(tail)
    memory.save(tmp_path / "m.ctx")
    again = ContextMemory.load(tmp_path / "m.ctx", model, TOKENIZER, restorer=None)
    for other in (fork, again):
        assert torch.equal(other.logits("?"), logits) and torch.equal(other.logits(""), empty)
        assert other.next_position == memory.next_position


def test_what_stands_before_them_does_not_see_them(model: Any) -> None:
    """The last token, fed again, gives what it gives without restore slots; what follows comes after them."""
    restorer = restorer_of(model, n=4)
    memory = new(model, budget=160)
    memory.append(TEXT * 4)
    plain = memory._state.cache
    assert isinstance(plain, RaggedCache)
    restored = plain.restored(restorer.slots(memory.backbone, plain), plain.next_position)
    logits = []
    for cache in (plain, restored):
        again = cache.view()
        again.rewind(cache.n_slots - 1)
        logits.append(memory.backbone.forward(memory.token_ids[-1:], again))
        assert again.next_position == cache.next_position
    assert torch.allclose(*logits, atol=1e-5 * float(logits[0].abs().max()))


def test_scores_are_those_of_the_logits(model: Any) -> None:
    memory = new(model, budget=160, restorer=restorer_of(model, n=4))
    memory.append(TEXT * 4)
    first, second = memory._codec.encode("ab")
    expected = float(memory.logits("").log_softmax(-1)[first]) + float(memory.logits("a").log_softmax(-1)[second])
    assert memory.score("ab") == pytest.approx(expected, rel=1e-4)


def test_they_never_take_the_memory_over_its_budget() -> None:
    model = tiny_model("llama")
    memory = new(model, budget=60, reserve=0, restorer=restorer_of(model, n=8))
    memory.append("p" * 45, pinned=True)
    memory.append(TEXT * 2)
    assert memory.stats().tokens_held <= 60


def test_an_automatic_one_stays_away_from_a_model_with_the_users_own_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTEXTMEM_CACHE", str(tmp_path))
    model = build(tiny_config("llama"), seed=11)
    RestoreKV.untrained(model, n=4, evictor="knorm").save_pretrained(tmp_path / "weights" / "mine")
    memory = new(model, budget=160, restorer="auto")
    memory.append(TEXT * 4)
    cache = memory._state.cache
    assert isinstance(cache, RaggedCache) and cache.n_restore == 4
    wrapped = get_peft_model(build(tiny_config("llama"), seed=11), LoraConfig(r=2, target_modules=["q_proj"]))
    memory = new(wrapped, budget=160, restorer="auto")
    memory.append(TEXT * 4)
    cache = memory._state.cache
    assert isinstance(cache, RaggedCache) and cache.n_restore == 0


class TestFiles:
    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        restorer = restorer_of(model, n=3)
        restorer.save_pretrained(tmp_path, torch.float32)
        again = RestoreKV.from_pretrained(tmp_path)
        assert again.config == restorer.config and torch.equal(again.embeddings, restorer.embeddings)
        memory = new(model)
        memory.append(TEXT)
        for one, other in zip(
            restorer.slots(memory.backbone, memory._state.cache),
            again.slots(memory.backbone, memory._state.cache),
            strict=True,
        ):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert again.first(2).n == 2
        with pytest.raises(InvalidInput, match="3 embeddings"):
            again.first(4)

    def test_the_published_layout_loads(self, tmp_path: Path) -> None:
        """A PEFT adapter on seven projections, embeddings beside it, and no configuration of ours."""
        model = build(tiny_config("qwen3"), seed=4)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        wrapped = get_peft_model(
            build(tiny_config("qwen3"), seed=4), LoraConfig(r=8, lora_alpha=16, target_modules=targets)
        )
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        wrapped.save_pretrained(tmp_path)
        save_file({"restore_embeddings": torch.randn(8, 32) * 0.02}, tmp_path / "restore_embeddings.safetensors")
        restorer = RestoreKV.from_pretrained(tmp_path)
        memory = new(model, restorer=restorer, budget=160)
        memory.append(TEXT)
        slots = restorer.slots(memory.backbone, memory._state.cache)
        cache = memory.past_key_values
        embeddings = load_file(tmp_path / "restore_embeddings.safetensors")["restore_embeddings"]
        with torch.no_grad():
            wrapped.get_base_model()(
                inputs_embeds=embeddings[None],
                position_ids=torch.arange(memory.seq_length, memory.seq_length + 8)[None],
                use_cache=True,
                **{memory.backbone.cache_argument: cache},
            )
        assert torch.allclose(slots[-1][0], cache.layers[-1].keys[:, :, -8:], atol=1e-5)
        memory.append(TEXT * 3)
        assert memory._state.is_compacted

    def test_another_models_are_refused_and_nothing_is_changed(self, tmp_path: Path) -> None:
        one, other = build(tiny_config("llama"), seed=1), build(tiny_config("llama"), seed=2)
        one.name_or_path, other.name_or_path = "model-one", "model-two"
        RestoreKV.untrained(one).save_pretrained(tmp_path)
        memory = new(other, budget=160, restorer=tmp_path)
        memory.append(TEXT)
        before = snapshot(memory)
        with pytest.raises(IdentityMismatch, match=r"model-one.*model-two"):
            memory.append(TEXT * 4)
        assert_unchanged(memory, before)

    def test_what_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError):
            RestoreKV.from_pretrained(tmp_path)
        with pytest.raises(InvalidInput):
            new(tiny_model("llama"), restorer=3)
        with pytest.raises(InvalidInput):
            RestoreKV.untrained(tiny_model("llama"), n=0)
