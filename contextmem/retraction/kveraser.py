"""kveraser: put learned steering KV in the place of the span. Costs the span, not what stands after it."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.cache import Slots, SpanCache
from contextmem.eraser import KVEraser
from contextmem.errors import UnsupportedEdit
from contextmem.framing import framing_of
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.state import State

__all__ = ["KVErase", "overwritten", "without_tail"]


@dataclass(frozen=True)
class KVErase:
    """Run e once through the eraser over KV(p) and put the result in e's place; nothing else changes.

    Source: KVEraser (arXiv 2606.17034). Costs O(|e| (|p| + |e|)). Positions stay, p and s stay bit for bit, and the slots
    of e stay in use until `settle()`. Approximate: s attended to e, and the steering KV makes up for it as well as it was
    trained to. Several spans are erased in order, each over the prefix as edited so far.

    Attributes:
        eraser: default: the memory's own.
        question, prefix: what will be asked, as in `ask`, for an eraser that is conditioned on the question.
    """

    eraser: KVEraser | None = None
    question: str = ""
    prefix: str = ""
    name: str = "kveraser"

    def plan(self, edit: Edit) -> Plan:
        if edit.is_tail:
            return Crop().plan(edit)
        eraser = self._eraser(edit)
        eraser.checked(edit.backbone, has_question=bool(self.question))
        longest = max(span.n_tokens for span in edit.inner)
        if longest > eraser.config.max_span_tokens:
            raise UnsupportedEdit(
                f"the span has {longest:,} tokens, this eraser takes up to {eraser.config.max_span_tokens:,}. Use "
                f"method='auto' or 'recompute'. Nothing was changed."
            )
        return Plan(self.name, sum(span.n_tokens for span in edit.inner), edit.n_kept, "approximate")

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        cache = without_tail(edit)
        spans = [(span.start, span.token_ids) for span in edit.inner]
        steering = self._eraser(edit).steer(
            edit.backbone, cache, spans, self._asked(edit), chunk=edit.chunk, step=edit.step
        )
        patches = tuple((start, slots) for (start, _), slots in zip(spans, steering, strict=True))
        return overwritten(edit, cache, patches)

    def _asked(self, edit: Edit) -> tuple[int, ...]:
        if not self.question:
            return ()
        opened = framing_of(edit.codec).answer_open
        return (*edit.codec.encode(self.question), *opened, *edit.codec.encode(self.prefix))

    def _eraser(self, edit: Edit) -> KVEraser:
        return self.eraser or edit.eraser()


def without_tail(edit: Edit) -> SpanCache:
    """The cache to write over: without what goes at the very end, and read by no other state from the first span on."""
    if edit.tail_start < edit.state.n_slots:
        return edit.state.cache.select(((0, edit.tail_start),))
    return edit.state.cache.owned(edit.start)


def overwritten(edit: Edit, cache: SpanCache, patches: tuple[tuple[int, Slots], ...]) -> State:
    """The state in which the inner spans are erased, with what shall be written, and the tail is gone."""
    inner = {span.id for span in edit.inner}
    ledger = edit.state.ledger.erased(inner).removed(set(edit.ids) - inner)
    return State(ledger, cache, min(edit.state.exact_slots, edit.start), patches)


register(KVErase())
