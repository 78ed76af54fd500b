"""Training: samples that say what they claim, the loss of the library's own edit, gradients where they belong, resuming."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import moved
from safetensors.torch import load_file
from tiny import build, tiny_config, tiny_model, tiny_tokenizer

from contextmem import ContextMemory, IdentityMismatch, InvalidInput, KVErase, KVEraser
from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.eraser import CONDITIONINGS, EraserConfig
from contextmem.framing import framing_of
from contextmem.records import uniform
from contextmem.training.eraser import TrainingPlan, train_eraser
from contextmem.training.layout import Layout
from contextmem.training.objective import EraserObjective
from contextmem.training.prose import HELD_OUT, TRAIN, prose_of
from contextmem.training.samples import Erasure, Sample
from contextmem.training.samples.distractor_qa import DistractorQaSource, questions_of, with_one_more
from contextmem.training.samples.niah import NiahSource
from contextmem.training.samples.span_neighbour import ANCHORS, SpanNeighbourSource
from contextmem.training.trainer import Samples

PROSE = prose_of(part=TRAIN)
RECORD = {
    "question": "Where is the castle?",
    "answers": ["Prague"],
    "documents": [
        {"title": "Castles", "text": "The castle stands in Prague.", "supporting": True},
        {"title": "Rivers", "text": "The river is long.", "supporting": False},
    ],
}


@pytest.fixture(scope="module")
def layout() -> Layout:
    codec = Codec.of(tiny_tokenizer_kept())
    return Layout(codec, framing_of(codec))


def tiny_tokenizer_kept(made: list[Any] = []) -> Any:  # noqa: B006  (one tokenizer, kept alive)
    made.append(tiny_tokenizer()) if not made else None
    return made[0]


def _trained(model: Any, plan: TrainingPlan, folder: Path) -> Path:
    """The weights' file of an eraser that was trained into `folder`."""
    train_eraser(model, tiny_tokenizer_kept(), plan, folder)
    return folder / "eraser/adapter_model.safetensors"


def text_of(layout: Layout, ids: Any) -> str:
    return layout.codec.decode(list(ids))


class TestSamples:
    def test_the_halves_of_the_prose_are_disjoint(self) -> None:
        train, held_out, every = (
            {paragraph for document in prose_of(part=part).documents for paragraph in document}
            for part in (TRAIN, HELD_OUT, None)
        )
        assert train and held_out and not train & held_out
        assert train | held_out == every

    def test_prose_from_files_and_folders(self, tmp_path: Path) -> None:
        paragraph = "A paragraph that is long enough to count as one, which takes more than eighty characters."
        (tmp_path / "a.txt").write_text(paragraph + "\n\n| a table |\n\n" + paragraph.upper())
        (tmp_path / "b.jsonl").write_text(json.dumps({"text": paragraph.lower()}) + "\n")
        assert sorted(prose_of(tmp_path).documents) == sorted([(paragraph, paragraph.upper()), (paragraph.lower(),)])
        with pytest.raises(InvalidInput, match="no file or folder"):
            prose_of(tmp_path / "nowhere")

    @pytest.mark.parametrize("seed", range(6))
    def test_needles(self, layout: Layout, seed: int) -> None:
        sample = NiahSource(PROSE, sizes=((2048, 1.0),)).sample(layout, random.Random(seed))
        assert sample == NiahSource(PROSE, sizes=((2048, 1.0),)).sample(layout, random.Random(seed))
        assert len(sample.context) <= 2048 + 300 and len(sample.erasures) in (2, 3)
        for erasure in sample.erasures:
            span = text_of(layout, sample.context[erasure.start : erasure.stop])
            rest = text_of(layout, sample.context[: erasure.start] + sample.context[erasure.stop :])
            value = "".join(c for c in text_of(layout, erasure.answer) if c.isdigit())
            assert value in rest and value not in span
        spans = {(e.start, e.stop) for e in sample.erasures}
        assert len(spans) == 2

    @pytest.mark.parametrize("seed", range(6))
    def test_span_neighbours(self, layout: Layout, seed: int) -> None:
        sample = SpanNeighbourSource(PROSE, every_anchor=True).sample(layout, random.Random(seed))
        assert [e.kind for e in sample.erasures[:3]] == list(ANCHORS)
        clean = text_of(layout, sample.clean or ())
        asked = text_of(layout, layout.question("\n\nThe same document again:"))
        for erasure in sample.erasures:
            anchor = text_of(layout, erasure.question).removeprefix(asked)
            assert anchor + text_of(layout, erasure.answer) in clean
            if erasure.kind == "before":
                before = text_of(layout, sample.context[: erasure.start])
                after = text_of(layout, sample.context[erasure.stop :])
                assert before.endswith(anchor) and after.startswith(text_of(layout, erasure.answer))

    def test_distractors(self, layout: Layout, tmp_path: Path) -> None:
        other = RECORD | {"answers": ["Brno"], "question": "Where is the inn?"}
        other["documents"] = [{"title": "Inns", "text": "The inn is in Brno.", "supporting": True}]
        (tmp_path / "qa.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(other))
        source = DistractorQaSource(questions_of(tmp_path / "qa.jsonl"))
        spans, own_words = [], set()
        for seed in range(40):
            sample = source.sample(layout, random.Random(seed))
            assert sample.check == "clean_and_misled"
            for erasure in sample.erasures:
                span = text_of(layout, sample.context[erasure.start : erasure.stop])
                assert erasure.answer[-1] == layout.end[0]
                answer = text_of(layout, erasure.answer[:-1]).strip()
                wrong = {"Prague": "Brno", "Brno": "Prague"}[answer]
                assert answer not in span and (wrong in span or "river" in span)
                rest = text_of(layout, sample.context[: erasure.start] + sample.context[erasure.stop :])
                assert answer in rest
                own_words.add(erasure.own_words)
            spans.append(span)
        kinds = ["Where is" in span for span in spans], ["stands in" in span or "inn is in" in span for span in spans]
        assert own_words == {True, False} and all(any(kind) and not all(kind) for kind in kinds)
        with pytest.raises(InvalidInput, match="no file"):
            questions_of(tmp_path / "nowhere.jsonl")

    def test_a_distractor_stands_between_passages_or_between_sentences(self) -> None:
        texts = ["One. Two! (Three?) Four.\n\n", "Five. Six.\n\n"]
        before = set()
        for seed in range(60):
            mixed = with_one_more(texts, "Wrong.\n\n", random.Random(seed))
            place = mixed.index("Wrong.\n\n")
            before.add("".join(mixed[:place]))
            assert "".join(mixed[:place] + mixed[place + 1 :]) == "".join(texts)
        one, two = texts
        assert before == {"", "One. ", "One. Two! ", "One. Two! (Three?) ", one, one + "Five. ", one + two}

    def test_records_of_known_datasets(self) -> None:
        squad = {"title": "Castles", "context": "In Prague.", "question": "Where?", "answers": {"text": ["Prague"]}}
        assert uniform(squad)["documents"] == [{"title": "Castles", "text": "In Prague.", "supporting": True}]
        hotpot = {
            "question": "Where?",
            "answer": "Prague",
            "context": {"title": ["A", "B"], "sentences": [["One. ", "Two."], ["Three."]]},
            "supporting_facts": {"title": ["B"], "sent_id": [0]},
        }
        assert [d["supporting"] for d in uniform(hotpot)["documents"]] == [False, True]
        assert uniform(RECORD) == RECORD

    def test_a_dataset_is_read_where_there_is_no_such_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        record = {"title": "Castles", "context": "In Prague.", "question": "Where?", "answers": {"text": ["Prague"]}}
        (tmp_path / "squad").mkdir()
        (tmp_path / "squad" / "train.jsonl").write_text(json.dumps(record))
        (asked,) = questions_of(str(tmp_path / "squad"))
        assert (asked.question, asked.answer, asked.supporting) == ("Where?", "Prague", "Castles\nIn Prague.")

    def test_by_number_whatever_the_order(self, layout: Layout) -> None:
        sources: Any = {"niah": NiahSource(PROSE, sizes=((1024, 1.0),)), "span_neighbour": SpanNeighbourSource(PROSE)}
        samples = Samples(layout, sources, {"niah": 0.5, "span_neighbour": 0.5}, 8, "seed")
        again = Samples(layout, sources, {"niah": 0.5, "span_neighbour": 0.5}, 8, "seed")
        assert samples[5] == again[5] and samples[5] != again[4]


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize(("adapter", "slots"), [("lora", None), ("full", None), ("lora", 4)])
def test_the_loss_is_that_of_the_librarys_own_edit(conditioning: str, adapter: str, slots: int | None) -> None:
    """Cross-entropy through the objective = minus the log-probability a memory gives the answer after erasing."""
    model = tiny_model("llama")
    eraser = moved(KVEraser.untrained(model, conditioning=conditioning, adapter=adapter, slots=slots), model)
    memory = ContextMemory(model, tiny_tokenizer(), eraser=eraser)
    segments = [memory.append(t) for t in ("One two three. ", "Four five six. ", "Seven eight nine, and ten at last.")]
    question, answer = memory._codec.encode("Which?"), memory._codec.encode("Three")
    opened = (*question, *memory._framing.answer_open)
    erasure = Erasure(segments[1].start, segments[1].stop, opened, answer, "test")
    backbone = Backbone.of(model)
    objective = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config, "answer")
    loss = float(objective(Sample(memory.token_ids, (erasure,)))["loss"].detach())
    memory.retract(segments[1], method=KVErase(question="Which?"))
    assert loss == pytest.approx(-memory.score("Three", question="Which?") / len(answer), rel=1e-4)


@pytest.mark.parametrize(("own_words", "slots"), [(False, None), (True, None), (True, 3)])
def test_the_teacher_is_the_context_without_the_span(model: Any, own_words: bool, slots: int | None) -> None:
    """The loss is the divergence of a memory that erased from one that recomputed, over the answer given or its own."""
    eraser = moved(KVEraser.untrained(model, slots=slots), model)
    memory = ContextMemory(model, tiny_tokenizer(), eraser=eraser)
    segments = [memory.append(t) for t in ("One two three. ", "Four five six. ", "Seven eight nine, and ten at last.")]
    question, answer = memory._codec.encode("Which?"), memory._codec.encode("Three")
    erasure = Erasure(segments[1].start, segments[1].stop, question, answer, "test", own_words)
    backbone = Backbone.of(model)
    if own_words:
        without = memory.fork()
        without.retract(segments[1], method="recompute")
        cache = without.past_key_values
        logits = backbone.forward(question, cache)
        answer = []
        while len(answer) < 24 and erasure.answer[-1] not in answer:
            answer.append(int(logits.argmax()))
            logits = backbone.forward(answer[-1:], cache)
    objective = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config)
    loss = objective(Sample(memory.token_ids, (erasure,)))["loss"]
    told = []
    for method in ("recompute", "kveraser"):
        edited = memory.fork()
        edited.retract(segments[1], method=method)
        logits = backbone.forward((*question, *answer[:-1]), edited.past_key_values, all_logits=True)
        told.append(logits[-len(answer) :].double().log_softmax(-1))
    expected = (told[0].exp() * (told[0] - told[1])).sum() / 8
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-3, abs=1e-5)


def test_contexts_of_a_pool_are_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time costs the erase pass and the answer only, and gives the same loss."""
    model = tiny_model("llama")
    eraser = moved(KVEraser.untrained(model), model)
    backbone = Backbone.of(model)
    samples = [Sample(tuple(range(5 + i, 60 + i)), (Erasure(20, 30, (7, 8), (9, 2), "test"),)) for i in range(3)]
    objective = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config, pool=2)
    plain = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config)
    fed: list[int] = []
    original = Backbone.forward
    monkeypatch.setattr(Backbone, "prefill", lambda s, ids, cache, **o: fed.append(len(ids)) or original(s, ids, cache))
    first = [float(objective(sample)["loss"].detach()) for sample in samples]
    n_first = len(fed)
    again = [float(objective(sample)["loss"].detach()) for sample in samples]
    assert len(fed) - n_first == n_first // 3, "only the third, which the pool had no place for"
    assert again == first == [float(plain(sample)["loss"].detach()) for sample in samples]


def test_a_sharper_teacher_is_surer_of_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of needles: sentences that were taught so came out surer of every word than the model is."""
    model = tiny_model("llama")
    backbone = Backbone.of(model)
    adapter = KVEraser.untrained(model).adapter_for(backbone)
    sample = Sample(tuple(range(5, 60)), (Erasure(40, 55, (7, 8), (9, 2), "needle"),))
    sentence = Sample(tuple(range(5, 60)), (Erasure(40, 55, (7, 8), (9, 2), "qa"),))
    taught: list[torch.Tensor] = []

    def watched(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        taught.append(one.log_softmax(-1))
        return (one - other).square().sum()

    monkeypatch.setattr("contextmem.training.objective._divergence", watched)
    for sharpness in (1.0, 2.0):
        EraserObjective(backbone, adapter, EraserConfig(), sharpness=sharpness)(sample)
        EraserObjective(backbone, adapter, EraserConfig(), sharpness=sharpness)(sentence)
    plain, sentence_once, sharp, sentence_again = taught
    assert torch.equal(sentence_once, sentence_again)
    assert torch.equal(plain.argmax(-1), sharp.argmax(-1))
    assert torch.allclose(sharp, (2 * plain).log_softmax(-1), atol=1e-5)
    assert (sharp.exp().amax(-1) > plain.exp().amax(-1)).all()


@pytest.mark.parametrize(("kind", "slots"), [("needle", None), ("qa", None), ("qa", 2)])
@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_what_teaches_little_is_left_out(
    monkeypatch: pytest.MonkeyPatch, limit: float, kind: str, slots: int | None
) -> None:
    """What dropping the slots would erase as well."""
    model = tiny_model("llama")
    eraser = moved(KVEraser.untrained(model, slots=slots), model)
    backbone = Backbone.of(model)
    monkeypatch.setattr("contextmem.training.objective._HARD", limit)
    sample = Sample(tuple(range(5, 60)), (Erasure(20, 30, (7, 8), (9, 2), kind),))
    objective = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config, easy=0.0)
    loss = float(objective(sample)["loss"].detach())
    assert (objective.kept, loss > 0) == ((1, True) if limit == 0.0 else (0, False))
    easy = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config, easy=1.0)
    assert float(easy(sample)["loss"].detach()) > 0 and easy.kept == 1


def test_samples_of_a_pool_come_again(layout: Layout) -> None:
    sources: Any = {"span_neighbour": SpanNeighbourSource(PROSE)}
    samples = Samples(layout, sources, {"span_neighbour": 1.0}, 7, "seed", 3)
    assert samples[1] == samples[4] and samples[1] != samples[2] and len(samples) == 7


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_needles_is_in_rulers_wording(layout: Layout, share: float) -> None:
    source = NiahSource(PROSE, sizes=((512, 1.0),), share_ruler=share)
    questions = [text_of(layout, source.sample(layout, random.Random(seed)).erasures[0].question) for seed in range(24)]
    n_ruler = sum("special magic number" in question for question in questions)
    assert n_ruler == 24 if share else n_ruler < 8


def test_answers_come_in_the_dress_that_models_give_them(layout: Layout) -> None:
    """An eraser that was only trained on bare values goes astray after a quotation mark that the model puts first."""
    source, starts = NiahSource(PROSE, sizes=((400, 1.0),)), set()
    for seed in range(40):
        for erasure in source.sample(layout, random.Random(seed)).erasures:
            answer = text_of(layout, erasure.answer[:-1])
            value = "".join(c for c in answer if c.isdigit())
            if not erasure.own_words:
                starts.add(answer.partition(value)[0][:3])
    assert {" ", ' "', " **", "\n\nT"} <= starts


def test_a_lone_needle_leaves_no_answer(layout: Layout) -> None:
    sample = NiahSource(PROSE, sizes=((1024, 1.0),), share_lone=1.0).sample(layout, random.Random(0))
    assert len(sample.erasures) == 2
    for erasure in sample.erasures:
        value = "".join(c for c in text_of(layout, erasure.answer) if c.isdigit())
        assert value not in text_of(layout, sample.context)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_gradients_reach_the_eraser_and_nothing_else(model: Any, adapter: str) -> None:
    eraser = moved(KVEraser.untrained(model, adapter=adapter), model)
    backbone = Backbone.of(model)
    module = eraser.adapter_for(backbone).module.requires_grad_(True)
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    try:
        objective = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config)
        assert {id(p) for p in objective.parameters()} == {id(p) for p in module.parameters()}
        context = tuple(range(5, 60))
        objective(Sample(context, (Erasure(40, 50, (7, 8), (9, 10), "test"),)))["loss"].backward()
        assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in module.parameters())
        assert all(p.grad is None for p in model.parameters())
    finally:
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)


def test_only_samples_that_pass_their_check_count() -> None:
    model = tiny_model("llama")
    eraser = KVEraser.untrained(model)
    backbone = Backbone.of(model)
    objective = EraserObjective(backbone, eraser.adapter_for(backbone), eraser.config, target="answer")
    context, question = tuple(range(5, 60)), (7, 8)
    without = backbone.new_cache()
    backbone.prefill(context[:20] + context[30:], without)
    right = int(backbone.forward(question, without).argmax())
    wrong = (right + 1) % 300
    for check, answer, kept in (("clean", right, 1), ("clean", wrong, 0), ("none", wrong, 1)):
        objective.kept = 0
        loss = objective(Sample(context, (Erasure(20, 30, question, (answer,), "test"),), check))["loss"]
        assert objective.kept == kept and (float(loss.detach()) > 0) == bool(kept)
    with_it = backbone.new_cache()
    backbone.prefill(context, with_it)
    misled = int(backbone.forward(question, with_it).argmax()) != right
    objective.kept = 0
    objective(Sample(context, (Erasure(20, 30, question, (right,), "test"),), "clean_and_misled"))
    assert objective.kept == int(misled)


class TestTrainer:
    PLAN: ClassVar[dict[str, Any]] = {
        "stage1_steps": 2,
        "stage2_steps": 4,
        "contexts_per_step": 2,
        "sizes": ((400, 1.0),),
        "rank": 2,
        "save_steps": 2,
        "lr": 0.01,
        "stage2_lr": 0.01,
    }

    def model(self) -> Any:
        return build(tiny_config("llama", num_hidden_layers=2), seed=3)

    def test_a_killed_run_goes_on_and_ends_the_same(self, tmp_path: Path, monkeypatch: Any) -> None:
        plan = TrainingPlan(**self.PLAN)
        train_eraser(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "whole")
        calls = []
        original = EraserObjective.forward

        def killed(self: EraserObjective, sample: Sample) -> Any:
            calls.append(1)
            if len(calls) == 4 + 6:  # in the second stage, after its first checkpoint
                raise KeyboardInterrupt
            return original(self, sample)

        monkeypatch.setattr(EraserObjective, "forward", killed)
        with pytest.raises(KeyboardInterrupt):
            train_eraser(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "killed")
        monkeypatch.undo()
        counted = []

        def counting(self: EraserObjective, sample: Sample) -> Any:
            counted.append(1)
            return original(self, sample)

        monkeypatch.setattr(EraserObjective, "forward", counting)
        trained = train_eraser(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "killed")
        assert len(counted) == 4, "it went on from the checkpoint"
        one, other = (load_file(tmp_path / f"{run}/eraser/adapter_model.safetensors") for run in ("whole", "killed"))
        untrained = KVEraser.untrained(self.model(), rank=2, seed=plan.seed)
        untrained.save_pretrained(tmp_path / "untrained")
        zero = load_file(tmp_path / "untrained/adapter_model.safetensors")
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert any(not torch.equal(one[name], zero[name]) for name in one)
        assert (tmp_path / "killed/loss.png").stat().st_size > 0
        assert trained.config.training["contexts"] == {"stage-1": 4, "stage-2": 8}
        again = KVEraser.from_pretrained(tmp_path / "killed/eraser")
        assert again.config == trained.config

    def test_an_eraser_is_trained_on_and_tells_both_runs(self, tmp_path: Path) -> None:
        plan = TrainingPlan(**self.PLAN)
        first = train_eraser(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "first")
        more = TrainingPlan(
            start=str(tmp_path / "first/eraser"), stage1_steps=0, stage2_steps=1, stage2_lr=1e-6, seed=8, save_steps=1
        )
        second = train_eraser(self.model(), tiny_tokenizer_kept(), more, tmp_path / "second")
        assert second.config.training["start"] == first.config.training
        assert second.config.training["seed"] == 8 and str(tmp_path) not in json.dumps(second.config.training)
        one, other = (load_file(tmp_path / f"{run}/eraser/adapter_model.safetensors") for run in ("first", "second"))
        assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)
        with pytest.raises(IdentityMismatch):
            train_eraser(build(tiny_config("llama"), seed=9), tiny_tokenizer_kept(), more, tmp_path / "third")

    def test_an_eraser_is_trained_on_with_more_targets(self, tmp_path: Path) -> None:
        """It begins as what it was; matrices that were there go on, new ones are trained beside them."""
        train_eraser(self.model(), tiny_tokenizer_kept(), TrainingPlan(**self.PLAN), tmp_path / "first")
        narrow = load_file(tmp_path / "first/eraser/adapter_model.safetensors")
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
        more = {"start": str(tmp_path / "first/eraser"), "stage1_steps": 0, "stage2_steps": 1, "save_steps": 1}
        plan = TrainingPlan(**more, targets=targets, stage2_lr=1e-6)
        wide = load_file(_trained(self.model(), plan, tmp_path / "wide"))
        added = {name for name in wide if ".up_proj." in name}
        assert wide.keys() - narrow.keys() == added and added
        assert all(torch.allclose(wide[name], narrow[name], atol=1e-4) for name in narrow)
        assert all(wide[name].abs().max() < 1e-4 for name in added if "lora_B" in name), "it computes what it did"
        with pytest.raises(InvalidInput, match="leave out"):
            train_eraser(
                self.model(), tiny_tokenizer_kept(), TrainingPlan(**more, targets=("up_proj",)), tmp_path / "other"
            )

    @pytest.mark.parametrize(("asked", "slots"), [(None, 3), (0, None), (5, 5)])
    def test_an_eraser_that_is_trained_on_keeps_its_form(self, tmp_path: Path, asked: int | None, slots: Any) -> None:
        """Unless the plan names another one; weights trained for one form are not silently used in the other."""
        KVEraser.untrained(self.model(), rank=2, slots=3).save_pretrained(tmp_path / "first")
        plan = TrainingPlan(start=str(tmp_path / "first"), slots=asked, stage1_steps=0, stage2_steps=1, save_steps=1)
        trained = train_eraser(self.model(), tiny_tokenizer_kept(), plan, tmp_path / "second")
        assert trained.config.slots == slots
        assert KVEraser.from_pretrained(tmp_path / "second/eraser").config.slots == slots

    def test_two_processes_train_what_one_does_with_twice_the_contexts(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from test_training import TestTrainer, tiny_tokenizer_kept\n"
            "from contextmem.training.eraser import TrainingPlan, train_eraser\n"
            "plan = TrainingPlan(**TestTrainer.PLAN | {'contexts_per_step': 1})\n"
            "train_eraser(TestTrainer().model(), tiny_tokenizer_kept(), plan, Path(sys.argv[1]))\n"
        )
        (tmp_path / "script.py").write_text(script)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        done = subprocess.run(
            [*launch, str(tmp_path / "script.py"), str(tmp_path / "two")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        one = load_file(_trained(self.model(), TrainingPlan(**self.PLAN), tmp_path / "one"))
        two = load_file(tmp_path / "two/eraser/adapter_model.safetensors")
        start = KVEraser.untrained(self.model(), rank=2, seed=TrainingPlan.seed)
        start.save_pretrained(tmp_path / "start")
        fresh = load_file(tmp_path / "start/adapter_model.safetensors")
        moved_by = sum(float((one[name] - fresh[name]).float().square().sum()) for name in one) ** 0.5
        apart = sum(float((one[name] - two[name]).float().square().sum()) for name in one) ** 0.5
        # transformers 5.2 divides the gradients that one process adds up twice, so that fewer of them are clipped.
        limit = 0.25 if version("transformers").startswith("5.2.") else 0.01
        assert moved_by > 0.01 and apart < limit * moved_by

    def test_a_full_copy_trains_and_saves(self, tmp_path: Path) -> None:
        plan = TrainingPlan(**self.PLAN | {"adapter": "full", "stage1_steps": 0, "stage2_steps": 1})
        train_eraser(self.model(), tiny_tokenizer_kept(), plan, tmp_path)
        assert KVEraser.from_pretrained(tmp_path / "eraser").config.adapter == "full"

    def test_training_lowers_the_loss(self, tmp_path: Path) -> None:
        """On four contexts that are seen again and again."""
        model = self.model().requires_grad_(False)
        eraser = KVEraser.untrained(model, rank=4)
        backbone = Backbone.of(model)
        adapter = eraser.adapter_for(backbone)
        objective = EraserObjective(backbone, adapter, EraserConfig())
        optimizer = torch.optim.AdamW(objective.parameters(), lr=0.02)
        sample = Sample(tuple(range(5, 60)), (Erasure(20, 30, (7, 8), (9, 10), "test"),))
        losses = []
        for _ in range(25):
            optimizer.zero_grad()
            loss = objective(sample)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.8 * losses[0]

    def test_a_folder_belongs_to_one_plan(self, tmp_path: Path) -> None:
        train_eraser(
            self.model(),
            tiny_tokenizer_kept(),
            TrainingPlan(**self.PLAN | {"stage1_steps": 1, "stage2_steps": 0}),
            tmp_path,
        )
        with pytest.raises(InvalidInput, match="another plan"):
            train_eraser(self.model(), tiny_tokenizer_kept(), TrainingPlan(**self.PLAN | {"seed": 5}), tmp_path)

    def test_plans_from_files_and_flags(self, tmp_path: Path) -> None:
        (tmp_path / "plan.toml").write_text('rank = 8\nlr = 0.1\nsizes = [[512, 1.0]]\ntext = ["a", "b"]\n')
        plan = TrainingPlan.read(tmp_path / "plan.toml", {"lr": 0.2, "seed": None})
        assert (plan.rank, plan.lr, plan.sizes, plan.text) == (8, 0.2, ((512, 1.0),), ("a", "b"))
        (tmp_path / "plan.toml").write_text("ranks = 8\n")
        with pytest.raises(InvalidInput, match="ranks"):
            TrainingPlan.read(tmp_path / "plan.toml", {})
        with pytest.raises(InvalidInput, match="cannot be read"):
            TrainingPlan.read(tmp_path / "nowhere.toml", {})
