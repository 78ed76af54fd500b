"""Span-neighbour pre-training: foreign chunks inserted into a document, which must then be recited across the gap.

Source: KVEraser (arXiv 2606.17034), stage 1. Asked as recitation: the answer begins with the tokens before a place in the
document and goes on with those after it. With the chunk in the context a model recites the chunk; with it erased, the
document. Small models that cannot find a neighbour on instruction can recite.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from contextmem.training.layout import Layout
from contextmem.training.prose import Prose
from contextmem.training.samples.base import Erasure, Sample, register

__all__ = ["ANCHORS", "SpanNeighbourSource"]

ANCHORS = ("before", "after", "elsewhere")
_ANCHOR, _TARGET = 32, 8  # tokens given, tokens asked
_WEIGHTS = (0.65, 0.1, 0.25)
_ASK = "\n\nThe same document again:"


@dataclass(frozen=True)
class SpanNeighbourSource:
    """Documents of `shortest` to `longest` tokens of `prose` with chunks inserted.

    Attributes:
        prose: background text, of documents and of chunks.
        shortest, longest: tokens of a document.
        n_chunks: chunks a document; each is erased alone, the others stay.
        chunk: (fewest, most) tokens of a chunk.
        every_anchor: ask at each kind of anchor for every chunk, for evaluation, instead of one drawn by weight.
    """

    prose: Prose
    shortest: int = 320
    longest: int = 900
    n_chunks: int = 3
    chunk: tuple[int, int] = (10, 300)
    every_anchor: bool = False
    name: str = "span_neighbour"

    def sample(self, layout: Layout, rng: random.Random) -> Sample:
        n_tokens = rng.randrange(self.shortest, self.longest)
        document = _tokens(layout, self.prose, rng, n_tokens)
        cuts = _places(rng, len(document), self.n_chunks)
        chunks = [_tokens(layout, self.prose, rng, _length(rng, *self.chunk)) for _ in cuts]
        texts: list[tuple[int, ...]] = []
        at = 0
        for cut, chunk in zip(cuts, chunks, strict=True):
            texts += [document[at:cut], chunk]
            at = cut
        context, spans = layout.context([*texts, document[at:]])
        clean, _ = layout.context([document])
        erasures = [
            _erasure(layout, rng, document, cuts, cut, spans[2 * number + 1], anchor)
            for number, cut in enumerate(cuts)
            for anchor in (ANCHORS if self.every_anchor else rng.choices(ANCHORS, weights=_WEIGHTS))
        ]
        return Sample(context, tuple(erasures), "clean", clean)


def _erasure(
    layout: Layout,
    rng: random.Random,
    document: tuple[int, ...],
    cuts: list[int],
    cut: int,
    span: tuple[int, int],
    anchor: str,
) -> Erasure:
    if anchor == "before":
        at = cut
    elif anchor == "after":
        at = cut + _ANCHOR
    else:
        others = [c for c in cuts if c != cut]
        free = [
            at
            for at in range(_ANCHOR, len(document) - _TARGET)
            if all(at + _TARGET <= c or c <= at - _ANCHOR for c in (cut, *others))
        ]
        at = rng.choice(free) if free else cut
    question = (*layout.question(_ASK), *document[at - _ANCHOR : at])
    return Erasure(*span, question, document[at : at + _TARGET], anchor)


def _places(rng: random.Random, n_tokens: int, n_chunks: int) -> list[int]:
    """Places for chunks, far enough from each other and from the ends for anchors and targets."""
    room = _ANCHOR + _ANCHOR + _TARGET
    n_chunks = max(1, min(n_chunks, n_tokens // room - 1))
    slack = n_tokens - room * (n_chunks + 1)
    offsets = sorted(rng.randrange(slack + 1) for _ in range(n_chunks))
    return [offset + room * (number + 1) for number, offset in enumerate(offsets)]


def _tokens(layout: Layout, prose: Prose, rng: random.Random, n_tokens: int) -> tuple[int, ...]:
    ids: list[int] = []
    for paragraph in prose.stretch(rng):
        ids += layout.codec.encode(paragraph + " ")
        if len(ids) >= n_tokens:
            return tuple(ids[:n_tokens])
    return tuple(ids)


def _length(rng: random.Random, fewest: int, most: int) -> int:
    """Between the two, small ones as often as large ones."""
    return int(fewest * (most / fewest) ** rng.random())


register("span_neighbour", SpanNeighbourSource)
