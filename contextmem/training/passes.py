"""Forward passes under gradient: concatenating caches, because buffers written in place break the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from contextmem.backbone import Backbone
from contextmem.cache import Slots
from contextmem.rope import rotated, rotation

__all__ = ["answer_logits", "cache_of", "joined", "moved", "steering"]


def steering(core: Any, backbone: Backbone, seen: Slots, ids: Sequence[int], position: int) -> Slots:
    """The KV of `ids` at `position` and on, computed by `core` over what is `seen`; differentiable in its weights."""
    kept, trained = seen[0][0].dtype, core.get_input_embeddings().weight.dtype
    cache = cache_of(_cast(seen, trained))
    _run(core, backbone, ids, cache, position, 1)
    n = len(ids)
    return _cast([(layer.keys[:, :, -n:], layer.values[:, :, -n:]) for layer in cache.layers], kept)


def answer_logits(
    backbone: Backbone, context: Slots, position: int, question: Sequence[int], answer: Sequence[int]
) -> Tensor:
    """Logits, (len(answer), vocab), for every token of `answer` after `question` over `context`, teacher-forced."""
    ids = [*question, *answer[:-1]]
    logits = _run(backbone.core, backbone, ids, cache_of(context), position, len(answer))
    return logits[0].float()


def joined(parts: Sequence[Slots]) -> Slots:
    """Slots one after the other, layer by layer."""
    return [
        (torch.cat([k for k, _ in layer], dim=-2), torch.cat([v for _, v in layer], dim=-2))
        for layer in zip(*parts, strict=True)
    ]


def moved(slots: Slots, position: int, delta: int, angles: Sequence[Callable[[Tensor], Any]]) -> Slots:
    """Slots that stand at `position` and on, moved by `delta` positions; differentiable."""
    if not delta:
        return slots
    old = torch.arange(position, position + slots[0][0].shape[-2])
    rotations = {of_layer: rotation(old, old + delta, of_layer) for of_layer in set(angles)}
    return [(rotated(k, *rotations[of_layer]), v) for (k, v), of_layer in zip(slots, angles, strict=True)]


def _cast(slots: Slots, dtype: torch.dtype) -> Slots:
    return [(keys.to(dtype), values.to(dtype)) for keys, values in slots]


def cache_of(slots: Slots) -> DynamicCache:
    """A cache of transformers' own, which concatenates what is added."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(slots):
        cache.update(keys, values, index)
    return cache


def _run(core: Any, backbone: Backbone, ids: Sequence[int], cache: DynamicCache, position: int, keep: int) -> Tensor:
    where = torch.arange(position, position + len(ids), device=backbone.device)[None]
    output = core(
        input_ids=torch.tensor([list(ids)], device=backbone.device),
        position_ids=where,
        use_cache=True,
        logits_to_keep=keep,
        **{backbone.cache_argument: cache},
    )
    logits: Tensor = output.logits
    return logits
