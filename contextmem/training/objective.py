"""The loss of an eraser, read by the frozen model through the edited cache.

Source: KVEraser (arXiv 2606.17034). The context is prefilled once without gradient. For every erasure, gradient flows from
the answer's tokens through the steering KV into the eraser and nowhere else. Two targets: the answer itself (cross-entropy,
the paper's), or what the model says at every token of the answer in a context that never held the span (KL divergence).
The second needs no samples to be dropped, and teaches nothing that the model would not have said.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contextmem.adapters import Adapter
from contextmem.backbone import Backbone
from contextmem.cache import Slots, SpanCache
from contextmem.eraser import SUFFIX_SHARE, EraserConfig
from contextmem.retraction.delete_and_shift import close_gaps_
from contextmem.training.passes import answer_logits, joined, moved, steering
from contextmem.training.samples.base import Erasure, Sample

__all__ = ["EraserObjective"]

_LONGEST_OWN_ANSWER = 24
_TYPICAL_ANSWER = (
    8  # tokens: divergences are summed over an answer, for most of its tokens say nothing about the erasure
)
_HARD = 0.15  # nats, summed over the answer, between the teacher and a context whose slots were dropped


@dataclass(frozen=True)
class _Asked:
    """An erasure, the answer to train on, and the teacher's logits, (len(answer), vocab), for it."""

    erasure: Erasure
    answer: Sequence[int]
    taught: Tensor | None = None


@dataclass(frozen=True)
class _Prepared:
    """A context, prefilled, and what is asked about it."""

    context: SpanCache
    asked: tuple[_Asked, ...]


class EraserObjective(nn.Module):
    """One module whose forward takes a sample and returns its loss, so that data-parallel wrappers work.

    Its parameters are the eraser's alone; the frozen model is held outside the module tree.

    Attributes:
        target: "teacher" (the model in a context without the span) or "answer".
        pool: contexts to keep prefilled, with what the teacher says; they must come again to be of use.
        easy: share kept of the erasures that dropping the slots would do as well; the others are all kept. Training on what
            dropping cannot do is what makes an eraser more than a mask. For the target "teacher".
        sharpness: factor of the teacher's logits for needles; above 1 the eraser learns what the teacher says rather than
            how surely. Sentences are learned as they are: sharpened ones made the model surer of every word it said.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: Adapter,
        config: EraserConfig,
        target: str = "teacher",
        *,
        pool: int = 0,
        easy: float = 1.0,
        sharpness: float = 1.0,
    ) -> None:
        super().__init__()
        self.eraser = adapter.module
        self._held = (backbone, adapter)
        self.eraser_config, self.target, self.easy, self.sharpness = config, target, easy, sharpness
        self._pool: dict[Sample, _Prepared] = {}
        self._most = pool
        self.seen, self.kept, self.total = 0, 0, 0.0  # erasures met and trained on, and their losses; for the log

    def forward(self, sample: Sample) -> dict[str, Tensor]:
        """The mean loss over the erasures that are kept; zero, with a gradient of zero, if none is."""
        prepared = self._prepared(sample)
        self.seen += len(sample.erasures)
        self.kept += len(prepared.asked)
        edited: dict[tuple[int, ...], Slots] = {}  # one erase pass for every question about the same erasure
        losses = [self._loss(sample, prepared.context, asked, edited) for asked in prepared.asked]
        if not losses:
            return {"loss": sum((p.sum() * 0.0 for p in self.eraser.parameters()), torch.zeros(()))}
        self.total += sum(float(loss.detach()) for loss in losses)
        return {"loss": torch.stack(losses).mean()}

    def _loss(self, sample: Sample, context: SpanCache, asked: _Asked, edited: dict[tuple[int, ...], Slots]) -> Tensor:
        backbone, erasure = self._held[0], asked.erasure
        key = (erasure.start, erasure.stop, *(erasure.question if self.eraser_config.conditioning == "query" else ()))
        if key not in edited:
            edited[key] = self._edited(sample, context, erasure)
        position = context.n_slots - self.eraser_config.n_gone(erasure.stop - erasure.start)
        logits = answer_logits(backbone, edited[key], position, erasure.question, asked.answer)
        if asked.taught is None:
            return F.cross_entropy(logits, torch.tensor(asked.answer, device=logits.device))
        sharpness = self.sharpness if erasure.kind == "needle" else 1.0
        return _divergence(sharpness * asked.taught, logits) / _TYPICAL_ANSWER

    def _edited(self, sample: Sample, context: SpanCache, erasure: Erasure) -> Slots:
        """The context with steering KV in the erasure's place, differentiable in the eraser."""
        backbone, adapter = self._held
        start, stop, n = erasure.start, erasure.stop, context.n_slots
        with torch.no_grad():
            seen = _seen(backbone, context, erasure, self.eraser_config.conditioning)
        with adapter.attached(backbone.core) as core:
            steered = steering(core, backbone, seen, sample.context[start:stop], start)
        n_gone = self.eraser_config.n_gone(stop - start)
        angles = backbone.angles() if n_gone else ()
        left = [(keys[:, :, n_gone:], values[:, :, n_gone:]) for keys, values in steered]
        after = moved(_slots(context, stop, n), stop, -n_gone, angles)
        return joined([_slots(context, 0, start), moved(left, start + n_gone, -n_gone, angles), after])

    @torch.no_grad()
    def _prepared(self, sample: Sample) -> _Prepared:
        """The context prefilled, and the erasures to train on with their answers."""
        if sample in self._pool:
            return self._pool[sample]
        backbone, _ = self._held
        context = _prefilled(backbone, sample.context)
        if self.target == "answer":
            asked = [_Asked(erasure, erasure.answer) for erasure in self._checked(sample, context)]
        else:
            teacher = _Teacher(backbone, sample, context)
            told = [_Asked(erasure, *teacher.answer(erasure)) for erasure in sample.erasures]
            asked = [one for number, one in enumerate(told) if self._is_kept(sample, number, context, one)]
        prepared = _Prepared(context, tuple(asked))
        if len(self._pool) < self._most:
            self._pool[sample] = prepared if asked else _Prepared(backbone.new_cache(), ())
        return prepared

    def _is_kept(self, sample: Sample, number: int, context: SpanCache, asked: _Asked) -> bool:
        """Whatever dropping the slots would get wrong; a share of the rest, always the same."""
        if self.easy >= 1 or random.Random(f"{sample.context[:64]}-{number}").random() < self.easy:
            return True
        seen = self._dropped(context, asked.erasure)
        ids = [*asked.erasure.question, *asked.answer[:-1]]
        logits = self._held[0].forward(ids, seen, all_logits=True)[-len(asked.answer) :]
        seen.release()
        assert asked.taught is not None
        return float(_divergence(asked.taught, logits)) > _HARD

    def _dropped(self, context: SpanCache, erasure: Erasure) -> SpanCache:
        """The context without the erasure's slots; their positions are closed if the eraser closes them."""
        kept = ((0, erasure.start), (erasure.stop, context.n_slots))
        dropped = context.select(kept)
        if self.eraser_config.slots is not None:
            close_gaps_(self._held[0], dropped, kept)
        return dropped

    def _checked(self, sample: Sample, context: SpanCache) -> Sequence[Erasure]:
        if sample.check == "none":
            return sample.erasures
        backbone, _ = self._held
        whole = _prefilled(backbone, sample.clean) if sample.clean is not None else None
        kept = []
        for erasure in sample.erasures:
            if sample.check == "clean_and_misled" and says(backbone, context, erasure):
                continue
            without = whole or _prefilled(backbone, sample.context[erasure.stop :], context.view(erasure.start))
            if says(backbone, without, erasure):
                kept.append(erasure)
        return kept


def _divergence(taught: Tensor, told: Tensor) -> Tensor:
    """KL divergence from rows of the teacher's logits, summed over the rows."""
    return F.kl_div(told.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="sum")


class _Teacher:
    """The model in the contexts without a span; each is prefilled once for all that is asked about it."""

    def __init__(self, backbone: Backbone, sample: Sample, context: SpanCache) -> None:
        self._backbone, self._sample, self._context = backbone, sample, context
        self._without: dict[tuple[int, int], SpanCache] = {}

    @torch.no_grad()
    def answer(self, erasure: Erasure) -> tuple[Sequence[int], Tensor]:
        """The answer to train on, the erasure's or the teacher's own, and the logits, (len(answer), vocab), for it."""
        asked = self._cache(erasure.start, erasure.stop).view()
        try:
            if not erasure.own_words:
                return erasure.answer, _logits(self._backbone, asked, erasure)
            return self._in_own_words(asked, erasure)
        finally:
            asked.release()

    def _in_own_words(self, asked: SpanCache, erasure: Erasure) -> tuple[Sequence[int], Tensor]:
        logits, ids = [self._backbone.prefill(erasure.question, asked)], []
        while True:
            ids.append(int(logits[-1].argmax()))
            if ids[-1] == erasure.answer[-1] or len(ids) == _LONGEST_OWN_ANSWER:
                return ids, torch.stack(logits)
            logits.append(self._backbone.forward(ids[-1:], asked))

    def _cache(self, start: int, stop: int) -> SpanCache:
        if (start, stop) not in self._without:
            after = self._sample.context[stop:]
            self._without[start, stop] = _prefilled(self._backbone, after, self._context.view(start))
        return self._without[start, stop]


def says(backbone: Backbone, context: SpanCache, erasure: Erasure) -> bool:
    """Whether greedy decoding over `context` gives exactly the erasure's answer."""
    asked = context.view()
    logits = _logits(backbone, asked, erasure)
    asked.release()
    return logits.argmax(-1).tolist() == list(erasure.answer)


def _logits(backbone: Backbone, asked: SpanCache, erasure: Erasure) -> Tensor:
    """Logits, (len(answer), vocab), for the erasure's answer; `asked` is extended by it."""
    ids = [*erasure.question, *erasure.answer[:-1]]
    return backbone.forward(ids, asked, all_logits=True)[-len(erasure.answer) :]


def _prefilled(backbone: Backbone, ids: Sequence[int], cache: SpanCache | None = None) -> SpanCache:
    cache = cache or backbone.new_cache()
    if ids:
        backbone.prefill(ids, cache)
    return cache


def _seen(backbone: Backbone, context: SpanCache, erasure: Erasure, conditioning: str) -> Slots:
    """What the erase pass attends to, see `KVEraser`."""
    start, stop, n = erasure.start, erasure.stop, context.n_slots
    if conditioning == "none":
        return [(k[:, :, :0], v[:, :, :0]) for k, v in _slots(context, 0, n)]
    prefix = _slots(context, 0, start)
    if conditioning == "suffix":
        return joined([prefix, _slots(context, stop, stop + ceil(SUFFIX_SHARE * (n - stop)))])
    if conditioning == "query":
        asked = context.view()
        backbone.prefill(erasure.question, asked)
        return joined([prefix, _slots(asked, n, asked.n_slots)])
    return prefix


def _slots(cache: SpanCache, start: int, stop: int) -> Slots:
    return [(layer.keys[:, :, start:stop], layer.values[:, :, start:stop]) for layer in cache.layers]
