"""snapkv: what the last tokens attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from contextmem.eviction.base import Reading, group_weights, register

__all__ = ["SnapKv"]


@dataclass(frozen=True)
class SnapKv:
    """Mean attention of the last `window` tokens, max-pooled over neighbours; the last `window` slots are kept.

    Source: SnapKV (arXiv 2404.14469), made query-agnostic: the window is the end of the context, not a question.

    Attributes:
        window: tokens re-fed.
        kernel: width of the pooling.
    """

    window: int = 32
    kernel: int = 7
    name: str = "snapkv"

    def scores(self, reading: Reading) -> Tensor:
        window = min(self.window, reading.n)
        n_before = reading.n - window
        scores = reading.empty()

        def watch(layer: int, query: Tensor, keys: Any) -> None:
            for head in range(scores.shape[1]):
                weights = group_weights(query, keys, head).mean((0, 1))[-reading.n :]
                pooled = F.max_pool1d(weights[None, None], self.kernel, stride=1, padding=self.kernel // 2)[0, 0]
                scores[layer, head] = pooled.cpu()

        reading.watch(reading.token_ids[n_before:], reading.cache.view(reading.cache.n_slots - window), watch)
        return scores

    @property
    def n_recent(self) -> int:
        """Slots at the end that a compaction keeps."""
        return self.window


register(SnapKv())
