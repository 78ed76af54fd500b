"""What restore slots give: the same case within the same budget, without and with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch

from contextmem.evals.bootstrap import clustered_interval, mean_interval
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler.base import NEEDLE_FAMILY
from contextmem.evals.ruler.measure import FULL

__all__ = ["gain_lines", "gains_of"]

_HEADLINE = (0.05, 0.1)
_RESAMPLES = 4000
_LEAST_GAP = 0.2  # of which a share is worth telling
_LEAST_N = 5  # cases from which a task may be called worse


class Triple(NamedTuple):
    """Scores of one case with the full cache, without restore slots, and with them."""

    case: str
    full: float
    plain: float
    restored: float


def gains_of(log: RowLog, size: int, can_do: Sequence[str]) -> dict[str, Any]:
    """By method with restore slots: figures over the needle family by ratio, and the tasks that became worse."""
    found: dict[str, Any] = {}
    methods = sorted({row["method"] for row in log.of(size=size) if "+" in row["method"]})
    for name in dict.fromkeys(method.partition("@")[0] for method in methods):
        ratios = sorted(float(method.partition("@")[2]) for method in methods if method.partition("@")[0] == name)
        by_ratio = {ratio: _triples(log, size, name, ratio, can_do) for ratio in ratios}
        needles = {
            ratio: [triple for task, triples in tasks.items() if task in NEEDLE_FAMILY for triple in triples]
            for ratio, tasks in by_ratio.items()
        }
        figures = {f"{ratio:g}": _figures(triples) for ratio, triples in needles.items() if triples}
        if all(needles.get(ratio) for ratio in _HEADLINE):
            both = [triple for ratio in _HEADLINE for triple in needles[ratio]]
            figures[" and ".join(f"{ratio:g}" for ratio in _HEADLINE)] = _figures(both)
        worse = [
            f"{task} at {ratio:g}"
            for ratio, tasks in by_ratio.items()
            for task, triples in tasks.items()
            if len(triples) >= _LEAST_N and mean_interval([one.restored - one.plain for one in triples])[2] < 0
        ]
        found[name] = {"needles": figures, "worse": worse}
    return found


def _triples(log: RowLog, size: int, name: str, ratio: float, can_do: Sequence[str]) -> dict[str, list[Triple]]:
    """By task, the cases that were measured all three ways."""
    full = {row["id"]: row["score"] for row in log.of(size=size, method=FULL)}
    plain = {row["id"]: row["score"] for row in log.of(size=size, method=f"{name.partition('+')[0]}@{ratio:g}")}
    found: dict[str, list[Triple]] = {}
    for row in log.of(size=size, method=f"{name}@{ratio:g}"):
        if row["task"] in can_do and row["id"] in plain:
            found.setdefault(row["task"], []).append(Triple(row["id"], full[row["id"]], plain[row["id"]], row["score"]))
    return found


def _figures(triples: Sequence[Triple]) -> dict[str, Any]:
    """Means, and intervals over cases: one that was measured at several ratios is drawn with all of them."""
    cases = [one.case for one in triples]
    full, plain, restored = (mean(part) for part in zip(*(one[1:] for one in triples), strict=True))
    figures = {"n": len(set(cases)), "full": full, "without": plain, "with": restored}
    figures["gain"] = clustered_interval([one.restored - one.plain for one in triples], cases)
    if full - plain >= _LEAST_GAP:
        figures["closed"] = _share(triples)
    return figures


def _share(triples: Sequence[Triple], seed: int = 0) -> tuple[float, float, float]:
    """The share of the gap that is closed, and its 95 % interval over cases; where a draw has no gap, none is closed."""
    names = list(dict.fromkeys(one.case for one in triples))
    index = torch.tensor([names.index(one.case) for one in triples])
    pairs = torch.tensor([(one.restored - one.plain, one.full - one.plain) for one in triples], dtype=torch.float64)
    totals = torch.zeros(len(names), 2, dtype=torch.float64).index_add(0, index, pairs)
    generator = torch.Generator().manual_seed(seed)
    gains, gaps = totals[torch.randint(len(names), (_RESAMPLES, len(names)), generator=generator)].sum(1).unbind(-1)
    shares = torch.where(gaps > 0, gains / gaps.where(gaps > 0, torch.ones(())), torch.zeros(()))
    low, high = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    gain, gap = pairs.sum(0).tolist()
    return gain / gap, low, high


def gain_lines(gains: Mapping[str, Any]) -> list[str]:
    """A table of `gains_of`, and a sentence on what became worse."""
    if not gains:
        return []
    lines = [
        "| needle tasks | kept | full cache | without | with | gain | share of the gap closed | n |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in gains.items():
        for ratio, row in one["needles"].items():
            closed = "{:.2f} [{:.2f}, {:.2f}]".format(*row["closed"]) if "closed" in row else f"gap below {_LEAST_GAP}"
            gain = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*row["gain"])
            lines.append(
                f"| {name} | {ratio} | {row['full']:.2f} | {row['without']:.2f} | {row['with']:.2f} | {gain} | {closed} | "
                f"{row['n']} |"
            )
    worse = [f"{name}: {', '.join(one['worse'])}" for name, one in gains.items() if one["worse"]]
    return [*lines, "", f"Worse with restore slots, beyond the 95 % interval, by task: {'; '.join(worse) or 'none'}."]
