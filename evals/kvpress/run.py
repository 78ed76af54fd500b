"""`contextmem eval kvpress`: needs kvpress, so it runs in the environment that `make test-kvpress` makes."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import DynamicCache

from contextmem import ContextMemory
from contextmem.errors import InvalidInput
from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.published import published
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler import TASKS, Case, Material
from contextmem.evals.subject import Subject
from contextmem.tiers import n_tokens_held
from contextmem.training.prose import HELD_OUT, prose_of

__all__ = ["OURS", "THEIRS", "run"]

OURS, THEIRS = "contextmem", "kvpress"
_ROOM = 120  # tokens kept for the template, the question and the answer
_N_TIMED = 16  # tokens that are decoded for the speed, whatever is answered


@dataclass(frozen=True)
class _Compacted:
    """A compacted context, and how to go on from it.

    Attributes:
        feed: takes ids and gives the logits after them, (vocab,); what is fed stays in the cache.
        nbytes: of keys and values.
        held: pairs that can be attended to, in tokens.
        seconds: for scoring and eviction.
    """

    feed: Callable[[Sequence[int]], torch.Tensor]
    nbytes: int
    held: float
    seconds: float


def run(
    folder: Path,
    *,
    model_name: str = "smollm2-135m-instruct",
    dtype: str | None = None,
    tasks: Sequence[str] = ("niah_single_2", "niah_multikey_1"),
    ratios: Sequence[float] = (0.1, 0.2),
    samples: Mapping[int, int] | None = None,
    seed: int = 0,
    command: str = "contextmem eval kvpress",
    say: Callable[[str], None] = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics and table go; a run resumes from the rows it finds there and adds to them.
        tasks: of the RULER-style evaluation.
        ratios: parts of the context that are kept; kvpress calls one minus this the compression ratio.
        samples: cases a task by size in tokens; default: 10 at 1,024.

    Raises:
        InvalidInput: kvpress is not installed.
    """
    try:
        import kvpress  # noqa: F401  patches the attention functions of this process
    except ImportError:
        raise InvalidInput("kvpress is not installed here: `make test-kvpress` makes an environment with it.") from None
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    subject = Subject.loaded(model_name, dtype=dtype)
    material = Material(subject.layout, prose_of(part=HELD_OUT))
    log = RowLog(folder / "rows.jsonl", subject.identity | {"seed": seed})
    for size, n in (samples or {1024: 10}).items():
        for number in range(n):
            for name in tasks:
                case = TASKS[name](material, random.Random(f"{name}-{seed}-{size}-{number}"), size - _ROOM)
                if case is not None:
                    _measure(subject, f"{name}-{size}-{number}", {"task": name, "size": size}, case, ratios, log)
            say(f"{size}: {number + 1} of {n}")
    table: str = published(
        folder,
        "KVzip here and in kvpress",
        _lines(log),
        {},
        command=command,
        seed=seed,
        subject=subject.described,
    )
    return table


def _measure(
    subject: Subject, sample: str, about: Mapping[str, Any], case: Case, ratios: Sequence[float], log: RowLog
) -> None:
    """A row for either library at every ratio that `log` lacks; the full cache decides whether a case tells anything."""
    labels = [(ratio, by, f"{by}@{ratio:g}") for ratio in ratios for by in (OURS, THEIRS)]
    missing = [label for label in labels if not log.has(sample, label[2])]
    if not missing or any(log.of(id=sample, method="full cache", score=0.0)):
        return
    memory = subject.memory(eraser=None, restorer=None)
    memory.append(case.context)
    encode = memory._codec.encode
    prompt = (*encode(case.question), *memory._framing.answer_open, *encode(case.prefix))
    if not log.has(sample, "full cache"):
        whole = _Compacted(_feeding(memory), memory.nbytes, memory.seq_length, 0.0)
        log.add(sample, "full cache", **about, **_asked(memory, whole, prompt, case))
    if any(log.of(id=sample, method="full cache", score=0.0)):
        return
    for ratio, by, label in missing:
        compacted = _ours(memory, ratio) if by == OURS else _theirs(memory, ratio)
        log.add(sample, label, **about, **_asked(memory, compacted, prompt, case))
        _unmasked(memory.model)


def _ours(memory: ContextMemory, ratio: float) -> _Compacted:
    fork = memory.fork()
    started = time.perf_counter()
    fork.set_budget(round(ratio * memory.seq_length), reserve=0)
    seconds = time.perf_counter() - started
    return _Compacted(_feeding(fork), fork.nbytes, n_tokens_held(fork._state), seconds)


def _feeding(memory: ContextMemory) -> Callable[[Sequence[int]], torch.Tensor]:
    cache = memory.past_key_values
    return lambda ids: memory.backbone.forward(ids, cache)


def _theirs(memory: ContextMemory, ratio: float) -> _Compacted:
    """Their press over the same ids; their prefill is not counted in the seconds."""
    from kvpress import KVzipPress

    model: Any = memory.model
    ids, cache = torch.tensor([memory.token_ids]), DynamicCache()
    with torch.no_grad():
        with KVzipPress(compression_ratio=1 - ratio)(model):
            model.model(input_ids=ids, past_key_values=cache)
            started = time.perf_counter()
        seconds = time.perf_counter() - started
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    masked = sum(len(layer.self_attn.masked_key_indices[0]) for layer in model.model.layers)
    heads = len(cache.layers) * cache.layers[0].keys.shape[1]
    position = len(memory.token_ids)

    def feed(new: Sequence[int]) -> torch.Tensor:
        nonlocal position
        where = torch.arange(position, position + len(new))[None]
        position += len(new)
        with torch.no_grad():
            output = model(input_ids=torch.tensor([list(new)]), position_ids=where, past_key_values=cache)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return _Compacted(feed, nbytes, len(memory.token_ids) - masked / heads, seconds)


def _unmasked(model: Any) -> None:
    """Forget what kvpress keeps on the model's layers; it would mask slots of the next cache."""
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None


def _asked(memory: ContextMemory, compacted: _Compacted, prompt: Sequence[int], case: Case) -> dict[str, Any]:
    """Greedy decoding to the end of the turn; further tokens only for the speed."""
    ids: list[int] = []
    is_over, times = False, list[float]()
    logits = compacted.feed(prompt)
    while (not is_over and len(ids) < case.longest) or len(times) < _N_TIMED:
        token = int(logits.argmax())
        is_over = is_over or token in memory._end_ids or len(ids) >= case.longest
        if not is_over:
            ids.append(token)
        started = time.perf_counter()
        logits = compacted.feed([token])
        times.append(time.perf_counter() - started)
    return {
        "score": case.score(memory._codec.decode(ids)),
        "seconds": compacted.seconds,
        "token_s": median(times),
        "nbytes": compacted.nbytes,
        "held": compacted.held,
    }


def _lines(log: RowLog) -> list[str]:
    lines = [
        "Both score by KVzip and keep the same part of the pairs by one threshold over layers and heads; cases that the",
        "full cache gets wrong are left out. `MB` is what is held for the context: kvpress masks pairs and frees none.",
        "Decoding: median seconds a token in the same process, and their ratio to the full cache's.",
        "",
        "| tokens | method | score | pairs kept, in tokens | MB | score and evict, s | decode, ms a token | ratio | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sorted({row["size"] for row in log.rows}):
        right = {row["id"] for row in log.of(size=size, method="full cache") if row["score"] > 0}
        full = median(row["token_s"] for row in log.of(size=size, method="full cache"))
        for method in sorted({row["method"] for row in log.of(size=size)}, key=lambda name: (name[-3:], name)):
            rows = [row for row in log.of(size=size, method=method) if row["id"] in right]
            if rows:
                lines.append(f"| {size:,} | {method} | {' | '.join(_cells(rows, full))} |")
    return lines


def _cells(rows: Sequence[Mapping[str, Any]], full: float) -> list[str]:
    token_s = median(row["token_s"] for row in rows)
    return [
        "{:.2f} [{:.2f}, {:.2f}]".format(*mean_interval([row["score"] for row in rows])),
        f"{mean(row['held'] for row in rows):,.0f}",
        f"{mean(row['nbytes'] for row in rows) / 1e6:.1f}",
        f"{median(row['seconds'] for row in rows):.1f}",
        f"{1000 * token_s:.0f}",
        f"{token_s / full:.2f}",
        str(len(rows)),
    ]
