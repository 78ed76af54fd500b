"""`contextmem eval kvpress`: needs kvpress, so it runs in the environment that `make test-kvpress` makes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
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
from contextmem.evals.ruler import Case, Material, case_of
from contextmem.evals.ruler.measure import FULL, Probe
from contextmem.evals.ruler.report import order
from contextmem.evals.subject import Subject
from contextmem.eviction.kvzip import KvZip
from contextmem.tiers import n_tokens_held
from contextmem.training.prose import HELD_OUT, prose_of

__all__ = ["OURS", "THEIRS", "run"]

OURS, THEIRS = "contextmem", "kvpress"
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
                if (case := case_of(material, name, size, number, seed)) is not None:
                    _measure(subject, f"{name}-{size}-{number}", {"task": name, "size": size}, case, ratios, log)
            say(f"{size}: {number + 1} of {n}")
    figures = _figures(log)
    table: str = published(
        folder,
        "KVzip here and in kvpress",
        _lines(figures),
        figures,
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
    if not missing or any(log.of(id=sample, method=FULL, score=0.0)):
        return
    memory = subject.memory(eraser=None, restorer=None)
    memory.append(case.context)
    prompt = Probe(memory, case).prompt
    if not log.has(sample, FULL):
        log.add(sample, FULL, **about, **_asked(memory, _whole(memory), prompt, case))
    if any(log.of(id=sample, method=FULL, score=0.0)):
        return
    for ratio, by, label in missing:
        try:
            compacted = _ours(memory, ratio) if by == OURS else _theirs(memory, ratio)
            log.add(sample, label, **about, **_asked(memory, compacted, prompt, case))
        finally:
            _unmasked(memory.model)


def _n_kept(memory: ContextMemory, ratio: float) -> int:
    """Tokens to keep: the template's opening, which both always keep, and that part of the context."""
    n_opening = len(memory._framing.bare_opening)
    return n_opening + round(ratio * (memory.seq_length - n_opening))


def _ours(memory: ContextMemory, ratio: float) -> _Compacted:
    fork = memory.fork()
    started = time.perf_counter()
    fork.set_budget(_n_kept(memory, ratio), reserve=0)
    seconds = time.perf_counter() - started
    return _Compacted(_feeding(fork), fork.nbytes, n_tokens_held(fork._state), seconds)


def _whole(memory: ContextMemory) -> _Compacted:
    """Everything, in a cache of transformers' own."""
    model: Any = memory.model
    cache = DynamicCache()
    with torch.no_grad():
        model.model(input_ids=torch.tensor([memory.token_ids]), past_key_values=cache)
    return _Compacted(_after(memory, cache), _nbytes(cache), memory.seq_length, 0.0)


def _feeding(memory: ContextMemory) -> Callable[[Sequence[int]], torch.Tensor]:
    cache = memory.past_key_values
    return lambda ids: memory.backbone.forward(ids, cache)


def _theirs(memory: ContextMemory, ratio: float) -> _Compacted:
    """Their press over the same ids, in parts as long as ours; their prefill is not counted in the seconds."""
    from kvpress import KVzipPress

    model: Any = memory.model
    ids, cache = torch.tensor([memory.token_ids]), DynamicCache()
    removed = 1 - _n_kept(memory, ratio) / len(memory.token_ids)
    press = KVzipPress(compression_ratio=removed, n_sink=len(memory._framing.bare_opening), chunk_size=KvZip().chunk)
    with torch.no_grad():
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
            started = time.perf_counter()
        seconds = time.perf_counter() - started
    masked = sum(len(layer.self_attn.masked_key_indices[0]) for layer in model.model.layers)
    heads = len(cache.layers) * cache.layers[0].keys.shape[1]
    return _Compacted(_after(memory, cache), _nbytes(cache), len(memory.token_ids) - masked / heads, seconds)


def _after(memory: ContextMemory, cache: DynamicCache) -> Callable[[Sequence[int]], torch.Tensor]:
    model: Any = memory.model
    position = memory.seq_length

    def feed(new: Sequence[int]) -> torch.Tensor:
        nonlocal position
        where = torch.arange(position, position + len(new))[None]
        position += len(new)
        with torch.no_grad():
            output = model(input_ids=torch.tensor([list(new)]), position_ids=where, past_key_values=cache)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    return feed


def _nbytes(cache: DynamicCache) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


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


def _figures(log: RowLog) -> dict[str, Any]:
    """By size and method, over the cases that the full cache does."""
    figures: dict[str, Any] = {}
    for size in sorted({row["size"] for row in log.rows}):
        right = {row["id"] for row in log.of(size=size, method=FULL) if row["score"] > 0}
        of_size = [row for row in log.of(size=size) if row["id"] in right]
        methods = [FULL, *sorted({row["method"] for row in of_size} - {FULL}, key=order)]
        figures[str(size)] = {m: _of_method([row for row in of_size if row["method"] == m]) for m in methods}
    return figures


def _of_method(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "score": mean_interval([row["score"] for row in rows]),
        "held": mean(row["held"] for row in rows),
        "nbytes": mean(row["nbytes"] for row in rows),
        "seconds": median(row["seconds"] for row in rows),
        "token_s": median(row["token_s"] for row in rows),
        "n": len(rows),
    }


def _lines(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"kvpress {version('kvpress')}. Both score by KVzip in parts of {KvZip().chunk} tokens and keep the template's",
        "opening and the same part of the other pairs, by one threshold over layers and heads; cases that the full cache",
        "gets wrong are left out. `MB` is what is held for the context: ours with the spare room for 256 tokens; kvpress",
        "masks pairs and frees none. Decoding: median a token in the same process, and its ratio to transformers' cache",
        "with everything.",
        "",
        "| tokens | method | score | pairs kept, in tokens | MB | score and evict, s | decode, ms a token | ratio | n |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, methods in figures.items():
        for method, row in methods.items():
            cells = [
                "{:.2f} [{:.2f}, {:.2f}]".format(*row["score"]),
                f"{row['held']:,.0f}",
                f"{row['nbytes'] / 1e6:.1f}",
                f"{row['seconds']:.1f}",
                f"{1000 * row['token_s']:.0f}",
                f"{row['token_s'] / methods[FULL]['token_s']:.2f}",
                str(row["n"]),
            ]
            lines.append(f"| {int(size):,} | {method} | {' | '.join(cells)} |")
    return lines
