"""Passages to mislead with: retrieved ones, adversarial ones, and the supporting passage with another answer."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contextmem.errors import InvalidInput
from contextmem.evals.distractor_qa.questions import Question
from contextmem.evals.distractor_qa.scoring import contains
from contextmem.meaning import embedder
from contextmem.records import Record, from_jsonl

__all__ = ["Distractor", "Pool", "candidates", "sentences"]

_MOST_WORDS = 110  # about 150 tokens
_N_RETRIEVED = 6


@dataclass(frozen=True)
class Distractor:
    """A passage, how it was made ("retrieved", "adversarial" or "counterfactual"), and the answer it argues for."""

    text: str
    kind: str
    answers: tuple[str, ...] = ()


class Pool:
    """Passages with their meanings, embedded once and kept beside the built cases.

    Raises:
        InvalidInput: a file cannot be read, or a line is no `{"text", "title"?}`.
    """

    def __init__(self, paths: Sequence[str | Path], cache: Path) -> None:
        self._passages = [_passage(*found) for path in paths for found in from_jsonl(path)]
        told = "\n".join(text for _, text in self._passages)
        place = cache / f"pool-{hashlib.sha256(told.encode()).hexdigest()[:12]}.npy"
        if place.exists():
            self._vectors = np.load(place)
        else:
            self._vectors = np.asarray(embedder()([text for _, text in self._passages]))
            cache.mkdir(parents=True, exist_ok=True)
            np.save(place, self._vectors)

    def nearest(self, question: Question, n: int) -> list[str]:
        """The passages nearest to the question that are from other articles and hold no answer."""
        if not self._passages:
            return []
        titles = {document.title.casefold() for document in question.documents if document.title}
        order = np.argsort(-(self._vectors @ embedder()([question.question])[0]))
        found: list[str] = []
        for index in order:
            title, text = self._passages[index]
            if title.casefold() not in titles and not contains(text, question.answers):
                found.append(text)
            if len(found) == n:
                break
        return found


def _passage(place: str, record: Record) -> tuple[str, str]:
    """Title, which may be empty, and text."""
    text = record.get("text")
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"{place}: a passage needs a 'text' with words in it, not {text!r}.")
    return str(record.get("title") or ""), text


def candidates(
    question: Question, others: Sequence[Question], pool: Pool | None, rng: random.Random
) -> list[Distractor]:
    """Distractors for a question, the kinds in turn; none holds an accepted answer."""
    adversarial = [
        Distractor(shortened(d.text), "adversarial", question.wrong_answers)
        for d in question.documents
        if d.role == "misinfo" and not contains(d.text, question.answers)
    ]
    retrieved = [
        Distractor(shortened(text), "retrieved") for text in (pool.nearest(question, _N_RETRIEVED) if pool else ())
    ]
    made = _counterfactuals(question, others, rng)
    for kind in (adversarial, retrieved, made):
        rng.shuffle(kind)
    mixed: list[Distractor] = []
    while adversarial or retrieved or made:
        mixed += [kind.pop() for kind in (adversarial, made, retrieved) if kind]
    return mixed


def _counterfactuals(question: Question, others: Sequence[Question], rng: random.Random) -> list[Distractor]:
    """The part of a supporting passage round the answer, with the answer to another question of the same kind."""
    made = []
    for document in question.supporting:
        answer = next((a for a in question.answers if a in document.text), None)
        if answer is None:
            continue
        wrong = _other_answer(answer, question, others, rng)
        text = _round(document.text, answer)
        if wrong is not None and text is not None:
            text = f"{document.title}\n{text}" if document.title else text
            changed = text.replace(answer, wrong)
            if not contains(changed, question.answers):
                made.append(Distractor(changed, "counterfactual", (wrong,)))
    return made


def _other_answer(answer: str, question: Question, others: Sequence[Question], rng: random.Random) -> str | None:
    known = " ".join(document.text for document in question.documents)
    alike = [
        a
        for other in others
        for a in other.answers[:1]
        if _kind(a) == _kind(answer) and not contains(known, [a]) and len(a) <= 60
    ]
    return rng.choice(sorted(set(alike))) if alike else None


def _kind(answer: str) -> tuple[bool, bool]:
    return any(map(str.isdigit, answer)), answer[:1].isupper()


def _round(text: str, answer: str) -> str | None:
    """Whole sentences of `text` up to the usual length, one of which holds the answer."""
    parts = sentences(text)
    holding = next((i for i, part in enumerate(parts) if answer in part), None)
    if holding is None:
        return None
    start = stop = holding
    while True:
        wider = [(a, b) for a, b in ((start - 1, stop), (start, stop + 1)) if a >= 0 and b < len(parts)]
        fitting = [(a, b) for a, b in wider if len("".join(parts[a : b + 1]).split()) <= _MOST_WORDS]
        if not fitting:
            return "".join(parts[start : stop + 1]).strip()
        start, stop = fitting[0]


def shortened(text: str) -> str:
    """The first sentences of a text, up to the usual length."""
    taken = ""
    for part in sentences(text):
        if taken and len((taken + part).split()) > _MOST_WORDS:
            break
        taken += part
    return " ".join(taken.split()[: 2 * _MOST_WORDS])


def sentences(text: str) -> list[str]:
    """The text in pieces that end where a sentence seems to; joined they are the text."""
    return re.findall(r".+?(?:[.!?][\"')\]]*\s+|\n+|$)", text, re.DOTALL)
