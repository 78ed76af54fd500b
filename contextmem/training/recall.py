"""Samples for a restorer: a context, and questions about it that the model answers itself while it has all of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from contextmem.training.haystack import haystack
from contextmem.training.layout import Layout
from contextmem.training.needles import TRAIN_FORMS, Needle, new_key, new_value
from contextmem.training.prose import Prose
from contextmem.training.samples.distractor_qa import Question

__all__ = ["KINDS", "RecallSample", "RecallSource"]

_ANCHOR = 16  # tokens of the text that a recitation is begun with
_N_QUESTIONS = 3
KINDS = {"needles": 0.6, "qa": 0.2, "prose": 0.2}


@dataclass(frozen=True)
class RecallSample:
    """A context to compact, and questions.

    Attributes:
        context: token ids.
        questions: ids that follow the context, up to the first token of the answer.
        end: the token that ends an answer.
        share: part of the context's pairs that the compaction keeps, restore slots included.
    """

    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    end: int
    share: float


@dataclass(frozen=True)
class RecallSource:
    """Needles in prose, documents with questions, and prose to recite.

    Attributes:
        prose: background text.
        qa: questions with documents; none leaves them out.
        sizes: (fewest, most) tokens of a context.
        shares: (least, most) part that is kept; drawn uniformly.
    """

    prose: Prose
    qa: tuple[Question, ...] = ()
    sizes: tuple[int, int] = (320, 1024)
    shares: tuple[float, float] = (0.025, 0.25)
    name: str = "recall"

    def sample(self, layout: Layout, rng: random.Random) -> RecallSample:
        kinds = {kind: weight for kind, weight in KINDS.items() if kind != "qa" or self.qa}
        kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
        make: dict[str, Callable[..., tuple[list[str], list[tuple[int, ...]]]]] = {
            "needles": self._needles,
            "qa": self._qa,
            "prose": self._recitation,
        }
        n_tokens = rng.randint(*self.sizes)
        texts, questions = make[kind](layout, rng, n_tokens)
        context, _ = layout.context(texts)
        return RecallSample(context, tuple(questions), layout.end[0], rng.uniform(*self.shares))

    def _needles(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[tuple[int, ...]]]:
        """Several facts of one wording; some keys have several values, all of which are asked for."""
        form, digits = rng.choice(TRAIN_FORMS), rng.choice((3, 4, 5, 6, 7))
        keys = [new_key(rng) for _ in range(rng.randint(2, 5))]
        needles = [Needle(form, key, new_value(rng, digits)) for key in keys for _ in range(rng.choice((1, 1, 1, 2)))]
        rng.shuffle(needles)
        texts, _ = haystack(layout, rng, self.prose, [needle.fact + " " for needle in needles], n_tokens)
        asked = rng.sample(needles, min(_N_QUESTIONS, len(needles)))
        prefixes = [needle.prefix if rng.random() < 0.7 else "" for needle in asked]
        return texts, [
            layout.question("\n\n" + needle.question, prefix) for needle, prefix in zip(asked, prefixes, strict=True)
        ]

    def _qa(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[tuple[int, ...]]]:
        """Documents of one question, filled up with those of others that are asked as well."""
        texts: list[str] = []
        asked: list[Question] = []
        left = n_tokens
        while left > 0 and (len(asked) < 1 or left > 150):
            one = rng.choice(self.qa)
            asked.append(one)
            passages = [one.supporting, *rng.sample(one.others, min(1, len(one.others)))]
            texts += [passage + "\n\n" for passage in passages]
            left -= sum(len(layout.codec.encode(passage)) for passage in passages)
        rng.shuffle(texts)
        forms = ("\n\n{question}", "\n\nQuestion: {question}", "\n\nAnswer with a few words only. {question}")
        chosen = rng.sample(asked, min(_N_QUESTIONS, len(asked)))
        return texts, [layout.question(rng.choice(forms).format(question=one.question)) for one in chosen]

    def _recitation(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[tuple[int, ...]]]:
        """Prose, to be recited from several places on."""
        texts, _ = haystack(layout, rng, self.prose, [], n_tokens)
        ids = [token for text in texts for token in layout.codec.encode(text)]
        places = [rng.randrange(max(1, len(ids) - 3 * _ANCHOR)) for _ in range(_N_QUESTIONS)]
        ask = layout.question("\n\nThe same text again, from the middle:")
        return texts, [(*ask, *ids[place : place + _ANCHOR]) for place in places]
