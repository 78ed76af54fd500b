"""`contextmem eval ruler`: answers from a compacted memory, by evictor and budget, with and without restore slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from contextmem import ContextMemory, RestoreKV
from contextmem.errors import InvalidInput
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler import TASKS, Case, Material, case_of
from contextmem.evals.ruler.controls import CONTROLS
from contextmem.evals.ruler.measure import Configuration, measure_case
from contextmem.evals.ruler.published_set import PublishedSet
from contextmem.evals.ruler.report import write_report
from contextmem.evals.subject import Subject
from contextmem.eviction import EVICTORS, evictor_named
from contextmem.training.prose import HELD_OUT, prose_of
from contextmem.training.samples.distractor_qa import Question, questions_of
from contextmem.weights import restorer_for

__all__ = ["RATIOS", "run"]

RATIOS: dict[str, tuple[float, ...]] = {
    name: (0.05, 0.1, 0.2, 0.3, 0.5) if name in ("kvzip", "kvzip_plus") else (0.1, 0.3) for name in EVICTORS
}


def run(
    folder: Path,
    *,
    model_name: str = "smollm2-135m-instruct",
    restorers: Mapping[str, str] | None = None,
    dtype: str | None = None,
    text: Sequence[str | Path] = (),
    qa: Sequence[str | Path] = (),
    hops: Sequence[str | Path] = (),
    tasks: Sequence[str] = (),
    evictors: Sequence[str] = (),
    ratios: Sequence[float] = (),
    controls: Sequence[str] = (),
    published: str = "",
    samples: Mapping[int, int] | None = None,
    seed: int = 0,
    command: str = "contextmem eval ruler",
    say: Callable[[str], None] = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics, table and plot go; a run resumes from the rows it finds there and adds to them.
        restorers: folder or hub id by evictor, or by "evictor/name" for a further one, whose rows are named so; default:
            the shipped ones.
        text: files or folders of background text; none: the held-out half of the topics of Python's language reference.
        qa, hops: JSONL files of questions with one supporting document, and with several; without them qa_1 and qa_2 are
            left out.
        tasks, evictors: names; default: all.
        ratios: parts of the context that are kept; default: `RATIOS`.
        controls: names of what else is put in the place of an evictor's restore slots, see `CONTROLS`.
        published: hub id or local copy of the published set, which is measured in the place of tasks of our own.
        samples: cases a task by size in tokens; default: 25 at 1,024 and 2,048, of the published set at 4,096.

    Raises:
        ImportError: `published` needs the extra `datasets`.
        InvalidInput: a restorer is given for no evictor that is measured, names collide, there are controls of nothing, or
            `published` cannot be read or is given beside texts.
    """
    if published and (text or qa or hops):
        raise InvalidInput("the published set has texts and questions of its own: give no text, qa or hops beside it.")
    subject = Subject.loaded(model_name, dtype=dtype)
    empty, layout = subject.memory(), subject.layout

    def new_memory() -> ContextMemory:
        made: ContextMemory = subject.memory(eraser=None, restorer=None)
        return made

    if published:
        cases: Callable[[str, int, int], Case | None] = PublishedSet(published).case
    else:
        prose = prose_of(*text, part=None if text else HELD_OUT)
        cases = partial(case_of, Material(layout, prose, _questions(qa), _questions(hops)), seed=seed)
    configurations = _configurations(empty, evictors or tuple(EVICTORS), ratios, restorers, controls)
    settings = subject.identity | {
        "text": [published] if published else [Path(path).name for path in text],
        "qa": [Path(path).name for path in (*qa, *hops)],
        "seed": seed,
    }
    learned = {one.label: one.restorer.fingerprint for one in configurations if one.restorer is not None}
    log = RowLog(folder / "rows.jsonl", settings, learned)
    if log.n_dropped:
        say(f"{log.n_dropped} rows of another restorer were dropped and are measured again")
    for size, n in (samples or ({4096: 25} if published else {1024: 25, 2048: 25})).items():
        for number in range(n):
            for name in tasks or TASKS:
                if (case := cases(name, size, number)) is not None:
                    measure_case(new_memory, name, number, size, case, configurations, log)
            say(f"{size}: {number + 1} of {n}")
    table: str = write_report(log, folder, command, seed, subject.described)
    return table


def _questions(paths: Sequence[str | Path]) -> tuple[Question, ...]:
    return questions_of(*paths) if paths else ()


def _at_any_share(restorer: RestoreKV) -> RestoreKV:
    """The same one, also used where a memory would leave its slots out: that is what is measured."""
    measured = restorer.first(restorer.n)
    measured.config = replace(restorer.config, largest_share=1.0)
    return measured


def _configurations(
    memory: ContextMemory,
    evictors: Sequence[str],
    ratios: Sequence[float],
    restorers: Mapping[str, str] | None,
    controls: Sequence[str],
) -> list[Configuration]:
    """Every evictor at every ratio, without restore slots, with those of its restorers, and with their controls."""
    if unknown := sorted({label.partition("/")[0] for label in restorers or {}} - set(evictors)):
        raise InvalidInput(f"a restorer is given for {unknown[0]!r}, which is not among the evictors measured.")
    named = {label: _at_any_share(RestoreKV.from_pretrained(place)) for label, place in (restorers or {}).items()}
    found: list[Configuration] = []
    for name in evictors:
        evictor = evictor_named(name)
        if restorers is None and (shipped := restorer_for(memory.backbone, name)) is not None:
            named[name] = _at_any_share(shipped)
        own = {label: one for label, one in named.items() if label.partition("/")[0] == name}
        for ratio in ratios or RATIOS.get(name, (0.1, 0.3)):
            found.append(Configuration(evictor, ratio))
            for label, one in own.items():
                kind = "restore" if one.config.evictor in ("", name) else "transfer"
                found.append(Configuration(evictor, ratio, one, label.partition("/")[2] or kind))
            if name in own:
                found += [Configuration(evictor, ratio, own[name], c, CONTROLS[c]) for c in controls]
    labels = [one.label for one in found]
    for one in found:
        if labels.count(one.label) > 1 or set("@+") & set(one.what):
            raise InvalidInput(
                f"a restorer cannot be named {one.what!r}: names must differ, and hold neither '@' nor '+'."
            )
    if controls and not any(one.control for one in found):
        raise InvalidInput("controls stand in the place of a restorer's slots, but there is no restorer.")
    return found
