"""Records of JSONL files and of datasets, each with the place where it stands, so that a wrong one can be named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput

__all__ = ["Record", "from_jsonl", "questions_from", "uniform"]

Record = dict[str, Any]


def from_jsonl(path: str | Path) -> Iterator[tuple[str, Record]]:
    """("FILE, line N", record) for every line that is not empty.

    Raises:
        InvalidInput: the file cannot be read, or a line is no JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):  # not `splitlines`: strings may hold other ends of lines
        if line.strip():
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InvalidInput(f"{place}: {error}") from None
            if not isinstance(record, dict):
                raise InvalidInput(f"{place}: a JSON object is expected, not {line.strip()[:40]!r}.")
            yield place, record


def questions_from(source: str | Path) -> Iterator[tuple[str, Record]]:
    """Places and records `{question, answers, documents}` of a JSONL file, or of a Hugging Face dataset.

    Args:
        source: a file; what is no file is taken for a dataset ("name" or "name:config", its train split) with the fields of
            SQuAD or of HotpotQA, which needs the extra `datasets`; what is no local folder also a network.

    Raises:
        InvalidInput: there is no such file or dataset, or a line is no JSON object.
    """
    if Path(source).is_file():
        yield from from_jsonl(source)
        return
    try:
        from datasets import load_dataset

        name, _, config = str(source).partition(":")
        dataset = load_dataset(name, config or None, split="train")
    except Exception as error:  # the package is missing, or one of its many errors
        raise InvalidInput(f"{source} is no file, and cannot be fetched as a dataset: {error}") from error
    for number, record in enumerate(dataset, 1):
        yield f"{source}, record {number}", uniform(record)


def uniform(record: Record) -> Record:
    """A record of SQuAD or HotpotQA in the form of our files; others as they are."""
    context = record.get("context")
    if isinstance(context, str):
        documents = [{"title": record.get("title", ""), "text": context, "supporting": True}]
        found = {"question": record["question"], "answers": list(record["answers"]["text"]), "documents": documents}
    elif isinstance(context, dict):
        supporting = set(record["supporting_facts"]["title"])
        documents = [
            {"title": title, "text": "".join(sentences), "supporting": title in supporting}
            for title, sentences in zip(context["title"], context["sentences"], strict=True)
        ]
        found = {"question": record["question"], "answers": [record["answer"]], "documents": documents}
    else:
        return record
    return {"id": record["id"], **found} if "id" in record else found
