"""What a task makes: one context, one question about it, and the answers that count."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from contextmem.training.layout import Layout
from contextmem.training.prose import Prose
from contextmem.training.samples.distractor_qa import Question

__all__ = ["NEEDLE_FAMILY", "TASKS", "Case", "Material", "Task", "case_of", "register"]

_ROOM = 120  # tokens kept for the template, the question and the answer
NEEDLE_FAMILY = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)


@dataclass(frozen=True)
class Case:
    """A question about a context.

    Attributes:
        context: what is compacted; known before the question.
        question, prefix: what is asked, and the answer's given beginning.
        answers: strings that count when they stand in the answer.
        needs_all: the score is the share of `answers` found; otherwise one is enough.
        longest: most tokens of an answer.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    needs_all: bool = True
    longest: int = 32

    def score(self, answer: str) -> float:
        """String match, without regard to case."""
        found = [one.lower() in answer.lower() for one in self.answers]
        return sum(found) / len(found) if self.needs_all else float(any(found))


@dataclass(frozen=True)
class Material:
    """What cases are made of.

    Attributes:
        layout: to count tokens with.
        prose: background text.
        questions: questions with one supporting passage, and those with several; empty where no file was given.
    """

    layout: Layout
    prose: Prose
    questions: tuple[Question, ...] = ()
    hops: tuple[Question, ...] = ()

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.layout.codec.encode(text))


Task = Callable[[Material, random.Random, int], Case | None]
TASKS: dict[str, Task] = {}


def register(name: str, task: Task) -> None:
    """Make a task available by its name. It returns None where its material is missing."""
    TASKS[name] = task


def case_of(material: Material, task: str, size: int, number: int, seed: int) -> Case | None:
    """Case `number` of a task at a size in tokens, question and answer included."""
    return TASKS[task](material, random.Random(f"{task}-{seed}-{size}-{number}"), size - _ROOM)
