"""The handle: appending, asking, keeping turns, replacing, forking, going back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equals_reference, assert_unchanged, floor, layer_tensors, reference, same_tensors, snapshot
from tiny import build, tiny_config, tiny_model, tiny_tokenizer

from contextmem import (
    ContextMemory,
    ContextOverflow,
    DependentsWarning,
    InvalidInput,
    KeyConflictWarning,
    MemoryClosed,
    SegmentNotFound,
    UnsupportedEdit,
)

Make = Callable[..., ContextMemory]


def text_of(memory: ContextMemory) -> str:
    return memory._codec.decode(memory.token_ids)


class TestAppend:
    def test_appending_in_pieces_equals_one_prefill(self, memory: ContextMemory) -> None:
        for piece in ("The first piece. ", "x", "", "A third, somewhat longer piece of text."):
            memory.append(piece)
        assert_equals_reference(memory)

    def test_spans_are_exact_and_nothing_is_added_to_the_text(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be brief.")
        texts = ["Kyo", "to", "shalom ", "olam", "", "   "]
        segments = [memory.append(text) for text in texts]
        assert [s.text for s in memory.segments()] == ["Be brief.", *texts]
        assert [memory._codec.decode(memory.token_ids[s.start : s.stop]) for s in segments] == texts
        assert text_of(memory) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" + "".join(texts)

    def test_a_segment_carries_what_was_said_about_it(self, llama_memory: Make) -> None:
        memory = llama_memory()
        first = memory.append("one")
        metadata = {"page": 3, "tags": ["a"]}
        second = memory.append(
            "two", key="k", kind="tool_result", source="web", parents=[first], pinned=True, metadata=metadata
        )
        metadata["page"] = 4
        assert (second.key, second.kind, second.source, second.parents) == ("k", "tool_result", "web", (first.id,))
        assert second.pinned and second.metadata == {"page": 3, "tags": ["a"]} and second.n_tokens == 3
        assert second.created_at.tzinfo is not None

    @pytest.mark.parametrize(
        "arguments",
        [
            {"text": 7},
            {"text": None},
            {"text": b"bytes"},
            {"text": "\ud800 lone"},
            {"text": "x", "kind": "system"},
            {"text": "x", "kind": "frame"},
            {"text": "x", "kind": "letter"},
            {"text": "x", "key": ""},
            {"text": "x", "key": 3},
            {"text": "x", "source": 3},
            {"text": "x", "metadata": {"a": object()}},
            {"text": "x", "metadata": 5},
            {"text": "x", "on_conflict": "merge"},
            {"text": "x", "overflow": "drop"},
            {"text": "x", "parents": ["nobody"]},
            {"text": "x", "parents": 5},
        ],
    )
    def test_bad_arguments_are_refused_and_change_nothing(self, llama_memory: Make, arguments: dict[str, Any]) -> None:
        memory = llama_memory()
        memory.append("before")
        before = snapshot(memory)
        with pytest.raises((InvalidInput, SegmentNotFound)):
            memory.append(**arguments)
        assert_unchanged(memory, before)

    def test_an_assistant_text_gets_a_turn_of_its_own(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("Hello?")
        said = memory.append("Hi.", kind="assistant")
        memory.append("Good.")
        expected = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nGood."
        assert text_of(memory) == expected
        memory.retract(said)
        assert text_of(memory) == "<|im_start|>user\nHello?Good."
        assert_equals_reference(memory)

    def test_hundred_thousand_tokens_are_refused_before_any_is_computed(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("before")
        before = snapshot(memory)
        with pytest.raises(ContextOverflow, match=r"exceeds .* context length") as caught:
            memory.append("x" * 100_000)
        assert caught.value.needed == 100_000 and caught.value.limit == 4096
        assert caught.value.available == 4096 - memory.next_position
        assert_unchanged(memory, before)

    def test_truncation_says_how_much_it_cut_and_splits_no_character(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("before")
        room = memory.context_length - memory.next_position
        segment = memory.append("é" * 3000, overflow="truncate")
        assert segment.n_tokens == room - room % 2 and segment.truncated == 6000 - segment.n_tokens
        assert segment.text == "é" * (segment.n_tokens // 2)
        assert memory._codec.decode(segment.token_ids) == segment.text


class TestAsk:
    def test_a_transient_answer_equals_greedy_decoding_of_a_fresh_context(self, memory: ContextMemory) -> None:
        memory.append("Some context to look at. ")
        answer = memory.ask("What?", max_new_tokens=12)
        ids = [*memory.token_ids, *memory._codec.encode("What?"), *memory._framing.answer_open]
        for token in answer.token_ids:
            logits = reference(memory.model, ids)
            gap = float(logits.max() - logits[token])
            assert gap <= 5 * floor(memory.model, ids), "a flip where there is no near-tie"
            ids.append(token)

    def test_a_kept_turn_is_closed_and_the_next_one_opened(self, memory: ContextMemory) -> None:
        memory.append("Context. ")
        answer = memory.ask("What?", keep=True, max_new_tokens=5)
        question, kept = memory.segments()[-2:]
        assert (question.kind, kept.kind) == ("user", "assistant") and kept == answer.segment
        assert kept.token_ids == answer.token_ids
        assert set(kept.parents) == {s.id for s in memory.segments()[:-1]}
        assert text_of(memory).endswith("<|im_end|>\n<|im_start|>user\n")
        assert memory._codec.decode(kept.token_ids, skip_special_tokens=True) == kept.text
        assert_equals_reference(memory)

    def test_keeping_gives_the_same_answer_as_not_keeping(self, memory: ContextMemory) -> None:
        memory.append("Context. ")
        first = memory.ask("What?", max_new_tokens=6)
        assert memory.ask("What?", max_new_tokens=6, keep=True).token_ids == first.token_ids

    def test_prefix_begins_the_answer_and_is_kept_with_it(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("Context. ")
        answer = memory.ask("What?", prefix="It is ", max_new_tokens=3, keep=True)
        assert answer.prefix == "It is " and answer.segment is not None
        assert answer.segment.token_ids == (*memory._codec.encode("It is "), *answer.token_ids)
        assert_equals_reference(memory)

    @pytest.mark.parametrize("stop", ["z", ["q", "zz"], None])
    def test_stop_strings_end_the_answer_and_are_left_out(self, llama_memory: Make, stop: Any) -> None:
        memory = llama_memory()
        memory.append("abc")
        whole = memory.ask("?", max_new_tokens=40)
        middle = whole.text[len(whole.text) // 2 : len(whole.text) // 2 + 2]
        if stop is None:
            stop = middle
        answer = memory.ask("?", max_new_tokens=40, stop=stop, keep=True)
        stops = [stop] if isinstance(stop, str) else stop
        cut = min((at for s in stops if (at := whole.text.find(s)) >= 0), default=len(whole.text))
        assert answer.text == whole.text[:cut]
        assert_equals_reference(memory)

    def test_sampling_is_repeatable_with_a_seed_and_takes_transformers_arguments(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("abc")
        kinds = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
        a, b = (memory.ask("?", max_new_tokens=20, seed=7, **kinds).token_ids for _ in range(2))
        assert a == b
        assert len({memory.ask("?", max_new_tokens=8, seed=s, temperature=2.0).token_ids for s in range(6)}) > 1
        greedy = memory.ask("?", max_new_tokens=8).token_ids
        assert memory.ask("?", max_new_tokens=8, temperature=0).token_ids == greedy

    def test_processors_and_criteria_of_transformers_are_used(self, llama_memory: Make) -> None:
        from transformers import MaxLengthCriteria, SuppressTokensLogitsProcessor

        memory = llama_memory()
        memory.append("abc")
        first = memory.ask("?", max_new_tokens=1).token_ids[0]
        banned = memory.ask("?", max_new_tokens=1, logits_processor=[SuppressTokensLogitsProcessor([first])])
        assert banned.token_ids[0] != first
        short = memory.ask("?", max_new_tokens=50, stopping_criteria=[MaxLengthCriteria(3)])
        assert len(short.token_ids) == 3 and short.finish_reason == "stop"

    @pytest.mark.parametrize(
        "bad", [{"max_new_tokens": 0}, {"max_new_tokens": 1.5}, {"stop": ""}, {"beams": 3}, {"top_p": 2.0}]
    )
    def test_bad_arguments(self, llama_memory: Make, bad: dict[str, Any]) -> None:
        memory = llama_memory()
        memory.append("abc")
        before = snapshot(memory)
        with pytest.raises(InvalidInput):
            memory.ask("?", **bad)
        with pytest.raises(InvalidInput):
            memory.ask(5)  # type: ignore[arg-type]
        assert_unchanged(memory, before)

    def test_generation_ends_with_the_context(self, llama_memory: Make, tokenizer: Any) -> None:
        model = build(tiny_config("llama", max_position_embeddings=120))
        memory = ContextMemory(model, tokenizer)
        memory.append("x" * 60)
        answer = memory.ask("?", max_new_tokens=200)
        assert answer.finish_reason in ("context_length", "stop")
        with pytest.raises(ContextOverflow):
            memory.ask("y" * 100)

    def test_an_empty_memory_without_a_template_has_nothing_to_ask(self) -> None:
        tokenizer = tiny_tokenizer(chat_template=None)
        memory = ContextMemory(tiny_model("llama"), tokenizer)
        with pytest.raises(InvalidInput, match="no live text"):
            memory.ask("")


class TestScore:
    def test_score_is_the_log_probability_under_a_plain_forward(self, memory: ContextMemory) -> None:
        memory.append("Some context. ")
        continuation = "And more."
        ids = [*memory.token_ids, *memory._codec.encode(continuation)]
        with torch.no_grad():
            row = torch.tensor([ids])
            scores = memory.model(row, attention_mask=torch.ones_like(row)).logits[0].double().log_softmax(-1)
        start = memory.seq_length
        expected = sum(float(scores[i - 1, ids[i]]) for i in range(start, len(ids)))
        assert memory.score(continuation) == pytest.approx(expected, abs=1e-3)
        assert memory.score("") == 0.0

    def test_score_of_an_answer_stands_after_the_question(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("Some context. ")
        raw = memory._codec.decode(memory._framing.answer_open)
        assert raw.endswith("assistant\n")
        kept = llama_memory()
        kept.append("Some context. What?")
        kept.append("Yes", kind="assistant")
        answer = kept.segments()[-1]
        row = torch.tensor([kept.token_ids[: answer.stop]])
        with torch.no_grad():
            scores = kept.model(row, attention_mask=torch.ones_like(row)).logits[0].double().log_softmax(-1)
        expected = sum(float(scores[i - 1, row[0, i]]) for i in range(answer.start, answer.stop))
        assert memory.score("Yes", question="What?") == pytest.approx(expected, abs=1e-3)

    def test_logits_leave_no_trace(self, memory: ContextMemory) -> None:
        memory.append("Some context. ")
        before = snapshot(memory)
        assert torch.equal(memory.logits("abc"), memory.logits("abc"))
        assert memory.logits().shape == memory.logits("x").shape
        assert_unchanged(memory, before)


class TestReplace:
    def test_replacing_recomputes_what_follows(self, memory: ContextMemory) -> None:
        memory.append("First. ")
        middle = memory.append("Second, to be replaced. ", key="k", source="s")
        memory.append("Third.")
        report = memory.replace("k", "New. ")
        assert [s.text for s in memory.segments()] == ["First. ", "New. ", "Third."]
        assert report.segment is not None and (report.segment.key, report.segment.source) == ("k", "s")
        assert report.forced_by == middle.id and report.tokens_recomputed == len("Third.")
        assert [s.state for s in memory.segments(key="k")] == ["retracted", "live"]
        assert_equals_reference(memory)

    def test_replacing_the_system_text(self, llama_memory: Make) -> None:
        memory = llama_memory(system="Be kind.")
        memory.append("Hello.")
        memory.replace(memory.segments(kind="system")[0], "Be brief.")
        assert text_of(memory) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello."
        assert_equals_reference(memory)

    def test_replace_takes_exactly_one_live_segment(self, llama_memory: Make) -> None:
        memory = llama_memory()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KeyConflictWarning)
            two = [memory.append("a", key="k"), memory.append("b", key="k")]
        with pytest.raises(InvalidInput, match="exactly one"):
            memory.replace("k", "c")
        memory.retract(two[0])
        with pytest.raises(InvalidInput, match="exactly one"):
            memory.replace(two[0], "c")


class TestForkAndCheckpoint:
    def test_a_fork_and_its_parent_do_not_see_each_other(self, memory: ContextMemory) -> None:
        memory.append("Common. ")
        parent_before = snapshot(memory)
        fork = memory.fork()
        fork.append("Only in the fork.")
        assert_unchanged(memory, parent_before)
        fork_before = snapshot(fork)
        memory.append("Only in the parent, and longer than the other.")
        assert_unchanged(fork, fork_before)
        assert_equals_reference(memory)
        assert_equals_reference(fork)
        assert not {s.id for s in memory.segments()[1:]} & {s.id for s in fork.segments()[1:]}

    def test_a_checkpoint_of_another_memory_is_refused(self, llama_memory: Make) -> None:
        a, b = llama_memory(), llama_memory()
        with pytest.raises(InvalidInput):
            a.restore(b.checkpoint())
        with pytest.raises(InvalidInput):
            a.restore("checkpoint")  # type: ignore[arg-type]

    def test_restoring_twice(self, memory: ContextMemory) -> None:
        memory.append("one ")
        mark = memory.checkpoint()
        before = snapshot(memory)
        for _ in range(2):
            memory.append("two")
            memory.restore(mark)
            assert_unchanged(memory, before)
        memory.append("three")
        assert_equals_reference(memory)


class TestProvenance:
    def test_default_warns_with_the_list_and_cascade_takes_them_too(self, llama_memory: Make) -> None:
        memory = llama_memory()
        source = memory.append("source ")
        memory.append("unrelated ")
        summary = memory.append("summary ", parents=[source])
        answer = memory.append("answer", kind="assistant", parents=[summary])
        assert set(memory.graph.edges) == {(source.id, summary.id), (summary.id, answer.id)}
        lone = memory.fork()
        with pytest.warns(DependentsWarning, match=summary.id):
            report = lone.retract(source)
        assert report.dependents == (summary.id, answer.id)
        report = memory.retract(source, cascade=True)
        assert set(report.segments) == {source.id, summary.id, answer.id} and report.dependents == ()
        assert [s.text for s in memory.segments()] == ["unrelated "]
        assert_equals_reference(memory)


class TestClosing:
    def test_a_closed_memory_says_so(self, llama_memory: Make) -> None:
        with llama_memory() as memory:
            memory.append("x")
        for call in (lambda: memory.append("y"), lambda: memory.ask("?"), memory.checkpoint, memory.settle):
            with pytest.raises(MemoryClosed):
                call()
        memory.close()


class TestModels:
    def test_adapters_in_training_mode_models_are_run_without_dropout(self) -> None:
        model = build(tiny_config("llama", attention_dropout=0.5))
        model.train()
        memory = ContextMemory(model, tiny_tokenizer())
        memory.append("some text here")
        assert torch.equal(memory.logits("x"), memory.logits("x"))
        assert model.training and model.model.layers[0].self_attn.training
        model.eval()
        assert_equals_reference(memory)

    def test_the_owner_may_call_the_model_between_our_calls(self, model: Any, tokenizer: Any) -> None:
        ids = torch.tensor([[5, 6, 7, 8]])
        mask = torch.ones_like(ids)
        before = model(ids, attention_mask=mask).logits
        memory = ContextMemory(model, tokenizer)
        memory.append("some text")
        assert torch.equal(model(ids, attention_mask=mask).logits, before)
        memory.retract(memory.append("gone"))
        memory.append(" and more")
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        assert_equals_reference(memory)

    def test_a_peft_model_is_run_with_its_active_adapter(self, tokenizer: Any) -> None:
        from peft import LoraConfig, get_peft_model

        base = build(tiny_config("llama"))
        wrapped = get_peft_model(
            base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        ).eval()
        memory = ContextMemory(wrapped, tokenizer)
        memory.append("some text ")
        segment = memory.append("goes ")
        memory.append("stays")
        memory.retract(segment)
        assert_equals_reference(memory)
        assert wrapped.active_adapters == ["default"]

    def test_wrong_constructor_arguments(self, tokenizer: Any) -> None:
        for arguments in ((None, tokenizer), ("gpt2", tokenizer), (tiny_model("llama"), None)):
            with pytest.raises(InvalidInput):
                ContextMemory(*arguments)
        with pytest.raises(InvalidInput):
            ContextMemory(tiny_model("llama"), tokenizer, chunk_size=0)

    def test_an_encoder_decoder_is_refused(self, tokenizer: Any) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        model = T5ForConditionalGeneration(
            T5Config(vocab_size=300, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        )
        with pytest.raises(UnsupportedEdit, match="encoder-decoder"):
            ContextMemory(model, tokenizer)


class TestStats:
    def test_tokens_and_bytes_add_up(self, memory: ContextMemory) -> None:
        memory.append("one ")
        memory.ask("two?", keep=True, max_new_tokens=4)
        stats = memory.stats()
        assert sum(row.n_tokens for row in stats.segments) == stats.n_tokens == memory.seq_length
        assert sum(row.nbytes for row in stats.segments) == stats.nbytes_used <= stats.nbytes_held == memory.nbytes
        used = sum(t.numel() * t.element_size() for pair in layer_tensors(memory) for t in pair)
        assert stats.nbytes_used == used

    def test_filters(self, llama_memory: Make) -> None:
        memory = llama_memory(system="s")
        memory.append("a", source="x", metadata={"n": 1})
        memory.append("b", kind="tool_result", source="x")
        assert [s.text for s in memory.segments(source="x")] == ["a", "b"]
        assert [s.text for s in memory.segments(kind="tool_result")] == ["b"]
        assert [s.text for s in memory.segments(metadata={"n": 1})] == ["a"]
        assert memory.segments(frames=True)[0].kind == "frame"
        with pytest.raises(InvalidInput):
            memory.segments(state="gone")


def test_forks_share_a_saved_state(llama_memory: Make) -> None:
    memory = llama_memory()
    memory.append("x")
    assert same_tensors(layer_tensors(memory), layer_tensors(memory.fork()))
