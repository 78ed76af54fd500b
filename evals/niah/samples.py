"""Held-out contexts with two needles, and with a later sentence that was derived from one of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from contextmem import ContextMemory, Segment
from contextmem.training.haystack import haystack
from contextmem.training.layout import Layout
from contextmem.training.needles import EVALUATED_FORMS, Needle, new_key, new_value
from contextmem.training.prose import Prose

__all__ = ["NEEDLES", "Haystack", "derived_haystack", "filled", "haystack_of"]

NEEDLES = ("first", "second")
_ROOM = 200  # tokens kept for template, question, answer, an instruction, and a last paragraph that is a little longer


@dataclass(frozen=True)
class Haystack:
    """One context, to be asked after erasing either needle.

    Attributes:
        id: names the sample in the rows.
        size: tokens, question and answer included.
        texts: segments in order.
        needles: the two facts, in order.
        places: index in `texts` of each.
        derived: index in `texts` of the sentence derived from the first needle, or None.
    """

    id: str
    size: int
    texts: tuple[str, ...]
    needles: tuple[Needle, Needle]
    places: tuple[int, int]
    derived: int | None = None

    @property
    def question(self) -> str:
        """What is asked, the same for both needles."""
        return "\n\n" + self.needles[0].question

    @property
    def prefix(self) -> str:
        """The answer's given beginning; part of the question."""
        return self.needles[0].prefix

    def prompt(self, memory: ContextMemory) -> tuple[int, ...]:
        """Ids from the question to the answer's given beginning."""
        return Layout(memory._codec, memory._framing).question(self.question, self.prefix)


def haystack_of(layout: Layout, prose: Prose, size: int, number: int, seed: int, digits: int = 5) -> Haystack:
    """Sample `number` of that size; the two wordings alternate."""
    rng = random.Random(f"niah-{seed}-{size}-{number}")
    first, second = _needles(rng, number, digits)
    texts, places = haystack(layout, rng, prose, [f"{first.fact} ", f"{second.fact} "], size - _ROOM)
    return Haystack(f"{size}-{number}", size, tuple(texts), (first, second), (places[0], places[1]))


def derived_haystack(layout: Layout, prose: Prose, size: int, number: int, seed: int, digits: int = 5) -> Haystack:
    """Either needle may come first; a sentence derived from the one to erase stands a paragraph or more after both."""
    rng = random.Random(f"derived-{seed}-{size}-{number}")
    first, second = _needles(rng, number, digits)
    order = [first, second]
    rng.shuffle(order)
    inserted = [f"{order[0].fact} ", f"{order[1].fact} ", f"{first.derived} "]
    texts, places = haystack(layout, rng, prose, inserted, size - _ROOM)
    index = {order[0]: places[0], order[1]: places[1]}
    return Haystack(
        f"derived-{size}-{number}", size, tuple(texts), (first, second), (index[first], index[second]), places[2]
    )


def filled(memory: ContextMemory, sample: Haystack) -> Sequence[Segment]:
    """Append a sample's texts; the derived sentence names its needle as parent."""
    segments: list[Segment] = []
    for index, text in enumerate(sample.texts):
        parents = (segments[sample.places[0]],) if index == sample.derived else ()
        segments.append(memory.append(text, parents=parents))
    return memory.segments()


def _needles(rng: random.Random, number: int, digits: int) -> tuple[Needle, Needle]:
    form, key = EVALUATED_FORMS[number % len(EVALUATED_FORMS)], new_key(rng)
    values = [new_value(rng, digits) for _ in range(2)]
    if values[0] == values[1]:
        values[1] = str(int(values[0]) ^ 1)
    return Needle(form, key, values[0]), Needle(form, key, values[1])
