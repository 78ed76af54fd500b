"""Generators that work while somebody waits: in a thread, so that the event loop goes on; begun before they are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

__all__ = ["begun", "in_thread"]

T = TypeVar("T")


async def in_thread(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """The items of a generator, each made in a thread; closing this, or cancelling it, closes the generator."""
    nothing = object()
    pending: asyncio.Future[Any] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(asyncio.to_thread(next, pieces, nothing))
            piece = await asyncio.shield(pending)
            if piece is nothing:
                return
            yield piece
    finally:
        if pending is not None and not pending.done():
            await asyncio.wait([pending])  # a generator that is running in its thread cannot be closed yet
        await asyncio.to_thread(pieces.close)


def begun(pieces: Generator[T, None, None]) -> Generator[T, None, None]:
    """The same generator, run up to its first item: what it depends on is settled now and not when it is read."""
    nothing = object()
    first: Any = next(pieces, nothing)

    def rest() -> Generator[T, None, None]:
        try:
            if first is not nothing:
                yield first
            yield from pieces
        finally:
            pieces.close()

    return rest()
