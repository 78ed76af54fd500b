"""kvzip_plus: kvzip, with each weight counted as what it adds to the hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contextmem.eviction.base import Reading, register
from contextmem.eviction.hooks import attention_layers, given
from contextmem.eviction.kvzip import rehearsed

__all__ = ["KvZipPlus"]


@dataclass(frozen=True)
class KvZipPlus:
    """KVzip's weights times |W_O v| of the slot, divided by the norm of the querying token's hidden state.

    Source: the improved KVzip that KVzap (arXiv 2601.07891) is trained on. Runs every token once more.

    Attributes:
        chunk: tokens rehearsed at a time.
    """

    chunk: int = 512
    name: str = "kvzip_plus"

    def scores(self, reading: Reading) -> Tensor:
        scores = reading.empty()
        modules = attention_layers(reading.backbone.core)
        outputs = [_output_norms(m, values) for m, (_, values) in zip(modules, reading.layers(), strict=True)]
        norms: dict[int, Tensor] = {}

        def look(layer: int, arguments: dict[str, Any]) -> None:
            norm = arguments["hidden_states"][0].detach().float().norm(dim=-1)
            norms[layer] = norm.masked_fill(norm == 0, float("inf"))  # a token without an embedding asks for nothing

        def visit(layer: int, head: int, start: int, stop: int, weights: Tensor, keys: Any) -> None:
            added = weights * outputs[layer][head, :, None, start:stop] / norms[layer][:, None]
            part = scores[layer, head, start:stop]
            torch.maximum(part, added.amax((0, 1)).cpu(), out=part)

        with given(modules, look):
            rehearsed(reading, self.chunk, visit)
        return scores


def _output_norms(module: Any, values: Tensor) -> Tensor:
    """|W_O v|, (heads, group, n), for values (heads, n, head_dim) and every query head that reads them."""
    heads, _, dim = values.shape
    weight = module.o_proj.weight.detach().float()
    by_head = weight.reshape(weight.shape[0], heads, -1, dim)  # hidden, heads, group, head_dim
    return torch.stack(
        [
            torch.stack([(values[h].float() @ by_head[:, h, g].T).norm(dim=-1) for g in range(by_head.shape[2])])
            for h in range(heads)
        ]
    )


register(KvZipPlus())
