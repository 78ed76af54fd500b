"""The event log: what happened to the memory, without a word of its text."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime

from contextmem.ledger import Segment

__all__ = ["Event", "SegmentRecord", "record_of"]

logger = logging.getLogger("contextmem")


@dataclass(frozen=True)
class SegmentRecord:
    """What an event keeps of a segment: id, length in tokens, the SHA-256 of its text, and the caller's labels."""

    id: str
    n_tokens: int
    sha256: str
    key: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Event:
    """One entry of the append-only log.

    Attributes:
        step: number of the event, from 1.
        operation: "append", "ask", "retract", "replace", "settle", "restore", "load", "conflict", "duplicate",
            "share", "evict", "rehydrate".
        segments: the segments concerned.
        method, guarantee, reason: of a retraction.
        tokens_computed: tokens that had to be computed.
        at: when, UTC.
    """

    step: int
    operation: str
    segments: tuple[SegmentRecord, ...] = ()
    method: str | None = None
    guarantee: str | None = None
    reason: str | None = None
    tokens_computed: int = 0
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


def record_of(segment: Segment) -> SegmentRecord:
    """The trace of a segment that may stay when its text must not."""
    digest = hashlib.sha256(segment.text.encode("utf-8", "surrogatepass")).hexdigest()
    return SegmentRecord(segment.id, segment.n_tokens, digest, segment.key, segment.source)
