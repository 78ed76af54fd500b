"""Random operation sequences against independent oracles, on full and sliding-window attention."""

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
from oracle import assert_equal_logits, assert_equals_reference, assert_unchanged, layer_tensors, same_tensors, snapshot
from tiny import WINDOW, tiny_model, tiny_tokenizer

from contextmem import ContextMemory, ContextMemoryError, KVErase, OutOfMemory
from contextmem.retraction import METHODS

TEXTS = st.text(alphabet="abc déŠ日\n", max_size=14)
REMOVING = st.sampled_from(["auto", *(name for name in METHODS if name not in ("crop", "instruct"))])
NAMES = st.sampled_from(
    ["llama-eager", "qwen3-sdpa", "mistral-sdpa", "mistral-eager", "phi3-sdpa", "gemma3-sdpa", "gemma3-eager"]
)
TOKENIZER = tiny_tokenizer()


class MemoryMachine(RuleBasedStateMachine):
    """Append, ask, retract by every method, fork, go back, save and load, fail: invariants hold after each."""

    @initialize(name=NAMES, slots=st.sampled_from([None, 3]))
    def begin(self, name: str, slots: int | None) -> None:
        architecture, attention = name.split("-")
        self.model = tiny_model(architecture, attention)
        self.eraser = eraser_of(self.model, slots)
        self.memory = ContextMemory(self.model, TOKENIZER, chunk_size=7, eraser=self.eraser)
        self.watched: list[tuple[ContextMemory, Any]] = []
        self.marks: list[tuple[Any, Any]] = []
        self.forked: set[int] = set()

    @rule(text=TEXTS, pinned=st.booleans())
    def append(self, text: str, pinned: bool) -> None:
        segment = self.memory.append(text, pinned=pinned)
        assert segment.text == text and self.memory._codec.decode(segment.token_ids) == text

    @rule(text=TEXTS, keep=st.booleans(), n=st.integers(1, 4))
    def ask(self, text: str, keep: bool, n: int) -> None:
        before = None if keep else snapshot(self.memory)
        answer = self.memory.ask(text, keep=keep, max_new_tokens=n)
        assert len(answer.token_ids) <= n
        if before is not None:
            assert_unchanged(self.memory, before)

    @precondition(lambda self: self.memory.segments())
    @rule(data=st.data(), method=REMOVING, several=st.booleans(), repair=st.sampled_from([0, 0, 7]))
    def retract(self, data: st.DataObject, method: str, several: bool, repair: int) -> None:
        live = self.memory.segments()
        chosen = data.draw(
            st.lists(st.sampled_from(live), min_size=1, max_size=3 if several else 1, unique_by=lambda s: s.id)
        )
        spans = self.memory._state.ledger.spans
        kept = [s.text for s in live if s.id not in {c.id for c in chosen}]
        keep = self.kept_slots(chosen)
        outside = [(k[:, :, keep], v[:, :, keep]) for k, v in layer_tensors(self.memory)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            repairs = repair > 0 and method == "kveraser" and self.eraser.config.slots is not None
            report = self.memory.retract(chosen, method=KVErase(repair=repair) if repairs else method)
        assert [s.text for s in self.memory.segments()] == kept
        assert set(report.segments) == {c.id for c in chosen}
        if report.method == "mask":
            assert same_tensors(layer_tensors(self.memory), outside)
        if report.method == "kveraser":
            before = {span.id for span in spans if span.state == "erased"}
            new = [s for s in self.memory._state.ledger.spans if s.state == "erased" and s.id not in before]
            written = {slot for span in new for slot in range(span.start, span.stop)}
            rest = [slot for slot in range(self.memory.seq_length) if slot not in written]
            now = [(k[:, :, rest], v[:, :, rest]) for k, v in layer_tensors(self.memory)]
            if self.eraser.config.slots is None:
                assert same_tensors(now, outside)
            else:
                assert repairs or same_tensors([(v, v) for _, v in now], [(v, v) for _, v in outside])
                assert all(span.n_tokens <= self.eraser.config.slots for span in new)
        if report.guarantee == "exact":
            assert self.memory._state.is_exact

    def kept_slots(self, chosen: list[Any]) -> list[int]:
        """Slots that stay: not those of the chosen and their frames, nor of erased spans that nothing live follows."""
        gone = {segment.id for segment in chosen}
        everything = len(gone) == len(self.memory.segments())
        spans = self.memory._state.ledger.spans
        live = [
            span
            for span in spans
            if span.state == "live"
            and not (span.id in gone or span.owner in gone or (everything and span.kind == "frame"))
        ]
        end = max((span.stop for span in live), default=0)
        erased = [span for span in spans if span.state == "erased" and span.start < end]
        return sorted(slot for span in (*live, *erased) for slot in range(span.start, span.stop))

    @rule()
    def settle(self) -> None:
        self.memory.settle()
        assert self.memory._state.is_exact and self.memory.next_position == self.memory.seq_length

    @precondition(lambda self: self.memory.segments())
    @rule(data=st.data(), text=TEXTS)
    def replace(self, data: st.DataObject, text: str) -> None:
        old = data.draw(st.sampled_from(self.memory.segments()))
        report = self.memory.replace(old, text)
        assert report.segment is not None and report.segment.text == text

    @rule()
    def fork(self) -> None:
        fork = self.memory.fork()
        self.watched.append((self.memory, snapshot(self.memory)))
        self.memory = fork
        self.marks = []

    @rule()
    def checkpoint(self) -> None:
        self.marks.append((self.memory.checkpoint(), snapshot(self.memory)))

    @precondition(lambda self: self.marks)
    @rule()
    def restore(self) -> None:
        mark, before = self.marks[-1]
        self.memory.restore(mark)
        assert_unchanged(self.memory, before)

    @rule()
    def save_and_load(self) -> None:
        before = snapshot(self.memory)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.ctx"
            self.memory.save(path)
            self.memory = ContextMemory.load(path, self.model, TOKENIZER, eraser=self.eraser)
        self.memory.chunk_size = 7
        assert_unchanged(self.memory, before)
        self.marks = []

    @rule(data=st.data(), layer=st.integers(0, 3))
    def fail(self, data: st.DataObject, layer: int) -> None:
        def out_of_memory(*_: Any) -> None:
            raise torch.OutOfMemoryError("out of memory")

        before = snapshot(self.memory)
        handle = self.model.get_decoder().layers[layer].register_forward_pre_hook(out_of_memory)
        try:
            for call in (
                lambda: self.memory.append("some text"),
                lambda: self.memory.ask("what", keep=True),
                lambda: self.memory.retract("nobody"),
                lambda: self.memory.append(None),  # type: ignore[arg-type]
            ):
                with pytest.raises((OutOfMemory, ContextMemoryError)):
                    call()
        finally:
            handle.remove()
        assert_unchanged(self.memory, before)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory._state.check()
        if self.memory._state.is_exact and self.memory.next_position == self.memory.seq_length:
            assert_equals_reference(self.memory, "?")

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            for other, before in self.watched:
                assert_unchanged(other, before)
            self.memory.settle()
            assert_equals_reference(self.memory, "?")


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(
    max_examples=40,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=NAMES,
    steps=st.lists(st.tuples(st.text("abcdef", min_size=1, max_size=11), st.integers(0, 9)), min_size=2, max_size=9),
)
def test_gaps_left_by_mask_equal_one_forward_with_an_explicit_mask(name: str, steps: list[tuple[str, int]]) -> None:
    """Every token sees what was live when it was computed, within its window, at its own position: one plain forward."""
    architecture, attention = name.split("-")
    model = tiny_model(architecture, attention)
    memory = ContextMemory(model, tiny_tokenizer(None))
    log: list[int] = list(memory._framing.bare_opening)
    gone_at = [10**6] * len(log)  # first token, by index in the log, that no longer sees this one
    live: list[tuple[Any, range]] = []
    for text, choice in steps:
        segment = memory.append(text)
        live.append((segment, range(len(log), len(log) + segment.n_tokens)))
        log += segment.token_ids
        gone_at += [10**6] * segment.n_tokens
        if choice < len(live) - 1 and len(live) > 1:
            victim, slots = live.pop(choice)
            memory.retract(victim, method="mask")
            for slot in slots:
                gone_at[slot] = len(log)
    log += memory._codec.encode("?")
    gone_at.append(10**6)
    logits = memory.logits("?")

    n = len(log)
    rows, columns = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = (columns <= rows) & (rows < torch.tensor(gone_at)[None, :])
    near = seen & (rows - columns < WINDOW)
    window = getattr(model.config, "sliding_window", None)

    def as_mask(allowed: torch.Tensor) -> torch.Tensor:
        if attention == "sdpa":
            return allowed[None, None]
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None]

    masks: Any = as_mask(near if window else seen)
    if declared := getattr(model.config, "layer_types", None):
        both = {"full_attention": as_mask(seen), "sliding_attention": as_mask(near)}
        masks = {kind: both[kind] for kind in set(declared)}
    with torch.no_grad():
        expected = model(torch.tensor([log]), position_ids=torch.arange(n)[None], attention_mask=masks, use_cache=False)
    assert_equal_logits(model, log, logits, expected.logits[0, -1].float())
