"""Answers against accepted ones, by words: "no" is not in "know"."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

__all__ = ["contains", "exact_match", "f1", "is_yes_or_no", "words"]

_ARTICLES = {"a", "an", "the"}


def words(text: str) -> list[str]:
    """Lower-case words and numbers without accents, articles, punctuation, and commas between digits."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(character for character in plain if not unicodedata.combining(character))
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", plain)
    return [word for word in re.findall(r"\w+", plain) if word not in _ARTICLES]


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether the words of one of `answers` stand in `text`, one after the other."""
    said = words(text)
    return any(
        said[i : i + len(wanted)] == wanted
        for wanted in map(words, answers)
        if wanted
        for i in range(len(said) - len(wanted) + 1)
    )


def exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether `text` is one of `answers`."""
    return any(words(text) == words(answer) for answer in answers)


def f1(text: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, for the best of `answers`."""
    return max((_f1(words(text), words(answer)) for answer in answers), default=0.0)


def is_yes_or_no(answers: Sequence[str]) -> bool:
    """Whether the question can be answered by chance."""
    return any(answer.casefold().strip(". ") in ("yes", "no", "true", "false") for answer in answers)


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0
