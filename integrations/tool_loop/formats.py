"""How tools are told to the model, and how calls and results look in the context.

A model whose chat template tells of tools in the system turn and puts results into a user turn is told of them in its own
words, calls in its own markup, and reads results in its own wrapper. Any other gets a plain format: the tools in the system
text, every call one JSON object, every result a line in the user turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contextmem.codec import template_text
from contextmem.integrations.tool_loop.tools import Tool

__all__ = ["ToolFormat", "format_of"]

_USER, _NAME, _ARGUMENT, _RESULT = "0USER0", "n0NAME0", "0ARGUMENT0", "0RESULT0"

_PLAIN = """\
You solve tasks with tools, one step at a time. Every reply is one JSON object that calls a tool: \
{{"name": ..., "arguments": {{...}}}}.
Tools:
{tools}"""


@dataclass(frozen=True)
class ToolFormat:
    """The texts round calls and results.

    Attributes:
        system: the system text, tools included.
        call_open, call_close: round the JSON object of a call.
        result_open, result_close: round a result; `{name}` stands for the tool's.
        is_native: whether they are the chat template's own; then calls and results that do not name their tool stand
            in frames (`ContextMemory.frame_tools`), with the template's control tokens.
    """

    system: str
    call_open: str = ""
    call_close: str = ""
    result_open: str = "Result of {name}: "
    result_close: str = "\n"
    is_native: bool = False

    @property
    def frames(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """What stands in frames round calls and results."""
        result = (self.result_open, self.result_close) if self._is_result_framed else ("", "")
        return ((self.call_open, self.call_close) if self.is_native else ("", "")), result

    @property
    def _is_result_framed(self) -> bool:
        return self.is_native and "{name}" not in self.result_open + self.result_close

    def result(self, name: str, text: str) -> str:
        """A result as it is appended."""
        if self._is_result_framed:
            return text
        opened, closed = (part.replace("{name}", name) for part in (self.result_open, self.result_close))
        return opened + text + closed

    def said(self, name: str, text: str) -> str:
        """The result in a text that `result` made."""
        if self._is_result_framed:
            return text
        opened, closed = (part.replace("{name}", name) for part in (self.result_open, self.result_close))
        return text.removeprefix(opened).removesuffix(closed)


def format_of(tokenizer: Any, tools: Sequence[Tool], system: str | None) -> ToolFormat:
    """The tokenizer's own format if its chat template has one, the plain one otherwise.

    Args:
        system: told before the tools.
    """
    native = _native(tokenizer, tools, system) if template_text(tokenizer) else None
    if native is not None:
        return native
    listed = "\n".join(f"- {t.name}({_signature(t)}): {t.description}" for t in tools)
    text = _PLAIN.format(tools=listed)
    return ToolFormat(f"{system}\n\n{text}" if system else text)


def _signature(tool: Tool) -> str:
    required = set(tool.parameters.get("required", ()))
    return ", ".join(
        f"{name}: {_type(schema)}{'' if name in required else ' (optional)'}"
        for name, schema in tool.parameters.get("properties", {}).items()
    )


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    return str(schema.get("type", "any"))


def _native(tokenizer: Any, tools: Sequence[Tool], system: str | None) -> ToolFormat | None:
    """Read off what the template writes round marked texts; None if it leaves any of them out."""
    told = [
        {
            "type": "function",
            "function": {"name": t.name, "description": t.description, "parameters": dict(t.parameters)},
        }
        for t in tools
    ]
    call = {"type": "function", "function": {"name": _NAME, "arguments": {"a": _ARGUMENT}}}
    messages: list[dict[str, Any]] = [{"role": "system", "content": system or ""}, {"role": "user", "content": _USER}]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _NAME, "content": _RESULT},
    ]
    try:
        with_tools = tokenizer.apply_chat_template(messages, tools=told, tokenize=False)
        bare = tokenizer.apply_chat_template([{"role": "system", "content": _RESULT}, messages[1]], tokenize=False)
        full = tokenizer.apply_chat_template(
            [*messages, *turns], tools=told, tokenize=False, add_generation_prompt=True
        )
        plain = tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": _ARGUMENT}, {"role": "user", "content": _RESULT}],
            tools=told,
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception:  # templates raise errors of their own
        return None
    before, _, after_system = bare.partition(_USER)[0].partition(_RESULT)
    told_text = with_tools.partition(_USER)[0]
    if not (told_text.startswith(before) and told_text.endswith(after_system)):
        return None  # the tools stand somewhere else than in the system turn
    told_text = told_text.removeprefix(before).removesuffix(after_system)
    if not all(t.name in told_text for t in tools):
        return None
    ours, theirs = _between(full), _between(plain)
    if ours is None or theirs is None:
        return None
    return _wrappers(ours, theirs, told_text)


def _between(rendered: str) -> tuple[str, str, str] | None:
    """What stands between the user's text and the result, and after it."""
    _, found, rest = rendered.partition(_USER)
    said, found_result, after = rest.partition(_RESULT)
    return (found, said, after) if found and found_result else None


def _wrappers(ours: tuple[str, str, str], theirs: tuple[str, str, str], told: str) -> ToolFormat | None:
    opened, _, closed = theirs[1].partition(_ARGUMENT)  # the frames of an answer, up to the next user text
    said = ours[1]
    if not said.startswith(opened) or _NAME not in said or _ARGUMENT not in said:
        return None
    said = said.removeprefix(opened)
    start, stop = said.find("{"), said.rfind("}") + 1
    try:
        if json.loads(said[start:stop]) != {"name": _NAME, "arguments": {"a": _ARGUMENT}}:
            return None
    except ValueError:
        return None
    rest = said[stop:]
    if closed not in rest:
        return None  # the result stands in a turn of its own, which a memory does not open
    call_close, _, result_open = rest.partition(closed)
    result_close = ours[2].removesuffix(theirs[2])
    if _NAME in result_open + result_close:
        result_open, result_close = (part.replace(_NAME, "{name}") for part in (result_open, result_close))
    return ToolFormat(told, said[:start], call_close, result_open, result_close, is_native=True)
