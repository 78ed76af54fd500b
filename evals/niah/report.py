"""Tables, metrics and plots of the erasing-NIAH rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.environment import environment
from contextmem.evals.niah.latency import LATENCY_METHODS, N_DECODED
from contextmem.evals.niah.measure import METHODS, PROBES
from contextmem.evals.niah.samples import NEEDLES
from contextmem.evals.rows import RowLog

__all__ = ["summary", "write_report"]

_HEADLINE = ("none", "recompute", "kveraser")
_OUTCOMES = ("right", "both values", "erased value", "other value")
Row = dict[str, Any]


def summary(log: RowLog) -> dict[str, Any]:
    """Every figure of the report, by needle, size and method."""
    sizes = sorted({row["size"] for row in log.of(kind="direct")})
    return {
        "exact_match": {
            needle: {
                size: {
                    method: _accuracy(rows)
                    for method in METHODS
                    if (rows := list(log.of(kind="direct", needle=needle, size=size, method=method)))
                }
                for size in sizes
            }
            for needle in NEEDLES
        },
        "headline": {needle: {size: _headline(log, needle, size) for size in sizes} for needle in NEEDLES},
        "outcomes": {
            method: {"n": len(rows), **_shares(rows)}
            for method in METHODS
            if (rows := list(log.of(kind="direct", method=method)))
        },
        "leak": {
            method: _leak(log, "direct", method) for method in METHODS if any(log.of(kind="direct", method=method))
        },
        "seconds": {
            size: {
                method: {part: median(r[part] for r in rows) for part in ("seconds", "edit_s", "query_s", "decode_s")}
                | {"n": len(rows)}
                for method in METHODS
                if (rows := list(log.of(kind="direct", size=size, method=method)))
            }
            for size in sizes
        },
        "derived": {
            method: {**_accuracy(rows), **_leak(log, "derived", method)}
            for method in PROBES
            if (rows := list(log.of(kind="derived", method=method)))
        },
        "latency": _latency(log),
    }


def write_report(
    log: RowLog, folder: Path, command: str, seed: int, subject: Mapping[str, str], kept: float | None = None
) -> str:
    """Write metrics.json, table.md and plot.png into `folder`; returns the table."""
    figures, used = summary(log), {**subject, **environment()}
    record = {"command": command, "seed": seed, "environment": used, **figures}
    (folder / "metrics.json").write_text(json.dumps(record, indent=1))
    noted = folder / "conditions.md"  # by hand: what a reader must know about how the rows were measured
    conditions = noted.read_text().splitlines() if noted.exists() else []
    if kept is not None:
        conditions.append(
            f"Only {kept:.0%} of the context's key-value pairs are held: it was compacted before the edit, edited in the "
            f"full tier, and compacted again. `recompute` is recompute, then compact."
        )
    head = _head(used, command, seed, _threads(log, "direct"), conditions)
    table = "\n".join([*head, *_body(figures)]) + "\n"
    (folder / "table.md").write_text(table)
    _plot(log, figures, folder / "plot.png")
    return table


def _accuracy(rows: list[Row]) -> dict[str, Any]:
    value, low, high = mean_interval([row["score"] for row in rows])
    return {"em": value, "low": low, "high": high, "n": len(rows)}


def _shares(rows: list[Row]) -> dict[str, float]:
    counts = Counter(row["outcome"] for row in rows)
    return {outcome: counts[outcome] / len(rows) for outcome in _OUTCOMES}


def _headline(log: RowLog, needle: str, size: int) -> dict[str, Any]:
    """Samples where the clean prompt is right and the contaminated one wrong, and the rest, with paired differences."""
    by_method = {
        m: {row["id"]: row["score"] for row in log.of(kind="direct", needle=needle, size=size, method=m)}
        for m in _HEADLINE
    }
    ids = sorted(set.intersection(*(set(scores) for scores in by_method.values())))
    telling = [i for i in ids if by_method["recompute"][i] and not by_method["none"][i]]
    rest = [i for i in ids if i not in set(telling)]
    return {"telling": _paired(by_method, telling), "rest": _paired(by_method, rest)}


def _paired(by_method: Mapping[str, Mapping[str, int]], ids: list[str]) -> dict[str, Any]:
    if not ids:
        return {"n": 0}
    difference = mean_interval([by_method["kveraser"][i] - by_method["recompute"][i] for i in ids])
    return {
        "n": len(ids),
        **{m: mean(scores[i] for i in ids) for m, scores in by_method.items()},
        "difference": difference,
    }


def _leak(log: RowLog, kind: str, method: str) -> dict[str, float]:
    """How often the answer holds the erased value, and the value's log-probability above that after recompute."""
    rows = list(log.of(kind=kind, method=method))
    never_saw = {row["id"]: row["erased_logprob"] for row in log.of(kind=kind, method="recompute")}
    above = [row["erased_logprob"] - never_saw[row["id"]] for row in rows if row["id"] in never_saw]
    return {"leak": mean(row["leak"] for row in rows), "nats_above_never_saw": mean(above) if above else float("nan")}


def _latency(log: RowLog) -> dict[str, Any]:
    sizes = sorted({row["size"] for row in log.of(kind="latency")})
    table: dict[str, Any] = {}
    for size in sizes:
        rows = {m: list(log.of(kind="latency", size=size, method=m)) for m in LATENCY_METHODS}
        if not all(rows.values()):
            continue
        middle = {
            m: {p: median(r[p] for r in some) for p in ("seconds", "edit_s", "query_s", "decode_s")}
            for m, some in rows.items()
        }
        fastest = min(middle[m]["seconds"] for m in LATENCY_METHODS[:2])
        table[str(size)] = {
            **middle,
            "n": {m: len(some) for m, some in rows.items()},
            "threads": _threads(log, "latency"),
            "recompute / kveraser": fastest / middle["kveraser"]["seconds"],
            "edit / bare forward": middle["kveraser"]["edit_s"] / middle[LATENCY_METHODS[3]]["edit_s"],
            "traffic_nbytes": rows["kveraser"][0]["traffic_nbytes"],
        }
    return table


def _threads(log: RowLog, kind: str) -> str:
    """Threads that the rows of a kind were measured with."""
    return " or ".join(sorted({str(row["threads"]) for row in log.of(kind=kind)}))


def _head(used: Mapping[str, str], command: str, seed: int, threads: str, conditions: Iterable[str]) -> list[str]:
    return [
        "# Erasing NIAH",
        "",
        f"`{command}`, seed {seed}; " + ", ".join(f"{name} {value}" for name, value in used.items()) + ".",
        "",
        "Two needles with one key and different five-digit values in prose; one is erased, the other must be answered. An",
        "answer is its first integer; the answer's beginning is given. Brackets: 95 % bootstrap intervals; n: samples.",
        "The texts were not in training; the two wordings were among its twelve.",
        f"Seconds in the rows of exact match and in the plot: {threads} thread{'' if threads == '1' else 's'}.",
        "Rows add up over runs; the command is the last one's.",
        *conditions,
    ]


def _body(figures: dict[str, Any]) -> Iterable[str]:
    for needle in NEEDLES:
        table = figures["exact_match"][needle]
        yield from ("", f"## Exact match, {needle} needle erased", "")
        yield from _grid(
            ["method", *(f"{size:,}" for size in table)],
            [[m, *(_cell(table[size].get(m)) for size in table)] for m in figures["outcomes"]],
        )
    yield from (
        "",
        "## Where the erased needle matters",
        "",
        "Telling samples: right without the needle, wrong with it. `difference`: kveraser minus recompute, paired.",
        "",
    )
    yield from _grid(
        [
            "needle",
            "tokens",
            "telling n",
            "kveraser",
            "difference",
            "rest n",
            "none",
            "recompute",
            "kveraser",
            "difference",
        ],
        [
            [needle, f"{size:,}", *_paired_cells(row["telling"], ("kveraser",)), *_paired_cells(row["rest"], _HEADLINE)]
            for needle in NEEDLES
            for size, row in figures["headline"][needle].items()
        ],
    )
    yield from ("", "## What was answered, and what is left of the erased value", "")
    yield from (
        "`leak`: the erased value stands anywhere in the answer (24 tokens at most). `nats`: its log-probability",
        "as the answer, above that in a context that never held it.",
        "",
    )
    yield from _grid(
        ["method", "n", *_OUTCOMES, "leak", "nats"],
        [
            [m, str(row["n"]), *(f"{row[o]:.2f}" for o in _OUTCOMES), *_leak_cells(figures["leak"][m])]
            for m, row in figures["outcomes"].items()
        ],
    )
    if figures["derived"]:
        yield from (
            "",
            "## A later sentence repeats the erased value",
            "",
            "Erasing takes the needle, not what was derived from it; `cascade` takes both.",
            "",
        )
        yield from _grid(
            ["method", "exact match", "leak", "nats"],
            [[m, _cell(row), *_leak_cells(row)] for m, row in figures["derived"].items()],
        )
    if figures["latency"]:
        yield from _latency_lines(figures["latency"])


def _latency_lines(table: dict[str, Any]) -> Iterable[str]:
    threads = next(iter(table.values()))["threads"]
    yield from (
        "",
        "## Seconds after the initial prefill",
        "",
        f"The needle stands in the middle; edit + question + {N_DECODED} answer tokens, medians, {threads} threads.",
        "`recompute` is in chunks; the ratio is against the faster of both. `edit / bare`: against a bare forward of the",
        "span over the same prefix. n: repetitions of `recompute`, of `kveraser`.",
        "",
    )
    columns = [
        "tokens",
        *LATENCY_METHODS[:3],
        "kveraser: edit",
        "question",
        "answer",
        "recompute / kveraser",
        "edit / bare",
        "n",
    ]
    yield from _grid(
        columns,
        [
            [
                f"{int(size):,}",
                *(f"{row[m]['seconds']:.3f}" for m in LATENCY_METHODS[:3]),
                *(f"{row['kveraser'][part]:.3f}" for part in ("edit_s", "query_s", "decode_s")),
                f"{row['recompute / kveraser']:.1f}",
                f"{row['edit / bare forward']:.2f}",
                f"{row['n']['recompute']}, {row['n']['kveraser']}",
            ]
            for size, row in table.items()
        ],
    )
    if {"1024", "8192"} <= table.keys():
        small, large = table["1024"], table["8192"]
        growth = large["kveraser"]["seconds"] / small["kveraser"]["seconds"]
        bound = large["traffic_nbytes"] / small["traffic_nbytes"]
        yield from (
            "",
            f"From 1,024 to 8,192 tokens `kveraser` takes {growth:.2f} times as long; weights and KV that the steps read "
            f"grow {bound:.2f}-fold ({growth / bound:.2f} of that bound).",
        )


def _cell(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['em']:.2f} [{row['low']:.2f}, {row['high']:.2f}] n={row['n']}"


def _paired_cells(row: dict[str, Any], methods: Iterable[str]) -> list[str]:
    if not row["n"]:
        return ["0", *("" for _ in methods), ""]
    value, low, high = row["difference"]
    return [str(row["n"]), *(f"{row[m]:.3f}" for m in methods), f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"]


def _leak_cells(row: dict[str, float]) -> list[str]:
    return [f"{row['leak']:.2f}", f"{row['nats_above_never_saw']:+.1f}"]


def _grid(columns: list[str], rows: list[list[str]]) -> Iterable[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _plot(log: RowLog, figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8.4), layout="constrained")
    colours = {method: f"C{index}" for index, method in enumerate(METHODS)}
    measured = [method for method in METHODS if any(log.of(kind="direct", method=method))]
    for axis, needle in zip(axes[0], NEEDLES, strict=True):
        table = figures["exact_match"][needle]
        for method in measured:
            points = [(size, row[method]) for size, row in table.items() if method in row]
            style: Row = {"linewidth": 2.6, "zorder": 3} if method == "kveraser" else {"linewidth": 1.2}
            style["color"] = colours[method]
            axis.plot(
                [s for s, _ in points], [r["em"] for _, r in points], marker="o", markersize=4, label=method, **style
            )
        _sized(axis, table, f"exact match, {needle} needle erased")
        axis.set(ylim=(-0.03, 1.03))
    if measured:
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, ncols=len(measured), loc="outside lower center")
    left, right = axes[1]
    for method in measured:
        points = [(size, row[method]["seconds"]) for size, row in figures["seconds"].items() if method in row]
        left.plot(*zip(*points, strict=True), marker="o", markersize=4, label=method, color=colours[method])
        rows = sorted(log.of(kind="direct", method=method), key=lambda row: row["suffix"])
        if method in ("recompute", "kveraser", "suffix_repair"):
            edits = [r["edit_s"] for r in rows]
            right.plot([r["suffix"] for r in rows], edits, ".", markersize=4, label=method, color=colours[method])
    _sized(left, figures["seconds"], "edit + question + answer, median seconds")
    has_rows = bool(figures["seconds"])  # a log scale needs something on it
    left.set(yscale="log" if has_rows else "linear")
    right.set(xlabel="tokens after the erased needle", title="edit alone, seconds")
    right.set(xscale="symlog", yscale="log" if has_rows else "linear")
    right.grid(alpha=0.3)
    if measured:
        right.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _sized(axis: Any, sizes: Iterable[int], title: str) -> None:
    axis.set(xscale="log", xlabel="tokens in the context", title=title)
    axis.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
