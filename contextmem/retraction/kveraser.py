"""kveraser: put learned steering KV in the place of the span. Costs the span, not what stands after it."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.eraser import KVEraser
from contextmem.errors import UnsupportedEdit
from contextmem.framing import framing_of
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.state import State

__all__ = ["KVErase"]


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
        eraser = self._fitting(edit)
        longest = max(stop - start for start, stop in edit.ranges)
        if longest > eraser.config.max_span_tokens:
            raise UnsupportedEdit(
                f"the span has {longest:,} tokens, this eraser takes up to {eraser.config.max_span_tokens:,}. Use "
                f"method='auto' or 'recompute'. Nothing was changed."
            )
        return Plan(self.name, edit.n_removed, "approximate", replaced=edit.n_removed)

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        cache = edit.state.cache.owned(edit.start)
        spans = [(start, edit.ids_between(start, stop)) for start, stop in edit.ranges]
        steering = self._fitting(edit).steer(
            edit.backbone, cache, spans, self._asked(edit), chunk=edit.chunk, step=edit.step
        )
        patches = tuple((start, slots) for (start, _), slots in zip(spans, steering, strict=True))
        return State(edit.state.ledger.erased(edit.ids), cache, min(edit.state.exact_slots, edit.start), patches)

    def _asked(self, edit: Edit) -> tuple[int, ...]:
        if not self.question:
            return ()
        opened = framing_of(edit.codec).answer_open
        return (*edit.codec.encode(self.question), *opened, *edit.codec.encode(self.prefix))

    def _fitting(self, edit: Edit) -> KVEraser:
        eraser = self.eraser or edit.eraser()
        eraser.adapter_for(edit.backbone)
        return eraser


register(KVErase())
