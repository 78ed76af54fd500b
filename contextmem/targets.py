"""From what a caller names to the segments that are meant. Nothing is guessed, and nothing means everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from contextmem.arguments import listed
from contextmem.errors import InvalidInput, SegmentNotFound
from contextmem.ledger import Ledger, Segment

__all__ = ["Target", "known", "resolved"]

Target = Segment | str | Iterable[Segment | str]


def known(ledger: Ledger, name: Segment | str) -> Segment:
    """The segment of that id, gone ones included, as this ledger has it.

    Raises:
        SegmentNotFound: another memory's segment, or an unknown id.
    """
    wanted = name.id if isinstance(name, Segment) else name
    if not isinstance(wanted, str):
        raise InvalidInput(f"a segment or its id is expected, not {type(name).__name__}. Nothing was changed.")
    if wanted not in ledger.by_id:
        raise SegmentNotFound(f"no segment {wanted!r} in this memory. Nothing was changed.")
    return ledger.by_id[wanted]


def resolved(ledger: Ledger, target: Target | None, filters: Mapping[str, Any]) -> tuple[Segment, ...]:
    """Content segments named by a target (segment, id, key, or a list of them) or by filters.

    Returns:
        Resident segments in slot order; if there is none among those meant, the records of those that are gone.

    Raises:
        InvalidInput: neither or both were given, or a frame was named.
        SegmentNotFound: nothing answers.
    """
    given = {name: value for name, value in filters.items() if value is not None and value != {}}
    if (target is None) == (not given):
        raise InvalidInput(
            "give a target or at least one filter (key, source, kind, state, metadata), not both; an empty filter never "
            "means everything. Nothing was changed."
        )
    if target is None:
        chosen = ledger.select((*ledger.gone, *ledger.content()), **given)
        if not chosen:
            raise SegmentNotFound(f"no segment matches {given}. Nothing was changed.")
    else:
        chosen = tuple(segment for name in listed(target) for segment in _named(ledger, name))
        if not chosen:
            raise InvalidInput("the list of targets is empty. Nothing was changed.")
    if any(segment.kind == "frame" for segment in chosen):
        raise InvalidInput("template frames go with the segment they belong to. Nothing was changed.")
    ids = {segment.id for segment in chosen}
    resident = tuple(segment for segment in ledger.content() if segment.id in ids)
    return resident or tuple(segment for segment in ledger.gone if segment.id in ids)


def _named(ledger: Ledger, name: Segment | str) -> tuple[Segment, ...]:
    if isinstance(name, str) and name not in ledger.by_id:
        keyed = ledger.select((*ledger.gone, *ledger.content()), key=name)
        if keyed:
            return tuple(segment for segment in keyed if segment.state == "live") or keyed
    return (known(ledger, name),)
