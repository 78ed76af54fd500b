"""KVEraser: what erasing leaves alone, what an untrained eraser computes, whom an eraser fits, and the way in and out."""

from __future__ import annotations

import gc
import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import moved
from oracle import assert_equals_reference, assert_unchanged, layer_tensors, same_tensors, snapshot
from safetensors.torch import load_file
from tiny import build, tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoConfig

from contextmem import (
    Cancelled,
    ContextMemory,
    IdentityMismatch,
    InvalidInput,
    KVErase,
    KVEraser,
    ModelUnavailable,
    StorageError,
    UnsupportedEdit,
)
from contextmem.backbone import Backbone
from contextmem.eraser import CONDITIONINGS
from contextmem.retraction.runs import runs

TEXTS = [
    "First come the apples. ",
    "Then there are pears! ",
    "At last a plum, a fig. ",
    "And some old bread, and cheese.",
]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Make = Callable[..., ContextMemory]


def filled(memory: ContextMemory) -> list[Any]:
    return [memory.append(text) for text in TEXTS]


def erasing_memory(model: Any, **options: Any) -> ContextMemory:
    return ContextMemory(model, tiny_tokenizer(), eraser=moved(KVEraser.untrained(model, **options), model))


def outside(tensors: Any, *spans: Any) -> Any:
    """`layer_tensors` without the slots of some segments."""
    gone = {slot for span in spans for slot in range(span.start, span.stop)}
    index = torch.tensor([i for i in range(tensors[0][0].shape[2]) if i not in gone])
    return [(k[:, :, index], v[:, :, index]) for k, v in tensors]


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_an_untrained_eraser_reproduces_the_contaminated_cache(model: Any, adapter: str) -> None:
    memory = ContextMemory(model, tiny_tokenizer(), eraser=KVEraser.untrained(model, adapter=adapter))
    segments = filled(memory)
    before = layer_tensors(memory)
    memory.retract(segments[1], method="kveraser")
    assert same_tensors(layer_tensors(memory), before)


def test_everything_outside_the_span_is_bit_identical(model: Any) -> None:
    memory = erasing_memory(model)
    segments = filled(memory)
    before, ids, position = layer_tensors(memory), memory.token_ids, memory.next_position
    report = memory.retract(segments[1], method="kveraser")
    assert report.method == "kveraser" and report.guarantee == "approximate"
    assert report.tokens_removed == report.tokens_recomputed == segments[1].n_tokens
    assert report.tokens_reused == memory.seq_length - segments[1].n_tokens
    after = layer_tensors(memory)
    assert not same_tensors(after, before)
    assert same_tensors(outside(after, segments[1]), outside(before, segments[1]))
    assert memory.next_position == position and memory.seq_length == len(ids)
    assert memory.token_ids == ids[: segments[1].start] + ids[segments[1].stop :]
    (gone,) = memory.segments(state="erased")
    assert gone.id == segments[1].id and not gone.text and not gone.token_ids and gone.n_tokens == segments[1].n_tokens


def test_the_steering_is_what_the_adapted_model_computes_over_the_prefix(model: Any) -> None:
    memory = erasing_memory(model)
    segments = filled(memory)
    start, stop = segments[1].start, segments[1].stop
    prefix, ids = memory.past_key_values.view(start), memory.token_ids[start:stop]
    backbone = Backbone.of(model)
    with memory._eraser().adapter_for(backbone).attached(model):
        backbone.forward(ids, prefix)
    memory.retract(segments[1], method="kveraser")
    assert same_tensors(
        [(k[:, :, start:stop], v[:, :, start:stop]) for k, v in layer_tensors(memory)],
        [(layer.keys[:, :, start:], layer.values[:, :, start:]) for layer in prefix.layers],
    )


def test_several_spans_are_erased_in_order_each_over_the_edited_prefix(model: Any) -> None:
    together, one_by_one = erasing_memory(model), None
    segments = filled(together)
    one_by_one = together.fork()
    together.retract([segments[2], segments[0]], method="kveraser")
    one_by_one.retract(segments[0], method="kveraser")
    one_by_one.retract(segments[2], method="kveraser")
    assert same_tensors(layer_tensors(together), layer_tensors(one_by_one))


def test_settling_after_erasing_is_exact(model: Any) -> None:
    memory = erasing_memory(model)
    segments = filled(memory)
    memory.retract(segments[1], method="kveraser")
    memory.append("More.")
    assert not memory._state.is_exact
    memory.settle()
    assert_equals_reference(memory)
    assert memory.seq_length == len(memory.token_ids)


def test_erasing_writes_in_place_and_copies_only_what_another_state_reads(model: Any) -> None:
    memory = erasing_memory(model)
    segments = filled(memory)
    place = memory._state.cache.layers[0].keys.data_ptr()
    memory.retract(segments[1], method="kveraser")
    assert memory._state.cache.layers[0].keys.data_ptr() == place
    fork, point = memory.fork(), memory.checkpoint()
    before = layer_tensors(fork)
    memory.retract(segments[2], method="kveraser")
    assert memory._state.cache.layers[0].keys.data_ptr() != place
    assert same_tensors(layer_tensors(fork), before)
    memory.restore(point)
    assert same_tensors(layer_tensors(memory), before)


def test_a_view_taken_before_erasing_does_not_change(model: Any) -> None:
    memory = erasing_memory(model)
    segments = filled(memory)
    view = memory.past_key_values
    before = [(layer.keys.clone(), layer.values.clone()) for layer in view.layers]
    memory.retract(segments[1], method="kveraser")
    assert same_tensors([(layer.keys, layer.values) for layer in view.layers], before)


@pytest.mark.parametrize("fail_at", ["forward", "progress", "cancel"])
def test_adapters_are_off_and_nothing_changed_after_any_failure(model: Any, fail_at: str, monkeypatch: Any) -> None:
    memory = erasing_memory(model)
    segments = filled(memory)
    before, modules = snapshot(memory), dict(model.named_modules())
    seen = []

    def fail(*arguments: Any, **more: Any) -> Any:
        seen.append(1)
        if fail_at == "cancel":
            memory.cancel()
        elif len(seen) > 1:
            raise RuntimeError("stop")

    progress = None
    if fail_at == "forward":
        original = Backbone._forward

        def broken(self: Backbone, *arguments: Any, **more: Any) -> Any:
            original(self, *arguments, **more)
            raise RuntimeError("stop")

        monkeypatch.setattr(Backbone, "_forward", broken)
    else:
        progress = fail
    with pytest.raises(Cancelled if fail_at == "cancel" else RuntimeError):
        memory.retract([segments[0], segments[2]], method="kveraser", progress=progress)
    monkeypatch.undo()
    assert_unchanged(memory, before)
    assert dict(model.named_modules()) == modules
    assert_equals_reference(memory)


def test_the_model_itself_is_never_changed(model: Any) -> None:
    names = list(model.state_dict())
    grads = [p.requires_grad for p in model.parameters()]
    memory = erasing_memory(model)
    segments = filled(memory)
    memory.retract(segments[1], method="kveraser")
    assert list(model.state_dict()) == names
    assert [p.requires_grad for p in model.parameters()] == grads
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_conditioning_variants_touch_the_span_alone(conditioning: str) -> None:
    model = tiny_model("llama")
    memory = erasing_memory(model, conditioning=conditioning)
    segments = filled(memory)
    before = layer_tensors(memory)
    memory.retract(segments[1], method=KVErase(question="Which fruit?"))
    after = layer_tensors(memory)
    assert not same_tensors(after, before)
    assert same_tensors(outside(after, segments[1]), outside(before, segments[1]))


def test_conditioning_on_the_question_needs_one() -> None:
    memory = erasing_memory(tiny_model("llama"), conditioning="query")
    segments = filled(memory)
    before = snapshot(memory)
    with pytest.raises(InvalidInput, match="question"):
        memory.retract(segments[1], method="kveraser")
    assert_unchanged(memory, before)


def test_conditioning_on_later_positions_is_refused_under_sliding_windows() -> None:
    memory = erasing_memory(tiny_model("mistral"), conditioning="suffix")
    segments = filled(memory)
    before = snapshot(memory)
    with pytest.raises(UnsupportedEdit, match="sliding"):
        memory.retract(segments[1], method="kveraser")
    assert_unchanged(memory, before)


class TestFewSlots:
    """An eraser that keeps the last few steering slots of a span: the others are freed and the gap is closed."""

    def test_what_stays_is_the_end_of_the_steering_and_the_rest_moved_up(self, model: Any) -> None:
        whole, closed = erasing_memory(model), erasing_memory(model, slots=5)
        for memory in (whole, closed):
            report = memory.retract(filled(memory)[1], method="kveraser")
        gone = whole.segments(state="erased")[0]
        n_gone = gone.n_tokens - 5
        assert report.tokens_removed == gone.n_tokens and report.guarantee == "approximate"
        assert closed.segments(state="erased")[0].n_tokens == 5
        assert closed.seq_length == closed.next_position == whole.seq_length - n_gone
        index = [i for i in range(whole.seq_length) if not gone.start <= i < gone.start + n_gone]
        kept = [(k[:, :, index], v[:, :, index]) for k, v in layer_tensors(whole)]
        state = whole._state.cache.select(((0, gone.start), (gone.start + n_gone, whole.seq_length)))
        state.turn_(gone.start, state.n_slots, -n_gone, Backbone.of(model).angles())
        turned = [(layer.keys, layer.values) for layer in state.layers]
        assert same_tensors(layer_tensors(closed), turned)
        before = [(k[:, :, : gone.start], v) for k, v in kept]
        now = [(k[:, :, : gone.start], v) for k, v in layer_tensors(closed)]
        assert same_tensors(now, before), "the prefix, and every value, bit for bit"

    def test_a_shorter_span_keeps_all_of_its_slots(self, model: Any) -> None:
        whole, closed = erasing_memory(model), erasing_memory(model, slots=1000)
        for memory in (whole, closed):
            memory.retract(filled(memory)[1], method="kveraser")
        assert same_tensors(layer_tensors(whole), layer_tensors(closed))

    def test_several_spans_and_the_tail_at_once(self, model: Any) -> None:
        memory = erasing_memory(model, slots=3)
        segments = filled(memory)
        memory.retract([segments[0], segments[2]], method="kveraser")
        assert [s.n_tokens for s in memory.segments(state="erased")] == [3, 3]
        memory.append("More.")
        memory._state.check()
        more = erasing_memory(model, slots=3)
        segments = filled(more)
        more.retract([segments[1], segments[3]], method="kveraser")
        assert more.seq_length == segments[0].stop + 3 + segments[2].n_tokens
        for one in (memory, more):
            assert one.logits().isfinite().all()
            one.settle()
            assert_equals_reference(one)

    def test_nothing_learned_and_one_slot_is_nearly_dropping_the_span(self) -> None:
        """With the span's last slot alone left, the memory says nearly what it says after `delete_and_shift`."""
        model = tiny_model("llama")
        said = {}
        for method in ("none", "delete_and_shift", "kveraser"):
            memory = ContextMemory(model, tiny_tokenizer(), eraser=KVEraser.untrained(model, slots=1))
            segments = filled(memory)
            if method != "none":
                memory.retract(segments[1], method=method)
            said[method] = memory.logits(" Which?")
        far, near = ((said[m] - said["delete_and_shift"]).norm() for m in ("none", "kveraser"))
        assert near < far

    def test_forks_and_failures_leave_the_state_before(self, model: Any, monkeypatch: Any) -> None:
        memory = erasing_memory(model, slots=4)
        segments = filled(memory)
        fork, before = memory.fork(), snapshot(memory)
        fork.retract(segments[1], method="kveraser")
        assert_unchanged(memory, before)

        def broken(*arguments: Any) -> None:
            raise RuntimeError("stop")

        monkeypatch.setattr("contextmem.cache.rotated", broken)
        with pytest.raises(RuntimeError):
            memory.retract(segments[1], method="kveraser")
        assert_unchanged(memory, before)

    def test_worn_keys_are_recomputed_instead(self) -> None:
        model = build(tiny_config("llama"), seed=3).to(torch.bfloat16)
        memory = erasing_memory(model, slots=2)
        for number in range(6):
            memory.append(f"Text number {number} of a few of them. ")
        memory.append("The end of the context, which stays and is long enough to be worth keeping. " * 2)
        reports = [memory.retract(memory.segments()[0], method="kveraser") for _ in range(4)]
        assert [r.method for r in reports] == ["kveraser", "kveraser", "kveraser", "recompute"]
        assert "re-rotated" in reports[-1].why and memory._state.is_exact

    def test_models_whose_keys_cannot_be_moved_are_refused_before_anything_changes(self) -> None:
        shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = AutoConfig.for_model("cohere", **shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=2)
        model = build(config)
        memory = ContextMemory(model, tiny_tokenizer(), eraser=KVEraser.untrained(model, slots=4))
        segments = filled(memory)
        before = snapshot(memory)
        with pytest.raises(UnsupportedEdit, match="moved"):
            memory.retract(segments[1], method="kveraser")
        assert_unchanged(memory, before)
        report = memory.retract(segments[1])
        assert report.method == "recompute" and "moved" in report.why

    def test_saved_and_read_again(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        KVEraser.untrained(model, slots=6).save_pretrained(tmp_path)
        assert KVEraser.from_pretrained(tmp_path).config.slots == 6
        with pytest.raises(InvalidInput, match="slots"):
            KVEraser.untrained(model, slots=0)


class TestRepair:
    """The tokens right after an erased span, computed again over its steering slots."""

    @pytest.mark.parametrize("repair", [1, 5, 1000])
    @pytest.mark.parametrize("gap", [False, True])
    def test_the_next_tokens_are_computed_over_the_steering(self, model: Any, repair: int, gap: bool) -> None:
        """Against a token at a time, at the positions it has; with and without a gap that `mask` left among them."""
        plain, repaired = erasing_memory(model, slots=3), erasing_memory(model, slots=3)
        for memory in (plain, repaired):
            segments = filled(memory)
            if gap:
                memory.retract(memory.segments()[2], method="mask")
            going = [segments[0]] if gap else [segments[0], segments[2]]
            method = KVErase(repair=repair if memory is repaired else 0)
            report = memory.retract(going, method=method)
        left, expected = 0, plain._state.cache.select(((0, plain.seq_length),))
        n_spans, n_repaired = sum(span.n_tokens for span in going), 0
        for span in plain._state.ledger.spans:
            for slot in range(span.start, span.stop) if span.state != "erased" else ():
                if left:
                    over = expected.over(slot, slot + 1)
                    plain.backbone.forward([span.token_ids[slot - span.start]], over)
                    left, n_repaired = left - 1, n_repaired + 1
            left = repair if span.state == "erased" else left
        assert report.tokens_recomputed == n_spans + n_repaired and n_repaired >= min(repair, 10)
        assert torch.equal(plain._state.cache.positions, repaired._state.cache.positions)
        for layer, (keys, values) in zip(expected.layers, layer_tensors(repaired), strict=True):
            torch.testing.assert_close(keys, layer.keys, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(values, layer.values, atol=2e-5, rtol=1e-4)
        changed = [
            not torch.equal(a[0], b[0]) for a, b in zip(layer_tensors(plain), layer_tensors(repaired), strict=True)
        ]
        assert changed[-1], "in the last layer at least they saw the span"
        repaired.settle()
        assert_equals_reference(repaired)

    def test_a_fork_and_a_failed_repair_leave_the_state_before(self, model: Any, monkeypatch: Any) -> None:
        memory = erasing_memory(model, slots=3)
        segments = filled(memory)
        before = snapshot(memory)
        memory.fork().retract(segments[1], method=KVErase(repair=8))
        assert_unchanged(memory, before)

        def broken(*arguments: Any) -> Any:
            yield from runs(*arguments)
            raise RuntimeError("stop")

        monkeypatch.setattr("contextmem.retraction.kveraser.runs", broken)
        with pytest.raises(RuntimeError):
            memory.retract(segments[1], method=KVErase(repair=8))
        assert_unchanged(memory, before)
        memory.append("More.")
        assert_equals_reference(memory)

    def test_what_cannot_be_repaired_is_refused(self, model: Any) -> None:
        memory = erasing_memory(model)
        segments = filled(memory)
        before = snapshot(memory)
        with pytest.raises(UnsupportedEdit, match="slots"):
            memory.retract(segments[1], method=KVErase(repair=8))
        with pytest.raises(InvalidInput, match="repair"):
            KVErase(repair=-1)
        assert_unchanged(memory, before)


class TestRanges:
    """Spans that touch the end, each other, erased ones, or a gap in the positions."""

    def test_what_goes_at_the_end_is_cut_and_only_the_rest_is_steered(self, model: Any) -> None:
        memory = erasing_memory(model)
        segments = filled(memory)
        report = memory.retract([segments[1], segments[3]], method="kveraser")
        assert memory.seq_length == segments[2].stop and report.tokens_recomputed == segments[1].n_tokens
        assert [s.state for s in memory.segments(state="erased")] == ["erased"]
        assert memory.logits().shape == (300,)
        memory.settle()
        assert_equals_reference(memory)

    def test_erased_spans_are_never_steered_again(self, model: Any) -> None:
        memory = erasing_memory(model)
        segments = filled(memory)
        memory.append("And one more of them, to be long. ")
        memory.retract(segments[3], method="kveraser")
        memory.retract(segments[2], method="kveraser")
        memory.retract([segments[1], memory.segments()[-1]], method="kveraser")
        assert memory.seq_length == segments[0].stop and memory._state.is_exact

    def test_cascading_over_an_erased_segment(self, model: Any) -> None:
        memory = erasing_memory(model)
        first = memory.append("The price is 3. ")
        memory.append("Other things. ")
        second = memory.append("So it costs 3. ", parents=[first])
        memory.append("A long text that follows it, and goes on and on for a while.")
        memory.retract(second, method="kveraser")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = memory.retract(first, method="kveraser", cascade=True)
        assert report.segments == (first.id,) and report.dependents == ()

    def test_adjacent_segments_are_passes_of_their_own(self, model: Any) -> None:
        eraser = KVEraser.untrained(model, max_span_tokens=25)
        memory = ContextMemory(model, tiny_tokenizer(), eraser=eraser)
        segments = filled(memory)
        before = layer_tensors(memory)
        memory.retract([segments[1], segments[2]], method="kveraser")
        assert same_tensors(layer_tensors(memory), before)

    @pytest.mark.parametrize("method", ["kveraser", "refill"])
    def test_positions_stay_true_beside_a_gap(self, model: Any, method: str) -> None:
        """Layer 0 depends on token and position alone: with blanks to refill and nothing learned, it stays as it was."""
        memory = ContextMemory(model, tiny_tokenizer(), eraser=KVEraser.untrained(model))
        segments = [memory.append(text) for text in ("\n\n\n", "gap gap", "\n\n", "And some old bread, and cheese.")]
        memory.retract(segments[1], method="mask")
        before = layer_tensors(memory)
        memory.retract([segments[0], segments[2]], method=method)
        for now, then in zip(layer_tensors(memory)[0], before[0], strict=True):
            torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-5)

    def test_reports_count_what_is_reused(self) -> None:
        memory = erasing_memory(tiny_model("llama"))
        segments = filled(memory)
        memory.retract(segments[1], method="kveraser")
        report = memory.retract(segments[2], method="recompute")
        assert report.tokens_reused == segments[1].start

    def test_replacing_frees_erased_slots_before_it_counts_room(self) -> None:
        model = build(tiny_config("llama", max_position_embeddings=150), seed=8)
        memory = erasing_memory(model)
        memory.append("Intro. ")
        gone = memory.append("x" * 40)
        kept = memory.append("y" * 40)
        memory.retract(gone, method="kveraser")
        memory.replace(kept, "z" * 80)
        assert_equals_reference(memory)

    def test_a_replacing_append_recomputes_where_erased_slots_would_leave_no_room(self) -> None:
        model = build(tiny_config("llama", max_position_embeddings=150), seed=8)
        memory = erasing_memory(model)
        memory.append("x" * 40, key="k")
        memory.append("y" * 75)
        memory.append("z" * 40, key="k", on_conflict="replace")
        assert_equals_reference(memory)


class TestThreads:
    def test_two_memories_on_one_model_erase_at_once(self) -> None:
        model = tiny_model("llama")
        errors: list[BaseException] = []

        def work() -> None:
            try:
                memory = erasing_memory(model)
                segments = filled(memory)
                for segment in segments[:3]:
                    assert memory.retract(segment, method="kveraser").method == "kveraser"
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    def test_one_eraser_on_two_models_at_once(self) -> None:
        """The layers stand in one model at a time; each memory gets what its own model computes."""
        models = [build(tiny_config("llama"), seed=9) for _ in range(2)]
        eraser = moved(KVEraser.untrained(models[0]), models[0])
        results: list[Any] = []

        def work(model: Any) -> None:
            for _ in range(5):
                memory = ContextMemory(model, tiny_tokenizer(), eraser=eraser)
                memory.retract(filled(memory)[1], method="kveraser")
                results.append(layer_tensors(memory))

        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 10 and all(same_tensors(result, results[0]) for result in results)


class TestAuto:
    def test_recomputes_where_the_eraser_needs_a_question(self) -> None:
        memory = erasing_memory(tiny_model("llama"), conditioning="query")
        segments = filled(memory)
        assert memory.retract(segments[1], dry_run=True).method == "recompute"
        report = memory.retract(segments[1])
        assert report.method == "recompute" and "question" in report.why

    def test_erases_when_an_eraser_fits_and_it_costs_less(self) -> None:
        memory = erasing_memory(tiny_model("llama"))
        segments = filled(memory)
        report = memory.retract(segments[1])
        assert report.method == "kveraser" and "settle()" in report.why

    def test_recomputes_where_that_costs_less(self) -> None:
        memory = erasing_memory(tiny_model("llama"))
        memory.append("A rather long passage that is wrong. ")
        memory.append("Short.")
        assert memory.retract(memory.segments()[0]).method == "recompute"

    @pytest.mark.parametrize(("n_after", "method"), [(24, "recompute"), (25, "kveraser")])
    def test_recomputes_where_erasing_saves_less_than_half(self, n_after: int, method: str) -> None:
        memory = erasing_memory(tiny_model("llama"))
        wrong = memory.append("It is wrong.")
        memory.append("x" * n_after)
        assert wrong.n_tokens == 12
        assert memory.retract(wrong, dry_run=True).method == memory.retract(wrong).method == method

    def test_recomputes_beyond_the_longest_span(self) -> None:
        memory = erasing_memory(tiny_model("llama"), max_span_tokens=10)
        segments = filled(memory)
        report = memory.retract(segments[1])
        assert report.method == "recompute" and "up to 10" in report.why
        with pytest.raises(UnsupportedEdit, match="up to 10"):
            memory.retract(segments[0], method="kveraser")

    def test_cuts_the_tail(self) -> None:
        memory = erasing_memory(tiny_model("llama"))
        assert memory.retract(filled(memory)[-1]).method == "crop"

    def test_recomputes_what_has_template_frames(self) -> None:
        memory = erasing_memory(tiny_model("llama"))
        memory.append("Hello. ")
        answer = memory.append("Yes.", kind="assistant")
        memory.append("A long text that follows the answer, and goes on and on for a while.")
        assert memory.retract(answer).method == "recompute"

    def test_recomputes_without_an_eraser(self, llama_memory: Make) -> None:
        for option in ("auto", None):
            memory = llama_memory(eraser=option)
            segments = filled(memory)
            assert memory.retract(segments[1]).method == "recompute"
            with pytest.raises(UnsupportedEdit, match="eraser"):
                memory.retract(segments[0], method="kveraser")

    def test_a_replacing_append_may_erase_and_is_all_or_nothing(self) -> None:
        memory = erasing_memory(tiny_model("llama"))
        memory.append("Intro. ")
        old = memory.append("The price is 3. ", key="price")
        memory.append("A long text that follows it, and goes on and on for a while, on and on.")
        before, tensors = snapshot(memory), layer_tensors(memory)
        with pytest.raises(ZeroDivisionError):
            memory.append("The price is 4. ", key="price", on_conflict="replace", progress=lambda event: 1 // 0)
        assert_unchanged(memory, before)
        new = memory.append("The price is 4. ", key="price", on_conflict="replace")
        assert [s.state for s in memory.segments(key="price")] == ["erased", "live"]
        assert same_tensors(outside(layer_tensors(memory), old, new), outside(tensors, old))


class TestIdentity:
    def test_weights_of_another_model_are_refused_and_both_are_named(self, tmp_path: Path) -> None:
        one, other = build(tiny_config("llama"), seed=1), build(tiny_config("llama"), seed=2)
        one.name_or_path, other.name_or_path = "model-one", "model-two"
        KVEraser.untrained(one).save_pretrained(tmp_path)
        memory = ContextMemory(other, tiny_tokenizer(), eraser=tmp_path)
        segments = filled(memory)
        before = snapshot(memory)
        with pytest.raises(IdentityMismatch, match=r"model-one.*model-two"):
            memory.retract(segments[1], method="kveraser")
        assert_unchanged(memory, before)
        report = memory.retract(segments[1])
        assert report.method == "recompute" and "model-one" in report.why

    def test_another_architecture_is_refused(self) -> None:
        eraser = KVEraser.untrained(tiny_model("llama"))
        memory = ContextMemory(tiny_model("qwen3"), tiny_tokenizer(), eraser=eraser)
        segments = filled(memory)
        with pytest.raises(IdentityMismatch):
            memory.retract(segments[1], method="kveraser")

    def test_weights_that_changed_since_are_noticed(self) -> None:
        model = build(tiny_config("llama"), seed=3)
        memory = erasing_memory(model)
        segments = filled(memory)
        memory.retract(segments[1], method="kveraser")
        with torch.no_grad():
            model.get_decoder().layers[0].mlp.up_proj.weight.mul_(2)
        with pytest.raises(IdentityMismatch):
            memory.retract(segments[0], method="kveraser")

    def test_an_eraser_outlives_the_model_it_was_made_for(self, tmp_path: Path) -> None:
        eraser = KVEraser.untrained(build(tiny_config("llama"), seed=3))
        gc.collect()
        eraser.save_pretrained(tmp_path)
        model = build(tiny_config("llama"), seed=3)
        for one in (eraser, KVEraser.from_pretrained(tmp_path)):
            memory = ContextMemory(model, tiny_tokenizer(), eraser=one)
            assert memory.retract(filled(memory)[1], method="kveraser").method == "kveraser"

    def test_weights_kept_beside_converted_models_are_found(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("CONTEXTMEM_CACHE", str(tmp_path))
        model = build(tiny_config("llama"), seed=10)
        memory = ContextMemory(model, tiny_tokenizer())
        segments = filled(memory)
        assert memory.retract(segments[0], dry_run=True).method == "recompute"
        damaged = tmp_path / "weights" / "a"
        KVEraser.untrained(model).save_pretrained(damaged)
        (damaged / "adapter_model.safetensors").write_bytes(b"cut off")
        KVEraser.untrained(build(tiny_config("llama"), seed=11)).save_pretrained(tmp_path / "weights" / "b")
        assert memory.retract(segments[0], dry_run=True).method == "recompute"
        KVEraser.untrained(model).save_pretrained(tmp_path / "weights" / "c")
        assert memory.retract(segments[0]).method == "kveraser"

    def test_the_same_model_in_half_precision_fits(self, tmp_path: Path) -> None:
        model = build(tiny_config("llama"), seed=3)
        moved(KVEraser.untrained(model), model).save_pretrained(tmp_path)
        for dtype in (torch.bfloat16, torch.float16):
            half = build(tiny_config("llama"), seed=3).to(dtype)
            memory = ContextMemory(half, tiny_tokenizer(), eraser=tmp_path)
            assert memory.retract(filled(memory)[1], method="kveraser").method == "kveraser"

    def test_a_users_own_lora_survives_and_makes_a_foreign_eraser_refuse(self) -> None:
        from peft import LoraConfig, get_peft_model

        model = build(tiny_config("llama"), seed=4)
        eraser = moved(KVEraser.untrained(model), model)
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        memory = ContextMemory(wrapped, tiny_tokenizer(), eraser=eraser)
        segments = filled(memory)
        before, weights = snapshot(memory), {n: p.clone() for n, p in wrapped.named_parameters()}
        with pytest.raises(IdentityMismatch, match="active adapters"):
            memory.retract(segments[1], method="kveraser")
        assert_unchanged(memory, before)
        assert memory.retract(segments[1], dry_run=True).method == "recompute"
        with wrapped.disable_adapter():
            plain = ContextMemory(wrapped, tiny_tokenizer(), eraser=eraser)
            assert plain.retract(filled(plain)[1]).method == "kveraser"
        own = moved(KVEraser.untrained(wrapped), wrapped)
        memory = ContextMemory(wrapped, tiny_tokenizer(), eraser=own)
        assert memory.retract(filled(memory)[1]).method == "kveraser"
        assert wrapped.active_adapters == ["default"]
        assert {n for n, _ in wrapped.named_parameters()} == set(weights)
        assert all(torch.equal(p, weights[n]) for n, p in wrapped.named_parameters())

    def test_under_a_users_lora_an_untrained_eraser_reproduces_the_cache(self) -> None:
        from peft import LoraConfig, get_peft_model

        model = build(tiny_config("qwen3"), seed=5)
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        memory = ContextMemory(wrapped, tiny_tokenizer(), eraser=KVEraser.untrained(wrapped))
        segments = filled(memory)
        before = layer_tensors(memory)
        memory.retract(segments[1], method="kveraser")
        assert same_tensors(layer_tensors(memory), before)


class TestFiles:
    @pytest.mark.parametrize("adapter", ["lora", "full"])
    def test_saved_and_loaded_it_erases_the_same(self, adapter: str, tmp_path: Path) -> None:
        model = build(tiny_config("qwen2"), seed=6)
        eraser = moved(KVEraser.untrained(model, adapter=adapter), model)
        eraser.save_pretrained(tmp_path / "once", dtype=torch.float32)
        unused = KVEraser.from_pretrained(tmp_path / "once")
        unused.save_pretrained(tmp_path / "twice", dtype=torch.float32)
        results = []
        for one in (eraser, unused, KVEraser.from_pretrained(tmp_path / "twice")):
            memory = ContextMemory(model, tiny_tokenizer(), eraser=one)
            memory.retract(filled(memory)[1], method="kveraser")
            results.append(layer_tensors(memory))
        assert same_tensors(results[0], results[1]) and same_tensors(results[0], results[2])

    def test_half_precision_by_default(self, tmp_path: Path) -> None:
        KVEraser.untrained(tiny_model("llama")).save_pretrained(tmp_path)
        assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float16}

    def test_the_published_layout_with_seven_projections_loads(self, tmp_path: Path) -> None:
        """What PEFT itself writes, without our own file: rank 16, alpha 32, all projections, another base model's name."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=SEVEN, init_lora_weights=False)
        published = get_peft_model(build(tiny_config("qwen3"), seed=7), config)
        published.save_pretrained(tmp_path)
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = "Qwen/Qwen3-8B"
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        model = build(tiny_config("qwen3"), seed=7)
        memory = ContextMemory(model, tiny_tokenizer(), eraser=tmp_path)
        segments = filled(memory)
        start, stop = segments[1].start, segments[1].stop
        expected = memory.past_key_values.view(start)
        Backbone.of(published).forward(memory.token_ids[start:stop], expected)
        memory.retract(segments[1], method="kveraser")
        for (k, v), layer in zip(layer_tensors(memory), expected.layers, strict=True):
            torch.testing.assert_close(k[:, :, start:stop], layer.keys[:, :, start:], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(v[:, :, start:stop], layer.values[:, :, start:], rtol=1e-4, atol=1e-5)

    def test_a_published_adapter_of_another_model_is_refused(self, tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        get_peft_model(build(tiny_config("qwen3")), LoraConfig(r=4, target_modules=SEVEN)).save_pretrained(tmp_path)
        memory = ContextMemory(
            build(tiny_config("qwen3", hidden_size=64)), tiny_tokenizer(), eraser=KVEraser.from_pretrained(tmp_path)
        )
        segments = filled(memory)
        with pytest.raises(IdentityMismatch, match=r"there,.*here"):
            memory.retract(segments[1], method="kveraser")
        settings = json.loads((tmp_path / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = "Qwen/Qwen3-8B"
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        model = build(tiny_config("qwen3"))
        model.name_or_path = "somebody/Qwen3-4B"
        memory = ContextMemory(model, tiny_tokenizer(), eraser=tmp_path)
        with pytest.raises(IdentityMismatch, match=r"Qwen3-8B.*Qwen3-4B"):
            memory.retract(filled(memory)[1], method="kveraser")

    def test_what_is_no_eraser_is_refused(self, tmp_path: Path, monkeypatch: Any) -> None:
        (tmp_path / "eraser_config.json").write_text("{")
        with pytest.raises(StorageError):
            KVEraser.from_pretrained(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises((ModelUnavailable, StorageError)):
            KVEraser.from_pretrained(tmp_path / "nowhere")
        with pytest.raises(InvalidInput):
            ContextMemory(tiny_model("llama"), tiny_tokenizer(), eraser=3)  # type: ignore[arg-type]

    def test_an_erased_memory_saves_and_loads(self, tmp_path: Path) -> None:
        model = tiny_model("llama")
        memory = erasing_memory(model)
        segments = filled(memory)
        memory.retract(segments[1], method="kveraser")
        loaded = ContextMemory.load(memory.save(tmp_path / "m"), model, tiny_tokenizer())
        assert same_tensors(layer_tensors(loaded), layer_tensors(memory))
        assert loaded.segments(state="erased")[0].n_tokens == segments[1].n_tokens
        loaded.settle()
        assert_equals_reference(loaded)


def test_an_eraser_needs_sensible_settings() -> None:
    model = tiny_model("llama")
    for wrong in ({"adapter": "prefix"}, {"conditioning": "all"}, {"rank": 0}):
        with pytest.raises(InvalidInput):
            KVEraser.untrained(model, **wrong)
    with pytest.raises(UnsupportedEdit, match="nowhere"):
        KVEraser.untrained(model, targets=["nowhere"])
