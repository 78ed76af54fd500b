"""Questions with documents, a user's own or those of the data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput
from contextmem.records import Record, questions_from

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


def questions_of(sources: Sequence[str | Path], limit: int | None = None) -> list[Question]:
    """Questions in the order of the sources, at most `limit` of each.

    Records: `{question, answers: [..], documents: [{text, supporting, title?, role?}], id?, dataset?, wrong_answers?}`, in
    JSONL files or a dataset of the Hugging Face hub (see `records.questions_from`).

    Raises:
        InvalidInput: a file cannot be read, a line is no such record, or two of a data set have one id; the message names
            file, line and what is wrong.
    """
    found: dict[tuple[str, str], Question] = {}
    for source in sources:
        for number, (place, record) in enumerate(islice(questions_from(source), limit), 1):
            try:
                question = _question(record, Path(source).stem, number)
                if (question.dataset, question.id) in found:
                    raise ValueError(f"a second question with the id {question.id!r} in {question.dataset!r}")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InvalidInput(f"{place}: {_said(error)}") from None
            found[question.dataset, question.id] = question
    return list(found.values())


def _question(record: Record, default_dataset: str, number: int) -> Question:
    documents = tuple(map(_document, record["documents"]))
    answers = _texts(record["answers"])
    if not answers or not documents:
        raise ValueError("answers and documents must not be empty")
    name, identity = record.get("dataset") or default_dataset, record.get("id")
    wrong = _texts(record.get("wrong_answers") or [])
    question = _text(record["question"])
    return Question(str(number if identity is None else identity), str(name), question, answers, documents, wrong)


def _document(record: Record) -> Document:
    if not isinstance(record["supporting"], bool):
        raise TypeError(f"'supporting' must be true or false, not {record['supporting']!r}")
    title, role = str(record.get("title") or ""), str(record.get("role") or "")
    return Document(title, _text(record["text"]), record["supporting"], role)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"a list of texts is expected, not {values!r}")
    return tuple(map(_text, values))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"a text with words in it is expected, not {value!r}")
    return value


def _said(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error.args[0]!r}"
    return str(error)
