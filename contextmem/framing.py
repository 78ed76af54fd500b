"""The chat template as frames: the token ids that stand between the texts of a dialogue.

The template is rendered once with marked texts and split at the marks. From then on frames are ids: a turn never
renders differently because it became history, and the text of a segment is never touched.

A dialogue is laid out as `opening | system | after_system | user texts | answer_open | answer | answer_close | ...`,
where `answer_open` ends the user turn and begins the assistant's, and `answer_close` ends it and begins the next user
turn. Both go with the answer when it is retracted, so the user turns on its two sides become one and roles alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contextmem.codec import Codec, template_text
from contextmem.errors import UnsupportedEdit

__all__ = ["Framing", "framing_of"]

_SYSTEM, _USER, _ANSWER, _NEXT = "0SYSTEM0", "0USER0", "0ANSWER0", "0NEXT0"


@dataclass(frozen=True)
class Framing:
    """Token ids of the frames. Without a chat template all are empty but the start token.

    Attributes:
        opening: before the system text.
        after_system: between the system text and the first user text.
        bare_opening: before the first user text of a dialogue without a system text.
        answer_open: after the user texts, up to the first token of the answer.
        answer_close: after the answer, up to the next user text.
        call_open, call_close: round a tool call, inside the assistant's turn.
        result_open, result_close: round a tool result, inside the user turn.
    """

    opening: tuple[int, ...] = ()
    after_system: tuple[int, ...] = ()
    bare_opening: tuple[int, ...] = ()
    answer_open: tuple[int, ...] = ()
    answer_close: tuple[int, ...] = ()
    call_open: tuple[int, ...] = ()
    call_close: tuple[int, ...] = ()
    result_open: tuple[int, ...] = ()
    result_close: tuple[int, ...] = ()

    def round(self, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after a segment of that kind."""
        if kind == "tool_call":
            return (*self.answer_open, *self.call_open), (*self.call_close, *self.answer_close)
        if kind == "tool_result":
            return self.result_open, self.result_close
        return (self.answer_open, self.answer_close) if kind == "assistant" else ((), ())


def framing_of(codec: Codec) -> Framing:
    """The frames of a tokenizer's chat template.

    Templates that take no system turn get the system text at the start of the first user turn.
    """
    tokenizer = codec.tokenizer
    if not template_text(tokenizer):
        start = codec.start_ids()
        return Framing(opening=start, bare_opening=start)
    encode = codec.encode_frame
    bare = _split(tokenizer, (("user", _USER), ("assistant", _ANSWER), ("user", _NEXT)))
    if bare is None:
        raise UnsupportedEdit(
            "the chat template refuses a dialogue of user, assistant and user, or renders it out of order."
        )
    head, _, close, answer_open = bare
    full = _split(tokenizer, (("system", _SYSTEM), ("user", _USER), ("assistant", _ANSWER), ("user", _NEXT)))
    opening, after_system = (full[0], full[1]) if full is not None else (head, "")
    return Framing(encode(opening), encode(after_system), encode(head), encode(answer_open), encode(close))


def _split(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> list[str] | None:
    """What the template writes around the marked texts; None if it refuses the turns or leaves one out."""
    messages = [{"role": role, "content": mark} for role, mark in turns]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # templates raise their own errors on roles they do not know
        return None
    frames, rest = [], rendered
    for _, mark in turns:
        before, found, rest = rest.partition(mark)
        if not found:
            return None
        frames.append(before)
    return [*frames, rest]
