"""random: the baseline that every evictor must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, register

__all__ = ["Random"]


@dataclass(frozen=True)
class Random:
    """Uniform scores, the same for the same seed and place.

    Attributes:
        seed: of the scores.
    """

    seed: int = 0
    name: str = "random"

    def scores(self, reading: Reading) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + reading.start)
        return torch.rand(reading.empty().shape, generator=generator)


register(Random())
