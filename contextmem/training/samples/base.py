"""What a training sample is: one context, prefilled once, and several erasures in it that are each worth a gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contextmem.training.layout import Layout

__all__ = ["CHECKS", "SOURCES", "Erasure", "Sample", "Source", "register"]

CHECKS = ("none", "clean", "clean_and_misled")


@dataclass(frozen=True)
class Erasure:
    """A span to erase and what the model shall then answer.

    Attributes:
        start, stop: slots of the span in the sample's context.
        question: ids that follow the context, up to the first token of the answer.
        answer: ids the model shall give.
        kind: what is asked, for statistics.
        own_words: the teacher may answer in words of its own, where there is one; `answer` is for training without.
    """

    start: int
    stop: int
    question: tuple[int, ...]
    answer: tuple[int, ...]
    kind: str
    own_words: bool = False


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
