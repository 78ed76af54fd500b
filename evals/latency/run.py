"""`contextmem eval latency`: speed as ratios against plain transformers, and the cost of every retraction method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from contextmem.evals.latency.measure import (
    measure_ask,
    measure_budget,
    measure_decode,
    measure_prefill,
    measure_retract,
)
from contextmem.evals.latency.report import write_report
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject

__all__ = ["run"]


def run(
    folder: Path,
    *,
    model_name: str = "smollm2-135m-instruct",
    prefill: Sequence[int] = (1024, 4096),
    decode: Sequence[int] = (1024, 4096, 8000),
    suffixes: Sequence[int] = (256, 1024, 2048, 4096, 7168),
    budgets: Sequence[int] = (4096, 8000),
    repeats: int = 5,
    n_new: int = 32,
    seed: int = 0,
    command: str = "contextmem eval latency",
    say: object = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics, table and plot go; a run resumes from the rows it finds there.
        prefill, decode, suffixes, budgets: token counts.
        repeats: repetitions of prefill, decode and the cheap retractions.
        n_new: tokens generated a repetition.
    """
    torch.manual_seed(seed)
    subject = Subject.loaded(model_name)
    model, tokenizer = subject.model, subject.tokenizer
    log = RowLog(folder / "rows.jsonl")
    note = say if callable(say) else print
    measure_prefill(model, tokenizer, prefill, repeats, log, note)
    measure_decode(model, tokenizer, decode, repeats, n_new, log, note)
    measure_retract(model, tokenizer, suffixes, min(repeats, 3), log, note)
    measure_budget(model, tokenizer, budgets, repeats, n_new, log, note)
    measure_ask(model, tokenizer, 1024, 50, log, note)
    table: str = write_report(log, folder, command, seed, subject.described)
    return table
