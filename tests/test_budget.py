"""A hard budget: never exceeded, nothing touched within it, what was evicted is gone or in the full tier."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import eraser_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import assert_equal_logits, assert_equals_reference, assert_unchanged, snapshot
from test_ragged import reference_attention
from tiny import build, tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoConfig

from contextmem import ContextMemory, ContextOverflow, InvalidInput, UnsupportedEdit, ragged
from contextmem.compaction import ALLOCATIONS, chosen
from contextmem.eviction import EVICTORS
from contextmem.ragged import RaggedCache
from contextmem.retraction import METHODS
from contextmem.tiers import n_tokens_held, opened

TOKENIZER = tiny_tokenizer()
TEXT = "The town of Ashby lies on the river Mere, and its bridge is old. "


def new(model: Any = None, **options: Any) -> ContextMemory:
    model = model or tiny_model("llama")
    return ContextMemory(model, TOKENIZER, **{"eraser": eraser_of(model), "evictor": "knorm", **options})


def n_heads(memory: ContextMemory) -> int:
    return memory.backbone.n_layers * memory.model.config.num_key_value_heads


class TestChoice:
    @settings(max_examples=80, deadline=None)
    @given(
        shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)),
        share=st.floats(0, 1),
        allocation=st.sampled_from(ALLOCATIONS),
        seed=st.integers(0, 99),
    )
    def test_as_many_as_asked_and_the_best(
        self, shape: tuple[int, int, int], share: float, allocation: str, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(shape, generator=generator)
        protected = torch.rand(shape[-1], generator=generator) < 0.3
        n_keep = int(share * scores.numel())
        keep = chosen(scores, protected, n_keep, allocation)
        assert keep[:, :, protected].all()
        n_protected = int(protected.sum()) * shape[0] * shape[1]
        free, n_free = max(0, n_keep - n_protected), scores.numel() - n_protected
        assert int(keep.sum()) == n_protected + min(free, n_free)
        heads: list[Any] = [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]
        groups: list[Any] = {"global": [...], "layer": list(range(shape[0]))}.get(allocation, heads)
        counts = [int((keep[group] & ~protected).sum()) for group in groups]
        assert max(counts) - min(counts) <= 1
        for group in groups:
            inside, outside = scores[group][keep[group] & ~protected], scores[group][~keep[group]]
            assert not len(inside) or not len(outside) or inside.min() >= outside.max()

    def test_what_is_gone_stays_gone(self) -> None:
        scores = torch.full((1, 2, 4), float("-inf"))
        scores[0, 0, 1] = 0.0
        keep = chosen(scores, torch.tensor([True, False, False, False]), 8)
        assert keep.nonzero().tolist() == [[0, 0, 1]]


class TestWithin:
    def test_a_context_within_budget_is_not_touched(self, model: Any) -> None:
        limited, free = new(model, budget=300), new(model)
        for memory in (limited, free):
            for _ in range(4):
                memory.append(TEXT)
        assert 250 < limited.seq_length <= 300 and not limited._state.is_compacted
        assert torch.equal(limited.logits("?"), free.logits("?"))
        assert not any(event.operation == "evict" for event in limited.events)

    @pytest.mark.parametrize("evictor", list(EVICTORS))
    def test_beyond_it_every_evictor_makes_room(self, model: Any, evictor: str) -> None:
        memory = new(model, budget=200, evictor=evictor)
        for _ in range(12):
            memory.append(TEXT)
            stats = memory.stats()
            assert stats.tokens_held <= 200
        assert stats.n_tokens > 700 and memory._state.is_compacted
        held = sum(row.held * row.n_tokens for row in stats.segments)
        assert held == pytest.approx(stats.tokens_held, rel=1e-3)
        assert any(event.operation == "evict" and event.method == evictor for event in memory.events)

    def test_measured_bytes_follow(self, model: Any) -> None:
        memory = new(model, budget=128)
        for n in (300, 2000):
            memory.append("x" * n)
            pair = memory.backbone.slot_nbytes / n_heads(memory)
            held = memory.stats().tokens_held * n_heads(memory)
            assert held * pair <= memory.nbytes <= (held + 257 * n_heads(memory)) * pair
            tensors = memory._state.cache.tensors()
            measured = sum(t.nbytes for name, t in tensors.items() if "keys" in name or "values" in name)
            assert measured == pytest.approx(held * pair)

    def test_a_growing_memory_is_not_compacted_at_every_call(self) -> None:
        memory = new(budget=400, reserve=100)
        for _ in range(60):
            memory.append("Ten bytes.")
        assert sum(event.operation == "evict" for event in memory.events) <= 60 * 10 / 100 + 1

    def test_answers_see_what_was_kept_and_nothing_else(self, model: Any) -> None:
        """Logits after a compaction are those of the dense cache with a mask for every head."""
        whole, memory = new(model), new(model, budget=200)
        for target in (whole, memory):
            target.append(TEXT * 4)
        assert isinstance(memory._state.cache, RaggedCache)
        keep = memory._state.cache.held()
        ids = memory._codec.encode("?")
        cache = whole.past_key_values
        with torch.no_grad(), reference_attention(model, keep):
            arguments = {whole.backbone.cache_argument: cache, "use_cache": True}
            where = torch.arange(cache.next_position, cache.next_position + len(ids))[None]
            expected = model(torch.tensor([ids]), position_ids=where, **arguments).logits[0, -1].float()
        assert_equal_logits(model, whole.token_ids, memory.logits("?"), expected)

    def test_pinned_and_system_text_stays_whole(self) -> None:
        memory = new(budget=200, system="Be brief.", evictor="streaming_llm")
        pinned = memory.append("Never forget this. ", pinned=True)
        memory.append(TEXT * 10)
        shares = {row.id: row.held for row in memory.stats().segments}
        assert shares[pinned.id] == 1.0 == next(row.held for row in memory.stats().segments if row.kind == "system")
        assert min(shares.values()) < 0.5

    def test_too_small_a_budget_names_the_least_that_would_do(self) -> None:
        with pytest.raises(ContextOverflow, match="at least") as caught:
            new(budget=20, system="A long system text. " * 5)
        assert new(budget=caught.value.needed, system="A long system text. " * 5).stats().tokens_held > 0
        memory = new(budget=100)
        before = snapshot(memory)
        with pytest.raises(ContextOverflow, match="pinned"):
            memory.append("p" * 120, pinned=True)
        assert_unchanged(memory, before)
        memory.append("p" * 90, pinned=True)
        with pytest.raises(ContextOverflow, match="at least"):
            memory.set_budget(50)
        assert memory.budget is not None and memory.budget.n_tokens == 100

    @pytest.mark.parametrize(
        "options",
        [
            {"budget": 0},
            {"budget": "lots"},
            {"budget": True},
            {"budget": 100, "reserve": 100},
            {"budget": 100, "evictor": "psychic"},
            {"budget": 100, "full_tier": "moon"},
            {"budget": 100, "allocation": "fair"},
            {"budget": "1B"},
        ],
    )
    def test_nonsense_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            new(**options)

    def test_bytes_are_taken(self) -> None:
        memory = new(budget="1MB")
        assert memory.budget is not None and memory.budget.n_tokens == 10**6 // memory.backbone.slot_nbytes

    def test_set_and_lift(self) -> None:
        memory = new()
        memory.append(TEXT * 10)
        with pytest.raises(InvalidInput, match="no budget"):
            memory.compact()
        memory.set_budget(300)
        assert memory.stats().tokens_held <= 300
        memory.set_budget(150)
        assert memory.stats().tokens_held <= 150 and memory.compact().method == "none", "there is room already"
        memory.set_budget(None)
        memory.append(TEXT)
        memory.settle()
        assert_equals_reference(memory)

    def test_an_evictor_that_fails_changes_nothing(self) -> None:
        class Broken:
            name = "broken"

            def scores(self, reading: Any) -> torch.Tensor:
                raise RuntimeError("no scores today")

        memory = new(budget=220, evictor=Broken(), full_tier="cpu")
        first = memory.append(TEXT * 2)
        memory.append(TEXT)
        before = snapshot(memory)
        with pytest.raises(RuntimeError, match="no scores"):
            memory.append(TEXT * 3)
        with pytest.raises(RuntimeError, match="no scores"):
            memory.replace(first, TEXT * 4)
        assert_unchanged(memory, before)


class TestEditing:
    @pytest.mark.parametrize("method", [m for m in METHODS if m not in ("crop", "instruct", "suffix_repair_query")])
    def test_with_a_full_tier_an_edit_is_that_of_the_uncompacted_memory(self, model: Any, method: str) -> None:
        """The full tier after the edit is bit for bit the cache of a memory without a budget after the same edit."""
        limited, free = new(model, full_tier="disk" if method == "mask" else "cpu"), new(model)
        for memory in (limited, free):
            segments = [memory.append(text) for text in (TEXT, "The bridge is new. ", TEXT, "x")]
            if memory is limited:
                memory.set_budget(120)
            memory.retract(segments[1], method=method)
        assert limited._state.is_compacted and limited.stats().tokens_held <= 120
        ours, theirs = opened(limited.backbone, limited._state), free._state
        assert ours.ledger.token_ids == theirs.ledger.token_ids and ours.exact_slots == theirs.exact_slots
        assert torch.equal(ours.cache.positions, theirs.cache.positions)
        for one, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        if method == "recompute":
            limited.set_budget(None)
            limited.settle()
            assert_equals_reference(limited)

    def test_without_one_the_text_is_read_again(self, model: Any) -> None:
        memory = new(model, budget=120)
        segments = [memory.append(f"{number}. {TEXT}") for number in range(4)]
        before = snapshot(memory)
        with pytest.raises(UnsupportedEdit, match="full_tier"):
            memory.retract(segments[1], method="mask")
        assert_unchanged(memory, before)
        report = memory.retract(segments[1])
        assert report.method == "recompute" and report.guarantee == "exact" and "read again" in report.why
        assert report.tokens_reused == 0 and report.tokens_recomputed == memory.seq_length
        assert memory.stats().tokens_held <= 120
        fresh = new(model, budget=120)
        fresh.append("".join(s.text for s in (segments[0], *segments[2:])))
        assert torch.equal(memory._state.cache.held(), fresh._state.cache.held())
        assert_equal_logits(model, memory.token_ids, memory.logits("?"), fresh.logits("?"))

    def test_the_tail_is_cut_without_reading_anything_again(self, model: Any) -> None:
        memory = new(model, budget=150)
        memory.append(TEXT * 3)
        logits = memory.logits("?")
        tail = memory.append("The tail. ")
        report = memory.retract(tail)
        assert report.method == "crop" and report.tokens_recomputed == 0
        assert torch.equal(memory.logits("?"), logits)

    def test_steering_blocks_are_settled_before_text_is_evicted(self) -> None:
        memory = new(budget=400, full_tier="cpu")
        for number in range(5):
            gone = memory.append("e" * 60)
            memory.append(f"Number {number}. ")
            memory.retract(gone, method="kveraser")
        memory.append("f" * 100)
        memory.append("g" * 100)
        assert not any(span.state == "erased" for span in memory._state.ledger.spans)
        assert not memory._state.is_compacted and all(row.held == 1.0 for row in memory.stats().segments)

    def test_forks_share_what_was_kept_and_nothing_else(self, model: Any) -> None:
        memory = new(model, budget=150, full_tier="cpu")
        memory.append(TEXT * 3)
        fork, mark, before = memory.fork(), memory.checkpoint(), snapshot(memory)
        fork.append(TEXT)
        fork.retract(fork.segments()[0])
        assert_unchanged(memory, before)
        memory.append(TEXT * 2)
        memory.restore(mark)
        assert_unchanged(memory, before)

    @pytest.mark.parametrize("full_tier", [None, "cpu", "disk"])
    def test_saved_and_loaded(self, model: Any, full_tier: str | None, tmp_path: Path) -> None:
        memory = new(model, budget=150, full_tier=full_tier)
        segments = [memory.append(TEXT) for _ in range(5)]
        memory.save(tmp_path / "m.ctx")
        again = ContextMemory.load(tmp_path / "m.ctx", model, TOKENIZER, eraser=eraser_of(model))
        assert again.budget == memory.budget and again.stats() == memory.stats()
        assert torch.equal(again.logits("?"), memory.logits("?"))
        for one in (memory, again):
            one.retract(segments[2].id, method="recompute")
            one.append(TEXT)
        assert torch.equal(again.logits("?"), memory.logits("?"))
        smaller = ContextMemory.load(tmp_path / "m.ctx", model, TOKENIZER, budget=80, reserve=20)
        assert smaller.stats().tokens_held <= 80


class TestFaultsFoundInReview:
    """Each was one before it was a test."""

    def test_recomputing_the_tail_does_not_run_over_what_was_kept(self, model: Any) -> None:
        memory = new(model, budget=160, full_tier="cpu")
        memory.append(TEXT * 3)
        memory.append("Number one. ")
        tail = memory.append("Number two. ")
        memory.retract(tail, method="recompute")
        memory.set_budget(None)
        memory.settle()
        assert_equals_reference(memory)

    def test_recomputing_the_tail_after_an_approximate_edit(self) -> None:
        memory = new(full_tier="cpu")
        segments = [memory.append(text) for text in ("One. ", "Two. ", TEXT * 3)]
        memory.retract(segments[1], method="mask")
        memory.set_budget(160)
        tail = memory.append("The tail. ")
        assert memory.retract(tail, method="recompute").guarantee == "exact"

    def test_a_recalled_memory_goes_on(self, model: Any) -> None:
        memory = new(model, budget=150, full_tier="cpu")
        memory.append(TEXT * 3)
        memory.append("Ten bytes.")
        memory.rehydrate("Where?")
        for _ in range(4):
            memory.append(TEXT)
            assert memory.stats().tokens_held <= 150

    @pytest.mark.parametrize("name", ["mistral", "gemma3", "phi3"])
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_scoring_over_a_gap_within_a_window(self, name: str, attention: str) -> None:
        memory = new(tiny_model(name, attention), evictor="kvzip")
        segments = [memory.append(text) for text in (TEXT, "Some ten bytes. ", "x")]
        memory.retract(segments[1], method="mask")
        memory.set_budget(200)
        memory.append(TEXT * 3)
        assert memory._state.is_compacted

    def test_a_valid_memory_with_much_pinned_text_loads(self, tmp_path: Path) -> None:
        memory = new(budget=100)
        memory.append("p" * 50, pinned=True)
        memory.append("x" * 60)
        memory.append("q" * 20, pinned=True)
        memory.save(tmp_path / "m.ctx")
        again = ContextMemory.load(tmp_path / "m.ctx", memory.model, TOKENIZER)
        assert again.stats().tokens_held == memory.stats().tokens_held == pytest.approx(95, abs=5)
        memory.set_budget(100)

    def test_a_reserve_that_was_saved_does_not_bind_another_budget(self, tmp_path: Path) -> None:
        memory = new(budget=400, reserve=200)
        memory.append(TEXT)
        memory.save(tmp_path / "m.ctx")
        again = ContextMemory.load(tmp_path / "m.ctx", memory.model, TOKENIZER, budget=150)
        assert again.budget is not None and again.budget.reserve == 37

    @pytest.mark.parametrize("method", ["kveraser", "kveraser, 3 slots", "instruct", "mask", "delete_and_shift"])
    def test_scores_stay_with_their_slots(self, method: str) -> None:
        method, _, slots = method.partition(",")
        memory = new(full_tier="cpu", eraser=eraser_of(tiny_model("llama"), 3 if slots else None))
        segments = [memory.append(text) for text in (TEXT, "Two. ", TEXT, "Four. ", TEXT)]
        memory.set_budget(200)
        gone = [segments[1], segments[3]]
        memory.retract(gone, method=method)
        if not memory._state.is_compacted:
            memory.set_budget(150)
        scores, whole = memory._state.scores, opened(memory.backbone, memory._state).cache
        assert scores is not None
        expected = torch.stack([-layer.keys[0].norm(dim=-1) for layer in whole.layers])[..., : scores.shape[-1]]
        if method == "kveraser":  # the steering blocks are always kept, their old scores do not count
            steering = memory.segments(state="erased")
            assert len(steering) == 2
            keep = [s for s in range(scores.shape[-1]) if not any(t.start <= s < t.stop for t in steering)]
            scores, expected = scores[..., keep], expected[..., keep]
        assert torch.allclose(scores, expected, atol=1e-5)

    def test_no_room_is_held_for_an_answer_that_was_not_kept(self) -> None:
        memory = new(budget=128)
        memory.append("x" * 300)
        before = memory.nbytes
        memory.ask("?", max_new_tokens=600)
        assert memory.nbytes == before

    @pytest.mark.parametrize("evictor", list(EVICTORS))
    def test_scoring_near_the_end_of_the_context_length(self, evictor: str) -> None:
        memory = new(build(tiny_config("llama", max_position_embeddings=220)), budget=120, evictor=evictor)
        memory.append("x" * 200)
        assert memory._state.is_compacted and memory.stats().tokens_held <= 120

    def test_what_an_evictor_gives_is_checked(self) -> None:
        class Odd:
            name = "odd"

            def __init__(self, make: Any) -> None:
                self.make = make

            def scores(self, reading: Any) -> torch.Tensor:
                made: torch.Tensor = self.make(reading.empty())
                return made

        memory = new(budget=100, evictor=Odd(lambda empty: empty - float("inf")), system="Be brief.")
        memory.append("x" * 200)
        assert memory.stats().tokens_held <= 100
        assert next(row.held for row in memory.stats().segments if row.kind == "system") == 1.0
        memory = new(budget=100, evictor=Odd(lambda empty: empty[:1]))
        with pytest.raises(InvalidInput, match="shape"):
            memory.append("x" * 200)

    def test_attention_with_more_than_queries_and_keys_is_refused_when_a_budget_is_set(self) -> None:
        config = AutoConfig.for_model(
            "gemma2",
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            eos_token_id=2,
            pad_token_id=2,
        )
        memory = ContextMemory(build(config, "eager"), TOKENIZER, eraser=None)
        memory.append(TEXT)
        with pytest.raises(UnsupportedEdit, match="softcap"):
            memory.set_budget(100)
        assert memory.budget is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_attention_that_comes_out_wrong_is_refused_in_any_type(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Measured, with rounding told apart from it: the same model is accepted where the attention is right."""
        ContextMemory(build(tiny_config("llama")).to(dtype), TOKENIZER, budget=100)
        inner = ragged.attention_over
        monkeypatch.setattr(ragged, "attention_over", lambda *given: 0.5 * inner(*given))
        with pytest.raises(UnsupportedEdit, match="logits would be off"):
            ContextMemory(build(tiny_config("llama")).to(dtype), TOKENIZER, budget=100)

    @pytest.mark.parametrize("options", [{"evictor": "psychic"}, {"full_tier": "moon"}, {"allocation": "fair"}])
    def test_nonsense_is_refused_without_a_budget_too(self, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            new(**options)

    def test_reports_tell_what_is_so(self) -> None:
        memory = new(budget=150, full_tier="cpu")
        memory.append(TEXT * 4)
        assert memory.settle().guarantee == "approximate" and memory.compact().guarantee == "approximate"
        memory.set_budget(None)
        with pytest.raises(InvalidInput, match="settle"):
            memory.rehydrate("?")


class TestRecall:
    def test_a_question_brings_back_what_it_attends_to(self, model: Any) -> None:
        memory = new(model, full_tier="cpu", evictor="streaming_llm")
        for _ in range(5):
            memory.append(TEXT)
        memory.set_budget(150)
        before, logits = snapshot(memory), memory.logits("?")
        answer = memory.ask("What lies on the river?", recall="full_tier", max_new_tokens=3)
        assert len(answer.token_ids) <= 3
        assert_unchanged(memory, before)
        held = memory._state.cache.held()  # type: ignore[attr-defined]
        report = memory.rehydrate("What lies on the river?")
        now = memory._state.cache.held()  # type: ignore[attr-defined]
        assert report.method == "rehydrate" and memory.stats().tokens_held <= 150
        assert torch.equal(now, held) == all(memory.backbone.windows), "within a window there is nothing to choose"
        assert memory.ask("What lies on the river?", max_new_tokens=3).token_ids == answer.token_ids
        memory.append(TEXT)
        assert memory.stats().tokens_held <= 150 and not torch.equal(memory.logits("?"), logits)
        memory.set_budget(None)
        memory.settle()
        assert_equals_reference(memory)

    def test_what_is_asked_is_what_the_attention_says(self) -> None:
        """With everything else equal, the slots of largest attention to the question are those that are held."""
        model = tiny_model("llama", "eager")
        memory = new(model, full_tier="cpu", evictor="random")
        memory.append(TEXT * 2)
        ids = memory.token_ids
        memory.set_budget(40, 0)
        question = (*memory._codec.encode("Where?"), *memory._framing.answer_open)
        memory.rehydrate("Where?")
        with torch.no_grad():
            given = model(torch.tensor([[*ids, *question]]), output_attentions=True).attentions
        n, rows = len(ids), len(question)
        weights = torch.stack(
            [layer[0].reshape(2, 2, n + rows, n + rows)[:, :, -rows:, :n].amax((1, 2)) for layer in given]
        )
        held = memory._state.cache.held()  # type: ignore[attr-defined]
        free = torch.ones(n, dtype=torch.bool)
        free[:6], free[-1] = False, False
        inside, outside = weights[held & free], weights[~held]
        assert inside.min() >= outside.max() - 1e-6

    def test_without_a_full_tier_nothing_can_come_back(self) -> None:
        memory = new(budget=150)
        assert memory.rehydrate("?").method == "none"
        memory.append(TEXT * 4)
        before = snapshot(memory)
        for call in (lambda: memory.rehydrate("?"), lambda: memory.ask("?", recall="full_tier")):
            with pytest.raises(UnsupportedEdit, match="full_tier"):
                call()
        with pytest.raises(InvalidInput, match="recall"):
            memory.ask("?", recall="the moon")
        assert_unchanged(memory, before)


class BudgetMachine(RuleBasedStateMachine):
    """Everything a user can do, under a budget that changes: it is never exceeded, and lifting it brings all back."""

    @initialize(
        name=st.sampled_from(["llama-sdpa", "mistral-eager", "gemma3-sdpa"]),
        evictor=st.sampled_from(list(EVICTORS)),
        allocation=st.sampled_from(ALLOCATIONS),
        full_tier=st.sampled_from([None, "cpu", "disk"]),
        slots=st.sampled_from([None, 3]),
    )
    def begin(self, name: str, slots: int | None, **options: Any) -> None:
        architecture, attention = name.split("-")
        self.model = tiny_model(architecture, attention)
        self.eraser = eraser_of(self.model, slots)
        self.memory = new(self.model, budget=90, eraser=self.eraser, **options)
        self.watched: list[tuple[ContextMemory, Any]] = []
        self.marks: list[tuple[Any, Any, Any]] = []

    def attempt(self, call: Any, refusable: bool = False) -> None:
        """What does not fit, or needs what was evicted, is refused and changes nothing."""
        before, budget = snapshot(self.memory), self.memory.budget
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call()
            except (ContextOverflow, UnsupportedEdit) as refusal:
                assert refusable or isinstance(refusal, ContextOverflow)
                assert_unchanged(self.memory, before)
                assert self.memory.budget == budget

    @rule(n=st.integers(0, 70), pinned=st.booleans(), data=st.data())
    def append(self, n: int, pinned: bool, data: st.DataObject) -> None:
        text = data.draw(st.text("abc d", min_size=n, max_size=n))
        self.attempt(lambda: self.memory.append(text, pinned=pinned and n < 12))

    @rule(n=st.integers(0, 20), keep=st.booleans())
    def ask(self, n: int, keep: bool) -> None:
        before = None if keep else snapshot(self.memory)
        self.attempt(lambda: self.memory.ask("q" * n, keep=keep, max_new_tokens=3))
        if before is not None:
            assert_unchanged(self.memory, before)

    @precondition(lambda self: self.memory.segments())
    @rule(data=st.data(), method=st.sampled_from(["auto", "recompute", "kveraser", "mask", "delete_and_shift"]))
    def retract(self, data: st.DataObject, method: str) -> None:
        target = data.draw(st.sampled_from(self.memory.segments()))
        self.attempt(lambda: self.memory.retract(target, method=method), refusable=method not in ("auto", "recompute"))

    @precondition(lambda self: self.memory.segments())
    @rule(data=st.data(), n=st.integers(0, 40))
    def replace(self, data: st.DataObject, n: int) -> None:
        target = data.draw(st.sampled_from(self.memory.segments()))
        self.attempt(lambda: self.memory.replace(target, "r" * n))

    @rule(n=st.integers(0, 20))
    def recall(self, n: int) -> None:
        self.attempt(lambda: self.memory.rehydrate("q" * n), refusable=True)
        self.attempt(lambda: self.memory.ask("q" * n, recall="full_tier", max_new_tokens=3), refusable=True)

    @rule(size=st.integers(60, 120))
    def resize(self, size: int) -> None:
        self.attempt(lambda: self.memory.set_budget(size))

    @rule()
    def compact(self) -> None:
        self.attempt(self.memory.compact)

    @rule()
    def settle(self) -> None:
        self.attempt(self.memory.settle)

    @rule()
    def fork(self) -> None:
        self.watched.append((self.memory, snapshot(self.memory)))
        self.memory, self.marks = self.memory.fork(), []

    @rule()
    def checkpoint(self) -> None:
        self.marks.append((self.memory.checkpoint(), snapshot(self.memory), self.memory.budget))

    @precondition(lambda self: self.marks)
    @rule()
    def restore(self) -> None:
        mark, before, budget = self.marks[-1]
        self.memory.restore(mark)
        if budget == self.memory.budget:
            assert_unchanged(self.memory, before)

    @rule()
    def save_and_load(self) -> None:
        before = snapshot(self.memory)
        with tempfile.TemporaryDirectory() as folder:
            self.memory.save(Path(folder) / "m.ctx")
            self.memory = ContextMemory.load(Path(folder) / "m.ctx", self.model, TOKENIZER, eraser=self.eraser)
        assert_unchanged(self.memory, before)
        self.marks = []

    @invariant()
    def is_within(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory, budget = self.memory, self.memory.budget
        memory._state.check()
        assert budget is not None and n_tokens_held(memory._state) <= budget.n_tokens
        if memory._state.is_compacted:
            pair = memory.backbone.slot_nbytes / n_heads(memory)
            used = n_tokens_held(memory._state) * n_heads(memory)
            assert memory.nbytes <= (used + 257 * n_heads(memory)) * pair

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            for other, before in self.watched:
                assert_unchanged(other, before)
            self.memory.set_budget(None)
            self.memory.settle()
            assert_equals_reference(self.memory, "?")


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(
    max_examples=100, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
