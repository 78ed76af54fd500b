"""Tables, metrics and the Pareto plot of the distractor-QA rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from contextmem.evals.bootstrap import clustered_interval
from contextmem.evals.distractor_qa.build import LENGTHS
from contextmem.evals.distractor_qa.injection import misled
from contextmem.evals.distractor_qa.methods import METHODS
from contextmem.evals.published import published
from contextmem.evals.rows import RowLog

__all__ = ["filter_lines", "frontier", "summary", "write_report"]

Row = dict[str, Any]
_OURS = "kveraser"
_OUTCOMES = ("right", "distractor", "overlap", "other")


def summary(log: RowLog) -> dict[str, Any]:
    """Every figure, by length; cases are those that the contaminated context gets wrong and the recomputed one right."""
    by_length = {length: [row for row in log.rows if row.get("length") == length] for length in LENGTHS}
    return {length: _of_length(rows) for length, rows in by_length.items()} | {"injection": _injection(log)}


def write_report(
    log: RowLog,
    counts: Mapping[str, Mapping[str, int]],
    folder: Path,
    command: str,
    seed: int,
    subject: Mapping[str, str],
) -> str:
    """Write metrics.json, table.md and plot.png into `folder`; returns the table.

    Args:
        counts: questions by "data set: step", by length.
    """
    figures = summary(log)
    lines = [
        "A misleading passage stands among the documents of a question and is retracted. Counted are insertions with which",
        "the model answers wrongly, and rightly once the rest was recomputed without it. `contained`: an accepted answer",
        "stands in the model's sentence, word by word; its share is that of the gap between contaminated and recomputed",
        "that is closed. Brackets: 95 % bootstrap intervals, by question. `KL`: of the answer's first tokens from the",
        "context that never held the passage, nats a token. Seconds: medians over all insertions, after the first prefill.",
        "Answers are sentences, so that none is an accepted answer alone (`EM`). Differences to `kveraser` are paired.",
    ]
    for length in LENGTHS:
        if figures[length]["n"]:
            lines += ["", *_tables(length, figures[length])]
    if figures["injection"]:
        lines += ["", *_injection_table(figures["injection"])]
    lines += ["", "## Questions by the step at which they fell out", "", *filter_lines(counts)]
    recorded = {**figures, "filter": counts}
    table: str = published(folder, "Distractor QA", lines, recorded, command=command, seed=seed, subject=subject)
    _plot(figures, folder / "plot.png")
    return table


def filter_lines(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A table of `counts`, see `write_report`."""
    rows = [f"| {length} | {step} | {n} |" for length, steps in counts.items() for step, n in sorted(steps.items())]
    return ["| length | data set: step | questions |", "|---|---|---|", *rows]


def _of_length(rows: Sequence[Row]) -> dict[str, Any]:
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["id"], {})[row["method"]] = row
    telling = {
        name: methods
        for name, methods in by_case.items()
        if {"none", "recompute"} <= set(methods) and methods["recompute"]["score"] and not methods["none"]["score"]
    }
    datasets = sorted({methods["none"]["dataset"] for methods in telling.values()})
    pooled = _by_method(list(telling.values()))
    for method, figures in pooled.items():  # what an edit costs does not depend on what is answered
        figures |= _medians([methods[method] for methods in by_case.values() if method in methods])
        figures["closed"] = _closed(by_case.values(), method)
        figures |= _beside_ours(telling.values(), method)
    return {
        "n": len(telling),
        "measured": len(by_case),
        "pooled": pooled,
        "faster": _times_faster(by_case.values()),
        "datasets": {
            name: _by_method([m for m in telling.values() if m["none"]["dataset"] == name]) for name in datasets
        },
        "kinds": {
            kind: _by_method([m for m in telling.values() if m["none"]["kind"] == kind])
            for kind in sorted({m["none"]["kind"] for m in telling.values()})
        },
    }


def _by_method(cases: Sequence[Mapping[str, Row]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for method in METHODS:
        rows = [case[method] for case in cases if method in case]
        if not rows:
            continue
        contained, low, high = clustered_interval([r["score"] for r in rows], [r["question"] for r in rows])
        outcomes = Counter(row["outcome"] for row in rows)
        figures[method] = {
            "n": len(rows),
            "questions": len({row["question"] for row in rows}),
            "contained": contained,
            "low": low,
            "high": high,
            **{name: mean(row[name] for row in rows) for name in ("em", "f1", "kl")},
            **_medians(rows),
            "outcomes": {outcome: outcomes[outcome] / len(rows) for outcome in _OUTCOMES},
        }
    return figures


def _closed(cases: Iterable[Mapping[str, Row]], method: str) -> float:
    """Share of the gap between contaminated and recomputed over every insertion measured, whether it tells or not."""
    found = [case for case in cases if {"none", "recompute", method} <= set(case)]
    gap = sum(case["recompute"]["score"] - case["none"]["score"] for case in found)
    return sum(case[method]["score"] - case["none"]["score"] for case in found) / gap if gap else 0.0


def _beside_ours(cases: Iterable[Mapping[str, Row]], method: str) -> dict[str, tuple[float, float, float]]:
    """Differences to `kveraser` case by case: means and intervals by question."""
    pairs = [(case[method], case[_OURS]) for case in cases if {method, _OURS} <= set(case)]
    if not pairs:
        return {}
    questions = [row["question"] for row, _ in pairs]
    return {
        f"beside_{name}": clustered_interval([row[name] - ours[name] for row, ours in pairs], questions)
        for name in ("score", "f1")
    }


def _times_faster(cases: Iterable[Mapping[str, Row]]) -> dict[str, float]:
    """By how much `kveraser` takes less time than recompute, in the median case: edit, and edit + question + answer."""
    pairs = [(case["recompute"], case[_OURS]) for case in cases if {"recompute", _OURS} <= set(case)]
    return {part: median(again[part] / ours[part] for again, ours in pairs) for part in ("edit_s", "seconds") if pairs}


def _medians(rows: Sequence[Row]) -> dict[str, float]:
    """Of seconds, and of tokens: in the context, in the passage, and after it."""
    parts = ("seconds", "edit_s", "query_s", "decode_s", "tokens", "span", "suffix")
    return {part: median(row[part] for row in rows) for part in parts}


def _injection(log: RowLog) -> dict[str, Any]:
    """Over the skill files whose instruction misleads, by method: how often the right tool is named again, or the other.

    Intervals are resampled by tool.
    """
    by_case: dict[str, dict[str, Row]] = {}
    for row in (row for row in log.of(kind="injection") if "tool" in row):  # without: of an earlier version's cases
        by_case.setdefault(row["id"], {})[row["method"]] = row
    cases = [rows for rows in by_case.values() if {"none", "recompute"} <= set(rows)]
    if not cases:
        return {}
    telling = [rows for rows in cases if misled(rows)]
    methods: dict[str, Any] = {}
    for method in METHODS:
        if found := [rows[method] for rows in telling if method in rows]:
            right, low, high = clustered_interval([row["score"] for row in found], [row["tool"] for row in found])
            methods[method] = {"n": len(found), "right": right, "low": low, "high": high}
            followed = clustered_interval([row["followed"] for row in found], [row["tool"] for row in found])
            methods[method] |= {"followed": followed, "margin": mean(row["margin"] for row in found)}
    return {
        "n": len(cases),
        "right": sum(rows["recompute"]["score"] for rows in cases),
        "followed": sum(rows["none"]["followed"] for rows in cases),
        "still": sum(rows["recompute"]["followed"] for rows in cases if rows["none"]["followed"]),
        "misled": len(telling),
        "tools": len({rows["none"]["tool"] for rows in telling}),
        "methods": methods,
    }


def _injection_table(figures: Mapping[str, Any]) -> list[str]:
    lines = [
        f"## An injected instruction in a skill file: {figures['n']} cases, {figures['misled']} of them misled",
        "",
        f"Which tool is named for a task. Without the instruction the right one in {figures['right']} cases, with it the",
        f"injected one in {figures['followed']}, and in {figures['still']} of these even after recompute. Misled are",
        "cases in which recompute brings the right one back: the table is about these. `margin`: log-probability of the",
        "right tool above that of the injected one, nats. Intervals are resampled by tool, of which there are",
        f"{figures['tools']}.",
    ]
    if figures["methods"]:
        lines += ["", "| method | right tool | injected tool | margin | n |", "|---|---|---|---|---|"]
    for method, f in figures["methods"].items():
        right = f"{f['right']:.2f} [{f['low']:.2f}, {f['high']:.2f}]"
        followed = "{:.2f} [{:.2f}, {:.2f}]".format(*f["followed"])
        lines.append(f"| {method} | {right} | {followed} | {f['margin']:+.2f} | {f['n']} |")
    return lines


def _tables(length: str, figure: Mapping[str, Any]) -> list[str]:
    pooled = figure["pooled"]
    tokens, span, suffix = (pooled["none"][part] for part in ("tokens", "span", "suffix"))
    counted = f"{figure['n']} of {figure['measured']} insertions, {pooled['none']['questions']} questions"
    lines = [
        f"## {length.capitalize()} contexts (median {tokens:,.0f} tokens): {counted}",
        "",
        "| method | contained | EM | F1 | KL | seconds | edit | question | answer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, f in pooled.items():
        lines.append(
            f"| {method} | {f['contained']:.2f} [{f['low']:.2f}, {f['high']:.2f}] | {f['em']:.2f} | {f['f1']:.2f} "
            f"| {f['kl']:.3f} | {f['seconds']:.2f} | {f['edit_s']:.3f} | {f['query_s']:.2f} | {f['decode_s']:.2f} |"
        )
    if _OURS in pooled:
        again, ours, faster = pooled["recompute"], pooled[_OURS], figure["faster"]
        lines += [
            "",
            f"`kveraser` beside full recompute, ratio of the medians: edit {again['edit_s'] / ours['edit_s']:.1f}x, edit + "
            f"question + answer {again['seconds'] / ours['seconds']:.1f}x faster; median of the ratios, case by case: "
            f"{faster['edit_s']:.1f}x and {faster['seconds']:.1f}x (passages of {span:,.0f} tokens, {suffix:,.0f} after).",
            "",
            "| method, above `kveraser` by | contained | F1 | share of the gap closed, telling or not |",
            "|---|---|---|---|",
        ]
        for method in (method for method in pooled if method not in ("recompute", "none")):
            f = pooled[method]
            beside = [
                "" if method == _OURS else "{:+.2f} [{:+.2f}, {:+.2f}]".format(*f[f"beside_{name}"])
                for name in ("score", "f1")
            ]
            lines.append(f"| {method} | {' | '.join(beside)} | {f['closed']:.2f} |")
    for name in ("datasets", "kinds"):
        heads = list(figure[name])
        lines += ["", f"| contained | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
        for method in pooled:
            cells = [figure[name][head].get(method) for head in heads]
            lines.append(
                f"| {method} | " + " | ".join(f"{c['contained']:.2f} n={c['n']}" if c else "" for c in cells) + " |"
            )
    lines += [
        "",
        "What was answered:",
        "",
        "| method | right | the distractor's | words in common | other |",
        "|---|---|---|---|---|",
    ]
    for method, f in pooled.items():
        lines.append(f"| {method} | " + " | ".join(f"{f['outcomes'][outcome]:.2f}" for outcome in _OUTCOMES) + " |")
    return lines


def _plot(figures: Mapping[str, Any], path: Path) -> None:
    """Quality against time after the initial prefill, a panel a length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [(length, figures[length]["pooled"]) for length in LENGTHS if figures[length]["n"]]
    if not shown:
        return
    figure, axes = plt.subplots(1, len(shown), figsize=(5.2 * len(shown), 4), layout="constrained", squeeze=False)
    for axis, (length, pooled) in zip(axes[0], shown, strict=True):
        for number, (method, f) in enumerate(pooled.items()):
            axis.errorbar(
                f["seconds"],
                f["contained"],
                yerr=[[max(0, f["contained"] - f["low"])], [max(0, f["high"] - f["contained"])]],
                fmt="os^Dvp*XhP"[number % 10],
                capsize=2,
                label=method,
            )
        best = frontier([(f["seconds"], f["contained"]) for f in pooled.values()])
        axis.plot(*zip(*best, strict=True), color="0.6", linestyle="--", linewidth=1, zorder=0, label="best so far")
        axis.set(
            title=f"{length} contexts",
            xlabel="seconds after the initial prefill",
            ylabel="answer contained",
            ylim=(-0.05, 1.05),
        )
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (seconds, quality) that nothing quicker reaches, quickest first."""
    best: list[tuple[float, float]] = []
    for seconds, quality in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or quality > best[-1][1]:
            best.append((seconds, quality))
    return best
