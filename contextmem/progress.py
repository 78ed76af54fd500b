"""Progress of long operations: a callback with numbers, and one line on a terminal once a second has passed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = ["Progress", "ProgressCallback", "ProgressEvent"]

_QUIET_SECONDS = 1.0


@dataclass(frozen=True)
class ProgressEvent:
    """How far an operation is.

    Attributes:
        phase: "prefill", "recompute" or "verify".
        processed: tokens in place, reused ones included; starts at `reused`, ends at `total` unless interrupted.
        total: tokens in place when done.
        reused: cached tokens that needed no computation.
        seconds: since the start.
        status: "running", then once "done", "failed" or "cancelled".
    """

    phase: str
    processed: int
    total: int
    reused: int
    seconds: float
    status: str = "running"

    @property
    def tokens_per_second(self) -> float:
        """Computed tokens a second."""
        return (self.processed - self.reused) / self.seconds if self.seconds else 0.0


ProgressCallback = Callable[[ProgressEvent], None]


class Progress:
    """Context manager round one operation. Calling it with the number of tokens computed reports them."""

    def __init__(self, phase: str, n_tokens: int, reused: int, callback: ProgressCallback | None = None) -> None:
        self.phase, self.n_tokens, self.reused = phase, n_tokens, reused
        self._callback = callback
        self._done = 0
        self._started = time.monotonic()
        self._line = False

    def __enter__(self) -> Self:
        self._report("running")
        return self

    def __call__(self, done: int) -> None:
        if done > self._done:
            self._done = done
            self._report("running")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
        if error is None:
            self._done = self.n_tokens
            self._report("done")
        elif self._callback is not None:
            cancelled = kind is not None and kind.__name__ in ("Cancelled", "KeyboardInterrupt", "GeneratorExit")
            try:
                self._callback(self._event("cancelled" if cancelled else "failed"))
            except Exception:  # the first error is the one to see
                return

    def _event(self, status: str) -> ProgressEvent:
        seconds = time.monotonic() - self._started
        return ProgressEvent(
            self.phase, self.reused + self._done, self.reused + self.n_tokens, self.reused, seconds, status
        )

    def _report(self, status: str) -> None:
        event = self._event(status)
        if self._callback is not None:
            self._callback(event)
        if status == "running" and event.seconds >= _QUIET_SECONDS and sys.stderr.isatty():
            self._line = True
            sys.stderr.write(
                f"\r\x1b[2K{event.phase}  {event.processed:,}/{event.total:,} tokens  reused {event.reused:,}  "
                f"{event.tokens_per_second:,.0f} tok/s"
            )
            sys.stderr.flush()
