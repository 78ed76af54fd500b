"""Training a restorer: the student is the library's own compacted memory, gradients where they belong, resuming."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import moved
from safetensors.torch import load_file
from test_training import RECORD, text_of, tiny_tokenizer_kept
from tiny import build, tiny_config, tiny_model

from contextmem import RestoreKV
from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.compaction import chosen, unseen_last
from contextmem.eviction import EVICTORS, Reading
from contextmem.framing import framing_of
from contextmem.ragged import RaggedCache
from contextmem.training.layout import Layout
from contextmem.training.prose import TRAIN, prose_of
from contextmem.training.recall import RecallSample, RecallSource
from contextmem.training.restorer import (
    LONGEST_ANSWER,
    RestorerObjective,
    RestorerPlan,
    answer_of,
    symmetric_kl,
    train_restorer,
)
from contextmem.training.samples.distractor_qa import questions_of
from contextmem.training.trainer import Samples

PROSE = prose_of(part=TRAIN)
CONTEXT = tuple(int(i) for i in torch.randint(3, 259, (120,), generator=torch.Generator().manual_seed(5)))


@pytest.fixture(scope="module")
def layout() -> Layout:
    codec = Codec.of(tiny_tokenizer_kept())
    return Layout(codec, framing_of(codec))


def test_samples_ask_about_what_the_context_says(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "qa.jsonl").write_text(json.dumps(RECORD))
    source = RecallSource(PROSE, questions_of(tmp_path / "qa.jsonl"), sizes=(600, 900))
    seen = set()
    for seed in range(40):
        sample = source.sample(layout, random.Random(seed))
        assert sample == source.sample(layout, random.Random(seed))
        assert 0.025 <= sample.share <= 0.25 and sample.end == layout.end[0] and sample.questions
        context = text_of(layout, sample.context)
        for question in sample.questions:
            text = text_of(layout, question)
            if "castle" in text:
                seen.add("qa")
                assert "Prague" in context
            elif "from the middle" in text:
                seen.add("prose")
                assert text.rpartition("assistant\n")[2] in context
            else:
                seen.add("needles")
    assert seen == {"qa", "prose", "needles"}


def test_the_symmetric_divergence() -> None:
    one, other = torch.randn(3, 7), torch.randn(3, 7)
    p, q = one.softmax(-1), other.softmax(-1)
    expected = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)).mean() / 2
    assert float(symmetric_kl(one, other)) == pytest.approx(float(expected), rel=1e-5)
    assert float(symmetric_kl(one, one)) == pytest.approx(0, abs=1e-6)


def test_the_student_is_the_librarys_own_compacted_cache(model: Any) -> None:
    """The loss is the divergence between a dense cache and the ragged one with restore slots that a memory would hold."""
    backbone, codec = Backbone.of(model), Codec.of(tiny_tokenizer_kept())
    restorer = moved(RestoreKV.untrained(model, n=4), model)  # type: ignore[arg-type]
    sample = RecallSample(CONTEXT, ((7, 8, 9),), ((),), 2, 0.3)
    objective = RestorerObjective(backbone, codec, restorer, EVICTORS["knorm"])  # type: ignore[arg-type]
    loss = float(objective(sample)["loss"].detach())

    full = backbone.new_cache()
    backbone.prefill(CONTEXT, full)
    framing = framing_of(codec)
    scores = EVICTORS["knorm"].scores(Reading(backbone, codec, framing, full, CONTEXT, 0))
    scores = unseen_last(scores, full.positions, full.next_position, backbone.windows)
    n_opening = len(framing.bare_opening)
    protected = torch.arange(len(CONTEXT)) < n_opening
    n_keep = n_opening + int(0.3 * (len(CONTEXT) - n_opening)) - 4
    keep = chosen(scores, protected, n_keep * scores.shape[0] * scores.shape[1])
    ragged = RaggedCache.of(full, keep, backbone.windows).restored(restorer.slots(backbone, full), full.next_position)  # type: ignore[attr-defined]
    told, taught, logits = [backbone.forward((7, 8, 9), ragged)], [], backbone.forward((7, 8, 9), full)
    while True:
        taught.append(logits)
        token = int(logits.argmax())
        if token == 2 or len(taught) == LONGEST_ANSWER:
            break
        logits = backbone.forward([token], full)
        told.append(backbone.forward([token], ragged))
    expected = float(symmetric_kl(torch.stack(taught), torch.stack(told)))
    assert loss == pytest.approx(expected, rel=2e-3, abs=1e-5)


def test_gradients_reach_the_restorer_and_nothing_else(model: Any) -> None:
    restorer = moved(RestoreKV.untrained(model, n=4), model)  # type: ignore[arg-type]
    backbone, codec = Backbone.of(model), Codec.of(tiny_tokenizer_kept())
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    try:
        objective = RestorerObjective(backbone, codec, restorer, EVICTORS["knorm"])  # type: ignore[arg-type]
        objective.requires_grad_(True)
        objective(RecallSample(CONTEXT, ((7, 8),), ((),), 2, 0.3))["loss"].backward()
        grads = {name: p.grad for name, p in objective.named_parameters()}
        assert grads["embeddings"] is not None and bool(grads["embeddings"].abs().sum() > 0)
        assert any(g is not None and bool(g.abs().sum() > 0) for name, g in grads.items() if "lora_A" in name)
        assert all(p.grad is None for p in model.parameters())
    finally:
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)


def test_contexts_of_a_pool_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time costs the restore pass and the student only, and gives the same loss."""
    model = tiny_model("llama")
    restorer = moved(RestoreKV.untrained(model, n=4), model)  # type: ignore[arg-type]
    backbone, codec, evictor = Backbone.of(model), Codec.of(tiny_tokenizer_kept()), EVICTORS["knorm"]
    samples = [RecallSample(CONTEXT[i:], ((7, 8), (9, 10, 11)), ((), ()), 2, 0.3) for i in range(3)]
    objective = RestorerObjective(backbone, codec, restorer, evictor, pool=2)  # type: ignore[arg-type]
    plain = RestorerObjective(backbone, codec, restorer, evictor)  # type: ignore[arg-type]
    fed: list[int] = []
    original = Backbone.prefill
    monkeypatch.setattr(Backbone, "prefill", lambda s, ids, *a, **o: fed.append(len(ids)) or original(s, ids, *a, **o))
    first = [float(objective(sample)["loss"].detach()) for sample in samples]
    n_first = len(fed)
    again = [float(objective(sample)["loss"].detach()) for sample in samples]
    assert n_first and len(fed) - n_first == n_first // 3, "only the third, which the pool had no place for"
    assert again == first
    assert first == pytest.approx([float(plain(sample)["loss"].detach()) for sample in samples], rel=1e-3)


@pytest.mark.parametrize("draft", ["right", "wrong in the middle", "too short", "none"])
def test_a_draft_changes_no_answer(model: Any, draft: str) -> None:
    backbone = Backbone.of(model)
    full = backbone.new_cache()
    backbone.prefill(CONTEXT, full)
    seen, question = full.view(), (7, 8, 9)
    decoded = [int(backbone.forward(question, seen).argmax())]
    while len(decoded) < LONGEST_ANSWER:
        decoded.append(int(backbone.forward(decoded[-1:], seen).argmax()))
    end = decoded[20]
    decoded = decoded[: decoded.index(end) + 1]
    middle = len(decoded) // 2
    drafts = {
        "right": (*decoded, 5, 5),
        "wrong in the middle": (*decoded[:middle], decoded[middle] + 1, 5),
        "too short": decoded[:middle],
        "none": (),
    }
    assert answer_of(backbone, full, question, drafts[draft], end) == tuple(decoded)
    assert full.n_slots == len(CONTEXT)


def test_notes_spare_scoring_and_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run, with another restorer, prepares the same from them; one beside another evictor does not use them."""
    model = tiny_model("llama")
    backbone, codec = Backbone.of(model), Codec.of(tiny_tokenizer_kept())
    sample = RecallSample(CONTEXT, ((7, 8), (9, 10, 11)), ((), (12,)), 2, 0.3)
    restorer = moved(RestoreKV.untrained(model, n=4), model)  # type: ignore[arg-type]

    def loss(evictor: str) -> float:
        objective = RestorerObjective(backbone, codec, restorer, EVICTORS[evictor], notes=tmp_path)  # type: ignore[arg-type]
        return float(objective(sample)["loss"].detach())

    first = loss("knorm")
    (file,) = tmp_path.iterdir()

    def refuse(*_: Any) -> Any:
        raise AssertionError("scored again")

    monkeypatch.setattr(type(EVICTORS["knorm"]), "scores", refuse)
    assert loss("knorm") == first
    loss("snapkv")
    assert len(list(tmp_path.iterdir())) == 2
    file.write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="scored again"):
        loss("knorm")


def test_contexts_come_again_with_another_share(layout: Layout) -> None:
    source = RecallSource(PROSE, sizes=(300, 400))
    samples = Samples(layout, {"recall": source}, {"recall": 1.0}, 6, "0", 2, source.with_another_share)
    first, again, third = samples[0], samples[2], samples[4]
    assert first.context == again.context == third.context != samples[1].context
    assert len({first.share, again.share, third.share}) == 3 and samples[2] == again


class TestTrainer:
    PLAN: ClassVar[dict[str, Any]] = {
        "steps": 4,
        "contexts_per_step": 2,
        "sizes": (300, 400),
        "n": 3,
        "rank": 2,
        "save_steps": 2,
        "lr": 0.01,
        "evictor": "knorm",
    }

    def model(self) -> Any:
        return build(tiny_config("llama", num_hidden_layers=2), seed=3)

    def test_a_killed_run_goes_on_and_ends_the_same(self, tmp_path: Path, monkeypatch: Any) -> None:
        plan = RestorerPlan(**self.PLAN)
        trained = train_restorer(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "whole")
        calls, original = [], RestorerObjective.forward

        def killed(self: RestorerObjective, sample: RecallSample) -> Any:
            calls.append(1)
            if len(calls) == 6:  # after the first checkpoint
                raise KeyboardInterrupt
            return original(self, sample)

        monkeypatch.setattr(RestorerObjective, "forward", killed)
        with pytest.raises(KeyboardInterrupt):
            train_restorer(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "killed")
        monkeypatch.undo()
        train_restorer(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "killed")
        for file in ("adapter_model.safetensors", "restore_embeddings.safetensors"):
            one, other = (load_file(tmp_path / f"{run}/restorer/{file}") for run in ("whole", "killed"))
            assert all(torch.equal(one[name], other[name]) for name in one)
        untrained = RestoreKV.untrained(self.model(), n=3, rank=2, seed=plan.seed)
        assert not torch.equal(trained.embeddings, untrained.embeddings)
        assert (tmp_path / "killed/loss.png").stat().st_size > 0
        assert RestoreKV.from_pretrained(tmp_path / "killed/restorer").config == trained.config
        assert trained.config.training["steps"] == 4 and trained.config.evictor == "knorm"
        assert trained.config.largest_share == plan.shares[1]

    def test_parts_can_be_left_as_they_are(self, tmp_path: Path) -> None:
        plan = RestorerPlan(**self.PLAN | {"steps": 1, "targets": ("q_proj", "v_proj"), "fixed_embeddings": True})
        trained = train_restorer(self.model(), tiny_tokenizer_kept(), plan, tmp_path)
        untrained = RestoreKV.untrained(self.model(), n=3, rank=2, seed=plan.seed)
        assert torch.equal(trained.embeddings, untrained.embeddings)
        names = set(load_file(tmp_path / "restorer/adapter_model.safetensors"))
        assert {name.split(".")[-3] for name in names} == {"q_proj", "v_proj"}

    def test_training_lowers_the_loss(self) -> None:
        model = tiny_model("llama").requires_grad_(False)
        restorer = RestoreKV.untrained(model, n=4, rank=4)
        backbone, codec = Backbone.of(model), Codec.of(tiny_tokenizer_kept())
        objective = RestorerObjective(backbone, codec, restorer, EVICTORS["random"])
        objective.requires_grad_(True)
        optimizer = torch.optim.AdamW(objective.parameters(), lr=0.02)
        losses = []
        for _ in range(25):
            optimizer.zero_grad()
            loss = objective(RecallSample(CONTEXT, ((7, 8), (20, 21)), ((), ()), 2, 0.15))["loss"]
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]
