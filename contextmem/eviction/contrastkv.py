"""contrastkv: kvzip, and beside it what every head attends to whatever it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, register
from contextmem.eviction.kvzip import peaks

__all__ = ["ContrastKv"]


@dataclass(frozen=True)
class ContrastKv:
    """Two signals a slot: attention while the text is repeated, and while random tokens are read in its place.

    Source: ContrastKV (ACL 2026), after its description in RestoreKV's comparison; details are our reading. A slot whose
    second signal is among the top `gate` of its head is structure: its score is at least the head's own threshold for the
    same share of the first signal. Runs every token twice more.

    Attributes:
        gate: share of a head's slots that can count as structure.
        chunk: tokens rehearsed at a time.
        seed: of the random tokens.
    """

    gate: float = 0.05
    chunk: int = 512
    seed: int = 0
    name: str = "contrastkv"

    def scores(self, reading: Reading) -> Tensor:
        meaning = peaks(reading, self.chunk)
        structure = peaks(reading, self.chunk, self._random(reading))
        level = torch.quantile(structure, 1 - self.gate, dim=-1, keepdim=True)
        least = torch.quantile(meaning, 1 - self.gate, dim=-1, keepdim=True)
        return torch.where(structure > level, torch.maximum(meaning, least), meaning)

    def _random(self, reading: Reading) -> tuple[int, ...]:
        """Tokens of the text itself, shuffled: random, and none that the tokenizer never gives."""
        order = torch.randperm(reading.n, generator=torch.Generator().manual_seed(self.seed))
        return tuple(reading.token_ids[i] for i in order.tolist())


register(ContrastKv())
