"""Erasing NIAH: two needles with one key and different values; either is erased and the other must be answered.

Source: KVEraser (arXiv 2606.17034), erasing needle in a haystack. A third needle with another key, asked after erasing one
of the two, teaches what must not change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from contextmem.training.haystack import cut, haystack
from contextmem.training.layout import Layout
from contextmem.training.needles import RULER, TRAIN_FORMS, Needle, new_key, new_value
from contextmem.training.prose import Prose
from contextmem.training.samples.base import Erasure, Sample, register

__all__ = ["NiahSource"]

_SHARE_ALONE, _SHARE_OTHER_KEY, _SHARE_WITH_PREFIX, _SHARE_LED_IN = 0.5, 0.3, 0.5, 0.3
_PLAIN, _DRESSED = " {value}.", (' "{value}".', " **{value}**.", "\n\n{prefix} {value}.")
_SHARE_PLAIN = 0.5  # of answers to a given beginning: models also put values into quotes or bold, or begin once more
_LEAD_INS = (
    "Note: ",
    "Update: ",
    "Correction: ",
    "From the minutes: ",
    "Someone wrote: ",
    "It is said: ",
    "Reminder: ",
)


@dataclass(frozen=True)
class NiahSource:
    """Contexts of `sizes` tokens with needles in paragraphs of `prose`.

    Attributes:
        prose: background text.
        sizes: (tokens, weight) pairs; a size is drawn between 0.6 and 1 times one of them.
        longest_span: most tokens of an erased span, which is a needle alone or in a passage of its own.
        share_lone: share of contexts with one needle, whose erasure leaves no answer; for the target "teacher".
        share_ruler: share of contexts in RULER's wording, with values of five digits and more; the others take any wording.
    """

    prose: Prose
    sizes: tuple[tuple[int, float], ...] = ((512, 0.5), (1024, 0.3), (2048, 0.12), (4096, 0.08))
    longest_span: int = 300
    share_lone: float = 0.0
    share_ruler: float = 0.0
    name: str = "niah"

    def sample(self, layout: Layout, rng: random.Random) -> Sample:
        size = rng.choices([s for s, _ in self.sizes], weights=[w for _, w in self.sizes])[0]
        n_tokens = int(rng.uniform(0.6, 1.0) * size)
        form, digits, key = rng.choice(TRAIN_FORMS), rng.choice((2, 3, 4, 5, 5, 5, 6, 7)), new_key(rng)
        if rng.random() < self.share_ruler:
            form, digits = RULER, rng.choice((5, 5, 5, 6, 7))
        first, second = (Needle(form, key, new_value(rng, digits)) for _ in range(2))
        if second.value == first.value:
            second = Needle(form, key, str(int(first.value) + 1))
        if rng.random() < self.share_lone:
            return self._lone(layout, rng, first, second, n_tokens)
        needles = [first, second]
        if rng.random() < _SHARE_OTHER_KEY:
            needles.append(Needle(rng.choice(TRAIN_FORMS), new_key(rng), new_value(rng, digits)))
            rng.shuffle(needles)
        texts, places = haystack(layout, rng, self.prose, [self._passage(layout, rng, n) for n in needles], n_tokens)
        context, spans = layout.context(texts)
        slots = {needle: spans[place] for needle, place in zip(needles, places, strict=True)}
        asked = [(first, second), (second, first)] + [(rng.choice((first, second)), n) for n in needles if n.key != key]
        with_prefix = rng.random() < _SHARE_WITH_PREFIX
        return Sample(context, tuple(_erasure(layout, rng, *slots[gone], kept, with_prefix) for gone, kept in asked))

    def _lone(self, layout: Layout, rng: random.Random, gone: Needle, never: Needle, n_tokens: int) -> Sample:
        """Nothing is left to answer: whatever the model says about a fact it never saw, told along a value of nobody's."""
        texts, (place,) = haystack(layout, rng, self.prose, [self._passage(layout, rng, gone)], n_tokens)
        context, spans = layout.context(texts)
        erasures = tuple(_erasure(layout, rng, *spans[place], never, with_prefix) for with_prefix in (True, False))
        return Sample(context, erasures)

    def _passage(self, layout: Layout, rng: random.Random, needle: Needle) -> str:
        """The needle alone, or between sentences of its own that are erased with it."""
        fact = (rng.choice(_LEAD_INS) if rng.random() < _SHARE_LED_IN else "") + needle.fact
        if rng.random() < _SHARE_ALONE:
            return fact + rng.choice((" ", "\n\n"))
        budget = rng.uniform(0, self.longest_span - len(layout.codec.encode(fact)) - 4)
        before = rng.random()
        return (
            " ".join(
                filter(
                    None,
                    (
                        cut(layout, self.prose.paragraph(rng), int(budget * before)),
                        fact,
                        cut(layout, self.prose.paragraph(rng), int(budget * (1 - before))),
                        "",
                    ),
                )
            )
            + " "
        )


def _erasure(layout: Layout, rng: random.Random, start: int, stop: int, kept: Needle, with_prefix: bool) -> Erasure:
    question = layout.question("\n\n" + kept.question, kept.prefix if with_prefix else "")
    form = _PLAIN if rng.random() < _SHARE_PLAIN else rng.choice(_DRESSED)
    answer = form.format(value=kept.value, prefix=kept.prefix) if with_prefix else kept.fact
    ids = (*layout.codec.encode(answer), *layout.end)
    return Erasure(start, stop, question, ids, "needle", own_words=not with_prefix)


register("niah", NiahSource)
