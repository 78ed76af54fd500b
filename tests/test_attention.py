"""Folded attention: the same logits as stock, with keys and values read once a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model

from contextmem import attention
from contextmem.backbone import MOST_FOLDED, Backbone

IDS = [(7 * i * i + 3 * i) % 90 + 5 for i in range(MOST_FOLDED + 101)]


def logits_over_a_cache(model: Any, n_cached: int, n_new: int) -> torch.Tensor:
    backbone = Backbone.of(model)
    cache = backbone.new_cache()
    backbone.forward(IDS[:n_cached], cache)
    return backbone.forward(IDS[n_cached : n_cached + n_new], cache, all_logits=True)


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries of every folded attention."""
    seen: list[int] = []
    folded = attention._folded

    def counted(query: Any, *args: Any) -> Any:
        seen.append(query.shape[2])
        return folded(query, *args)

    monkeypatch.setattr(attention, "_folded", counted)
    return seen


@pytest.mark.parametrize("n_new", [1, 2, 25, MOST_FOLDED, MOST_FOLDED + 1])
def test_folded_logits_are_the_stock_ones(
    model: Any, n_new: int, folds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = logits_over_a_cache(model, 100, n_new)
    config = model.config
    is_grouped = config.num_attention_heads != config.num_key_value_heads
    expected = 1 < n_new <= MOST_FOLDED and is_grouped and config._attn_implementation == "sdpa"
    assert folds == [n_new] * config.num_hidden_layers * expected
    monkeypatch.setattr(Backbone, "_may_fold", False)
    stock = logits_over_a_cache(model, 100, n_new)
    assert (ours - stock).abs().max() <= 1e-5 * stock.abs().max()  # on a CPU they are the same bits
    assert len(folds) == config.num_hidden_layers * expected


def test_into_an_empty_cache_nothing_is_folded(folds: list[int]) -> None:
    Backbone.of(tiny_model("llama", "sdpa")).forward(IDS[:20], Backbone.of(tiny_model("llama", "sdpa")).new_cache())
    assert not folds
