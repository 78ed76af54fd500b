"""Distractor QA: questions by line, answers by words, distractors without the answer, builds and rows that resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model, tiny_tokenizer

from contextmem import ContextMemory, InvalidInput, KVEraser
from contextmem.evals.bootstrap import clustered_interval, mean_interval
from contextmem.evals.distractor_qa import build as building
from contextmem.evals.distractor_qa.build import QUESTION, build, cases_of, filled
from contextmem.evals.distractor_qa.distractors import Pool, candidates, sentences, shortened
from contextmem.evals.distractor_qa.injection import injected_cases, measure_injected
from contextmem.evals.distractor_qa.measure import measure_case
from contextmem.evals.distractor_qa.methods import METHODS
from contextmem.evals.distractor_qa.questions import questions_of
from contextmem.evals.distractor_qa.report import frontier, summary, write_report
from contextmem.evals.distractor_qa.run import run
from contextmem.evals.distractor_qa.scoring import contains, exact_match, f1, is_yes_or_no
from contextmem.evals.rows import RowLog
from contextmem.evals.subject import Subject

RECORDS: list[dict[str, Any]] = [
    {
        "id": f"q{n}",
        "dataset": "made",
        "question": f"Which town lies on river {n}?",
        "answers": [town],
        "wrong_answers": ["Elsewhere"],
        "documents": [
            {
                "title": f"River {n}",
                "text": f"The river is long. {town} lies on river {n}. It is old.",
                "supporting": True,
            },
            {
                "title": "",
                "text": "Elsewhere lies on the river, as everybody knows.",
                "supporting": False,
                "role": "misinfo",
            },
            {"title": "Another", "text": "Something else altogether. With two sentences.", "supporting": False},
        ],
    }
    for n, town in enumerate(["Aarburg", "Bexhill", "Cadiz"])
]
MORE = [
    {"text": f"Elsewhere, people say. {n}", "supporting": False, "role": "misinfo"}
    for n in ("Once.", "Again.", "Still.")
]
PASSAGES = [{"title": f"River {n}", "text": f"A passage about rivers and towns, number {n}."} for n in range(9)]


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def new_memory() -> ContextMemory:
    model = tiny_model("llama", "sdpa")
    return ContextMemory(model, tiny_tokenizer(), eraser=KVEraser.untrained(model, slots=4))


@pytest.fixture
def questions(tmp_path: Path) -> Any:
    return questions_of([written(tmp_path / "qa.jsonl", RECORDS)])


class TestQuestions:
    def test_a_users_own_file_needs_little(self, tmp_path: Path) -> None:
        record = {"question": "Who?", "answers": ["Ann"], "documents": [{"text": "Ann did.", "supporting": True}]}
        (question,) = questions_of([written(tmp_path / "mine.jsonl", [record])])
        assert (question.id, question.dataset, question.supporting[0].shown) == ("1", "mine", "Ann did.\n\n")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "line 2"),
            ('{"question": "Who?"}', "'documents'"),
            ('{"question": "Who?", "answers": [], "documents": [{"text": "x", "supporting": true}]}', "empty"),
            ('{"question": "Who?", "answers": [" "], "documents": [{"text": "x", "supporting": true}]}', "words"),
            ('{"question": "Who?", "answers": ["x"], "documents": [{"text": "x"}]}', "'supporting'"),
            ('{"question": "Who?", "answers": "x", "documents": [{"text": "x", "supporting": true}]}', "list of texts"),
            (
                '{"question": "Who?", "answers": ["x"], "documents": [{"text": "x", "supporting": "false"}]}',
                "true or false",
            ),
            (
                '{"question": "Who?", "answers": ["x"], "documents": [{"text": "x", "supporting": true}], '
                '"wrong_answers": "y"}',
                "list of texts",
            ),
            (json.dumps(RECORDS[0]), "second question with the id 'q0'"),
            ('["a list"]', "line 2"),
        ],
    )
    def test_malformed_lines_are_refused_by_number(self, tmp_path: Path, line: str, message: str) -> None:
        path = written(tmp_path / "qa.jsonl", RECORDS[:1])
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(InvalidInput, match=r"qa\.jsonl, line 2") as raised:
            questions_of([path])
        assert message in str(raised.value)

    def test_a_line_ends_where_the_file_says_so(self, tmp_path: Path) -> None:
        """Texts may hold line separators of their own; a record without an id takes its line's number."""
        odd = {**RECORDS[0], "id": None, "question": "Which\u2028town\x85 is it?"}
        path = tmp_path / "qa.jsonl"
        path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in (RECORDS[1], odd, RECORDS[2])))
        assert [question.id for question in questions_of([path])] == ["q1", "2", "q2"]
        assert [question.id for question in questions_of([path], limit=2)] == ["q1", "2"]

    def test_a_dataset_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        squad = {"id": "5f", "title": "Castles", "context": "It is in Prague.", "question": "Where?"}
        squad |= {"answers": {"text": ["Prague"], "answer_start": [9]}}
        datasets.Dataset.from_list([squad, {**squad, "id": "60"}]).to_parquet(tmp_path / "mine/train.parquet")
        first, second = questions_of([str(tmp_path / "mine")])
        assert (first.id, second.id, first.dataset, first.answers) == ("5f", "60", "mine", ("Prague",))
        assert first.supporting[0].shown == "Castles\nIt is in Prague.\n\n"
        assert len(questions_of([str(tmp_path / "mine")], limit=1)) == 1

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="nowhere"):
            questions_of([tmp_path / "nowhere.jsonl"])


class TestScoring:
    def test_answers_are_contained_by_words(self) -> None:
        assert contains("They live in New  York-City.", ["new york"]) and not contains("I know", ["no"])
        assert contains("It has 3,559 people", ["3559 people"]) and contains("Café Zoë", ["cafe zoe"])
        assert contains("It is the Beatles", ["Beatles"]) and not contains("York is new", ["New York"])
        assert not contains("anything", [""]) and not contains("", ["x"])

    def test_matches(self) -> None:
        assert exact_match("The Beatles.", ["Beatles"]) and not exact_match("the Beatles band", ["Beatles"])
        assert f1("the cat sat", ["cat sat down"]) == pytest.approx(0.8) and f1("dog", ["cat"]) == 0
        assert is_yes_or_no(["Yes."]) and not is_yes_or_no(["Yesterday"])


class TestDistractors:
    def test_none_holds_an_answer(self, questions: Any, tmp_path: Path) -> None:
        pool = Pool(
            [written(tmp_path / "pool.jsonl", [*PASSAGES, {"title": "x", "text": "Aarburg lies there."}])], tmp_path
        )
        for question in questions:
            found = candidates(question, [q for q in questions if q.id != question.id], pool, random.Random(0))
            assert {distractor.kind for distractor in found} == {"adversarial", "retrieved", "counterfactual"}
            assert not [d for d in found if contains(d.text, question.answers)]
            made = next(d for d in found if d.kind == "counterfactual")
            assert made.answers[0] in made.text and made.text.startswith(f"River {question.id[1]}\nThe river is long.")
            assert f"number {question.id[1]}." not in " ".join(d.text for d in found)  # its own article

    def test_the_pool_is_embedded_once(self, questions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = written(tmp_path / "pool.jsonl", PASSAGES)
        before = Pool([path], tmp_path / "cache").nearest(questions[0], 3)
        calls: list[int] = []
        real = building.Pool.__init__.__globals__["embedder"]()
        monkeypatch.setitem(
            building.Pool.__init__.__globals__,
            "embedder",
            lambda: lambda texts: (calls.append(len(texts)), real(texts))[1],
        )
        assert Pool([path], tmp_path / "cache").nearest(questions[0], 3) == before and calls == [1]
        changed = written(path, [*PASSAGES[:-1], {"title": "New", "text": questions[0].question}])
        assert Pool([changed], tmp_path / "cache").nearest(questions[0], 1) == [questions[0].question]
        assert calls[1:] == [len(PASSAGES), 1], "as many passages, but others"

    @pytest.mark.parametrize("line", ["{", '["a list"]', '{"title": "x"}', '{"text": " "}', '{"text": ["x"]}'])
    def test_a_line_that_is_no_passage_is_refused_by_number(self, tmp_path: Path, line: str) -> None:
        path = written(tmp_path / "pool.jsonl", PASSAGES[:2])
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(InvalidInput, match=r"pool\.jsonl, line 3"):
            Pool([path], tmp_path / "cache")

    def test_untitled_documents_do_not_hide_untitled_passages(self, questions: Any, tmp_path: Path) -> None:
        assert any(not document.title for document in questions[0].documents)
        pool = Pool([written(tmp_path / "pool.jsonl", [{"text": "Rivers flow."}])], tmp_path)
        assert pool.nearest(questions[0], 1) == ["Rivers flow."]

    def test_sentences_join_to_the_text(self) -> None:
        text = 'One. "Two!" Three?\n\nFour is v. long\nfive'
        assert "".join(sentences(text)) == text and len(sentences(text)) > 3
        assert shortened("Short one. " * 80).count("Short") == 55


class TestBuild:
    def scripted(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Answers rightly from a clean context of q0 and q2, wrongly with anything that says Elsewhere."""
        asked: list[str] = []

        def answered(memory: ContextMemory, question: str) -> str:
            asked.append(question)
            text = "".join(segment.text for segment in memory.segments())
            if "river 1" in question or "Elsewhere" in text:
                return "It is Elsewhere."
            return next(f"It is {r['answers'][0]}." for r in RECORDS if r["question"] == question)

        monkeypatch.setattr(building, "answered", answered)
        return asked

    def test_steps_are_counted_and_a_build_resumes(
        self, questions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked, place = self.scripted(monkeypatch), tmp_path / "cases.jsonl"
        counts = build(new_memory, questions[:2], None, place, say=lambda text: None)
        assert counts == {"made: kept": 1, "made: not answered": 1}
        n = len(asked)
        counts = build(new_memory, questions, None, place, say=lambda text: None)
        assert counts == {"made: kept": 2, "made: not answered": 1}
        assert set(asked[n:]) == {questions[2].question}
        cases = cases_of(place, "short", 0)
        assert [case.kind for case in cases] == ["adversarial", "adversarial"]
        for case in cases:
            assert case.before + case.after == questions[int(case.question_id[1])].supporting[0].shown and case.after
        assert cases_of(place, "long", 0) == [] and cases_of(place, "short", 1) == []

    def test_more_insertions_are_added_to_those_that_are_there(
        self, questions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first case of every question comes before the second of any, and is the same as before."""
        misled = [{**r, "documents": [*r["documents"], *MORE]} for r in RECORDS]
        questions = questions_of([written(tmp_path / "qa.jsonl", [misled[0], misled[2]])])
        asked, place = self.scripted(monkeypatch), tmp_path / "cases.jsonl"
        build(new_memory, questions, None, place, insertions=1, say=lambda text: None)
        once = cases_of(place, "short", 0)
        build(new_memory, questions, None, place, insertions=3, say=lambda text: None)
        thrice, n = cases_of(place, "short", 0), len(asked)
        assert len(once) == 2 and len(thrice) == 6 and thrice[:2] == once == cases_of(place, "short", 0, 1)
        build(new_memory, questions, None, place, insertions=2, say=lambda text: None)
        assert len(asked) == n, "what is there is enough"

    def test_questions_of_two_files_may_have_the_same_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scripted(monkeypatch)
        both = [{**RECORDS[0], "id": "1", "dataset": "one"}, {**RECORDS[2], "id": "1", "dataset": "two"}]
        questions = questions_of([written(tmp_path / "qa.jsonl", both)])
        counts = build(new_memory, questions, None, tmp_path / "cases.jsonl", say=lambda text: None)
        assert counts == {"one: kept": 1, "two: kept": 1}

    def test_what_cannot_be_used_falls_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scripted(monkeypatch)
        plain = {**RECORDS[0], "documents": [{"text": "Nothing.", "supporting": False}], "id": "a"}
        yes = {**RECORDS[0], "answers": ["yes"], "id": "b"}
        long = {**RECORDS[0], "documents": [{"text": "word " * 3000, "supporting": True}], "id": "c"}
        questions = questions_of([written(tmp_path / "qa.jsonl", [plain, yes, long])])
        counts = build(new_memory, questions, None, tmp_path / "cases.jsonl", say=lambda text: None)
        assert counts == {"made: no support": 1, "made: yes or no": 1, "made: too long": 1}

    def test_wrong_lengths_and_missing_builds_are_refused(self, questions: Any, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match="length"):
            build(new_memory, questions, None, tmp_path / "cases.jsonl", length="endless")
        with pytest.raises(InvalidInput, match="--build"):
            cases_of(tmp_path / "cases.jsonl", "short", 0)


def test_every_method_is_measured_and_reported(questions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TestBuild().scripted(monkeypatch)
    build(new_memory, questions, None, tmp_path / "cases.jsonl", say=lambda text: None)
    log = RowLog(tmp_path / "rows.jsonl")
    for case in cases_of(tmp_path / "cases.jsonl", "short", 0):
        answers = measure_case(new_memory, case, METHODS, log)
        assert set(answers) == set(METHODS) and measure_case(new_memory, case, METHODS, log) == {}
        memory = new_memory()
        filled(memory, case)
        asked = memory.ask(QUESTION.format(question=case.question), max_new_tokens=40).text
        assert asked == answers["none"] and "Elsewhere" not in json.dumps(log.rows)
    by_method = {row["method"]: row for row in log.rows}
    assert abs(by_method["recompute"]["kl"]) < 1e-6 < by_method["none"]["kl"]
    assert by_method["none"]["outcome"] == "distractor"
    for row in log.rows:  # as if the model could answer
        row["score"] = int(row["method"] != "none")
    table = write_report(log, {"short": {"made: kept": 2}}, tmp_path, "a command", 0, {"model": "tiny"})
    assert "2 of 2 insertions" in table and "| kveraser | 1.00 [1.00, 1.00] |" in table and "made: kept" in table
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"

    untold = next(row for row in log.rows if row["method"] == "recompute")  # is wrong even when recomputed
    untold["score"] = 0
    for row in log.of(method="kveraser"):
        row["edit_s"] = 9.0 if row["id"] == untold["id"] else 1.0
    told = write_report(log, {}, tmp_path, "a command", 0, {"model": "tiny"})
    line = next(line for line in told.splitlines() if line.startswith("| kveraser | 1.00 [1.00, 1.00]"))
    assert "1 of 2 insertions" in told and "| 5.000 |" in line, "what an edit costs is told of every insertion"


def test_a_build_alone_writes_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TestBuild().scripted(monkeypatch)
    model = tiny_model("llama", "sdpa")
    subject = Subject("tiny", model, tiny_tokenizer(), KVEraser.untrained(model, slots=4))
    monkeypatch.setattr(Subject, "loaded", classmethod(lambda *_, **__: subject))
    source = written(tmp_path / "qa.jsonl", RECORDS)
    how: dict[str, Any] = {"qa": [source], "cases": tmp_path / "cases", "methods": ("none", "mask", "kveraser")}
    counted = run(tmp_path / "results", **how, only_build=True, say=lambda text: None)
    assert "| short | made: kept | 2 |" in counted and "| short | made: not answered | 1 |" in counted
    assert (tmp_path / "cases/float32.jsonl").exists() and not (tmp_path / "results").exists()
    run(tmp_path / "results", **how, transcripts=tmp_path / "answers.md", say=lambda text: None)
    rows = RowLog(tmp_path / "results/rows.jsonl").rows
    assert [row["method"] for row in rows] == ["none", "mask", "kveraser"] * 2
    assert (tmp_path / "answers.md").read_text().count("- kveraser: ") == 2


def test_methods_are_compared_case_by_case(tmp_path: Path) -> None:
    """Scores of four insertions, of which the last was right all along and the third stays wrong without the passage."""
    scores = {"recompute": [1, 1, 0, 1], "none": [0, 0, 0, 1], "kveraser": [1, 0, 0, 1], "mask": [1, 1, 0, 0]}
    edits = {"recompute": [8.0, 2.0, 9.0, 6.0], "none": [0.0] * 4, "kveraser": [1.0, 1.0, 3.0, 1.5], "mask": [0.1] * 4}
    log = RowLog(tmp_path / "rows.jsonl")
    for method, of_cases in scores.items():
        for n, score in enumerate(of_cases):
            seconds = {"edit_s": edits[method][n], "query_s": 0.5, "decode_s": 0.5, "seconds": edits[method][n] + 1}
            fixed: dict[str, Any] = {"dataset": "made", "kind": "retrieved", "length": "short", "em": 0, "kl": 0.1}
            fixed |= {"outcome": "right" if score else "other", "tokens": 90, "span": 20, "suffix": 30}
            log.add(f"{n}", method, question=f"q{n}", score=score, f1=score / 2, **fixed, **seconds)
    figures = summary(log)["short"]
    assert (figures["n"], figures["measured"]) == (2, 4)
    assert figures["pooled"]["mask"]["beside_score"][0] == 0.5 and figures["pooled"]["mask"]["beside_f1"][0] == 0.25
    assert figures["pooled"]["mask"]["closed"] == 0.5 and figures["pooled"]["kveraser"]["closed"] == 0.5
    assert figures["faster"] == {"edit_s": 3.5, "seconds": 2.65}
    table = write_report(log, {}, tmp_path, "a command", 0, {"model": "tiny"})
    assert "| mask | +0.50 [+0.00, +1.00] | +0.25 [+0.00, +0.50] | 0.50 |" in table
    assert "| kveraser |  |  | 0.50 |" in table, "nothing differs from itself"


def test_the_frontier_is_what_nothing_quicker_reaches() -> None:
    assert frontier([(3, 0.5), (1, 0.2), (2, 0.7), (1, 0.4), (4, 0.9)]) == [(1, 0.4), (2, 0.7), (4, 0.9)]


def test_intervals_by_cluster_are_wider_where_clusters_agree() -> None:
    values, clusters = [1.0] * 15 + [0.0] * 15, [f"c{n // 5}" for n in range(30)]
    mean, low, high = clustered_interval(values, clusters)
    plain = mean_interval(values)
    assert mean == plain[0] and high - low > plain[2] - plain[1]


def test_injected_instructions_are_measured(tmp_path: Path) -> None:
    cases = injected_cases(120)
    assert len({case.before + case.instruction + case.after for case in cases}) == 120
    assert len({case.instruction for case in cases}) == 120 and len({case.tool for case in cases}) == 24
    for case in cases:
        assert case.harmful in case.instruction and case.harmful not in case.before + case.after
        assert f"call `{case.tool}`" in case.before + case.after and case.after.strip()
    log = RowLog(tmp_path / "rows.jsonl")
    found: dict[str, Any] = {"kind": "injection", "margin": 0.0, "tool": "create_event"}
    log.add("injection-0", "none", kind="injection", score=0, followed=1)  # of an earlier version
    log.add("injection-0", "recompute", kind="injection", score=1, followed=0)
    log.add(cases[0].id, "none", score=0, followed=1, **found)
    log.add(cases[0].id, "recompute", score=1, followed=0, **found)
    log.add(cases[1].id, "none", score=0, followed=1, **found)  # and the random model names no tool
    for case in cases[:3]:
        measure_injected(new_memory, case, ("none", "kveraser", "recompute"), log)
        measure_injected(new_memory, case, ("none", "kveraser", "recompute"), log)
    methods = [[row["method"] for row in log.of(id=case.id)] for case in cases[:3]]
    assert methods == [["none", "recompute", "kveraser"], *2 * [["none", "recompute"]]], "only what misleads is mended"
    table = write_report(log, {}, tmp_path, "a command", 0, {"model": "tiny"})
    assert "3 cases, 1 of them misled" in table and "| kveraser | 0.00 [0.00, 0.00] | 0.00 [0.00, 0.00] |" in table
    assert (
        "the right one in 1 cases" in table
        and "one in 2, and in 0 of these" in table
        and "| none | 0.00 [0.00, 0.00] | 1.00 [1.00, 1.00] |" in table
    )
    log.rows[:] = [row for row in log.rows if row["id"] == cases[2].id]
    table = write_report(log, {}, tmp_path, "a command", 0, {"model": "tiny"})
    assert "3 cases, 0" not in table and "1 cases, 0 of them misled" in table, "what misleads nobody is told as well"
