"""Background text for samples: paragraphs from Python's own reference, or from any folder or file."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contextmem.errors import InvalidInput
from contextmem.records import from_jsonl

__all__ = ["HELD_OUT", "TRAIN", "Prose", "prose_of"]

TRAIN, HELD_OUT = "train", "held-out"
TRAINING_TOPICS = "python-reference"
_SHORTEST, _LONGEST = 80, 2000  # characters of a paragraph


@dataclass(frozen=True)
class Prose:
    """Documents as lists of paragraphs.

    Attributes:
        documents: paragraphs, a tuple a document.
    """

    documents: tuple[tuple[str, ...], ...]

    def paragraph(self, rng: random.Random) -> str:
        """Any paragraph; longer documents are drawn more often."""
        document = rng.choices(self.documents, weights=[len(d) for d in self.documents])[0]
        return rng.choice(document)

    def stretch(self, rng: random.Random) -> Iterator[str]:
        """Paragraphs in order from a random place on, into the next documents when one ends."""
        number = rng.choices(range(len(self.documents)), weights=[len(d) for d in self.documents])[0]
        start = rng.randrange(len(self.documents[number]))
        while True:
            yield from self.documents[number][start:]
            number, start = (number + 1) % len(self.documents), 0


def prose_of(*paths: str | Path, part: str | None = None) -> Prose:
    """Text by paragraphs.

    Args:
        paths: files or folders with .txt, .md or .jsonl files (records with a `text` or `document`); none: the topics of
            Python's language reference, which come with every CPython; "python-reference" among others: the topics of the
            training half.
        part: "train" or "held-out": a fixed half of the documents by the hash of their text; None takes all. Paragraphs
            that stand in both halves are left out of the held-out one.

    Raises:
        InvalidInput: nothing was found.
    """
    texts = list(_topics()) if not paths else [text for path in paths for text in _texts(path)]
    train = {p for text in texts if _half(text) == TRAIN for p in _paragraphs(text)} if part == HELD_OUT else set()
    chosen = [_paragraphs(text) for text in texts if part in (None, _half(text))]
    documents = tuple(filter(None, (tuple(p for p in paragraphs if p not in train) for paragraphs in chosen)))
    if not documents:
        raise InvalidInput(f"no text was found in {', '.join(map(str, paths)) or 'pydoc_data.topics'}.")
    return Prose(documents)


def _texts(path: str | Path) -> Iterator[str]:
    return (t for t in _topics() if _half(t) == TRAIN) if str(path) == TRAINING_TOPICS else _read(Path(path))


def _topics() -> Iterator[str]:
    import pydoc_data.topics

    yield from pydoc_data.topics.topics.values()


def _read(path: Path) -> Iterator[str]:
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".jsonl")):
            yield from _read(file)
    elif not path.is_file():
        raise InvalidInput(f"there is no file or folder {path}.")
    elif path.suffix == ".jsonl":
        for _, record in from_jsonl(path):
            yield str(record.get("text") or record.get("document") or "")
    else:
        yield path.read_text(errors="replace")


def _half(text: str) -> str:
    return HELD_OUT if hashlib.sha256(text.encode()).digest()[0] % 2 else TRAIN


def _paragraphs(text: str) -> tuple[str, ...]:
    """Plain prose only: no tables, grammar rules or code, which a needle would stick out of."""
    flat = (" ".join(part.split()) for part in text.split("\n\n"))
    return tuple(
        p for p in flat if _SHORTEST < len(p) < _LONGEST and not any(mark in p for mark in ("|", "::=", ">>>"))
    )
