"""The measurements: ours and plain transformers alternate within one run, so that machine noise meets both."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor

from contextmem import ContextMemory, RestoreKV, UnsupportedEdit
from contextmem.evals.forks import unshared_fork
from contextmem.evals.rows import RowLog
from contextmem.retraction import COMPARED

__all__ = [
    "BUDGET",
    "measure_ask",
    "measure_budget",
    "measure_decode",
    "measure_prefill",
    "measure_retract",
    "text_of_length",
]

PREFIX, SPAN = 256, 100
BUDGET = "decode on a tenth"

Say = Callable[[str], None]


def text_of_length(memory: ContextMemory, n_tokens: int, skip: int = 0) -> str:
    """`n_tokens` tokens of English prose that ships with Python, from character `skip` on."""
    import pydoc_data.topics

    prose = " ".join(" ".join(pydoc_data.topics.topics.values()).split())[skip:]
    text, _ = memory._codec.longest_prefix(prose, memory._codec.encode(prose[: n_tokens * 8]), n_tokens)
    return text


def measure_prefill(model: Any, tokenizer: Any, sizes: Sequence[int], repeats: int, log: RowLog, say: Say) -> None:
    """Seconds of `append` and of one bare forward over the same ids: into an empty context, and over a cached prefix."""
    for size in sizes:
        for n_cached in (0, PREFIX):
            for repeat in range(-1, repeats):  # the first round warms up
                sample = f"prefill-{size}-over-{n_cached}-{repeat}"
                if log.has(sample, "append") and log.has(sample, "bare forward"):
                    continue
                memory = ContextMemory(model, tokenizer)
                if n_cached:
                    memory.append(text_of_length(memory, n_cached - len(memory._framing.bare_opening)))
                before = memory.seq_length
                past = _plain_copy(memory)
                text = text_of_length(
                    memory, size - (0 if n_cached else len(memory._framing.bare_opening)), skip=20_000
                )
                ids = torch.tensor([[*(() if n_cached else memory._framing.bare_opening), *memory._codec.encode(text)]])
                order: list[tuple[str, Callable[[], Any]]] = [
                    ("append", partial(memory.append, text)),
                    ("bare forward", partial(_forward, model, ids, past)),
                ]
                for method, run in order if repeat % 2 else reversed(order):
                    seconds = _timed(run)
                    if repeat >= 0 and not log.has(sample, method):
                        log.add(sample, method, kind=f"prefill over {n_cached}", tokens=size, seconds=seconds)
                assert memory.seq_length - before == size
                say(sample)


def measure_decode(
    model: Any, tokenizer: Any, sizes: Sequence[int], repeats: int, n_new: int, log: RowLog, say: Say
) -> None:
    """Seconds a generated token through `ask` and through `generate` on a `DynamicCache` with the same content."""
    for size in sizes:
        if all(log.has(f"decode-{size}-{r}", m) for r in range(repeats) for m in ("ask", "generate")):
            continue
        memory = ContextMemory(model, tokenizer)
        memory.append(text_of_length(memory, size - memory.seq_length))
        prompt = [*memory.token_ids, *memory._codec.encode("And?"), *memory._framing.answer_open]
        ids = torch.tensor([prompt])
        memory._end_ids = frozenset()  # both sides generate exactly n_new tokens
        for repeat in range(-1, repeats):  # the first round warms up
            sample = f"decode-{size}-{repeat}"
            clocks = {"ask": _Clock(), "generate": _Clock()}
            memory.ask("And?", max_new_tokens=n_new, logits_processor=[clocks["ask"]])
            past = _plain_copy(memory)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                **{_cache_argument(model): past},
                max_new_tokens=n_new,
                min_new_tokens=n_new,
                do_sample=False,
                logits_processor=[clocks["generate"]],
            )
            for method, clock in clocks.items():
                if repeat >= 0 and not log.has(sample, method):
                    log.add(sample, method, kind="decode", tokens=size, seconds=clock.median())
            say(sample)


def measure_retract(model: Any, tokenizer: Any, suffixes: Sequence[int], repeats: int, log: RowLog, say: Say) -> None:
    """Seconds of `retract` by each method: prefix 256, span 100, and a suffix of growing length."""
    for suffix in suffixes:
        if all(log.has(f"retract-{suffix}-{r}", m) for r in range(repeats) for m in COMPARED):
            continue
        memory = ContextMemory(model, tokenizer)
        memory.append(text_of_length(memory, PREFIX))
        span = memory.append(text_of_length(memory, SPAN, skip=50_000))
        memory.append(text_of_length(memory, suffix, skip=100_000))
        for repeat in range(repeats):
            for method in COMPARED:
                sample = f"retract-{suffix}-{repeat}"
                if not log.has(sample, method) and _is_possible(memory, span, method):
                    report = unshared_fork(memory).retract(span, method=method)
                    log.add(sample, method, kind="retract", tokens=suffix, seconds=report.seconds)
            say(f"retract-{suffix}-{repeat}")


def _is_possible(memory: ContextMemory, span: Any, method: str) -> bool:
    try:
        memory.retract(span, method=method, dry_run=True)
    except UnsupportedEdit:  # no eraser for this model, or keys that cannot be moved
        return False
    return True


def measure_budget(
    model: Any, tokenizer: Any, sizes: Sequence[int], repeats: int, n_new: int, log: RowLog, say: Say
) -> None:
    """Seconds a token on the full cache and on a tenth of it; and of a restore pass beside the prefill it follows."""
    restorer = RestoreKV.untrained(model)  # a trained one computes the same amount
    for size in sizes:
        if all(log.has(f"budget-{size}-{r}", m) for r in range(repeats) for m in ("full cache", "compacted")):
            continue
        full = ContextMemory(model, tokenizer, restorer=None, evictor="knorm")
        text = text_of_length(full, size - len(full._framing.bare_opening))
        prefill_s = _timed(partial(full.append, text))
        small = full.fork()
        compact_s = _timed(partial(small.set_budget, size // 10, 0))
        for repeat in range(-1, repeats):  # the first round warms up
            sample = f"budget-{size}-{repeat}"
            for method, memory in (("full cache", full), ("compacted", small)):
                seconds = _decoded(memory, n_new)
                if repeat >= 0 and not log.has(sample, method):
                    log.add(sample, method, kind=BUDGET, tokens=size, seconds=seconds, nbytes=memory.nbytes)
            restore_s = _timed(partial(restorer.slots, full.backbone, full._state.cache))
            if repeat >= 0 and not log.has(sample, "restore pass"):
                log.add(sample, "restore pass", kind="restore", tokens=size, seconds=restore_s, prefill_s=prefill_s)
            say(sample)
        if not log.has(f"budget-{size}", "compact"):
            log.add(f"budget-{size}", "compact", kind="compact", tokens=size, seconds=compact_s)


def _decoded(memory: ContextMemory, n_new: int) -> float:
    """Median seconds of a decoding step after the context."""
    cache, clock = memory.past_key_values, _Clock()
    logits = memory.backbone.prefill(memory._framing.answer_open, cache)
    for _ in range(n_new):
        clock(None, logits)  # type: ignore[arg-type]
        logits = memory.backbone.forward([int(logits.argmax())], cache)
    cache.release()
    return clock.median()


def measure_ask(model: Any, tokenizer: Any, size: int, rounds: int, log: RowLog, say: Say) -> None:
    """Bytes held before and after `rounds` transient answers; seconds and bytes of a fork."""
    if log.has(f"ask-{size}", "ask"):
        return
    memory = ContextMemory(model, tokenizer)
    memory.append(text_of_length(memory, size))
    place, before = memory._state.cache.layers[0].keys.data_ptr(), memory.nbytes
    seconds = _timed(lambda: [memory.ask("And?", max_new_tokens=2) for _ in range(rounds)])
    moved = memory._state.cache.layers[0].keys.data_ptr() != place
    log.add(
        f"ask-{size}",
        "ask",
        kind="ask",
        tokens=size,
        rounds=rounds,
        seconds=seconds,
        bytes_before=before,
        bytes_after=memory.nbytes,
        moved=moved,
    )
    seconds = _timed(memory.fork)
    fork = memory.fork()
    copied = 0 if fork._state.cache.lease.storage is memory._state.cache.lease.storage else fork.nbytes
    log.add(f"fork-{size}", "fork", kind="fork", tokens=size, seconds=seconds, bytes_copied=copied)
    say(f"ask-{size}")


class _Clock(LogitsProcessor):  # type: ignore[misc]
    """Notes when each token is chosen."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.ticks.append(time.perf_counter())
        return scores

    def median(self) -> float:
        """Median seconds between two tokens."""
        gaps = sorted(b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False))
        return gaps[len(gaps) // 2]


def _plain_copy(memory: ContextMemory) -> DynamicCache:
    """What the memory holds, as a cache of transformers' own."""
    past = DynamicCache()
    for index, layer in enumerate(memory.past_key_values.layers):
        if layer.is_initialized:
            past.update(layer.keys.clone(), layer.values.clone(), index)
    return past


def _forward(model: Any, ids: torch.Tensor, past: DynamicCache) -> None:
    with torch.no_grad():
        model(ids, **{_cache_argument(model): past}, use_cache=True, logits_to_keep=1)


def _cache_argument(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
