"""Checks of what callers pass in: a typed error before anything is done."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from contextmem.errors import InvalidInput
from contextmem.ledger import Segment

__all__ = ["check_choice", "check_label", "listed", "plain_metadata"]


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise `InvalidInput` unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}. Nothing was changed.")


def check_label(name: str, value: Any) -> None:
    """Raise `InvalidInput` unless `value` is a non-empty string or None."""
    if value is not None and not (isinstance(value, str) and value):
        raise InvalidInput(f"{name} must be a non-empty str or None, not {value!r}. Nothing was changed.")
    if value is not None and any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidInput(f"{name} holds a lone surrogate and could not be saved. Nothing was changed.")


def plain_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A private, read-only copy that survives saving; `InvalidInput` if it is not JSON-compatible."""
    try:
        encoded = json.dumps(dict(metadata or {}), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"metadata must be JSON-compatible pairs: {error}. Nothing was changed.") from None
    return MappingProxyType(json.loads(encoded))


def listed(names: Segment | str | Iterable[Segment | str]) -> list[Segment | str]:
    """One name or several, as a list."""
    if isinstance(names, Segment | str):
        return [names]
    try:
        return list(names)
    except TypeError:
        raise InvalidInput(
            f"a segment, an id, a key or a list of them is expected, not {type(names).__name__}. Nothing was changed."
        ) from None
