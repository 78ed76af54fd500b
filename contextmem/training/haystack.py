"""Texts to insert, between paragraphs of background text."""

from __future__ import annotations

import random

from contextmem.training.layout import Layout
from contextmem.training.prose import Prose

__all__ = ["cut", "haystack"]


def haystack(
    layout: Layout, rng: random.Random, prose: Prose, inserted: list[str], n_tokens: int
) -> tuple[list[str], list[int]]:
    """Paragraphs of about `n_tokens` with `inserted` between them, in that order; and the index of each.

    The last paragraph comes after the last text inserted. Two of these have a paragraph between them if there are enough.
    """
    paragraphs: list[str] = []
    left = n_tokens - sum(len(layout.codec.encode(text)) for text in inserted)
    for paragraph in prose.stretch(rng):
        length = len(layout.codec.encode(paragraph))
        if left <= 0 and len(paragraphs) >= 2:
            break
        paragraphs.append((paragraph if length <= max(left, 40) else cut(layout, paragraph, max(left, 40))) + " ")
        left -= length
    free = range(len(paragraphs))  # a paragraph comes last
    are_enough = len(free) >= len(inserted)
    cuts = sorted(rng.sample(free, len(inserted)) if are_enough else rng.choices(free, k=len(inserted)))
    texts: list[str] = []
    places: list[int] = []
    at = 0
    for at_paragraph, text in zip(cuts, inserted, strict=True):
        texts += ["".join(paragraphs[at:at_paragraph])] if at_paragraph > at else []
        places.append(len(texts))
        texts.append(text)
        at = at_paragraph
    if at < len(paragraphs):
        texts.append("".join(paragraphs[at:]))
    return texts, places


def cut(layout: Layout, text: str, n_tokens: int) -> str:
    """The beginning of a text, at a word's end."""
    return layout.codec.longest_prefix(text, layout.codec.encode(text), n_tokens)[0].rpartition(" ")[0]
