"""expected_attention: what queries still to come will attend to, if they are like those seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, register
from contextmem.rope import rerotated

__all__ = ["ExpectedAttention", "expected_scores"]


@dataclass(frozen=True)
class ExpectedAttention:
    """exp(m k / sqrt(d) + k C k / 2d) |v| for future queries with mean m and covariance C.

    Source: Expected Attention (arXiv 2510.00636). The queries of the text just read are moved to places among the next
    `horizon` positions; mean and covariance are theirs. Scores are relative to an even share of the slots of a head.

    Attributes:
        horizon: positions ahead.
        seed: of the places.
    """

    horizon: int = 512
    seed: int = 0
    name: str = "expected_attention"

    def scores(self, reading: Reading) -> Tensor:
        queries: dict[int, list[Tensor]] = {}
        reading.again(lambda layer, query, _: queries.setdefault(layer, []).append(query))
        first = reading.cache.view(reading.start).next_position
        old = torch.arange(first, first + reading.n)  # where they were run again
        generator = torch.Generator().manual_seed(self.seed)
        new = reading.cache.next_position + torch.randint(self.horizon, (reading.n,), generator=generator)
        angles = reading.backbone.angles()
        return torch.stack(
            [
                expected_scores(rerotated(torch.cat(queries[index], dim=2), old, new, angles[index]), keys, values)
                for index, (keys, values) in enumerate(reading.layers())
            ]
        )


def expected_scores(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Scores, (heads, n), for queries (1, query heads, m, d) at their future places, keys and values (heads, n, d)."""
    heads, _, dim = keys.shape
    group = query[0].float().reshape(heads, -1, dim)
    mean = group.mean(1)
    centred = group - mean[:, None]
    covariance = centred.transpose(1, 2) @ centred / max(1, group.shape[1] - 1)
    keys = keys.float()
    logits = (keys @ mean[:, :, None])[..., 0] / dim**0.5 + ((keys @ covariance) * keys).sum(-1) / (2 * dim)
    weights: Tensor = logits.softmax(-1) * keys.shape[1] * values.float().norm(dim=-1)
    return weights.cpu()


register(ExpectedAttention())
