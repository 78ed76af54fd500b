"""Cases: questions answered rightly from their documents, and wrongly with a passage inserted at a random place."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contextmem import ContextMemory
from contextmem.errors import InvalidInput
from contextmem.evals.distractor_qa.distractors import Distractor, Pool, candidates, sentences
from contextmem.evals.distractor_qa.questions import Question
from contextmem.evals.distractor_qa.scoring import contains, is_yes_or_no

__all__ = ["LENGTHS", "QUESTION", "Case", "answered", "build", "cases_of", "filled"]

QUESTION = "Question: {question}\nAnswer in one sentence."
LONGEST_ANSWER = 40
LENGTHS = {"short": 0, "middle": 2000, "long": 3500}  # tokens that a context is filled up to
_TRIES = 6  # distractors a question


@dataclass(frozen=True)
class Case:
    """One insertion.

    Attributes:
        id: of the question, with the number of the insertion.
        before, distractor, after: the context's texts.
        kind: how the distractor was made.
        wrong: answers it argues for.
        length: of `LENGTHS`.
    """

    id: str
    question_id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    before: str
    distractor: str
    after: str
    kind: str
    wrong: tuple[str, ...]
    length: str


def filled(memory: ContextMemory, case: Case) -> Any:
    """Append a case's texts; returns the distractor's segment."""
    if case.before:
        memory.append(case.before)
    inserted = memory.append(case.distractor)
    memory.append(case.after)
    return inserted


def answered(memory: ContextMemory, question: str) -> str:
    """The answer in a sentence."""
    return memory.ask(QUESTION.format(question=question), max_new_tokens=LONGEST_ANSWER).text


def build(
    new_memory: Callable[[], ContextMemory],
    questions: Sequence[Question],
    pool: Pool | None,
    place: Path,
    *,
    length: str = "short",
    insertions: int = 3,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Counter[str]:
    """Add what `place`, a JSONL file, lacks; a line a question, with its cases and the step that it came to.

    Args:
        insertions: most cases a question. Questions built with fewer are built again, with the same cases first.

    Returns:
        Questions by the step at which they fell out ("yes or no", "no support", "too long", "not answered", "never
        misled") or "kept", by data set: keys are "data set: step".
    """
    if length not in LENGTHS:
        raise InvalidInput(f"length must be one of {', '.join(LENGTHS)}, not {length!r}.")
    place.parent.mkdir(parents=True, exist_ok=True)
    lines = _lines(place, length, seed) if place.exists() else {}
    for number, question in enumerate(questions):
        if not _is_built(lines.get((question.dataset, question.id)), insertions):
            rng = random.Random(f"distractor-{seed}-{length}-{question.id}")
            step, cases = _cases(new_memory, question, questions, pool, length, insertions, rng)
            line: dict[str, Any] = {
                "question_id": question.id,
                "dataset": question.dataset,
                "length": length,
                "seed": seed,
                "insertions": insertions,
                "step": step,
            }
            line["cases"] = [asdict(case) for case in cases]
            lines[question.dataset, question.id] = line
            with place.open("a") as file:
                file.write(json.dumps(line) + "\n")
            say(f"{number + 1} of {len(questions)}: {step}, {len(cases)} cases")
    return Counter(f"{one.dataset}: {lines[one.dataset, one.id]['step']}" for one in questions)


def cases_of(place: Path, length: str, seed: int, insertions: int = 3) -> list[Case]:
    """The cases of one length that `build` has written: the first of every question, then the second, and so on."""
    if not place.exists():
        raise InvalidInput(f"there are no cases in {place}: build them first (--build).")
    built = [line["cases"][:insertions] for line in _lines(place, length, seed).values()]
    return [_case(cases[n]) for n in range(insertions) for cases in built if n < len(cases)]


def _lines(place: Path, length: str, seed: int) -> dict[tuple[str, str], dict[str, Any]]:
    """What was built last for every question, by its data set and id."""
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    wanted = [line for line in lines if line["length"] == length and line["seed"] == seed]
    return {(line["dataset"], line["question_id"]): line for line in wanted}


def _is_built(line: dict[str, Any] | None, insertions: int) -> bool:
    return line is not None and (line["insertions"] >= insertions or len(line["cases"]) < line["insertions"])


def _case(values: dict[str, Any]) -> Case:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Case(**given)


def _cases(
    new_memory: Callable[[], ContextMemory],
    question: Question,
    questions: Sequence[Question],
    pool: Pool | None,
    length: str,
    insertions: int,
    rng: random.Random,
) -> tuple[str, list[Case]]:
    if is_yes_or_no(question.answers):
        return "yes or no", []
    if not question.supporting:
        return "no support", []
    texts = _texts(new_memory(), question, pool, LENGTHS[length], rng)
    memory = new_memory()
    if sum(memory.count_tokens(text) for text in texts) > memory.context_length - 400:
        return "too long", []
    for text in texts:
        memory.append(text)
    if not contains(answered(memory, question.question), question.answers):
        return "not answered", []
    kept: list[Case] = []
    others = [other for other in questions if other.id != question.id]
    for distractor in candidates(question, others, pool, rng)[:_TRIES]:
        case = _inserted(question, texts, distractor, len(kept), length, rng)
        contaminated = new_memory()
        filled(contaminated, case)
        if not contains(answered(contaminated, question.question), question.answers):
            kept.append(case)
        if len(kept) == insertions:
            break
    return ("kept" if kept else "never misled"), kept


def _texts(counter: ContextMemory, question: Question, pool: Pool | None, fill: int, rng: random.Random) -> list[str]:
    """Supporting documents in a random order; filled up with the question's others, and neighbouring passages."""
    texts = [document.shown for document in question.supporting]
    left = fill - sum(map(counter.count_tokens, texts))
    others = [d.shown for d in question.documents if not d.supporting and d.role != "misinfo"]
    rng.shuffle(others)
    near = [f"{text}\n\n" for text in pool.nearest(question, 60)[6:]] if pool is not None and fill else []
    for text in [*others, *near]:
        if left <= 0 or contains(text, question.answers):
            continue
        texts.append(text)
        left -= counter.count_tokens(text)
    rng.shuffle(texts)
    return texts


def _inserted(
    question: Question, texts: Sequence[str], distractor: Distractor, number: int, length: str, rng: random.Random
) -> Case:
    """The distractor between two sentences, not after the last."""
    parts = sentences("".join(texts))
    place = rng.randrange(len(parts))
    return Case(
        id=f"{question.dataset}/{question.id}/{length}/{number}",
        question_id=question.id,
        dataset=question.dataset,
        question=question.question,
        answers=question.answers,
        before="".join(parts[:place]),
        distractor=distractor.text + "\n\n",
        after="".join(parts[place:]),
        kind=distractor.kind,
        wrong=distractor.answers,
        length=length,
    )
