"""A chat engine whose turns and passages stand in one memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine, StreamingAgentChatResponse
from llama_index.core.schema import QueryBundle

from contextmem import Checkpoint, ContextMemory, InvalidInput, Report
from contextmem.integrations.llama_index.bridge import Inserted, NodeBridge
from contextmem.integrations.llama_index.threads import begun, in_thread
from contextmem.integrations.llama_index.turns import message_kind

__all__ = ["ContextMemoryChatEngine"]

_ROLES = {
    "system": MessageRole.SYSTEM,
    "user": MessageRole.USER,
    "assistant": MessageRole.ASSISTANT,
    "tool_result": MessageRole.TOOL,
}


class ContextMemoryChatEngine(BaseChatEngine):
    """Every message is asked and kept; with a retriever, passages are prefilled once, before the message.

    The history is read off the memory, so a turn or a passage that is retracted is gone from both.

    Attributes:
        memory: what the conversation stands in.
        bridge: takes nodes in and out.
    """

    def __init__(
        self,
        memory: ContextMemory,
        *,
        retriever: Any = None,
        bridge: NodeBridge | None = None,
        on_full: str = "error",
        max_new_tokens: int = 256,
        **options: Any,
    ) -> None:
        """
        Args:
            memory: may hold segments already; `reset` goes back to them.
            retriever: finds passages for every message; None: the conversation alone.
            bridge: see `NodeBridge`; default: one of its own.
            on_full: "error" or "forget", see `NodeBridge.insert`.
            options: passed to `ContextMemory.ask`.
        """
        self.memory, self._retriever = memory, retriever
        self.bridge = bridge if bridge is not None else NodeBridge(memory)
        self._on_full, self._options = on_full, {**options, "max_new_tokens": max_new_tokens}
        self._beginning = memory.checkpoint()
        self._turn = threading.Lock()

    def reset(self) -> None:
        """Go back to what the memory held when the engine was made."""
        self.memory.restore(self._beginning)
        self.bridge.keep_out()

    def retract(self, node_id: str | None = None, *, ref_doc_id: str | None = None, **options: Any) -> Report:
        """Take a node, or a document's nodes, out of the memory; they stay out. See `NodeBridge.retract`."""
        report: Report = self.bridge.retract(node_id, ref_doc_id=ref_doc_id, **options)
        return report

    @property
    def chat_history(self) -> list[ChatMessage]:
        """Live turns in order."""
        return [
            ChatMessage(segment.text, role=_ROLES[segment.kind], additional_kwargs={"segment_id": segment.id})
            for segment in self.memory.segments()
            if segment.kind in _ROLES
        ]

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """Ask `message` and keep the turn.

        Args:
            chat_history: messages that replace the conversation so far; None goes on with it.
        """
        with self._turn, self.memory.transaction():
            nodes = self._prepared(message, chat_history)
            answer = self.memory.ask(message, keep=True, **self._options)
        metadata = {
            "tokens_reused": max(0, answer.tokens_reused - nodes.n_tokens),
            "tokens_prefilled": answer.tokens_prefilled + nodes.n_tokens,
            "retracted": list(nodes.retracted),
        }
        return AgentChatResponse(response=answer.text, source_nodes=list(nodes.nodes), metadata=metadata)

    def stream_chat(self, message: str, chat_history: list[ChatMessage] | None = None) -> StreamingAgentChatResponse:
        """As `chat`, piece by piece; a stream that is abandoned keeps nothing of the turn."""
        with self._turn:
            mark = self.memory.checkpoint()
            try:
                nodes = self._prepared(message, chat_history)
                responses = begun(self._responses(message, mark))
            except BaseException:
                self.memory.restore(mark)
                raise
        return StreamingAgentChatResponse(
            chat_stream=responses, source_nodes=list(nodes.nodes), is_writing_to_memory=False
        )

    async def achat(self, message: str, chat_history: list[ChatMessage] | None = None) -> AgentChatResponse:
        """As `chat`, in a thread."""
        return await asyncio.to_thread(self.chat, message, chat_history)

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """As `stream_chat`, in a thread."""
        response = await asyncio.to_thread(self.stream_chat, message, chat_history)
        assert response.chat_stream is not None
        return StreamingAgentChatResponse(
            achat_stream=in_thread(response.chat_stream), source_nodes=response.source_nodes, is_writing_to_memory=False
        )

    def _prepared(self, message: str, history: Sequence[ChatMessage] | None) -> Inserted:
        if history is not None:
            own = [segment.text for segment in self.memory.segments(kind="system")]
            said = [(message_kind(past), past.content or "") for past in history]
            if [text for kind, text in said if kind == "system" and text not in own]:
                raise InvalidInput(
                    "a system message in chat_history is not the system text of this memory: give it to "
                    "ContextMemory(..., system=...). Nothing was changed."
                )
            self.memory.restore(self._beginning)
            self.bridge.keep_out()
            for kind, text in said:
                if kind != "system":
                    self.memory.append(text, kind=kind)
        if self._retriever is None:
            return Inserted()
        reserve = self.memory.count_tokens(message, asked=True) + self._options["max_new_tokens"]
        nodes = self._retriever.retrieve(QueryBundle(message))
        return self.bridge.insert(nodes, reserve=reserve, on_full=self._on_full)

    def _responses(self, message: str, mark: Checkpoint) -> Generator[ChatResponse, None, None]:
        stream, text, is_kept = self.memory.stream(message, keep=True, **self._options), "", False
        try:
            for piece in stream:
                text += piece
                yield ChatResponse(message=ChatMessage(text, role=MessageRole.ASSISTANT), delta=piece)
            is_kept = True
        finally:
            stream.close()
            if not is_kept:
                self.memory.restore(mark)
