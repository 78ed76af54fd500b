"""`contextmem eval niah`: erasing NIAH by every method, derived probes, and latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from contextmem import ContextMemory
from contextmem.backbone import Backbone
from contextmem.errors import InvalidInput
from contextmem.evals.niah.latency import measure_latency
from contextmem.evals.niah.measure import METHODS, measure_derived, measure_sample
from contextmem.evals.niah.report import write_report
from contextmem.evals.niah.samples import derived_haystack, haystack_of
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject
from contextmem.training.prose import HELD_OUT, prose_of
from contextmem.weights import restorer_for

__all__ = ["SAMPLES", "run"]

SAMPLES = {512: 60, 1024: 60, 2048: 40, 4096: 20, 8192: 10}
DERIVED_SIZE = 1024


def run(
    folder: Path,
    *,
    model_name: str = "smollm2-135m-instruct",
    eraser: str = "auto",
    dtype: str | None = None,
    text: Sequence[str | Path] = (),
    samples: Mapping[int, int] | None = None,
    methods: Sequence[str] = METHODS,
    n_derived: int = 20,
    kept: float | None = None,
    latency_sizes: Sequence[int] = (),
    repeats: int = 5,
    seed: int = 0,
    command: str = "contextmem eval niah",
    say: Callable[[str], None] = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics, table and plot go; a run resumes from the rows it finds there and adds to them.
        eraser: "auto", a folder or a hub id.
        text: files or folders of background text; none: the held-out half of the topics of Python's language reference.
        samples: contexts by size in tokens; each gives a row for either needle.
        methods: of `METHODS`.
        n_derived: contexts with a sentence derived from the erased needle.
        kept: part of every context that a budget leaves, with a full tier on the host, which the edit works on; None: all.
            Derived sentences are measured without a budget alone, and so is latency.
        latency_sizes: sizes to measure latency at, on a machine that does nothing else.
        repeats: repetitions of the latency measurement.

    Raises:
        InvalidInput: latency is asked for within a budget.
    """
    if kept is not None and latency_sizes:
        raise InvalidInput("latency is measured without a budget: leave out either --kept or --latency-at.")
    torch.manual_seed(seed)
    subject = Subject.loaded(model_name, dtype=dtype, eraser=eraser)
    layout = subject.layout

    def new_memory() -> ContextMemory:
        made: ContextMemory = subject.memory(full_tier="cpu" if kept is not None else None)
        return made

    prose = prose_of(*text, part=None if text else HELD_OUT)
    settings = subject.identity | {"text": [Path(path).name for path in text], "seed": seed, "kept": kept}
    if kept is not None:
        restorer = restorer_for(Backbone.of(subject.model), "kvzip")
        settings["restorer"] = restorer.fingerprint if restorer is not None else None
        n_derived = 0
    learned = subject.variants("kveraser", "kveraser+cascade")
    log = RowLog(folder / "rows.jsonl", settings, learned, timed=("latency",))
    if log.n_dropped:
        say(f"{log.n_dropped} rows of another eraser were dropped and are measured again")
    if subject.eraser is None:
        methods = [method for method in methods if method != "kveraser"]
    for size, n in (SAMPLES if samples is None else samples).items():
        for number in range(n):
            measure_sample(new_memory, haystack_of(layout, prose, size, number, seed), methods, log, kept=kept)
            say(f"{size}: {number + 1} of {n}")
    for number in range(n_derived):
        measure_derived(new_memory, derived_haystack(layout, prose, DERIVED_SIZE, number, seed), log)
        say(f"derived: {number + 1} of {n_derived}")
    measure_latency(new_memory, layout, prose, latency_sizes, repeats, seed, log, say)
    table: str = write_report(log, folder, command, seed, subject.described, kept)
    return table
