"""cwe, fwe: the words that occur most often in a long list. After RULER, in words of our own."""

from __future__ import annotations

import random
import string
from collections import Counter

from contextmem.evals.ruler.base import Case, Material, register

__all__ = ["common_words", "frequent_words"]

_N_COMMON, _COMMON_TIMES, _OTHER_TIMES = 10, 30, 3
_N_FREQUENT, _ALPHA = 3, 2.0


def common_words(material: Material, rng: random.Random, n_tokens: int) -> Case:
    """Ten words stand in a numbered list thirty times each, the others three times; fewer where the context is short."""
    vocabulary = sorted({word for document in material.prose.documents for p in document for word in _plain(p)})
    each = material.length("\n100. example")
    n_lines = max(_N_COMMON * 2, n_tokens // each)
    times = min(_COMMON_TIMES, max(4, n_lines // (2 * _N_COMMON)))
    others = max(1, (n_lines - _N_COMMON * times) // _OTHER_TIMES)
    drawn = rng.sample(vocabulary, min(len(vocabulary), _N_COMMON + others))
    common = drawn[:_N_COMMON]
    words = common * times + drawn[_N_COMMON:] * _OTHER_TIMES
    rng.shuffle(words)
    context = "\n".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    question = "\n\nWhich ten words occur most often in the list above?"
    return Case(context, question, "The ten words that occur most often are:", tuple(common), longest=72)


def frequent_words(material: Material, rng: random.Random, n_tokens: int) -> Case:
    """Made-up words by a Zipf law; the three most frequent ones are asked for."""
    words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(40)]
    weights = [1 / (rank + 1) ** _ALPHA for rank in range(len(words))]
    text: list[str] = []
    left = n_tokens
    while left > 0:
        part = rng.choices(words, weights=weights, k=20)
        text += part
        left -= material.length(" ".join(part) + " ")
    top = tuple(word for word, _ in Counter(text).most_common(_N_FREQUENT))
    question = "\n\nWhich three made-up words occur most often in the text above?"
    return Case(" ".join(text), question, "The three words that occur most often are:", top, longest=40)


def _plain(paragraph: str) -> list[str]:
    return [
        word for word in paragraph.split() if word.isascii() and word.isalpha() and word.islower() and 3 < len(word) < 9
    ]


register("cwe", common_words)
register("fwe", frequent_words)
