"""refill: overwrite the span with neutral text and compute it, and the tokens right after it, again."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.cache import Slots
from contextmem.errors import UnsupportedEdit
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.retraction.kveraser import overwritten, without_tail
from contextmem.retraction.runs import following, runs
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
        n_tokens = sum(len(ids) for _, ids in self._parts(edit))
        n_inner = sum(span.n_tokens for span in edit.inner)
        return Plan(self.name, n_tokens, edit.n_kept - (n_tokens - n_inner), "approximate")

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        cache = without_tail(edit)
        patches: list[tuple[int, Slots]] = []
        parts = self._parts(edit)
        with edit.backbone.lock, cache.borrowed([(start, start + len(ids)) for start, ids in parts]):
            for start, ids in parts:
                stop = start + len(ids)
                edit.backbone.prefill(ids, cache.over(start, stop), chunk=edit.chunk, step=edit.step)
                patches.append((start, cache.read(start, stop)))
        return overwritten(edit, cache, tuple(patches))

    def _parts(self, edit: Edit) -> list[tuple[int, tuple[int, ...]]]:
        """First slot and ids of everything that is computed."""
        blank = edit.codec.encode("\n")[0]
        spans = [span for span in edit.state.ledger.spans if span.start < edit.tail_start]
        ids = following(spans, {span.id for span in edit.inner}, self.n_after)
        ids |= {slot: blank for span in edit.inner for slot in range(span.start, span.stop)}
        return runs(dict(sorted(ids.items())), edit.state.cache.positions)


register(Refill())
