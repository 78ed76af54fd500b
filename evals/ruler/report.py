"""Tables, metrics and a plot of the RULER-style rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.published import published
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler.base import NEEDLE_FAMILY, TASKS
from contextmem.evals.ruler.controls import CONTROLS
from contextmem.evals.ruler.gains import gain_lines, gains_of
from contextmem.evals.ruler.measure import FULL

__all__ = ["order", "plotted", "summary", "write_report"]

_CAN_DO = 0.5  # mean score of the full cache from which a task says something about eviction
Row = dict[str, Any]


def summary(log: RowLog) -> dict[str, Any]:
    """Every figure of the report, by size."""
    return {str(size): _of_size(log, size) for size in sorted({row["size"] for row in log.rows})}


def _of_size(log: RowLog, size: int) -> dict[str, Any]:
    full = {task: list(log.of(size=size, task=task, method=FULL)) for task in TASKS}
    scores = {task: mean(row["score"] for row in rows) for task, rows in full.items() if rows}
    can_do = [task for task, score in scores.items() if score >= _CAN_DO]
    methods = sorted({row["method"] for row in log.of(size=size)} - {FULL}, key=order)
    return {
        "full": {task: {"score": score, "n": len(full[task])} for task, score in scores.items()},
        "can_do": can_do,
        "full_mass": mean(row["mass"] for task in can_do for row in full[task] if row["score"] > 0) if can_do else 0.0,
        "methods": {method: _of_method(log, size, method, can_do) for method in methods},
        "gains": gains_of(log, size, can_do),
    }


def _of_method(log: RowLog, size: int, method: str, can_do: list[str]) -> dict[str, Any]:
    """Scores are over cases in which the full cache scores; the rest was not measured."""
    rows = [row for row in log.of(size=size, method=method) if row["task"] in can_do]
    base = {row["id"]: row["score"] for row in log.of(size=size, method=FULL)}
    family = [row for row in rows if row["task"] in NEEDLE_FAMILY]
    figures: dict[str, Any] = {
        "tasks": {
            task: {"score": mean(scores), "n": len(scores)}
            for task in can_do
            if (scores := [row["score"] for row in rows if row["task"] == task])
        },
        "n": len(rows),
    }
    if family:
        figures["needles"] = mean_interval([row["score"] for row in family])
        figures["needles_full"] = mean(base[row["id"]] for row in family)
    if rows:
        figures |= {
            "kl": mean(row["kl"] for row in rows),
            "mass": mean(row["mass"] for row in rows),
            "mass_restored": mean(row["mass_restored"] for row in rows),
            "held": median(row["held"] for row in rows),
            "nbytes": median(row["nbytes"] for row in rows),
            "build_s": median(row["score_s"] + row["build_s"] for row in rows),
        }
    return figures


def order(method: str) -> tuple[str, float, str]:
    name, _, ratio = method.partition("@")
    return name.partition("+")[0], float(ratio), name


def write_report(log: RowLog, folder: Path, command: str, seed: int, subject: Mapping[str, str]) -> str:
    """Write metrics.json, table.md and plot.png; returns the table."""
    figures = summary(log)
    lines = [
        "The context is compacted before the question is known; `@` is the part of its key-value pairs that is kept,",
        "restore slots included. Score: share of the expected strings found in the answer. Tables hold tasks that the full",
        f"cache does (mean score of at least {_CAN_DO}), over the cases in which it scores at all, their number in",
        "parentheses; `Full cache` tells its means over all cases. Brackets: 95 % bootstrap intervals. `KL`: from the full",
        "cache, nats, mean over the first 16 tokens of its answer. `Mass`: attention of these tokens on the context,",
        "without the template's opening, restore slots included (and on these alone), mean over layers and heads. `MB`:",
        "what is held, spare room included.",
    ]
    for size, one in figures.items():
        lines += [
            "",
            f"## {int(size):,} tokens",
            "",
            *_full_table(one),
            "",
            *gain_lines(one["gains"]),
            "",
            *_table(one),
        ]
    table: str = published(
        folder, "RULER-style tasks on a compacted memory", lines, figures, command=command, seed=seed, subject=subject
    )
    _plot(figures, folder / "plot.png")
    return table


def _full_table(one: dict[str, Any]) -> list[str]:
    cells = [f"{task} {row['score']:.2f} (n={row['n']})" for task, row in one["full"].items()]
    left_out = [task for task in one["full"] if task not in one["can_do"]]
    return [
        "Full cache: " + ", ".join(cells) + ".",
        f"Attention mass of the full cache's answers on the context: {one['full_mass']:.2f}.",
        *([f"Left out, because the full cache cannot do them: {', '.join(left_out)}."] if left_out else []),
    ]


def _table(one: dict[str, Any]) -> list[str]:
    tasks = one["can_do"]
    lines = [
        "| method | needles | " + " | ".join(tasks) + " | KL | mass | tokens held | MB | score + build, s | n |",
        "|---|---|" + "---|" * (len(tasks) + 6),
    ]
    for method, row in one["methods"].items():
        if not row["n"]:
            continue
        needles = "{:.2f} [{:.2f}, {:.2f}]".format(*row["needles"]) if "needles" in row else ""
        cells = ["{score:.2f} ({n})".format(**row["tasks"][task]) if task in row["tasks"] else "" for task in tasks]
        lines.append(
            f"| {method} | {needles} | {' | '.join(cells)} | {row['kl']:.3f} | {_mass(row)} | {row['held']:,.0f} | "
            f"{row['nbytes'] / 1e6:.1f} | {row['build_s']:.2f} | {row['n']} |"
        )
    return lines


def _mass(row: Row) -> str:
    return f"{row['mass']:.2f}" + (f" ({row['mass_restored']:.2f})" if row["mass_restored"] else "")


def _plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = {size: plotted(one["methods"]) for size, one in figures.items()}
    evictors = sorted({name.partition("+")[0] for lines in shown.values() for name in lines})
    colours = {name: f"C{index % 10}" for index, name in enumerate(evictors)}
    figure, axes = plt.subplots(
        1, len(figures), figsize=(5.2 * len(figures) + 2, 4.2), layout="constrained", squeeze=False
    )
    for axis, (size, lines) in zip(axes[0], shown.items(), strict=True):
        for name, points in lines.items():
            style, colour = "-" if "+" in name else "--", colours[name.partition("+")[0]]
            axis.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=colour)
        axis.set(title=f"{int(size):,} tokens", xlabel="part of the context that is kept", ylabel="score, needle tasks")
        ratios = sorted({ratio for points in lines.values() for ratio, _ in points})
        axis.set(xscale="log", ylim=(-0.02, 1.02))
        axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles = [plt.Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    handles += [
        plt.Line2D([], [], color="black", linestyle=style, label=label)
        for style, label in (("--", "alone"), ("-", "with restore slots"))
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, handlelength=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plotted(methods: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Points (ratio, score) by method, without the controls, which the tables tell."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for method, row in methods.items():
        name, _, ratio = method.partition("@")
        if "needles" in row and name.partition("+")[2] not in CONTROLS:
            lines.setdefault(name, []).append((float(ratio), row["needles"][0]))
    return {name: sorted(points) for name, points in sorted(lines.items())}
