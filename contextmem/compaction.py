"""Which slots a compaction keeps: one choice over layers, heads and tokens, by score and within a number.

Pure functions over tensors; nothing here runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contextmem.arguments import check_choice
from contextmem.cache import SpanCache
from contextmem.ragged import RaggedCache

__all__ = ["ALLOCATIONS", "chosen", "compacted", "unseen_last"]

ALLOCATIONS = ("global", "layer", "uniform")
_GONE, _LAST = float("-inf"), torch.finfo(torch.float32).min


def chosen(scores: Tensor, protected: Tensor, n_keep: int, allocation: str = "global") -> Tensor:
    """A mask, (layers, heads, n), of at most `n_keep` key-value pairs to keep.

    Args:
        scores: (layers, heads, n) float32; minus infinity for pairs that are gone already.
        protected: (n,) slots that every layer and head keeps whatever their scores, as far as they are held. They count.
        n_keep: pairs to keep in all; protected ones are kept even if they are more.
        allocation: "global" puts one threshold to all scores (KVzip, RestoreKV), "layer" lets every layer keep as many
            pairs, "uniform" every head.
    """
    check_choice("allocation", allocation, ALLOCATIONS)
    n_layers, n_heads, _ = scores.shape
    held = scores > _GONE
    kept = held & protected
    free = max(0, n_keep - int(kept.sum()))
    n_groups = {"global": 1, "layer": n_layers, "uniform": n_layers * n_heads}[allocation]
    candidates = scores.masked_fill(kept, _GONE).reshape(n_groups, -1)
    flat = kept.reshape(n_groups, -1)
    for group, row in enumerate(candidates):
        share = free // n_groups + (group < free % n_groups)
        best = row.topk(min(share, int((row > _GONE).sum()))).indices
        flat[group, best] = True
    return flat.reshape(scores.shape)


def unseen_last(scores: Tensor, positions: Tensor, next_position: int, windows: Sequence[int | None]) -> Tensor:
    """Scores in which slots that have left the window of a sliding layer come last: no later token can see them."""
    scores = scores.clone()
    for index, window in enumerate(windows):
        if window is not None:
            left = positions <= next_position - window
            scores[index] = torch.where(left & (scores[index] > _GONE), torch.full((), _LAST), scores[index])
    return scores


def compacted(cache: SpanCache, keep: Tensor, windows: Sequence[int | None]) -> RaggedCache:
    """The cache with only the pairs that `keep`, (layers, heads, n_slots), names. The last slot stays whole."""
    last = cache.n_slots - 1
    before, kept = cache.view(last), keep[..., :last]
    ragged = before.again(kept) if isinstance(before, RaggedCache) else RaggedCache.of(before, kept, windows)
    ragged.extend(cache, last)
    return ragged
