"""One case under every configuration: what is answered, how far from the full cache, what is held, what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from contextmem import ContextMemory, RestoreKV
from contextmem.budget import Budget
from contextmem.cache import SpanCache
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler.base import Case
from contextmem.eviction import Evictor
from contextmem.state import State
from contextmem.tiers import n_tokens_held, within

__all__ = ["FULL", "Configuration", "measure_case"]

FULL = "full cache"
_N_COMPARED = 16  # tokens of the full cache's answer over which the divergence is averaged


@dataclass(frozen=True)
class Configuration:
    """A way to compact.

    Attributes:
        evictor: what scores.
        ratio: part of the context's pairs that is kept, restore slots included; frames of the template come on top.
        restorer: what generates restore slots, or None.
        transfer: whether the restorer was trained beside another evictor.
    """

    evictor: Evictor
    ratio: float
    restorer: RestoreKV | None = None
    transfer: bool = False

    @property
    def label(self) -> str:
        """As in the rows."""
        restored = "" if self.restorer is None else "+transfer" if self.transfer else "+restore"
        return f"{self.evictor.name}{restored}@{self.ratio:g}"


@dataclass(frozen=True)
class _Answer:
    text: str
    token_ids: tuple[int, ...]
    seconds: float


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
    base, prompt = memory._state, _prompt(memory, case)
    full = _answered(memory, base.cache, prompt, case.longest)
    score = case.score(full.text)
    about = {"task": name, "size": size}
    if not log.has(sample, FULL):
        log.add(
            sample, FULL, **about, score=score, seconds=full.seconds, held=n_tokens_held(base), nbytes=base.cache.nbytes
        )
    if score == 0:
        return
    reference = _told(memory, base.cache, prompt, full.token_ids)
    scored: dict[str, tuple[State, float]] = {}
    for one in wanted:
        if one.evictor.name not in scored:
            started = time.perf_counter()
            scored[one.evictor.name] = _with_scores(memory, base, one), time.perf_counter() - started
        state, score_s = scored[one.evictor.name]
        started = time.perf_counter()
        compacted = _compacted(memory, state, one)
        build_s = time.perf_counter() - started
        answer = _answered(memory, compacted.cache, prompt, case.longest)
        told = _told(memory, compacted.cache, prompt, full.token_ids)
        log.add(
            sample,
            one.label,
            **about,
            score=case.score(answer.text),
            seconds=answer.seconds,
            score_s=score_s,
            build_s=build_s,
            held=n_tokens_held(compacted),
            nbytes=compacted.cache.nbytes,
            kl=round(float((reference.exp() * (reference - told)).sum(-1).mean()), 5),
        )


def _prompt(memory: ContextMemory, case: Case) -> tuple[int, ...]:
    encode = memory._codec.encode
    return (*encode(case.question), *memory._framing.answer_open, *encode(case.prefix))


def _with_scores(memory: ContextMemory, base: State, one: Configuration) -> State:
    """The state with the evictor's scores, so that every ratio compares the same ones."""
    almost = _budget(base, replace(one, ratio=0.99, restorer=None))
    return replace(base, scores=_within(memory, base, almost, None).scores)


def _compacted(memory: ContextMemory, state: State, one: Configuration) -> State:
    return _within(memory, state, _budget(state, one), one.restorer)


def _within(memory: ContextMemory, state: State, budget: Budget, restorer: RestoreKV | None) -> State:
    return within(memory.backbone, memory._codec, memory._framing, budget, state, restorer, chunk=memory.chunk_size)


def _budget(state: State, one: Configuration) -> Budget:
    n_frames = sum(span.n_tokens for span in state.ledger.spans if span.kind == "frame")
    n_context = state.n_slots - n_frames
    return Budget(n_frames + max(1, round(one.ratio * n_context)), 0, one.evictor)


def _answered(memory: ContextMemory, cache: SpanCache, prompt: Sequence[int], longest: int) -> _Answer:
    """Greedy decoding to the end of the turn."""
    seen = cache.view()
    ids: list[int] = []
    started = time.perf_counter()
    logits = memory.backbone.prefill(prompt, seen)
    while len(ids) < longest and (token := int(logits.argmax())) not in memory._end_ids:
        ids.append(token)
        logits = memory.backbone.forward([token], seen)
    seconds = time.perf_counter() - started
    seen.release()
    return _Answer(memory._codec.decode(ids), tuple(ids), seconds)


def _told(memory: ContextMemory, cache: SpanCache, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-probabilities, (n, vocab), at the first tokens of `answer`, which is fed."""
    seen = cache.view()
    fed = [*prompt, *answer[: _N_COMPARED - 1]]
    logits = memory.backbone.forward(fed, seen, all_logits=True)[len(prompt) - 1 :]
    seen.release()
    return logits.double().log_softmax(-1)
