"""`contextmem eval span-neighbour`: recitation across an erased chunk, for one or several erasers side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from contextmem import KVEraser
from contextmem.backbone import Backbone
from contextmem.cache import SpanCache
from contextmem.errors import InvalidInput
from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.published import published
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject
from contextmem.retraction.kveraser import closed
from contextmem.training.prose import HELD_OUT, prose_of
from contextmem.training.samples import Erasure, Sample
from contextmem.training.samples.span_neighbour import ANCHORS, SpanNeighbourSource

__all__ = ["run"]

CONTAMINATED, RECOMPUTE = "contaminated", "recompute"


def run(
    folder: Path,
    erasers: Mapping[str, str],
    *,
    model_name: str = "smollm2-135m-instruct",
    dtype: str | None = None,
    text: Sequence[str | Path] = (),
    n_samples: int = 60,
    seed: int = 0,
    command: str = "contextmem eval span-neighbour",
    say: Callable[[str], None] = print,
) -> str:
    """Measure what is missing in `folder`/rows.jsonl and write the report; returns the table.

    Args:
        folder: where rows, metrics and table go; a run resumes from its rows and adds to them.
        erasers: folder or hub id by the label to show.
        text: files or folders of documents; none: the held-out half of the topics of Python's language reference.
        n_samples: documents; each holds one chunk and is asked at every anchor.
    """
    subject = Subject.loaded(model_name, dtype=dtype)
    backbone, layout = Backbone.of(subject.model), subject.layout
    source = SpanNeighbourSource(prose_of(*text, part=None if text else HELD_OUT), n_chunks=1, every_anchor=True)
    loaded = {label: KVEraser.from_pretrained(place) for label, place in erasers.items()}
    if reserved := {CONTAMINATED, RECOMPUTE} & set(erasers):
        raise InvalidInput(f"an eraser cannot be labelled {reserved.pop()!r}: that is a baseline of this evaluation.")
    settings = subject.identity | {"text": [Path(p).name for p in text], "seed": seed}
    log = RowLog(folder / "rows.jsonl", settings)
    for label, eraser in loaded.items():
        if {row["eraser"] for row in log.of(method=label)} - {eraser.fingerprint}:
            raise InvalidInput(f"the rows labelled {label!r} in {folder} are another eraser's. Choose another label.")
    for number in range(n_samples):
        sample = source.sample(layout, random.Random(f"span-neighbour-{seed}-{number}"))
        _measure(backbone, sample, number, loaded, log)
        say(f"{number + 1} of {n_samples}")
    return _report(log, folder, command, seed, subject.described)


def _measure(backbone: Backbone, sample: Sample, number: int, erasers: Mapping[str, KVEraser], log: RowLog) -> None:
    """One row for every method and anchor that `log` lacks."""
    methods = [CONTAMINATED, RECOMPUTE, *erasers]
    missing = [(m, e) for m in methods for e in sample.erasures if not log.has(f"{number}-{e.kind}", m)]
    if not missing:
        return
    contaminated, clean = backbone.new_cache(), backbone.new_cache()
    backbone.prefill(sample.context, contaminated)
    start, stop = sample.erasures[0].start, sample.erasures[0].stop
    backbone.prefill(sample.context[:start] + sample.context[stop:], clean)
    prints = {label: eraser.fingerprint for label, eraser in erasers.items()}
    caches = {CONTAMINATED: contaminated, RECOMPUTE: clean}
    for method, erasure in missing:
        if method in erasers and (method not in caches or erasers[method].config.conditioning == "query"):
            caches[method] = _erased(backbone, erasers[method], contaminated, sample, erasure)
        cache = caches[method]
        scored = _scored(backbone, cache, sample, erasure)
        log.add(
            f"{number}-{erasure.kind}",
            method,
            kind=erasure.kind,
            span=stop - start,
            eraser=prints.get(method),
            **scored,
        )


def _erased(backbone: Backbone, eraser: KVEraser, cache: SpanCache, sample: Sample, erasure: Erasure) -> SpanCache:
    ids = sample.context[erasure.start : erasure.stop]
    (slots,) = eraser.steer(backbone, cache, [(erasure.start, ids)], erasure.question)
    kept = ((0, erasure.start), (erasure.stop, cache.n_slots))
    return closed(backbone, cache, kept, ((erasure.start, erasure.stop),), [slots], eraser.config.slots)


def _scored(backbone: Backbone, cache: SpanCache, sample: Sample, erasure: Erasure) -> dict[str, float | int]:
    """Whether greedy decoding gives the target, its log-probability a token, and that above the chunk's own words."""
    chunk = sample.context[erasure.start : erasure.stop][: len(erasure.answer)]
    target, right = _log_prob(backbone, cache, erasure.question, erasure.answer)
    foreign, _ = _log_prob(backbone, cache, erasure.question, chunk)
    return {"score": int(right), "logprob": round(target, 4), "margin": round(target - foreign, 4)}


def _log_prob(
    backbone: Backbone, cache: SpanCache, question: Sequence[int], answer: Sequence[int]
) -> tuple[float, bool]:
    asked = cache.view()
    logits = backbone.forward([*question, *answer[:-1]], asked, all_logits=True)[-len(answer) :]
    asked.release()
    scores = logits.double().log_softmax(-1)
    right = logits.argmax(-1).tolist() == list(answer)
    return float(scores[torch.arange(len(answer)), torch.tensor(answer)].mean()), right


def _report(log: RowLog, folder: Path, command: str, seed: int, subject: Mapping[str, str]) -> str:
    methods = list(dict.fromkeys(row["method"] for row in log.rows))
    clean = {row["id"] for row in log.of(method=RECOMPUTE) if row["score"]}
    figures: dict[str, Any] = {}
    for method in methods:
        for anchor in ANCHORS:
            rows = [row for row in log.of(method=method, kind=anchor) if row["id"] in clean]
            if rows:
                accuracy, low, high = mean_interval([row["score"] for row in rows])
                figures.setdefault(method, {})[anchor] = {
                    "accuracy": accuracy,
                    "low": low,
                    "high": high,
                    "n": len(rows),
                    "all": mean(row["score"] for row in log.of(method=method, kind=anchor)),
                    "logprob": mean(row["logprob"] for row in rows),
                    "margin": mean(row["margin"] for row in rows),
                }
    lines = [
        "A foreign chunk of 10 to 300 tokens in a document of 320 to 900 is erased; the model then recites 8 tokens after",
        "32 given ones. `before`: the given ones end at the gap, so the target crosses it; `after`: they begin at the gap;",
        "`elsewhere`: anywhere else. Accuracy is over samples that the model gets right without the chunk (n); brackets:",
        "95 % bootstrap intervals. `nats`: log-probability of the target, a token; `margin`: above the chunk's own words.",
        "",
        "| method | " + " | ".join(f"{anchor} | nats | margin" for anchor in ANCHORS) + " |",
        "|---|" + "---|---|---|" * len(ANCHORS),
    ]
    for method, row in figures.items():
        cells = [
            f"{c['accuracy']:.2f} [{c['low']:.2f}, {c['high']:.2f}] n={c['n']} | {c['logprob']:.3f} | {c['margin']:+.2f}"
            if (c := row.get(anchor))
            else " | | "
            for anchor in ANCHORS
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    table: str = published(
        folder,
        "Span-neighbour accuracy",
        lines,
        figures,
        command=command,
        seed=seed,
        subject=subject,
    )
    return table
