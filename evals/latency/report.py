"""Table and plot of the latency rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from contextmem.evals.environment import environment
from contextmem.evals.latency.measure import BUDGET, PREFIX
from contextmem.evals.rows import RowLog
from contextmem.retraction import COMPARED

__all__ = ["summary", "write_report"]

PAIRS = (  # kind of row, ours, theirs, unit
    ("prefill over 0", "append", "bare forward", "s"),
    (f"prefill over {PREFIX}", "append", "bare forward", "s"),
    ("decode", "ask", "generate", "ms a token"),
    (BUDGET, "compacted", "full cache", "ms a token"),
)


def summary(log: RowLog) -> dict[str, Any]:
    """Medians and ratios of every measurement, with sample counts."""
    result: dict[str, Any] = {kind: {} for kind, *_ in PAIRS} | {"retract": {}}
    for kind, ours, theirs, _ in PAIRS:
        for tokens in _sizes(log, kind):
            mine, other = _seconds(log, kind, ours, tokens), _seconds(log, kind, theirs, tokens)
            ratio = median(other) / median(mine)
            result[kind][tokens] = {ours: median(mine), theirs: median(other), "ratio": ratio, "n": len(mine)}
    for tokens in _sizes(log, "retract"):
        times = {method: _seconds(log, "retract", method, tokens) for method in COMPARED}
        result["retract"][tokens] = {m: {"seconds": median(t), "n": len(t)} for m, t in times.items() if t}
    result["restore"] = {
        tokens: median(row["seconds"] / row["prefill_s"] for row in log.of(kind="restore", tokens=tokens))
        for tokens in _sizes(log, "restore")
    }
    result["ask"] = list(log.of(kind="ask"))
    result["fork"] = list(log.of(kind="fork"))
    return result


def write_report(log: RowLog, folder: Path, command: str, seed: int, subject: Mapping[str, str]) -> str:
    """Write metrics.json, table.md and plot.png into `folder`; returns the table."""
    figures = summary(log)
    used = {**subject, **environment()}
    (folder / "metrics.json").write_text(
        json.dumps({"command": command, "seed": seed, "environment": used, **figures}, indent=2)
    )
    table = _table(figures, used, command, seed)
    (folder / "table.md").write_text(table)
    _plot(figures, folder / "plot.png")
    return table


def _table(figures: dict[str, Any], used: dict[str, str], command: str, seed: int) -> str:
    lines = [
        "# Latency",
        "",
        f"`{command}`, seed {seed}, {torch.get_num_threads()} threads; "
        + ", ".join(f"{name} {value}" for name, value in used.items())
        + ".",
        "Medians; n = repetitions. Ratios above 1 mean that contextmem is faster. Both sides ran alternately in one run.",
        "`decode on a tenth`: a memory compacted to a tenth of its tokens, against the same memory before.",
        "",
        "| what | tokens | contextmem | transformers | ratio | n |",
        "|---|---|---|---|---|---|",
    ]
    for kind, ours, theirs, unit in PAIRS:
        scale = 1 if unit == "s" else 1000
        for tokens, row in figures[kind].items():
            lines.append(
                f"| {kind}: `{ours}` against {theirs} | {tokens:,} | {row[ours] * scale:.2f} {unit} | "
                f"{row[theirs] * scale:.2f} {unit} | {row['ratio']:.2f} | {row['n']} |"
            )
    lines += [
        "",
        "Seconds of `retract` by method; prefix 256 tokens, span 100 tokens, n repetitions each:",
        "",
        "| suffix tokens | " + " | ".join(COMPARED) + " | n |",
        "|---|" + "---|" * (len(COMPARED) + 1),
    ]
    for tokens, row in figures["retract"].items():
        cells = " | ".join(f"{row[method]['seconds']:.3f}" if method in row else "" for method in COMPARED)
        lines.append(f"| {tokens:,} | {cells} | {row['recompute']['n']} |")
    lines += ["", "`crop` (the span is the tail) cuts without computing or copying anything."]
    for tokens, share in figures["restore"].items():
        lines.append(f"A restore pass of 8 slots over {tokens:,} tokens costs {share:.2%} of their prefill.")
    for row in figures["ask"]:
        same = "the buffers did not move" if not row["moved"] else "the buffers moved"
        lines.append(
            f"{row['rounds']} x `ask(keep=False)` over {row['tokens']:,} tokens: {row['bytes_before']:,} bytes held before, "
            f"{row['bytes_after']:,} after; {same}."
        )
    for row in figures["fork"]:
        lines.append(
            f"`fork` of {row['tokens']:,} tokens: {row['bytes_copied']} bytes copied, {row['seconds'] * 1e3:.2f} ms."
        )
    return "\n".join(lines) + "\n"


def _plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes = list(figures["retract"])
    for method in COMPARED:
        known = [s for s in sizes if method in figures["retract"][s]]
        left.plot(known, [figures["retract"][s][method]["seconds"] for s in known], marker="o", label=method)
    left.set(xscale="log", yscale="log", xlabel="tokens after the retracted span", ylabel="seconds", title="retract")
    left.set_xticks(sizes, [f"{s:,}" for s in sizes])
    left.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    sizes = list(figures["decode"])
    for method, label in (("ask", "contextmem ask"), ("generate", "transformers generate, DynamicCache")):
        right.plot(sizes, [figures["decode"][s][method] * 1e3 for s in sizes], marker="o", label=label)
    right.set(xlabel="tokens in the cache", ylabel="ms a token", title="decode", ylim=(0, None))
    right.set_xticks(sizes, [f"{s:,}" for s in sizes])
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _sizes(log: RowLog, kind: str) -> list[int]:
    return sorted({row["tokens"] for row in log.of(kind=kind)})


def _seconds(log: RowLog, kind: str, method: str, tokens: int) -> list[float]:
    rows: Iterable[dict[str, Any]] = log.of(kind=kind, method=method, tokens=tokens)
    return [row["seconds"] for row in rows]
