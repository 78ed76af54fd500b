"""The published RULER set in place of tasks of our own wording: the same 13 task names, other contexts and questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from contextmem.errors import InvalidInput
from contextmem.evals.ruler.base import Case

__all__ = ["PublishedSet"]

_FIELDS = ("task", "context", "question", "answer_prefix", "answer", "max_new_tokens")


class PublishedSet:
    """Cases of a copy of the set, in the layout of kvpress (`simonjegou/ruler`; RULER, arXiv 2404.06654).

    A folder or configuration a size, named by its number of tokens, with a test split of records `{task, context, question,
    answer_prefix, answer, max_new_tokens}`. Cases are taken in the order in which they stand. They are scored as theirs: a
    question on documents by any of its answers, everything else by the share that is found.

    Args:
        place: hub id, or a local copy.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._records: dict[int, dict[str, list[Mapping[str, Any]]]] = {}

    def case(self, task: str, size: int, number: int) -> Case | None:
        """Case `number` of a task; None where the set has fewer.

        Raises:
            ImportError: the extra `datasets` is not installed.
            InvalidInput: there is no such copy, it lacks that size or that task, or its records are other ones.
        """
        if size not in self._records:
            self._records[size] = _by_task(self.place, size)
        found = self._records[size].get(task)
        if found is None:
            there = ", ".join(sorted(self._records[size]))
            raise InvalidInput(f"{self.place} has no task {task!r} at {size}; it has {there}.")
        return _case_of(found[number]) if number < len(found) else None


def _by_task(place: str, size: int) -> dict[str, list[Mapping[str, Any]]]:
    from datasets import load_dataset

    try:
        records = load_dataset(place, data_dir=str(size), split="test")
    except Exception as error:  # no network, no such folder, no such split: each library has its own
        raise InvalidInput(f"{place} cannot be read as a dataset with a folder {size}: {error}") from error
    if lacking := [field for field in _FIELDS if field not in records.column_names]:
        raise InvalidInput(f"{place} is not in the layout of the published RULER set: it lacks {', '.join(lacking)}.")
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        found[record["task"]].append(record)
    return dict(found)


def _case_of(record: Mapping[str, Any]) -> Case:
    return Case(
        record["context"],
        record["question"],
        record["answer_prefix"],
        tuple(record["answer"]),
        needs_all=not record["task"].startswith("qa"),
        longest=int(record["max_new_tokens"]),
    )
