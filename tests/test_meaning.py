"""Finding segments by meaning, duplicates, and the picture of provenance."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import assert_unchanged, snapshot
from typer.testing import CliRunner

from contextmem import (
    ContextMemory,
    DependentsWarning,
    DuplicateWarning,
    InvalidInput,
    ModelUnavailable,
    SegmentNotFound,
    StorageError,
    meaning,
)
from contextmem.cli import app
from contextmem.drawing import draw_graph
from contextmem.meaning import embedder, same_words, windows

Make = Callable[..., ContextMemory]
TEXTS = {
    "cat": "The cat slept on the warm windowsill all afternoon.",
    "tax": "Quarterly tax returns must be filed before the deadline.",
    "volcano": "The volcano erupted and lava flowed into the sea.",
}


def letters(texts: Sequence[str]) -> Any:
    """Embeds by counts of letters."""
    counts = np.array([[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts], dtype=float) + 1e-9
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [("a sleeping pet", "cat"), ("paying money to the state", "tax"), ("molten rock from a mountain", "volcano")],
)
def test_meaning_is_found_without_a_common_word(llama_memory: Make, query: str, wanted: str) -> None:
    memory = llama_memory()
    for key, text in TEXTS.items():
        memory.append(text, key=key)
    matches = memory.find(query)
    assert matches[0].segment.key == wanted and len(matches) == 3
    assert matches[0].score > matches[1].score >= matches[2].score
    memory.retract(matches[0].segment)
    assert wanted not in [match.segment.key for match in memory.find(query)]


def test_a_long_segment_is_found_by_its_end(llama_memory: Make) -> None:
    """The embedding model reads 256 word pieces; what stands behind them counts as well."""
    memory = llama_memory()
    memory.append(TEXTS["tax"] + " " + "Forms come in several colours and sizes. " * 60 + TEXTS["volcano"], key="long")
    memory.append(TEXTS["tax"], key="short")
    assert memory.find("an eruption of lava")[0].segment.key == "long"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({f"key-{n}": [n, {"x": n / 7}] for n in range(200)}),
        "語彙は小さな断片に分けられる。" * 100,
        "def f(x):\n    return {**x, 'a': x['b'][0:3]}\n" * 60,
        "An ordinary sentence with ordinary words in it. " * 60,
        "Donaudampfschifffahrtsgesellschaftskapitän " * 60,
    ],
)
def test_windows_are_short_enough_to_be_read_whole(text: str) -> None:
    from sentence_transformers import SentenceTransformer

    tokenizer = SentenceTransformer(meaning._place(), device="cpu").tokenizer
    parts = list(windows(text))
    assert max(len(tokenizer(part).input_ids) for part in parts) <= 256
    assert parts[-1].strip() and text.rstrip().endswith(parts[-1].rstrip()) and len(parts) > 1


def test_filters_limits_and_empty_segments(llama_memory: Make) -> None:
    memory = llama_memory(embed=letters)
    assert memory.find("anything") == []
    memory.append("", source="a")
    for n, text in enumerate(["aaa", "aab", "zzz"]):
        memory.append(text, source="ab"[n % 2], kind=("document", "tool_result")[n // 2])
    assert [m.segment.text for m in memory.find("aaaa", 2)] == ["aaa", "aab"]
    assert [m.segment.text for m in memory.find("aaaa", source="a")] == ["aaa", "zzz"]
    assert [m.segment.text for m in memory.find("aaaa", kind="tool_result")] == ["zzz"]
    for arguments in ({"text": " "}, {"text": 3}, {"text": "x", "top_k": 0}):
        with pytest.raises(InvalidInput):
            memory.find(**arguments)


def test_every_text_is_embedded_once_and_forgotten_with_its_segment(llama_memory: Make) -> None:
    seen: list[str] = []

    def counted(texts: Sequence[str]) -> Any:
        seen.extend(texts)
        return letters(texts)

    memory = llama_memory(embed=counted)
    first = memory.append("first", key="first")
    memory.append("second")
    memory.find("query")
    memory.find("query")
    assert sorted(seen) == ["first", "query", "query", "second"]
    memory.retract(first)
    memory.find("query")
    assert first.id not in memory._meanings._vectors


def test_the_model_is_loaded_once_and_only_when_it_is_needed(llama_memory: Make) -> None:
    assert embedder() is embedder()
    meaning._embedder.cache_clear()
    llama_memory().append("some text")
    assert meaning._embedder.cache_info().currsize == 0


def test_without_the_library_the_error_says_what_to_install(
    llama_memory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    meaning._embedder.cache_clear()
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    memory = llama_memory()
    memory.append("some text")
    before = snapshot(memory)
    with pytest.raises(ModelUnavailable, match=r"contextmem\[recall\]"):
        memory.find("text")
    with pytest.raises(ModelUnavailable, match=r"contextmem\[recall\]"):
        memory.append("some text", on_duplicate="warn")
    assert_unchanged(memory, before)


class TestDuplicates:
    def test_the_same_words_are_shared(self, llama_memory: Make) -> None:
        memory = llama_memory()
        first = memory.append("Returns are accepted within 30 days.", source="wiki")
        before = memory.seq_length
        again = memory.append(" returns are  accepted\nwithin 30 days. ", source="wiki", on_duplicate="share")
        assert again == first and memory.seq_length == before
        assert memory.events[-1].operation == "share" and memory.events[-1].segments[0].id == first.id

    @pytest.mark.parametrize(
        "other",
        [
            {"text": "Returns are accepted within 14 days."},  # a number
            {"text": "Returns are not accepted within 30 days."},  # a negation
            {"text": "Returns are accepted within 30 days", "source": "forum"},  # who said it
            {"text": "Returns are accepted within 30 days.", "kind": "tool_result"},
            {"text": "", "source": "wiki"},
            {"text": "Returns are accepted within 30 days.", "key": "faq"},  # its name
            {"text": "Returns are accepted within 30 days.", "pinned": True},
        ],
    )
    def test_what_differs_is_never_shared(self, llama_memory: Make, other: dict[str, str]) -> None:
        memory = llama_memory()
        first = memory.append("Returns are accepted within 30 days.", source="wiki")
        second = memory.append(**{"source": "wiki", **other}, on_duplicate="share")
        assert second.id != first.id and len(memory.segments()) == 2

    def test_sharing_never_hides_a_newer_version(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append("30 days", key="policy")
        memory.append("14 days", key="faq")
        new = memory.append("14 days", key="policy", on_conflict="replace", on_duplicate="share")
        assert [(s.key, s.text) for s in memory.segments()] == [("faq", "14 days"), ("policy", "14 days")]
        assert memory.append("14 days", key="policy", on_conflict="replace", on_duplicate="share").id == new.id

    def test_retracted_text_is_no_duplicate(self, llama_memory: Make) -> None:
        memory = llama_memory()
        first = memory.append("the same")
        memory.append("something else")
        memory.retract(first, method="mask")
        assert memory.append("the same", on_duplicate="share").id != first.id

    def test_near_ones_are_warned_of_and_kept(self, llama_memory: Make) -> None:
        memory = llama_memory()
        memory.append(TEXTS["cat"])
        first = memory.append("Our shop accepts returns within 30 days of the purchase.")
        with pytest.warns(DuplicateWarning, match=first.id):
            second = memory.append("Our shop accepts returns within 14 days of the purchase.", on_duplicate="warn")
        assert memory.segments()[-1] == second
        assert memory.events[-1].operation == "duplicate"
        assert [record.id for record in memory.events[-1].segments] == [first.id, second.id]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            memory.append(TEXTS["volcano"], on_duplicate="warn")

    def test_a_warning_turned_into_an_error_changes_nothing(self, llama_memory: Make) -> None:
        memory = llama_memory(embed=letters)
        memory.append("abc")
        before = snapshot(memory)
        with warnings.catch_warnings(), pytest.raises(DuplicateWarning):
            warnings.simplefilter("error")
            memory.append("abc", on_duplicate="warn")
        assert_unchanged(memory, before)
        with pytest.raises(InvalidInput, match="on_duplicate"):
            memory.append("abc", on_duplicate="merge")


def test_words_are_compared_without_case_and_spacing(llama_memory: Make) -> None:
    memory = llama_memory()
    one = memory.append("Straße  5.\n")
    assert same_words("STRASSE 5 .", memory.segments()) == (one,)
    assert same_words("foo bar", [memory.append("foo_bar")]) == ()
    assert same_words("strasse 5", memory.segments()) == ()
    assert same_words("  ", memory.segments()) == ()


class TestGraph:
    def test_a_saved_memory_is_drawn(self, llama_memory: Make, tmp_path: Path) -> None:
        memory = llama_memory(system="Be brief.")
        source = memory.append("one", key="the first passage")
        memory.append("two", parents=[source])
        memory.ask("what?", keep=True, max_new_tokens=3)
        with pytest.warns(DependentsWarning):
            memory.retract("the first passage", method="mask")
        saved = memory.save(tmp_path / "saved.ctx")
        result = CliRunner().invoke(app, ["inspect", str(saved), "--graph", str(tmp_path / "graph.png")])
        assert result.exit_code == 0, result.output
        assert (tmp_path / "graph.png").read_bytes()[:4] == b"\x89PNG"
        loaded = ContextMemory.load(saved, memory.model, memory.tokenizer)
        assert set(loaded.graph.edges) == set(memory.graph.edges) != set()

    def test_what_cannot_be_drawn_is_a_typed_error(self, llama_memory: Make, tmp_path: Path) -> None:
        memory = llama_memory()
        with pytest.raises(InvalidInput, match="no segments"):
            draw_graph(memory.graph, tmp_path / "graph.png")
        memory.append("one")
        with pytest.raises(InvalidInput, match="foo"):
            draw_graph(memory.graph, tmp_path / "graph.foo")
        with pytest.raises(StorageError, match="nowhere"):
            draw_graph(memory.graph, tmp_path / "nowhere" / "graph.png")


def test_targets_are_never_meanings(llama_memory: Make) -> None:
    """No fuzzy delete: what is near a text is not its name."""
    memory = llama_memory()
    memory.append(TEXTS["cat"])
    with pytest.raises(SegmentNotFound):
        memory.retract("the sleeping cat")
