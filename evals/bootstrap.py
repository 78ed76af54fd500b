"""Confidence intervals by resampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["clustered_interval", "mean_interval"]

_RESAMPLES = 4000


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of `values` and the 2.5 % and 97.5 % quantiles of the means of resampled ones."""
    data = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(data), (_RESAMPLES, len(data)), generator=generator)
    low, high = torch.quantile(data[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(data.mean()), low, high


def clustered_interval(values: Sequence[float], clusters: Sequence[str], seed: int = 0) -> tuple[float, float, float]:
    """Mean of `values` and its 95 % interval when whole clusters are resampled, such as the samples of one question."""
    names = list(dict.fromkeys(clusters))
    index = torch.tensor([names.index(name) for name in clusters])
    data = torch.tensor(values, dtype=torch.float64)
    totals = torch.zeros(len(names), dtype=torch.float64).index_add(0, index, data)
    sizes = torch.zeros(len(names), dtype=torch.float64).index_add(0, index, torch.ones_like(data))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(names), (_RESAMPLES, len(names)), generator=generator)
    means = totals[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(data.mean()), low, high
