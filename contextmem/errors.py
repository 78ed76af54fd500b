"""Every error this library raises on purpose, in one family.

A message says what happened, with numbers, which segment, and what to do; it never quotes retracted text, and it
ends with "nothing was changed" whenever an operation was refused or undone.
"""

from __future__ import annotations

__all__ = [
    "Cancelled",
    "ContextMemoryError",
    "ContextOverflow",
    "DependentsWarning",
    "DuplicateWarning",
    "IdentityMismatch",
    "InconsistentState",
    "InvalidInput",
    "KeyConflictWarning",
    "MemoryBusy",
    "MemoryClosed",
    "ModelUnavailable",
    "OutOfMemory",
    "SegmentNotFound",
    "StorageError",
    "UnsupportedEdit",
]


class ContextMemoryError(Exception):
    """Base class: catch this to catch everything below."""


class InvalidInput(ContextMemoryError, ValueError):
    """An argument has the wrong type or a value that cannot be used."""


class ContextOverflow(ContextMemoryError):
    """The tokens do not fit. `needed`, `available` and `limit` are token counts."""

    def __init__(self, message: str, *, needed: int, available: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.limit = limit


class UnsupportedEdit(ContextMemoryError):
    """This edit cannot be done on this model, cache or RoPE type; raised before anything changes."""


class IdentityMismatch(ContextMemoryError):
    """A file or adapter belongs to another model. `expected` is what it was made with, `found` what is loaded."""

    def __init__(self, message: str, *, expected: dict[str, str], found: dict[str, str]) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class SegmentNotFound(ContextMemoryError, LookupError):
    """No segment of this memory answers to that id, key or filter."""


class MemoryBusy(ContextMemoryError):
    """Another call is working on this memory."""


class MemoryClosed(ContextMemoryError):
    """The memory was closed."""


class Cancelled(ContextMemoryError):
    """The call was cancelled by `ContextMemory.cancel`; the memory is as it was before the call."""


class OutOfMemory(ContextMemoryError, MemoryError):
    """The device ran out of memory. `tokens` were being computed in chunks of `chunk`."""

    def __init__(self, message: str, *, tokens: int, chunk: int) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.chunk = chunk


class StorageError(ContextMemoryError):
    """A saved memory cannot be read or written."""


class ModelUnavailable(ContextMemoryError):
    """The model cannot be loaded here; the message holds the command that makes it available."""


class InconsistentState(ContextMemoryError):
    """Log, spans and cache disagree: a bug here, or a file that was tampered with."""


class KeyConflictWarning(UserWarning):
    """Two live segments now share a key."""


class DependentsWarning(UserWarning):
    """Live segments were derived from a segment that was just retracted."""


class DuplicateWarning(UserWarning):
    """A live segment says the same as one that was just appended, or nearly."""
