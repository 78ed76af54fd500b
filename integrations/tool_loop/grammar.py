"""Calls under a grammar: a logits processor that lets through what is a valid call so far, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from contextmem import InvalidInput
from contextmem.integrations.tool_loop.tools import Tool

__all__ = ["CallGrammar", "call_schema"]

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST_STRING, _LONGEST_LIST = 400, 32  # characters, items: a small model may not find the end by itself


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON schema of one call of any of `tools`."""
    return {"anyOf": [_call(tool.name, dict(tool.parameters)) for tool in tools]}


def _call(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    definitions = parameters.pop("$defs", None)
    arguments = _bounded(parameters)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    if definitions:
        schema["properties"]["arguments"] = _inlined(arguments, definitions)
    return schema


def _bounded(schema: Any) -> Any:
    """The schema with an end to every string and list, and no keys that it does not name."""
    if isinstance(schema, list):
        return [_bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    bounded = {name: _bounded(value) for name, value in schema.items()}
    if bounded.get("type") == "string" and not {"enum", "const", "format", "pattern"} & set(bounded):
        bounded.setdefault("maxLength", _LONGEST_STRING)
    if bounded.get("type") == "array":
        bounded.setdefault("maxItems", _LONGEST_LIST)
    if "properties" in bounded:
        bounded.setdefault("additionalProperties", False)
    return bounded


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with definitions in the place of references to them, which hold for one call alone."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(_bounded(definitions[schema["$ref"].rpartition("/")[2]]), definitions)
    return {name: _inlined(value, definitions) for name, value in schema.items()}


class CallGrammar(LogitsProcessor):
    """Masks every token that would make the answer something else than one call. For one answer only."""

    def __init__(self, tokenizer: Any, schema: dict[str, Any]) -> None:
        """
        Args:
            tokenizer: a fast tokenizer.
            schema: as of `call_schema`.

        Raises:
            InvalidInput: the tokenizer is not a fast one, or a schema has what the grammar cannot express.
        """
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_SPACING)
        self._matcher = LLMatcher(_vocabulary(tokenizer), grammar, log_level=0)
        self._n_read: int | None = None
        self._check()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._n_read is not None:
            self._matcher.consume_tokens(input_ids[0, self._n_read :].tolist())
            self._check()
        self._n_read = input_ids.shape[1]
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))[: len(allowed)]
        allowed[: len(mask)] = mask
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidInput(f"the calls cannot be put in a grammar: {self._matcher.get_error()}")


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any) -> Any:
    from llguidance import hf

    try:
        return hf.from_tokenizer(tokenizer)
    except ValueError as error:
        raise InvalidInput(f"constrained calls need a fast tokenizer: {error}") from None
