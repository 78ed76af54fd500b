"""Confidence intervals by resampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["mean_interval"]

_RESAMPLES = 4000


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of `values` and the 2.5 % and 97.5 % quantiles of the means of resampled ones."""
    data = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(data), (_RESAMPLES, len(data)), generator=generator)
    low, high = torch.quantile(data[drawn].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(data.mean()), low, high
