"""Iterating over an answer while it is generated."""

from __future__ import annotations

from collections.abc import Generator
from typing import Self

from contextmem.errors import InvalidInput
from contextmem.reports import Answer

__all__ = ["AnswerStream"]


class AnswerStream:
    """Iterator over the pieces of an answer; `answer` holds the whole once it has ended."""

    def __init__(self, pieces: Generator[str, None, Answer]) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise StopIteration from None

    @property
    def answer(self) -> Answer:
        """The finished answer.

        Raises:
            InvalidInput: the stream has not ended.
        """
        if self._answer is None:
            raise InvalidInput("the answer is not finished: iterate the stream to its end first.")
        return self._answer

    def close(self) -> None:
        """Abandon the answer; the memory is as it was."""
        self._pieces.close()
