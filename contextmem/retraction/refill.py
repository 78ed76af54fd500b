"""refill: overwrite the span with neutral text and compute it, and the tokens right after it, again."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.cache import Slots
from contextmem.errors import UnsupportedEdit
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.state import State

__all__ = ["Refill"]


@dataclass(frozen=True)
class Refill:
    """Put KV of line breaks in e's slots and compute the next `n_after` tokens again, at the positions they have.

    Source: the training-free baseline of arXiv 2609.17983 (span + next 32 positions re-prefilled), with line breaks for a
    span that is to be removed instead of replaced. Approximate: what stands further on keeps its traces of e.

    Attributes:
        n_after: tokens after each span that are computed again; an erased span or the next one to go ends them.
    """

    n_after: int = 32
    name: str = "refill"

    def plan(self, edit: Edit) -> Plan:
        if edit.is_tail:
            return Crop().plan(edit)
        if not edit.codec.encode("\n"):
            raise UnsupportedEdit("this tokenizer has no token for a line break to refill with. Nothing was changed.")
        n_tokens = sum(stop - start for start, stop, _ in self._parts(edit))
        return Plan(self.name, n_tokens, "approximate", replaced=edit.n_removed)

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        cache = edit.state.cache.owned(edit.start)
        patches: list[tuple[int, Slots]] = []
        parts = self._parts(edit)
        with edit.backbone.lock, cache.borrowed([(start, stop) for start, stop, _ in parts]):
            for start, stop, ids in parts:
                edit.backbone.prefill(ids, cache.over(start, stop), chunk=edit.chunk, step=edit.step)
                patches.append((start, cache.read(start, stop)))
        ledger = edit.state.ledger.erased(edit.ids)
        return State(ledger, cache, min(edit.state.exact_slots, edit.start), tuple(patches))

    def _parts(self, edit: Edit) -> list[tuple[int, int, tuple[int, ...]]]:
        """First and last slot of what is computed, and the ids to put there."""
        blank = edit.codec.encode("\n")[:1]
        spans = edit.state.ledger.spans
        parts = []
        for start, stop in edit.ranges:
            ends = [s.start for s in spans if s.start >= stop and (s.state == "erased" or s.id in edit.ids)]
            end = min([*ends, edit.state.n_slots, stop + self.n_after])
            after = [t for s in spans if stop <= s.start < end for t in s.token_ids][: end - stop]
            parts.append((start, end, blank * (stop - start) + tuple(after)))
        return parts


register(Refill())
