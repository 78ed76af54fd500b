"""One case under every configuration: what is answered, how far from the full cache, what is held, what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from contextmem import ContextMemory, RestoreKV
from contextmem.attention import switched
from contextmem.budget import Budget
from contextmem.cache import SpanCache
from contextmem.compaction import compacted
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler.base import Case
from contextmem.evals.ruler.controls import Control
from contextmem.eviction import Evictor
from contextmem.eviction.base import group_weights
from contextmem.ragged import RaggedCache
from contextmem.state import State
from contextmem.tiers import n_tokens_held, within

__all__ = ["FULL", "Configuration", "Probe", "measure_case"]

FULL = "full cache"
_N_COMPARED = 16  # tokens of the full cache's answer over which the divergence is averaged


@dataclass(frozen=True)
class Configuration:
    """A way to compact.

    Attributes:
        evictor: what scores.
        ratio: part of the context's pairs that is kept, restore slots included; frames of the template come on top.
        restorer: what generates restore slots, or None.
        what: tells configurations with a restorer apart: "restore", "transfer" if it was trained beside another evictor,
            or a name of its own.
        control: what stands in the place of its slots, or None.
    """

    evictor: Evictor
    ratio: float
    restorer: RestoreKV | None = None
    what: str = "restore"
    control: Control | None = None

    @property
    def label(self) -> str:
        """As in the rows."""
        restored = "" if self.restorer is None else f"+{self.what}"
        return f"{self.evictor.name}{restored}@{self.ratio:g}"


@dataclass(frozen=True)
class _Read:
    """A cache that ends with a question, the logits after it, and the seconds it took."""

    cache: SpanCache
    logits: Tensor
    seconds: float


@dataclass(frozen=True)
class _Answer:
    text: str
    token_ids: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class _Told:
    """What an answer of n tokens leaves when it is fed: the cache that ends with it, log-probabilities, (n + 1, vocab), and
    the part of its first tokens' attention that is on the context, and on restore slots in it."""

    answer: tuple[int, ...]
    cache: SpanCache
    logprobs: Tensor
    mass: float
    mass_restored: float


def measure_case(
    new_memory: Callable[[], ContextMemory],
    name: str,
    number: int,
    size: int,
    case: Case,
    configurations: Iterable[Configuration],
    log: RowLog,
) -> None:
    """Write a row for the full cache and every configuration that `log` lacks.

    Cases that the full cache gets wrong are not measured further: an evicted one could not be told from it.
    """
    sample = f"{name}-{size}-{number}"
    wanted = [one for one in configurations if not log.has(sample, one.label)]
    if log.has(sample, FULL) and (not wanted or next(log.of(id=sample, method=FULL))["score"] == 0):
        return
    memory = new_memory()
    memory.append(case.context)
    base, probe = memory._state, Probe(memory, case)
    read = probe.read(base.cache)
    full = probe.answered(read)
    reference = probe.told(read, full.token_ids)
    reference.cache.release()
    about = {"task": name, "size": size}
    if not log.has(sample, FULL):
        log.add(
            sample,
            FULL,
            **about,
            score=case.score(full.text),
            seconds=full.seconds,
            held=n_tokens_held(base),
            nbytes=base.cache.nbytes,
            mass=round(reference.mass, 4),
        )
    if next(log.of(id=sample, method=FULL))["score"] == 0:  # as it was logged: another machine may round otherwise
        return
    scored: dict[str, tuple[State, float]] = {}
    for one in wanted:
        if one.evictor.name not in scored:
            started = time.perf_counter()
            scored[one.evictor.name] = _with_scores(memory, base, one), time.perf_counter() - started
        state, score_s = scored[one.evictor.name]
        started = time.perf_counter()
        evicted = _compacted(memory, state, one)
        build_s = time.perf_counter() - started
        read = probe.read(evicted.cache, stays=one.control is None or one.control.stays)
        told = probe.told(read, full.token_ids)
        answer = probe.answered(read, told)
        log.add(
            sample,
            one.label,
            **about,
            score=case.score(answer.text),
            seconds=answer.seconds,
            score_s=score_s,
            build_s=build_s,
            held=n_tokens_held(evicted),
            nbytes=evicted.cache.nbytes,
            kl=round(_divergence(reference, told), 5),
            mass=round(told.mass, 4),
            mass_restored=round(told.mass_restored, 4),
        )


def _with_scores(memory: ContextMemory, base: State, one: Configuration) -> State:
    """The state with the evictor's scores, so that every ratio compares the same ones."""
    almost = _budget(base, replace(one, ratio=0.99, restorer=None))
    return replace(base, scores=_within(memory, base, almost, None).scores)


def _compacted(memory: ContextMemory, state: State, one: Configuration) -> State:
    budget = _budget(state, one)
    if one.control is None or one.restorer is None:
        return _within(memory, state, budget, one.restorer)
    evicted = _within(memory, state, replace(budget, n_tokens=budget.n_tokens - one.restorer.n), None)
    assert isinstance(evicted.cache, RaggedCache)
    return replace(evicted, cache=one.control.beside(one.restorer, memory.backbone, state.cache, evicted.cache))


def _within(memory: ContextMemory, state: State, budget: Budget, restorer: RestoreKV | None) -> State:
    return within(memory.backbone, memory._codec, memory._framing, budget, state, restorer, chunk=memory.chunk_size)


def _budget(state: State, one: Configuration) -> Budget:
    n_frames = sum(span.n_tokens for span in state.ledger.spans if span.kind == "frame")
    n_context = state.n_slots - n_frames
    return Budget(n_frames + max(1, round(one.ratio * n_context)), 0, one.evictor)


class Probe:
    """One question of a case, put to several caches.

    Attributes:
        prompt: token ids of the question and of the answer's beginning.
    """

    def __init__(self, memory: ContextMemory, case: Case) -> None:
        self._memory, self._case = memory, case
        encode = memory._codec.encode
        self.prompt = (*encode(case.question), *memory._framing.answer_open, *encode(case.prefix))
        self._n_opening = len(memory._framing.bare_opening)

    def read(self, cache: SpanCache, *, stays: bool = True) -> _Read:
        """The question, read over a cache; restore slots are gone afterwards unless they stay."""
        backbone, seen = self._memory.backbone, cache.view()
        started = time.perf_counter()
        logits = backbone.prefill(self.prompt, seen)
        seconds = time.perf_counter() - started
        if not stays and isinstance(seen, RaggedCache):
            seen = compacted(seen, seen.held(), backbone.windows)
        return _Read(seen, logits, seconds)

    def answered(self, read: _Read, told: _Told | None = None) -> _Answer:
        """Greedy decoding to the end of the turn, or until everything expected was said.

        As far as decoding would have said the same as the answer that was `told`, it is not decoded again, up to the
        rounding of one forward in the place of several. The seconds are without it. `told` is used up.
        """
        memory = self._memory
        ids, seen, logits = [], read.cache.view(), read.logits
        if told is not None:
            ids = _agreed(told)
            seen, logits = told.cache.view(read.cache.n_slots + len(ids)), told.logprobs[len(ids)]
            told.cache.release()
        text = memory._codec.decode(ids)
        started = time.perf_counter()
        done = bool(ids) and self._case.score(text) == 1
        while not done and len(ids) < self._case.longest and (token := int(logits.argmax())) not in memory._end_ids:
            ids.append(token)
            text = memory._codec.decode(ids)
            if not (done := self._case.score(text) == 1):
                logits = memory.backbone.forward([token], seen)
        seconds = time.perf_counter() - started
        seen.release()
        return _Answer(text, tuple(ids), read.seconds + seconds)

    def told(self, read: _Read, answer: Sequence[int]) -> _Told:
        """What is told while `answer` is fed."""
        backbone, seen, logits = self._memory.backbone, read.cache.view(), read.logits[None]
        masses = list[tuple[float, float]]()
        n_after = len(self.prompt) + len(answer)

        def watch(layer: int, query: Tensor, keys: Any) -> None:
            masses.append(_masses(seen, layer, query, keys, self._n_opening, n_after))

        if answer:
            with backbone.lock, switched(backbone.core, watch):
                logits = torch.cat((logits, backbone.forward(answer, seen, all_logits=True)))
        on_context, on_restored = (mean(part) for part in zip(*masses, strict=True)) if masses else (0.0, 0.0)
        return _Told(tuple(answer), seen, logits.double().log_softmax(-1), on_context, on_restored)


def _agreed(told: _Told) -> list[int]:
    """The tokens up to which greedy decoding says what was told."""
    said = told.logprobs.argmax(-1).tolist()
    n = next(
        (n for n, (one, token) in enumerate(zip(told.answer, said, strict=False)) if one != token), len(told.answer)
    )
    return list(told.answer[:n])


def _divergence(reference: _Told, told: _Told) -> float:
    """Mean over the first tokens of the reference's answer, in nats."""
    expected, found = reference.logprobs[:_N_COMPARED], told.logprobs[:_N_COMPARED]
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def _masses(
    cache: SpanCache, layer: int, query: Tensor, keys: Any, n_opening: int, n_after: int
) -> tuple[float, float]:
    """Attention on the context and the restore slots in it, and on these alone: means over heads and queries.

    The context is what stands between the first `n_opening` slots, which every head holds, and the last `n_after`. No
    window is regarded.
    """
    on_context, on_restored = [], []
    for head in range(cache.layers[layer].keys.shape[1]):
        weights = group_weights(query, keys, head)[:, : _N_COMPARED - 1].mean((0, 1))
        n_kept = len(cache.kept[layer].keys[head]) if isinstance(cache, RaggedCache) else 0
        n_restore = cache.n_restore if isinstance(cache, RaggedCache) else 0
        on_context.append(float(weights[n_opening : len(weights) - n_after].sum()))
        on_restored.append(float(weights[n_kept - n_restore : n_kept].sum()))
    return mean(on_context), mean(on_restored)
