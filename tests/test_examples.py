"""Every example runs, is short, and shows what it says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

SHOWN = {
    "llama_index_retract": ["before:  ", "90 dollars", "retracted by kveraser", "35 dollars", "kept out: 1"],
    "flaky_tool": ["did not answer", "Anna lives in Porto.", "14 degrees", "3 failed; 2 pairs", "failed pairs left: 0"],
    "cap_memory": ["budget 400", "MiB held", "4821"],
    "save_fork_undo": ["at first:    The code", "7350", "after undo: ", "tokens reused"],
}


def test_all_of_them_are_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES.glob("*.py"))


@pytest.mark.smollm2
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_it_shows_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    at = 0
    for text in SHOWN[name]:
        at = said.find(text, at)
        assert at >= 0, (text, said)
