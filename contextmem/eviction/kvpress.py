"""Any scorer of kvpress as an evictor: what it is given is what kvpress's own hooks would give it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contextmem.errors import InvalidInput
from contextmem.eviction.base import Reading
from contextmem.eviction.hooks import attention_layers, given

__all__ = ["KVPressEvictor"]


@dataclass(frozen=True)
class KVPressEvictor:
    """The scores of a kvpress `ScorerPress`; what is kept is chosen here, by count and over all heads.

    kvpress is not installed with this library: it pins transformers below 5.3, and importing it patches attention functions
    of the whole process. The text to score is run once more, so that the press sees hidden states.

    Attributes:
        press: the press. What its `compression_ratio` says counts only for presses whose scores depend on it.
    """

    press: Any

    def __post_init__(self) -> None:
        if not callable(getattr(self.press, "score", None)):
            raise InvalidInput(f"{type(self.press).__name__} has no method score: a kvpress ScorerPress is needed.")

    @property
    def name(self) -> str:
        """As in reports."""
        return f"kvpress.{type(self.press).__name__}"

    def scores(self, reading: Reading) -> Tensor:
        modules = attention_layers(reading.backbone.core)
        calls: list[list[dict[str, Any]]] = [[] for _ in modules]
        with given(modules, lambda layer, arguments: calls[layer].append(dict(arguments))):
            reading.again(lambda layer, query, keys: None)
        scores = []
        with torch.no_grad():
            for module, seen, (keys, values) in zip(modules, calls, reading.layers(), strict=True):
                hidden = torch.cat([one["hidden_states"] for one in seen], dim=1)
                rotary = [one["position_embeddings"] for one in seen]
                positions = tuple(torch.cat([pair[part] for pair in rotary], dim=1) for part in (0, 1))
                arguments = {**seen[-1], "hidden_states": hidden, "position_embeddings": positions}
                score = self.press.score(module, hidden, keys[None], values[None], None, arguments)
                scores.append(score[0].float().cpu())
        return torch.stack(scores)
