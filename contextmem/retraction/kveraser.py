"""kveraser: put learned steering KV in the place of the span. Costs the span, not what stands after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contextmem.backbone import Backbone
from contextmem.cache import Ranges, Slots, SpanCache
from contextmem.eraser import KVEraser
from contextmem.errors import InvalidInput, UnsupportedEdit
from contextmem.framing import framing_of
from contextmem.retraction.base import Edit, Plan, register
from contextmem.retraction.crop import Crop
from contextmem.retraction.delete_and_shift import close_gaps_, is_worn, recompute_plan
from contextmem.retraction.recompute import Recompute
from contextmem.retraction.runs import following, runs
from contextmem.state import State

__all__ = ["KVErase", "closed", "overwritten", "without_tail"]


@dataclass(frozen=True)
class KVErase:
    """Run e once through the eraser over KV(p) and put the result in e's place.

    Source: KVEraser (arXiv 2606.17034). Costs O(|e| (|p| + |e|)). Approximate: s attended to e, and the steering KV makes up
    for it as well as it was trained to. Several spans are erased in order, each over the prefix as edited so far.

    Where all of the steering KV stays (the paper's form), positions stay, and p and s bit for bit; the slots of e are in use
    until `settle()`. Where the eraser keeps only the last few (`EraserConfig.slots`), the others are freed, and the keys of
    s are rotated to close the gap, as in `delete_and_shift` and with its limits: worn keys are recomputed instead.

    Attributes:
        eraser: default: the memory's own.
        question, prefix: what will be asked, as in `ask`, for an eraser that is conditioned on the question.
        repair: tokens after every span that are computed again over the steering KV, which takes traces of e out of them, at
            a cost that does not grow with s. They end at the next erased span. Takes an eraser that closes its gap.
    """

    eraser: KVEraser | None = None
    question: str = ""
    prefix: str = ""
    repair: int = 0
    name: str = "kveraser"

    def __post_init__(self) -> None:
        if self.repair < 0:
            raise InvalidInput(f"repair is a number of tokens, not {self.repair}. Nothing was changed.")

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
        if eraser.config.slots is not None:
            if is_worn(edit):
                return recompute_plan(edit)
            edit.backbone.angles()
        elif self.repair:
            raise UnsupportedEdit(
                "this eraser keeps all of its steering KV: what follows the span is not computed again. Leave out repair, "
                "or train an eraser with slots. Nothing was changed."
            )
        spans = [span for span in edit.state.ledger.spans if span.start < edit.tail_start]
        repaired = len(following(spans, {span.id for span in edit.inner}, self.repair))
        n_spans = sum(span.n_tokens for span in edit.inner)
        return Plan(self.name, n_spans + repaired, edit.n_kept - repaired, "approximate")

    def apply(self, edit: Edit) -> State:
        if edit.is_tail:
            return Crop().apply(edit)
        eraser = self._eraser(edit)
        if eraser.config.slots is not None and is_worn(edit):
            return Recompute().apply(edit)
        cache = without_tail(edit)
        spans = [(span.start, span.token_ids) for span in edit.inner]
        steering = eraser.steer(edit.backbone, cache, spans, self._asked(edit), chunk=edit.chunk, step=edit.step)
        if eraser.config.slots is not None:
            ranges = [(span.start, span.stop) for span in edit.inner]
            packed = closed(edit.backbone, edit.state.cache, edit.kept, ranges, steering, eraser.config.slots)
            return self._repaired(edit, overwritten(edit, packed, most=eraser.config.slots))
        patches = tuple((start, slots) for (start, _), slots in zip(spans, steering, strict=True))
        return overwritten(edit, cache, patches)

    def _repaired(self, edit: Edit, state: State) -> State:
        """The same state, whose cache is nobody else's yet, with the next tokens after every span computed again."""
        ids = following(state.ledger.spans, {span.id for span in edit.inner}, self.repair)
        for start, run in runs(ids, state.cache.positions):
            over = state.cache.over(start, start + len(run))
            edit.backbone.prefill(run, over, chunk=edit.chunk, step=edit.step)
        return state

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


def closed(
    backbone: Backbone, cache: SpanCache, kept: Ranges, spans: Ranges, steering: Sequence[Slots], most: int | None
) -> SpanCache:
    """A copy with the slots of `kept`, and between them the last `most` steering slots (None: all) of every span."""
    tails = [(start if most is None else max(start, stop - most), stop) for start, stop in spans]
    written = dict(zip((start for start, _ in tails), steering, strict=True))
    ranges = sorted((*kept, *tails))
    result = cache.select(ranges)
    at = 0
    for start, stop in ranges:
        n = stop - start
        if start in written:
            result.write(at, [(keys[:, :, -n:], values[:, :, -n:]) for keys, values in written[start]])
        at += n
    if most is not None:
        close_gaps_(backbone, result, ranges)
    return result


def overwritten(
    edit: Edit, cache: SpanCache, patches: tuple[tuple[int, Slots], ...] = (), most: int | None = None
) -> State:
    """The state in which the inner spans are erased, with what shall be written, and the tail is gone.

    Args:
        most: slots that `cache` holds of every inner span, at most.
    """
    inner = {span.id for span in edit.inner}
    ledger = edit.state.ledger.erased(inner, most).removed(set(edit.ids) - inner)
    return State(ledger, cache, min(edit.state.exact_slots, edit.start), patches)


register(KVErase())
