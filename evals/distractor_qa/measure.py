"""One case by every method: the answer, its cost, and how far the model is from never having seen the passage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem import ContextMemory
from contextmem.evals.distractor_qa.build import LONGEST_ANSWER, QUESTION, Case, filled
from contextmem.evals.distractor_qa.methods import method_of
from contextmem.evals.distractor_qa.scoring import contains, exact_match, f1
from contextmem.evals.forks import unshared_fork
from contextmem.evals.rows import RowLog

__all__ = ["measure_case"]

_N_COMPARED = 8  # first tokens of the answer whose distributions are compared


@dataclass(frozen=True)
class _Answered:
    """An edited memory, its greedy answer, and seconds to edit, to read the question and to generate."""

    memory: ContextMemory
    edit_s: float
    ids: list[int]
    query_s: float
    decode_s: float


def measure_case(
    new_memory: Callable[[], ContextMemory], case: Case, methods: Sequence[str], log: RowLog
) -> dict[str, str]:
    """Write a row for every method that `log` lacks; returns the answers, for transcripts.

    `outcome` of a wrong answer: "distractor" (an answer that the passage argues for, or the contaminated answer word for
    word), "overlap" (shares words with an accepted answer), or "other".
    """
    missing = [method for method in methods if not log.has(case.id, method)]
    if not missing:
        return {}
    memory = new_memory()
    inserted = filled(memory, case)
    prompt = _prompt(memory, case)

    def by(method: str) -> _Answered:
        edited, edit_s = unshared_fork(memory), 0.0
        if method != "none":
            edit_s = edited.retract(inserted.id, method=method_of(method)).seconds or 0.0
        return _Answered(edited, edit_s, *_answer(edited, prompt))

    known = {"recompute": by("recompute"), "none": by("none")}
    compared = known["recompute"].ids[:_N_COMPARED]
    reference = _rows(known["recompute"].memory, prompt, compared)
    contaminated = _text(memory, known["none"].ids)
    answers: dict[str, str] = {}
    for method in missing:
        one = known.get(method) or by(method)
        text = answers[method] = _text(memory, one.ids)
        told = _rows(one.memory, prompt, compared)
        right = contains(text, case.answers)
        log.add(
            case.id,
            method,
            dataset=case.dataset,
            question=f"{case.dataset}/{case.question_id}",
            kind=case.kind,
            length=case.length,
            score=int(right),
            em=int(exact_match(text, case.answers)),
            f1=round(f1(text, case.answers), 4),
            outcome="right" if right else _failure(text, case, contaminated),
            kl=round(float((reference.exp() * (reference - told)).sum(-1).mean()), 5),
            seconds=round(one.edit_s + one.query_s + one.decode_s, 4),
            edit_s=round(one.edit_s, 4),
            query_s=round(one.query_s, 4),
            decode_s=round(one.decode_s, 4),
            decoded=len(one.ids),
            tokens=memory.seq_length,
            span=inserted.n_tokens,
            suffix=memory.seq_length - inserted.stop,
            threads=torch.get_num_threads(),
        )
    return answers


def _failure(text: str, case: Case, contaminated: str) -> str:
    if contains(text, case.wrong) or text.strip() == contaminated.strip():
        return "distractor"
    return "overlap" if f1(text, case.answers) > 0 else "other"


def _prompt(memory: ContextMemory, case: Case) -> tuple[int, ...]:
    asked = memory._codec.encode(QUESTION.format(question=case.question))
    return (*asked, *memory._framing.answer_open)


def _answer(memory: ContextMemory, prompt: Sequence[int]) -> tuple[list[int], float, float]:
    """Greedy ids, and seconds to read the question and to generate."""
    backbone, cache = memory.backbone, memory.past_key_values
    started = time.perf_counter()
    logits = backbone.prefill(prompt, cache)
    query_s = time.perf_counter() - started
    started = time.perf_counter()
    ids: list[int] = []
    while len(ids) < LONGEST_ANSWER:
        token = int(logits.argmax())
        if token in memory._end_ids:
            break
        ids.append(token)
        logits = backbone.forward([token], cache)
    cache.release()
    return ids, query_s, time.perf_counter() - started


def _rows(memory: ContextMemory, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Log-probabilities, (len(ids) + 1, vocab), at every token of an answer."""
    cache = memory.past_key_values
    logits = memory.backbone.forward([*prompt, *ids], cache, all_logits=True)[-len(ids) - 1 :]
    cache.release()
    return logits.double().log_softmax(-1)


def _text(memory: ContextMemory, ids: Sequence[int]) -> str:
    return str(memory._codec.decode(ids, skip_special_tokens=True))
