"""`contextmem eval distractor-qa`: build the cases, measure every method, write the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput
from contextmem.evals.distractor_qa.build import LENGTHS, Case, build, cases_of
from contextmem.evals.distractor_qa.distractors import Pool
from contextmem.evals.distractor_qa.injection import injected_cases, measure_injected
from contextmem.evals.distractor_qa.measure import measure_case
from contextmem.evals.distractor_qa.methods import LEARNED, METHODS, usable
from contextmem.evals.distractor_qa.questions import questions_of
from contextmem.evals.distractor_qa.report import filter_lines, write_report
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject

__all__ = ["run"]


def run(
    folder: Path,
    qa: Sequence[str | Path],
    *,
    cases: Path,
    pool: Sequence[str | Path] = (),
    model_name: str = "smollm2-135m-instruct",
    eraser: str = "auto",
    dtype: str | None = None,
    lengths: Sequence[str] = ("short",),
    methods: Sequence[str] = METHODS,
    limit: int | None = None,
    insertions: int = 3,
    only_build: bool = False,
    n_injected: int = 0,
    transcripts: Path | None = None,
    seed: int = 0,
    command: str = "contextmem eval distractor-qa",
    say: Callable[[str], None] = print,
) -> str:
    """Build what is missing in `cases`, measure what is missing in `folder`/rows.jsonl; returns the table.

    Args:
        folder: where rows, metrics, table and plot go; no text is written there.
        qa: JSONL files or datasets, see `questions_of`.
        cases: folder for the built cases, which hold the texts.
        pool: JSONL files of passages `{title, text}` to retrieve distractors and neighbours from.
        lengths: of `LENGTHS`.
        limit: most questions a file or dataset.
        insertions: most cases a question.
        only_build: build the cases, write nothing to `folder`, and return the counts at every step.
        n_injected: cases of skill files with an injected instruction.
        transcripts: a file to add answers to, with their questions.

    Raises:
        InvalidInput: a file, a length or a method cannot be used.
    """
    if unknown := sorted(set(lengths) - set(LENGTHS)):
        raise InvalidInput(f"length must be one of {', '.join(LENGTHS)}, not {unknown[0]!r}.")
    questions = questions_of(qa, limit)
    subject = Subject.loaded(model_name, dtype=dtype, eraser=eraser)
    new_memory, kind = subject.memory, subject.described["dtype"]
    near = Pool(pool, cases) if pool else None
    wanted = {f"{question.dataset}/{question.id}" for question in questions}
    counts: dict[str, dict[str, int]] = {}
    built: list[Case] = []
    for length in lengths:
        place = cases / f"{kind}.jsonl"
        how: dict[str, Any] = {"length": length, "seed": seed, "insertions": insertions}
        counts[length] = dict(build(new_memory, questions, near, place, **how, say=say))
        built += [case for case in cases_of(place, **how) if f"{case.dataset}/{case.question_id}" in wanted]
    if only_build:
        return "\n".join(filter_lines(counts))
    settings = subject.identity | {"pool": [Path(path).name for path in pool], "seed": seed}
    log = RowLog(folder / "rows.jsonl", settings, subject.variants(*LEARNED))
    methods = usable(tuple(methods), subject.eraser)
    for number, case in enumerate(built):
        answers = measure_case(new_memory, case, methods, log)
        if transcripts is not None and answers:
            _write(transcripts, case, answers)
        say(f"{case.length}: {number + 1} of {len(built)}")
    for number, injected in enumerate(injected_cases(n_injected, seed)):
        measure_injected(new_memory, injected, list(dict.fromkeys(("none", "recompute", *methods))), log)
        say(f"injection: {number + 1} of {n_injected}")
    table: str = write_report(log, counts, folder, command, seed, subject.described)
    return table


def _write(place: Path, case: Case, answers: dict[str, str]) -> None:
    with place.open("a") as file:
        file.write(
            f"## {case.id} ({case.kind})\n{case.question} -> {', '.join(case.answers)}\n\n{case.distractor.strip()}\n\n"
        )
        file.writelines(f"- {method}: {answer}\n" for method, answer in answers.items())
        file.write("\n")
