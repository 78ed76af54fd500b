"""Who may work on a memory: one call at a time, and one thread for as long as it needs several."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from contextmem.errors import MemoryBusy

__all__ = ["Gate"]


class Gate:
    """Lets one call through and refuses others at once, so that nobody waits for a generation to end."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._owner: int | None = None  # the thread that has reserved the memory

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """One call.

        Raises:
            MemoryBusy: another call is at work, or another thread has reserved the memory.
        """
        if not self._busy.acquire(blocking=False):
            raise MemoryBusy("another call is working on this memory. Nothing was changed.")
        try:
            if self._owner not in (None, threading.get_ident()):
                raise MemoryBusy("another thread is in a transaction on this memory. Nothing was changed.")
            yield
        finally:
            self._busy.release()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Several calls of this thread, with none of another in between; reserving what one has already is fine.

        Raises:
            MemoryBusy: as for `passed`.
        """
        with self.passed():
            before, self._owner = self._owner, threading.get_ident()
        try:
            yield
        finally:
            self._owner = before
