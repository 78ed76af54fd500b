"""Latency after the initial prefill, at the mean place of a needle: edit + question + answer, by method and size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from contextmem import ContextMemory
from contextmem.evals.forks import unshared_fork
from contextmem.evals.niah.samples import Haystack, filled, haystack_of
from contextmem.evals.rows import RowLog
from contextmem.training.layout import Layout
from contextmem.training.prose import Prose

__all__ = ["LATENCY_METHODS", "N_DECODED", "measure_latency"]

LATENCY_METHODS = ("recompute", "recompute, one pass", "kveraser", "bare forward of the span")
N_DECODED = 8  # tokens of an answer


def measure_latency(
    new_memory: Callable[..., ContextMemory],
    layout: Layout,
    prose: Prose,
    sizes: Sequence[int],
    repeats: int,
    seed: int,
    log: RowLog,
    say: Callable[[str], None],
) -> None:
    """Rows of kind "latency": the needle in the middle is erased, and `N_DECODED` tokens are answered."""
    for size in sizes:
        if all(log.has(f"latency-{size}-{r}", m) for r in range(repeats) for m in LATENCY_METHODS):
            continue
        sample = haystack_of(layout, prose, size, 0, seed)
        memory = new_memory()
        middle = _middled(sample)
        segments = filled(memory, middle)
        span = segments[middle.places[0]]
        for repeat in range(-1, repeats):  # the first round warms up
            for method in LATENCY_METHODS:
                if repeat < 0 and method.startswith("recompute"):
                    continue
                row = _once(memory, middle, span, method)
                if repeat >= 0 and not log.has(f"latency-{size}-{repeat}", method):
                    log.add(f"latency-{size}-{repeat}", method, kind="latency", size=size, **row)
            say(f"latency-{size}-{repeat}")


def _middled(sample: Haystack) -> Haystack:
    """The same text with the first needle in the middle."""
    rest = [text for index, text in enumerate(sample.texts) if index != sample.places[0]]
    words = " ".join(rest).split(" ")
    half = len(words) // 2
    texts = (" ".join(words[:half]) + " ", sample.texts[sample.places[0]], " ".join(words[half:]))
    return Haystack(sample.id, sample.size, texts, sample.needles, (1, 1))


def _once(memory: ContextMemory, sample: Haystack, span: Any, method: str) -> dict[str, Any]:
    edited = unshared_fork(memory)
    n_slots = edited.seq_length
    edited.chunk_size = n_slots if method.endswith("one pass") else edited.chunk_size
    started = time.perf_counter()
    if method.startswith("bare"):
        cache = edited._state.cache
        edited.backbone.prefill(span.token_ids, cache.over(span.start, span.stop))
    else:
        edited.retract(span.id, method=method.partition(",")[0])
    edit_s = time.perf_counter() - started
    backbone, prompt, cache = edited.backbone, sample.prompt(edited), edited.past_key_values
    started = time.perf_counter()
    logits = backbone.prefill(prompt, cache)
    query_s = time.perf_counter() - started
    started = time.perf_counter()
    for _ in range(N_DECODED - 1):
        logits = backbone.forward([int(logits.argmax())], cache)
    decode_s = time.perf_counter() - started
    slot, weights = cache.slot_nbytes, sum(p.numel() * p.element_size() for p in backbone.core.parameters())
    erased = method == "kveraser"
    kv = n_slots * N_DECODED + len(prompt) + (span.stop if erased else 0)  # slots read, question and steps
    return {
        "seconds": edit_s + query_s + decode_s,
        "edit_s": edit_s,
        "query_s": query_s,
        "decode_s": decode_s,
        "suffix": n_slots - span.stop,
        "span": span.n_tokens,
        "threads": torch.get_num_threads(),
        "traffic_nbytes": (N_DECODED + erased) * weights + kv * slot,
    }
