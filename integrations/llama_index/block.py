"""A block for LlamaIndex's `Memory`: what the short-term memory lets go of goes into a memory, and comes back by meaning."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.memory.memory import BaseMemoryBlock

from contextmem import ContextMemory
from contextmem.integrations.llama_index.turns import KINDS

__all__ = ["ContextMemoryBlock"]


class ContextMemoryBlock(BaseMemoryBlock[str]):
    """Messages become segments, with their session as `source`; the ones nearest to the last message are recalled.

    What is retracted from the memory is not recalled any more.
    """

    name: str = Field(default="context_memory", description="The name of the block.")
    top_k: int = Field(default=3, gt=0, description="Most segments that are recalled.")
    _memory: ContextMemory = PrivateAttr()

    def __init__(self, memory: ContextMemory, **fields: Any) -> None:
        """
        Args:
            memory: where messages go.
            fields: `name`, `description`, `priority`, `top_k`, ...
        """
        super().__init__(**fields)
        self._memory = memory

    @property
    def memory(self) -> ContextMemory:
        """Where messages go."""
        return self._memory

    async def _aput(self, messages: list[ChatMessage]) -> None:
        for message in messages:
            text = message.content or ""  # other blocks than text are not read
            if text.strip() and (kind := KINDS[message.role]) != "system":
                source = message.additional_kwargs.get("session_id")
                await asyncio.to_thread(self._memory.append, text, kind=kind, source=source)

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        last = next((m.content for m in reversed(messages or []) if (m.content or "").strip()), None)
        if last is None:
            return ""
        source = block_kwargs.get("session_id")
        matches = await asyncio.to_thread(self._memory.find, last, self.top_k, source=source)
        return "\n".join(match.segment.text.strip() for match in matches)

    async def atruncate(self, content: str, tokens_to_truncate: int) -> str | None:
        """What is left when the farthest segments are dropped; None if nothing is."""
        lines, dropped = content.split("\n"), 0
        while lines and dropped < tokens_to_truncate:
            dropped += self._memory.count_tokens(lines.pop() + "\n")
        return "\n".join(lines) or None
