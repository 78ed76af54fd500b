"""What a training sample is: one context, prefilled once, and several erasures in it that are each worth a gradient."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contextmem.codec import Codec
from contextmem.framing import Framing

__all__ = ["CHECKS", "SOURCES", "Erasure", "Layout", "Sample", "Source", "register"]

CHECKS = ("none", "clean", "clean_and_misled")


@dataclass(frozen=True)
class Erasure:
    """A span to erase and what the model shall then answer.

    Attributes:
        start, stop: slots of the span in the sample's context.
        question: ids that follow the context, up to the first token of the answer.
        answer: ids the model shall give.
        kind: what is asked, for statistics.
    """

    start: int
    stop: int
    question: tuple[int, ...]
    answer: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Sample:
    """A context and erasures in it.

    Attributes:
        context: token ids, prefilled once for all erasures.
        erasures: trained one after the other on the same prefill.
        check: which erasures are kept: all ("none"), those that the model answers rightly without the span ("clean"), or
            those that it moreover answers wrongly with it ("clean_and_misled").
        clean: context to check all erasures against at once; None drops just the span of each.
    """

    context: tuple[int, ...]
    erasures: tuple[Erasure, ...]
    check: str = "none"
    clean: tuple[int, ...] | None = None


class Layout:
    """Puts texts together as a memory does: each tokenised alone, the template's frames round them."""

    def __init__(self, codec: Codec, framing: Framing) -> None:
        self.codec, self.framing = codec, framing

    def context(self, texts: Sequence[str | tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Ids of a context of `texts` (or ids), and the slots of each."""
        ids, spans = [*self.framing.bare_opening], []
        for text in texts:
            start = len(ids)
            ids += self.codec.encode(text) if isinstance(text, str) else text
            spans.append((start, len(ids)))
        return tuple(ids), spans

    def question(self, text: str, prefix: str = "") -> tuple[int, ...]:
        """Ids of a question, the opened answer, and the answer's given beginning."""
        return (*self.codec.encode(text), *self.framing.answer_open, *self.codec.encode(prefix))


class Source(Protocol):
    """One kind of sample. Adding one is a file with a frozen dataclass and a `register` line."""

    @property
    def name(self) -> str:
        """Name in the registry."""
        ...

    def sample(self, layout: Layout, rng: random.Random) -> Sample:
        """A new sample; the same `rng` state gives the same one."""
        ...


SOURCES: dict[str, Callable[..., Source]] = {}


def register(name: str, make: Callable[..., Source]) -> None:
    """Make a source available by its name."""
    SOURCES[name] = make
