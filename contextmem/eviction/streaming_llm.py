"""streaming_llm: keep the first slots and the latest ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, register

__all__ = ["StreamingLlm"]


@dataclass(frozen=True)
class StreamingLlm:
    """A slot's score is its number. Source: StreamingLLM (arXiv 2309.17453); the sinks are kept by every compaction."""

    name: str = "streaming_llm"

    def scores(self, reading: Reading) -> Tensor:
        return reading.empty() + torch.arange(reading.start, reading.cache.n_slots, dtype=torch.float32)


register(StreamingLlm())
