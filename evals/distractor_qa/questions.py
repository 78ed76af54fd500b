"""Questions with documents from JSONL files, a user's own or those of the data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput

__all__ = ["Document", "Question", "questions_of"]


@dataclass(frozen=True)
class Document:
    """A passage; `role` "misinfo" marks one that argues for a wrong answer."""

    title: str
    text: str
    supporting: bool
    role: str = ""

    @property
    def shown(self) -> str:
        """As it stands in a context."""
        return f"{self.title}\n{self.text}\n\n" if self.title else f"{self.text}\n\n"


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, and its documents."""

    id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    wrong_answers: tuple[str, ...] = ()

    @property
    def supporting(self) -> tuple[Document, ...]:
        """The documents that hold the answer."""
        return tuple(document for document in self.documents if document.supporting)


def questions_of(paths: Sequence[str | Path]) -> list[Question]:
    """Questions in the order of the files.

    Records: `{question, answers: [..], documents: [{text, supporting, title?, role?}], id?, dataset?, wrong_answers?}`.

    Raises:
        InvalidInput: a file cannot be read, or a line is no such record; the message names file, line and what is wrong.
    """
    found = []
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    found.append(_question(json.loads(line), path, number))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise InvalidInput(f"{path}, line {number}: {_said(error)}") from None
    return found


def _question(record: Mapping[str, Any], path: Path, number: int) -> Question:
    documents = tuple(
        Document(str(d.get("title") or ""), _text(d["text"]), bool(d["supporting"]), str(d.get("role") or ""))
        for d in record["documents"]
    )
    answers = tuple(_text(answer) for answer in record["answers"])
    if not answers or not documents:
        raise ValueError("answers and documents must not be empty")
    name = record.get("dataset") or path.stem
    wrong = tuple(map(str, record.get("wrong_answers") or ()))
    return Question(str(record.get("id", number)), str(name), _text(record["question"]), answers, documents, wrong)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"a text with words in it is expected, not {value!r}")
    return value


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    return str(error)
