"""h2o: heavy hitters, the slots that were attended to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, group_weights, register

__all__ = ["H2O"]


@dataclass(frozen=True)
class H2O:
    """The most causal attention that a slot received from any later token or itself, while the text was read.

    Source: H2O (arXiv 2306.14048), in the form of RestoreKV's comparison (maximum in place of the sum).
    """

    name: str = "h2o"

    def scores(self, reading: Reading) -> Tensor:
        scores = reading.empty()

        def watch(layer: int, query: Tensor, keys: Any) -> None:
            for head in range(scores.shape[1]):
                received = group_weights(query, keys, head).amax((0, 1))
                n_seen = len(received) - _n_before(reading, keys, head)
                scores[layer, head, :n_seen] = torch.maximum(scores[layer, head, :n_seen], received[-n_seen:].cpu())

        reading.again(watch)
        return scores


def _n_before(reading: Reading, keys: Any, head: int) -> int:
    """Slots before the ones to score that a head holds."""
    if isinstance(keys, Tensor):
        return reading.start
    return len(keys.kept.keys[head]) + reading.start - reading.cache.offset


register(H2O())
