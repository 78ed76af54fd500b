"""What a question attends to: for bringing back, never for evicting, since the next question is another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, group_weights

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """The most attention that each slot gets from a question, put after the context.

    Not in the registry: what is kept by it depends on the question.

    Attributes:
        question: ids, up to the first token of the answer.
    """

    question: tuple[int, ...]
    name: str = "question"

    def scores(self, reading: Reading) -> Tensor:
        scores = reading.empty()
        n_slots = reading.cache.n_slots

        def watch(layer: int, query: Tensor, keys: Any) -> None:
            for head in range(scores.shape[1]):
                weights = group_weights(query, keys, head).amax((0, 1))
                seen = weights[reading.start : n_slots].cpu()
                scores[layer, head] = torch.maximum(scores[layer, head], seen)

        cache = reading.cache.view()
        reading.watch(self.question, cache, watch)
        cache.release()
        return scores
