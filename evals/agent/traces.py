"""Traces of tool calls from JSONL files: tau-bench's message lists, and ToolTalk's dialogues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextmem.errors import InvalidInput
from contextmem.records import from_jsonl

__all__ = ["Trace", "Turn", "traces_of"]

# What the tools of tau-bench's airline depend on and change.
_READS = {
    "get_reservation_details": ("reservation:{reservation_id}",),
    "get_user_details": ("user:{user_id}",),
}
_WRITES = {
    "update_reservation_flights": ("reservation:{reservation_id}",),
    "update_reservation_baggages": ("reservation:{reservation_id}",),
    "update_reservation_passengers": ("reservation:{reservation_id}",),
    "cancel_reservation": ("reservation:{reservation_id}",),
    "book_reservation": ("user:{user_id}",),
    "send_certificate": ("user:{user_id}",),
}


@dataclass(frozen=True)
class Turn:
    """One step of a trace.

    Attributes:
        kind: "user", "assistant", "tool_call" or "tool_result".
        text: what was said; of a call, its JSON object.
        tool: of calls and results.
        is_error: whether a result is a failure.
        reads, writes: resources that a result depends on or that its call changed.
    """

    kind: str
    text: str
    tool: str = ""
    is_error: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One recorded dialogue."""

    id: str
    turns: tuple[Turn, ...]


def traces_of(paths: Sequence[Path]) -> list[Trace]:
    """Traces in order.

    Raises:
        InvalidInput: a file cannot be read, or a line holds no trace; the message names it.
    """
    traces = []
    for path in paths:
        for place, record in from_jsonl(path):
            try:
                messages = record["messages"]
                told = _dialogue(messages) if "text" in messages[0] else _messages(messages)
                traces.append(Trace(f"{record['dataset']}/{record['id']}", tuple(told)))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InvalidInput(f"{place}: no trace of tool calls: {error!r}") from None
    return traces


def _messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "tool":
            call = calls.pop(0)
            failed = text.startswith("Error")
            yield _call(call["name"], call["arguments"])
            yield _result(call["name"], call["arguments"], text, failed)
        elif text:
            yield Turn("assistant" if message["role"] == "assistant" else "user", text)
        calls += [
            {"name": call["name"], "arguments": json.loads(call["arguments"])}
            for call in message.get("tool_calls") or ()
        ]


def _dialogue(messages: Sequence[Mapping[str, Any]]) -> Iterator[Turn]:
    for message in messages:
        for api in message.get("apis") or ():
            name, arguments = api["request"]["api_name"], api["request"]["parameters"]
            failed = api["exception"] is not None
            text = f"Error: {api['exception']}" if failed else json.dumps(api["response"])
            yield _call(name, arguments)
            yield _result(name, arguments, text, failed)
        if message["text"]:
            yield Turn("assistant" if message["role"] == "assistant" else "user", message["text"])


def _call(name: str, arguments: Mapping[str, Any]) -> Turn:
    return Turn("tool_call", json.dumps({"name": name, "arguments": arguments}), name)


def _result(name: str, arguments: Mapping[str, Any], text: str, failed: bool) -> Turn:
    reads, writes = (
        tuple(pattern.format(**arguments) for pattern in known.get(name, ())) if not failed else ()
        for known in (_READS, _WRITES)
    )
    return Turn("tool_result", text, name, failed, reads, writes)
