"""What stands where: segments, their spans and states. Pure bookkeeping over one token log; holds no tensors.

The token log is authoritative: ids are written once, when a text is appended or generated, and never derived from
text again. A `Ledger` is a value. Every change makes a new one, so an operation that fails leaves the old one as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from typing import Any

from contextmem.errors import InconsistentState

__all__ = ["KINDS", "STATES", "Ledger", "Segment"]

KINDS = ("system", "document", "tool_call", "tool_result", "user", "assistant", "restore", "frame")
STATES = ("live", "evicted", "erased", "retracted")


@dataclass(frozen=True)
class Segment:
    """One addressable span of the context.

    Attributes:
        id: unique across memories; never reused.
        kind: one of `KINDS`. A `frame` is template text (role headers, turn ends) and belongs to `owner`.
        start, stop: half-open range of cache slots, valid for the state it was read from.
        text: the text exactly as given; empty once erased or retracted.
        token_ids: ids that were prefilled; empty once erased or retracted (`n_tokens` still counts the slots).
        key: the caller's logical name; several versions may share one.
        source: where the text came from, to retract by.
        state: one of `STATES`.
        parents: ids of the segments this one was derived from.
        pinned: never evicted by a budget.
        metadata: the caller's JSON-compatible data, read-only.
        created_at: when it was appended, UTC.
        owner: for frames, the id of the segment they go with; None for the frames that open the dialogue.
        truncated: tokens cut from the end of the text by `overflow="truncate"`.
    """

    id: str
    kind: str
    start: int
    stop: int
    text: str = ""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    key: str | None = None
    source: str | None = None
    state: str = "live"
    parents: tuple[str, ...] = ()
    pinned: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    owner: str | None = None
    truncated: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of slots the segment occupies (occupied, once retracted)."""
        return self.stop - self.start

    def emptied(self, state: str) -> Segment:
        """The record that stays when the content goes: no text, no ids, no metadata."""
        return replace(self, state=state, text="", token_ids=(), metadata={})


@dataclass(frozen=True)
class Ledger:
    """Segments in slot order, and the records of those that are gone.

    Attributes:
        spans: everything that occupies slots, frames included; contiguous from slot 0.
        gone: retracted segments, emptied, in the order they went.
    """

    spans: tuple[Segment, ...] = ()
    gone: tuple[Segment, ...] = ()

    @property
    def n_slots(self) -> int:
        """Slots occupied: the length the cache must have in every layer."""
        return self.spans[-1].stop if self.spans else 0

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the live text in order; erased spans contribute none."""
        return tuple(chain.from_iterable(span.token_ids for span in self.spans))

    @cached_property
    def by_id(self) -> dict[str, Segment]:
        """Every segment ever seen by this ledger, gone ones included."""
        return {span.id: span for span in chain(self.gone, self.spans)}

    def content(self) -> tuple[Segment, ...]:
        """Resident segments without frames."""
        return tuple(span for span in self.spans if span.kind != "frame")

    def select(self, segments: Iterable[Segment], **filters: Any) -> tuple[Segment, ...]:
        """Those of `segments` that match every filter that is not None. `metadata` matches when it is a subset."""
        wanted = {name: value for name, value in filters.items() if value is not None}
        metadata = wanted.pop("metadata", {})
        return tuple(
            segment
            for segment in segments
            if all(getattr(segment, name) == value for name, value in wanted.items())
            and all(segment.metadata.get(name) == value for name, value in metadata.items())
        )

    def frames_of(self, owners: Iterable[str | None]) -> tuple[Segment, ...]:
        """Frames that belong to one of `owners`."""
        wanted = set(owners)
        return tuple(span for span in self.spans if span.kind == "frame" and span.owner in wanted)

    def going_with(self, targets: Sequence[Segment]) -> tuple[Segment, ...]:
        """What goes when `targets` go: their frames, erased spans that would be last, and at the end the opening frames."""
        if not targets:
            return ()
        owners: list[str | None] = [segment.id for segment in targets]
        if all(s.id in owners or s.state == "erased" for s in self.content()):
            owners.append(None)
        frames = self.frames_of(owners)
        going = {span.id for span in (*targets, *frames)}
        end = max((s.stop for s in self.spans if s.id not in going and s.state != "erased"), default=0)
        return (*frames, *(s for s in self.spans if s.state == "erased" and s.start >= end and s.id not in going))

    def added(self, new: Sequence[Segment]) -> Ledger:
        """With `new` laid out after the last slot."""
        return Ledger(_laid_out((*self.spans, *new)), self.gone)

    def removed(self, ids: Iterable[str]) -> Ledger:
        """Without the spans named by `ids`; a record of each one that is not a frame is kept."""
        names = set(ids)
        kept = tuple(span for span in self.spans if span.id not in names)
        went = tuple(s.emptied("retracted") for s in self.spans if s.id in names and s.kind != "frame")
        return Ledger(_laid_out(kept), (*self.gone, *went))

    def erased(self, ids: Iterable[str], most: int | None = None) -> Ledger:
        """With the named spans emptied but still holding slots, at most `most` each (their KV was replaced, not removed)."""
        names = set(ids)
        spans = [s.emptied("erased") if s.id in names else s for s in self.spans]
        if most is not None:
            spans = [replace(s, stop=min(s.stop, s.start + most)) if s.id in names else s for s in spans]
        return Ledger(_laid_out(spans), self.gone)

    def swapped(self, old: str, new: Segment) -> Ledger:
        """With `new` in the place of the segment `old`, whose frames it takes over; the record of the old one is kept.

        Results of a call that is swapped become results of the new one.
        """
        is_call = self.by_id[old].kind == "tool_call"
        moved = (replace(span, owner=new.id) if span.owner == old else span for span in self.spans)
        if is_call:
            moved = (
                replace(s, parents=tuple(new.id if p == old else p for p in s.parents))
                if s.kind == "tool_result"
                else s
                for s in moved
            )
        spans = tuple(new if span.id == old else span for span in moved)
        return Ledger(_laid_out(spans), (*self.gone, self.by_id[old].emptied("retracted")))

    def without_erased(self) -> Ledger:
        """Without the slots of erased spans: they hold no ids to compute again."""
        return self.removed(span.id for span in self.spans if span.state == "erased")

    def check(self) -> None:
        """Raise `InconsistentState` unless spans are contiguous, ordered and agree with their ids."""
        at = 0
        for span in self.spans:
            if span.start != at or span.stop < span.start:
                raise InconsistentState(f"span {span.id} starts at {span.start}, not {at}")
            if span.state != "erased" and len(span.token_ids) != span.n_tokens:
                raise InconsistentState(f"span {span.id} has {len(span.token_ids)} ids for {span.n_tokens} slots")
            at = span.stop


def slot_ranges(segments: Iterable[Segment]) -> tuple[tuple[int, int], ...]:
    """The slots of `segments` as sorted, merged half-open ranges; empty spans are skipped."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((s.start, s.stop) for s in segments if s.n_tokens):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def complement(ranges: Sequence[tuple[int, int]], n_slots: int) -> tuple[tuple[int, int], ...]:
    """The slots outside `ranges` (sorted, merged), as ranges."""
    edges = [0, *chain.from_iterable(ranges), n_slots]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def _laid_out(spans: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same spans, numbered from slot 0 without gaps."""
    placed, at = [], 0
    for span in spans:
        placed.append(span if span.start == at else replace(span, start=at, stop=at + span.n_tokens))
        at += span.n_tokens
    return tuple(placed)
