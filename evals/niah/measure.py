"""One sample by one method: the edit, the question, the answer, and what is left of the erased value."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contextmem import ContextMemory, DependentsWarning
from contextmem.cache import SpanCache
from contextmem.errors import InvalidInput
from contextmem.evals.forks import unshared_fork
from contextmem.evals.niah.samples import NEEDLES, Haystack, filled
from contextmem.evals.rows import RowLog
from contextmem.retraction import COMPARED
from contextmem.tiers import n_tokens_held

__all__ = ["METHODS", "PROBES", "measure_derived", "measure_sample"]

METHODS = ("none", *COMPARED)
PROBES = ("none", "recompute", "kveraser", "refill", "recompute+cascade", "kveraser+cascade")
_LONGEST_ANSWER = 24
_STEERING = ("kveraser", "refill")


@dataclass(frozen=True)
class _Asked:
    """An answer and its cost.

    Attributes:
        text: what was generated, up to the end of the turn.
        query_s, decode_s: seconds to read the question, and to generate up to the end of the first integer.
        n_decoded: tokens generated in that time.
        after_question: the cache as it stood when the answer began.
        log_probs: of the next token there.
    """

    text: str
    query_s: float
    decode_s: float
    n_decoded: int
    after_question: SpanCache
    log_probs: Any


def measure_sample(
    new_memory: Callable[[], ContextMemory],
    sample: Haystack,
    methods: Sequence[str],
    log: RowLog,
    *,
    kept: float | None = None,
) -> None:
    """Write a row for every method and either needle erased that `log` lacks.

    Args:
        kept: part of the context that a budget leaves; it is compacted before the edit, and again after it.

    Raises:
        InvalidInput: `kept` leaves so little that a memory recomputes steering away.
    """
    missing = [(w, m) for w in range(2) for m in methods if not log.has(f"{sample.id}-{NEEDLES[w]}", m)]
    if not missing:
        return
    memory = new_memory()
    segments = filled(memory, sample)
    if kept is not None:
        memory.set_budget(round(kept * memory.seq_length), reserve=0)
    for which, method in missing:
        gone = segments[sample.places[which]]
        edited = unshared_fork(memory)
        edit_s = 0.0
        if method != "none":
            report = edited.retract(gone.id, method=method)
            assert report.method == method, "the needle is never the tail"
            if kept is not None and method in _STEERING and not edited.segments(state="erased"):
                raise InvalidInput(
                    f"{kept:g} of {memory.seq_length} tokens is too little: steering was recomputed away."
                )
            edit_s = report.seconds or 0.0
        asked = _ask(edited, sample)
        erased, wanted = sample.needles[which].value, sample.needles[1 - which].value
        log.add(
            f"{sample.id}-{NEEDLES[which]}",
            method,
            kind="direct",
            size=sample.size,
            needle=NEEDLES[which],
            **_scored(edited, asked, wanted, erased),
            seconds=edit_s + asked.query_s + asked.decode_s,
            edit_s=edit_s,
            query_s=asked.query_s,
            decode_s=asked.decode_s,
            decoded=asked.n_decoded,
            span=gone.n_tokens,
            held=round(n_tokens_held(edited._state), 1),
            suffix=memory.seq_length - gone.stop,
            threads=torch.get_num_threads(),
        )


def measure_derived(new_memory: Callable[[], ContextMemory], sample: Haystack, log: RowLog) -> None:
    """Erase a needle whose value a later sentence repeats, with and without what was derived from it."""
    missing = [method for method in PROBES if not log.has(sample.id, method)]
    if not missing:
        return
    memory = new_memory()
    segments = filled(memory, sample)
    gone = segments[sample.places[0]]
    for method in missing:
        edited = unshared_fork(memory)
        name, _, cascade = method.partition("+")
        edit_s = 0.0
        if name != "none":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DependentsWarning)
                edit_s = edited.retract(gone.id, method=name, cascade=bool(cascade)).seconds or 0.0
        asked = _ask(edited, sample)
        erased, kept = sample.needles[0].value, sample.needles[1].value
        log.add(
            sample.id,
            method,
            kind="derived",
            size=sample.size,
            **_scored(edited, asked, kept, erased),
            seconds=edit_s + asked.query_s + asked.decode_s,
        )


def _ask(memory: ContextMemory, sample: Haystack) -> _Asked:
    """Greedy decoding to the end of the turn; timed until the first integer has ended."""
    codec, backbone = memory._codec, memory.backbone
    prompt, cache = sample.prompt(memory), memory.past_key_values
    started = time.perf_counter()
    logits = backbone.prefill(prompt, cache)
    query_s = time.perf_counter() - started
    after, log_probs = cache.view(), logits.double().log_softmax(-1)
    ids: list[int] = []
    started = time.perf_counter()
    decode_s, n_decoded = 0.0, 0
    while len(ids) < _LONGEST_ANSWER:
        token = int(logits.argmax())
        is_over = token in memory._end_ids
        if not n_decoded and (is_over or re.search(r"\d[^\d,]", codec.decode([*ids, token]))):
            decode_s, n_decoded = time.perf_counter() - started, len(ids) + 1
        if is_over:
            break
        ids.append(token)
        logits = backbone.forward([token], cache)
    cache.release()
    decode_s = decode_s if n_decoded else time.perf_counter() - started
    return _Asked(codec.decode(ids), query_s, decode_s, n_decoded or len(ids), after, log_probs)


def _scored(memory: ContextMemory, asked: _Asked, kept: str, erased: str) -> dict[str, Any]:
    text = asked.text.replace(",", "")
    found = re.search(r"\d+", text)
    answer = found[0] if found else ""
    if kept in text and erased in text:
        outcome = "both values"
    elif answer == erased:
        outcome = "erased value"
    else:
        outcome = "right" if answer == kept else "other value"
    return {
        "score": int(answer == kept),
        "outcome": outcome,
        "leak": int(erased in text),
        "erased_logprob": _log_prob(memory, asked, erased),
    }


def _log_prob(memory: ContextMemory, asked: _Asked, value: str) -> float:
    """Log-probability, in nats, that the answer goes on with ` value`."""
    ids = memory._codec.encode(f" {value}")
    total = float(asked.log_probs[ids[0]])
    cache = asked.after_question.view()
    scores = memory.backbone.forward(ids[:-1], cache, all_logits=True).double().log_softmax(-1)
    cache.release()
    return round(total + sum(float(scores[i, token]) for i, token in enumerate(ids[1:])), 3)
