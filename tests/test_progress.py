"""What a terminal shows of long operations, and what it does not."""

from __future__ import annotations

import io

import pytest

from contextmem import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.1, 0.5, 1.5, 2.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress.sys, "stderr", terminal := Terminal())
    with progress.Progress("prefill", 100, 10) as report:
        report(20)
        assert terminal.getvalue() == ""
        report(60)
    assert terminal.getvalue().count("prefill") == 1
    assert "prefill  70/110 tokens  reused 10  40 tok/s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_nothing_is_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress.sys, "stderr", pipe := io.StringIO())
    with progress.Progress("prefill", 100, 0) as report:
        report(50)
    assert pipe.getvalue() == ""


def test_a_callback_that_fails_does_not_hide_the_first_error() -> None:
    def fail(event: progress.ProgressEvent) -> None:
        if event.status != "running":
            raise ValueError("second")

    with pytest.raises(KeyError), progress.Progress("prefill", 10, 0, fail):
        raise KeyError("first")
