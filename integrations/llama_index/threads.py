"""Async twins: blocking work in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """The items of a generator, each made in a thread; closing this closes the generator."""
    nothing = object()
    try:
        while (piece := await asyncio.to_thread(next, pieces, nothing)) is not nothing:
            yield piece  # type: ignore[misc]
    finally:
        await asyncio.to_thread(pieces.close)
