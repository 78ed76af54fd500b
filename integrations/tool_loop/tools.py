"""Python functions as tools: a JSON schema from the signature, validated calls, errors as text."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, get_type_hints

import networkx as nx
from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from contextmem import InvalidInput

__all__ = ["Outcome", "Tool", "tool"]


@dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes:
        text: the result, or what went wrong.
        is_error: whether the call failed.
        withheld: why the result is not shown to the model ("oversize", "quarantine", "unreadable"), or None; the call may
            have worked all the same.
    """

    text: str
    is_error: bool = False
    withheld: str | None = None


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        function: called with keyword arguments, may be async; what it returns is shown as text, or as JSON.
        name, description: as the model sees them; from the function's name and the first paragraph of its docstring.
        reads, writes: resources that a call depends on or changes, as patterns over its arguments, such as "file:{path}".
        parameters: JSON schema of the arguments.
    """

    function: Callable[..., Any]
    name: str = ""
    description: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    _arguments: type[BaseModel] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any] | Tool, **fields: Any) -> Tool:
        """A tool from a function, or as it is.

        Raises:
            InvalidInput: its signature cannot be called by name, or a type has no JSON schema.
        """
        if isinstance(function, Tool):
            return function
        name = fields.pop("name", None) or getattr(function, "__name__", "")
        if not name.isidentifier():
            raise InvalidInput(f"a tool needs a name that is an identifier, not {name!r}.")
        documented = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
        arguments = _arguments_of(function, name)
        schema = arguments.model_json_schema()
        schema.pop("title", None)
        reads, writes = (_patterns(fields.pop(kind, ()), name, arguments) for kind in ("reads", "writes"))
        return cls(
            function,
            name=name,
            description=fields.pop("description", None) or documented,
            reads=reads,
            writes=writes,
            parameters=schema,
            _arguments=arguments,
            **fields,
        )

    def validated(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with defaults, as the function takes them.

        Raises:
            InvalidInput: they are not what the schema says; the message names each.
        """
        assert self._arguments is not None
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise InvalidInput(f"wrong arguments for {self.name}: {problems}") from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}

    def call(self, arguments: Mapping[str, Any]) -> Outcome:
        """Validate the arguments and run the function; whatever it raises becomes a failed outcome."""
        try:
            value = self.function(**self.validated(arguments))
            if inspect.isawaitable(value):
                value = _waited_for(value)
        except InvalidInput as error:
            return Outcome(f"Error: {error}", is_error=True)
        except Exception as error:  # whatever a tool may raise is the model's to read
            return Outcome(_readable(f"Error: {type(error).__name__}: {error}"), is_error=True)
        return Outcome(_readable(_shown(value)))

    def resources(self, patterns: Iterable[str], arguments: Mapping[str, Any]) -> frozenset[str]:
        """The resources that `reads` or `writes` name for these arguments."""
        try:
            return frozenset(pattern.format(**self.validated(arguments)) for pattern in patterns)
        except InvalidInput:
            return frozenset()


def tool(**fields: Any) -> Callable[[Callable[..., Any]], Tool]:
    """Decorator: `@tool(reads=("file:{path}",))` makes a `Tool` of a function."""
    return lambda function: Tool.of(function, **fields)


def _arguments_of(function: Callable[..., Any], name: str) -> type[BaseModel]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidInput(f"tool {name!r}: an annotation cannot be resolved: {error}") from None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidInput(f"tool {name!r}: parameter {parameter.name!r} cannot be given by name.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    try:
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except PydanticUserError as error:
        raise InvalidInput(f"tool {name!r} has a parameter without a JSON schema: {error}") from None
    if cycle := _cycle(schema.get("$defs", {})):
        raise InvalidInput(f"tool {name!r}: {cycle} refers to itself, which a call under a grammar cannot.")
    return model


def _cycle(definitions: Mapping[str, Any]) -> str | None:
    """A definition that refers to itself, directly or not."""
    graph = nx.DiGraph()
    for name, definition in definitions.items():
        found = re.findall(r'"\$ref": "#/\$defs/([^"]+)"', json.dumps(definition))
        graph.add_edges_from((name, other) for other in found)
    cycles: list[str] = next(iter(nx.simple_cycles(graph)), [])
    return cycles[0] if cycles else None


def _patterns(patterns: Iterable[str], name: str, arguments: type[BaseModel]) -> tuple[str, ...]:
    """Patterns over arguments that there are."""
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in listed:
        fields = [field for _, field, _, _ in Formatter().parse(pattern) if field is not None]
        if unknown := [f for f in fields if re.split(r"[.\[]", f)[0] not in arguments.model_fields]:
            raise InvalidInput(f"tool {name!r}: {pattern!r} names no parameter {unknown[0]!r}.")
    return listed


def _waited_for(value: Awaitable[Any]) -> Any:
    """The value of a coroutine, also where an event loop is running in this thread."""

    async def waited() -> Any:
        return await value

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, waited()).result()


def _readable(text: str) -> str:
    """Without lone surrogates, which no tokenizer reads."""
    return text.encode("utf-8", "replace").decode()


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
