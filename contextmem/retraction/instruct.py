"""instruct: change nothing in the cache and tell the model to ignore the span. A baseline for evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from contextmem.ledger import Segment
from contextmem.retraction.base import Edit, Plan, register
from contextmem.state import State, check_room, extended

__all__ = ["Instruct"]

WORDING = (
    "\n\nThe passage quoted here was included by mistake and must not be used. "
    "Answer exactly as you would if it had never been part of this conversation.\n"
    '"""\n{quoted}\n"""\n\n'
)


@dataclass(frozen=True)
class Instruct:
    """Append an instruction that quotes e and says to answer as if it had never appeared.

    Removes nothing and guarantees nothing: the segment stays live and its text now stands in the context twice. It exists
    because prompting is what one would try first, so evaluations compare with it.
    """

    name: str = "instruct"

    def plan(self, edit: Edit) -> Plan:
        n_tokens = len(edit.codec.encode(_note(edit)))
        check_room(edit.backbone, edit.state.cache.next_position, n_tokens, "the instruction")
        return Plan(
            self.name,
            n_tokens,
            edit.state.n_slots,
            "none",
            "nothing was removed: the model was told to ignore the passage",
        )

    def apply(self, edit: Edit) -> State:
        text = _note(edit)
        ids = edit.codec.encode(text)
        note = Segment(
            id=edit.new_id(),
            kind="user",
            start=0,
            stop=len(ids),
            text=text,
            token_ids=ids,
            source="contextmem.instruct",
            parents=tuple(segment.id for segment in edit.targets),
        )
        return extended(edit.backbone, edit.state, (note,), chunk=edit.chunk, step=edit.step)


def _note(edit: Edit) -> str:
    return WORDING.format(quoted="\n".join(segment.text for segment in edit.targets))


register(Instruct())
