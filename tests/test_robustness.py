"""Failures at every point of every operation, and corners where bookkeeping could slip without a sound."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_equals_reference, assert_unchanged, layer_tensors, snapshot
from rich.console import Console
from tiny import CHATML, build, tiny_config, tiny_model, tiny_tokenizer

from contextmem import (
    ContextMemory,
    ContextMemoryError,
    ContextOverflow,
    DependentsWarning,
    InvalidInput,
    KeyConflictWarning,
    OutOfMemory,
    StorageError,
    SuffixRepair,
    UnsupportedEdit,
)
from contextmem.backbone import Backbone
from contextmem.chat import Chat
from contextmem.codec import Codec
from contextmem.render import segments_table

Make = Callable[..., ContextMemory]


def text_of(memory: ContextMemory) -> str:
    return memory._codec.decode(memory.token_ids)


OPERATIONS: dict[str, Callable[[ContextMemory], Any]] = {
    "append": lambda m: m.append("y" * 40),
    "append assistant": lambda m: m.append("y" * 40, kind="assistant"),
    "append replacing": lambda m: m.append("y" * 40, key="gone", on_conflict="replace"),
    "ask": lambda m: m.ask("q" * 20, max_new_tokens=4),
    "ask kept": lambda m: m.ask("q" * 20, max_new_tokens=4, keep=True),
    "ask kept with a stop string": lambda m: m.ask("q" * 20, max_new_tokens=8, keep=True, stop=list("abcdefgh")),
    "score": lambda m: m.score("z" * 30, question="q"),
    "logits": lambda m: m.logits("z" * 30),
    "recompute": lambda m: m.retract("gone", method="recompute"),
    "suffix_repair": lambda m: m.retract("gone", method="suffix_repair"),
    "instruct": lambda m: m.retract("gone", method="instruct"),
    "replace": lambda m: m.replace("gone", "new text"),
    "settle": lambda m: m.settle(),
    "verify": lambda m: m.verify(),
}


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("out of memory"), RuntimeError("broken"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_error_in_any_forward_of_any_operation_changes_nothing(
    name: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ContextMemory(tiny_model("llama"), tiny_tokenizer(), chunk_size=16)
    memory.retract(memory.append("masked "), method="mask")  # cut: it is the tail
    memory.append("some text ")
    memory.append("that goes ", key="gone")
    masked = memory.append("and more ")
    memory.append("x" * 30)
    if name == "settle":
        memory.retract(masked, method="mask")
    before, events, forward, calls = snapshot(memory), memory.events, Backbone._forward, 0
    expected = memory.logits("?")

    def failing(self: Backbone, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        result = forward(self, *arguments, **more)  # the cache was written before it failed
        if calls == at:
            raise failure
        return result

    monkeypatch.setattr(Backbone, "_forward", failing)
    for at in range(1, 200):
        calls = 0
        try:
            OPERATIONS[name](memory)
        except (OutOfMemory, RuntimeError, KeyboardInterrupt):
            assert_unchanged(memory, before)
            assert memory.events == events
        else:
            assert at > 1, "the operation runs no forward"
            break
    monkeypatch.undo()
    if name in ("ask", "score", "logits", "verify"):
        assert_unchanged(memory, before)
        assert torch.equal(memory.logits("?"), expected)
    else:
        memory.settle()
        assert_equals_reference(memory)


@pytest.mark.parametrize("name", ["append", "recompute", "replace", "settle", "ask kept"])
def test_a_callback_that_fails_at_the_very_end_changes_nothing(llama_memory: Make, name: str) -> None:
    def fail(event: Any) -> None:
        if event.status == "done":
            raise ValueError("late")

    memory = llama_memory()
    memory.append("a ")
    gone = memory.append("gone ")
    memory.append("b")
    if name == "settle":
        memory.retract(gone, method="mask")
    before, events = snapshot(memory), memory.events
    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: memory.append("c", progress=fail),
        "recompute": lambda: memory.retract(gone, method="recompute", progress=fail),
        "replace": lambda: memory.replace(gone, "new", progress=fail),
        "settle": lambda: memory.settle(progress=fail),
        "ask kept": lambda: memory.ask("q", keep=True, progress=fail),
    }
    with pytest.raises(ValueError, match="late"):
        calls[name]()
    assert_unchanged(memory, before)
    assert memory.events == events


def test_warnings_turned_into_errors_change_nothing(llama_memory: Make) -> None:
    memory = llama_memory()
    source = memory.append("a", key="k")
    memory.append("b", parents=[source])
    before = snapshot(memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call, kind in (
            (lambda: memory.append("c", key="k"), KeyConflictWarning),
            (lambda: memory.append("c", key="k", on_conflict="replace"), DependentsWarning),
            (lambda: memory.retract(source), DependentsWarning),
            (lambda: memory.replace(source, "d"), DependentsWarning),
        ):
            with pytest.raises(kind):
                call()
            assert_unchanged(memory, before)


@pytest.mark.parametrize(
    "method", ["mask", "delete_and_shift", "suffix_repair", "suffix_repair_query", "recompute", "auto"]
)
def test_any_method_on_the_tail_cuts_it_exactly(memory: ContextMemory, method: str) -> None:
    memory.append("first ")
    tail = memory.append("the tail")
    report = memory.retract(tail, method=method)
    assert report.guarantee == "exact" and memory.next_position == memory.seq_length
    memory.append("more")
    assert_equals_reference(memory)
    assert memory.settle().method == "none"


def test_a_mask_that_takes_the_tail_and_more_leaves_no_gap_at_the_end(memory: ContextMemory) -> None:
    memory.append("first ")
    gone = [memory.append("second "), memory.append("third "), memory.append("fourth")]
    memory.retract([gone[0], gone[2]], method="mask")
    memory.append("more")
    memory.settle()
    assert_equals_reference(memory)


def test_nothing_new_to_feed_continues_at_the_last_tokens_own_position(memory: ContextMemory) -> None:
    memory.append("context ")
    gone = memory.append("goes away ")
    memory.append("x")
    memory.retract(gone, method="mask")
    a, b = memory._codec.encode("ab")
    chain = float(memory.logits("").double().log_softmax(-1)[a]) + float(memory.logits("a").double().log_softmax(-1)[b])
    assert memory.score("ab") == pytest.approx(chain, abs=0.2)  # the token fed again no longer sees what is gone


def test_a_replaced_answer_keeps_its_frames(llama_memory: Make) -> None:
    memory = llama_memory()
    answer = memory.ask("q", keep=True, max_new_tokens=3).segment
    report = memory.replace(answer, "a new answer")
    assert text_of(memory).endswith("assistant\na new answer<|im_end|>\n<|im_start|>user\n")
    memory.retract(report.segment)
    assert text_of(memory) == "<|im_start|>user\nq"
    assert_equals_reference(memory)


class TestLimits:
    def small(self, limit: int = 120) -> ContextMemory:
        return ContextMemory(build(tiny_config("llama", max_position_embeddings=limit)), tiny_tokenizer())

    def test_an_instruction_that_does_not_fit_is_refused(self) -> None:
        memory = self.small()
        segment = memory.append("x" * 60)
        memory.append("y")
        before = snapshot(memory)
        for dry_run in (True, False):
            with pytest.raises(ContextOverflow):
                memory.retract(segment, method="instruct", dry_run=dry_run)
        assert_unchanged(memory, before)

    @pytest.mark.parametrize("filled", range(50, 78))
    def test_a_kept_answer_leaves_room_for_its_closing_frame(self, filled: int) -> None:
        memory = self.small()
        memory.append("x" * filled)
        try:
            answer = memory.ask("?", keep=True, max_new_tokens=200)
        except ContextOverflow as refusal:
            assert refusal.needed > refusal.available and "segment" not in str(refusal)
        else:
            assert answer.segment is not None and memory.next_position <= 120
            assert_equals_reference(memory, "")

    def test_a_retraction_frees_what_it_removed(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("x" * 50)
        big = memory.append("y" * 3000)
        memory.append("z" * 50)
        held = memory.nbytes
        memory.retract(big)
        assert memory.nbytes < held / 5

    def test_ids_beyond_the_embedding_are_refused(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([f"word{i}" for i in range(60)])
        memory = ContextMemory(tiny_model("llama"), tokenizer)
        with pytest.raises(InvalidInput, match="beyond the 300 rows"):
            memory.append("word59")

    def test_running_out_of_memory_while_decoding_is_typed(
        self, llama_memory: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = llama_memory()
        memory.append("x")
        forward = Backbone._forward

        def fail(self: Backbone, ids: Any, cache: Any, all_logits: bool = False) -> Any:
            if len(ids) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return forward(self, ids, cache, all_logits)

        monkeypatch.setattr(Backbone, "_forward", fail)
        with pytest.raises(OutOfMemory):
            memory.ask("what?", max_new_tokens=4)

    def test_half_precision_repairs_are_limited_like_shifts(self) -> None:
        memory = ContextMemory(build(tiny_config("llama")).to(torch.bfloat16), tiny_tokenizer())
        segments = [memory.append(f"segment number {i} ") for i in range(8)]
        methods = [memory.retract(s, method=SuffixRepair(share=0.1)).method for s in segments[:5]]
        assert methods == ["suffix_repair"] * 3 + ["recompute", "suffix_repair"]


class TestProvenanceCorners:
    def test_the_warnings_advice_works_afterwards(self, llama_memory: Make) -> None:
        memory = llama_memory()
        source = memory.append("source ")
        summary = memory.append("summary", parents=[source])
        with pytest.warns(DependentsWarning, match=summary.id):
            memory.retract(source)
        report = memory.retract(source, cascade=True)
        assert report.segments == (summary.id,) and memory.segments() == []

    def test_a_replacement_is_logged_with_its_real_guarantee(self, llama_memory: Make) -> None:
        memory = llama_memory()
        masked = memory.append("masked ")
        memory.append("between ")
        memory.append("old", key="k")
        memory.retract(masked, method="mask")
        memory.append("new", key="k", on_conflict="replace")
        event = [e for e in memory.events if e.operation == "retract"][-1]
        assert (event.method, event.guarantee) == ("crop", "approximate")

    def test_metadata_is_read_only(self, llama_memory: Make) -> None:
        segment = llama_memory().append("x", metadata={"a": 1})
        with pytest.raises(TypeError):
            segment.metadata["a"] = 2  # type: ignore[index]


class TestArguments:
    def test_labels_that_could_not_be_saved_are_refused(self, llama_memory: Make, tmp_path: Path) -> None:
        memory = llama_memory()
        segment = memory.append("x")
        for call in (
            lambda: memory.append("y", source="f\udcff.txt"),
            lambda: memory.append("y", metadata={"a": "\udcff"}),
            lambda: memory.retract(segment, reason=object()),  # type: ignore[arg-type]
            lambda: memory.retract(segment, method=5),  # type: ignore[arg-type]
            lambda: memory.ask("?", stop=5),  # type: ignore[arg-type]
            lambda: memory.ask("?", seed="x"),
        ):
            with pytest.raises(InvalidInput):
                call()
        memory.ask("?", max_new_tokens=1, logits_processor=None)
        memory.save(tmp_path / "m.ctx")
        with pytest.raises(StorageError):
            memory.save(tmp_path / "nowhere" / "m.ctx")

    def test_a_model_without_its_tokenizer_is_not_ignored(self, llama_memory: Make, tmp_path: Path) -> None:
        memory = llama_memory()
        memory.append("x")
        memory.save(tmp_path / "m.ctx")
        with pytest.raises(InvalidInput, match="both"):
            ContextMemory.load(tmp_path / "m.ctx", memory.model)

    def test_a_template_that_cannot_be_used_is_named(self) -> None:
        with pytest.raises(UnsupportedEdit, match="chat template"):
            ContextMemory(tiny_model("llama"), tiny_tokenizer("{{ raise_exception('no') }}"))

    def test_a_template_that_changes_later_changes_what_is_a_control_token(self) -> None:
        from tokenizers import AddedToken

        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([AddedToken("<tool>", special=False)])
        assert Codec.of(tokenizer) is Codec.of(tokenizer)
        assert len(Codec.of(tokenizer).encode("<tool>")) == 1
        tokenizer.chat_template = CHATML + "{# <tool> #}"
        assert len(Codec.of(tokenizer).encode("<tool>")) == 6

    def test_truncation_under_a_normalizer_keeps_what_fits(self) -> None:
        from tokenizers import Tokenizer, normalizers

        tokenizer = tiny_tokenizer()
        backend: Tokenizer = tokenizer.backend_tokenizer
        backend.normalizer = normalizers.NFC()
        memory = ContextMemory(build(tiny_config("llama", max_position_embeddings=120)), tokenizer)
        text = "e\u0301 " + "abc" * 200
        segment = memory.append(text, overflow="truncate")
        assert 90 < segment.n_tokens <= 120 and text.startswith(segment.text) and segment.truncated > 400

    def test_one_backbone_for_a_model_and_its_peft_wrapper(self) -> None:
        from peft import LoraConfig, get_peft_model

        base = build(tiny_config("llama"))
        wrapped = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
        assert Backbone.of(wrapped) is Backbone.of(base)


class TestShown:
    def test_brackets_in_labels_are_shown_as_they_are(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("te[/x]xt", source="docs/[/d]/x", key="[k]")
        console = Console(file=(out := io.StringIO()), width=140)
        console.print(segments_table(memory.segments(), "Title", console.width))
        assert all(word in out.getvalue() for word in ("te[/x]xt", "docs/[/d]/x", "[k]"))

    def test_ctrl_c_in_a_command_keeps_the_chat(
        self, llama_memory: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        chat = Chat(llama_memory(), Console(file=(out := io.StringIO()), width=100), 4)
        (tmp_path / "a file.txt").write_text("text", encoding="utf-8")

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Backbone, "_forward", interrupt)
        chat.handle(f"/add '{tmp_path / 'a file.txt'}'")
        assert "interrupted" in out.getvalue() and chat.memory.segments() == []
        monkeypatch.undo()
        chat.handle(f"/add '{tmp_path / 'a file.txt'}'")
        assert [s.text for s in chat.memory.segments()] == ["text"]
        chat.handle("/add 'unbalanced")
        assert "quote paths" in out.getvalue()

    def test_leaving_the_block_with_an_open_stream_shows_the_first_error(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("abc")
        stream = memory.stream("?", max_new_tokens=20)
        with pytest.raises(ZeroDivisionError), memory:
            next(stream)
            raise ZeroDivisionError
        stream.close()
        assert layer_tensors(memory)


def test_all_errors_are_one_family() -> None:
    from contextmem import errors

    classes = [getattr(errors, name) for name in errors.__all__ if not name.endswith("Warning")]
    assert all(issubclass(each, ContextMemoryError) for each in classes)
