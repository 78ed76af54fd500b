"""What operations return: answers, retraction reports, statistics."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.ledger import Segment

__all__ = ["Answer", "Report", "SegmentStats", "Stats"]


@dataclass(frozen=True)
class Answer:
    """A generated answer.

    Attributes:
        text: what was generated; a given `prefix` is not repeated in it.
        token_ids: generated ids, without the end-of-turn token.
        finish_reason: "stop", "length" or "context_length".
        segment: the kept assistant segment, or None for a transient answer.
        prefix: the answer's given beginning.
        tokens_reused: cached tokens the answer was conditioned on without computing them.
        tokens_prefilled: tokens of the question and its frames that were computed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    segment: Segment | None = None
    prefix: str = ""
    tokens_reused: int = 0
    tokens_prefilled: int = 0

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Report:
    """What an edit did, or would do.

    Attributes:
        method: method that ran; "none" if there was nothing to do.
        requested: method that was asked for.
        why: why this method, in a line.
        guarantee: "exact" (the memory is as if the text had never been there), "approximate" (later segments keep
            traces of it) or "none".
        segments: ids that were removed.
        tokens_removed: tokens of those segments and of the template frames that went with them.
        tokens_recomputed: tokens that were computed again.
        tokens_reused: tokens whose KV was kept.
        seconds: wall time; for a dry run an estimate from the speed of earlier calls, None if there were none.
        dependents: ids of live segments that were derived from the removed ones and are still there.
        forced_by: id of the first segment that made later ones be computed again.
        dry_run: whether this is only a plan.
        segment: the new segment, after `replace`.
    """

    method: str
    requested: str
    why: str
    guarantee: str
    segments: tuple[str, ...] = ()
    tokens_removed: int = 0
    tokens_recomputed: int = 0
    tokens_reused: int = 0
    seconds: float | None = 0.0
    dependents: tuple[str, ...] = ()
    forced_by: str | None = None
    dry_run: bool = False
    segment: Segment | None = None


@dataclass(frozen=True)
class SegmentStats:
    """Share of one segment in the cache; `held` is the part of its key-value pairs that was not evicted."""

    id: str
    kind: str
    key: str | None
    state: str
    n_tokens: int
    nbytes: int
    held: float = 1.0


@dataclass(frozen=True)
class Stats:
    """What fills the context.

    Attributes:
        segments: every span, frames included; tokens and bytes add up to the totals.
        n_tokens: slots in use.
        nbytes_used: bytes of those slots.
        nbytes_held: bytes of capacity held, free room included.
        next_position, context_length: where the next token goes and how far the model reads.
        exact_tokens: leading tokens that are exactly as in a rebuilt context.
        tokens_held: key-value pairs held, over layers times heads; less than `n_tokens` after a compaction.
        restore_slots: those of `tokens_held` that stand for evicted text; 0 where there are none, or they would not help.
        budget: most that `tokens_held` may be, or None.
    """

    segments: tuple[SegmentStats, ...]
    n_tokens: int
    nbytes_used: int
    nbytes_held: int
    next_position: int
    context_length: int
    exact_tokens: int
    tokens_held: float = 0.0
    restore_slots: int = 0
    budget: int | None = None
