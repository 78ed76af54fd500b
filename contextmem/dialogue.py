"""Spans for the ledger: texts and the template frames round them, in the order in which they are prefilled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from contextmem.backbone import Backbone
from contextmem.codec import Codec
from contextmem.framing import Framing
from contextmem.ledger import Ledger, Segment

__all__ = ["Dialogue", "end_ids", "ids_of", "span"]


def span(segment_id: str, kind: str, token_ids: Sequence[int], **fields: Any) -> Segment:
    """A segment that has no place yet; the ledger lays it out."""
    return Segment(id=segment_id, kind=kind, start=0, stop=len(token_ids), token_ids=tuple(token_ids), **fields)


def ids_of(spans: Sequence[Segment]) -> list[int]:
    """Token ids of `spans` in order."""
    return [token for one in spans for token in one.token_ids]


@dataclass(frozen=True)
class Dialogue:
    """Puts frames round segments. The frames of an answer belong to it; those that open the dialogue to nobody.

    Attributes:
        framing: the chat template's frames.
        new_id: makes ids.
    """

    framing: Framing
    new_id: Callable[[], str]

    def opened(self, ledger: Ledger) -> tuple[Segment, ...]:
        """What must be prefilled before the first text of an empty context; nothing otherwise."""
        return () if ledger.spans else self._frame(self.framing.bare_opening)

    def system(self, text: str, token_ids: Sequence[int]) -> tuple[Segment, ...]:
        """A dialogue's beginning with a system text, up to the first user text."""
        segment = span(self.new_id(), "system", token_ids, text=text, pinned=True)
        return (*self._frame(self.framing.opening), segment, *self._frame(self.framing.after_system))

    def placed(self, segment: Segment) -> tuple[Segment, ...]:
        """A segment as it stands in the open user turn; what the assistant said or called gets a turn of its own."""
        opened, closed = self.framing.round(segment.kind)
        return (*self._frame(opened, segment.id), segment, *self._frame(closed, segment.id))

    def _frame(self, token_ids: Sequence[int], owner: str | None = None) -> tuple[Segment, ...]:
        return (span(self.new_id(), "frame", token_ids, owner=owner),) if token_ids else ()


def end_ids(backbone: Backbone, codec: Codec, framing: Framing) -> frozenset[int]:
    """Ids that end an answer: the model's and the tokenizer's end tokens, and the one that closes a turn."""
    config = getattr(backbone.core, "generation_config", None)
    declared = getattr(config, "eos_token_id", None)
    ids = set(declared if isinstance(declared, list | tuple) else [declared]) | {codec.tokenizer.eos_token_id}
    if framing.answer_close and framing.answer_close[0] in codec.control_ids:
        ids.add(framing.answer_close[0])
    return frozenset(i for i in ids if i is not None)
