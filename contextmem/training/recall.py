"""Samples for a restorer: a context, and questions about it that the model answers itself while it has all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from contextmem.training.haystack import haystack
from contextmem.training.layout import Layout
from contextmem.training.needles import TRAIN_FORMS, Form, Needle, new_code, new_key, new_value
from contextmem.training.prose import Prose
from contextmem.training.samples.distractor_qa import Question

__all__ = ["KINDS", "RecallSample", "RecallSource"]

_ANCHOR = 16  # tokens of the text that a recitation is begun with
_RECITED = 24  # tokens of it that are expected
_N_QUESTIONS = 3
KINDS = {"needles": 0.5, "facts": 0.15, "qa": 0.15, "prose": 0.2}
_Asked = tuple[tuple[int, ...], tuple[int, ...]]  # a question, and the answer that may be expected


@dataclass(frozen=True)
class RecallSample:
    """A context to compact, and questions.

    Attributes:
        context: token ids.
        questions: ids that follow the context, up to the first token of the answer.
        drafts: for every question an answer that the model may give, or nothing: reading one is faster than decoding it.
        end: the token that ends an answer.
        share: part of the context's pairs that the compaction keeps, restore slots included.
    """

    context: tuple[int, ...]
    questions: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    end: int
    share: float


@dataclass(frozen=True)
class RecallSource:
    """Needles in prose, needles among needles, documents with questions, and prose to recite.

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
        make: dict[str, Callable[..., tuple[list[str], list[_Asked]]]] = {
            "needles": self._needles,
            "facts": self._facts,
            "qa": self._qa,
            "prose": self._recitation,
        }
        texts, asked = make[kind](layout, rng, rng.randint(*self.sizes))
        context, _ = layout.context(texts)
        questions, drafts = zip(*asked, strict=True)
        return RecallSample(context, questions, drafts, layout.end[0], rng.uniform(*self.shares))

    def with_another_share(self, sample: RecallSample, rng: random.Random) -> RecallSample:
        """The same context and questions, another part kept."""
        return replace(sample, share=rng.uniform(*self.shares))

    def _needles(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[_Asked]]:
        """Several facts of one wording; some keys have several values, all of which are asked for."""
        form, new = rng.choice(TRAIN_FORMS), _kind_of_value(rng)
        keys = [new_key(rng) for _ in range(rng.randint(2, 5))]
        n_values = rng.choice((1, 1, 1, 2, 4))
        needles = [Needle(form, key, new(rng)) for key in keys for _ in range(n_values if key == keys[0] else 1)]
        rng.shuffle(needles)
        texts, _ = haystack(layout, rng, self.prose, [needle.fact + " " for needle in needles], n_tokens)
        about = [[keys[0]], *([key] for key in rng.sample(keys[1:], 1)), rng.sample(keys, rng.randint(2, len(keys)))]
        return texts, [_asked(layout, rng, form, several, needles) for several in about]

    def _facts(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[_Asked]]:
        """Nothing but facts of one wording."""
        form, new = rng.choice(TRAIN_FORMS), _kind_of_value(rng)
        needles: list[Needle] = []
        left = n_tokens
        while left > 0:
            needles.append(Needle(form, f"{new_key(rng)} {rng.randrange(1000)}", new(rng)))
            left -= len(layout.codec.encode(needles[-1].fact + "\n"))
        chosen = rng.sample(needles, min(_N_QUESTIONS, len(needles)))
        asked = [_asked(layout, rng, form, [needle.key], needles) for needle in chosen]
        return [needle.fact + "\n" for needle in needles], asked

    def _qa(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[_Asked]]:
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
        return texts, [(layout.question(rng.choice(forms).format(question=one.question)), ()) for one in chosen]

    def _recitation(self, layout: Layout, rng: random.Random, n_tokens: int) -> tuple[list[str], list[_Asked]]:
        """Prose, to be recited from several places on."""
        texts, _ = haystack(layout, rng, self.prose, [], n_tokens)
        ids = [token for text in texts for token in layout.codec.encode(text)]
        places = [rng.randrange(max(1, len(ids) - 3 * _ANCHOR)) for _ in range(_N_QUESTIONS)]
        ask = layout.question("\n\nThe same text again, from the middle:")
        begun = [place + _ANCHOR for place in places]
        return texts, [
            ((*ask, *ids[place:at]), tuple(ids[at : at + _RECITED])) for place, at in zip(places, begun, strict=True)
        ]


def _kind_of_value(rng: random.Random) -> Callable[[random.Random], str]:
    """Numbers of so many digits, or codes of so many groups."""
    if rng.random() < 0.7:
        return partial(new_value, digits=rng.choice((3, 4, 5, 6, 7)))
    return partial(new_code, groups=rng.choice((2, 3, 4)))


def _asked(layout: Layout, rng: random.Random, form: Form, keys: Sequence[str], needles: Sequence[Needle]) -> _Asked:
    """A question about every value of `keys`."""
    one = Needle(form, " and the ".join(keys), "")
    values = [needle.value for needle in needles if needle.key in keys]
    if rng.random() < 0.7:
        draft = " " + " and ".join(values) + "."
        return layout.question("\n\n" + one.question, one.prefix), (*layout.codec.encode(draft), *layout.end)
    draft = f"{one.prefix} {' and '.join(values)}."
    return layout.question("\n\n" + one.question), (*layout.codec.encode(draft), *layout.end)
