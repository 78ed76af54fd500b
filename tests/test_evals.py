"""Evaluations: intervals, held-out samples, rows that resume and hold no text. On a tiny model, so figures mean nothing."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import moved
from tiny import build, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from contextmem import ContextMemory, InvalidInput, KVEraser, RestoreKV
from contextmem.compaction import compacted
from contextmem.evals.bootstrap import mean_interval
from contextmem.evals.kvpress.run import run as run_kvpress
from contextmem.evals.niah.measure import METHODS, PROBES
from contextmem.evals.niah.run import run as run_niah
from contextmem.evals.niah.samples import derived_haystack, filled, haystack_of
from contextmem.evals.rows import RowLog
from contextmem.evals.ruler import TASKS, Case, Material
from contextmem.evals.ruler.controls import CONTROLS
from contextmem.evals.ruler.gains import gain_lines, gains_of
from contextmem.evals.ruler.measure import Configuration, Probe, measure_case
from contextmem.evals.ruler.published_set import PublishedSet
from contextmem.evals.ruler.report import plotted
from contextmem.evals.ruler.run import run as run_ruler
from contextmem.evals.span_neighbour.run import run as run_span_neighbour
from contextmem.eviction import evictor_named
from contextmem.retraction import METHODS as RETRACTIONS
from contextmem.training.layout import Layout
from contextmem.training.prose import HELD_OUT, prose_of
from contextmem.training.samples.distractor_qa import questions_of

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Path:
    """A folder with a tiny model, and an eraser for it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = build(tiny_config("llama", num_hidden_layers=2), seed=3)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    KVEraser.untrained(model).save_pretrained(folder / "eraser")
    return folder


def test_intervals() -> None:
    assert mean_interval([1.0] * 9) == (1.0, 1.0, 1.0)
    mean, low, high = mean_interval([1, 0] * 50)
    assert mean == 0.5 and 0.38 < low < 0.43 and 0.57 < high < 0.62
    assert mean_interval([1, 0] * 50) == (mean, low, high)


class TestRows:
    def test_other_settings_are_refused(self, tmp_path: Path) -> None:
        RowLog(tmp_path / "rows.jsonl", {"seed": 0}).add("a", "recompute", score=1)
        with pytest.raises(InvalidInput, match="seed: 0 there, 1 here"):
            RowLog(tmp_path / "rows.jsonl", {"seed": 1})

    def test_only_rows_of_another_variant_are_measured_again(self, tmp_path: Path) -> None:
        log = RowLog(tmp_path / "rows.jsonl", {}, {"kveraser": "old"})
        log.add("a", "recompute", score=1)
        log.add("a", "kveraser", score=0)
        assert RowLog(tmp_path / "rows.jsonl", {}, {"kveraser": "old"}).rows == log.rows
        later = RowLog(tmp_path / "rows.jsonl", {}, {"kveraser": "new"})
        assert later.n_dropped == 1 and later.has("a", "recompute") and not later.has("a", "kveraser")
        later.add("a", "kveraser", score=1)
        assert RowLog(tmp_path / "rows.jsonl", {}, {"kveraser": "new"}).rows == later.rows
        later.add("b", "kveraser", kind="latency", seconds=1.0)
        newest = RowLog(tmp_path / "rows.jsonl", {}, {"kveraser": "newest"}, timed=("latency",))
        assert [row["id"] for row in newest.of(method="kveraser")] == ["b"]


def test_every_removing_method_is_evaluated() -> None:
    assert set(METHODS) == {"none", *RETRACTIONS} - {"crop"}


class TestHaystacks:
    def layout(self, memory: ContextMemory) -> Layout:
        return Layout(memory._codec, memory._framing)

    @pytest.mark.smollm2
    @pytest.mark.parametrize("size", [512, 2048])
    def test_either_needle_is_a_segment_of_its_own(self, smol: ContextMemory, size: int) -> None:
        sample = haystack_of(self.layout(smol), prose_of(part=HELD_OUT), size, 1, 0)
        assert sample == haystack_of(self.layout(smol), prose_of(part=HELD_OUT), size, 1, 0)
        first, second = (sample.texts[place] for place in sample.places)
        assert first == sample.needles[0].fact + " " and second == sample.needles[1].fact + " "
        assert sample.places[0] < sample.places[1]
        text = "".join(sample.texts)
        assert all(text.count(needle.value) == 1 for needle in sample.needles)
        _, spans = self.layout(smol).context(sample.texts)
        assert 0.85 * size < spans[-1][1] + 200 <= size + 60

    @pytest.mark.smollm2
    def test_what_was_derived_names_its_needle(self, smol: ContextMemory) -> None:
        sample = derived_haystack(self.layout(smol), prose_of(part=HELD_OUT), 512, 0, 0)
        segments = filled(smol, sample)
        assert sample.derived is not None and segments[sample.derived].parents == (segments[sample.places[0]].id,)
        assert sample.needles[0].value in segments[sample.derived].text


def test_niah_rows_add_up_and_hold_no_text(place: Path, tmp_path: Path) -> None:
    options: Any = {"model_name": str(place / "model"), "eraser": str(place / "eraser"), "n_derived": 1}
    run_niah(tmp_path, samples={700: 1}, say=lambda _: None, **options)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(METHODS) + len(PROBES)
    texts = {"id", "method", "kind", "needle", "outcome", "variant"}
    assert all(isinstance(v, int | float) or name in texts for row in rows for name, v in row.items())
    table = run_niah(tmp_path, samples={700: 2}, latency_sizes=(700,), repeats=1, say=lambda _: None, **options)
    again = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert again[: len(rows)] == rows and len(again) == len(rows) + 2 * len(METHODS) + 4
    assert all(f"| {method} |" in table for method in METHODS)
    assert (tmp_path / "table.md").read_text() == table
    assert (tmp_path / "plot.png").stat().st_size > 0 and json.loads((tmp_path / "metrics.json").read_text())[
        "seed"
    ] == 0


def test_niah_within_a_budget(place: Path, tmp_path: Path) -> None:
    options: Any = {"model_name": str(place / "model"), "eraser": str(place / "eraser"), "n_derived": 1}
    table = run_niah(tmp_path, samples={700: 1}, kept=0.5, say=lambda _: None, **options)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(METHODS) and "Only 50%" in table
    n_tokens = rows[0]["suffix"] + rows[0]["span"]  # and what stands before the first needle
    assert all(row["held"] < 0.6 * max(n_tokens, 500) for row in rows)
    with pytest.raises(InvalidInput, match=r"kept: 0\.5 there, None here"):
        run_niah(tmp_path, samples={700: 1}, say=lambda _: None, **options)
    with pytest.raises(InvalidInput, match="--latency-at"):
        run_niah(tmp_path, kept=0.5, latency_sizes=(700,), **options)


def test_niah_latency_alone_is_reported(place: Path, tmp_path: Path) -> None:
    """Plots without a sample of exact match have nothing to scale."""
    options: Any = {"model_name": str(place / "model"), "eraser": str(place / "eraser"), "n_derived": 0}
    table = run_niah(tmp_path, samples={}, latency_sizes=(700,), repeats=1, say=lambda _: None, **options)
    assert "| 700 |" in table and (tmp_path / "plot.png").stat().st_size > 0


class TestRuler:
    @pytest.fixture
    def material(self, tmp_path: Path) -> Material:
        memory = ContextMemory(build(tiny_config("llama")), tiny_tokenizer())
        record = {"question": "Where is the castle?", "answers": ["Prague"]}
        documents = [{"title": f"T{i}", "text": f"Text {i} is long.", "supporting": False} for i in range(3)]
        documents.append({"title": "Castles", "text": "The castle stands in Prague.", "supporting": True})
        (tmp_path / "qa.jsonl").write_text(json.dumps(record | {"documents": documents}))
        asked = questions_of(tmp_path / "qa.jsonl")
        layout = Layout(memory._codec, memory._framing)
        return Material(layout, prose_of(part=HELD_OUT), asked, asked)

    @pytest.mark.parametrize("name", list(TASKS))
    def test_the_context_holds_what_is_asked(self, material: Material, name: str) -> None:
        case = TASKS[name](material, random.Random(3), 3000)
        assert case == TASKS[name](material, random.Random(3), 3000)
        assert case is not None and all(answer in case.context for answer in case.answers)
        assert not any(answer in case.question + case.prefix for answer in case.answers)
        assert case.score(" and ".join(case.answers).upper()) == 1.0 and case.score("nothing") == 0.0
        if name not in ("qa_1", "qa_2"):
            assert 0.7 * 3000 < material.length(case.context) < 1.2 * 3000

    def test_there_are_thirteen_and_some_need_files(self, material: Material) -> None:
        assert len(TASKS) == 13
        without = Material(material.layout, material.prose)
        assert TASKS["qa_1"](without, random.Random(0), 500) is None

    def test_partial_scores(self, material: Material) -> None:
        case = TASKS["niah_multivalue"](material, random.Random(1), 2000)
        assert case is not None and len(case.answers) == 4 and case.score(case.answers[0]) == 0.25
        tracked = TASKS["vt"](material, random.Random(1), 2000)
        assert tracked is not None and len(tracked.answers) == 5

    def test_rows_add_up(self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Case, "score", lambda self, answer: 1.0)  # a random model answers nothing rightly
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        restorer = RestoreKV.untrained(model, n=4, evictor="knorm")
        restorer.config = replace(restorer.config, largest_share=0.1)  # what a memory leaves out is measured as well
        restorer.save_pretrained(tmp_path / "restorer")
        options: Any = {
            "model_name": str(place / "model"),
            "tasks": ("niah_single_2", "vt"),
            "evictors": ("knorm", "snapkv"),
            "ratios": (0.2,),
            "restorers": {"knorm": str(tmp_path / "restorer"), "snapkv": str(tmp_path / "restorer")},
            "say": lambda _: None,
        }
        run_ruler(tmp_path / "out", samples={600: 1}, **options)
        rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
        methods = {"full cache", "knorm@0.2", "knorm+restore@0.2", "snapkv@0.2", "snapkv+transfer@0.2"}
        assert len(rows) == 2 * 5 and {row["method"] for row in rows} == methods
        held = {row["method"]: row["held"] for row in rows if row["task"] == "vt"}
        assert held["knorm+restore@0.2"] == pytest.approx(held["knorm@0.2"], abs=1)
        assert held["knorm@0.2"] == pytest.approx(0.2 * held["full cache"], rel=0.1)
        table = run_ruler(tmp_path / "out", samples={600: 2}, **options)
        again = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
        assert again[:10] == rows and len(again) == 20
        assert all(f"| {method} |" in table for method in methods - {"full cache"})
        for row in again:
            assert 0 < row["mass"] <= 1 and 0 <= row.get("mass_restored", 0) < row["mass"]
            assert (row.get("mass_restored", 0) > 0) == ("+" in row["method"])
        assert (tmp_path / "out/plot.png").stat().st_size > 0

    def test_the_share_of_the_gap(self, tmp_path: Path) -> None:
        """Ten cases: the full cache does all, the evicted one 2, with slots 6, and one task loses what it had."""
        log = RowLog(tmp_path / "rows.jsonl")
        for number in range(10):
            for task, restored in (("niah_single_2", number < 6), ("vt", False)):
                about: Any = {"task": task, "size": 600}
                log.add(f"{task}-{number}", "full cache", score=1.0, **about)
                log.add(f"{task}-{number}", "knorm@0.1", score=float(number < 2 or task == "vt"), **about)
                log.add(f"{task}-{number}", "knorm+restore@0.1", score=float(restored), **about)
        found = gains_of(log, 600, ["niah_single_2", "vt"])["knorm+restore"]
        figures = found["needles"]["0.1"]
        assert figures["closed"][0] == pytest.approx(0.5) and figures["closed"][1] > 0 and figures["n"] == 10
        assert figures["gain"][0] == pytest.approx(0.4) and found["worse"] == ["vt at 0.1"]
        assert "| knorm+restore | 0.1 | 1.00 | 0.20 | 0.60 | +0.40" in "\n".join(gain_lines({"knorm+restore": found}))

    def test_controls_stand_in_the_place_of_the_slots(
        self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Empty positions and slots that left get no attention; without its LoRA a restorer is an untrained one."""
        monkeypatch.setattr(Case, "score", lambda self, answer: 0.5)
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        restorer = RestoreKV.untrained(model, n=4, evictor="knorm")
        restorer.save_pretrained(tmp_path / "untrained", torch.float32)
        moved(restorer, model).save_pretrained(tmp_path / "restorer", torch.float32)  # type: ignore[arg-type]
        options: Any = {
            "model_name": str(place / "model"),
            "tasks": ("niah_single_2",),
            "evictors": ("knorm",),
            "ratios": (0.2,),
            "samples": {600: 1},
            "say": lambda _: None,
        }
        places = {"knorm": str(tmp_path / "restorer"), "knorm/other": str(tmp_path / "untrained")}
        run_ruler(tmp_path, restorers=places, controls=tuple(CONTROLS), **options)
        rows = {row["method"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
        restored = rows["knorm+restore@0.2"]
        assert rows["knorm+without-lora@0.2"]["kl"] == rows["knorm+other@0.2"]["kl"] != restored["kl"]
        assert rows["knorm+from-evicted@0.2"]["kl"] != restored["kl"] and restored["mass_restored"] > 0
        for name in ("positions-only", "dropped"):
            assert rows[f"knorm+{name}@0.2"]["mass_restored"] == 0 and rows[f"knorm+{name}@0.2"]["kl"] != restored["kl"]
        assert rows["knorm+positions-only@0.2"]["held"] == pytest.approx(restored["held"] - 4)
        metrics = json.loads((tmp_path / "metrics.json").read_text())["figures"]["600"]
        assert set(plotted(metrics["methods"])) == {"knorm", "knorm+restore", "knorm+other"}

        for wrong, match in (
            ({"restorers": {"knrm": places["knorm"]}}, "knrm"),
            ({"restorers": {"knorm": places["knorm"], "knorm/restore": places["knorm"]}}, "must differ"),
            ({"restorers": {"knorm/a@b": places["knorm"]}}, "neither '@'"),
            ({"controls": ("dropped",)}, "no restorer"),
        ):
            with pytest.raises(InvalidInput, match=match):
                run_ruler(tmp_path / "wrong", **options | wrong)

    def test_a_copy_of_the_published_set(self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In its own order, with its own prompts and answers; what is no such copy is refused."""
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        records = [
            {
                "task": task,
                "context": f"{number} stands here. " * 40,
                "question": "Which number stands there?",
                "answer_prefix": "Answer:",
                "answer": [str(number), "8"],
                "max_new_tokens": 4,
            }
            for task, number in (("niah_single_2", 11), ("qa_1", 12), ("niah_single_2", 13))
        ]
        copy = tmp_path / "ruler" / "600"
        copy.mkdir(parents=True)
        (copy / "test.jsonl").write_text("\n".join(map(json.dumps, records)))
        found = PublishedSet(str(tmp_path / "ruler"))
        assert found.case("niah_single_2", 600, 1) == Case(
            records[2]["context"], records[2]["question"], "Answer:", ("13", "8"), needs_all=True, longest=4
        )
        asked = found.case("qa_1", 600, 0)
        assert asked is not None and asked.score("it is 8") == 1.0 and found.case("qa_1", 600, 1) is None
        options: Any = {"model_name": str(place / "model"), "evictors": ("knorm",), "ratios": (0.2,)}
        options |= {"published": str(tmp_path / "ruler"), "samples": {600: 5}, "say": lambda _: None}
        monkeypatch.setattr(Case, "score", lambda self, answer: 1.0)
        run_ruler(tmp_path / "out", tasks=("niah_single_2", "qa_1"), **options)
        rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
        assert len(rows) == 3 * 2 and {row["task"] for row in rows} == {"niah_single_2", "qa_1"}
        with pytest.raises(InvalidInput, match="other settings"):
            run_ruler(tmp_path / "out", **options | {"published": "", "tasks": ("vt",)})

        (copy.parent / "700").mkdir()
        (copy.parent / "700" / "test.jsonl").write_text(json.dumps({"context": "Other."}))
        for wrong, match in (
            ({"tasks": ("vt",)}, "no task 'vt' at 600; it has niah_single_2, qa_1"),
            ({"samples": {500: 1}}, "folder 500"),
            ({"samples": {700: 1}}, "lacks task, question"),
            ({"text": [tmp_path]}, "of its own"),
        ):
            with pytest.raises(InvalidInput, match=match):
                run_ruler(tmp_path / "wrong", **options | wrong)

    def test_the_mass_is_the_models_attention(self, place: Path) -> None:
        """Against the weights that eager attention returns, over a dense cache and one in which every pair was kept."""
        memory = ContextMemory(
            AutoModelForCausalLM.from_pretrained(place / "model", attn_implementation="eager"), TOKENIZER
        )
        memory.append("The castle stands in Prague. " * 4)
        probe = Probe(memory, Case("", "Where is it?", "It is", ("Prague",), longest=8))
        answer = (70, 71, 72)
        ids = [*memory.token_ids, *probe.prompt, *answer]
        with torch.no_grad():
            weights = memory.model(torch.tensor([ids]), output_attentions=True).attentions
        n, n_opening = memory.seq_length, len(memory._framing.bare_opening)
        expected = torch.stack([layer[0, :, -3:, n_opening:n].sum(-1).mean() for layer in weights]).mean()
        cache = memory._state.cache
        keep = torch.ones(len(cache.layers), cache.layers[0].keys.shape[1], n, dtype=torch.bool)
        for one in (cache, compacted(cache, keep, memory.backbone.windows)):
            assert probe.told(probe.read(one), answer).mass == pytest.approx(float(expected), rel=1e-4)

    def test_a_logged_answer_of_the_full_cache_decides(self, place: Path, tmp_path: Path) -> None:
        """Another machine found it right, this one's random model does not: the case is measured, and once."""
        log = RowLog(tmp_path / "rows.jsonl")
        log.add("a-600-0", "full cache", task="a", size=600, score=1.0)
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        case = Case("The castle stands in Prague. " * 4, "Where is it?", "It is", ("Prague",), longest=4)
        for _ in range(2):
            one = Configuration(evictor_named("knorm"), 0.5)
            measure_case(lambda: ContextMemory(model, TOKENIZER), "a", 0, 600, case, [one], log)
            assert [row["method"] for row in log.rows] == ["full cache", "knorm@0.5"]

    @pytest.mark.parametrize("at", [0, 1, 5, 12, None])
    def test_what_was_told_changes_no_answer(self, place: Path, at: int | None) -> None:
        """An answer that differs from token `at` on, or nowhere, read in place of decoding; over restore slots as well."""
        model = AutoModelForCausalLM.from_pretrained(place / "model")
        restorer: Any = moved(RestoreKV.untrained(model, n=4), model)  # type: ignore[arg-type]
        memory = ContextMemory(model, TOKENIZER)
        small = ContextMemory(model, TOKENIZER, budget=60, reserve=0, evictor="knorm", restorer=restorer)
        for one in (memory, small):
            one.append("The castle stands in Prague. " * 4)
        restored: Any = small._state.cache
        assert restored.n_restore == 4
        probe = Probe(memory, Case("", "Where is it?", "It is", ("Prague",), longest=12))
        cache = memory._state.cache
        keep = torch.rand(len(cache.layers), cache.layers[0].keys.shape[1], memory.seq_length) < 0.6
        keep[..., :4] = keep[..., -1:] = True
        evicted = compacted(cache, keep, memory.backbone.windows)
        for one, stays in ((cache, True), (evicted, True), (restored, True), (restored, False)):
            read = probe.read(one, stays=stays)
            decoded = probe.answered(read)
            assert len(decoded.token_ids) == 12
            other = list(decoded.token_ids)
            if at is not None and at < 12:
                other[at] += 1 if other[at] < 100 else -1
            told = probe.told(read, other if at != 12 else other[:7])
            assert probe.answered(read, told).token_ids == decoded.token_ids


def test_the_comparison_with_kvpress_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="make test-kvpress"):
        run_kvpress(tmp_path)


def test_span_neighbour_rows_add_up(place: Path, tmp_path: Path) -> None:
    options: Any = {"model_name": str(place / "model"), "say": lambda _: None}
    run_span_neighbour(tmp_path, {"one": str(place / "eraser")}, n_samples=2, **options)
    table = run_span_neighbour(tmp_path, {"two": str(place / "eraser")}, n_samples=2, **options)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 3 * 4 and {row["method"] for row in rows} == {"contaminated", "recompute", "one", "two"}
    untrained = [(row["score"], row["logprob"]) for row in rows if row["method"] == "one"]
    contaminated = [(row["score"], row["logprob"]) for row in rows if row["method"] == "contaminated"]
    for (s, p), (t, q) in zip(untrained, contaminated, strict=True):
        assert s == t and p == pytest.approx(q, abs=1e-3)
    assert "span-neighbour" in table.lower()
