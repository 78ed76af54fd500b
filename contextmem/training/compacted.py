"""A compacted cache under gradient: what was kept is fixed, the restore slots are trained, nothing is written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from contextmem.attention import switched
from contextmem.backbone import Backbone
from contextmem.cache import Slots
from contextmem.ragged import Kept, attention_over, is_seen

__all__ = ["student_logits"]


class _Layer(DynamicLayer):
    """Kept slots, restore slots in every head, and the new tokens of one forward."""

    def __init__(
        self, kept: Kept, restored: tuple[Tensor, Tensor], n_before: int, positions: Tensor, window: int | None
    ):
        super().__init__()
        self._positions, self._window, self._n_before = positions, window, n_before
        keys, values = restored
        n = keys.shape[2]
        self._kept = Kept(
            tuple(torch.cat((slots, torch.arange(n_before, n_before + n))) for slots in kept.slots),
            tuple(torch.cat((k, keys[0, head])) for head, k in enumerate(kept.keys)),
            tuple(torch.cat((v, values[0, head])) for head, v in enumerate(kept.values)),
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return self, self

    def get_seq_length(self) -> int:
        return self._n_before + (self.keys.shape[-2] if self.is_initialized else 0)

    def attend(self, query: Tensor, scaling: float, position_ids: Tensor) -> Tensor:
        """See `attention.Attended`."""
        at = position_ids.reshape(-1)
        seen_kept = None
        if self._window is not None:
            seen_kept = [is_seen(at, self._positions[slots].to(at.device), self._window) for slots in self._kept.slots]
        seen = is_seen(at, at, self._window)
        return attention_over(query * scaling, self._kept, self.keys, self.values, seen, seen_kept)


def student_logits(
    backbone: Backbone,
    kept: Sequence[Kept],
    restored: Slots,
    position: int,
    question: Sequence[int],
    answer: Sequence[int],
) -> Tensor:
    """Logits, (len(answer), vocab) float32, for every token of `answer` after `question` over a compacted context.

    Args:
        kept: what each layer kept of the slots before `position`.
        restored: (1, heads, n, head_dim) a layer; they stand at `position` and on, the question after them.
    """
    ids = [*question, *answer[:-1]]
    n = restored[0][0].shape[2]
    positions = torch.arange(position + n)
    layers = [
        _Layer(one, slots, position, positions, window)
        for one, slots, window in zip(kept, restored, backbone.windows, strict=True)
    ]
    where = torch.arange(position + n, position + n + len(ids), device=backbone.device)[None]
    with switched(backbone.core, masked=False):
        output = backbone.core(
            input_ids=torch.tensor([ids], device=backbone.device),
            position_ids=where,
            use_cache=True,
            logits_to_keep=len(answer),
            **{backbone.cache_argument: Cache(layers=layers)},
        )
    logits: Tensor = output.logits[0].float()
    return logits
