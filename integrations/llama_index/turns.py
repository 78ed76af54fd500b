"""Lists of chat messages over a memory: what a list has in common with the one before is not computed again.

The memory itself is not changed. A fork of it holds the messages, and goes back to where the next list begins to differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from contextmem import AnswerStream, Checkpoint, ContextMemory, InvalidInput

__all__ = ["Turns", "message_kind"]

_KINDS = {
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool_result",
    MessageRole.FUNCTION: "tool_result",
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
}


def message_kind(message: ChatMessage) -> str:
    """The kind of segment that a message becomes.

    Raises:
        InvalidInput: it holds something else than text.
    """
    if other := [block.block_type for block in message.blocks if block.block_type != "text"]:
        raise InvalidInput(f"messages with blocks of type {other[0]!r} cannot be read: text only.")
    return _KINDS[message.role]


@dataclass
class _Held:
    """A message in the fork, and the state before it; None where there is no state between it and the one before."""

    kind: str
    text: str
    before: Checkpoint | None


@dataclass
class Turns:
    """The fork that holds the last list of messages.

    Attributes:
        base: the memory that every list stands after.
    """

    base: ContextMemory
    _fork: ContextMemory | None = None
    _held: list[_Held] = field(default_factory=list)
    _seen: object = None  # the base's last event when it was forked

    def stream(self, messages: Sequence[ChatMessage], **options: Any) -> AnswerStream:
        """Answer the last message; call `keep` with the answer once the stream has ended.

        Raises:
            InvalidInput: no message, one that is not text, or a system message that differs from the memory's.
        """
        wanted = [(message_kind(message), message.content or "") for message in messages]
        if not wanted:
            raise InvalidInput("there are no messages.")
        wanted = self._without_system(wanted)
        asked = wanted.pop() if wanted and wanted[-1][0] == "user" else None
        fork = self._at(wanted)
        question = asked[1] if asked is not None else ""
        if asked is not None:
            self._held.append(_Held(*asked, fork.checkpoint()))
        return fork.stream(question, keep=True, **options)

    def keep(self, text: str) -> None:
        """Note the answer that the fork now holds."""
        self._held.append(_Held("assistant", text, None))

    def forget(self) -> None:
        """Let go of the fork; the next list starts from the base."""
        self._fork, self._held = None, []

    def _without_system(self, wanted: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The messages without the system text, which must be the memory's own."""
        texts = [text for kind, text in wanted if kind == "system"]
        own = [segment.text for segment in self.base.segments(kind="system")]
        if texts and not own and not self.base.seq_length:
            self.forget()
            base = self.base
            self.base = type(base)(base.model, base.tokenizer, system=texts[0], chunk_size=base.chunk_size)
            own = texts[:1]
        if foreign := [text for text in texts if text not in own]:
            raise InvalidInput(
                f"a system message of {len(foreign[0]):,} characters is not the system text of this memory: give it to "
                f"ContextMemory(..., system=...), where it cannot drop out. Nothing was changed."
            )
        return [(kind, text) for kind, text in wanted if kind != "system"]

    def _at(self, wanted: Sequence[tuple[str, str]]) -> ContextMemory:
        """The fork, holding exactly these messages."""
        last = self.base.events[-1] if self.base.events else None
        if self._fork is None or self._seen is not last:
            self._fork, self._held, self._seen = self.base.fork(), [], last
        fork, n_same = self._fork, 0
        for held, message in zip(self._held, wanted, strict=False):
            if (held.kind, held.text) != message:
                break
            n_same += 1
        while n_same < len(self._held):
            held = self._held[n_same]
            if held.before is not None:
                fork.restore(held.before)
                del self._held[n_same:]
            else:
                n_same -= 1
        for kind, text in wanted[n_same:]:
            mark = fork.checkpoint()
            fork.append(text, kind=kind)
            self._held.append(_Held(kind, text, mark))
        return fork
