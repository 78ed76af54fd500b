"""Replaying recorded tool calls, and the evaluation over a vector index: what is read, changed and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from tiny import tiny_model, tiny_tokenizer

from contextmem import ContextMemory, InvalidInput, KVEraser
from contextmem.evals.agent.replay import rate, replayed
from contextmem.evals.agent.run import _is_eventful, _report
from contextmem.evals.agent.stale import METHODS, cases_of, measure_case
from contextmem.evals.agent.traces import Trace, traces_of
from contextmem.evals.rag import run as rag
from contextmem.evals.rows import RowLog
from contextmem.integrations.llama_index import ContextMemoryQueryEngine
from contextmem.integrations.tool_loop import CollapseRepeats, RetractFailed, SupersedeReads
from contextmem.training.samples.distractor_qa import Question

POLICIES = (CollapseRepeats(), RetractFailed(), SupersedeReads())


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": json.dumps(arguments)}]}


AIRLINE = {
    "id": "a",
    "dataset": "tau",
    "messages": [
        {"role": "user", "content": "Change my flight."},
        called("get_reservation_details", reservation_id="X1"),
        {"role": "tool", "content": '{"amount": 4711, "seats": 3}', "name": "get_reservation_details"},
        called("update_reservation_flights", reservation_id="X1"),
        {"role": "tool", "content": "Error: no seat", "name": "update_reservation_flights"},
        {"role": "assistant", "content": "I try again."},
        called("update_reservation_flights", reservation_id="X1"),
        {"role": "tool", "content": "done", "name": "update_reservation_flights"},
        {"role": "assistant", "content": "It is changed."},
    ],
}
TALK = {
    "id": "t",
    "dataset": "talk",
    "messages": [
        {"role": "user", "text": "How warm is it?"},
        {
            "role": "assistant",
            "text": "It is 78 degrees.",
            "apis": [
                {"request": {"api_name": "Weather", "parameters": {}}, "response": {"high": 78}, "exception": None},
                {"request": {"api_name": "Alarm", "parameters": {}}, "response": None, "exception": "no clock"},
            ],
        },
    ],
}


@pytest.fixture
def traces(tmp_path: Path) -> list[Trace]:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (AIRLINE, TALK)))
    return traces_of([path])


def new_memory(**options: Any) -> ContextMemory:
    model = tiny_model("llama", "sdpa")
    return ContextMemory(model, tiny_tokenizer(), eraser=KVEraser.untrained(model), **options)


def test_both_kinds_of_traces_are_read(traces: list[Trace]) -> None:
    airline, talk = traces
    assert [turn.kind for turn in airline.turns] == [
        "user",
        *("tool_call", "tool_result") * 2,
        "assistant",
        "tool_call",
        "tool_result",
        "assistant",
    ]
    reads, failed, worked = (turn for turn in airline.turns if turn.kind == "tool_result")
    assert reads.reads == ("reservation:X1",) == worked.writes and not reads.writes
    assert failed.is_error and not failed.writes and not worked.is_error
    assert [turn.is_error for turn in talk.turns if turn.kind == "tool_result"] == [False, True]
    assert _is_eventful(airline) and _is_eventful(talk)


@pytest.mark.parametrize("line", ["{", '{"id": 1}', '{"messages": []}'])
def test_what_is_no_trace_is_refused_by_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "traces.jsonl").write_text(json.dumps(AIRLINE) + "\n" + line + "\n")
    with pytest.raises(InvalidInput, match="line 2"):
        traces_of([tmp_path / "traces.jsonl"])


def test_policies_change_what_is_resident_and_what_is_scored(traces: list[Trace], tmp_path: Path) -> None:
    off = replayed(new_memory(system="Help."), traces[0], ())
    on = replayed(new_memory(system="Help."), traces[0], POLICIES)
    assert (off["retracted"], on["retracted"], on["n_edits"]) == (0, 2, 2)  # the failed update, and the stale read
    assert on["tokens"] < off["tokens"] == off["peak"] and on["again_s"] > 0 == off["again_s"]
    assert (off["first"], on["first"]) == (None, 1) and len(on["turns"]) == 2
    assert on["turns"][0] == off["turns"][0] and on["turns"][1] != off["turns"][1]
    assert on["score"] == rate(on["turns"]) and rate([]) is None
    assert (on["n_calls"], on["n_failed"]) == (3, 1)

    log = RowLog(tmp_path / "rows.jsonl")
    for case in cases_of(traces, 0):
        measure_case(new_memory, case, METHODS, log)
        measure_case(new_memory, case, METHODS, log)
    assert len(log.rows) == 2 * len(METHODS)
    for method, row in (("off", off), ("on", on)):
        log.add(traces[0].id, method, kind="replay", **row)
    table = _report(log, tmp_path, "a command", 0, {"model": "tiny"}, ["off", "on"])
    assert "| on | 1 | 3 | 1 | 2 | 0 |" in table and "| nothing | 2 |" in table


def test_an_edited_copy_differs_in_one_number(traces: list[Trace]) -> None:
    for case in cases_of(traces, 0):
        assert case.value != case.wrong and len(case.value) == len(case.wrong)
        assert case.stale.text == case.true.text.replace(case.value, case.wrong) != case.true.text


def test_a_planted_passage_is_retrieved_retracted_and_kept_out(tmp_path: Path) -> None:
    texts = [f"River {n}\nThe town on river {n} is T{n}own." for n in range(4)]
    asked = [Question(f"Which town is on river {n}?", f"T{n}own", texts[n], ()) for n in range(4)]
    index = VectorStoreIndex.from_documents([Document(text=t) for t in texts], embed_model=MockEmbedding(embed_dim=4))

    def new_engine() -> ContextMemoryQueryEngine:
        return ContextMemoryQueryEngine(index.as_retriever(similarity_top_k=9), new_memory(), max_new_tokens=4)

    import random

    log = RowLog(tmp_path / "rows.jsonl")
    rag._plant(index, new_engine, asked, 1, random.Random(0), log)
    rag._queried(new_engine(), asked[0], "0", "one memory", log)
    rag._queried(new_engine(), asked[0], "0", "a new one", log)
    planted = log.rows[0]
    assert (planted["retrieved"], planted["put_in_again"], planted["same_again"]) == (1, 0, 1)
    assert planted["erased_by"] and len(index.ref_doc_info) == 4
    assert "1 of 1" in rag._report(log, tmp_path, "a command", 0, {"model": "tiny"}, 4)
    with pytest.raises(InvalidInput, match="4 questions"):
        rag._corpus(asked, 100, 2)
