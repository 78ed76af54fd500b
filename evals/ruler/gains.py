"""What restore slots give: pairs of the same case at the same number of pairs held, without and with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler.base import NEEDLE_FAMILY

__all__ = ["gain_lines", "gains_of"]

HEADLINE = (0.05, 0.1)
_RESAMPLES = 4000
_LEAST_GAP = 0.2  # of which a share is worth telling
Triple = tuple[float, float, float]  # scores of the full cache, without restore slots, and with them


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
        if all(needles.get(ratio) for ratio in HEADLINE):
            both = [triple for ratio in HEADLINE for triple in needles[ratio]]
            figures[" and ".join(f"{ratio:g}" for ratio in HEADLINE)] = _figures(both)
        worse = [
            f"{task} at {ratio:g}"
            for ratio, tasks in by_ratio.items()
            for task, triples in tasks.items()
            if mean_interval([restored - plain for _, plain, restored in triples])[2] < 0
        ]
        found[name] = {"needles": figures, "worse": worse}
    return found


def _triples(log: RowLog, size: int, name: str, ratio: float, can_do: Sequence[str]) -> dict[str, list[Triple]]:
    """By task, the cases that were measured all three ways."""
    full = {row["id"]: row["score"] for row in log.of(size=size, method="full cache")}
    plain = {row["id"]: row["score"] for row in log.of(size=size, method=f"{name.partition('+')[0]}@{ratio:g}")}
    found: dict[str, list[Triple]] = {}
    for row in log.of(size=size, method=f"{name}@{ratio:g}"):
        if row["task"] in can_do and row["id"] in plain:
            found.setdefault(row["task"], []).append((full[row["id"]], plain[row["id"]], row["score"]))
    return found


def _figures(triples: Sequence[Triple]) -> dict[str, Any]:
    full, plain, restored = (mean(part) for part in zip(*triples, strict=True))
    figures = {"n": len(triples), "full": full, "without": plain, "with": restored}
    figures["gain"] = mean_interval([r - p for _, p, r in triples])
    if full - plain >= _LEAST_GAP:
        figures["closed"] = _share(triples)
    return figures


def _share(triples: Sequence[Triple], seed: int = 0) -> tuple[float, float, float]:
    """The share of the gap that is closed, and its 95 % interval when cases are resampled."""
    data = torch.tensor(triples, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = data[torch.randint(len(data), (_RESAMPLES, len(data)), generator=generator)].mean(1)
    means = torch.cat((data.mean(0)[None], drawn))
    shares = (means[:, 2] - means[:, 1]) / (means[:, 0] - means[:, 1]).clamp(min=1e-9)
    low, high = torch.quantile(shares[1:], torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(shares[0]), low, high


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
