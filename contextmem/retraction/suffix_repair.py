"""suffix_repair: drop the span, re-rotate what stood after it, and compute a share of that again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from contextmem.errors import InvalidInput
from contextmem.ledger import Segment
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.retraction.delete_and_shift import approximation, is_worn, recompute_plan, shifted
from contextmem.retraction.recompute import Recompute
from contextmem.state import State

__all__ = ["SuffixRepair"]


@dataclass(frozen=True)
class SuffixRepair:
    """Recompute a share of the suffix: its beginning, right after the span, or its end, nearest the question.

    The rest of the suffix is shifted as in delete_and_shift and keeps its traces of the span.

    Attributes:
        where: "erase" (right after the span) or "query" (at the end).
        share: part of the suffix that is recomputed, 0 < share <= 1; 0.15 as in the KVEraser paper's baseline.
    """

    where: str = "erase"
    share: float = 0.15

    def __post_init__(self) -> None:
        if self.where not in ("erase", "query") or not 0 < self.share <= 1:
            raise InvalidInput(f"suffix_repair takes where='erase' or 'query' and 0 < share <= 1, not {self}.")

    @property
    def name(self) -> str:
        return "suffix_repair" if self.where == "erase" else "suffix_repair_query"

    def plan(self, edit: Edit) -> Plan:
        if is_worn(edit):
            return recompute_plan(edit)
        if not edit.is_tail:
            edit.backbone.angles()
        repaired = self._n_repaired(edit)
        return Plan(self.name, repaired, edit.n_kept - repaired, approximation(edit))

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        if is_worn(edit):
            return Recompute().apply(edit)
        ledger = edit.state.ledger.removed(edit.ids)
        cache = shifted(edit)
        first = edit.start if self.where == "erase" else cache.n_slots - self._n_repaired(edit)
        last = first + self._n_repaired(edit)
        ids = _ids_between(ledger.spans, first, last)
        repaired = cache.view(first)
        repaired.next_position = int(cache.positions[first]) if first < cache.n_slots else cache.next_position
        if ids:
            edit.backbone.prefill(ids, repaired, chunk=edit.chunk, step=edit.step)
        result = repaired.joined(cache, last) if last < cache.n_slots else repaired
        return State(ledger, result, min(edit.state.exact_slots, edit.start))

    def _n_repaired(self, edit: Edit) -> int:
        """The share of the suffix, rounded up; erased spans hold no ids and end the repair."""
        wanted = ceil(self.share * edit.n_suffix)
        erased = [s for s in edit.state.ledger.spans if s.state == "erased" and s.start >= edit.start]
        if not erased:
            return wanted
        if self.where == "erase":
            before = sum(b - a for a, b in edit.ranges if b <= erased[0].start)
            return min(wanted, erased[0].start - edit.start - before)
        after = sum(b - a for a, b in edit.ranges if a >= erased[-1].stop)
        return min(wanted, edit.state.n_slots - erased[-1].stop - after)


def _ids_between(spans: Iterable[Segment], first: int, last: int) -> list[int]:
    return [
        token
        for span in spans
        if span.start < last and span.stop > first
        for token in span.token_ids[max(first - span.start, 0) : last - span.start]
    ]


register(SuffixRepair())
register(SuffixRepair(where="query"))
