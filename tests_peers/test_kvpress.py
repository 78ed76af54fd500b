"""Beside kvpress, in an environment of its own (`make test-kvpress`): the same scores, the same restore slots."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import moved
from tiny import build, tiny_config, tiny_tokenizer
from transformers import DynamicCache

kvpress = pytest.importorskip("kvpress")

from contextmem import ContextMemory, InvalidInput, RestoreKV  # noqa: E402
from contextmem.backbone import Backbone  # noqa: E402
from contextmem.codec import Codec  # noqa: E402
from contextmem.evals.kvpress.run import run  # noqa: E402
from contextmem.evals.ruler import TASKS, Case  # noqa: E402
from contextmem.eviction import EVICTORS, KVPressEvictor, Reading  # noqa: E402
from contextmem.framing import framing_of  # noqa: E402

IDS = [int(i) for i in torch.randint(3, 259, (300,), generator=torch.Generator().manual_seed(2))]
TOKENIZER = tiny_tokenizer()
HALF = {"compression_ratio": 0.5}  # the scores of some presses depend on it
PRESSES = [
    kvpress.KnormPress(**HALF),
    kvpress.SnapKVPress(window_size=32, **HALF),
    kvpress.ExpectedAttentionPress(**HALF),
    kvpress.TOVAPress(**HALF),
    kvpress.KeyDiffPress(**HALF),
    kvpress.StreamingLLMPress(**HALF),
    kvpress.LagKVPress(lag_size=32, **HALF),
]


def reading_of(model: Any, start: int = 0) -> Reading:
    backbone, codec = Backbone.of(model), Codec.of(TOKENIZER)
    cache = backbone.new_cache()
    backbone.prefill(IDS, cache)
    return Reading(backbone, codec, framing_of(codec), cache, tuple(IDS[start:]), start)


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return build(tiny_config(request.param))


@pytest.mark.parametrize("press", PRESSES, ids=lambda press: type(press).__name__)
def test_scores_are_those_of_kvpress_own_hooks(model: Any, press: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, torch.Tensor] = {}
    watched = copy.deepcopy(press)
    original = type(press).score

    def score(self: Any, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = original(self, module, *args, **kwargs)
        seen[module.layer_idx] = result[0].float()
        return result

    monkeypatch.setattr(type(press), "score", score)
    with torch.no_grad(), watched(model):
        model.model(torch.tensor([IDS]), past_key_values=DynamicCache())
    monkeypatch.undo()
    ours = KVPressEvictor(press).scores(reading_of(model))
    theirs = torch.stack([seen[layer] for layer in range(4)])
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.model.layers)


def test_our_knorm_is_theirs(model: Any) -> None:
    ours, theirs = (
        EVICTORS["knorm"].scores(reading_of(model)),
        KVPressEvictor(kvpress.KnormPress()).scores(reading_of(model)),
    )
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_memory_takes_a_press(model: Any) -> None:
    memory = ContextMemory(model, TOKENIZER, budget=200, evictor=KVPressEvictor(kvpress.SnapKVPress(window_size=32)))
    for _ in range(6):
        memory.append("The town of Ashby lies on the river Mere, and its bridge is old. ")
        assert memory.stats().tokens_held <= 200
    assert any(event.method == "kvpress.SnapKVPress" for event in memory.events)
    with pytest.raises(InvalidInput, match="ScorerPress"):
        KVPressEvictor(object())


def test_the_comparison_runs_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keep as many pairs; only ours holds fewer bytes; nothing of a press is left on the model."""
    monkeypatch.setattr(Case, "score", lambda self, answer: 1.0)  # a random model answers nothing rightly
    # kvpress needs a key that all queries miss: there is none for a padding token, whose embedding is zero, nor for many
    # random queries in few dimensions.
    monkeypatch.setitem(TASKS, "short", lambda *_: Case("The bridge of Ashby is old. " * 20, "?", "", ("old",)))
    config = tiny_config("llama", num_hidden_layers=2, head_dim=128, pad_token_id=299)
    build(config, seed=3).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    table = run(
        tmp_path / "out",
        model_name=str(tmp_path / "model"),
        tasks=("short",),
        samples={600: 1},
        ratios=(0.3,),
        say=lambda _: None,
    )
    rows = {row["method"]: row for row in map(json.loads, (tmp_path / "out/rows.jsonl").read_text().splitlines())}
    ours, theirs = rows["contextmem@0.3"], rows["kvpress@0.3"]
    assert ours["held"] == pytest.approx(theirs["held"], rel=0.02) and "| contextmem@0.3 |" in table
    n_tokens = rows["full cache"]["held"]
    assert theirs["nbytes"] == n_tokens * 2 * 2 * 2 * 128 * 4 and ours["nbytes"] < 0.8 * theirs["nbytes"]


def test_restore_slots_are_theirs(model: Any, tmp_path: Path) -> None:
    """The same random adapter and embeddings, in the published layout."""
    moved(RestoreKV.untrained(model, n=8), model).save_pretrained(tmp_path, torch.float32)  # type: ignore[arg-type]
    restorer = RestoreKV.from_pretrained(tmp_path)
    reading = reading_of(model)
    ours = restorer.slots(reading.backbone, reading.cache)

    other = copy.deepcopy(model)
    cache = DynamicCache()
    with torch.no_grad():
        other.model(torch.tensor([IDS]), past_key_values=cache)
    press = kvpress.RestoreKVPress()
    other.load_adapter(str(tmp_path), adapter_name=press.adapter_name)
    other.disable_adapters()
    press.restore_embeddings = restorer.embeddings.detach()
    press.context_length, press._cache = len(IDS), cache
    press.append_restore_tokens(other)
    for (keys, values), layer in zip(ours, cache.layers, strict=True):
        assert torch.allclose(keys, layer.keys[:, :, -8:], atol=1e-4)
        assert torch.allclose(values, layer.values[:, :, -8:], atol=1e-4)
