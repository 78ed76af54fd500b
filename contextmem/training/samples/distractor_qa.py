"""Distractor QA: a passage that gives a wrong answer stands among those that give the right one, and is erased.

Source: KVEraser (arXiv 2606.17034), distractor QA. The misleading passage is the supporting one with its answer replaced by
the answer to another question, a bare assertion of that answer, or a passage about something near or far. Without a
teacher, kept are questions that the model answers rightly without it and wrongly with it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from contextmem.errors import InvalidInput
from contextmem.records import Record, questions_from
from contextmem.training.layout import Layout
from contextmem.training.samples.base import Erasure, Sample, register

__all__ = ["DistractorQaSource", "Question", "questions_of", "with_one_more"]

_ASK_FOR_WORDS, _PREFIX = "\n\nAnswer with a few words only. {question}", "The answer is:"
_ASK_FREELY = (
    "\n\n{question}",
    "\n\nQuestion: {question}",
    "\n\nAnswer in one sentence. {question}",
    "\n\nQuestion: {question}\nAnswer in one sentence.",
    "\n\nFrom the passages above: {question}",
)
_ASK_IN_GENERAL = ("\n\nWhat are these passages about?", "\n\nSum up the text.", "\n\nWhich names occur in the text?")
_SHARE_FREE, _SHARE_GENERAL, _SHARE_WITHIN = 0.8, 0.2, 0.4
_KINDS = {"edited": 0.4, "asserted": 0.25, "related": 0.2, "unrelated": 0.15}
_ASSERTIONS = (
    "{question} The answer, as has been confirmed many times, is {answer}.",
    "Many people ask: {question} Recent sources all agree that it is {answer}. Older reports that name something else were "
    "withdrawn, and {answer} is what the records now show.",
    "{answer}. This is what experts say when asked: {question} There is no doubt about {answer} among those who know.",
    "Frequently asked\n{question}\nIt is {answer}, according to the official statement.",
)


@dataclass(frozen=True)
class Question:
    """A question, its answer, the passage that holds the answer, and other passages."""

    question: str
    answer: str
    supporting: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class DistractorQaSource:
    """Contexts of a supporting passage, the misleading one, and up to `n_others` more.

    Attributes:
        questions: what is asked.
        n_others: most passages beside the two; few more often than many.
    """

    questions: tuple[Question, ...]
    n_others: int = 5
    name: str = "distractor_qa"

    def sample(self, layout: Layout, rng: random.Random) -> Sample:
        asked = rng.choice(self.questions)
        misleading = self._misleading(asked, rng) + "\n\n"
        n_others = int(rng.random() ** 2 * (min(self.n_others, len(asked.others)) + 1))
        texts = [asked.supporting + "\n\n", *(t + "\n\n" for t in rng.sample(asked.others, n_others))]
        rng.shuffle(texts)
        texts = with_one_more(texts, misleading, rng)
        context, spans = layout.context(texts)
        span = spans[texts.index(misleading)]
        answer = (*layout.codec.encode(f" {asked.answer}"), *layout.end)
        in_words = layout.question(_ASK_FOR_WORDS.format(question=asked.question), _PREFIX)
        erasures = [Erasure(*span, in_words, answer, "qa")]
        if rng.random() < _SHARE_FREE:
            free = layout.question(rng.choice(_ASK_FREELY).format(question=asked.question))
            erasures.append(Erasure(*span, free, answer, "qa", own_words=True))
        if rng.random() < _SHARE_GENERAL:
            general = layout.question(rng.choice(_ASK_IN_GENERAL))
            erasures.append(Erasure(*span, general, answer, "general", own_words=True))
        return Sample(context, tuple(erasures), "clean_and_misled")

    def _misleading(self, asked: Question, rng: random.Random) -> str:
        kind = rng.choices(list(_KINDS), weights=list(_KINDS.values()))[0]
        if kind == "related" and asked.others:
            return rng.choice(asked.others)
        if kind in ("related", "unrelated"):
            return rng.choice([q.supporting for q in self.questions if q is not asked] or [asked.supporting])
        wrong = self._wrong_answer(asked, rng)
        if kind == "asserted":
            return rng.choice(_ASSERTIONS).format(question=asked.question, answer=wrong)
        return asked.supporting.replace(asked.answer, wrong)

    def _wrong_answer(self, asked: Question, rng: random.Random) -> str:
        """The answer to another question, of the same kind (with or without digits) where there is one."""
        others = [q.answer for q in self.questions if q.answer.lower() not in asked.supporting.lower()]
        alike = [answer for answer in others if _has_digit(answer) == _has_digit(asked.answer)]
        return rng.choice(alike or others)


def questions_of(*paths: str | Path, longest: int = 1600) -> tuple[Question, ...]:
    """Questions from JSONL files with records `{question, answers, documents: [{title, text, supporting}]}`.

    Args:
        paths: files or datasets, see `records.questions_from`.
        longest: most characters of a passage; records whose supporting passage is longer are left out.

    Raises:
        InvalidInput: there is no such file, a line is no such record, or no record can be used.
    """
    found = [question for path in paths for question in _usable(questions_from(path), longest)]
    if not found:
        raise InvalidInput(
            f"no question with a supporting passage that holds its answer in {', '.join(map(str, paths))}."
        )
    return tuple(found)


def _usable(records: Iterable[tuple[str, Record]], longest: int) -> Iterable[Question]:
    for place, record in records:
        try:
            documents = [(d["supporting"], f"{d['title']}\n{d['text']}") for d in record["documents"]]
            question, answers = record["question"], record["answers"][:1]
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"{place}: no record of a question with documents: {error!r}") from None
        for answer in answers:
            holding = [t for supporting, t in documents if supporting and answer in t and len(t) <= longest]
            if holding and 1 < len(answer) <= 40:
                others = tuple(t for _, t in documents if answer not in t and len(t) <= longest)
                yield Question(question, answer, holding[0], others)


def with_one_more(texts: list[str], inserted: str, rng: random.Random) -> list[str]:
    """The texts with one more among them: between two of them, or between two sentences of one."""
    place = rng.randrange(len(texts) + 1)
    if place < len(texts) and rng.random() < _SHARE_WITHIN:
        ends = [match.end() for match in re.finditer(r"[.!?][\"')\]]*\s+(?=\S)", texts[place])]
        if ends:
            cut = rng.choice(ends)
            return [*texts[:place], texts[place][:cut], inserted, texts[place][cut:], *texts[place + 1 :]]
    return [*texts[:place], inserted, *texts[place:]]


def _has_digit(text: str) -> bool:
    return any(character.isdigit() for character in text)


register("distractor_qa", DistractorQaSource)
