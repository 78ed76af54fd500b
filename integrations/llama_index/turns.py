"""Lists of chat messages over a memory: what a list has in common with the one before is not computed again.

The memory itself is not changed. A fork of it holds the messages, and goes back to where the next list begins to differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from contextmem import AnswerStream, Checkpoint, ContextMemory, InvalidInput

__all__ = ["KINDS", "Turns", "message_kind"]

KINDS = {
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
    return KINDS[message.role]


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
    _seen: object = None  # the base's last event when it was forked, and the fork's system text

    def stream(self, messages: Sequence[ChatMessage], **options: Any) -> AnswerStream:
        """Answer the last message; call `keep` with the answer once the stream has ended.

        A system message that is not the memory's own becomes the system text where the memory is empty, and stands before
        the other messages where it is not.

        Raises:
            InvalidInput: no message, or one that is not text.
        """
        said = [(message_kind(message), message.content or "") for message in messages]
        if not said:
            raise InvalidInput("there are no messages.")
        own = [segment.text for segment in self.base.segments(kind="system")]
        told = "\n\n".join(text for kind, text in said if kind == "system" and text not in own)
        wanted = [(kind, text) for kind, text in said if kind != "system"]
        is_empty = not self.base.seq_length
        if told and not is_empty:
            wanted.insert(0, ("user", told + "\n\n"))
        asked = wanted.pop() if len(wanted) > bool(told and not is_empty) and wanted[-1][0] == "user" else None
        fork = self._at(wanted, told if told and is_empty else None)
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

    def _at(self, wanted: Sequence[tuple[str, str]], system: str | None) -> ContextMemory:
        """The fork, holding exactly these messages."""
        seen = (self.base.events[-1] if self.base.events else None, system)
        if self._fork is None or self._seen != seen:
            self._fork, self._held, self._seen = self.base.fork(system=system), [], seen
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
