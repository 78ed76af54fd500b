"""Which slots a compaction keeps: one choice over layers, heads and tokens, by score and within a number.

Pure functions over tensors; only `check_compactable` runs the model, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from contextmem.arguments import check_choice
from contextmem.backbone import Backbone
from contextmem.cache import SpanCache
from contextmem.errors import UnsupportedEdit
from contextmem.ragged import RaggedCache

__all__ = ["ALLOCATIONS", "check_compactable", "chosen", "compacted", "unseen_last"]

ALLOCATIONS = ("global", "layer", "uniform")
_COMPACTABLE: WeakKeyDictionary[Any, float | str] = WeakKeyDictionary()
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


def check_compactable(backbone: Backbone) -> None:
    """Measure, once a model, that a compacted cache with everything kept gives the logits of the dense one.

    Raises:
        UnsupportedEdit: it does not, or the model's attention cannot be stepped in for.
    """
    core = backbone.core
    if core not in _COMPACTABLE:
        try:
            _COMPACTABLE[core] = _difference(backbone)
        except (UnsupportedEdit, RuntimeError, TypeError, AttributeError, ValueError, KeyError) as error:
            _COMPACTABLE[core] = str(error)
    found = _COMPACTABLE[core]
    if isinstance(found, str) or found > (1e-4 if backbone.dtype == torch.float32 else 5e-2):
        why = found if isinstance(found, str) else f"its logits would be off by {found:.1e} of the largest"
        raise UnsupportedEdit(f"{type(core).__name__} cannot be compacted: {why}. Nothing was changed.")


def _difference(backbone: Backbone) -> float:
    """Largest difference of logits between a dense and a compacted cache of the same slots, relative to the largest.

    Over several texts. In half precision the least of them: an odd text, such as control tokens in a row, magnifies rounding
    by chance, while attention that is computed wrongly is wrong in all.
    """
    n_rows = backbone.core.get_input_embeddings().weight.shape[0]
    starts = (3, n_rows // 7, n_rows // 3, n_rows // 2)
    found = [_difference_on(backbone, [(start + index) % n_rows for index in range(12)]) for start in starts]
    return max(found) if backbone.dtype == torch.float32 else min(found)


def _difference_on(backbone: Backbone, ids: list[int]) -> float:
    dense = backbone.new_cache()
    backbone.prefill(ids[:8], dense)
    keep = torch.ones(len(dense.layers), dense.layers[0].keys.shape[1], 8, dtype=torch.bool)
    ragged = RaggedCache.of(dense, keep, backbone.windows)
    told, wanted = (backbone.forward(ids[8:], cache, all_logits=True) for cache in (ragged, dense))
    return float((told - wanted).abs().max() / wanted.abs().max())


def compacted(cache: SpanCache, keep: Tensor, windows: Sequence[int | None]) -> RaggedCache:
    """The cache with only the pairs that `keep`, (layers, heads, n_slots), names. The last slot stays whole."""
    last = cache.n_slots - 1
    before, kept = cache.view(last), keep[..., :last]
    ragged = before.again(kept) if isinstance(before, RaggedCache) else RaggedCache.of(before, kept, windows)
    ragged.extend(cache, last)
    return ragged
