"""The main job on real input: a misleading passage is answered wrongly, retracted, and answered rightly."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from contextmem.errors import UnsupportedEdit
from contextmem.ledger import Segment
from contextmem.memory import ContextMemory
from contextmem.reports import Report
from contextmem.retraction import COMPARED

__all__ = ["Demonstration", "MethodResult", "run_demo"]

QUESTION = "How many dollars does the printed manual cost?"
FACT = "Note from the editors: the printed manual costs {} dollars."
TRUE, FALSE = "1499", "3999"

_TOPICS = ("with", "try", "class", "import", "lambda", "for", "while", "yield", "assert", "global")
_N_PASSAGES, _FALSE_AT, _TRUE_AT = 20, 5, 14


@dataclass(frozen=True)
class MethodResult:
    """One method on a fork of the same memory.

    Attributes:
        answer: the answer after retracting by this method.
        guarantee: what the method guarantees.
        seconds: time of the retraction.
        tokens_recomputed: tokens that had to be computed again.
        is_right: whether the answer holds the true value and not the false one.
    """

    answer: str
    guarantee: str
    seconds: float
    tokens_recomputed: int
    is_right: bool


@dataclass(frozen=True)
class Demonstration:
    """Everything the demo shows.

    Attributes:
        question, expected: what is asked, and the true value.
        before, after: answers before and after `retract`.
        report: of that retraction (method "auto").
        methods: every method on a fork of the contaminated memory.
        segments_before, segments_after: what stood in the context.
        false_id: the misleading segment.
        n_tokens: tokens in the context before.
        prefill_seconds: time it took to read them.
        rebuild_seconds: time to build the context again from nothing, without the passage.
    """

    question: str
    expected: str
    before: str
    after: str
    report: Report
    methods: dict[str, MethodResult]
    segments_before: list[Segment]
    segments_after: list[Segment]
    false_id: str
    n_tokens: int
    prefill_seconds: float
    rebuild_seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the answer was wrong before and right after."""
        return not _is_true(self.before) and _is_true(self.after)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "question": self.question,
            "expected": self.expected,
            "before": self.before,
            "after": self.after,
            "method": self.report.method,
            "tokens": self.n_tokens,
            "prefill_seconds": self.prefill_seconds,
            "rebuild_seconds": self.rebuild_seconds,
            "methods": {name: vars(result) for name, result in self.methods.items()},
        }


def run_demo(memory: ContextMemory) -> Demonstration:
    """Fill an empty memory with about 1,500 tokens of Python's language reference, one true and one false passage."""
    started = time.perf_counter()
    false_id = ""
    for number, passage in enumerate(_passages()):
        if number == _FALSE_AT:
            false_id = memory.append(FACT.format(FALSE) + "\n\n", key="note-1", source="mailing list").id
        if number == _TRUE_AT:
            memory.append(FACT.format(TRUE) + "\n\n", key="note-2", source="editors")
        memory.append(passage + "\n\n", source="language reference")
    prefill_seconds = time.perf_counter() - started
    segments_before, n_tokens = memory.segments(), memory.seq_length
    before = _answer(memory)
    tried = {name: _tried(memory.fork(), false_id, name) for name in COMPARED}
    methods = {name: result for name, result in tried.items() if result is not None}
    report = memory.retract(false_id, reason="the price is wrong")
    return Demonstration(
        question=QUESTION,
        expected=TRUE,
        before=before,
        after=_answer(memory),
        report=report,
        methods=methods,
        segments_before=segments_before,
        segments_after=memory.segments(),
        false_id=false_id,
        n_tokens=n_tokens,
        prefill_seconds=prefill_seconds,
        rebuild_seconds=_rebuild_seconds(memory),
    )


def _tried(memory: ContextMemory, target: str, method: str) -> MethodResult | None:
    try:
        report = memory.retract(target, method=method)
    except UnsupportedEdit:  # no eraser for this model, or keys that cannot be moved
        return None
    answer = _answer(memory)
    return MethodResult(answer, report.guarantee, report.seconds or 0.0, report.tokens_recomputed, _is_true(answer))


def _answer(memory: ContextMemory) -> str:
    return memory.ask(QUESTION, max_new_tokens=24).text


def _rebuild_seconds(memory: ContextMemory) -> float:
    """Full recompute as users do it today: the whole text again, in one go."""
    fresh = ContextMemory(memory.model, memory.tokenizer)
    text = "".join(segment.text for segment in memory.segments())
    started = time.perf_counter()
    fresh.append(text)
    return time.perf_counter() - started


def _is_true(answer: str) -> bool:
    return TRUE in answer and FALSE not in answer


def _passages() -> list[str]:
    """Paragraphs of prose from the language reference that ships with Python."""
    import pydoc_data.topics

    paragraphs = [
        " ".join(paragraph.split())
        for topic in _TOPICS
        for paragraph in pydoc_data.topics.topics[topic].split("\n\n")
        if not any(mark in paragraph for mark in ("|", "=", "::"))
    ]
    return [paragraph for paragraph in paragraphs if 200 < len(paragraph) < 700][:_N_PASSAGES]
