"""knorm: keys of small norm are attended to most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, register

__all__ = ["Knorm"]


@dataclass(frozen=True)
class Knorm:
    """Minus the L2 norm of the key. Source: arXiv 2406.11430. Costs no forward."""

    name: str = "knorm"

    def scores(self, reading: Reading) -> Tensor:
        return torch.stack([-keys.float().norm(dim=-1).cpu() for keys, _ in reading.layers()])


register(Knorm())
